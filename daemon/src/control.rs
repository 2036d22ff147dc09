//! The requests that paced answers while it runs, and the callers that may make them. Doors are adapters over one
//! [`Control`]; they hold no logic.
//!
//! | module | contents |
//! |---|---|
//! | [`caller`] | the caller of a control method, and what the caller may do |
//! | [`grpc`] | the door for gRPC, on a Unix socket and over TCP |
//! | [`dbus`] | the door for D-Bus |
//! | `open` | open tunnels and connections: lists, changes |
//! | [`stats`] | statistics, for callers that watch them |
//! | `totals` | sums over open connections and tunnels, and the traffic of classes |
//! | `recordings` | records of packets and connections |
//! | [`events`] | events, for subscribers |
//! | [`doors`] | opens the doors that the configuration names |

use std::{
    net::SocketAddr,
    ops::Deref,
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use config::{Config, forward::Forward, proxy::Proxy, serve::Serve};
use relay::Relay;
use serving::in_force::GatewayInForce;
use tokio::{
    sync::{Semaphore, broadcast, mpsc, oneshot},
    task::spawn_blocking,
    time::{sleep, timeout},
};

pub use self::{
    caller::{Bearers, Caller, Peer, Writers},
    error::{Error, ErrorKind},
    events::{ACCESS, Event, EventSubscription, Happening},
    open::Filter,
    stats::{ClassStats, Statistics},
    view::{ConnectionView, ListedForward, PAGE, Page, PartView, TunnelView, UplinkView},
};
use crate::{
    certificates::Certificate,
    parts::Parts,
    policy::{InForce, Policies, PolicyRefusal, Revision, Submission, Submitted},
};

pub mod caller;
pub mod dbus;
pub mod doors;
pub mod error;
pub mod events;
pub mod grpc;
mod open;
mod recordings;
pub mod stats;
mod totals;
pub mod view;

/// Facts about the configuration in force and about this machine.
#[derive(Clone, Debug)]
pub struct Facts {
    /// When the daemon started.
    pub started: SystemTime,
    /// The listeners of the relay.
    pub listeners: Vec<String>,
    /// The gateway's own listeners.
    pub gateway_listeners: Vec<String>,
    /// The edge's forwards, proxies and served models.
    pub forwards: Vec<ListedForward>,
    /// How many threads move packets.
    pub workers: u8,
    /// What the kernel and this process's own rights allow.
    pub own_features: bpf::Capabilities,
    /// The certificates in use.
    pub certificates: Vec<Certificate>,
}

impl Facts {
    /// Takes the facts from a configuration and the start, and probes what the kernel allows. `workers` may be fewer than configured.
    #[must_use]
    pub fn new(config: &Config, workers: u8, certificates: &[Certificate]) -> Self {
        let (started, own_features, certificates) = (SystemTime::now(), bpf::probe(), certificates.to_vec());
        let (listeners, gateway_listeners, forwards) = Default::default();
        Self { started, listeners, gateway_listeners, forwards, workers, own_features, certificates }.after(config)
    }

    /// Returns whether the configuration names anything to listen on, in any role.
    #[must_use]
    pub fn has_listeners(&self) -> bool {
        let Self { listeners, gateway_listeners, forwards, .. } = self;
        !(listeners.is_empty() && gateway_listeners.is_empty() && forwards.is_empty())
    }

    /// The same facts for another configuration.
    fn after(&self, config: &Config) -> Self {
        let listeners = config.relay.iter().flat_map(|relay| &relay.listeners);
        let fronts = config.gateway.iter().flat_map(|gateway| &gateway.listeners);
        let listed = |listen: SocketAddr, of: &str, target: Option<String>, through: String| ListedForward {
            listen: format!("{listen} ({of})"),
            target,
            through,
        };
        let forward = |forward: &Forward| {
            let Forward { listen, protocol, target, uplink, .. } = forward;
            listed(*listen, &protocol.as_str().to_uppercase(), Some(target.to_string()), uplink.through())
        };
        let proxy = |proxy: &Proxy| listed(proxy.listen, "proxy", None, proxy.uplink.through());
        let serve = |serve: &Serve| listed(serve.listen, "models", None, serve.through());
        let proxies = config.proxies.iter().map(proxy).chain(config.serves.iter().map(serve));
        Self {
            listeners: listeners.map(|listener| listener.address.to_string()).collect(),
            gateway_listeners: fronts.map(|listener| listener.address.to_string()).collect(),
            forwards: config.forwards.iter().map(forward).chain(proxies).collect(),
            ..self.clone()
        }
    }
}

/// Asks the daemon to read its configuration again.
#[derive(Debug)]
pub struct Reload {
    /// The name of the caller.
    pub author: String,
    /// Receives the outcome.
    pub done: oneshot::Sender<Result<(), String>>,
}

/// How often the end of a trial is looked for, and a refused return from a policy on trial is tried again.
const STEP: Duration = Duration::from_secs(1);

/// The control plane.
pub struct Control {
    policies: Arc<Policies>,
    relay: Option<Arc<Relay>>,
    gateway: Arc<GatewayInForce>,
    parts: Arc<Parts>,
    facts: ArcSwap<Facts>,
    reloads: mpsc::Sender<Reload>,
    events: broadcast::Sender<Event>,
    /// Places for calls that work with policies.
    policy_calls: Arc<Semaphore>,
    watching: stats::Watching,
}

/// The control plane as the doors hold it, without its type: otherwise, the compiler checks for many calls of the doors that all state of
/// the daemon may be shared between threads, which takes a third of this crate's compilation.
pub type SharedControl = Arc<dyn Deref<Target = Control> + Send + Sync>;

/// How many calls may work with policies at once.
const POLICY_CALLS: usize = 128;

impl Control {
    /// Returns the control plane of a daemon, which reads its configuration again on each message to `reloads`.
    #[must_use]
    pub fn new(
        policies: Arc<Policies>,
        (relay, gateway): (Option<Arc<Relay>>, Arc<GatewayInForce>),
        parts: Arc<Parts>,
        facts: Facts,
        reloads: mpsc::Sender<Reload>,
    ) -> Arc<Self> {
        Arc::new(Self {
            policies,
            relay,
            gateway,
            parts,
            facts: ArcSwap::from_pointee(facts),
            reloads,
            events: broadcast::channel(events::QUEUE).0,
            policy_calls: Arc::new(Semaphore::new(POLICY_CALLS)),
            watching: stats::Watching::default(),
        })
    }

    /// Reports each policy that takes effect as an event. If several follow each other at once, it may report only the last
    /// one. Never returns.
    pub async fn follow_policies(&self) {
        let mut policies = self.policies.watch();
        let mut last = policies.borrow_and_update().revision.number;
        while policies.changed().await.is_ok() {
            let revision = policies.borrow_and_update().revision.clone();
            let Revision { number, author, origin, .. } = &*revision;
            let told = std::mem::replace(&mut last, *number);
            if told != *number {
                self.tell("policy", format!("revision {number} is in force ({origin}, by {author})"));
            }
        }
    }

    /// Gives up each policy on trial that is not confirmed in time; never returns. It does not depend on the call that
    /// began the trial, because the policy takes effect even if its caller leaves before the answer.
    pub async fn expire_trials(&self) {
        let mut in_force = self.policies.watch();
        // A refusal is logged once, although the return is tried again after each step.
        let mut told = None;
        loop {
            let (number, trial) = {
                let in_force = in_force.borrow_and_update();
                (in_force.revision.number, in_force.trial)
            };
            let Some(trial) = trial else {
                // It cannot be closed, because this control plane has the sender.
                _ = in_force.changed().await;
                continue;
            };
            // In steps, because timers stand still while the machine is suspended.
            let left = trial.at.saturating_duration_since(self.policies.now());
            if timeout(left.min(STEP), in_force.changed()).await.is_ok() || left > STEP {
                continue;
            }
            let policies = self.policies.clone();
            match spawn_blocking(move || policies.expire(number)).await {
                Ok(Ok(_)) => continue,
                Ok(Err(refusal)) if told.as_ref() != Some(&(number, refusal.clone())) => {
                    tracing::error!("revision {number} was not confirmed, but cannot be rolled back yet: {refusal}");
                    told = Some((number, refusal));
                }
                // The same refusal, or a panic, which was logged already.
                _ => {}
            }
            // The refusal of the previous policy may be temporary.
            sleep(STEP).await;
        }
    }

    /// Tells subscribers what has happened.
    pub(crate) fn tell(&self, kind: &'static str, message: String) {
        // There may be no subscriber.
        _ = self.events.send(Event { time: SystemTime::now(), kind, message });
    }

    /// Subscribes to events of these kinds, or of all if there are none. Records have addresses while `reader` is one peer that may
    /// see them.
    #[must_use]
    pub fn events(&self, kinds: &[String], reader: Option<Peer>) -> EventSubscription {
        let (own, paths) = (self.events.subscribe(), &self.parts.edge.uplinks.changes);
        EventSubscription::new(own, &self.parts.access, paths, kinds, reader)
    }

    /// Returns the policy in force.
    #[must_use]
    pub fn in_force(&self) -> InForce {
        self.policies.in_force()
    }

    /// Returns a revision by its number, 0 for the one in force; and when it expires, if it is in force and on trial.
    ///
    /// # Errors
    /// It is forgotten, or never existed.
    pub fn revision(&self, number: u64) -> Result<(Arc<Revision>, Option<SystemTime>), Error> {
        let in_force = self.in_force();
        if number == 0 || number == in_force.revision.number {
            let confirm_by = in_force.confirm_by();
            return Ok((in_force.revision, confirm_by));
        }
        Ok((self.policies.revision(number)?, None))
    }

    /// Returns the revisions that a caller can go back to, and the one in force, oldest first.
    #[must_use]
    pub fn revisions(&self) -> Arc<[Arc<Revision>]> {
        self.policies.revisions()
    }

    /// Returns the facts about the configuration in force and about this machine.
    #[must_use]
    pub fn facts(&self) -> Arc<Facts> {
        self.facts.load_full()
    }

    /// Returns whether the daemon is ending: it accepts no new work.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.parts.ready.is_draining()
    }

    /// Updates the facts for another configuration and its certificates.
    pub fn reloaded(&self, config: &Config, certificates: &[Certificate]) {
        let facts = self.facts().after(config);
        self.facts.store(Arc::new(Facts { certificates: certificates.to_vec(), ..facts }));
    }

    /// Returns what the kernel enforces, by device and part.
    #[must_use]
    pub fn enforcement(&self) -> Vec<PartView> {
        let parts = self.parts.kernel.in_force.list().into_iter();
        let view = |((device, part), outcome): ((String, &'static str), Result<String, String>)| {
            let is_enforced = outcome.is_ok();
            let (Ok(detail) | Err(detail)) = outcome;
            PartView { device, part, is_enforced, detail }
        };
        parts.map(view).collect()
    }

    /// Returns what the kernel and the rights of paced's processes allow.
    #[must_use]
    pub fn features(&self) -> bpf::Capabilities {
        self.parts.kernel.in_force.features(&self.facts().own_features)
    }

    /// Returns the parts of the daemon.
    #[must_use]
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Sets the policy with the caller as its author, if the expected revision is in force, 0 for any.
    ///
    /// # Errors
    /// The caller may not write, or the policy is refused.
    pub async fn set_policy(&self, caller: &Caller, submission: Submission) -> Result<Submitted, Error> {
        let author = caller.to_write()?;
        let expected = submission.expected.filter(|number| *number > 0);
        let submission = Submission { author, expected, ..submission };
        self.work(move |policies| policies.submit(submission)).await
    }

    /// Confirms the policy on trial.
    ///
    /// # Errors
    /// The caller may not write, or revision `number` is not on trial.
    pub async fn confirm_policy(&self, caller: &Caller, number: u64, save: bool) -> Result<Arc<Revision>, Error> {
        let author = caller.to_write()?;
        let revision = self.work(move |policies| policies.confirm(number, save)).await?;
        self.tell("policy", format!("revision {number} was confirmed by {author}"));
        Ok(revision)
    }

    /// Goes back to an earlier policy, 0 for the one before, if revision `expected` is in force, 0 for any.
    ///
    /// # Errors
    /// The caller may not write, there is no such revision, or the expected one is not in force. Or `number` is 0 right
    /// after the end of a trial.
    pub async fn roll_back(&self, caller: &Caller, number: u64, expected: u64, save: bool) -> Result<Submitted, Error> {
        let author = caller.to_write()?;
        let [to, expected] = [number, expected].map(|number| Some(number).filter(|number| *number > 0));
        self.work(move |policies| policies.roll_back(to, expected, &author, save)).await
    }

    /// Forgets the saved policy; returns whether there was one.
    ///
    /// # Errors
    /// The caller may not write, or the state folder does not allow it.
    pub async fn forget_saved(&self, caller: &Caller) -> Result<bool, Error> {
        caller.to_write()?;
        self.work(Policies::forget_saved).await
    }

    /// Works with the policies on a thread that may wait: for the disk, the kernel, or another writer. At most
    /// [`POLICY_CALLS`] calls run at once, because each may keep the text of a policy in memory.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Policies) -> Result<T, PolicyRefusal> + Send + 'static,
    ) -> Result<T, Error> {
        let place = self.policy_calls.clone().try_acquire_owned().map_err(|_| Error::Busy)?;
        let policies = self.policies.clone();
        // The work goes on if the caller leaves, and keeps its place.
        let working = spawn_blocking(move || {
            let done = work(&policies);
            drop(place);
            done
        });
        Ok(working.await.map_err(|_| Error::Ending)??)
    }

    /// Makes the daemon read the configuration again; returns the revision in force.
    ///
    /// # Errors
    /// The caller may not write, or the configuration is refused.
    pub async fn reload(&self, caller: &Caller) -> Result<u64, Error> {
        let author = caller.to_write()?;
        let (done, outcome) = oneshot::channel();
        self.reloads.send(Reload { author, done }).await.map_err(|_| Error::Ending)?;
        outcome.await.map_err(|_| Error::Ending)?.map_err(Error::Reload)?;
        Ok(self.policies.current().number)
    }
}

#[cfg(test)]
mod tests;
