//! The events logged for a connection, in the vocabulary of draft-ietf-quic-qlog-quic-events and of paced's own
//! namespace.
//!
//! Fields and their order are the draft's, so that serialising an event is enough to write it. Lengths of frames are in
//! `raw`, as the draft requires; times are milliseconds. Addresses, connection IDs and tokens are not kept.

use std::{num::NonZeroU32, time::Duration};

use s2n_quic::{
    connection,
    provider::event::{
        Location,
        events::{self, KeyType, PacketLost, RecoveryMetrics, TransmissionMode, TransportParameters},
    },
};
use serde::Serialize;

use super::frame::{Frame, Raw};
use crate::class_key::ClassKey;

/// One event.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Event {
    ParametersSet(Parameters),
    PacketSent(Sent),
    PacketReceived(Received),
    PacketLost(Lost),
    RecoveryMetricsUpdated(Metrics),
    MtuUpdated {
        new: u16,
        done: bool,
    },
    ConnectionStateUpdated {
        new: &'static str,
    },
    ConnectionClosed(Closed),
    KeyUpdated(Key),
    /// A stream had a turn, and the transport received bytes of it.
    StreamTurn(StreamTurn),
    /// Bytes that had their turn are in a packet.
    Payload(Payload),
    /// The kernel has taken a packet.
    Departure(Departure),
    EventsLost {
        count: u64,
    },
}

impl Event {
    /// The event's name with its namespace.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::ParametersSet(_) => "quic:parameters_set",
            Self::PacketSent(_) => "quic:packet_sent",
            Self::PacketReceived(_) => "quic:packet_received",
            Self::PacketLost(_) => "quic:packet_lost",
            Self::RecoveryMetricsUpdated(_) => "quic:recovery_metrics_updated",
            Self::MtuUpdated { .. } => "quic:mtu_updated",
            Self::ConnectionStateUpdated { .. } => "quic:connection_state_updated",
            Self::ConnectionClosed(_) => "quic:connection_closed",
            Self::KeyUpdated(_) => "quic:key_updated",
            Self::StreamTurn(_) => "paced:stream_turn",
            Self::Payload(_) => "paced:payload",
            Self::Departure(_) => "paced:departure",
            Self::EventsLost { .. } => "paced:events_lost",
        }
    }

    /// Returns whose turn the event is about: the request's stream, and its class.
    pub(super) const fn served(&self) -> Option<(u64, Option<ClassKey>)> {
        match self {
            Self::StreamTurn(StreamTurn { stream_id, class, .. }) | Self::Payload(Payload { stream_id, class, .. }) => {
                Some((*stream_id, *class))
            }
            _ => None,
        }
    }
}

/// Converts nanoseconds to milliseconds.
pub(super) fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Converts a span to milliseconds.
fn span_ms(span: Duration) -> f64 {
    span.as_nanos() as f64 / 1e6
}

/// A packet's header without its protected parts, except for the packet number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Header {
    packet_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    packet_number: Option<u64>,
}

impl From<&events::PacketHeader> for Header {
    fn from(header: &events::PacketHeader) -> Self {
        use events::PacketHeader as From;
        let (packet_type, packet_number) = match *header {
            From::Initial { number, .. } => ("initial", Some(number)),
            From::Handshake { number, .. } => ("handshake", Some(number)),
            From::ZeroRtt { number, .. } => ("0RTT", Some(number)),
            From::OneRtt { number, .. } => ("1RTT", Some(number)),
            From::Retry { .. } => ("retry", None),
            From::VersionNegotiation { .. } => ("version_negotiation", None),
            From::StatelessReset { .. } => ("stateless_reset", None),
            _ => ("unknown", None),
        };
        Self { packet_type, packet_number }
    }
}

/// A packet of a traced connection, on its way to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traced {
    /// The log's number.
    pub(super) log: NonZeroU32,
    pub(super) header: Header,
    /// When it was written, in nanoseconds after the log's beginning.
    pub(super) decided_ns: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Sent {
    pub(super) header: Header,
    pub(super) frames: Vec<Frame>,
    pub(super) raw: Raw,
    is_mtu_probe_packet: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    trigger: Option<&'static str>,
}

