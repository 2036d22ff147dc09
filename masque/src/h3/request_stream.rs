//! The receiving side of a request stream (RFC 9114 §4.1): the permitted order of frames, and the messages in them.

use bytes::{Bytes, BytesMut};

use super::{
    Role,
    error::{Code, ProtocolError, malformed},
    field::Field,
    frame::{Cutter, Kind, Step},
    message::{RequestHead, ResponseHead, content_length, parse_trailers},
    qpack,
};

/// A piece of a message, in the order of arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The head of a request; a server receives exactly one, first.
    Request(RequestHead),
    /// The head of a response; a client receives any number of interim ones and then the final one.
    Response(ResponseHead),
    /// A piece of the content, never empty: a slice of the received bytes.
    Data(Bytes),
    /// The trailer section; no part follows it.
    Trailers(Vec<Field>),
}

/// Which frames may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The head, or for a client also another interim one.
    Head,
    /// Content or trailers.
    Content,
    /// None: the stream has to end.
    End,
    /// The payload of a tunnel.
    Tunnel,
    /// None: an error was reported, and the rest is discarded.
    Failed,
}

/// The receiving side of a request stream. Parts are pulled, so that [`RequestStream::set_connect`] can take effect
/// between a head and the bytes right behind it:
///
/// ```
/// # use masque::h3::{Part, ProtocolError, RequestStream, Role};
/// # fn read(stream: &mut RequestStream, chunk: bytes::Bytes) -> Result<(), ProtocolError> {
/// stream.on_bytes(chunk);
/// while let Some(part) = stream.next_part()? {
///     // …
/// }
/// # Ok(())
/// # }
/// ```
///
/// It buffers incomplete field sections, up to the limit given to [`RequestStream::new`], and no content.
///
/// A client must not use it to read the response to HEAD, whose `content-length` counts bytes that are never sent.
#[derive(Debug)]
pub struct RequestStream {
    cutter: Cutter,
    /// Bytes that were received and not yet pulled.
    input: Bytes,
    /// The beginning of a field section that has not arrived completely.
    section: Vec<u8>,
    max_field_section_size: u64,
    /// How many bytes are missing according to `content-length`.
    content_left: Option<u64>,
    /// How many frames began since they were taken.
    frames: u32,
    role: Role,
    phase: Phase,
}

impl RequestStream {
    /// Creates the stream as `role` receives it. A field section larger than `max_field_section_size` bytes,
    /// compressed or not, is refused; the limit should be the announced
    /// [`Settings::max_field_section_size`](super::Settings).
    #[must_use]
    pub const fn new(role: Role, max_field_section_size: u64) -> Self {
        Self {
            cutter: Cutter::new(),
            input: Bytes::new(),
            section: Vec::new(),
            max_field_section_size,
            content_left: None,
            frames: 0,
            role,
            phase: Phase::Head,
        }
    }

    /// Adds received bytes. Pull all parts before adding more: bytes not yet pulled are copied to join them.
    pub fn on_bytes(&mut self, bytes: Bytes) {
        if self.phase == Phase::Failed {
            return;
        }
        self.input = if self.input.is_empty() {
            bytes
        } else {
            let mut joined = BytesMut::from(&self.input[..]);
            joined.extend_from_slice(&bytes);
            joined.freeze()
        };
    }

    /// Returns the next part, or `None` until more bytes arrive.
    ///
    /// # Errors
    /// Returns the first rule that the peer broke. After that the stream ignores its input: all later bytes are
    /// discarded, so that a server can send its [`ProtocolError::answer`] and read on.
    pub fn next_part(&mut self) -> Result<Option<Part>, ProtocolError> {
        let part = self.pull();
        match part {
            Ok(Some(_)) => {}
            Ok(None) => self.input = Bytes::new(), // empty, but a slice of it would keep its chunk alive
            Err(_) => *self = Self { phase: Phase::Failed, ..Self::new(self.role, self.max_field_section_size) },
        }
        part
    }

    /// Notes that the peer finished the stream, once all parts were pulled.
    ///
    /// # Errors
    /// If a frame or the message is incomplete.
    pub fn on_fin(&mut self) -> Result<(), ProtocolError> {
        debug_assert!(self.input.is_empty(), "all parts are pulled before the end is judged");
        self.cutter.finish()?;
        match (self.phase, self.role) {
            (Phase::Head, Role::Server) => {
                Err(ProtocolError::Stream(Code::RequestIncomplete, "the stream ended before the request"))
            }
            (Phase::Head, Role::Client) => Err(malformed("the stream ended before the final response")),
            (Phase::Content, _) => self.check_content_is_whole(),
            _ => Ok(()),
        }
    }

