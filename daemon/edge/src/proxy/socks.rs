//! The bytes of SOCKS version 5 (RFC 1928, and RFC 1929 for passwords). No IO: each reader takes the available bytes, and
//! returns `None` while bytes are missing.
//!
//! Written here, not taken from a crate: the existing crates join the protocol to their own sockets and resolver, and a
//! local address whose names are resolved at the relay must not have a resolver.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use masque::target::{Host, InvalidTarget, Target};

/// The first byte of a client's first message.
pub const VERSION: u8 = 5;

/// The first byte of a request in version 4, which is not served.
pub const VERSION_4: u8 = 4;

/// The version of the password negotiation (RFC 1929 §2).
const PASSWORD_VERSION: u8 = 1;

const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// Bytes that no client of SOCKS 5 sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not SOCKS version 5")]
pub struct MalformedSocks;

/// The parsed value, and how many bytes it took; `None` while bytes are missing.
type Read<T, E = MalformedSocks> = Result<Option<(T, usize)>, E>;

/// How a client may authenticate (RFC 1928 §3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Method {
    /// Not at all.
    None = 0,
    /// By a name and a password.
    Password = 2,
    /// No method that the client offers is acceptable.
    Unacceptable = 0xff,
}

/// Why there is no connection, or that there is one (RFC 1928 §6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reply {
    /// The connection was made.
    Succeeded = 0,
    /// A failure without a code of its own.
    Failure = 1,
    /// The rules forbid it.
    NotAllowed = 2,
    /// There is no route.
    NetworkUnreachable = 3,
    /// The host does not exist, or has no address.
    HostUnreachable = 4,
    /// The target refused.
    ConnectionRefused = 5,
    /// The target did not answer in time.
    TtlExpired = 6,
    /// The command is not served.
    CommandNotSupported = 7,
    /// The address is of an unknown type.
    AddressTypeNotSupported = 8,
}

/// What a client wants (RFC 1928 §4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// A TCP connection to a target.
    Connect,
    /// UDP payloads to and from any targets.
    Associate,
    /// Something else, such as BIND.
    Other(u8),
}

/// An address in a message, of a target or of a client. The port may be 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// An IP address, or a text that should be a name.
    pub host: Result<IpAddr, String>,
    /// The port.
    pub port: u16,
}

impl Address {
    /// Returns the target that it names.
    ///
    /// # Errors
    /// It names no target, see [`InvalidTarget`].
    pub fn target(self) -> Result<Target, InvalidTarget> {
        let host = match self.host {
            Ok(address) => Host::Ip(address),
            Err(name) => Host::parse(&name)?,
        };
        if self.port == 0 { Err(InvalidTarget::Port) } else { Ok(Target { host, port: self.port }) }
    }
}

/// Reads the methods that a client offers, and chooses: a password if it `is_wanted`, otherwise no authentication.
///
/// # Errors
/// The bytes are of another version, or are not SOCKS.
pub fn greeting(bytes: &[u8], is_wanted: bool) -> Read<Method> {
    let (VERSION, Some(count)) = (*bytes.first().unwrap_or(&VERSION), bytes.get(1)) else {
        return if bytes.first().is_none_or(|version| *version == VERSION) { Ok(None) } else { Err(MalformedSocks) };
    };
    let end = 2 + usize::from(*count);
    let Some(methods) = bytes.get(2..end) else { return Ok(None) };
    let wanted = if is_wanted { Method::Password } else { Method::None };
    let chosen = if methods.contains(&(wanted as u8)) { wanted } else { Method::Unacceptable };
    Ok(Some((chosen, end)))
}

/// Returns the answer to a greeting.
#[must_use]
pub const fn method(chosen: Method) -> [u8; 2] {
    [VERSION, chosen as u8]
}

/// Reads a name and a password (RFC 1929 §2).
///
/// # Errors
/// The bytes are not a name and a password.
pub fn password(bytes: &[u8]) -> Read<(Vec<u8>, Vec<u8>)> {
    if bytes.first().is_some_and(|version| *version != PASSWORD_VERSION) {
        return Err(MalformedSocks);
    }
    let Some((name, rest)) = bytes.get(1..).and_then(counted) else { return Ok(None) };
    let Some((password, rest)) = counted(rest) else { return Ok(None) };
    let pair = (name.to_vec(), password.to_vec());
    Ok(Some((pair, bytes.len() - rest.len())))
}

/// Returns the answer to a name and a password.
#[must_use]
pub const fn password_status(is_known: bool) -> [u8; 2] {
    [PASSWORD_VERSION, !is_known as u8]
}

/// Splits off a field that is preceded by its length.
fn counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (count, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*count))
}

