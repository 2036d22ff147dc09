//! The door for D-Bus: the interface `org.paced.Control1` of the object `/org/paced/Paced1`, under the name
//! `org.paced.Paced1`.
//!
//! The bus bounds what waits for a slow reader (dbus-daemon(1), `<limit>`), and identifies the caller. Polkit(8) may permit further
//! callers to write. [`waiting`] bounds the calls that wait for either.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::StreamExt as _;
use role::limits::GaugePlace;
use tokio::sync::oneshot;
use uplink::Destination;
use zbus::{
    Connection, OwnedVariant,
    fdo::{DBusProxy, NameOwnerChangedStream},
    interface,
    message::Header,
    names::UniqueName,
    object_server::SignalEmitter,
};

pub use self::bus::keep;
use self::{
    denial::Denial,
    rows::{
        ClassRow, ConnectionRow, EngineRow, PathRow, RequestRow, RevisionRow, TunnelRow, UplinkRow, class_row,
        connection_row, engine_row, micros, path_row, request_row, revision_row, tunnel_row, uplink_row,
    },
    submission::submission,
    waiting::{WaitingCalls, is_authorized},
    watchers::{MAX_WATCHERS, Watchers},
};
use super::{
    Caller, Error, Filter, PAGE, PartView, SharedControl, Writers,
    stats::{Statistics, stats_ticks},
};
use crate::policy::check_length;

mod bus;
mod denial;
mod rows;
mod submission;
mod waiting;
mod watchers;
#[cfg(test)]
mod wire;

/// The interface and its handlers.
struct Door {
    control: SharedControl,
    writers: Writers,
    watchers: Arc<Watchers>,
    waiting: WaitingCalls,
}

impl Door {
    /// Identifies the caller of a call with short arguments.
    async fn caller(&self, header: &Header<'_>, connection: &Connection) -> Result<Caller, Denial> {
        let _place = self.waiting.short(header)?;
        self.identify(header, connection).await
    }

    /// The same for a call that changes something: asks polkit about a caller that may not write by its user.
    async fn writer(&self, header: &Header<'_>, connection: &Connection) -> Result<Caller, Denial> {
        let place = self.waiting.short(header)?;
        self.authorize(header, connection, place).await
    }

    /// Waits for an answer of the bus or of polkit, but only while the door is open: a call that waits keeps the connection to the bus
    /// open, and would change something after the door is shut.
    async fn while_open<T>(&self, answer: impl Future<Output = T>) -> Result<T, Denial> {
        tokio::select! {
            biased;
            () = self.watchers.all_ended() => Err(Denial::Failed("paced has left the bus".into())),
            answer = answer => Ok(answer),
        }
    }

    /// Identifies the caller by what the bus knows of it.
    async fn identify(&self, header: &Header<'_>, connection: &Connection) -> Result<Caller, Denial> {
        let uid = self.while_open(uid_of(sender(header)?, connection)).await??;
        let writers = self.writers.clone();
        let found = tokio::task::spawn_blocking(move || writers.peer(uid).caller()).await;
        found.map_err(|_| Denial::Failed(Error::Ending.to_string()))
    }

    /// Identifies the caller, for which the call has a `place`. If the caller may not write by its user, asks polkit whether it may.
    async fn authorize(
        &self,
        header: &Header<'_>,
        connection: &Connection,
        place: GaugePlace,
    ) -> Result<Caller, Denial> {
        let mut caller = self.identify(header, connection).await?;
        drop(place);
        if !caller.may_write {
            let _places = self.waiting.decision(&caller.name)?;
            let authorized = self.while_open(is_authorized(header, connection)).await?;
            caller.may_write = authorized.unwrap_or_else(|error| {
                tracing::debug!("polkit did not authorise {}: {error:#}", caller.name);
                false
            });
        }
        Ok(caller)
    }
}

/// Asks the bus for the user of a caller.
async fn uid_of(caller: &UniqueName<'_>, connection: &Connection) -> zbus::Result<u32> {
    let proxy = DBusProxy::new(connection).await?;
    Ok(proxy.get_connection_unix_user(caller.clone().into()).await?)
}

fn sender<'h>(header: &'h Header<'_>) -> Result<&'h UniqueName<'h>, Denial> {
    header.sender().ok_or_else(|| Denial::AccessDenied("the caller is unknown".into()))
}

