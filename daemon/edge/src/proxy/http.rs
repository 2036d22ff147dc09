//! Requests to a proxy by HTTP/1.1 (RFC 9110, RFC 9112), and its answers. No IO.
//!
//! The proxy reads one request on a connection. CONNECT joins the connection to a target. A request for an `http` URI is
//! the only request of its connection, so that the proxy need not find the end of the answer.

use std::fmt::Write as _;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use masque::{
    proxy_status::{ErrorType, ProxyStatus},
    request::TunnelRefused,
    target::{InvalidTarget, Target},
};

use super::super::connect::NoConnection;

/// The maximum length of the head of a request or an answer, in bytes.
pub const HEAD_BYTES: usize = 16 * 1024;

/// The maximum number of fields in a request or an answer.
pub const FIELDS: usize = 100;

/// Fields that are for this proxy, or for its connection with the client (RFC 9110 §7.6.1).
const OWN_FIELDS: [&str; 7] =
    ["connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "upgrade", "host"];

/// Fields by which a client asks for a part of an answer, or for nothing if it has the answer already (RFC 9110 §13.1, §14.2).
const CONDITIONS: [&str; 6] =
    ["range", "if-range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since"];

/// A request as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpProxyRequest {
    /// The requested operation; if it is not possible, the reason for counters and the access log, and the answer.
    pub ask: Result<ProxyOperation, (&'static str, ProxyResponse)>,
    /// The name and the password that the client sends (RFC 7617), if any.
    pub credentials: Option<(Vec<u8>, Vec<u8>)>,
}

/// An operation that a client requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProxyOperation {
    /// A tunnel to a target (CONNECT, RFC 9110 §9.3.6).
    Connect(Target),
    /// An answer from a server (RFC 9110 §7.1).
    Forward {
        /// The server.
        target: Target,
        /// The head of the request as it is sent to the server.
        head: Vec<u8>,
        /// How many bytes of content follow it.
        content_bytes: u64,
        /// Whether the answer may be fetched in ranges (RFC 9110 §14): the client asks for all of it, whatever it already has.
        is_divisible: bool,
    },
}

/// An answer of the proxy's own, after which the connection ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyResponse {
    status: u16,
    reports: Vec<ProxyStatus>,
    retry_after_s: Option<u64>,
    text: String,
}

impl ProxyResponse {
    /// Returns an answer about the request itself.
    #[must_use]
    pub fn new(status: u16, text: impl Into<String>) -> Self {
        let (text, error) = (text.into(), ErrorType::HttpRequestError);
        let report = ProxyStatus { error: Some(error), details: Some(text.clone().into()), ..ProxyStatus::default() };
        Self { status, reports: vec![report], retry_after_s: None, text }
    }

    /// Returns the answer to a client that has to authenticate.
    #[must_use]
    pub fn unauthenticated() -> Self {
        Self::new(407, "this proxy asks for a name and a password")
    }

    /// Returns the answer to a request that no further proxy and no server may get (RFC 9110 §7.6.2). This proxy has no options, and echoes
    /// no requests.
    fn last(method: &str) -> Self {
        match method {
            "OPTIONS" => Self { status: 200, reports: Vec::new(), retry_after_s: None, text: String::new() },
            _ => Self::new(501, "this proxy does not answer TRACE"),
        }
    }

    /// Returns the answer to a client whose target cannot be reached.
    #[must_use]
    pub fn unreachable(error: &NoConnection) -> Self {
        let own = |status, kind, text: &str| {
            let report =
                ProxyStatus { error: Some(kind), details: Some(text.to_owned().into()), ..ProxyStatus::default() };
            Self { status, reports: vec![report], retry_after_s: None, text: text.to_owned() }
        };
        match error {
            NoConnection::NoLink(_) => own(
                503,
                ErrorType::DestinationUnavailable,
                "paced has no connection to its relay; the log of paced says why",
            ),
            NoConnection::Lost(_) => own(502, ErrorType::ConnectionTerminated, "the connection to the relay was lost"),
            NoConnection::NoAnswer => own(504, ErrorType::HttpResponseTimeout, "the relay does not answer"),
            NoConnection::Crowded => own(503, ErrorType::ConnectionLimitReached, "the relay allows no more tunnels"),
            NoConnection::Refused(TunnelRefused::Malformed)
            | NoConnection::NoDatagrams(_)
            | NoConnection::NoExtendedConnect => own(
                502,
                ErrorType::HttpProtocolError,
                "the relay does not support such tunnels, or its answer is malformed",
            ),
            // The relay does not know this proxy; the client is not at fault.
            NoConnection::Refused(TunnelRefused::Status { status: 401 | 407, .. }) => {
                own(502, ErrorType::ProxyConfigurationError, "the relay does not accept the credentials of paced")
            }
            NoConnection::Refused(refused @ TunnelRefused::Status { status, proxy_status, retry_after_s }) => {
                let status = if matches!(status, 403 | 429 | 500 | 502..=504) { *status } else { 502 };
                let (reports, text) = (proxy_status.clone(), refused.to_string());
                Self { status, reports, retry_after_s: *retry_after_s, text }
            }
        }
    }