/// Reads a request.
///
/// # Errors
/// The reply for the refusal. The bytes after it cannot be parsed.
pub fn request(bytes: &[u8]) -> Read<(Command, Address), Reply> {
    let Some(head) = bytes.first_chunk::<3>() else {
        return if bytes.first().is_none_or(|version| *version == VERSION) { Ok(None) } else { Err(Reply::Failure) };
    };
    let command = match head {
        [VERSION, 1, _] => Command::Connect,
        [VERSION, 3, _] => Command::Associate,
        [VERSION, other, _] => Command::Other(*other),
        _ => return Err(Reply::Failure),
    };
    let found = address(&bytes[3..]).map_err(|UnknownType| Reply::AddressTypeNotSupported)?;
    Ok(found.map(|(address, len)| ((command, address), 3 + len)))
}

/// Returns the answer to a request, with the address that the client is to use, if any.
#[must_use]
pub fn reply(reply: Reply, bound: Option<SocketAddr>) -> Vec<u8> {
    let bound = bound.unwrap_or_else(|| (Ipv4Addr::UNSPECIFIED, 0).into());
    let mut bytes = vec![VERSION, reply as u8, 0];
    // A socket for both families gives an IPv4 address as an IPv6 address that contains it, where IPv4 clients cannot send to.
    put_ip(bound.ip().to_canonical(), &mut bytes);
    bytes.extend(bound.port().to_be_bytes());
    bytes
}

/// Why a datagram of a client is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IgnoredDatagram {
    /// It is a fragment (RFC 1928 §7 lets servers drop fragments).
    Fragment,
    /// Its header is incomplete, or names no target.
    Malformed,
}

/// Parses a client's datagram (RFC 1928 §7): its target and its payload.
///
/// # Errors
/// See [`IgnoredDatagram`].
pub fn datagram(bytes: &[u8]) -> Result<(Target, &[u8]), IgnoredDatagram> {
    let head = bytes.first_chunk::<3>().ok_or(IgnoredDatagram::Malformed)?;
    if head[2] != 0 {
        return Err(IgnoredDatagram::Fragment);
    }
    let (address, len) = address(&bytes[3..]).ok().flatten().ok_or(IgnoredDatagram::Malformed)?;
    let target = address.target().map_err(|_| IgnoredDatagram::Malformed)?;
    Ok((target, &bytes[3 + len..]))
}

/// Returns the header of datagrams from a target, with the target's name as the client wrote it.
#[must_use]
pub fn datagram_header(target: &Target) -> Vec<u8> {
    let mut bytes = vec![0, 0, 0];
    match &target.host {
        Host::Ip(address) => put_ip(*address, &mut bytes),
        Host::Name(name) => {
            // A name has 253 bytes at most.
            bytes.extend([NAME, name.len() as u8]);
            bytes.extend(name.as_bytes());
        }
    }
    bytes.extend(target.port.to_be_bytes());
    bytes
}

/// An address has an unknown type.
#[derive(Debug)]
struct UnknownType;

/// Reads the type of an address, the address and the port.
fn address(bytes: &[u8]) -> Read<Address, UnknownType> {
    let Some((kind, rest)) = bytes.split_first() else { return Ok(None) };
    let found = match *kind {
        IPV4 => rest.split_first_chunk::<4>().map(|(octets, rest)| (Ok(IpAddr::from(*octets)), rest)),
        IPV6 => rest.split_first_chunk::<16>().map(|(octets, rest)| (Ok(IpAddr::from(*octets)), rest)),
        NAME => counted(rest).map(|(name, rest)| (Err(String::from_utf8_lossy(name).into_owned()), rest)),
        _ => return Err(UnknownType),
    };
    let Some((host, rest)) = found else { return Ok(None) };
    let Some((port, rest)) = rest.split_first_chunk::<2>() else { return Ok(None) };
    Ok(Some((Address { host, port: u16::from_be_bytes(*port) }, bytes.len() - rest.len())))
}

