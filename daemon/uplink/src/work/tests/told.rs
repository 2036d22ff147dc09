//! What the log says of attempts to connect.

use parking_lot::Mutex;
use tracing::{
    Event, Level, Metadata, Subscriber,
    span::{Attributes, Id, Record},
};

use super::*;

/// Notes the levels of this module's events.
#[derive(Clone, Default)]
struct Levels(Arc<Mutex<Vec<Level>>>);

impl Subscriber for Levels {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target() == "uplink::work"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        self.0.lock().push(*event.metadata().level());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn a_reason_for_having_no_connection_is_logged_once_until_there_is_another_or_a_connection() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = uplink_to(&relay);
    let mut work = Work::new(&uplink);
    let levels = Levels::default();
    let _logged = tracing::subscriber::set_default(levels.clone());
    let mut told = |connected| {
        work.attempted((0, 0), connected);
        std::mem::take(&mut *levels.0.lock())
    };
    let silent = || Err(ConnectError::NoAnswer((Ipv4Addr::LOCALHOST, 9).into()));
    let closed = || Err(ConnectError::Http(h3::Error::Closed));
    assert_eq!([silent(), silent(), silent()].map(&mut told).concat(), [Level::WARN, Level::DEBUG, Level::DEBUG]);
    assert_eq!([closed(), silent()].map(&mut told).concat(), [Level::WARN, Level::WARN]);
    let (_, connected) = uplink.attempt((0, 0)).await;
    assert_eq!([connected, silent()].map(&mut told).concat(), [Level::INFO, Level::WARN]);
}
