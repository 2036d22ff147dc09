//! What happens, for listeners.

use std::{sync::Arc, time::SystemTime};

use relay::access::{AccessLog, record::AccessRecord};
use tokio::sync::broadcast::{self, error::RecvError};

/// How many events wait for a slow listener; beyond, it misses some and is told so.
pub(super) const QUEUE: usize = 256;

/// Something that happened.
#[derive(Clone, Debug)]
pub struct Event {
    /// When.
    pub time: SystemTime,
    /// What it is about: "policy", "reload" or "tunnel".
    pub kind: &'static str,
    /// What happened, for people.
    pub message: String,
}

/// The kind of events that are records of the access log.
pub const ACCESS: &str = "access";

/// What happens, for one listener.
#[derive(Debug)]
pub struct EventSubscription {
    own: broadcast::Receiver<Event>,
    /// Apart, so that a crowd of clients crowds out no event of operators.
    access: Option<broadcast::Receiver<Arc<AccessRecord>>>,
    kinds: Vec<String>,
}

/// What an [`EventSubscription`] gives next.
#[derive(Clone, Debug)]
pub enum Happening {
    /// What operators did, and what the daemon tells them.
    Event(Event),
    /// What became of a tunnel or a request.
    Access(Arc<AccessRecord>),
    /// So many were too many.
    Lost(u64),
}

impl EventSubscription {
    pub(super) fn new(own: broadcast::Receiver<Event>, access: &AccessLog, kinds: Vec<String>) -> Self {
        Self { own, access: is_wanted(&kinds, ACCESS).then(|| access.listen()), kinds }
    }

    /// Waits for the next one; `None` when the daemon ends.
    pub async fn next(&mut self) -> Option<Happening> {
        loop {
            let access = async {
                match &mut self.access {
                    Some(access) => access.recv().await,
                    None => std::future::pending().await,
                }
            };
            let found = tokio::select! {
                event = self.own.recv() => event.map(Happening::Event),
                record = access => record.map(Happening::Access),
            };
            match found {
                Ok(Happening::Event(event)) if !is_wanted(&self.kinds, event.kind) => {}
                Ok(found) => return Some(found),
                Err(RecvError::Lagged(count)) => return Some(Happening::Lost(count)),
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

fn is_wanted(kinds: &[String], kind: &str) -> bool {
    kinds.is_empty() || kinds.iter().any(|wanted| wanted == kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: &'static str) -> Event {
        Event { time: SystemTime::UNIX_EPOCH, kind, message: String::new() }
    }

    #[tokio::test]
    async fn who_asks_for_kinds_hears_of_those_alone() {
        let (own, access) = (broadcast::channel(8).0, AccessLog::default());
        let mut all = EventSubscription::new(own.subscribe(), &access, Vec::new());
        let mut some = EventSubscription::new(own.subscribe(), &access, vec!["reload".into()]);
        let mut records = EventSubscription::new(own.subscribe(), &access, vec![ACCESS.into()]);
        for kind in ["policy", "reload"] {
            own.send(event(kind)).unwrap();
        }
        assert!(matches!(all.next().await, Some(Happening::Event(Event { kind: "policy", .. }))));
        assert!(matches!(some.next().await, Some(Happening::Event(Event { kind: "reload", .. }))));
        drop((all, some));
        assert!(access.is_wanted(), "one still listens");
        drop(own);
        assert!(records.next().await.is_none());
        drop(records);
        assert!(!access.is_wanted());
    }
}
