//! The XDP program: drops packets that no listener would serve, before they cost a socket buffer.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, BorrowedFd},
};

use aya::programs::Xdp;

pub use self::{
    guard::{Arrivals, Guard, GuardedListener, KnownAddresses},
    limits::{GuardLimits, RateLimit},
    object::{OBJECT, PROGRAM},
    reason::GuardReason,
};
pub use crate::connection_id::IdKeys;
use crate::{
    error::{Cause, Circumstances, Error},
    loaded::Loaded,
    stacked::lower_devices,
    syscall::{Link, LinkHook, NO_DEVICE, NetworkDevice},
};

mod guard;
mod limits;
mod object;
mod reason;

/// Where XDP runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// In the device's driver, before a packet has a socket buffer.
    Native,
    /// After the driver, on socket buffers: it saves less.
    Generic,
}

/// The loaded program. Dropping it detaches it everywhere.
#[derive(Debug)]
pub struct Ingress {
    loaded: Loaded<Xdp>,
    attached: BTreeMap<String, Link>,
}

impl Ingress {
    /// Loads the program. It passes everything until it gets listeners.
    ///
    /// # Errors
    /// The kernel refuses it, mostly for lack of CAP_BPF or CAP_NET_ADMIN.
    pub fn load() -> Result<Self, Error> {
        let loaded = Loaded::new(PROGRAM, OBJECT, &[], Xdp::load)?;
        let ingress = Self { loaded, attached: BTreeMap::new() };
        ingress.guard()?.set_limits(GuardLimits::default())?;
        Ok(ingress)
    }

    /// Attaches the program to the arrivals at a device of the calling thread's namespace: in its driver, or after it
    /// if the driver does not support that. Behind the driver of a device that stands on others, the program would take
    /// packets that were joined below (GRO) for one.
    ///
    /// # Errors
    /// There is no such device, its packets have no Ethernet header (tun, WireGuard, PPP, IP in IP), which the program
    /// would misread, its driver refuses and it stands on others, another XDP program is there, or the kernel refuses.
    pub fn attach(&mut self, device: &str) -> Result<XdpMode, Error> {
        let refused = |hook, cause: Cause| Error::Attach {
            program: PROGRAM,
            device: device.to_owned(),
            hook,
            circumstances: Circumstances::now(),
            cause,
        };
        // If the kernel does not say, the current attachment stays.
        let found = NetworkDevice::find(device).map_err(|error| refused("XDP", error.into()))?;
        self.detach(device);
        let found = found.ok_or_else(|| refused("XDP", NO_DEVICE.into()))?;
        if !found.has_ethernet {
            return Err(refused("XDP", "packets of this device have no Ethernet header, which the guard needs".into()));
        }
        let program = self.loaded.program_mut().map_err(|cause| refused("XDP", cause))?;
        let fd = program.fd().map_err(|error| refused("XDP", error.into()))?.as_fd();
        let (link, mode) = match Link::attach(fd, &found, LinkHook::XdpNative) {
            Ok(link) => (link, XdpMode::Native),
            Err(error) => {
                if let Some(lower) = lower_devices(device).first() {
                    let why = format!(
                        "name the lower device instead, such as {lower}: the driver of this one refuses ({error}), and behind \
                         it, packets that were joined below would count as one"
                    );
                    return Err(refused("XDP", why.into()));
                }
                let link = Link::attach(fd, &found, LinkHook::XdpGeneric);
                (link.map_err(|error| refused("XDP, generic", taken_or(device, error)))?, XdpMode::Generic)
            }
        };
        self.attached.insert(device.to_owned(), link);
        Ok(mode)
    }

    /// Asks the kernel whether the program is on a device: another process may have detached it.
    pub fn is_attached(&self, device: &str) -> bool {
        self.attached.get(device).is_some_and(Link::is_attached)
    }

    /// Detaches the program from a device; does nothing if it is not attached there.
    pub fn detach(&mut self, device: &str) {
        self.attached.remove(device);
    }

    /// Returns the tables of the program, for this process.
    ///
    /// # Errors
    /// No more file descriptors can be opened.
    pub fn guard(&self) -> Result<Guard, Error> {
        Guard::from_fds(guard::TABLES.owned_fds(&self.loaded.ebpf)?)
    }

    /// Returns the file descriptors of the tables, for a process that may use them without any right: there,
    /// [`Guard::from_fds`] takes them in this order.
    ///
    /// # Errors
    /// The object lacks a table.
    pub fn tables(&self) -> Result<Vec<BorrowedFd<'_>>, Error> {
        guard::TABLES.fds(&self.loaded.ebpf)
    }

    /// Returns the loaded program, for trials.
    pub(crate) fn program(&self) -> Option<&Xdp> {
        self.loaded.program()
    }
}

/// Explains why the kernel attached nothing behind the driver: a device has one XDP program, which is in the other mode
/// (EEXIST) or in this one (EBUSY) (`dev_xdp_attach`, net/core/dev.c).
fn taken_or(device: &str, error: io::Error) -> Cause {
    match error.raw_os_error() {
        Some(libc::EEXIST | libc::EBUSY) => {
            format!("another XDP program is on {device}: remove it (`ip link show {device}`, `bpftool net`)").into()
        }
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_program_on_the_device_is_told_from_other_refusals() {
        let said = |code| taken_or("c0", io::Error::from_raw_os_error(code)).to_string();
        for code in [libc::EEXIST, libc::EBUSY] {
            assert_eq!(said(code), "another XDP program is on c0: remove it (`ip link show c0`, `bpftool net`)");
        }
        assert_eq!(said(libc::EOPNOTSUPP), "Operation not supported (os error 95)");
    }
}
