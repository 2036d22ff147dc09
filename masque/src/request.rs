//! Proxy requests over HTTP/3 and their responses, for both ends: CONNECT-UDP (RFC 9298 §3) and CONNECT (RFC 9114
//! §4.4).
//!
//! `Capsule-Protocol` is sent, as RFC 9297 §3.4 recommends, and never read: `connect-udp` itself implies the Capsule
//! Protocol, so neither a value of the field nor its absence changes anything.

use std::net::SocketAddr;

use bytes::Bytes;
use thiserror::Error;

use crate::{
    h3::{Code, Field, RequestHead, ResponseHead},
    proxy_status::{ProxyName, ProxyStatus},
    template::{Mismatch, Template},
};
pub use crate::{
    refusal::{MalformedRequest, Refusal},
    target::{Host, InvalidTarget, Target},
};

/// The upgrade token of UDP proxying (RFC 9298 §8.1).
const CONNECT_UDP: &[u8] = b"connect-udp";

/// The fields that a message with the Capsule Protocol must not have (RFC 9297 §3.2).
const CONTENT_FIELDS: [&[u8]; 3] = [b"content-length", b"content-type", b"transfer-encoding"];

/// A valid proxy request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TunnelRequest {
    /// A request for a UDP tunnel.
    ConnectUdp(Target),
    /// A request for a TCP tunnel.
    ConnectTcp(Target),
}

impl TunnelRequest {
    /// Returns the target of the tunnel.
    #[must_use]
    pub fn target(&self) -> &Target {
        match self {
            Self::ConnectUdp(target) | Self::ConnectTcp(target) => target,
        }
    }

    /// Returns the protocol of the tunnel.
    #[must_use]
    pub fn protocol(&self) -> TunnelProtocol {
        match self {
            Self::ConnectUdp(_) => TunnelProtocol::Udp,
            Self::ConnectTcp(_) => TunnelProtocol::Tcp,
        }
    }
}

/// The protocol that a tunnel carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TunnelProtocol {
    /// UDP payloads, as HTTP Datagrams.
    Udp,
    /// The bytes of a TCP connection, as the content of DATA frames.
    Tcp,
}

/// Parses a request to a proxy that serves `templates`, and CONNECT.
///
/// Whether the client may make the request, and for this target, is not checked here.
///
/// # Errors
/// The [`Refusal`] for the response.
pub fn parse(head: &RequestHead, templates: &[Template]) -> Result<TunnelRequest, Refusal> {
    match (&head.method[..], &head.protocol) {
        (b"CONNECT", None) => parse_tcp(head).map(TunnelRequest::ConnectTcp),
        (b"CONNECT", Some(protocol)) if protocol.eq_ignore_ascii_case(CONNECT_UDP) => {
            parse_udp(head, templates).map(TunnelRequest::ConnectUdp)
        }
        (b"CONNECT", Some(_)) => Err(Refusal::UnknownProtocol),
        _ => match match_template(head, templates) {
            Err(Refusal::NotFound { .. } | Refusal::Malformed(_)) => Err(not_found(templates)),
            _ => Err(Refusal::MethodNotAllowed),
        },
    }
}

/// Returns the response that opens a tunnel to `next_hop`, the address to which the proxy named `proxy` has connected
/// (RFC 9298 §3.5, RFC 9209 §2.1.2).
#[must_use]
pub fn accepted(protocol: TunnelProtocol, next_hop: SocketAddr, proxy: &ProxyName) -> ResponseHead {
    let next_hop = Some(next_hop.to_string().into());
    let status = ProxyStatus { proxy: proxy.clone(), next_hop, ..ProxyStatus::default() };
    let mut fields = vec![status.to_field()];
    if protocol == TunnelProtocol::Udp {
        fields.push(capsule_protocol());
    }
    ResponseHead { status: 200, fields }
}

