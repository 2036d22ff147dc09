//! Errors of connections and streams, and their codes.

use std::fmt;

/// An HTTP/3 error code (RFC 9114 §8.1, RFC 9204 §6, RFC 9297 §5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Code {
    /// `H3_DATAGRAM_ERROR`: an HTTP Datagram or a capsule that cannot be parsed.
    DatagramError = 0x33,
    /// `H3_NO_ERROR`: no error occurred.
    NoError = 0x100,
    /// `H3_GENERAL_PROTOCOL_ERROR`: a violation that no other code names.
    GeneralProtocolError = 0x101,
    /// `H3_INTERNAL_ERROR`: this endpoint failed, not its peer.
    InternalError = 0x102,
    /// `H3_STREAM_CREATION_ERROR`: a stream that must not be opened.
    StreamCreationError = 0x103,
    /// `H3_CLOSED_CRITICAL_STREAM`: a stream that the connection requires has ended.
    ClosedCriticalStream = 0x104,
    /// `H3_FRAME_UNEXPECTED`: a frame that is not allowed here or now.
    FrameUnexpected = 0x105,
    /// `H3_FRAME_ERROR`: a frame whose layout or size is wrong.
    FrameError = 0x106,
    /// `H3_EXCESSIVE_LOAD`: the peer asks for more than this endpoint is willing to buffer.
    ExcessiveLoad = 0x107,
    /// `H3_ID_ERROR`: a stream ID or push ID used wrongly.
    IdError = 0x108,
    /// `H3_SETTINGS_ERROR`: a setting that is duplicated, reserved or out of range.
    SettingsError = 0x109,
    /// `H3_MISSING_SETTINGS`: a control stream that does not begin with SETTINGS.
    MissingSettings = 0x10a,
    /// `H3_REQUEST_REJECTED`: the request was not processed at all.
    RequestRejected = 0x10b,
    /// `H3_REQUEST_CANCELLED`: the request, or its response, is no longer wanted.
    RequestCancelled = 0x10c,
    /// `H3_REQUEST_INCOMPLETE`: the stream ended before the request was complete.
    RequestIncomplete = 0x10d,
    /// `H3_MESSAGE_ERROR`: a malformed message.
    MessageError = 0x10e,
    /// `H3_CONNECT_ERROR`: the TCP connection of a CONNECT tunnel failed.
    ConnectError = 0x10f,
    /// `H3_VERSION_FALLBACK`: the request has to be repeated over HTTP/1.1.
    VersionFallback = 0x110,
    /// `QPACK_DECOMPRESSION_FAILED`: a field section that cannot be decoded.
    QpackDecompressionFailed = 0x200,
    /// `QPACK_ENCODER_STREAM_ERROR`: an encoder instruction that is invalid or not allowed.
    QpackEncoderStreamError = 0x201,
    /// `QPACK_DECODER_STREAM_ERROR`: a decoder instruction that is invalid or refers to nothing.
    QpackDecoderStreamError = 0x202,
}

impl Code {
    /// All codes.
    const ALL: [Self; 21] = [
        Self::DatagramError,
        Self::NoError,
        Self::GeneralProtocolError,
        Self::InternalError,
        Self::StreamCreationError,
        Self::ClosedCriticalStream,
        Self::FrameUnexpected,
        Self::FrameError,
        Self::ExcessiveLoad,
        Self::IdError,
        Self::SettingsError,
        Self::MissingSettings,
        Self::RequestRejected,
        Self::RequestCancelled,
        Self::RequestIncomplete,
        Self::MessageError,
        Self::ConnectError,
        Self::VersionFallback,
        Self::QpackDecompressionFailed,
        Self::QpackEncoderStreamError,
        Self::QpackDecoderStreamError,
    ];

    /// Returns the value for CONNECTION_CLOSE, RESET_STREAM and STOP_SENDING frames.
    #[must_use]
    pub const fn value(self) -> u64 {
        self as u64
    }

    /// Returns the code with this value, or `None` for all other values, including those reserved for greasing,
    /// which mean the same as `H3_NO_ERROR` (RFC 9114 §8.1).
    #[must_use]
    pub fn from_value(value: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.value() == value)
    }

    /// Returns the name under which the code is registered.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DatagramError => "H3_DATAGRAM_ERROR",
            Self::NoError => "H3_NO_ERROR",
            Self::GeneralProtocolError => "H3_GENERAL_PROTOCOL_ERROR",
            Self::InternalError => "H3_INTERNAL_ERROR",
            Self::StreamCreationError => "H3_STREAM_CREATION_ERROR",
            Self::ClosedCriticalStream => "H3_CLOSED_CRITICAL_STREAM",
            Self::FrameUnexpected => "H3_FRAME_UNEXPECTED",
            Self::FrameError => "H3_FRAME_ERROR",
            Self::ExcessiveLoad => "H3_EXCESSIVE_LOAD",
            Self::IdError => "H3_ID_ERROR",
            Self::SettingsError => "H3_SETTINGS_ERROR",
            Self::MissingSettings => "H3_MISSING_SETTINGS",
            Self::RequestRejected => "H3_REQUEST_REJECTED",
            Self::RequestCancelled => "H3_REQUEST_CANCELLED",
            Self::RequestIncomplete => "H3_REQUEST_INCOMPLETE",
            Self::MessageError => "H3_MESSAGE_ERROR",
            Self::ConnectError => "H3_CONNECT_ERROR",
            Self::VersionFallback => "H3_VERSION_FALLBACK",
            Self::QpackDecompressionFailed => "QPACK_DECOMPRESSION_FAILED",
            Self::QpackEncoderStreamError => "QPACK_ENCODER_STREAM_ERROR",
            Self::QpackDecoderStreamError => "QPACK_DECODER_STREAM_ERROR",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A broken rule: the scope of the error, its code, and the reason as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Close the connection with this code.
    #[error("{0}: {1}")]
    Connection(Code, &'static str),
    /// Reset this stream and stop reading it, both with this code; the connection continues. A server may answer
    /// first: see [`ProtocolError::answer`].
    #[error("{0} on one stream: {1}")]
    Stream(Code, &'static str),
}

impl ProtocolError {
    /// Returns the code, whether it ends a stream or the connection.
    #[must_use]
    pub const fn code(&self) -> Code {
        match *self {
            Self::Connection(code, _) | Self::Stream(code, _) => code,
        }
    }

    /// Returns the status with which a server may still answer a request that failed in this way, if it has not
    /// begun its response: 400 for a malformed request (RFC 9114 §4.1.2), 431 for a field section beyond our limit
    /// (§4.2.2). `None` means that the stream, or the connection, ends without an answer.
    #[must_use]
    pub const fn answer(&self) -> Option<u16> {
        match self {
            Self::Stream(Code::MessageError, _) => Some(400),
            Self::Stream(Code::ExcessiveLoad, _) => Some(431),
            _ => None,
        }
    }
}

/// The error of a malformed message (RFC 9114 §4.1.2).
pub(super) const fn malformed(reason: &'static str) -> ProtocolError {
    ProtocolError::Stream(Code::MessageError, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_found_by_its_number_and_others_are_not() {
        for code in Code::ALL {
            assert_eq!(Code::from_value(code.value()), Some(code));
        }
        // A code reserved to keep peers tolerant (RFC 9114 §8.1).
        assert_eq!(Code::from_value(0x1f * 7 + 0x21), None);
    }
}
