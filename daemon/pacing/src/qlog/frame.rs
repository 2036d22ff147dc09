//! Frames of a packet in the vocabulary of draft-ietf-quic-qlog-quic-events.

use std::ops::RangeInclusive;

use s2n_quic::provider::event::events;
use serde::{Serialize, Serializer};

/// A frame, as far as the transport reports it.
#[derive(Debug, Serialize)]
#[serde(tag = "frame_type", rename_all = "snake_case")]
pub(super) enum Frame {
    Padding {
        raw: Raw,
    },
    Ping {},
    Ack {
        acked_ranges: Vec<Acked>,
        #[serde(flatten)]
        ecn: Option<Ecn>,
    },
    ResetStream {
        stream_id: u64,
        error: &'static str,
        error_code: u64,
        final_size: u64,
    },
    StopSending {
        stream_id: u64,
        error: &'static str,
        error_code: u64,
    },
    Crypto {
        offset: u64,
        raw: Raw,
    },
    NewToken {
        token: Nothing,
    },
    Stream {
        stream_id: u64,
        offset: u64,
        fin: bool,
        raw: Raw,
    },
    MaxData {
        maximum: u64,
    },
    MaxStreamData {
        stream_id: u64,
        maximum: u64,
    },
    MaxStreams {
        stream_type: &'static str,
        maximum: u64,
    },
    DataBlocked {
        limit: u64,
    },
    StreamDataBlocked {
        stream_id: u64,
        limit: u64,
    },
    StreamsBlocked {
        stream_type: &'static str,
        limit: u64,
    },
    NewConnectionId {
        sequence_number: u64,
        retire_prior_to: u64,
        connection_id: &'static str,
    },
    PathChallenge {},
    PathResponse {},
    ConnectionClose {},
    HandshakeDone {},
    Datagram {
        raw: Raw,
    },
    Unknown {
        #[serde(skip_serializing_if = "Option::is_none")]
        frame_type_bytes: Option<u64>,
    },
}

/// Lengths in bytes. The `length` of a frame is the value of its own length field.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Raw {
    #[serde(skip_serializing_if = "Option::is_none")]
    length: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_length: Option<u64>,
}

impl Raw {
    pub(super) const fn whole(bytes: usize) -> Self {
        Self { length: Some(bytes as u64), payload_length: None }
    }

    const fn payload(bytes: u16) -> Self {
        Self { length: Some(bytes as u64), payload_length: Some(bytes as u64) }
    }
}

/// A value that the draft requires and the log does not keep.
#[derive(Debug, Serialize)]
pub(super) struct Nothing {}

#[derive(Debug, Serialize)]
pub(super) struct Ecn {
    ect0: u64,
    ect1: u64,
    ce: u64,
}

/// Packet numbers that are acknowledged: the lowest and the highest.
#[derive(Debug)]
pub(super) struct Acked(pub(super) RangeInclusive<u64>);

impl Serialize for Acked {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let (low, high) = (*self.0.start(), *self.0.end());
        if low == high { [low].serialize(to) } else { [low, high].serialize(to) }
    }
}

const fn stream_type(of: &events::StreamType) -> &'static str {
    match of {
        events::StreamType::Unidirectional { .. } => "unidirectional",
        _ => "bidirectional",
    }
}

impl From<&events::Frame> for Frame {
    fn from(frame: &events::Frame) -> Self {
        use events::Frame as From;
        // Application error codes have no names here.
        let error = "unknown";
        match frame {
            From::Padding { len, .. } => Self::Padding { raw: Raw::payload(*len) },
            From::Ping { .. } => Self::Ping {},
            From::Ack { ecn_counts, .. } => Self::Ack {
                acked_ranges: Vec::new(),
                ecn: ecn_counts.as_ref().map(|counts| Ecn {
                    ect0: counts.ect_0_count,
                    ect1: counts.ect_1_count,
                    ce: counts.ce_count,
                }),
            },
            &From::ResetStream { id: stream_id, error_code, final_size, .. } => {
                Self::ResetStream { stream_id, error, error_code, final_size }
            }
            &From::StopSending { id: stream_id, error_code, .. } => Self::StopSending { stream_id, error, error_code },
            &From::Crypto { offset, len, .. } => Self::Crypto { offset, raw: Raw::payload(len) },
            From::NewToken { .. } => Self::NewToken { token: Nothing {} },
            &From::Stream { id: stream_id, offset, len, is_fin: fin, .. } => {
                Self::Stream { stream_id, offset, fin, raw: Raw::payload(len) }
            }
            &From::MaxData { value: maximum, .. } => Self::MaxData { maximum },
            &From::MaxStreamData { id: stream_id, value: maximum, .. } => Self::MaxStreamData { stream_id, maximum },
            From::MaxStreams { stream_type: of, value, .. } => {
                Self::MaxStreams { stream_type: stream_type(of), maximum: *value }
            }
            &From::DataBlocked { data_limit: limit, .. } => Self::DataBlocked { limit },
            &From::StreamDataBlocked { stream_id, stream_data_limit: limit, .. } => {
                Self::StreamDataBlocked { stream_id, limit }
            }
            From::StreamsBlocked { stream_type: of, stream_limit, .. } => {
                Self::StreamsBlocked { stream_type: stream_type(of), limit: *stream_limit }
            }
            &From::NewConnectionId { sequence_number, retire_prior_to, .. } => {
                Self::NewConnectionId { sequence_number, retire_prior_to, connection_id: "" }
            }
            // The transport does not report its fields, without which the draft has no RETIRE_CONNECTION_ID
            // (RFC 9000 §19.16).
            From::RetireConnectionId { .. } => Self::Unknown { frame_type_bytes: Some(0x19) },
            From::PathChallenge { .. } => Self::PathChallenge {},
            From::PathResponse { .. } => Self::PathResponse {},
            From::ConnectionClose { .. } => Self::ConnectionClose {},
            From::HandshakeDone { .. } => Self::HandshakeDone {},
            From::Datagram { len, .. } => Self::Datagram { raw: Raw::payload(*len) },
            _ => Self::Unknown { frame_type_bytes: None },
        }
    }
}
