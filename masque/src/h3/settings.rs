//! SETTINGS (RFC 9114 §7.2.4, RFC 9204 §5, RFC 9220 §3, RFC 9297 §2.1.1).

use std::collections::HashSet;

use bytes::BufMut;

use super::{
    Role,
    error::{Code, ProtocolError},
    frame,
};
use crate::varint;

const QPACK_MAX_TABLE_CAPACITY: u64 = 0x01;
const MAX_FIELD_SECTION_SIZE: u64 = 0x06;
const ENABLE_CONNECT_PROTOCOL: u64 = 0x08;
const H3_DATAGRAM: u64 = 0x33;
/// A reserved identifier (0x1f·N + 0x21), sent so that peers keep ignoring unknown settings (RFC 9114 §7.2.4.1). It
/// never varies, so that runs are repeatable.
const RESERVED: u64 = 0x1f * 42 + 0x21;

/// What one side accepts, as far as it concerns a proxy without a QPACK dynamic table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The largest field section in bytes, counted as name + value + 32 for each field (RFC 9114 §4.2.2); `None`
    /// means no limit.
    pub max_field_section_size: Option<u64>,
    /// Whether extended CONNECT is supported (RFC 9220 §3); meaningful only from a server.
    pub enable_connect_protocol: bool,
    /// Whether HTTP Datagrams are supported (RFC 9297 §2.1.1).
    pub h3_datagram: bool,
}

impl Settings {
    /// Returns the settings that a proxy (server) or its client announces: HTTP Datagrams, and from the server also
    /// extended CONNECT.
    #[must_use]
    pub const fn announced_by(role: Role, max_field_section_size: u64) -> Self {
        Self {
            max_field_section_size: Some(max_field_section_size),
            enable_connect_protocol: matches!(role, Role::Server),
            h3_datagram: true,
        }
    }

    /// Appends the SETTINGS frame.
    pub(super) fn write(&self, out: &mut impl BufMut) {
        let settings = [
            (QPACK_MAX_TABLE_CAPACITY, Some(0)),
            (MAX_FIELD_SECTION_SIZE, self.max_field_section_size),
            (ENABLE_CONNECT_PROTOCOL, self.enable_connect_protocol.then_some(1)),
            (H3_DATAGRAM, self.h3_datagram.then_some(1)),
            (RESERVED, Some(0)),
        ];
        let mut payload = Vec::new();
        for (id, value) in settings {
            if let Some(value) = value {
                varint::write(id, &mut payload);
                varint::write(value, &mut payload);
            }
        }
        frame::write_header(frame::SETTINGS, payload.len() as u64, out);
        out.put_slice(&payload);
    }

    /// Reads the payload of a SETTINGS frame.
    pub(super) fn parse(mut payload: &[u8]) -> Result<Self, ProtocolError> {
        const BROKEN: ProtocolError = ProtocolError::Connection(Code::FrameError, "SETTINGS ends inside a setting");
        let mut settings = Self::default();
        let mut seen = HashSet::new();
        while !payload.is_empty() {
            let id = varint::read(&mut payload).ok_or(BROKEN)?;
            let value = varint::read(&mut payload).ok_or(BROKEN)?;
            if !seen.insert(id) {
                return Err(ProtocolError::Connection(Code::SettingsError, "a setting is repeated"));
            }
            match id {
                MAX_FIELD_SECTION_SIZE => settings.max_field_section_size = Some(value),
                ENABLE_CONNECT_PROTOCOL => settings.enable_connect_protocol = flag(value)?,
                H3_DATAGRAM => settings.h3_datagram = flag(value)?,
                // RFC 9114 §7.2.4.1: settings of HTTP/2 without a meaning in HTTP/3.
                0x00 | 0x02..=0x05 => {
                    return Err(ProtocolError::Connection(Code::SettingsError, "a setting of HTTP/2 was sent"));
                }
                // The QPACK settings permit our encoder more than it uses; every other setting is unknown.
                _ => {}
            }
        }
        Ok(settings)
    }
}

/// Reads a setting that is 0 or 1.
fn flag(value: u64) -> Result<bool, ProtocolError> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(ProtocolError::Connection(Code::SettingsError, "a setting that is 0 or 1 has another value")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn code(payload: &[u8]) -> Code {
        let error = Settings::parse(payload).unwrap_err();
        assert!(matches!(error, ProtocolError::Connection(..)));
        error.code()
    }

    #[test]
    fn a_repeated_setting_is_an_error_even_if_it_is_unknown() {
        // RFC 9114 §7.2.4
        assert_eq!(code(&[0x06, 0x01, 0x06, 0x01]), Code::SettingsError);
        assert_eq!(code(&[0x21, 0x01, 0x06, 0x01, 0x21, 0x02]), Code::SettingsError);
        assert_eq!(code(&[0x40, 0x33, 0x01, 0x33, 0x01]), Code::SettingsError);
    }

    #[test]
    fn settings_of_http_2_are_errors() {
        // RFC 9114 §7.2.4.1 and §11.2.2
        for id in [0x00, 0x02, 0x03, 0x04, 0x05] {
            assert_eq!(code(&[id, 0x00]), Code::SettingsError, "{id:#x}");
        }
    }

    #[test]
    fn switches_are_zero_or_one() {
        // RFC 8441 §3 by way of RFC 9220 §3; RFC 9297 §2.1.1
        for id in [0x08, 0x33] {
            assert_eq!(code(&[id, 0x02]), Code::SettingsError, "{id:#x}");
            assert_eq!(Settings::parse(&[id, 0x00]), Ok(Settings::default()), "{id:#x}");
        }
        assert!(Settings::parse(&[0x08, 0x01]).unwrap().enable_connect_protocol);
        assert!(Settings::parse(&[0x33, 0x01]).unwrap().h3_datagram);
    }

    #[test]
    fn a_setting_cut_short_is_a_frame_error() {
        // RFC 9114 §7.1
        for payload in [&[0x06][..], &[0x06, 0x40], &[0x40], &[0x06, 0x01, 0x33]] {
            assert_eq!(code(payload), Code::FrameError, "{payload:?}");
        }
    }

    #[test]
    fn unknown_settings_and_those_of_qpack_change_nothing() {
        assert_eq!(Settings::parse(&[0x01, 0x50, 0x00, 0x07, 0x10, 0x21, 0x05, 0x0a, 0x01]), Ok(Settings::default()));
    }

    #[test]
    fn a_server_announces_extended_connect_and_a_client_does_not() {
        assert!(Settings::announced_by(Role::Server, 1).enable_connect_protocol);
        assert!(!Settings::announced_by(Role::Client, 1).enable_connect_protocol);
    }

    proptest! {
        #[test]
        fn announced_settings_parse_back(size in prop::option::of(0..=varint::MAX), connect: bool, datagram: bool) {
            let settings = Settings {
                max_field_section_size: size,
                enable_connect_protocol: connect,
                h3_datagram: datagram,
            };
            let mut bytes = Vec::new();
            settings.write(&mut bytes);
            let mut rest = &bytes[..];
            prop_assert_eq!(varint::read(&mut rest), Some(frame::SETTINGS));
            prop_assert_eq!(varint::read(&mut rest), Some(rest.len() as u64));
            prop_assert_eq!(Settings::parse(rest), Ok(settings));
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Settings::parse(&bytes);
        }
    }
}
