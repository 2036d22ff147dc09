//! What the transport reports about connections: handshake results, the peer's certificate, the size of packets, and
//! the events that the dispatcher's books need.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::strangers::{Budget, ClientStanding, ConnectionPlaces, Limit, PacketFrames};
use pacing::{
    label,
    path::{PacketSize, PathStats},
    qlog::Tap,
};
use prometheus_client::metrics::{counter::Counter, family::Family};
use s2n_quic::provider::event::{
    ConnectionInfo, ConnectionMeta, Subscriber,
    events::{
        AckRangeReceived, AckRangeSent, ActivePathUpdated, ConnectionClosed, ConnectionStarted, DatagramDropReason,
        DatagramDropped, DatagramReceived, DatagramSent, EndpointMeta, EndpointType, Frame, FrameReceived, FrameSent,
        HandshakeStatus, HandshakeStatusUpdated, KeyUpdate, MtuUpdated, PacketHeader, PacketLost, PacketReceived,
        PacketSent, PlatformEventLoopWakeup, RecoveryMetrics, TlsExporterReady, TlsHandshakeFailed,
        TransportParametersReceived, TxStreamProgress,
    },
};
use tokio::sync::Notify;

use super::{
    answers::Answers,
    ledger::account::Account,
    tls::{RefusedCertificate, client_certificates},
};

/// The name under which peers are counted that want to open more streams than they have credit for (RFC 9000 §19.14).
const STREAMS_BLOCKED: Limit = "streams_blocked";

/// The most paths of a connection in its life (`MAX_ALLOWED_PATHS` of s2n-quic `path/manager.rs`).
const MOST_PATHS: usize = 5;

/// Handshake results of an endpoint.
#[derive(Debug, Default)]
pub struct HandshakeCounters {
    /// Connections that an Initial packet opened.
    pub started: Counter,
    /// Handshakes that completed.
    pub completed: Counter,
    /// Connections that ended before their handshake completed.
    pub failed: Counter,
    /// Attempts answered with Retry, because too many handshakes were in flight.
    pub retried: Counter,
    /// Attempts refused, because there were too many connections.
    pub refused: Counter,
    /// Certificates of clients that were not accepted, by reason.
    pub refused_certificates: Family<[(&'static str, &'static str); 1], Counter>,
}

/// The turns of an endpoint's event loop that began because something was received. Clones follow the same endpoint.
#[derive(Clone, Debug, Default)]
pub struct LoopTurns(Arc<AtomicU64>);

impl LoopTurns {
    /// Returns the count.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Counts one.
    pub fn count_one(&self) {
        // Only its event loop writes.
        self.0.store(self.count().wrapping_add(1), Relaxed);
    }
}

/// Returns the time by which frames of users are counted in each second. All connections of a user share this clock, at any endpoint.
pub(crate) fn frames_clock() -> Duration {
    Duration::from_nanos(pacing::monotonic::now_ns())
}

/// The event subscriber of an endpoint.
#[derive(Debug, Default)]
pub struct EndpointSubscriber {
    /// The turns of this endpoint only.
    pub turns: LoopTurns,
    /// Shared by all connections.
    pub handshakes: Arc<HandshakeCounters>,
    /// The places that connections take; `None` for connections that we make.
    pub places: Option<Arc<ConnectionPlaces>>,
}

/// The state of one connection; the application reads it with `Handle::query_event_context`.
#[derive(Debug)]
pub struct ConnectionState {
    /// The peer's verified leaf certificate in DER, if it presented one.
    pub peer_certificate: Option<Vec<u8>>,
    /// The size of packets at the moment.
    pub packets: PacketSize,
    /// The same for each path, by its number; 0 for paths that do not exist.
    packet_bytes: [u16; MOST_PATHS],
    /// The number of the path that packets leave by.
    active_path: u64,
    /// How much the connection may send, and how much it has sent.
    pub account: Account,
    /// Where the connection's events can be traced.
    pub tap: Tap,
    /// Measurements of its path.
    pub path: PathStats,
    /// Whether the peer answers.
    pub answers: Answers,
    /// The count of datagrams from addresses to which the transport does not follow its peer.
    pub strays: Strays,
    /// What is known about the peer.
    pub standing: ClientStanding,
    /// What the peer used while it was a stranger.
    pub budget: Budget,
    /// The frames in the last packet.
    frames: PacketFrames,
    /// STREAMS_BLOCKED frames with a limit below this one have been counted.
    blocked_below: u64,
    /// Whether the peer has got another limit of streams since the last one that was counted. Without one, it cannot be blocked at another.
    has_new_limit: bool,
    completed: bool,
    /// The address that the peer connected from.
    address: Option<SocketAddr>,
    /// The peer's certificate, if it was not accepted.
    refused: Option<RefusedCertificate>,
}

