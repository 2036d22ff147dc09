//! Connection state beyond the requests: the peer's unidirectional streams (RFC 9114 §6.2), above all its control stream
//! and the frames on it.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

use super::{
    Role, Settings,
    error::{Code, ProtocolError},
    frame::{self, Cutter, Kind, Step, single_id},
    qpack::{self, DecoderStream},
};
use crate::varint;

/// The largest payload of a frame on the control stream that is buffered; unknown frames are not buffered. No frame used
/// here comes close.
const MAX_PAYLOAD_BYTES: u64 = 4096;

/// How many events may wait for [`ControlReceiver::next_event`] before further PRIORITY_UPDATE frames are dropped.
const MAX_EVENTS: usize = 256;

const CONTROL: u64 = 0x00;
const PUSH: u64 = 0x01;
const QPACK_ENCODER: u64 = 0x02;
const QPACK_DECODER: u64 = 0x03;

/// A message of the peer about the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlEvent {
    /// The peer's settings; exactly once, before every other event.
    Settings(Settings),
    /// The peer is going away (RFC 9114 §5.2). A client receives the ID of the first request stream that will not be
    /// served; a server receives a push ID, which means nothing to it.
    GoAway(u64),
    /// The client changes the priority of a request (RFC 9218 §7.2). The stream may not be open yet.
    PriorityUpdate {
        /// The ID of the request stream.
        stream_id: u64,
        /// A Priority field value, unparsed.
        value: Bytes,
    },
}

/// What to do with a unidirectional stream after some of its bytes were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UniVerdict {
    /// Continue reading.
    Continue,
    /// The stream's type is unknown: stop reading it with this code. Bytes read after all are ignored.
    StopSending(Code),
}

/// One unidirectional stream opened by the peer.
#[derive(Debug)]
pub struct UniStream(State);

#[derive(Debug)]
enum State {
    /// The stream type has not arrived completely; these are its first bytes.
    Typeless {
        held: [u8; 8],
        len: u8,
    },
    Control {
        cutter: Cutter,
        payload: BytesMut,
    },
    QpackEncoder,
    QpackDecoder(DecoderStream),
    Ignored,
}

/// The receiving side of a connection, apart from its requests.
#[derive(Debug)]
pub struct ControlReceiver {
    role: Role,
    local: Settings,
    has_settings: bool,
    /// Which of the three streams that may exist only once have been opened.
    opened: [bool; 3],
    last_goaway: Option<u64>,
    max_push_id: Option<u64>,
    events: VecDeque<ControlEvent>,
    dropped_priority_updates: u64,
    /// How many frames began on the control stream since they were taken.
    frames: u32,
}

impl ControlReceiver {
    /// Creates the state of a connection in which this endpoint is `role` and announces `local`.
    #[must_use]
    pub const fn new(role: Role, local: Settings) -> Self {
        Self {
            role,
            local,
            has_settings: false,
            opened: [false; 3],
            last_goaway: None,
            max_push_id: None,
            events: VecDeque::new(),
            dropped_priority_updates: 0,
            frames: 0,
        }
    }

    /// Returns the beginning of our control stream: its type and SETTINGS.
    #[must_use]
    pub fn preamble(&self) -> Bytes {
        let mut out = BytesMut::new();
        varint::write(CONTROL, &mut out);
        self.local.write(&mut out);
        out.freeze()
    }

    /// Encodes GOAWAY for our control stream. A server sends the first request stream that it will not serve, a client the
    /// first push that it will not accept: 0. IDs must not grow from one GOAWAY to the next (RFC 9114 §5.2).
    #[must_use]
    pub fn goaway(id: u64) -> Bytes {
        let mut out = BytesMut::new();
        frame::write_header(frame::GOAWAY, varint::encoded_len(id) as u64, &mut out);
        varint::write(id, &mut out);
        out.freeze()
    }

    /// Encodes PRIORITY_UPDATE for a client's control stream, which gives a request the priority in this Priority field
    /// value (RFC 9218 §7.2).
    #[must_use]
    pub fn priority_update(stream_id: u64, value: &[u8]) -> Bytes {
        let mut out = BytesMut::new();
        let payload_len = varint::encoded_len(stream_id) + value.len();
        frame::write_header(frame::PRIORITY_UPDATE_REQUEST, payload_len as u64, &mut out);
        varint::write(stream_id, &mut out);
        out.extend_from_slice(value);
        out.freeze()
    }

