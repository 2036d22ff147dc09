//! Heads of requests and answers, translated between hyper and HTTP/3.

use bytes::Bytes;
use hyper::{
    Response, StatusCode,
    header::{CONNECTION, CONTENT_LENGTH, HeaderName, HeaderValue},
    http::request::Parts,
};
use masque::h3::{Field, RequestHead, ResponseHead};

/// Returns a request's head without fields about its connection, including fields that it names in `connection`, and without its length.
pub(crate) fn head(parts: &Parts) -> RequestHead {
    let named = parts.headers.get_all(CONNECTION).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let named: Vec<_> = named.map(<[u8]>::trim_ascii).collect();
    let is_named = |name: &HeaderName| named.iter().any(|named| name.as_str().as_bytes().eq_ignore_ascii_case(named));
    let mut fields = Vec::with_capacity(parts.headers.len());
    fields.extend((parts.headers.iter()).filter(|(name, _)| is_end_to_end(name) && !is_named(name)).map(to_field));
    RequestHead {
        method: Bytes::copy_from_slice(parts.method.as_str().as_bytes()),
        scheme: Some(Bytes::from_static(b"https")),
        authority: None,
        path: Some(Bytes::copy_from_slice(parts.uri.path_and_query().map_or("/", |path| path.as_str()).as_bytes())),
        protocol: None,
        fields,
    }
}

/// Returns an answer with this head, without fields about the connection that it came over.
pub(crate) fn response<B>(head: ResponseHead, body: B) -> Response<B> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(head.status).unwrap_or(StatusCode::BAD_GATEWAY);
    for field in head.fields {
        let (name, value) = (HeaderName::from_bytes(&field.name), HeaderValue::from_bytes(&field.value));
        if let (Ok(name), Ok(value)) = (name, value)
            && (is_end_to_end(&name) || name == CONTENT_LENGTH)
        {
            response.headers_mut().append(name, value);
        }
    }
    response
}

/// Whether a field of HTTP/1.1 is about the request rather than the connection that it came over (RFC 9110 §7.6.1, RFC 9114
/// §4.2). A proxy that has read the body sets the length itself.
fn is_end_to_end(name: &HeaderName) -> bool {
    const OWN: [&str; 11] = [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "expect",
    ];
    !OWN.contains(&name.as_str())
}

fn to_field((name, value): (&HeaderName, &HeaderValue)) -> Field {
    Field::new(Bytes::copy_from_slice(name.as_str().as_bytes()), Bytes::copy_from_slice(value.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_about_the_connection_stay_with_it() {
        let passes = |name: &'static str| is_end_to_end(&HeaderName::from_static(name));
        assert!(["authorization", "content-type", "x-slo-ttft-ms", "accept"].into_iter().all(passes));
        assert!(
            !["connection", "host", "transfer-encoding", "proxy-authorization", "expect", "te"].into_iter().any(passes)
        );
    }

    #[test]
    fn fields_that_a_client_names_in_connection_do_not_pass() {
        let request = hyper::Request::post("/").header("connection", "close, X-Hop").header("connection", "x-other");
        let request = request.header("x-hop", "1").header("x-other", "2").header("x-end", "3").body(()).unwrap();
        let names: Vec<_> = head(&request.into_parts().0).fields.into_iter().map(|field| field.name).collect();
        assert_eq!(names, [Bytes::from_static(b"x-end")]);
    }
}
