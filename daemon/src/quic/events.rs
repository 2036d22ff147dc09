//! What the transport tells us about connections: handshake results and the peer's certificate.

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use s2n_quic::provider::event::{
    ConnectionInfo, ConnectionMeta, Subscriber,
    events::{ConnectionClosed, HandshakeStatus, HandshakeStatusUpdated, TlsExporterReady},
};

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
}

/// The event subscriber of an endpoint.
#[derive(Debug, Default)]
pub struct Events {
    /// Shared by all connections.
    pub handshakes: Arc<HandshakeCounters>,
}

/// What is remembered per connection; the application asks with `Handle::query_event_context`.
#[derive(Debug, Default)]
pub struct ConnectionState {
    /// The peer's verified leaf certificate in DER, if it presented one.
    pub peer_certificate: Option<Vec<u8>>,
    completed: bool,
}

impl Subscriber for Events {
    type ConnectionContext = ConnectionState;

    fn create_connection_context(&mut self, _: &ConnectionMeta, _: &ConnectionInfo) -> ConnectionState {
        self.handshakes.started.inc();
        ConnectionState::default()
    }

    fn on_tls_exporter_ready(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, event: &TlsExporterReady) {
        state.peer_certificate = event.session.peer_cert_chain_der().ok().and_then(|chain| chain.into_iter().next());
    }

    fn on_handshake_status_updated(
        &mut self,
        state: &mut ConnectionState,
        _: &ConnectionMeta,
        event: &HandshakeStatusUpdated,
    ) {
        if matches!(event.status, HandshakeStatus::Complete { .. }) {
            state.completed = true;
            self.handshakes.completed.inc();
        }
    }

    fn on_connection_closed(&mut self, state: &mut ConnectionState, _: &ConnectionMeta, _: &ConnectionClosed) {
        if !state.completed {
            self.handshakes.failed.inc();
        }
    }
}
