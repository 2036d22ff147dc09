use proptest::prelude::*;

use super::*;
use crate::{proxy_status::ErrorType, target::tests::targets};

const PATH: &str = "/.well-known/masque/udp/192.0.2.1/443/";

fn templates() -> Vec<Template> {
    vec![
        Template::default_at("relay.example:4433").unwrap(),
        Template::parse("https://relay.example/udp{?target_host,target_port}").unwrap(),
    ]
}

fn target() -> Target {
    Target::from_authority("192.0.2.1:443").unwrap()
}

/// A valid CONNECT-UDP request, changed by `change`.
fn udp(change: impl FnOnce(&mut RequestHead)) -> RequestHead {
    let mut head = udp_request(&templates()[0], &target(), None);
    change(&mut head);
    head
}

fn tcp(authority: &'static str) -> RequestHead {
    RequestHead { authority: Some(authority.into()), ..tcp_request(&target(), None) }
}

fn field(name: &'static str, value: &'static str) -> Field {
    Field::new(name, value)
}

#[test]
fn the_proxy_understands_the_requests_of_the_client() {
    for template in &templates() {
        let head = udp_request(template, &target(), Some("t0ken"));
        assert_eq!(parse(&head, &templates()), Ok(TunnelRequest::ConnectUdp(target())));
        assert_eq!(head.fields, [field("capsule-protocol", "?1"), field("proxy-authorization", "Bearer t0ken")]);
    }
    let head = tcp_request(&target(), Some("t0ken"));
    assert_eq!(parse(&head, &templates()), Ok(TunnelRequest::ConnectTcp(target())));
    assert_eq!(head.fields, [field("proxy-authorization", "Bearer t0ken")]);
}

/// The response to a client with a wrong URI: it names the right one.
fn not_found() -> Refusal {
    let refusal = Refusal::NotFound { serves: templates()[0].to_string() };
    assert!(refusal.to_string().contains("this relay serves https://"), "{refusal}");
    refusal
}

#[test]
fn connect_udp_requests_are_validated_rfc_9298_3_4() {
    let malformed = |malformed: MalformedRequest| Err(Refusal::Malformed(malformed));
    let ok = || Ok(TunnelRequest::ConnectUdp(target()));
    for (rule, head, expected) in [
        ("the protocol's case", udp(|head| head.protocol = Some("Connect-UDP".into())), ok()),
        ("the scheme's case", udp(|head| head.scheme = Some("HTTPS".into())), ok()),
        ("the method's case", udp(|head| head.method = "connect".into()), Err(Refusal::MethodNotAllowed)),
        ("http", udp(|head| head.scheme = Some("http".into())), malformed(MalformedRequest::Scheme)),
        ("no scheme", udp(|head| head.scheme = None), malformed(MalformedRequest::Scheme)),
        ("no authority", udp(|head| head.authority = None), malformed(MalformedRequest::Uri)),
        ("empty authority", udp(|head| head.authority = Some("".into())), malformed(MalformedRequest::Uri)),
        ("no path", udp(|head| head.path = None), malformed(MalformedRequest::Uri)),
        ("empty path", udp(|head| head.path = Some("".into())), malformed(MalformedRequest::Uri)),
        ("path not ASCII", udp(|head| head.path = Some("/é".into())), Err(not_found())),
        (
            "authority not UTF-8",
            udp(|head| head.authority = Some(b"\xff"[..].into())),
            malformed(MalformedRequest::Uri),
        ),
        ("foreign authority", udp(|head| head.authority = Some("other.example".into())), Err(not_found())),
        ("foreign path", udp(|head| head.path = Some("/".into())), Err(not_found())),
        (
            "port 0",
            udp(|head| head.path = Some("/.well-known/masque/udp/192.0.2.1/0/".into())),
            Err(Refusal::Target(InvalidTarget::Port)),
        ),
        ("unknown protocol", udp(|head| head.protocol = Some("connect-ip".into())), Err(Refusal::UnknownProtocol)),
        ("empty protocol", udp(|head| head.protocol = Some("".into())), Err(Refusal::UnknownProtocol)),
    ] {
        assert_eq!(parse(&head, &templates()), expected, "{rule}");
    }
}

#[test]
fn the_capsule_protocol_allows_no_content_rfc_9297_3_2() {
    for name in ["content-length", "content-type", "transfer-encoding"] {
        let head = udp(|head| head.fields.push(field(name, "0")));
        assert_eq!(parse(&head, &templates()), Err(MalformedRequest::ContentField.into()));
        let response = ResponseHead { status: 200, fields: vec![field(name, "0")] };
        assert_eq!(check_udp_response(&response), Err(TunnelRefused::Malformed));
        assert_eq!(check_tcp_response(&response), Ok(Consent { next_hop: None }));
    }
}

#[test]
fn no_value_of_capsule_protocol_changes_anything_rfc_9297_3_4() {
    for fields in [
        vec![],
        vec![field("capsule-protocol", "?0")],
        vec![field("capsule-protocol", "?1;future=1")],
        vec![field("capsule-protocol", "nonsense(")],
        vec![field("capsule-protocol", "?1"), field("capsule-protocol", "?1")],
    ] {
        let head = udp(|head| head.fields = fields.clone());
        assert_eq!(parse(&head, &templates()), Ok(TunnelRequest::ConnectUdp(target())));
        let response = ResponseHead { status: 200, fields };
        assert_eq!(check_udp_response(&response), Ok(Consent { next_hop: None }));
    }
}

