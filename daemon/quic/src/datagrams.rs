//! HTTP Datagrams over QUIC DATAGRAM frames: the provider of an endpoint. The transport asks [`Sender`] for datagrams and the
//! connection's [`Hub`] answers, so the choice of what leaves next is made as late as possible.

use std::sync::Arc;

use s2n_quic::provider::datagram as provider;

pub use super::{
    hub::{DatagramBatch, DatagramCounters, Flow, FlowView, Hub, Losses, QueueLimits},
    schedule::{Schedule, Schedules},
};

/// The datagram provider of an endpoint.
#[derive(Debug)]
pub struct Datagrams {
    /// Bounds of each connection.
    pub limits: QueueLimits,
    /// Shared by all connections.
    pub counters: Arc<DatagramCounters>,
    /// The largest DATAGRAM frame accepted, in bytes; 0 switches the extension off.
    pub max_frame_bytes: u64,
    /// The order in which payloads, and the bytes of streams, leave.
    pub schedules: Schedules,
}

impl provider::Endpoint for Datagrams {
    type Sender = Sender;
    type Receiver = Receiver;

    fn create_connection(&mut self, info: &provider::ConnectionInfo) -> (Sender, Receiver) {
        let schedule = self.schedules.get();
        let accepts = info.max_datagram_payload > 0;
        let hub = Hub::new(&schedule, self.limits, self.counters.clone(), accepts, info.waker.clone());
        let hub = Arc::new(hub);
        self.schedules.attach(hub.clone(), &schedule);
        (Sender(hub.clone()), Receiver(hub))
    }

    fn max_datagram_frame_size(&self, _: &provider::PreConnectionInfo) -> u64 {
        self.max_frame_bytes
    }
}

/// The sending half of the provider.
pub struct Sender(Arc<Hub>);

impl Sender {
    /// Returns the connection's hub, which the application reaches with `Handle::datagram_mut`.
    #[must_use]
    pub fn hub(&self) -> Arc<Hub> {
        self.0.clone()
    }
}

impl provider::Sender for Sender {
    fn on_transmit<P: provider::Packet>(&mut self, packet: &mut P) {
        self.0.on_transmit(packet);
    }

    fn has_transmission_interest(&self) -> bool {
        self.0.wants_packet()
    }

    fn on_connection_error(&mut self, _: s2n_quic::connection::Error) {}
}

/// The receiving half of the provider.
pub struct Receiver(Arc<Hub>);

impl provider::Receiver for Receiver {
    fn on_datagram(&mut self, _: &provider::ReceiveContext<'_>, bytes: &[u8]) {
        self.0.on_datagram(bytes);
    }

    fn on_connection_error(&mut self, _: s2n_quic::connection::Error) {}
}
