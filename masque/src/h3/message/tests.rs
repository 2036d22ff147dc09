use proptest::prelude::*;

use super::*;

const AUTHORITY: (&str, &str) = (":authority", "proxy.example");
const GET: [(&str, &str); 4] = [(":method", "GET"), (":scheme", "https"), AUTHORITY, (":path", "/")];
const CONNECT_TCP: [(&str, &str); 2] = [(":method", "CONNECT"), (":authority", "target.example:443")];
const CONNECT_UDP: [(&str, &str); 5] = [
    (":method", "CONNECT"),
    (":protocol", "connect-udp"),
    (":scheme", "https"),
    AUTHORITY,
    (":path", "/.well-known/masque/udp/192.0.2.6/443/"),
];

fn fields(pairs: &[(&str, &str)]) -> Vec<Field> {
    pairs
        .iter()
        .map(|(name, value)| {
            Field::new(Bytes::copy_from_slice(name.as_bytes()), Bytes::copy_from_slice(value.as_bytes()))
        })
        .collect()
}

fn request(pairs: &[(&str, &str)]) -> Result<RequestHead, ProtocolError> {
    RequestHead::parse(fields(pairs))
}

/// `base` without the fields named in `without`, followed by the fields of `with`.
fn edited<'a>(base: &[(&'a str, &'a str)], without: &[&str], with: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    base.iter().filter(|(name, _)| !without.contains(name)).chain(with).copied().collect()
}

#[track_caller]
fn refused(pairs: &[(&str, &str)]) {
    match request(pairs) {
        Err(error @ ProtocolError::Stream(Code::MessageError, _)) => assert_eq!(error.answer(), Some(400)),
        other => panic!("{pairs:?} gave {other:?}"),
    }
}

#[track_caller]
fn accepted(pairs: &[(&str, &str)]) -> RequestHead {
    request(pairs).unwrap()
}

#[test]
fn the_three_shapes_of_a_request_are_accepted() {
    // RFC 9114 §4.3.1, §4.4; RFC 9220 §3
    assert_eq!(accepted(&GET).path.unwrap(), "/");
    assert_eq!(accepted(&CONNECT_TCP).authority.unwrap(), "target.example:443");
    assert_eq!(accepted(&CONNECT_UDP).protocol.unwrap(), "connect-udp");
}

#[test]
fn every_pseudo_header_a_shape_needs_is_needed_and_none_may_be_repeated() {
    // RFC 9114 §4.3, §4.3.1, §4.4; RFC 9220 §3
    for shape in [&GET[..], &CONNECT_TCP, &CONNECT_UDP] {
        for (name, value) in shape {
            if *name != ":protocol" {
                refused(&edited(shape, &[name], &[]));
            }
            refused(&edited(shape, &[], &[(name, value)]));
        }
    }
}

#[test]
fn pseudo_headers_that_are_unknown_or_of_responses_are_malformed() {
    // RFC 9114 §4.3
    for name in [":status", ":unknown", ":", ":Method", ":method "] {
        refused(&edited(&GET, &[], &[(name, "200")]));
    }
}

#[test]
fn pseudo_headers_come_before_all_other_fields() {
    // RFC 9114 §4.3
    refused(&edited(&GET, &[":path"], &[("accept", "*/*"), (":path", "/")]));
}

#[test]
fn a_protocol_needs_connect_and_may_be_any_token() {
    // RFC 8441 §4, by way of RFC 9220 §3
    refused(&edited(&GET, &[], &[(":protocol", "websocket")]));
    for protocol in ["websocket", "connect-ip", "webtransport", "never-heard-of"] {
        let pairs = edited(&CONNECT_UDP, &[":protocol"], &[(":protocol", protocol)]);
        assert_eq!(accepted(&pairs).protocol.unwrap(), protocol);
    }
    for protocol in ["", "connect udp", "a,b"] {
        refused(&edited(&CONNECT_UDP, &[":protocol"], &[(":protocol", protocol)]));
    }
}

#[test]
fn connect_has_no_scheme_and_no_path() {
    // RFC 9114 §4.4
    refused(&edited(&CONNECT_TCP, &[], &[(":scheme", "https")]));
    refused(&edited(&CONNECT_TCP, &[], &[(":path", "/")]));
}

#[test]
fn connect_names_a_host_and_a_port() {
    // RFC 9114 §4.4, RFC 9110 §9.3.6
    for authority in ["192.0.2.1:1", "[2001:db8::1]:65535", "a:00443"] {
        accepted(&[CONNECT_TCP[0], (":authority", authority)]);
    }
    for authority in [
        "",
        "a",
        "a:",
        ":443",
        "a:0",
        "a:65536",
        "a:+1",
        "a:-1",
        "a:http",
        "u@a:443",
        "a:443/",
        "a b:443",
        "a\u{e9}:443",
    ] {
        refused(&[CONNECT_TCP[0], (":authority", authority)]);
    }
}