/// Returns the request for a UDP tunnel to `target`, with the token `bearer` if the proxy requires one.
#[must_use]
pub fn udp_request(template: &Template, target: &Target, bearer: Option<&str>) -> RequestHead {
    let mut fields = vec![capsule_protocol()];
    fields.extend(bearer.map(proxy_authorization));
    RequestHead {
        method: Bytes::from_static(b"CONNECT"),
        scheme: Some(Bytes::from_static(b"https")),
        authority: Some(Bytes::copy_from_slice(template.authority().as_bytes())),
        path: Some(template.expand(target).into()),
        protocol: Some(Bytes::from_static(CONNECT_UDP)),
        fields,
    }
}

/// Returns the request for a TCP tunnel to `target`, with the token `bearer` if the proxy requires one.
#[must_use]
pub fn tcp_request(target: &Target, bearer: Option<&str>) -> RequestHead {
    RequestHead {
        method: Bytes::from_static(b"CONNECT"),
        scheme: None,
        authority: Some(target.to_string().into()),
        path: None,
        protocol: None,
        fields: bearer.map(proxy_authorization).into_iter().collect(),
    }
}

/// Returns a request without effect (`OPTIONS *`, RFC 9110 §9.3.7). With it, a client can authenticate before it needs a tunnel.
/// The caller adds the authority and credentials.
#[must_use]
pub fn ping_request() -> RequestHead {
    RequestHead {
        method: Bytes::from_static(b"OPTIONS"),
        scheme: Some(Bytes::from_static(b"https")),
        authority: None,
        path: Some(Bytes::from_static(b"*")),
        protocol: None,
        fields: Vec::new(),
    }
}

/// Returns the acceptance of a [`ping_request`].
#[must_use]
pub const fn ping_response() -> ResponseHead {
    ResponseHead { status: 204, fields: Vec::new() }
}

/// Whether a request asks for nothing (see [`ping_request`]).
#[must_use]
pub fn is_ping(head: &RequestHead) -> bool {
    head.method == b"OPTIONS"[..] && head.path.as_deref() == Some(b"*")
}

/// A proxy's acceptance of a tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consent {
    /// The address to which the proxy reports to have connected.
    pub next_hop: Option<SocketAddr>,
}

/// Why there is no tunnel.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TunnelRefused {
    /// The proxy refused.
    #[error("the relay answered with status {status}{}{}", remark(proxy_status), when(*retry_after_s))]
    Status {
        /// The status code: a final one outside 2xx.
        status: u16,
        /// The reports of the proxies on the way, the one nearest to the target first.
        proxy_status: Vec<ProxyStatus>,
        /// How long to wait before a retry, in seconds (`Retry-After`, RFC 9110 §10.2.3). `None` without the field, or if it is a
        /// date.
        retry_after_s: Option<u64>,
    },
    /// The proxy accepted with a response that is not valid for UDP (RFC 9298 §3.5, RFC 9297 §3.2): the client aborts
    /// the request with `H3_MESSAGE_ERROR`.
    #[error("the relay's response does not open a tunnel: it announces content")]
    Malformed,
}

impl TunnelRefused {
    /// Returns the code that ends the request if the response breaks a rule.
    #[must_use]
    pub const fn code(&self) -> Option<Code> {
        match self {
            Self::Malformed => Some(Code::MessageError),
            Self::Status { .. } => None,
        }
    }
}

/// Checks the final response to a request for a UDP tunnel; the caller skips interim ones (1xx).
///
/// # Errors
/// See [`TunnelRefused`].
pub fn check_udp_response(head: &ResponseHead) -> Result<Consent, TunnelRefused> {
    match head.status {
        204..=206 => Err(TunnelRefused::Malformed),
        200..=299 if has_content_field(&head.fields) => Err(TunnelRefused::Malformed),
        _ => check_tcp_response(head),
    }
}