/// Counts datagrams for a connection from addresses to which the transport does not follow its peer: it accepts five
/// addresses in a connection's life. Clones follow the same connection.
#[derive(Clone, Debug, Default)]
pub struct Strays(Arc<(AtomicU32, Notify)>);

impl Strays {
    /// How many of them in a row, with nothing from a known address in between, mean that the peer has moved. They are
    /// not authentic, but an attacker that forges them has to know the connection's ID and to silence its peer.
    const ENOUGH: u32 = 3;

    /// Waits until the peer has most likely moved to an address to which the transport does not follow.
    pub async fn lost(&self) {
        while self.0.0.load(Relaxed) < Self::ENOUGH {
            self.0.1.notified().await;
        }
    }

    fn count_one(&self) {
        // Only the connection writes.
        let count = self.0.0.load(Relaxed).saturating_add(1);
        self.0.0.store(count, Relaxed);
        if count >= Self::ENOUGH {
            self.0.1.notify_one();
        }
    }

    fn forget(&self) {
        self.0.0.store(0, Relaxed);
    }
}

impl ConnectionState {
    /// Makes packets as large as the active path carries.
    fn resize_packets(&mut self) {
        let bytes = usize::try_from(self.active_path).ok().and_then(|path| self.packet_bytes.get(path));
        if let Some(&bytes) = bytes.filter(|bytes| **bytes > 0) {
            self.packets.set(bytes);
            self.account.on_mtu(bytes);
        }
    }
}

impl Subscriber for EndpointSubscriber {
    type ConnectionContext = ConnectionState;

    fn create_connection_context(&mut self, meta: &ConnectionMeta, _: &ConnectionInfo) -> ConnectionState {
        self.handshakes.started.inc();
        let is_server = matches!(meta.endpoint_type, EndpointType::Server { .. });
        let account = Account::new(is_server);
        let packets = PacketSize::default();
        let tap = Tap::new(packets.clone());
        let answers = Answers::new(meta.timestamp.duration_since_start());
        let (strays, path) = (Strays::default(), PathStats::default());
        // A peer that connects to us gets its place once its address is known.
        let (standing, budget) = (ClientStanding::own(), Budget::default());
        ConnectionState {
            peer_certificate: None,
            packets,
            packet_bytes: [0; MOST_PATHS],
            active_path: 0,
            account,
            tap,
            path,
            answers,
            strays,
            standing,
            budget,
            frames: PacketFrames::default(),
            blocked_below: 0,
            has_new_limit: true,
            completed: false,
            address: None,
            refused: None,
        }
    }

    fn on_connection_started(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &ConnectionStarted) {
        let address = SocketAddr::from(event.path.remote_addr.clone());
        state.address = Some(address);
        if let Some(places) = &self.places {
            state.standing = places.enter(address.ip());
        }
    }

    fn on_platform_event_loop_wakeup(&mut self, _: &EndpointMeta, event: &PlatformEventLoopWakeup) {
        if event.rx_ready {
            self.turns.count_one();
        }
    }

    fn on_transport_parameters_received(
        &mut self,
        state: &mut ConnectionState,
        _: &ConnectionMeta,
        event: &TransportParametersReceived,
    ) {
        state.account.on_transport_parameters(&event.transport_parameters);
        state.tap.introduce(&event.transport_parameters);
    }

    fn on_datagram_sent(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &DatagramSent) {
        state.path.sent_datagram(event.len.into());
    }

    fn on_datagram_received(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &DatagramReceived) {
        state.path.received_datagram(event.len.into());
    }

    fn on_packet_sent(&mut self, state: &mut ConnectionState, meta: &ConnectionMeta, event: &PacketSent) {
        state.path.sent_packet();
        // Only an edge asks whether its peer answers.
        if matches!(meta.endpoint_type, EndpointType::Client { .. }) {
            state.answers.on_departure(|| meta.timestamp.duration_since_start());
        }
        if let Some(log) = state.tap.log() {
            let traced = log.packet_sent(event);
            // Of QUIC packets that share a datagram, the last stands for all.
            label::write(|label| label.traced = Some(traced));
        }
    }

