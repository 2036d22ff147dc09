//! What the kernel enforces for this daemon: its programs' tables are filled from the policy, the listeners and the secret.

use std::{net::SocketAddr, num::NonZeroU64};

use anyhow::{Context as _, Result};
use bpf::{
    egress::{Classes, Terms},
    ingress::Guard,
    mark::{Direction, Mark, Tag},
};
use config::policy::Policy;

use crate::{
    host_addresses::HostAddresses,
    monitor::{
        Monitor,
        rights::{self, Rights},
    },
    quic::connection_id::Secret,
    workers,
};

/// The kernel's part, in force until this is dropped.
pub struct Enforcement {
    classes: Option<Classes>,
    guard: Option<Guard>,
    _monitor: Monitor,
}

impl Enforcement {
    /// Starts the monitor, has it attach to every device what the configuration wants, and gives up this process's own
    /// rights. What cannot be had is logged as a warning that says what is not enforced, and the daemon goes on without.
    /// To be called before any other thread exists; returns `None` where no device is named or no monitor starts.
    #[must_use]
    pub fn start(config: &config::kernel::Kernel) -> Option<Self> {
        if config.devices.is_empty() {
            return None;
        }
        let monitor = Monitor::start();
        let monitor =
            monitor.inspect_err(|error| tracing::warn!("nothing is enforced in the kernel: {error:#}")).ok()?;
        if let Err(error) = rights::keep(Rights::DATA) {
            tracing::warn!("this process keeps all its rights: {error}");
        }
        let tag = Tag::new(config.mark_tag).unwrap_or_default();
        let classes = config.egress.then(|| monitor.load_egress(tag)).and_then(|loaded| {
            loaded.inspect_err(|error| tracing::warn!("classes are not marked, paced and counted: {error:#}")).ok()
        });
        let guard = config
            .ingress
            .then(|| monitor.load_ingress())
            .and_then(|loaded| loaded.inspect_err(|error| tracing::warn!("listeners have no guard: {error:#}")).ok());
        for device in &config.devices {
            let device = device.as_str();
            let has_fq = config.manage_qdisc && report(device, "fq", monitor.set_fq(device));
            if classes.is_some() {
                report(device, "egress", monitor.attach_egress(device, has_fq));
            }
            if guard.is_some() {
                report(device, "ingress", monitor.attach_ingress(device));
            }
        }
        Some(Self { classes, guard, _monitor: monitor })
    }

    /// Puts a policy in force: all of it, or, after an error, nothing.
    ///
    /// # Errors
    /// The kernel refuses an update of the tables.
    pub fn publish(&mut self, policy: &Policy) -> Result<()> {
        self.classes.as_mut().map_or(Ok(()), |classes| classes.publish(terms(policy))).context("the kernel refuses it")
    }

    /// Says whether the root queueing discipline of a device is `fq`.
    ///
    /// # Errors
    /// There is no such device, or the kernel refuses the update.
    pub fn set_fq(&mut self, device: &str, has_fq: bool) -> Result<()> {
        Ok(self.classes.as_mut().map_or(Ok(()), |classes| classes.set_fq(device, has_fq))?)
    }

    /// Tells the guard of the daemon's listeners, by the addresses that this host has now, and of the connection IDs that
    /// are in use now. To be repeated: addresses change, and so do keys, though each is known a week ahead.
    ///
    /// # Errors
    /// The kernel refuses an update of the tables.
    pub fn guard(&mut self, listeners: &[SocketAddr], addresses: &HostAddresses, secret: &Secret) -> Result<()> {
        let Some(guard) = &mut self.guard else { return Ok(()) };
        guard.set_keys(&workers::keys(secret))?;
        let assigned = addresses.list();
        let of = |listener: &SocketAddr| -> Vec<_> {
            if !listener.ip().is_unspecified() {
                return vec![*listener];
            }
            let family = assigned.iter().filter(|ip| ip.is_ipv4() == listener.is_ipv4());
            family.map(|ip| SocketAddr::new(*ip, listener.port())).collect()
        };
        Ok(guard.listen(listeners.iter().flat_map(of))?)
    }
}

/// Says at start what is in force on a device; returns whether it is.
fn report(device: &str, part: &str, outcome: Result<String>) -> bool {
    match &outcome {
        Ok(how) => tracing::info!(device, part, how, "enforced in the kernel"),
        Err(error) => tracing::warn!(device, part, "not enforced in the kernel: {error:#}"),
    }
    outcome.is_ok()
}

/// What the kernel holds each class to.
fn terms(policy: &Policy) -> impl Iterator<Item = (Mark, Terms)> {
    (0..=u8::MAX).zip(&policy.classes).flat_map(|(class, of)| {
        let up = Terms { dscp: of.dscp, ..capped(of.rate_up) };
        [(Direction::Up, up), (Direction::Down, capped(of.rate_down))]
            .map(|(direction, terms)| (Mark { direction, class }, terms))
    })
}

/// A rate as the kernel's guard rail. `sched` keeps the rate itself, and counts payloads; here headers count as well, so
/// without a margin a second queue would build up behind the one that has an order.
fn capped(bytes_per_sec: Option<u64>) -> Terms {
    const MARGIN: u64 = 4;
    const BURST_NS: u64 = 10_000_000;
    let with_margin = bytes_per_sec.and_then(|rate| NonZeroU64::new(rate.saturating_add(rate / MARGIN)));
    Terms { bytes_per_sec: with_margin, burst_ns: BURST_NS, ..Terms::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_its_terms_in_both_directions() {
        let text = "[class.voice]\nrate_up = \"8 Mbit/s\"\nrate_down = \"80 Mbit/s\"\ndscp = 46";
        let policy = config::Config::from_toml(text).unwrap().policy;
        let terms: Vec<_> = terms(&policy).collect();
        assert_eq!(terms.len(), 4, "two classes, two directions");
        let of = |direction, class| {
            let found = terms.iter().find(|(mark, _)| *mark == Mark { direction, class });
            found.map(|(_, terms)| (terms.bytes_per_sec.map(NonZeroU64::get), terms.dscp)).unwrap()
        };
        assert_eq!(of(Direction::Up, 1), (Some(1_250_000), Some(46)), "a quarter above, for headers");
        assert_eq!(of(Direction::Down, 1), (Some(12_500_000), None), "the DSCP is that of packets to targets");
        assert_eq!(of(Direction::Up, 0), (None, None));
    }
}