    /// Returns the answer as it is sent.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let Self { status, reports, retry_after_s, text } = self;
        let mut head = format!("HTTP/1.1 {status} {}\r\n", phrase(*status));
        for field in reports.iter().map(ProxyStatus::to_field) {
            // The relay's report was checked to be printable ASCII.
            _ = write!(head, "Proxy-Status: {}\r\n", String::from_utf8_lossy(&field.value));
        }
        if let Some(seconds) = retry_after_s {
            _ = write!(head, "Retry-After: {seconds}\r\n");
        }
        let challenge =
            if *status == 407 { "Proxy-Authenticate: Basic realm=\"paced\", charset=\"UTF-8\"\r\n" } else { "" };
        let len = text.len() + 1;
        _ = write!(
            head,
            "{challenge}Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{text}\n"
        );
        head.into_bytes()
    }

    /// Returns the status code.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.status
    }
}

/// The answer to a client whose tunnel is open.
pub const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// Returns the reason phrase of a status code (RFC 9110 §15).
const fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        407 => "Proxy Authentication Required",
        408 => "Request Timeout",
        411 => "Length Required",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Refused",
    }
}

/// Reads the head of a request, and returns how many bytes it took; `None` while bytes are missing.
///
/// # Errors
/// The answer to bytes that are not a request.
pub fn request(bytes: &[u8]) -> Result<Option<(HttpProxyRequest, usize)>, ProxyResponse> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    let len = match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_BYTES => return Ok(None),
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Err(ProxyResponse::new(431, "the head of the request is too long"));
        }
        Err(error) => return Err(ProxyResponse::new(400, format!("not an HTTP/1.1 request: {error}"))),
    };
    let (method, uri) = (parsed.method.unwrap_or_default(), parsed.path.unwrap_or_default());
    let fields = &*parsed.headers;
    let ask = match method {
        "CONNECT" => Target::from_authority(uri).map(ProxyOperation::Connect).map_err(|error| bad_target(&error)),
        _ => forward(method, uri, parsed.version.unwrap_or(1), fields),
    };
    Ok(Some((HttpProxyRequest { ask, credentials: credentials(fields) }, len)))
}

fn bad_target(error: &InvalidTarget) -> (&'static str, ProxyResponse) {
    ("target", ProxyResponse::new(400, error.to_string()))
}

/// Returns why a request cannot be carried out, whatever its target.
fn malformed(status: u16, text: &str) -> (&'static str, ProxyResponse) {
    ("malformed", ProxyResponse::new(status, text))
}

