//! When the bytes of streams leave, according to the transport's events.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use quic::clock::Clock;
use s2n_quic::provider::event::{
    ConnectionInfo, ConnectionMeta, Subscriber,
    events::{Frame, FrameSent},
};
use tokio::sync::oneshot;

/// The subscriber of the sender's endpoint, which has one connection. Clones share their state.
#[derive(Clone)]
pub struct Departures {
    now_ns: fn() -> u64,
    awaited: Arc<Mutex<HashMap<u64, Awaited>>>,
}

/// The departure that a request waits for on a stream.
struct Awaited {
    /// The request has left when this many bytes of the stream have left.
    bytes: u64,
    told: oneshot::Sender<u64>,
}

impl Departures {
    /// Creates a subscriber without streams.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self { now_ns: clock.now_ns, awaited: Arc::default() }
    }

    /// Returns a receiver of the time at which `bytes` of a stream have left. None of them may have been sent yet.
    #[must_use]
    pub fn of(&self, stream: u64, bytes: u64) -> oneshot::Receiver<u64> {
        let (told, receiver) = oneshot::channel();
        self.awaited.lock().insert(stream, Awaited { bytes, told });
        receiver
    }
}

impl Subscriber for Departures {
    type ConnectionContext = ();

    fn create_connection_context(&mut self, _: &ConnectionMeta, _: &ConnectionInfo) {}

    fn on_frame_sent(&mut self, (): &mut (), _: &ConnectionMeta, event: &FrameSent) {
        let Frame::Stream { id, offset, len, .. } = event.frame else { return };
        let mut awaited = self.awaited.lock();
        if awaited.get(&id).is_some_and(|awaited| offset + u64::from(len) >= awaited.bytes)
            && let Some(Awaited { told, .. }) = awaited.remove(&id)
        {
            // The receiver may have given up waiting.
            _ = told.send((self.now_ns)());
        }
    }
}
