//! Messages (RFC 9114 §4.1 to §4.4, RFC 9220): fields to heads and back, with the rules for both. Encoding applies
//! the same checks as receiving.

use bytes::{Bytes, BytesMut};

use super::{
    error::{Code, ProtocolError, malformed},
    field::{Field, check_value, is_token},
    frame, qpack,
};

/// The head of a request that complies with RFC 9114 §4.3.1 and §4.4, and with RFC 9220 §3. It has one of three
/// shapes:
///
/// | | `scheme`, `path` | `authority` | `protocol` |
/// |---|---|---|---|
/// | CONNECT | `None` | host and port | `None` |
/// | extended CONNECT | present | present | any token |
/// | any other method | present | present for `http` and `https` | `None` |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// `:method`, a token.
    pub method: Bytes,
    /// `:scheme`, as sent: compare it case-insensitively.
    pub scheme: Option<Bytes>,
    /// `:authority`, or the value of `host` if only that was sent. Never empty for `http` and `https`.
    pub authority: Option<Bytes>,
    /// `:path`. Begins with `/` for `http` and `https`, except for `OPTIONS *`.
    pub path: Option<Bytes>,
    /// `:protocol`.
    pub protocol: Option<Bytes>,
    /// The other fields, in the order in which they were sent.
    pub fields: Vec<Field>,
}

/// The head of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseHead {
    /// `:status`: 100 to 999, never 101. Below 200 it is interim, and another head follows.
    pub status: u16,
    /// The other fields, in the order in which they were sent.
    pub fields: Vec<Field>,
}

impl RequestHead {
    /// Returns the first field with this name, given in lower case.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&Bytes> {
        find(&self.fields, name)
    }

    pub(super) fn is_connect(&self) -> bool {
        self.method == CONNECT
    }

    /// Parses and checks the fields of a request's HEADERS frame.
    pub(super) fn parse(fields: Vec<Field>) -> Result<Self, ProtocolError> {
        let (pseudo, fields) = split(fields)?;
        let (mut method, mut scheme, mut authority, mut path, mut protocol) = (None, None, None, None, None);
        for Field { name, value } in pseudo {
            let slot = match &name[..] {
                b":method" => &mut method,
                b":scheme" => &mut scheme,
                b":authority" => &mut authority,
                b":path" => &mut path,
                b":protocol" => &mut protocol,
                _ => return Err(malformed("a pseudo-header field has no meaning in a request")),
            };
            if slot.replace(value).is_some() {
                return Err(malformed("a pseudo-header field is repeated"));
            }
        }
        let method = method.ok_or(malformed("a request has no :method"))?;
        if !is_token(&method) {
            return Err(malformed(":method is not a token"));
        }
        let mut head = Self { method, scheme, authority, path, protocol, fields };
        head.check_host()?;
        match (head.is_connect(), head.protocol.is_some()) {
            (true, false) => head.check_connect()?,
            (true, true) => head.check_extended_connect()?,
            (false, true) => return Err(malformed(":protocol stands without CONNECT")),
            (false, false) => {
                head.authority = head.authority.take().or_else(|| head.field("host").cloned());
                head.check_uri()?;
            }
        }
        Ok(head)
    }

    /// Checks `host`: at most one, and equal to `:authority` (RFC 9114 §4.3.1, RFC 9110 §7.2).
    fn check_host(&self) -> Result<(), ProtocolError> {
        let mut hosts = self.fields.iter().filter(|field| field.name == "host").map(|field| &field.value);
        let host = hosts.next();
        if hosts.next().is_some() {
            return Err(malformed("host is repeated"));
        }
        match (&self.authority, host) {
            (Some(authority), Some(host)) if authority != host => Err(malformed("host and :authority differ")),
            _ => Ok(()),
        }
    }

    /// Checks the rules specific to CONNECT without `:protocol` (RFC 9114 §4.4, RFC 9110 §9.3.6).
    fn check_connect(&self) -> Result<(), ProtocolError> {
        if self.scheme.is_some() || self.path.is_some() {
            return Err(malformed("a CONNECT has a :scheme or a :path"));
        }
        let authority = self.authority.as_ref().ok_or(malformed("a CONNECT has no :authority"))?;
        check_authority(authority)?;
        let port = std::str::from_utf8(authority)
            .ok()
            .and_then(|authority| authority.rsplit_once(':'))
            .filter(|(host, port)| !host.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()))
            .and_then(|(_, port)| port.parse::<u16>().ok());
        match port {
            Some(1..) => Ok(()),
            _ => Err(malformed("the :authority of a CONNECT is not a host and a valid port")),
        }
    }

    /// Checks the rules specific to CONNECT with `:protocol` (RFC 8441 §4, by way of RFC 9220 §3).
    fn check_extended_connect(&self) -> Result<(), ProtocolError> {
        if !self.protocol.as_deref().is_some_and(is_token) {
            return Err(malformed(":protocol is not a token"));
        }
        if self.authority.is_none() {
            return Err(malformed("an extended CONNECT has no :authority"));
        }
        self.check_uri()
    }

    /// Checks `:scheme`, `:authority` and `:path` of every request except a plain CONNECT (RFC 9114 §4.3.1).
    fn check_uri(&self) -> Result<(), ProtocolError> {
        let scheme = self.scheme.as_ref().ok_or(malformed("a request has no :scheme"))?;
        let path = self.path.as_ref().ok_or(malformed("a request has no :path"))?;
        let is_scheme_byte = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
        if !scheme.first().is_some_and(u8::is_ascii_alphabetic) || !scheme.iter().all(is_scheme_byte) {
            return Err(malformed(":scheme is not a scheme"));
        }
        if !path.iter().all(|byte| byte.is_ascii_graphic() && *byte != b'#') {
            return Err(malformed(":path contains a character that no path or query does"));
        }
        if !scheme.eq_ignore_ascii_case(b"https") && !scheme.eq_ignore_ascii_case(b"http") {
            return Ok(());
        }
        check_authority(self.authority.as_ref().ok_or(malformed("a request has neither :authority nor host"))?)?;
        if path.starts_with(b"/") || path == "*" && self.method == "OPTIONS" {
            return Ok(());
        }
        Err(malformed(":path is empty or does not begin with a slash"))
    }

    fn to_fields(&self) -> Vec<Field> {
        let pseudo = [
            (":method", Some(&self.method)),
            (":protocol", self.protocol.as_ref()),
            (":scheme", self.scheme.as_ref()),
            (":authority", self.authority.as_ref()),
            (":path", self.path.as_ref()),
        ];
        let pseudo = pseudo.into_iter().filter_map(|(name, value)| Some(Field::new(name, value?.clone())));
        pseudo.chain(self.fields.iter().cloned()).collect()
    }
}