#[test]
fn an_authority_or_host_is_there_not_empty_and_without_userinfo() {
    // RFC 9114 §4.3.1
    let host_only = edited(&GET, &[":authority"], &[("host", "proxy.example")]);
    assert_eq!(accepted(&host_only).authority.unwrap(), "proxy.example");
    for scheme in ["http", "https", "HTTPS"] {
        let base = edited(&[(":scheme", scheme)], &[], &[(":method", "GET"), (":path", "/")]);
        refused(&base);
        refused(&edited(&base, &[], &[(":authority", "")]));
        refused(&edited(&base, &[], &[("host", "")]));
        refused(&edited(&base, &[], &[(":authority", "user@proxy.example")]));
        refused(&edited(&base, &[], &[(":authority", "proxy.example/a")]));
        accepted(&edited(&base, &[], &[(":authority", "proxy.example:8443")]));
    }
}

#[test]
fn other_schemes_may_lack_an_authority_except_for_extended_connect() {
    // RFC 9114 §4.3.1, §10.3; RFC 9220 §3
    let urn = [(":method", "GET"), (":scheme", "urn"), (":path", "example:a")];
    accepted(&urn);
    accepted(&[urn[0], urn[1], urn[2], (":authority", "user@example")]);
    refused(&[urn[0], urn[1], urn[2], (":authority", "a\0b")]);
    refused(&[(":method", "CONNECT"), (":protocol", "connect-udp"), (":scheme", "urn"), (":path", "example:a")]);
}

#[test]
fn host_is_the_same_as_the_authority_and_not_repeated() {
    // RFC 9114 §4.3.1, RFC 9110 §7.2
    for shape in [&GET[..], &CONNECT_UDP] {
        accepted(&edited(shape, &[], &[("host", "proxy.example")]));
        refused(&edited(shape, &[], &[("host", "other.example")]));
        refused(&edited(shape, &[], &[("host", "proxy.example"), ("host", "proxy.example")]));
    }
}

#[test]
fn a_path_begins_with_a_slash_and_holds_what_paths_hold() {
    // RFC 9114 §4.3.1
    for path in ["", "a", "*", "//a b", "/#a", "/\u{e9}"] {
        refused(&edited(&GET, &[":path"], &[(":path", path)]));
    }
    accepted(&edited(&GET, &[":path"], &[(":path", "/a?b=%20")]));
    accepted(&[(":method", "OPTIONS"), (":scheme", "https"), AUTHORITY, (":path", "*")]);
    accepted(&[(":method", "GET"), (":scheme", "urn"), (":path", "")]);
}

#[test]
fn methods_are_tokens_and_schemes_are_schemes() {
    // RFC 9110 §9.1, RFC 3986 §3.1
    for method in ["", "G ET", "GE\u{e9}"] {
        refused(&edited(&GET, &[":method"], &[(":method", method)]));
    }
    for scheme in ["", "1a", "ht tps", "https:"] {
        refused(&edited(&GET, &[":scheme"], &[(":scheme", scheme)]));
    }
}

#[test]
fn names_are_tokens_in_lower_case() {
    // RFC 9114 §4.2, RFC 9110 §5.1
    for name in ["", "Accept", "accepT", "a b", "a:", "a\0", "a\r", "\u{e9}", "a/b", "a(", "a\u{7f}"] {
        refused(&edited(&GET, &[], &[(name, "x")]));
    }
    accepted(&edited(&GET, &[], &[("x!#$%&'*+-.^_`|~9", "x")]));
}

#[test]
fn values_hold_no_controls_and_no_blanks_around() {
    // RFC 9114 §10.3, RFC 9110 §5.5
    for value in ["a\0b", "a\rb", "a\nb", "a\x01b", "a\x7fb", " a", "a ", "\ta", "a\t", " "] {
        refused(&edited(&GET, &[], &[("x", value)]));
        refused(&edited(&GET, &[":path"], &[(":path", value)]));
    }
    for value in ["", "a b", "a\tb", "caf\u{e9}"] {
        accepted(&edited(&GET, &[], &[("x", value)]));
    }
}

#[test]
fn fields_of_http_1_1_connections_are_malformed() {
    // RFC 9114 §4.2
    for name in ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"] {
        refused(&edited(&GET, &[], &[(name, "x")]));
        refused(&edited(&CONNECT_TCP, &[], &[(name, "x")]));
    }
    refused(&edited(&GET, &[], &[("te", "gzip")]));
    refused(&edited(&GET, &[], &[("te", "trailers, gzip")]));
    accepted(&edited(&GET, &[], &[("te", "trailers")]));
}

