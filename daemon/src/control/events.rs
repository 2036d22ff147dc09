//! Events, for subscribers.

use std::{sync::Arc, time::SystemTime};

use role::access::{AccessLog, record::AccessRecord};
use tokio::sync::broadcast::{self, error::RecvError};
use uplink::{PathChange, PathChanges};

use super::Peer;

/// How many events wait for a slow subscriber; if there are more, it misses the oldest, and receives their number.
pub(super) const QUEUE: usize = 256;

/// Something that happened.
#[derive(Clone, Debug)]
pub struct Event {
    /// When it happened.
    pub time: SystemTime,
    /// What it is about: "policy", "reload", "tunnel" or "path".
    pub kind: &'static str,
    /// What happened, for people.
    pub message: String,
}

/// The kind of events that are records of the access log.
pub const ACCESS: &str = "access";

/// The kind of events that are changes of the edge's paths and relays.
pub const PATH: &str = "path";

/// The kinds of all events.
const KINDS: [&str; 5] = ["policy", "reload", "tunnel", PATH, ACCESS];

/// One subscriber's events.
#[derive(Debug)]
pub struct EventSubscription {
    own: broadcast::Receiver<Event>,
    /// Separate, so that a burst of clients' records displaces no events about operators.
    access: Option<broadcast::Receiver<Arc<AccessRecord>>>,
    /// Separate as well, because the edge does not depend on the control plane.
    paths: Option<broadcast::Receiver<PathChange>>,
    /// Each once.
    kinds: Vec<&'static str>,
    /// The one peer that reads them, if it is known.
    reader: Option<Peer>,
}

/// An item of an [`EventSubscription`].
#[derive(Clone, Debug)]
pub enum Happening {
    /// An operator's action, or a change in the daemon.
    Event(Event),
    /// A record of a tunnel or a request, with the addresses that the subscriber may see.
    Access(Arc<AccessRecord>),
    /// This number of events was lost because the subscriber was too slow.
    Lost(u64),
}

impl EventSubscription {
    /// Subscribes to events of these kinds, or of all if there are none. There are no events of unknown kinds, and a caller's list may be
    /// long, so only known ones are kept.
    pub(super) fn new(
        own: broadcast::Receiver<Event>,
        access: &AccessLog,
        paths: &PathChanges,
        kinds: &[String],
        reader: Option<Peer>,
    ) -> Self {
        let is_wanted = |kind: &&str| kinds.is_empty() || kinds.iter().any(|wanted| wanted == kind);
        let kinds: Vec<_> = KINDS.into_iter().filter(is_wanted).collect();
        let access = kinds.contains(&ACCESS).then(|| access.listen());
        let paths = kinds.contains(&PATH).then(|| paths.listen());
        Self { own, access, paths, kinds, reader }
    }

    /// Returns what the reader may see of a record. Asks each time, because a reload may change the peer's rights.
    fn shown(&self, record: Arc<AccessRecord>) -> Arc<AccessRecord> {
        let may_see = self.reader.as_ref().is_some_and(|peer| peer.caller().may_write);
        if may_see { record } else { Arc::new(record.without_addresses()) }
    }

    /// Waits for the next item; `None` when the daemon ends.
    pub async fn next(&mut self) -> Option<Happening> {
        loop {
            let found = tokio::select! {
                event = self.own.recv() => event.map(Happening::Event),
                record = next_of(&mut self.access) => record.map(|record| Happening::Access(self.shown(record))),
                change = next_of(&mut self.paths) => {
                    change.map(|PathChange { time, message }| Happening::Event(Event { time, kind: PATH, message }))
                }
            };
            match found {
                Ok(Happening::Event(event)) if !self.kinds.contains(&event.kind) => {}
                Ok(found) => return Some(found),
                Err(RecvError::Lagged(count)) => return Some(Happening::Lost(count)),
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

async fn next_of<T: Clone>(events: &mut Option<broadcast::Receiver<T>>) -> Result<T, RecvError> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: &'static str) -> Event {
        Event { time: SystemTime::UNIX_EPOCH, kind, message: String::new() }
    }

    #[tokio::test]
    async fn a_subscriber_gets_only_the_kinds_it_asked_for() {
        let (own, access, paths) = (broadcast::channel(8).0, AccessLog::default(), PathChanges::default());
        let mut all = EventSubscription::new(own.subscribe(), &access, &paths, &[], None);
        let mut some = EventSubscription::new(own.subscribe(), &access, &paths, &["reload".into()], None);
        let mut records = EventSubscription::new(own.subscribe(), &access, &paths, &[ACCESS.into()], None);
        let mut changes = EventSubscription::new(own.subscribe(), &access, &paths, &[PATH.into()], None);
        for kind in ["policy", "reload"] {
            own.send(event(kind)).unwrap();
        }
        assert!(matches!(all.next().await, Some(Happening::Event(Event { kind: "policy", .. }))));
        assert!(matches!(some.next().await, Some(Happening::Event(Event { kind: "reload", .. }))));
        paths.tell("silent".into());
        let found = changes.next().await;
        assert!(
            matches!(&found, Some(Happening::Event(Event { kind: PATH, message, .. })) if message == "silent"),
            "{found:?}"
        );
        drop((all, some));
        assert!(access.is_wanted(), "one still listens");
        drop(own);
        assert!(records.next().await.is_none());
        drop(records);
        assert!(!access.is_wanted());
    }

    #[tokio::test]
    async fn a_list_of_kinds_keeps_each_known_kind_once() {
        let (own, access, paths) = (broadcast::channel(8).0, AccessLog::default(), PathChanges::default());
        let kinds = |asked: &[&str]| {
            let asked: Vec<_> = asked.iter().map(ToString::to_string).collect();
            EventSubscription::new(own.subscribe(), &access, &paths, &asked, None).kinds
        };
        assert_eq!(kinds(&["reload", "", "reload", "other", "policy"]), ["policy", "reload"]);
        assert!(kinds(&["other"]).is_empty(), "who asks for unknown kinds hears nothing");
    }
}