impl ResponseHead {
    /// Returns the first field with this name, given in lower case.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&Bytes> {
        find(&self.fields, name)
    }

    /// Whether another head follows (RFC 9110 §15.2).
    #[must_use]
    pub const fn is_interim(&self) -> bool {
        self.status < 200
    }

    /// Parses and checks the fields of a response's HEADERS frame (RFC 9114 §4.3.2).
    pub(super) fn parse(fields: Vec<Field>) -> Result<Self, ProtocolError> {
        let (pseudo, fields) = split(fields)?;
        let [Field { name, value }] = &pseudo[..] else {
            return Err(malformed("a response has not exactly one pseudo-header field"));
        };
        if name != ":status" {
            return Err(malformed("a pseudo-header field has no meaning in a response"));
        }
        let status = match value[..] {
            [hundreds @ b'1'..=b'9', tens @ b'0'..=b'9', ones @ b'0'..=b'9'] => {
                [hundreds, tens, ones].iter().fold(0, |status, digit| status * 10 + u16::from(digit - b'0'))
            }
            _ => return Err(malformed(":status is not three digits")),
        };
        if status == 101 {
            return Err(malformed("HTTP/3 has no 101")); // RFC 9114 §4.5
        }
        refuse_te(&fields)?;
        Ok(Self { status, fields })
    }

    fn to_fields(&self) -> Vec<Field> {
        let status = Field::new(":status", self.status.to_string());
        std::iter::once(status).chain(self.fields.iter().cloned()).collect()
    }
}

const CONNECT: &str = "CONNECT";

