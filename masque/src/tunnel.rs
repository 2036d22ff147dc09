//! One UDP tunnel (RFC 9298): the form of its payloads, and the handling of received ones. Used by both ends.
//!
//! **The form of sent payloads.** QUIC datagrams if both ends can use them, else capsules; but a peer that has sent
//! only capsules receives capsules, until its first datagram arrives. At the client, one datagram settles the form for good. The proxy
//! follows a client that takes to capsules later, because the path has become too narrow for datagrams, until its next datagram. A client
//! that puts only its largest payloads into capsules keeps receiving datagrams: the proxy follows a capsule that any datagram could have
//! carried, or [`LARGE_CAPSULES`] in a row.

use bytes::{Buf, Bytes};
use thiserror::Error;

use crate::{
    capsule::Capsule,
    datagram::{self, MAX_UDP_PAYLOAD_BYTES, UDP_CONTEXT},
    h3::Code,
};

/// A payload of up to this many bytes fits into a datagram on every path: QUIC needs packets of 1,200 bytes (RFC 9000 §14), and headers take
/// fewer than 100 of them.
const ALWAYS_FITS_BYTES: u64 = 1_100;

/// How many capsules with larger payloads, and no datagram among them, show that the client uses capsules alone.
pub const LARGE_CAPSULES: u8 = 16;

/// How a payload travels between client and proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// In a QUIC DATAGRAM frame.
    Datagram,
    /// In a DATAGRAM capsule on the request stream.
    Capsule,
}

/// Counts of received items that were ignored, as the RFCs demand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredCounts {
    /// HTTP Datagrams with an unregistered context (RFC 9298 §5).
    pub contexts: u64,
    /// Capsules of an unknown type (RFC 9297 §3.2).
    pub capsules: u64,
    /// DATAGRAM capsules longer than the reader's bound (RFC 9297 §3.5).
    pub oversize: u64,
}

/// Why a tunnel has to end: only its request stream is reset.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TunnelError {
    /// An HTTP Datagram ends before its context ID does.
    #[error("an HTTP datagram is too short for its context ID")]
    TruncatedContext(Form),
    /// A payload of context 0 that no UDP packet can carry (RFC 9298 §5).
    #[error("a UDP payload is longer than 65527 bytes")]
    PayloadTooLong,
}

impl TunnelError {
    /// Returns the code with which the stream is reset. A capsule with incomplete contents makes the message
    /// malformed (RFC 9297 §3.3, RFC 9114 §4.1.2).
    #[must_use]
    pub const fn code(self) -> Code {
        match self {
            Self::TruncatedContext(Form::Capsule) => Code::MessageError,
            Self::TruncatedContext(Form::Datagram) | Self::PayloadTooLong => Code::DatagramError,
        }
    }
}

/// The state of one open tunnel.
#[derive(Debug, Default)]
pub struct Tunnel {
    usable: bool,
    /// Whether we are the proxy, which follows its client.
    follows: bool,
    seen: Option<Form>,
    /// How many capsules with large payloads have come since the last datagram.
    large_capsules: u8,
    ignored: IgnoredCounts,
}

impl Tunnel {
    /// Creates a tunnel; for `datagrams_usable` see [`Tunnel::set_datagrams_usable`].
    #[must_use]
    pub fn new(datagrams_usable: bool) -> Self {
        Self { usable: datagrams_usable, ..Self::default() }
    }

    /// Sets whether datagrams can be sent: both ends announced `H3_DATAGRAM` and the peer's transport accepts
    /// DATAGRAM frames (RFC 9297 §2.1.1). The peer's SETTINGS may arrive after its request.
    pub fn set_datagrams_usable(&mut self, usable: bool) {
        self.usable = usable;
    }

    /// Makes this the proxy's end, which follows the client's form.
    pub fn follow_peer(&mut self) {
        self.follows = true;
    }

    /// Returns the form in which the next payload is sent (see the module's rule).
    #[inline]
    #[must_use]
    pub fn form(&self) -> Form {
        match self.seen {
            _ if !self.usable => Form::Capsule,
            Some(Form::Capsule) => Form::Capsule,
            Some(Form::Datagram) | None => Form::Datagram,
        }
    }