/// Checks the final response to a request for a TCP tunnel; the caller skips interim ones (1xx). Fields about content
/// mean nothing in it (RFC 9110 §9.3.6).
///
/// # Errors
/// [`TunnelRefused::Status`].
pub fn check_tcp_response(head: &ResponseHead) -> Result<Consent, TunnelRefused> {
    let proxy_status = ProxyStatus::from_fields(&head.fields);
    match head.status {
        200..=299 => {
            let next_hop = proxy_status.iter().find_map(|status| status.next_hop.as_deref()?.parse().ok());
            Ok(Consent { next_hop })
        }
        status => Err(TunnelRefused::Status { status, proxy_status, retry_after_s: retry_after_s(head) }),
    }
}

fn parse_udp(head: &RequestHead, templates: &[Template]) -> Result<Target, Refusal> {
    if head.scheme.as_ref().is_none_or(|scheme| !scheme.eq_ignore_ascii_case(b"https")) {
        return Err(MalformedRequest::Scheme.into());
    }
    if has_content_field(&head.fields) {
        return Err(MalformedRequest::ContentField.into());
    }
    match_template(head, templates)
}

fn parse_tcp(head: &RequestHead) -> Result<Target, Refusal> {
    Ok(Target::from_authority(text(&head.authority)?)?)
}

/// Returns the target in the request's URI according to the first matching template.
fn match_template(head: &RequestHead, templates: &[Template]) -> Result<Target, Refusal> {
    let (authority, path) = (text(&head.authority)?, text(&head.path)?);
    let mut refusal = not_found(templates);
    for template in templates {
        match template.matches(authority, path) {
            Ok(target) => return Ok(target),
            Err(Mismatch::Target(error)) => refusal = error.into(),
            Err(Mismatch::Other) => {}
        }
    }
    Err(refusal)
}

/// Tells a client with a wrong URI which one is served: a relay also receives requests addressed to its IP address or
/// to another of its names.
fn not_found(templates: &[Template]) -> Refusal {
    Refusal::NotFound { serves: templates.first().map_or_else(|| "nothing".into(), Template::to_string) }
}

/// Returns the text of a pseudo-header that has to be present and not empty.
fn text(value: &Option<Bytes>) -> Result<&str, MalformedRequest> {
    let value = value.as_deref().filter(|value| !value.is_empty()).ok_or(MalformedRequest::Uri)?;
    std::str::from_utf8(value).map_err(|_| MalformedRequest::Uri)
}

fn has_content_field(fields: &[Field]) -> bool {
    fields.iter().any(|field| CONTENT_FIELDS.contains(&&field.name[..]))
}

/// Returns the proxies' reports as text: error types and remarks.
fn remark(proxy_status: &[ProxyStatus]) -> String {
    let mut remark = String::new();
    for status in proxy_status {
        for part in [status.error.map(|error| error.name()), status.rcode.as_deref(), status.details.as_deref()] {
            let Some(part) = part else { continue };
            remark += if remark.is_empty() { ": " } else { ", " };
            remark += part;
        }
    }
    remark
}

/// Returns the end of a remark: how long to wait before a retry.
fn when(retry_after_s: Option<u64>) -> String {
    retry_after_s.map(|seconds| format!("; retry after {seconds} s")).unwrap_or_default()
}

fn retry_after_s(head: &ResponseHead) -> Option<u64> {
    let digits = head.field("retry-after")?.trim_ascii();
    // `parse` would also accept a sign.
    digits.iter().all(u8::is_ascii_digit).then_some(())?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn capsule_protocol() -> Field {
    Field::new("capsule-protocol", "?1")
}

/// Returns the field that carries the token `bearer` to a proxy. The caller ensures that it is a token (RFC 6750 §2.1).
#[must_use]
pub fn proxy_authorization(bearer: &str) -> Field {
    Field::new("proxy-authorization", format!("Bearer {bearer}"))
}

#[cfg(test)]
mod tests;