#[test]
fn a_response_has_one_status_of_three_digits_and_never_101() {
    // RFC 9114 §4.3.2, §4.5; RFC 9110 §15
    for status in [100, 103, 200, 407, 599, 999] {
        let head = ResponseHead::parse(fields(&[(":status", &status.to_string())])).unwrap();
        assert_eq!((head.status, head.is_interim()), (status, status < 200));
    }
    for pairs in [
        &[][..],
        &[("server", "x")],
        &[(":status", "101")],
        &[(":status", "")],
        &[(":status", "20")],
        &[(":status", "2000")],
        &[(":status", "099")],
        &[(":status", "+20")],
        &[(":status", "2x0")],
        &[(":status", "200"), (":status", "200")],
        &[(":status", "200"), (":method", "GET")],
        &[(":method", "GET")],
        &[(":status", "200"), ("server", "x"), (":status", "200")],
        &[(":status", "200"), ("upgrade", "x")],
        &[(":status", "200"), ("te", "trailers")],
    ] {
        let error = ResponseHead::parse(fields(pairs)).unwrap_err();
        assert_eq!(error.code(), Code::MessageError, "{pairs:?}");
    }
}

#[test]
fn trailers_have_no_pseudo_headers() {
    // RFC 9114 §4.3
    assert!(parse_trailers(fields(&[("checksum", "1")])).is_ok());
    for pairs in
        [[(":path", "/")], [(":status", "200")], [("connection", "close")], [("te", "trailers")], [("Upper", "x")]]
    {
        assert_eq!(parse_trailers(fields(&pairs)).unwrap_err().code(), Code::MessageError);
    }
}

#[test]
fn content_length_is_one_decimal_number() {
    // RFC 9110 §8.6
    assert_eq!(content_length(&fields(&[("x", "1")])), Ok(None));
    assert_eq!(content_length(&fields(&[("content-length", "042")])), Ok(Some(42)));
    for pairs in [
        &[("content-length", "")][..],
        &[("content-length", "-1")],
        &[("content-length", "+1")],
        &[("content-length", "1, 1")],
        &[("content-length", "18446744073709551616")],
        &[("content-length", "1"), ("content-length", "1")],
    ] {
        assert_eq!(content_length(&fields(pairs)).unwrap_err().code(), Code::MessageError, "{pairs:?}");
    }
}

#[test]
fn nothing_is_encoded_that_a_peer_would_refuse() {
    let head = accepted(&CONNECT_UDP);
    let size_bytes: u64 = CONNECT_UDP.iter().map(|(name, value)| (name.len() + value.len() + 32) as u64).sum();
    assert!(encode_request(&head, Some(size_bytes)).is_ok());
    assert_eq!(encode_request(&head, Some(size_bytes - 1)).unwrap_err().code(), Code::InternalError);
    for (name, value) in [("connection", "x"), ("x", "a\r\nb"), (":status", "200"), ("Upper", "x")] {
        let head = RequestHead { fields: fields(&[(name, value)]), ..head.clone() };
        assert_eq!(encode_request(&head, None).unwrap_err().code(), Code::InternalError, "{name}");
        let head = ResponseHead { status: 200, fields: head.fields };
        assert_eq!(encode_response(&head, None).unwrap_err().code(), Code::InternalError, "{name}");
    }
    let head = ResponseHead { status: 101, fields: Vec::new() };
    assert_eq!(encode_response(&head, None).unwrap_err().code(), Code::InternalError);
}

#[test]
fn secrets_are_not_printed() {
    let head = accepted(&edited(&CONNECT_UDP, &[], &[("proxy-authorization", "Bearer sesame")]));
    assert!(!format!("{head:?}").contains("sesame"));
}

proptest! {
    #[test]
    fn random_fields_never_panic_and_what_parses_encodes(
        shape in prop::sample::select(vec![&GET[..], &CONNECT_TCP, &CONNECT_UDP, &[(":status", "200")]]),
        extra in prop::collection::vec(("[ -~]{0,6}|:?[a-z]{1,4}|content-length|host|te", "\\PC{0,6}|[ -~]{0,6}"), 0..4),
    ) {
        let extra: Vec<(&str, &str)> = extra.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let fields = fields(&edited(shape, &[], &extra));
        let _ = content_length(&fields);
        if let Ok(head) = RequestHead::parse(fields.clone()) {
            prop_assert!(encode_request(&head, None).is_ok());
        }
        if let Ok(head) = ResponseHead::parse(fields.clone()) {
            prop_assert!(encode_response(&head, None).is_ok());
        }
        let _ = parse_trailers(fields);
    }
}