fn put_ip(address: IpAddr, bytes: &mut Vec<u8>) {
    match address {
        IpAddr::V4(address) => {
            bytes.push(IPV4);
            bytes.extend(Ipv4Addr::octets(&address));
        }
        IpAddr::V6(address) => {
            bytes.push(IPV6);
            bytes.extend(Ipv6Addr::octets(&address));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(text: &str) -> Target {
        Target::from_authority(text).unwrap()
    }

    #[test]
    fn the_method_is_the_one_that_is_wanted_or_none_rfc_1928_3() {
        assert_eq!(greeting(&[5, 2, 0, 2], false), Ok(Some((Method::None, 4))));
        assert_eq!(greeting(&[5, 2, 0, 2, 9], true), Ok(Some((Method::Password, 4))));
        assert_eq!(greeting(&[5, 1, 0], true), Ok(Some((Method::Unacceptable, 3))));
        assert_eq!(greeting(&[5, 0], false), Ok(Some((Method::Unacceptable, 2))));
        assert_eq!(greeting(&[4, 1], false), Err(MalformedSocks));
    }

    #[test]
    fn requests_are_read_with_each_type_of_address_rfc_1928_4() {
        let of = |bytes: &[u8]| request(bytes).unwrap().map(|((command, at), len)| (command, at.target(), len));
        assert_eq!(of(&[5, 1, 0, 1, 192, 0, 2, 1, 0, 80, 7]), Some((Command::Connect, Ok(target("192.0.2.1:80")), 10)));
        let name = [&[5, 3, 0, 3, 11][..], b"Example.ORG", &[1, 187]].concat();
        assert_eq!(of(&name), Some((Command::Associate, Ok(target("example.org:443")), 18)));
        let v6 = [&[5, 2, 0, 4][..], &[0; 15], &[1, 0, 7]].concat();
        assert_eq!(of(&v6), Some((Command::Other(2), Ok(target("[::1]:7")), 22)));
        assert_eq!(of(&[5, 1, 0, 1, 192, 0, 2, 1, 0, 0]).unwrap().1, Err(InvalidTarget::Port));
        assert_eq!(of(&[5, 1, 0, 3, 0, 0, 80]).unwrap().1, Err(InvalidTarget::EmptyHost));
        let disguised = [&[5, 1, 0, 3, 5][..], b"127.1", &[0, 80]].concat();
        assert_eq!(of(&disguised).unwrap().1, Err(InvalidTarget::NumericName));
        assert_eq!(request(&[5, 1, 0, 2]), Err(Reply::AddressTypeNotSupported));
        assert_eq!(request(&[4, 1, 0, 1]), Err(Reply::Failure));
    }

    #[test]
    fn an_ipv4_address_has_its_own_form_in_a_reply_even_from_an_ipv6_socket() {
        let bound = |text: &str| reply(Reply::Succeeded, Some(text.parse().unwrap()));
        assert_eq!(bound("[::ffff:192.0.2.1]:258"), [5, 0, 0, 1, 192, 0, 2, 1, 1, 2]);
        assert_eq!(bound("[::ffff:192.0.2.1]:258"), bound("192.0.2.1:258"));
        assert_eq!(bound("[2001:db8::1]:258")[3], 4);
    }

    #[test]
    fn a_name_and_a_password_are_read_rfc_1929_2() {
        let bytes = [&[1, 5][..], b"alice", &[3], b"abc", b"rest"].concat();
        assert_eq!(password(&bytes), Ok(Some(((b"alice".to_vec(), b"abc".to_vec()), 11))));
        assert_eq!(password(&[5]), Err(MalformedSocks));
        assert_eq!((password_status(true), password_status(false)), ([1, 0], [1, 1]));
    }

    #[test]
    fn fragments_and_datagrams_without_a_target_are_ignored() {
        assert_eq!(datagram(&[0, 0, 1, 1, 1, 2, 3, 4, 0, 53, 9]), Err(IgnoredDatagram::Fragment));
        for bytes in
            [&[][..], &[0, 0, 0], &[0, 0, 0, 1, 1, 2, 3, 4, 0], &[0, 0, 0, 9, 1], &[0, 0, 0, 1, 1, 2, 3, 4, 0, 0]]
        {
            assert_eq!(datagram(bytes), Err(IgnoredDatagram::Malformed), "{bytes:?}");
        }
        assert_eq!(datagram(&[0, 0, 0, 1, 1, 2, 3, 4, 0, 53]), Ok((target("1.2.3.4:53"), &[][..])));
    }

    fn targets() -> impl Strategy<Value = Target> {
        let host = prop_oneof![
            any::<Ipv4Addr>().prop_map(|address| Host::Ip(address.into())),
            any::<Ipv6Addr>().prop_map(|address| Host::Ip(address.into())),
            "([a-z0-9]{1,8}\\.){0,3}[a-z]{1,8}".prop_map(Host::Name),
        ];
        (host, 1..=u16::MAX).prop_map(|(host, port)| Target { host, port })
    }

    proptest! {
        #[test]
        fn a_datagram_comes_back_under_the_name_that_it_was_sent_to(target in targets(), payload: Vec<u8>) {
            let bytes = [datagram_header(&target), payload.clone()].concat();
            prop_assert_eq!(datagram(&bytes), Ok((target, &payload[..])));
        }

        #[test]
        fn messages_are_read_whole_or_not_at_all(target in targets(), cut in 0_usize..300, rest: Vec<u8>) {
            let whole = [&[5, 1][..], &datagram_header(&target)[2..]].concat();
            if cut < whole.len() {
                prop_assert_eq!(request(&whole[..cut]), Ok(None));
            }
            let ((command, found), len) = request(&[&whole[..], &rest].concat()).unwrap().unwrap();
            prop_assert_eq!((command, found.target(), len), (Command::Connect, Ok(target), whole.len()));
        }

        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = (greeting(&bytes, true), password(&bytes), request(&bytes), datagram(&bytes));
            let ours = [&[5][..], &bytes].concat();
            let _ = (greeting(&ours, false), request(&ours), password(&[&[1][..], &bytes].concat()));
        }
    }
}