    /// Turns the stream into a tunnel: from now on only DATA and unknown frames may come (RFC 9114 §4.4), and
    /// `content-length` no longer counts. A server calls it when it accepts a CONNECT, a client when its CONNECT was
    /// accepted.
    pub fn set_connect(&mut self) {
        if self.phase == Phase::Content {
            self.phase = Phase::Tunnel;
        }
    }

    /// Returns how many frames of any kind have begun since the last call. A caller that bounds what a peer costs needs it: frames that are
    /// skipped or empty yield no part.
    #[inline]
    pub fn take_frames(&mut self) -> u32 {
        std::mem::take(&mut self.frames)
    }

    fn pull(&mut self) -> Result<Option<Part>, ProtocolError> {
        while let Some(step) = self.cutter.next(&mut self.input) {
            match step {
                Step::Start { kind, len } => {
                    self.frames = self.frames.saturating_add(1);
                    self.admit(kind, len)?;
                }
                Step::Payload { kind: Kind::Data, piece, .. } if !piece.is_empty() => {
                    return Ok(Some(Part::Data(piece)));
                }
                Step::Payload { kind: Kind::Headers, piece, last } => {
                    if let Some(section) = self.collect(piece, last) {
                        return self.on_section(&section).map(Some);
                    }
                }
                Step::Payload { .. } => {}
            }
        }
        Ok(None)
    }

    /// Checks whether a frame may begin now.
    fn admit(&mut self, kind: Kind, len: u64) -> Result<(), ProtocolError> {
        match (kind, self.phase) {
            (Kind::Unknown, _) | (Kind::Data, Phase::Tunnel) => Ok(()),
            (Kind::Data, Phase::Content) => {
                if let Some(left) = &mut self.content_left {
                    *left = left.checked_sub(len).ok_or(malformed("there is more content than content-length"))?;
                }
                Ok(())
            }
            (Kind::Headers, Phase::Head | Phase::Content) if len > self.max_field_section_size => {
                Err(qpack::SECTION_TOO_LARGE)
            }
            (Kind::Headers, Phase::Head) => Ok(()),
            (Kind::Headers, Phase::Content) => self.check_content_is_whole(),
            // RFC 9114 §7.2.5: every push ID is beyond the limit of a client that never sent one.
            (Kind::PushPromise, Phase::Head | Phase::Content | Phase::End) if self.role == Role::Client => {
                Err(ProtocolError::Connection(Code::IdError, "a push was promised that was never allowed"))
            }
            _ => Err(ProtocolError::Connection(
                Code::FrameUnexpected,
                "a frame is not allowed at this place of its stream",
            )),
        }
    }

    /// Returns the field section once it is whole.
    fn collect(&mut self, piece: Bytes, last: bool) -> Option<Bytes> {
        if last && self.section.is_empty() {
            return Some(piece);
        }
        self.section.extend_from_slice(&piece);
        last.then(|| Bytes::from(std::mem::take(&mut self.section)))
    }

    fn on_section(&mut self, section: &[u8]) -> Result<Part, ProtocolError> {
        let fields = qpack::decode(section, self.max_field_section_size)?;
        if self.phase == Phase::Content {
            self.phase = Phase::End;
            return parse_trailers(fields).map(Part::Trailers);
        }
        match self.role {
            Role::Server => {
                let head = RequestHead::parse(fields)?;
                self.phase = Phase::Content;
                // RFC 9110 §9.3.6: a CONNECT has no content that a length could describe.
                self.content_left = if head.is_connect() { None } else { content_length(&head.fields)? };
                Ok(Part::Request(head))
            }
            Role::Client => {
                let head = ResponseHead::parse(fields)?;
                if !head.is_interim() {
                    self.phase = Phase::Content;
                    // RFC 9110 §15.3.5, §15.4.5: these responses have no content, whatever they declare.
                    self.content_left =
                        if matches!(head.status, 204 | 304) { None } else { content_length(&head.fields)? };
                }
                Ok(Part::Response(head))
            }
        }
    }

    fn check_content_is_whole(&self) -> Result<(), ProtocolError> {
        match self.content_left {
            None | Some(0) => Ok(()),
            Some(_) => Err(malformed("there is less content than content-length")),
        }
    }
}

#[cfg(test)]
mod tests;