impl Sent {
    pub(super) fn new(event: &events::PacketSent, frames: Vec<Frame>) -> Self {
        Self {
            header: (&event.packet_header).into(),
            frames,
            raw: Raw::whole(event.packet_len),
            is_mtu_probe_packet: matches!(event.transmission_mode, TransmissionMode::MtuProbing { .. }),
            trigger: matches!(event.transmission_mode, TransmissionMode::LossRecoveryProbing { .. })
                .then_some("pto_probe"),
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Received {
    header: Header,
    pub(super) frames: Vec<Frame>,
    raw: Raw,
}

impl From<&events::PacketReceived> for Received {
    fn from(event: &events::PacketReceived) -> Self {
        Self { header: (&event.packet_header).into(), frames: Vec::new(), raw: Raw::whole(event.packet_len) }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Lost {
    header: Header,
    is_mtu_probe_packet: bool,
}

impl From<&PacketLost<'_>> for Lost {
    fn from(event: &PacketLost<'_>) -> Self {
        Self { header: (&event.packet_header).into(), is_mtu_probe_packet: event.is_mtu_probe }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Metrics {
    min_rtt: f64,
    smoothed_rtt: f64,
    latest_rtt: f64,
    rtt_variance: f64,
    pto_count: u32,
    congestion_window: u32,
    bytes_in_flight: u32,
}

impl From<&RecoveryMetrics<'_>> for Metrics {
    fn from(event: &RecoveryMetrics<'_>) -> Self {
        Self {
            min_rtt: span_ms(event.min_rtt),
            smoothed_rtt: span_ms(event.smoothed_rtt),
            latest_rtt: span_ms(event.latest_rtt),
            rtt_variance: span_ms(event.rtt_variance),
            pto_count: event.pto_count,
            congestion_window: event.congestion_window,
            bytes_in_flight: event.bytes_in_flight,
        }
    }
}

/// The peer's transport parameters from the handshake.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Parameters {
    initiator: &'static str,
    disable_active_migration: bool,
    max_idle_timeout: u64,
    max_udp_payload_size: u64,
    ack_delay_exponent: u8,
    max_ack_delay: u64,
    active_connection_id_limit: u64,
    initial_max_stream_data_bidi_local: u64,
    initial_max_stream_data_bidi_remote: u64,
    initial_max_stream_data_uni: u64,
    initial_max_streams_bidi: u64,
    initial_max_streams_uni: u64,
    /// The transport reports none, but readers expect the list.
    unknown_parameters: [u8; 0],
    max_datagram_frame_size: u64,
}

impl From<&TransportParameters<'_>> for Parameters {
    fn from(of: &TransportParameters<'_>) -> Self {
        // Less than 2^62 ms (RFC 9000 §18.2).
        let whole_ms = |span: Duration| span.as_millis() as u64;
        Self {
            initiator: "remote",
            disable_active_migration: !of.migration_support,
            max_idle_timeout: whole_ms(of.max_idle_timeout),
            max_udp_payload_size: of.max_udp_payload_size,
            ack_delay_exponent: of.ack_delay_exponent,
            max_ack_delay: whole_ms(of.max_ack_delay),
            active_connection_id_limit: of.active_connection_id_limit,
            initial_max_stream_data_bidi_local: of.initial_max_stream_data_bidi_local,
            initial_max_stream_data_bidi_remote: of.initial_max_stream_data_bidi_remote,
            initial_max_stream_data_uni: of.initial_max_stream_data_uni,
            initial_max_streams_bidi: of.initial_max_streams_bidi,
            initial_max_streams_uni: of.initial_max_streams_uni,
            unknown_parameters: [],
            max_datagram_frame_size: of.max_datagram_frame_size,
        }
    }
}

/// Why the connection ended.
#[derive(Debug, Default, Serialize)]
pub(super) struct Closed {
    #[serde(skip_serializing_if = "Option::is_none")]
    initiator: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    connection_error: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    application_error: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_code: Option<u64>,
    reason: String,
    trigger: &'static str,
}

impl From<&connection::Error> for Closed {
    fn from(error: &connection::Error) -> Self {
        let by = |initiator: &Location| Some(if initiator.is_local() { "local" } else { "remote" });
        let closed = |trigger| Self { reason: error.to_string(), trigger, ..Self::default() };
        match error {
            connection::Error::Closed { initiator, .. } => Self { initiator: by(initiator), ..closed("application") },
            // Names of codes would take a table of our own; the draft has "unknown" with the code beside it.
            connection::Error::Transport { code, initiator, .. } => Self {
                initiator: by(initiator),
                connection_error: Some("unknown"),
                error_code: Some(code.as_u64()),
                ..closed("error")
            },
            connection::Error::Application { error: code, initiator, .. } => Self {
                initiator: by(initiator),
                application_error: Some("unknown"),
                error_code: Some((*code).into()),
                ..closed("application")
            },
            connection::Error::StatelessReset { .. } => closed("stateless_reset"),
            connection::Error::IdleTimerExpired { .. } => closed("idle_timeout"),
            connection::Error::ImmediateClose { .. } => closed("aborted"),
            _ => closed("unspecified"),
        }
    }
}

/// New keys for both directions; the name is that of the server's.
#[derive(Debug, Serialize)]
pub(super) struct Key {
    key_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_phase: Option<u16>,
}

impl From<&KeyType> for Key {
    fn from(key: &KeyType) -> Self {
        let (key_type, key_phase) = match *key {
            KeyType::Initial { .. } => ("server_initial_secret", None),
            KeyType::Handshake { .. } => ("server_handshake_secret", None),
            KeyType::ZeroRtt { .. } => ("client_0rtt_secret", None),
            KeyType::OneRtt { generation, .. } => ("server_1rtt_secret", Some(generation)),
            _ => ("unknown", None),
        };
        Self { key_type, key_phase }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct StreamTurn {
    pub(super) stream_id: u64,
    #[serde(skip)]
    pub(super) class: Option<ClassKey>,
    /// Bytes handed to the transport.
    pub(super) length: u64,
    /// The streams and tunnels that also wait for a turn.
    pub(super) waiting_streams: usize,
    pub(super) waiting_tunnels: usize,
}

#[derive(Debug, Serialize)]
pub(super) struct Payload {
    /// The header of the packet that it is in, once that is known.
    pub(super) header: Option<Header>,
    /// "stream" or "datagram".
    pub(super) form: &'static str,
    pub(super) stream_id: u64,
    #[serde(skip)]
    pub(super) class: Option<ClassKey>,
    pub(super) length: u64,
    /// How long it had waited in its queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) waited: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Departure {
    pub(super) header: Header,
    /// When the scheduler had chosen its contents.
    pub(super) decided: f64,
    /// When it should leave, if it has to wait at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) wanted: Option<f64>,
    /// The departure given to the kernel (SO_TXTIME), if the device keeps any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) told: Option<f64>,
    /// Its index among the packets that left as one message, and their number.
    pub(super) place: usize,
    pub(super) train: usize,
}