    /// Returns the oldest event not yet taken. Take all of them after each [`ControlReceiver::on_uni_bytes`].
    pub fn next_event(&mut self) -> Option<ControlEvent> {
        self.events.pop_front()
    }

    /// Returns how many PRIORITY_UPDATE frames were dropped since the last call because 256 events were waiting. They are
    /// advisory, so the loss breaks nothing.
    pub fn take_dropped_priority_updates(&mut self) -> u64 {
        std::mem::take(&mut self.dropped_priority_updates)
    }

    /// Returns how many frames of any kind have begun on the control stream since the last call.
    pub fn take_frames(&mut self) -> u32 {
        std::mem::take(&mut self.frames)
    }

    /// Creates the state of a unidirectional stream opened by the peer.
    #[must_use]
    pub const fn accept_uni(&mut self) -> UniStream {
        UniStream(State::Typeless { held: [0; 8], len: 0 })
    }

    /// Processes bytes of a unidirectional stream, in order.
    ///
    /// # Errors
    /// Every error ends the connection.
    pub fn on_uni_bytes(&mut self, stream: &mut UniStream, mut bytes: Bytes) -> Result<UniVerdict, ProtocolError> {
        if let Some(kind) = stream.read_type(&mut bytes) {
            stream.0 = self.open(kind)?;
            if matches!(stream.0, State::Ignored) {
                return Ok(UniVerdict::StopSending(Code::StreamCreationError));
            }
        }
        match &mut stream.0 {
            State::Control { cutter, payload } => self.on_control_bytes(cutter, payload, bytes)?,
            State::QpackEncoder => qpack::on_encoder_bytes(&bytes)?,
            State::QpackDecoder(decoder_stream) => decoder_stream.on_bytes(&bytes)?,
            State::Typeless { .. } | State::Ignored => {}
        }
        Ok(UniVerdict::Continue)
    }

    /// Notes that the peer finished or reset a unidirectional stream.
    ///
    /// # Errors
    /// If the connection cannot continue without that stream (RFC 9114 §6.2.1, RFC 9204 §4.2).
    pub fn on_uni_closed(&mut self, stream: &UniStream) -> Result<(), ProtocolError> {
        match stream.0 {
            State::Control { .. } | State::QpackEncoder | State::QpackDecoder(_) => {
                Err(ProtocolError::Connection(Code::ClosedCriticalStream, "a critical stream was closed"))
            }
            // RFC 9114 §6.2: a stream may end before its type is known.
            State::Typeless { .. } | State::Ignored => Ok(()),
        }
    }

    /// Returns the state for a stream of type `kind` (RFC 9114 §6.2, RFC 9204 §4.2).
    fn open(&mut self, kind: u64) -> Result<State, ProtocolError> {
        let (slot, state) = match kind {
            CONTROL => (0, State::Control { cutter: Cutter::new(), payload: BytesMut::new() }),
            QPACK_ENCODER => (1, State::QpackEncoder),
            QPACK_DECODER => (2, State::QpackDecoder(DecoderStream::default())),
            PUSH => return Err(self.judge_push()),
            _ => return Ok(State::Ignored),
        };
        if std::mem::replace(&mut self.opened[slot], true) {
            return Err(ProtocolError::Connection(
                Code::StreamCreationError,
                "a stream that exists once was opened again",
            ));
        }
        Ok(state)
    }

    /// RFC 9114 §6.2.2: servers receive no pushes, and clients receive none that they did not allow.
    const fn judge_push(&self) -> ProtocolError {
        match self.role {
            Role::Server => ProtocolError::Connection(Code::StreamCreationError, "a client opened a push stream"),
            Role::Client => ProtocolError::Connection(Code::IdError, "a push was opened that was never allowed"),
        }
    }