    fn on_packet_received(&mut self, state: &mut ConnectionState, meta: &ConnectionMeta, event: &PacketReceived) {
        state.answers.on_arrival();
        // Only an edge uses the number of missing packets, to choose a form for its tunnels.
        if let (EndpointType::Client { .. }, PacketHeader::OneRtt { number, .. }) =
            (&meta.endpoint_type, &event.packet_header)
        {
            let number = *number;
            state.path.arrived_packet(number, meta.timestamp.duration_since_start());
        }
        state.strays.forget();
        state.budget.on_packet(&state.standing);
        state.frames.on_packet();
        if let Some(log) = state.tap.log() {
            log.packet_received(event);
        }
    }

    fn on_datagram_dropped(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &DatagramDropped) {
        if matches!(event.reason, DatagramDropReason::PathLimitExceeded { .. }) {
            state.strays.count_one();
        }
    }

    fn on_frame_sent(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &FrameSent) {
        state.account.on_frame_sent(&event.frame);
        state.has_new_limit |= matches!(event.frame, Frame::MaxStreams { .. });
        if let Some(log) = state.tap.log() {
            log.frame_sent(&event.frame, |stream_id| state.account.class(stream_id));
        }
    }

    fn on_frame_received(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &FrameReceived) {
        state.account.on_frame_received(&event.frame);
        state.budget.on_frame(&event.frame, &state.standing);
        state.frames.on_frame(&state.standing, frames_clock);
        if let Frame::StreamsBlocked { stream_limit, .. } = event.frame
            && state.has_new_limit
            && stream_limit >= state.blocked_below
        {
            // Counted once for each limit: the peer repeats the frame while the limit holds. A hostile one invents limits.
            state.blocked_below = stream_limit.saturating_add(1);
            state.has_new_limit = false;
            state.standing.count(STREAMS_BLOCKED);
        }
        if let Some(log) = state.tap.log() {
            log.frame_received(&event.frame);
        }
    }

    fn on_ack_range_sent(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &AckRangeSent) {
        if let Some(log) = state.tap.log() {
            log.acks_sent(&event.ack_range);
        }
    }

    fn on_ack_range_received(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &AckRangeReceived) {
        if let Some(log) = state.tap.log() {
            log.acks_received(&event.ack_range);
        }
    }

    fn on_tx_stream_progress(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, _: &TxStreamProgress) {
        state.account.on_progress();
    }

    fn on_recovery_metrics(&mut self, state: &mut ConnectionState, meta: &ConnectionMeta, event: &RecoveryMetrics) {
        // A datagram from another address opens a path, even if it is forged.
        if !event.path.is_active {
            return;
        }
        state.path.measured(event.smoothed_rtt, event.min_rtt);
        state.path.filled(event.congestion_window, event.bytes_in_flight);
        let now = meta.timestamp.duration_since_start();
        state.account.on_recovery_metrics(event.congestion_window, event.bytes_in_flight, event.smoothed_rtt, now);
        if let Some(log) = state.tap.log() {
            log.recovery_metrics(event);
        }
    }

    fn on_key_update(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &KeyUpdate) {
        if let Some(log) = state.tap.log() {
            log.key_updated(event);
        }
    }

    fn on_tls_exporter_ready(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &TlsExporterReady) {
        state.peer_certificate = event.session.peer_cert_chain_der().ok().and_then(|chain| chain.into_iter().next());
    }

    fn on_tls_handshake_failed(
        &mut self,
        state: &mut ConnectionState,
        meta: &ConnectionMeta,
        _: &TlsHandshakeFailed<'_>,
    ) {
        if matches!(meta.endpoint_type, EndpointType::Server { .. })
            && let Some(refused) = client_certificates::take_refused()
        {
            let labels = [("reason", client_certificates::label(&refused.reason))];
            self.handshakes.refused_certificates.get_or_create(&labels).inc();
            state.refused = Some(refused);
        }
    }

    fn on_handshake_status_updated(
        &mut self,
        state: &mut ConnectionState,
        _: &ConnectionMeta,
        event: &HandshakeStatusUpdated,
    ) {
        if matches!(event.status, HandshakeStatus::Complete { .. }) {
            state.completed = true;
            state.standing.prove();
            self.handshakes.completed.inc();
        }
        if let Some(log) = state.tap.log() {
            log.state_updated(&event.status);
        }
    }

    fn on_mtu_updated(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &MtuUpdated) {
        if let Some(bytes) = usize::try_from(event.path_id).ok().and_then(|path| state.packet_bytes.get_mut(path)) {
            *bytes = event.mtu;
        }
        if event.path_id != state.active_path {
            return;
        }
        state.resize_packets();
        if let Some(log) = state.tap.log() {
            log.mtu_updated(event);
        }
    }