/// Checks the fields of a trailer section (RFC 9114 §4.1 and §4.3).
pub(super) fn parse_trailers(fields: Vec<Field>) -> Result<Vec<Field>, ProtocolError> {
    fields.iter().try_for_each(Field::check)?;
    refuse_te(&fields)?;
    Ok(fields)
}

/// Only the header section of a request may have `te` (RFC 9114 §4.2).
fn refuse_te(fields: &[Field]) -> Result<(), ProtocolError> {
    match find(fields, "te") {
        None => Ok(()),
        Some(_) => Err(malformed("te stands outside the header of a request")),
    }
}

/// Returns the length of the content that `content-length` declares (RFC 9110 §8.6). More than one is malformed even
/// if they agree.
pub(super) fn content_length(fields: &[Field]) -> Result<Option<u64>, ProtocolError> {
    let mut values = fields.iter().filter(|field| field.name == "content-length").map(|field| &field.value);
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) if value.iter().all(u8::is_ascii_digit) => {
            let len = std::str::from_utf8(value).ok().and_then(|digits| digits.parse().ok());
            len.map(Some).ok_or(malformed("content-length is not a length"))
        }
        _ => Err(malformed("content-length is not one length")),
    }
}

/// Encodes a HEADERS frame that begins a request.
///
/// # Errors
/// [`Code::InternalError`] if the head breaks a rule for which a receiver would refuse it, or if it exceeds
/// `peer_max_bytes`, the peer's [`Settings::max_field_section_size`](super::Settings::max_field_section_size).
pub fn encode_request(head: &RequestHead, peer_max_bytes: Option<u64>) -> Result<Bytes, ProtocolError> {
    encode(head.to_fields(), peer_max_bytes, RequestHead::parse)
}

/// Encodes a HEADERS frame that begins a response, interim or final.
///
/// # Errors
/// See [`encode_request`].
pub fn encode_response(head: &ResponseHead, peer_max_bytes: Option<u64>) -> Result<Bytes, ProtocolError> {
    encode(head.to_fields(), peer_max_bytes, ResponseHead::parse)
}

fn encode<T>(
    fields: Vec<Field>,
    peer_max_bytes: Option<u64>,
    parse: impl FnOnce(Vec<Field>) -> Result<T, ProtocolError>,
) -> Result<Bytes, ProtocolError> {
    if peer_max_bytes.is_some_and(|max_bytes| fields.iter().map(Field::size_bytes).sum::<u64>() > max_bytes) {
        return Err(ProtocolError::Stream(Code::InternalError, "a field section exceeds the limit of the peer"));
    }
    let section = qpack::encode(&fields);
    match parse(fields) {
        Ok(_) => {}
        Err(ProtocolError::Connection(_, reason) | ProtocolError::Stream(_, reason)) => {
            return Err(ProtocolError::Stream(Code::InternalError, reason));
        }
    }
    let mut out = BytesMut::with_capacity(section.len() + 9);
    frame::write_header(frame::HEADERS, section.len() as u64, &mut out);
    out.extend_from_slice(&section);
    Ok(out.freeze())
}

/// Separates the pseudo-header fields, which come first, from the others, and checks the characters of all.
fn split(mut fields: Vec<Field>) -> Result<(Vec<Field>, Vec<Field>), ProtocolError> {
    let pseudo_count = fields.iter().take_while(|field| field.is_pseudo()).count();
    let regular = fields.split_off(pseudo_count);
    fields.iter().try_for_each(|field| check_value(&field.value))?;
    regular.iter().try_for_each(Field::check)?;
    Ok((fields, regular))
}

/// Checks a mandatory authority: not empty, no userinfo, and no character that would end it in a URI.
fn check_authority(authority: &[u8]) -> Result<(), ProtocolError> {
    if authority.is_empty() {
        return Err(malformed("the authority is empty"));
    }
    if !authority.iter().all(|byte| byte.is_ascii_graphic() && !b"@/?#\\".contains(byte)) {
        return Err(malformed("the authority contains userinfo or a character that no authority does"));
    }
    Ok(())
}

fn find<'a>(fields: &'a [Field], name: &str) -> Option<&'a Bytes> {
    fields.iter().find(|field| field.name == name).map(|field| &field.value)
}

#[cfg(test)]
mod tests;