/// Reads a request in HTTP/1.`minor` that is not CONNECT. It is forwarded in the same version, because the server's answer goes to the
/// client unchanged.
fn forward(
    method: &str,
    uri: &str,
    minor: u8,
    fields: &[httparse::Header<'_>],
) -> Result<ProxyOperation, (&'static str, ProxyResponse)> {
    let scheme = uri.split_once("://").map(|(scheme, rest)| (scheme.to_ascii_lowercase(), rest));
    let rest = match &scheme {
        Some((scheme, rest)) if scheme == "http" => *rest,
        Some(_) => {
            return Err(malformed(400, "this proxy fetches only http:// URIs; use CONNECT for others"));
        }
        None => {
            let text =
                "this is a proxy: set it as the proxy of a browser, or of curl with --proxy, and request absolute URIs";
            return Err(malformed(400, text));
        }
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
    let full = if has_port { authority.to_owned() } else { format!("{authority}:80") };
    let target = Target::from_authority(&full).map_err(|error| bad_target(&error))?;
    let content_bytes = content_bytes(fields)?;
    let forwards = if matches!(method, "OPTIONS" | "TRACE") { max_forwards(fields)? } else { None };
    if forwards == Some(0) {
        return Err(("max_forwards", ProxyResponse::last(method)));
    }
    let start = match path {
        // RFC 9112 §3.2.4.
        "" if method == "OPTIONS" => "*",
        path if path.starts_with('/') => "",
        _ => "/",
    };
    let is_conditional = CONDITIONS.iter().any(|name| values(fields, name).next().is_some());
    let is_divisible = method == "GET" && minor == 1 && content_bytes == 0 && !is_conditional;
    let mut head = format!("{method} {start}{path} HTTP/1.{minor}\r\nHost: {authority}\r\n").into_bytes();
    let named: Vec<String> = values(fields, "connection").flat_map(tokens).collect();
    for field in fields {
        let name = field.name.to_ascii_lowercase();
        // The length describes the content, whatever the client says about it (RFC 9110 §7.6.1).
        let is_for_proxy = name != "content-length" && named.contains(&name);
        let is_replaced = forwards.is_some() && name == "max-forwards";
        if OWN_FIELDS.contains(&&name[..]) || is_for_proxy || is_replaced {
            continue;
        }
        head.extend(field.name.as_bytes());
        head.extend(b": ");
        head.extend(field.value);
        head.extend(b"\r\n");
    }
    if let Some(forwards) = forwards {
        head.extend(format!("Max-Forwards: {}\r\n", forwards - 1).as_bytes());
    }
    head.extend(format!("Via: 1.{minor} paced\r\nConnection: close\r\n\r\n").as_bytes());
    Ok(ProxyOperation::Forward { target, head, content_bytes, is_divisible })
}

/// Returns the values of a field.
pub(super) fn values<'a>(fields: &'a [httparse::Header<'_>], name: &'a str) -> impl Iterator<Item = &'a [u8]> {
    fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
}

/// Returns the tokens of a list, in lower case.
pub(super) fn tokens(value: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(value).split(',').map(|token| token.trim().to_ascii_lowercase()).collect()
}

/// Reads a number of decimal digits without a sign, as in Content-Length.
pub(super) fn number(digits: &[u8]) -> Option<u64> {
    let digits = Some(digits).filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Returns how many proxies may still pass on a request, if its client bounds that (RFC 9110 §7.6.2).
fn max_forwards(fields: &[httparse::Header<'_>]) -> Result<Option<u64>, (&'static str, ProxyResponse)> {
    let mut bounds = values(fields, "max-forwards").map(number);
    match (bounds.next(), bounds.next()) {
        (None, _) => Ok(None),
        (Some(Some(bound)), None) => Ok(Some(bound)),
        _ => Err(malformed(400, "the Max-Forwards is not a single number")),
    }
}

/// Returns the length of a request's content (RFC 9112 §6.3).
fn content_bytes(fields: &[httparse::Header<'_>]) -> Result<u64, (&'static str, ProxyResponse)> {
    if values(fields, "transfer-encoding").next().is_some() {
        return Err(malformed(411, "a request with content needs a Content-Length; otherwise use CONNECT"));
    }
    let mut lengths = values(fields, "content-length").map(number);
    match (lengths.next(), lengths.next()) {
        (None, _) => Ok(0),
        (Some(Some(length)), None) => Ok(length),
        _ => Err(malformed(400, "the Content-Length is not a single number")),
    }
}

/// Reads the name and the password of a client (RFC 7617 §2).
fn credentials(fields: &[httparse::Header<'_>]) -> Option<(Vec<u8>, Vec<u8>)> {
    let value = values(fields, "proxy-authorization").next()?;
    let (scheme, rest) = value.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return None;
    }
    let pair = STANDARD.decode(rest.trim_ascii()).ok()?;
    let colon = pair.iter().position(|byte| *byte == b':')?;
    Some((pair[..colon].to_vec(), pair[colon + 1..].to_vec()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> HttpProxyRequest {
        let (request, len) = request(text.as_bytes()).unwrap().unwrap();
        assert_eq!(len, text.len());
        request
    }

    /// Returns the reason, which is empty for bytes that are no request, and the status of the answer.
    fn denied(text: &str) -> (&'static str, u16) {
        match request(text.as_bytes()) {
            Ok(Some((HttpProxyRequest { ask: Err((reason, answer)), .. }, _))) => (reason, answer.status()),
            Err(answer) => ("", answer.status()),
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn connect_names_a_target_and_may_show_who_asks() {
        let asked =
            read("CONNECT Example.org:443 HTTP/1.1\r\nHost: x\r\nproxy-authorization: basic YWxpY2U6YTpi\r\n\r\n");
        assert_eq!(asked.ask, Ok(ProxyOperation::Connect(Target::from_authority("example.org:443").unwrap())));
        assert_eq!(asked.credentials, Some((b"alice".to_vec(), b"a:b".to_vec())));
    }

    #[test]
    fn a_request_for_an_http_uri_goes_on_without_what_was_for_the_proxy() {
        let asked = read(
            "POST http://Example.org/a?b HTTP/1.1\r\nHost: other\r\nProxy-Connection: keep-alive\r\nX-Own: 1\r\nAccept: */*\r\n\
             Connection: x-own, close, content-length\r\nProxy-Authorization: Basic x\r\nContent-Length: 3\r\n\r\n",
        );
        let Ok(ProxyOperation::Forward { target, head, content_bytes, .. }) = asked.ask else { panic!("{asked:?}") };
        assert_eq!((target.to_string().as_str(), content_bytes, asked.credentials), ("example.org:80", 3, None));
        let expected = "POST /a?b HTTP/1.1\r\nHost: Example.org\r\nAccept: */*\r\nContent-Length: 3\r\nVia: 1.1 paced\r\n\
                        Connection: close\r\n\r\n";
        assert_eq!(String::from_utf8(head).unwrap(), expected);
        for (uri, line, target) in [
            ("http://[::1]", "GET / ", "[::1]:80"),
            ("HTTP://a.example:8080?q", "GET /?q ", "a.example:8080"),
            ("http://192.0.2.1/", "GET / ", "192.0.2.1:80"),
        ] {
            let asked = read(&format!("GET {uri} HTTP/1.0\r\n\r\n"));
            let Ok(ProxyOperation::Forward { target: found, head, .. }) = asked.ask else { panic!("{asked:?}") };
            assert_eq!(found.to_string(), target);
            assert!(String::from_utf8(head).unwrap().starts_with(line), "{uri}");
        }
    }

    #[test]
    fn a_server_sees_the_version_of_the_client_and_what_it_asks_of_the_whole_server() {
        for (line, expected) in [
            ("GET http://a.example/ HTTP/1.0", "GET / HTTP/1.0\r\nHost: a.example\r\nVia: 1.0 paced\r\n"),
            ("OPTIONS http://a.example HTTP/1.1", "OPTIONS * HTTP/1.1\r\nHost: a.example\r\nVia: 1.1 paced\r\n"),
            ("OPTIONS http://a.example/ HTTP/1.1", "OPTIONS / HTTP/1.1\r\nHost: a.example\r\nVia: 1.1 paced\r\n"),
            ("OPTIONS http://a.example?q HTTP/1.1", "OPTIONS /?q HTTP/1.1\r\nHost: a.example\r\nVia: 1.1 paced\r\n"),
        ] {
            let asked = read(&format!("{line}\r\n\r\n"));
            let Ok(ProxyOperation::Forward { head, .. }) = asked.ask else { panic!("{asked:?}") };
            assert_eq!(String::from_utf8(head).unwrap(), format!("{expected}Connection: close\r\n\r\n"));
        }
    }

    #[test]
    fn a_request_about_the_proxies_on_its_way_is_passed_on_by_no_more_of_them_than_its_client_allows() {
        for (method, bound, expected) in
            [("OPTIONS", "1", "0"), ("TRACE", "20", "19"), ("GET", "0", "0"), ("GET", "many", "many")]
        {
            let asked = read(&format!("{method} http://a.example/ HTTP/1.1\r\nMax-Forwards: {bound}\r\n\r\n"));
            let Ok(ProxyOperation::Forward { head, .. }) = asked.ask else { panic!("{asked:?}") };
            let head = String::from_utf8(head).unwrap();
            assert_eq!(head.matches("Max-Forwards").count(), 1, "{head}");
            assert!(head.contains(&format!("\r\nMax-Forwards: {expected}\r\n")), "{head}");
        }
    }

    #[test]
    fn only_a_request_for_a_whole_answer_may_be_divided() {
        for (text, expected) in [
            ("GET http://a.example/ HTTP/1.1\r\n\r\n", true),
            ("GET http://a.example/ HTTP/1.1\r\nContent-Length: 0\r\n\r\n", true),
            ("GET http://a.example/ HTTP/1.0\r\n\r\n", false),
            ("HEAD http://a.example/ HTTP/1.1\r\n\r\n", false),
            ("POST http://a.example/ HTTP/1.1\r\n\r\n", false),
            ("GET http://a.example/ HTTP/1.1\r\nContent-Length: 1\r\n\r\n", false),
            ("GET http://a.example/ HTTP/1.1\r\nrange: bytes=5-\r\n\r\n", false),
            ("GET http://a.example/ HTTP/1.1\r\nIf-None-Match: \"a\"\r\n\r\n", false),
        ] {
            let Ok(ProxyOperation::Forward { is_divisible, .. }) = read(text).ask else { panic!("{text}") };
            assert_eq!(is_divisible, expected, "{text}");
        }
    }

    #[test]
    fn requests_that_cannot_be_served_are_answered_with_the_remedy() {
        for (text, expected) in [
            ("CONNECT example.org HTTP/1.1\r\n\r\n", ("target", 400)),
            ("CONNECT user@example.org:1 HTTP/1.1\r\n\r\n", ("target", 400)),
            ("GET / HTTP/1.1\r\n\r\n", ("malformed", 400)),
            ("GET https://example.org/ HTTP/1.1\r\n\r\n", ("malformed", 400)),
            ("GET http://127.1/ HTTP/1.1\r\n\r\n", ("target", 400)),
            ("GET http://user:pw@example.org/ HTTP/1.1\r\n\r\n", ("target", 400)),
            ("PUT http://a.example/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", ("malformed", 411)),
            ("PUT http://a.example/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", ("malformed", 400)),
            ("PUT http://a.example/ HTTP/1.1\r\nContent-Length: +1\r\n\r\n", ("malformed", 400)),
            ("OPTIONS http://a.example HTTP/1.1\r\nMax-Forwards: 0\r\n\r\n", ("max_forwards", 200)),
            ("TRACE http://a.example HTTP/1.1\r\nmax-forwards: 0\r\n\r\n", ("max_forwards", 501)),
            ("TRACE http://a.example HTTP/1.1\r\nMax-Forwards: -1\r\n\r\n", ("malformed", 400)),
            ("OPTIONS http://a.example HTTP/1.1\r\nMax-Forwards: 1\r\nMax-Forwards: 1\r\n\r\n", ("malformed", 400)),
            ("nonsense\r\n\r\n", ("", 400)),
            (&format!("GET http://a.example/ HTTP/1.1\r\nx: {}", "y".repeat(HEAD_BYTES)), ("", 431)),
            (&format!("GET http://a.example/ HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(FIELDS + 1)), ("", 431)),
        ] {
            assert_eq!(denied(text), expected, "{text:.100}");
        }
    }

    #[test]
    fn a_refusal_of_the_relay_is_reported_but_the_client_is_not_asked_for_credentials() {
        let refused = |status, error| {
            let proxy_status = vec![ProxyStatus { error: Some(error), ..ProxyStatus::default() }];
            let retry_after_s = (status == 429).then_some(60);
            let refused = TunnelRefused::Status { status, proxy_status, retry_after_s };
            String::from_utf8(ProxyResponse::unreachable(&NoConnection::Refused(refused)).to_bytes()).unwrap()
        };
        let text = refused(502, ErrorType::ConnectionRefused);
        assert!(
            text.starts_with("HTTP/1.1 502 Bad Gateway\r\nProxy-Status: paced;error=connection_refused\r\n"),
            "{text}"
        );
        let text = refused(407, ErrorType::HttpRequestDenied);
        assert!(text.starts_with("HTTP/1.1 502 ") && !text.contains("Proxy-Authenticate"), "{text}");
        assert!(refused(418, ErrorType::HttpRequestDenied).starts_with("HTTP/1.1 502 "));
        let text = refused(429, ErrorType::HttpRequestDenied);
        assert!(text.starts_with("HTTP/1.1 429 ") && text.contains("\r\nRetry-After: 60\r\n"), "{text}");
        let text = String::from_utf8(ProxyResponse::unauthenticated().to_bytes()).unwrap();
        assert!(text.contains("Proxy-Authenticate: Basic"), "{text}");
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{text}");
    }

    proptest! {
        #[test]
        fn a_head_is_read_whole_or_not_at_all(cut in 0_usize..200, rest: Vec<u8>) {
            let whole = b"CONNECT a.example:1 HTTP/1.1\r\nA: b\r\n\r\n";
            if cut < whole.len() {
                prop_assert_eq!(request(&whole[..cut]), Ok(None));
            }
            let (_, len) = request(&[&whole[..], &rest].concat()).unwrap().unwrap();
            prop_assert_eq!(len, whole.len());
        }

        #[test]
        fn no_bytes_panic_and_no_field_is_smuggled(bytes: Vec<u8>, name in "[a-zA-Z-]{1,9}", value in "\\PC{0,20}") {
            let _ = request(&bytes);
            let text = format!("GET http://a.example/ HTTP/1.1\r\n{name}: {value}\r\n\r\n");
            if let Ok(Some((HttpProxyRequest { ask: Ok(ProxyOperation::Forward { head, .. }), .. }, _))) = request(text.as_bytes()) {
                let text = String::from_utf8_lossy(&head).into_owned();
                prop_assert_eq!(text.matches("\r\n\r\n").count(), 1);
                prop_assert!(text.ends_with("Connection: close\r\n\r\n"));
            }
        }
    }
}