    fn on_control_bytes(
        &mut self,
        cutter: &mut Cutter,
        payload: &mut BytesMut,
        mut bytes: Bytes,
    ) -> Result<(), ProtocolError> {
        while let Some(step) = cutter.next(&mut bytes) {
            match step {
                Step::Start { kind, len } => {
                    self.frames = self.frames.saturating_add(1);
                    self.admit(kind, len)?;
                }
                Step::Payload { kind: Kind::Unknown, .. } => {}
                Step::Payload { kind, piece, last } => {
                    payload.extend_from_slice(&piece);
                    if last {
                        self.on_frame(kind, payload.split().freeze())?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks whether a frame may begin on the control stream now.
    fn admit(&self, kind: Kind, len: u64) -> Result<(), ProtocolError> {
        let unexpected = match kind {
            _ if !self.has_settings && kind != Kind::Settings => {
                return Err(ProtocolError::Connection(
                    Code::MissingSettings,
                    "the control stream does not begin with SETTINGS",
                ));
            }
            Kind::Unknown => return Ok(()),
            Kind::Settings => self.has_settings,
            Kind::Data | Kind::Headers | Kind::PushPromise | Kind::Http2 => true,
            Kind::MaxPushId | Kind::PriorityUpdateRequest | Kind::PriorityUpdatePush => self.role == Role::Client,
            Kind::CancelPush | Kind::GoAway => false,
        };
        if unexpected {
            return Err(ProtocolError::Connection(
                Code::FrameUnexpected,
                "a frame is not allowed on this control stream",
            ));
        }
        if len > MAX_PAYLOAD_BYTES {
            return Err(ProtocolError::Connection(Code::ExcessiveLoad, "a frame of the control stream is too large"));
        }
        Ok(())
    }

    /// Processes a whole frame that [`ControlReceiver::admit`] accepted.
    fn on_frame(&mut self, kind: Kind, mut payload: Bytes) -> Result<(), ProtocolError> {
        let id_error = |reason| Err(ProtocolError::Connection(Code::IdError, reason));
        match kind {
            Kind::Settings => {
                let settings = Settings::parse(&payload)?;
                self.has_settings = true;
                self.events.push_back(ControlEvent::Settings(settings));
            }
            Kind::GoAway => {
                let id = single_id(&payload)?;
                if self.role == Role::Client && !is_request_stream(id) {
                    return id_error("GOAWAY does not name a request stream");
                }
                if self.last_goaway.is_some_and(|last| id > last) {
                    return id_error("the ID in GOAWAY has grown");
                }
                // Only the last GOAWAY counts, so at most one is queued.
                self.events.retain(|event| !matches!(event, ControlEvent::GoAway(_)));
                self.last_goaway = Some(id);
                self.events.push_back(ControlEvent::GoAway(id));
            }
            Kind::MaxPushId => {
                let id = single_id(&payload)?;
                if self.max_push_id.is_some_and(|max| id < max) {
                    return id_error("MAX_PUSH_ID has shrunk");
                }
                self.max_push_id = Some(id);
            }
            Kind::CancelPush => {
                single_id(&payload)?;
                // RFC 9114 §7.2.3: no push was ever promised.
                return id_error("CANCEL_PUSH names a push that was never promised");
            }
            Kind::PriorityUpdateRequest | Kind::PriorityUpdatePush => {
                let mut rest = &payload[..];
                let id = varint::read(&mut rest)
                    .ok_or(ProtocolError::Connection(Code::FrameError, "PRIORITY_UPDATE ends inside its ID"))?;
                if kind == Kind::PriorityUpdatePush || !is_request_stream(id) {
                    return id_error("PRIORITY_UPDATE names neither a request nor a promised push");
                }
                if self.events.len() >= MAX_EVENTS {
                    self.dropped_priority_updates += 1;
                    return Ok(());
                }
                let id_len = payload.len() - rest.len();
                let value = payload.split_off(id_len);
                self.events.push_back(ControlEvent::PriorityUpdate { stream_id: id, value });
            }
            Kind::Data | Kind::Headers | Kind::PushPromise | Kind::Http2 | Kind::Unknown => {}
        }
        Ok(())
    }
}

impl UniStream {
    /// Returns the stream type once these bytes complete it.
    fn read_type(&mut self, bytes: &mut Bytes) -> Option<u64> {
        let State::Typeless { held, len } = &mut self.0 else { return None };
        while bytes.has_remaining() {
            held[usize::from(*len)] = bytes.get_u8();
            *len += 1;
            if let Some(kind) = varint::read(&mut &held[..usize::from(*len)]) {
                return Some(kind);
            }
        }
        None
    }
}

/// Whether `id` is that of a client-initiated bidirectional stream (RFC 9000 §2.1).
const fn is_request_stream(id: u64) -> bool {
    id.is_multiple_of(4)
}

#[cfg(test)]
mod tests;