    fn on_active_path_updated(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &ActivePathUpdated) {
        state.active_path = event.active.id;
        state.resize_packets();
    }

    fn on_packet_lost(&mut self, state: &mut ConnectionState, meta: &ConnectionMeta, event: &PacketLost) {
        state.account.on_packet_lost(event.bytes_lost, event.is_mtu_probe);
        if !event.is_mtu_probe {
            state.path.lost_packet(meta.timestamp.duration_since_start());
        }
        if let Some(log) = state.tap.log() {
            log.packet_lost(event);
        }
    }

    fn on_connection_closed(&mut self, state: &mut ConnectionState, meta: &ConnectionMeta, event: &ConnectionClosed) {
        state.account.on_closed();
        if let Some(log) = state.tap.log() {
            log.closed(event);
        }
        state.standing.leave();
        if !state.completed {
            self.handshakes.failed.inc();
            let client = state.address.map(tracing::field::display);
            match &state.refused {
                Some(RefusedCertificate { fingerprint, reason }) => {
                    let certificate: String = fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
                    tracing::debug!(client, certificate, %reason, "refused the certificate of a client");
                }
                None if matches!(meta.endpoint_type, EndpointType::Server { .. }) => {
                    tracing::debug!(client, error = %event.error, "a client's handshake failed");
                }
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use s2n_quic_core::{
        connection, endpoint,
        event::{IntoEvent as _, builder},
        inet::SocketAddress,
        time::{Clock as _, NoopClock},
    };

    use super::*;

    #[test]
    fn only_the_path_that_packets_leave_by_decides_their_size_and_what_is_measured() {
        let mut subscriber = EndpointSubscriber::default();
        let (timestamp, endpoint_type) = (NoopClock.get_time(), endpoint::Type::Server);
        let meta = builder::ConnectionMeta { endpoint_type, id: 1, timestamp }.into_event();
        let info = builder::ConnectionInfo { application: None }.into_event();
        let mut state = subscriber.create_connection_context(&meta, &info);
        let (address, id) = (SocketAddress::default(), connection::LocalId::try_from_bytes(b"an ID").unwrap());
        let path = |number: u64, is_active: bool| builder::Path {
            local_addr: (&address).into_event(),
            local_cid: (&id).into_event(),
            remote_addr: (&address).into_event(),
            remote_cid: (&id).into_event(),
            id: number,
            is_active,
        };
        let (ledger, _) = state.account.join();
        let sizes = |state: &ConnectionState| (state.packets.bytes(), ledger.full_packet_bytes());
        let resize = |state: &mut ConnectionState, path_id, mtu| {
            let cause = builder::MtuUpdatedCause::NewPath;
            let event = builder::MtuUpdated { path_id, mtu, cause, search_complete: false };
            EndpointSubscriber::default().on_mtu_updated(state, &meta, &event.into_event());
            sizes(state)
        };
        assert_eq!(resize(&mut state, 0, 1_472), (1_472, 1_472));
        assert_eq!(resize(&mut state, 1, 1_200), (1_472, 1_472), "a datagram came from another address");
        assert_eq!(resize(&mut state, 1, 1_300), (1_472, 1_472));
        assert_eq!(resize(&mut state, u64::MAX, 1_200), (1_472, 1_472));
        let mut measure = |state: &mut ConnectionState, path, milliseconds| {
            let rtt = Duration::from_millis(milliseconds);
            let event = builder::RecoveryMetrics {
                path,
                min_rtt: rtt,
                smoothed_rtt: rtt,
                latest_rtt: rtt,
                rtt_variance: rtt,
                max_ack_delay: rtt,
                pto_count: 0,
                congestion_window: 12_000,
                bytes_in_flight: 0,
                congestion_limited: false,
            };
            subscriber.on_recovery_metrics(state, &meta, &event.into_event());
            state.path.get().smoothed_rtt.map(|rtt| rtt.as_millis())
        };
        assert_eq!(measure(&mut state, path(0, true), 20), Some(20));
        assert_eq!(measure(&mut state, path(1, false), 900), Some(20));
        let moved = builder::ActivePathUpdated { previous: path(0, false), active: path(1, true) }.into_event();
        EndpointSubscriber::default().on_active_path_updated(&mut state, &meta, &moved);
        assert_eq!(sizes(&state), (1_300, 1_300));
        assert_eq!(measure(&mut state, path(1, true), 900), Some(900));
        assert_eq!(resize(&mut state, 0, 1_200), (1_300, 1_300), "the path that was left");
    }
}