#[test]
fn connect_takes_a_host_and_a_port_rfc_9114_4_4() {
    for (head, expected) in [
        (tcp("192.0.2.1:443"), Ok(TunnelRequest::ConnectTcp(target()))),
        (tcp("192.0.2.1"), Err(InvalidTarget::Port.into())),
        (tcp("192.0.2.1:0"), Err(InvalidTarget::Port.into())),
        (tcp("127.1:80"), Err(InvalidTarget::NumericName.into())),
        (tcp(""), Err(MalformedRequest::Uri.into())),
        (RequestHead { authority: None, ..tcp("") }, Err(MalformedRequest::Uri.into())),
    ] {
        assert_eq!(parse(&head, &templates()), expected, "{head:?}");
    }
}

#[test]
fn a_request_for_no_tunnel_is_not_found_rfc_9110_15_5() {
    for (method, path, expected) in [
        ("GET", "/", not_found()),
        ("POST", "/udp", not_found()),
        ("OPTIONS", "*", not_found()),
        ("GET", PATH, Refusal::MethodNotAllowed),
        ("GET", "/.well-known/masque/udp/127.1/443/", Refusal::MethodNotAllowed),
    ] {
        let head = udp(|head| (head.method, head.path, head.protocol) = (method.into(), Some(path.into()), None));
        assert_eq!(parse(&head, &templates()), Err(expected), "{method} {path}");
    }
}

#[test]
fn the_client_learns_where_the_tunnel_leads() {
    let next_hop = "[2001:db8::1]:443".parse().unwrap();
    for protocol in [TunnelProtocol::Udp, TunnelProtocol::Tcp] {
        let response = accepted(protocol, next_hop, &ProxyName::default());
        assert_eq!(check_udp_response(&response), Ok(Consent { next_hop: Some(next_hop) }));
        let announces = response.fields.contains(&field("capsule-protocol", "?1"));
        assert_eq!(announces, protocol == TunnelProtocol::Udp);
    }
}

#[test]
fn a_yes_to_udp_is_any_2xx_that_has_no_content_rfc_9298_3_5() {
    let response = |status| ResponseHead { status, fields: vec![] };
    for status in [200, 201, 203, 207, 299] {
        assert_eq!(check_udp_response(&response(status)), Ok(Consent { next_hop: None }));
    }
    for status in [204, 205, 206] {
        assert_eq!(check_udp_response(&response(status)), Err(TunnelRefused::Malformed));
        assert_eq!(check_tcp_response(&response(status)), Ok(Consent { next_hop: None }));
    }
    for status in [300, 302, 404, 500] {
        assert_eq!(
            check_udp_response(&response(status)),
            Err(TunnelRefused::Status { status, proxy_status: vec![], retry_after_s: None })
        );
    }
}

#[test]
fn the_client_learns_why_not() {
    let refusal = Refusal::DnsError { rcode: Some("NXDOMAIN".into()) };
    let refused = check_udp_response(&refusal.response(&ProxyName::default())).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the relay answered with status 502: dns_error, NXDOMAIN, the target's name does not resolve"
    );
    let TunnelRefused::Status { proxy_status, .. } = refused else { panic!("{refused:?}") };
    assert_eq!(proxy_status[0].error, Some(ErrorType::DnsError));
}

#[test]
fn the_client_learns_when_to_retry_if_the_proxy_says_so_in_seconds() {
    let seen = |response: &ResponseHead| match check_tcp_response(response) {
        Err(refused @ TunnelRefused::Status { retry_after_s, .. }) => (retry_after_s, refused.to_string()),
        other => panic!("{other:?}"),
    };
    let used_up = Refusal::QuotaUsedUp { retry_after_s: 86_400 }.response(&ProxyName::default());
    let text =
        "the relay answered with status 429: http_request_denied, this month's quota is used up; retry after 86400 s";
    assert_eq!(seen(&used_up), (Some(86_400), text.to_owned()));
    assert_eq!(seen(&Refusal::TunnelLimitReached.response(&ProxyName::default())).0, None);
    for (value, expected) in [("7", Some(7)), ("+7", None), ("", None), ("Fri, 31 Dec 1999 23:59:59 GMT", None)] {
        let response = ResponseHead { status: 429, fields: vec![Field::new("retry-after", value)] };
        assert_eq!(seen(&response).0, expected, "{value}");
    }
}

/// The expected value of a part of a request, or arbitrary bytes.
fn text(expected: &'static str) -> impl Strategy<Value = Bytes> {
    prop_oneof![Just(Bytes::from(expected)), any::<Vec<u8>>().prop_map(Bytes::from)]
}

prop_compose! {
    fn heads()(
        method in text("CONNECT"),
        scheme in prop::option::of(text("https")),
        authority in prop::option::of(text("relay.example:4433")),
        path in prop::option::of("/.well-known/masque/udp/[a-z0-9%:.]{0,8}/[0-9%]{0,3}/"),
        protocol in prop::option::of(text("connect-udp")),
        name: Vec<u8>,
        value: Vec<u8>,
    ) -> RequestHead {
        let fields = vec![Field::new(name, value)];
        RequestHead { method, scheme, authority, path: path.map(Bytes::from), protocol, fields }
    }
}

proptest! {
    #[test]
    fn no_request_panics(head in heads()) {
        if let Err(refusal) = parse(&head, &templates()) {
            let response = refusal.response(&ProxyName::default());
            let refused = matches!(check_udp_response(&response), Err(TunnelRefused::Status { .. }));
            prop_assert!(refused, "{:?}", refusal);
        }
    }

    #[test]
    fn every_target_can_be_asked_for(target in targets()) {
        let head = udp_request(&templates()[1], &target, None);
        prop_assert_eq!(parse(&head, &templates()), Ok(TunnelRequest::ConnectUdp(target.clone())));
        prop_assert_eq!(parse(&tcp_request(&target, None), &[]), Ok(TunnelRequest::ConnectTcp(target)));
    }
}