    /// Returns the counts of ignored items since the tunnel opened.
    #[must_use]
    pub fn ignored(&self) -> IgnoredCounts {
        self.ignored
    }

    /// Processes an HTTP Datagram from a QUIC DATAGRAM frame, without its quarter stream ID. Returns its UDP payload,
    /// or `None` if the datagram was ignored and counted.
    ///
    /// # Errors
    /// See [`TunnelError`].
    #[inline]
    pub fn on_datagram<'a>(&mut self, http_datagram: &'a [u8]) -> Result<Option<&'a [u8]>, TunnelError> {
        self.payload(http_datagram, http_datagram.len() as u64, Form::Datagram)
    }

    /// Processes a capsule. Returns its UDP payload, or `None` if the capsule was ignored and counted.
    ///
    /// # Errors
    /// See [`TunnelError`].
    #[inline]
    pub fn on_capsule(&mut self, capsule: Capsule) -> Result<Option<Bytes>, TunnelError> {
        match capsule {
            Capsule::Datagram(mut http_datagram) => {
                let payload = self.payload(&http_datagram, http_datagram.len() as u64, Form::Capsule)?;
                Ok(payload.map(<[u8]>::len).map(|payload_bytes| {
                    http_datagram.advance(http_datagram.len() - payload_bytes);
                    http_datagram
                }))
            }
            Capsule::Oversize { len_bytes, start } => {
                if self.payload(&start, len_bytes, Form::Capsule)?.is_some() {
                    self.ignored.oversize += 1;
                }
                Ok(None)
            }
            Capsule::Unknown(_) => {
                self.ignored.capsules += 1;
                Ok(None)
            }
        }
    }

    /// Checks an HTTP Datagram of `len_bytes` that starts with (or is) `start`. Returns the part of its payload in
    /// `start`, or `None` if its context is not registered.
    #[inline]
    fn payload<'a>(&mut self, start: &'a [u8], len_bytes: u64, form: Form) -> Result<Option<&'a [u8]>, TunnelError> {
        let (context_id, payload) = datagram::context(start).ok_or(TunnelError::TruncatedContext(form))?;
        if context_id != UDP_CONTEXT {
            self.ignored.contexts += 1;
            return Ok(None);
        }
        let context_bytes = start.len() - payload.len();
        if len_bytes > (context_bytes + MAX_UDP_PAYLOAD_BYTES) as u64 {
            return Err(TunnelError::PayloadTooLong);
        }
        self.note(form, len_bytes - context_bytes as u64);
        Ok(Some(payload))
    }

    /// Notes the form in which a payload came.
    #[inline]
    fn note(&mut self, form: Form, payload_bytes: u64) {
        if form == Form::Datagram {
            (self.seen, self.large_capsules) = (Some(form), 0);
        } else if self.seen != Some(Form::Datagram) {
            self.seen = Some(form);
        } else if self.follows {
            self.large_capsules += 1;
            if payload_bytes <= ALWAYS_FITS_BYTES || self.large_capsules >= LARGE_CAPSULES {
                self.seen = Some(form);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use Form::{Capsule as InCapsule, Datagram as InDatagram};

    use super::*;

    fn capsule(http_datagram: &'static [u8]) -> Capsule {
        Capsule::Datagram(Bytes::from_static(http_datagram))
    }

    #[test]
    fn payloads_go_out_in_the_form_that_the_peer_can_read_and_uses() {
        for (usable, came, expected) in [
            (true, &[][..], InDatagram),
            (true, &[InCapsule], InCapsule),
            (true, &[InDatagram], InDatagram),
            (true, &[InCapsule, InCapsule, InDatagram], InDatagram),
            (true, &[InDatagram, InCapsule], InDatagram),
            (false, &[], InCapsule),
            (false, &[InDatagram], InCapsule),
        ] {
            let mut tunnel = Tunnel::new(usable);
            for form in came {
                match form {
                    InDatagram => assert_eq!(tunnel.on_datagram(b"\0p"), Ok(Some(&b"p"[..]))),
                    InCapsule => assert_eq!(tunnel.on_capsule(capsule(b"\0p")), Ok(Some(Bytes::from("p")))),
                }
            }
            assert_eq!(tunnel.form(), expected, "datagrams usable: {usable}, came: {came:?}");
        }
    }

    #[test]
    fn the_proxy_follows_a_client_that_takes_to_capsules_and_the_client_does_not_follow_the_proxy() {
        let large: &'static [u8] = Box::leak(vec![0; 1_201].into());
        for (follows, came, expected) in [
            (true, &[&b"\0p"[..]][..], InCapsule),
            (false, &[b"\0p"], InDatagram),
            (true, &[b"\x02x"], InDatagram),
            (true, &[large; 15], InDatagram),
            (true, &[large; 16], InCapsule),
            (false, &[large; 300], InDatagram),
        ] {
            let mut tunnel = Tunnel::new(true);
            if follows {
                tunnel.follow_peer();
            }
            // A datagram in between begins the count again, and brings the form back.
            for _ in 0..2 {
                assert_eq!(tunnel.on_datagram(b"\0p"), Ok(Some(&b"p"[..])));
                assert_eq!(tunnel.form(), InDatagram);
                came.iter().for_each(|payload| _ = tunnel.on_capsule(capsule(payload)).unwrap());
                assert_eq!(tunnel.form(), expected, "{follows}, {} capsules", came.len());
            }
        }
    }

    #[test]
    fn settings_that_arrive_late_open_the_way_for_datagrams() {
        let mut tunnel = Tunnel::new(false);
        tunnel.set_datagrams_usable(true);
        assert_eq!(tunnel.form(), InDatagram);
    }

    #[test]
    fn unregistered_contexts_and_capsules_are_ignored_and_decide_nothing() {
        let mut tunnel = Tunnel::new(true);
        assert_eq!(tunnel.on_datagram(b"\x02x"), Ok(None));
        assert_eq!(tunnel.on_capsule(capsule(b"\x04x")), Ok(None));
        assert_eq!(tunnel.on_capsule(Capsule::Unknown(0x17)), Ok(None));
        assert_eq!(tunnel.form(), InDatagram);
        assert_eq!(tunnel.ignored(), IgnoredCounts { contexts: 2, capsules: 1, oversize: 0 });
    }

    #[test]
    fn empty_payloads_are_payloads_rfc_9298_5() {
        let mut tunnel = Tunnel::new(true);
        assert_eq!(tunnel.on_datagram(&[0]), Ok(Some(&[][..])));
        assert_eq!(tunnel.on_capsule(capsule(&[0x40, 0])), Ok(Some(Bytes::new())));
    }

    #[test]
    fn a_datagram_without_a_context_ends_the_tunnel() {
        assert_eq!(Tunnel::new(true).on_datagram(&[]), Err(TunnelError::TruncatedContext(InDatagram)));
        assert_eq!(Tunnel::new(true).on_datagram(&[0x40]), Err(TunnelError::TruncatedContext(InDatagram)));
        assert_eq!(Tunnel::new(true).on_capsule(capsule(&[])), Err(TunnelError::TruncatedContext(InCapsule)));
    }

    #[test]
    fn only_a_payload_that_udp_cannot_carry_ends_the_tunnel_rfc_9298_5() {
        let oversize = |context: u8, len_bytes| Capsule::Oversize { len_bytes, start: [context, 0, 0, 0, 0, 0, 0, 0] };
        let mut tunnel = Tunnel::new(true);
        assert_eq!(tunnel.on_capsule(oversize(0, 65_528)), Ok(None));
        assert_eq!(tunnel.on_capsule(oversize(0, 65_529)), Err(TunnelError::PayloadTooLong));
        assert_eq!(tunnel.on_capsule(oversize(0x40, 65_529)), Ok(None), "the context ID takes two bytes");
        assert_eq!(tunnel.on_capsule(oversize(2, u64::from(u32::MAX))), Ok(None));
        assert_eq!(tunnel.ignored(), IgnoredCounts { contexts: 1, capsules: 0, oversize: 2 });
    }

    #[test]
    fn a_tunnel_is_small() {
        assert!(size_of::<Tunnel>() <= 32, "{}", size_of::<Tunnel>());
    }
}