#[interface(name = "org.paced.Control1")]
impl Door {
    /// Returns a revision of the policy, 0 for the one in force: its number, its TOML text, its author, its origin, and
    /// when it took effect, in microseconds since 1970.
    #[zbus(out_args("number", "text", "author", "origin", "since_us"))]
    async fn get_policy(&self, revision: u64) -> Result<(u64, String, String, String, u64), Denial> {
        let (found, _) = self.control.revision(revision)?;
        let since_us = micros(found.since);
        Ok((found.number, found.text.clone(), found.author.clone(), found.origin.to_string(), since_us))
    }

    /// Lists the revisions of the policy that are kept, the oldest first: number, author, origin, when it took effect, in microseconds
    /// since 1970, and what it changed, as a unified diff.
    #[zbus(out_args("revisions"))]
    async fn list_revisions(&self) -> Result<Vec<RevisionRow>, Denial> {
        Ok(self.control.revisions().iter().map(|found| revision_row(found)).collect())
    }

    /// Puts a policy in force, everywhere or, if it is refused, nowhere; returns its revision and its changes, as a
    /// unified diff. Options: `expected_revision` (t; 0 for any), `dry_run` (b), `confirm_within_s` (t; 0 for no trial),
    /// `save` (b).
    #[zbus(out_args("revision", "diff"))]
    async fn set_policy(
        &self,
        text: String,
        options: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(u64, String), Denial> {
        let place = self.waiting.long(&header)?;
        // A text that is too long is refused at once, and does not wait until the caller is identified.
        check_length(&text).map_err(Error::from)?;
        let submission = submission(text, options)?;
        let caller = self.authorize(&header, connection, place).await?;
        let accepted = self.control.set_policy(&caller, submission).await?;
        Ok((accepted.revision.number, accepted.revision.diff.clone()))
    }

    /// Ends the trial of a revision: it stays in force.
    async fn confirm_policy(
        &self,
        revision: u64,
        save: bool,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), Denial> {
        let caller = self.writer(&header, connection).await?;
        self.control.confirm_policy(&caller, revision, save).await?;
        Ok(())
    }

    /// Puts an earlier revision in force again, 0 for the one before; returns its new number.
    #[zbus(out_args("revision"))]
    async fn rollback_policy(
        &self,
        revision: u64,
        save: bool,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<u64, Denial> {
        let caller = self.writer(&header, connection).await?;
        Ok(self.control.roll_back(&caller, revision, 0, save).await?.revision.number)
    }

    /// Forgets the saved policy; returns whether there was one.
    #[zbus(out_args("forgotten"))]
    async fn forget_saved_policy(
        &self,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<bool, Denial> {
        let caller = self.writer(&header, connection).await?;
        Ok(self.control.forget_saved(&caller).await?)
    }

    /// Reads the configuration's files again, and returns the revision that is then in force.
    #[zbus(out_args("revision"))]
    async fn reload(
        &self,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<u64, Denial> {
        let caller = self.writer(&header, connection).await?;
        Ok(self.control.reload(&caller).await?)
    }

    /// Lists at most 1000 tunnels with an ID above `after`.
    #[zbus(out_args("tunnels"))]
    async fn list_tunnels(
        &self,
        after: u64,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<Vec<TunnelRow>, Denial> {
        let caller = self.caller(&header, connection).await?;
        let tunnels = self.control.tunnels(&caller, &Filter::default(), after, PAGE).rows;
        Ok(tunnels.into_iter().map(tunnel_row).collect())
    }

    /// Lists the relays that the edge uses: host and port, open connections, connections made, attempts that failed, the error of the
    /// last attempt if it failed or the relay refused the credentials (empty for readers), and the names of the path and of the hop
    /// to it (empty without one).
    #[zbus(out_args("uplinks"))]
    async fn list_uplinks(
        &self,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<Vec<UplinkRow>, Denial> {
        let caller = self.caller(&header, connection).await?;
        Ok(self.control.uplinks(&caller).into_iter().map(uplink_row).collect())
    }

    /// Lists the paths of the edge: name, hop that it leads through, state ("up", "slow", "silent" or "down"), smoothed round trip in
    /// microseconds, bytes per second that it is taken to carry and that go over it, packets sent and lost, tunnels and requests on
    /// it, UDP tunnels that went on over another, whether an operator has chosen it, shortest round trip in microseconds, relays, IDs
    /// of connections, requests for models on it, and how many open tunnels and requests of each class.
    #[zbus(out_args("paths"))]
    async fn list_paths(
        &self,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<Vec<PathRow>, Denial> {
        self.caller(&header, connection).await?;
        Ok(self.control.paths().into_iter().map(path_row).collect())
    }

    /// Lists at most 1000 connections of clients with an ID above `after`: ID, user, client (empty for readers), listener,
    /// tunnels, smoothed round trip in microseconds (0 if there was none), bytes sent to the client and received from it,
    /// and packets sent and lost.
    #[zbus(out_args("connections"))]
    async fn list_connections(
        &self,
        after: u64,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<Vec<ConnectionRow>, Denial> {
        let caller = self.caller(&header, connection).await?;
        let connections = self.control.client_connections(&caller, after, PAGE).rows;
        Ok(connections.into_iter().map(connection_row).collect())
    }

    /// Lists the classes in each role ("relay" or "edge"), with counters of their traffic since the start: class, role, open tunnels,
    /// payloads and bytes sent, how long sent payloads had waited, in microseconds in all, payloads sent after their deadline, dropped
    /// because the queue was full, because they were late, and because they had waited too long, streams that expired, and packets of the
    /// class in both roles that were handed to the kernel late.
    #[zbus(out_args("classes"))]
    async fn list_classes(&self) -> Vec<ClassRow> {
        self.control.classes().iter().map(class_row).collect()
    }

    /// Sends the signal `Stats` to the caller, at once and then every `interval_ms` (100 to 3600000; 0 means every second), until the
    /// caller calls `UnwatchStats` or leaves the bus. Another call changes the interval. At most 32 callers may watch at once.
    async fn watch_stats(
        &self,
        interval_ms: u64,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
        #[zbus(signal_emitter)] emitter: SignalEmitter<'_>,
    ) -> Result<(), Denial> {
        let name = sender(&header)?;
        let proxy = DBusProxy::new(connection).await?;
        let name_lost = proxy.receive_name_owner_changed_with_args(&[(0, name.as_str())]).await?;
        // The bus is asked only now whether the caller is still there, so that it then reports the caller's end.
        proxy.get_connection_unix_user(name.clone().into()).await.map_err(zbus::Error::from)?;
        let end = self.watchers.begin(name.as_str());
        let end = end.ok_or_else(|| Denial::Failed(format!("{MAX_WATCHERS} other callers watch statistics")))?;
        let interval = Some(Duration::from_millis(interval_ms)).filter(|interval| !interval.is_zero());
        let emitter = emitter.set_destination(name.clone().into()).into_owned();
        tokio::spawn(watch(self.control.clone(), emitter, interval, name_lost, end));
        Ok(())
    }

    /// Ends the caller's signals from `WatchStats`. Returns whether there were any.
    #[zbus(out_args("ended"))]
    async fn unwatch_stats(&self, #[zbus(header)] header: Header<'_>) -> Result<bool, Denial> {
        Ok(self.watchers.end(sender(&header)?.as_str()))
    }

    /// Lists the engines of the gateway: model, URL (empty for readers), state ("ready", "untried", "ejected", "refusing" or "down"),
    /// its requests in flight and their limit, requests of other clients by its own report, requests that wait for any engine of the
    /// model, how many it answered and failed, and its last error (empty for readers).
    #[zbus(out_args("engines"))]
    async fn list_engines(
        &self,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<Vec<EngineRow>, Denial> {
        let caller = self.caller(&header, connection).await?;
        Ok(self.control.engines(&caller).into_iter().map(engine_row).collect())
    }

    /// Lists at most 1000 requests for models with an ID above `after` that are served now: ID, user, class, model, stage
    /// ("arriving", "waiting" or "at work"), when it came, in microseconds since 1970, its budget in milliseconds (0 for none),
    /// and tokens that have passed, in all and a second.
    #[zbus(out_args("requests"))]
    async fn list_requests(&self, after: u64) -> Vec<RequestRow> {
        self.control.requests(after, PAGE).rows.into_iter().map(request_row).collect()
    }

    /// Ends a tunnel.
    async fn close_tunnel(
        &self,
        tunnel: u64,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), Denial> {
        let caller = self.writer(&header, connection).await?;
        Ok(self.control.close_tunnel(&caller, tunnel)?)
    }

    /// Gives a tunnel a class regardless of the rules; an empty class lets the rules decide again.
    async fn set_tunnel_class(
        &self,
        tunnel: u64,
        class: String,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), Denial> {
        let caller = self.writer(&header, connection).await?;
        self.control.set_tunnel_class(&caller, tunnel, class)?;
        Ok(())
    }

    /// Moves the edge's UDP tunnels to a relay of the configuration, named by host and port, and opens new ones there. An empty name
    /// brings back the order of preference and the placement of classes. Returns how many UDP tunnels move.
    #[zbus(out_args("tunnels"))]
    async fn move_edge(
        &self,
        relay: &str,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<u64, Denial> {
        let caller = self.writer(&header, connection).await?;
        let to = (!relay.is_empty()).then(|| Destination::Relay(relay.to_owned()));
        Ok(self.control.move_edge(&caller, to.as_ref()).await? as u64)
    }

    /// Moves the edge's UDP tunnels to a path of the configuration, by its name, and opens new ones there. An empty name brings back the
    /// order of preference and the placement of classes. Returns how many UDP tunnels move.
    #[zbus(out_args("tunnels"))]
    async fn move_edge_to_path(
        &self,
        path: &str,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<u64, Denial> {
        let caller = self.writer(&header, connection).await?;
        let to = (!path.is_empty()).then(|| Destination::Path(path.to_owned()));
        Ok(self.control.move_edge(&caller, to.as_ref()).await? as u64)
    }

    /// The version of paced.
    #[zbus(property(emits_changed_signal = "const"))]
    async fn version(&self) -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    /// The revision in force.
    #[zbus(property)]
    async fn revision(&self) -> u64 {
        self.control.in_force().revision.number
    }

    /// The policy in force, in TOML.
    #[zbus(property(emits_changed_signal = "invalidates"))]
    async fn policy(&self) -> String {
        self.control.in_force().revision.text.clone()
    }

    /// When the revision in force is given up unless it is confirmed before, in microseconds since 1970; 0 if it is not on trial.
    #[zbus(property)]
    async fn confirm_by_us(&self) -> u64 {
        self.control.in_force().confirm_by().map_or(0, micros)
    }

    /// Whether a saved policy takes precedence over the files.
    #[zbus(property)]
    async fn saved(&self) -> bool {
        self.control.in_force().is_saved
    }

    /// What the kernel enforces: for each device and part, whether it does, and how, or why not.
    #[zbus(property(emits_changed_signal = "false"))]
    async fn kernel(&self) -> Vec<(String, String, bool, String)> {
        let row = |PartView { device, part, is_enforced, detail }| (device, part.to_owned(), is_enforced, detail);
        self.control.enforcement().into_iter().map(row).collect()
    }

    /// How many connections are open: of clients, and to the relays that the edge uses.
    #[zbus(property(emits_changed_signal = "false"))]
    async fn connections(&self) -> u64 {
        self.control.counts().0
    }

    /// How many tunnels are open.
    #[zbus(property(emits_changed_signal = "false"))]
    async fn tunnels(&self) -> u64 {
        self.control.counts().1
    }

    /// A tunnel ended ("tunnel"), a request was refused ("refusal"), a request for a model ended ("model"), or there are no
    /// records of some ("omitted"): the keys and values of the access log, without addresses.
    #[zbus(signal)]
    async fn access(
        emitter: &SignalEmitter<'_>,
        event: &str,
        fields: HashMap<String, zbus::Variant<'_>>,
    ) -> zbus::Result<()>;

    /// Something happened: "policy", "reload", "tunnel", "path", or "lost" for events that came too fast to be sent.
    #[zbus(signal)]
    async fn event(emitter: &SignalEmitter<'_>, kind: &str, message: &str) -> zbus::Result<()>;

    /// Statistics, for a caller that watches them: when they were read, in microseconds since 1970, the revision in force, open
    /// connections, open tunnels, packets that were handed to the kernel late, and classes as in `ListClasses`.
    #[zbus(signal)]
    async fn stats(
        emitter: &SignalEmitter<'_>,
        time_us: u64,
        revision: u64,
        connections: u64,
        tunnels: u64,
        late_packets: u64,
        classes: Vec<ClassRow>,
    ) -> zbus::Result<()>;
}

/// Sends a caller statistics until its watch ends, its name leaves the bus, or the bus is gone.
async fn watch(
    control: SharedControl,
    emitter: SignalEmitter<'static>,
    interval: Option<Duration>,
    mut name_lost: NameOwnerChangedStream,
    mut end: oneshot::Receiver<()>,
) {
    let mut ticks = stats_ticks(interval);
    loop {
        tokio::select! {
            biased;
            _ = &mut end => return,
            // The bus never gives a unique name to a second connection.
            _ = name_lost.next() => return,
            _ = ticks.tick() => {}
        }
        let statistics = control.statistics();
        let Statistics { time, revision, connections, tunnels, late_packets, ref classes } = *statistics;
        let (time_us, classes) = (micros(time), classes.iter().map(class_row).collect());
        // The end of the watch waits for this, because half a message on the bus would spoil all later messages.
        let sent = Door::stats(&emitter, time_us, revision, connections, tunnels, late_packets, classes).await;
        if sent.is_err() {
            return;
        }
    }
}
