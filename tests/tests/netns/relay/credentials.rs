//! The clients that may use a relay: tokens and client certificates.

use std::time::{Duration, SystemTime};

use api::token::generate_token;
use config::hash::hex;
use lab::{
    authority::Authority,
    client::{Client, refusal},
    site::{Family, Site, Terms},
};
use masque::proxy_status::ErrorType;

const DENIED: ErrorType = ErrorType::HttpRequestDenied;

/// A token, and the configuration lines that assign it to `alice`.
fn token() -> (String, String) {
    let (token, digest) = generate_token().unwrap();
    (token, format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"", hex(&digest)))
}

#[test]
fn a_token_admits_and_nothing_else_does() {
    lab::ring!(Netns);
    let (token, sections) = token();
    let site = Site::new(Terms { relay: "", sections: &sections, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let target = site.target(Family::V4, 7);
        let stranger = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        assert_eq!(refusal(stranger.open(target).await), (407, DENIED));
        let liar = Client::connect(site.access_with_token(&format!("{token}0")).unwrap()).await.unwrap();
        assert_eq!(refusal(liar.open(target).await), (407, DENIED));
        let alice = Client::connect(site.access_with_token(&token).unwrap()).await.unwrap();
        assert_eq!(alice.open(target).await.unwrap().echo(None, b"known").await, b"known");
        let (_, said) = site.pacectl(&["--json", "connections"], "").unwrap();
        assert!(said.contains(r#""user":"alice""#), "{said}");
    })
    .unwrap();
    let counts = site.counts().unwrap();
    let user = |what: &str| counts.of(&format!("user_{what}"));
    assert_eq!(user("bytes_total{user=\"alice\",direction=\"up\"}"), 5);
    assert_eq!(user("packets_total{user=\"alice\",direction=\"down\"}"), 1);
    assert_eq!(user("tunnels_opened_total{user=\"alice\"}"), 1);
    assert_eq!((counts.refused("credentials_missing"), counts.refused("credentials_invalid")), (1, 1));
}

#[test]
fn strangers_get_the_same_refusal_for_every_target() {
    lab::ring!(Netns);
    let (_, sections) = token();
    let site = Site::new(Terms { relay: "", targets: "", sections: &sections, ..Terms::default() }).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for target in ["127.0.0.1:443", "45.0.0.1:443", "45.0.0.1:22"] {
            assert_eq!(refusal(client.open(target.parse().unwrap()).await), (407, DENIED), "{target}");
        }
    })
    .unwrap();
}

#[test]
fn a_client_certificate_admits_if_its_name_is_listed() {
    lab::ring!(Netns);
    let relay = "client_ca = \"$FOLDER/authority.pem\"\nauth = \"certificate\"";
    let sections = "[[relay.client_certificate]]\nname = \"branch\"\nsan = \"branch.example\"";
    let site = Site::new(Terms { relay, sections, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let target = site.target(Family::V4, 7);
        let access = |name: &str, authority: &Authority| {
            let issued = authority.issue(&[name]).unwrap();
            let identity = Some(site.write_identity(name, &issued).unwrap());
            relay_client::access::Access { identity, ..site.access(Family::V4).unwrap() }
        };
        let branch = Client::connect(access("branch.example", &site.authority)).await.unwrap();
        assert_eq!(branch.open(target).await.unwrap().echo(None, b"known").await, b"known");

        let unlisted = Client::connect(access("other.example", &site.authority)).await.unwrap();
        assert_eq!(refusal(unlisted.open(target).await), (403, DENIED));
        let without = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        assert_eq!(refusal(without.open(target).await), (403, DENIED));

        // A certificate by an unknown authority ends the handshake, or the connection right after it.
        let foreign = Client::connect(access("branch.example", &Authority::new().unwrap())).await;
        if let Ok(client) = foreign {
            client.ended.await.unwrap();
        }
    })
    .unwrap();
    let said = site.relay.wait_for_line("refused the certificate of a client", lab::site::SOON).unwrap();
    assert!(said.contains("client=10.") && said.contains("certificate="), "{said}");
    // The unknown authority has the trusted one's name, but another key.
    assert!(said.contains("reason=invalid peer certificate: BadSignature"), "{said}");
    let counts = site.counts().unwrap();
    assert_eq!(counts.of("refused_certificates_total{reason=\"bad_signature\"}"), 1);
    assert_eq!(counts.of("handshakes_total{result=\"failed\"}"), 1);
    assert_eq!((counts.refused("certificate_unknown"), counts.refused("certificate_missing")), (1, 1));
}

/// The time `seconds` from now, in the format of RFC 3339.
fn in_seconds(seconds: u64) -> String {
    let date = std::process::Command::new("date").args(["-u", "-d", &format!("{seconds} seconds"), "+%FT%TZ"]).output();
    String::from_utf8(date.unwrap().stdout).unwrap().trim().to_owned()
}

#[test]
fn an_expired_token_ends_its_tunnels_and_admits_no_client_until_it_is_renewed() {
    lab::ring!(Netns);
    let (token, entry) = token();
    let expired = format!("{entry}\nexpires = \"2026-01-01\"");
    let site = Site::new(Terms { relay: "", sections: &expired, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let target = site.target(Family::V4, 7);
    site.client(async || {
        let alice = Client::connect(site.access_with_token(&token).unwrap()).await.unwrap();
        assert_eq!(refusal(alice.open(target).await), (407, DENIED));
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().refused("credentials_invalid"), 1);

    let renewed = format!("{entry}\nexpires = \"{}\"", in_seconds(30));
    let began = SystemTime::now();
    site.configure(Terms { relay: "", sections: &renewed, ..Terms::default() }).unwrap();
    site.signal(libc::SIGHUP).unwrap();
    site.wait_for_counts("the reload", |counts| counts.of("reloads_total{result=\"applied\"}") == 1).unwrap();
    site.client(async || {
        let alice = Client::connect(site.access_with_token(&token).unwrap()).await.unwrap();
        let mut tunnel = alice.open(target).await.expect("the reload admits the token");
        assert_eq!(tunnel.echo(None, b"known").await, b"known");
        let ended = tokio::time::timeout(2 * lab::site::SOON, tunnel.recv()).await.expect("the tunnel ends");
        assert!(!matches!(ended, Ok(Some(_))), "{ended:?}");
        assert!(began.elapsed().unwrap() >= Duration::from_secs(28));
        assert_eq!(refusal(alice.open(target).await), (407, DENIED));
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().closed("expired"), 1);
}
