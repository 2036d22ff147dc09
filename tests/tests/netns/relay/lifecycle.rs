//! The relay's end and changes of its configuration while clients are connected.

use std::net::SocketAddr;

use config::uplink::TrustSource;
use lab::{
    client::{Client, Tunnel, refusal},
    process::wait_for,
    site::{Family, Folder, SOON, Site, Terms},
};
use masque::{
    h3::{self, Code},
    proxy_status::ErrorType,
    target::{Host, Target},
    template::Template,
    tunnel::Form,
};
use quic::{h3::Error, tls};
use relay_client::{OpenError, access::Access, error::ConnectError};
use tokio::time::timeout;

/// Sends four payloads through each tunnel and receives them back; returns their total number.
async fn round(tunnels: &mut [Tunnel], number: u32) -> i64 {
    const BURST: u32 = 4;
    for tunnel in &mut *tunnels {
        for index in 0..BURST {
            let form = tunnel.udp.form();
            tunnel.send(form, &[&number.to_be_bytes()[..], &index.to_be_bytes(), &[0; 500]].concat()).await.unwrap();
        }
    }
    for tunnel in &mut *tunnels {
        for _ in 0..BURST {
            let payload =
                timeout(SOON, tunnel.recv()).await.expect("an echo arrives soon").unwrap().expect("a payload");
            assert_eq!(payload[..4], number.to_be_bytes());
        }
    }
    tunnels.len() as i64 * i64::from(BURST)
}

/// Requests a tunnel even if the relay has announced that it goes away, and returns the code that ends the request.
async fn ask_all_the_same(client: &Client, template: &str, target: SocketAddr) -> Option<u64> {
    let template = Template::parse(template).unwrap();
    let target = Target { host: Host::Ip(target.ip()), port: target.port() };
    let head = h3::encode_request(&masque::request::udp_request(&template, &target, None), None).unwrap();
    let mut stream = client.relay.http().handle().clone().open_bidirectional_stream().await.unwrap();
    // The request may be rejected before it is sent.
    _ = stream.send(head).await;
    match stream.receive().await {
        Err(s2n_quic::stream::Error::StreamReset { error, .. }) => Some(error.into()),
        _ => None,
    }
}

#[test]
fn sigterm_under_load_takes_nothing_new_and_delivers_what_was_accepted() {
    lab::ring!(Netns);
    let relay = "auth = \"none\"\ndrain_seconds = 60";
    let mut site = Site::new(Terms { relay, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let echoed = site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnels = Vec::new();
        for form in [Form::Datagram, Form::Capsule].repeat(5) {
            let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            tunnel.echo(form, b"settles the form").await;
            tunnels.push(tunnel);
        }
        let mut echoed = tunnels.len() as i64;
        for number in 0..20 {
            echoed += round(&mut tunnels, number).await;
        }
        site.signal(libc::SIGTERM).unwrap();
        let mut number = 100;
        while client.relay.http().takes_requests() {
            assert!(number < 10_000, "the relay announces that it goes away");
            echoed += round(&mut tunnels, number).await;
            number += 1;
        }
        let refused = client.open(site.target(Family::V4, 7)).await.map(drop);
        assert!(matches!(refused, Err(OpenError::Http(Error::GoingAway))), "{refused:?}");
        let code = ask_all_the_same(&client, &site.template(Family::V4), site.target(Family::V4, 7)).await;
        assert_eq!(code, Some(Code::RequestRejected.value()));
        assert!(Client::connect(site.access(Family::V4).unwrap()).await.is_err(), "no new connection either");
        for number in 20_000..20_020 {
            echoed += round(&mut tunnels, number).await;
        }
        let counts = site.counts().unwrap();
        assert_eq!((counts.packets("up"), counts.packets("down"), counts.udp_tunnels()), (echoed, echoed, 10));
        tunnels.into_iter().for_each(|tunnel| tunnel.udp.finish());
        timeout(SOON, client.ended).await.expect("the relay closes the connection").unwrap();
        echoed
    });
    assert!(echoed.unwrap() >= 10 + 40 * 40);
    assert!(site.relay.wait(SOON).unwrap().success(), "the relay ends long before its drain time is over");
}

#[test]
fn a_client_whose_handshake_is_in_flight_at_sigterm_does_not_wait_for_the_drain() {
    lab::ring!(Netns);
    let relay = "auth = \"none\"\ndrain_seconds = 60";
    let site = Site::new(Terms { relay, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(None, b"keeps the relay draining").await;
        // No packet leaves the relay, so the handshake cannot complete yet.
        site.chain.access.far.set_qdisc("pfifo limit 0").unwrap();
        let access = site.access(Family::V4).unwrap();
        let late = tokio::spawn(async move {
            // The handshake may still complete before the relay closes the connection.
            if let Ok(late) = Client::connect(access).await {
                _ = late.ended.await;
            }
        });
        let begun = |counts: &lab::site::Counts| counts.of("handshakes_total{result=\"started\"}") == 2;
        site.counted("the handshake to begin", begun).await.unwrap();
        site.signal(libc::SIGTERM).unwrap();
        site.relay.wait_for_line("draining", SOON).unwrap();
        site.chain.access.far.set_qdisc("pfifo limit 1000").unwrap();
        // A client gives up by itself after SOON.
        timeout(SOON / 2, late).await.expect("the relay ends the connection").unwrap();
        assert_eq!(tunnel.echo(None, b"still there").await, b"still there");
    })
    .unwrap();
}

#[test]
fn tunnels_that_stay_are_closed_when_the_drain_ends() {
    lab::ring!(Netns);
    let relay = "auth = \"none\"\ndrain_seconds = 1";
    let mut site = Site::new(Terms { relay, sections: "[log]\naccess = \"json\"\n", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(None, b"open").await;
        site.signal(libc::SIGTERM).unwrap();
        match timeout(SOON, client.ended).await.expect("the relay closes the connection").unwrap() {
            Error::Closed => {}
            Error::Connection(s2n_quic::connection::Error::Application { error, .. }) => {
                assert_eq!(u64::from(error), Code::NoError.value());
            }
            other => panic!("closed by {other:?}"),
        }
    })
    .unwrap();
    assert!(site.relay.wait(SOON).unwrap().success());
    let ended = wait_for("the tunnel's record", SOON, || site.relay.records("tunnel").pop()).unwrap();
    assert_eq!(ended["reason"], "shutdown", "this is no act of the client");
}

/// Access that trusts exactly the certificate that is now in the relay's file.
fn pinned(site: &Site) -> Access {
    let chain = tls::read_certificates(&site.path("relay.pem")).unwrap();
    Access { trust: TrustSource::Pinned(tls::fingerprint(&chain[0])), ..site.access(Family::V4).unwrap() }
}

fn reload(site: &Site, said: &str) {
    let before = site.relay.output().matches(said).count();
    site.signal(libc::SIGHUP).unwrap();
    wait_for(said, SOON, || (site.relay.output().matches(said).count() > before).then_some(())).unwrap();
}

const RELOADED: &str = "configuration reloaded";
const REFUSED: &str = "configuration not reloaded";

#[test]
fn sighup_changes_the_certificate_under_a_living_connection() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let old = pinned(&site);
        let client = Client::connect(old.clone()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(None, b"before").await;
        site.write_identity("relay", &site.relay_certificate().unwrap()).unwrap();
        reload(&site, RELOADED);
        assert_eq!(tunnel.echo(None, b"after").await, b"after");
        let late = Client::connect(old).await.map(drop);
        assert!(matches!(late, Err(ConnectError::Untrusted { .. })), "{late:?}");
        let client = Client::connect(pinned(&site)).await.unwrap();
        assert_eq!(client.open(site.target(Family::V4, 7)).await.unwrap().echo(None, b"new").await, b"new");
    })
    .unwrap();
}

#[test]
fn a_configuration_that_is_refused_leaves_the_old_one_in_force() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let access = pinned(&site);
        let serves = async || {
            let client = Client::connect(access.clone()).await.unwrap();
            let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            assert_eq!(tunnel.echo(None, b"served").await, b"served");
        };
        // A limit out of range, together with a rule that would refuse the target.
        let (targets, limits) = ("deny = [\"10.0.2.2\"]", "tunnels_per_connection = 0");
        site.configure(Terms { targets, limits, ..Terms::default() }).unwrap();
        reload(&site, REFUSED);
        serves().await;
        // A certificate that does not match the key.
        site.configure(Terms::default()).unwrap();
        site.write("relay.pem", &site.relay_certificate().unwrap().certificate).unwrap();
        reload(&site, REFUSED);
        serves().await;
    })
    .unwrap();
}

#[test]
fn new_rules_hold_for_new_requests_and_leave_tunnels_alone() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(None, b"before").await;
        let targets = "allow = [\"10.0.0.0/8\"]\ndeny = [\"10.0.2.2\"]";
        site.configure(Terms { targets, ..Terms::default() }).unwrap();
        reload(&site, RELOADED);
        let refused = refusal(client.open(site.target(Family::V4, 7)).await);
        assert_eq!(refused, (403, ErrorType::DestinationIpProhibited));
        assert_eq!(tunnel.echo(None, b"after").await, b"after");
    })
    .unwrap();
}

/// Makes a change and waits until the relay has logged `what` once more.
fn said(site: &Site, what: &str, change: impl FnOnce()) {
    let before = site.relay.output().matches(what).count();
    change();
    wait_for(what, SOON, || (site.relay.output().matches(what).count() > before).then_some(())).unwrap();
}

const READ_AGAIN: &str = "were read again";
const UNUSABLE: &str = "cannot be used; their earlier contents stay in force";

#[test]
fn a_renewed_certificate_is_shown_without_a_reload_and_one_that_is_over_is_not() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let links = |to: &str| {
        for end in ["pem", "key"] {
            let (link, fresh) = (site.path(&format!("relay.{end}")), site.path("link"));
            std::os::unix::fs::symlink(site.path(&format!("{to}.{end}")), &fresh).unwrap();
            std::fs::rename(fresh, link).unwrap();
        }
    };
    site.client(async || {
        let old = pinned(&site);
        let client = Client::connect(old.clone()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(None, b"before").await;
        // As a tool does that keeps versions and moves links.
        site.write_identity("renewed", &site.relay_certificate().unwrap()).unwrap();
        said(&site, READ_AGAIN, || links("renewed"));
        assert_eq!(tunnel.echo(None, b"after").await, b"after");
        let late = Client::connect(old).await.map(drop);
        assert!(matches!(late, Err(ConnectError::Untrusted { .. })), "{late:?}");
        let renewed = pinned(&site);
        Client::connect(renewed.clone()).await.unwrap();

        let address = site.chain.access.far.v4.to_string();
        site.write_identity("over", &site.authority.issue_until(&[&address], 2020).unwrap()).unwrap();
        said(&site, UNUSABLE, || links("over"));
        Client::connect(renewed.clone()).await.unwrap();
        let (code, refusal) = site.pacectl(&["reload"], "").unwrap();
        assert!(code != Some(0) && refusal.contains("expired"), "{refusal}");
        links("renewed");
        reload(&site, RELOADED);
        Client::connect(renewed).await.unwrap();
    })
    .unwrap();
    let status = site.json(&["status"]).unwrap();
    let certificate = &status["certificates"][0];
    assert_eq!(certificate["used_by"], "relay");
    assert!(certificate["days_left"].to_string().trim_matches('"').parse::<i64>().unwrap() > 1_000, "{status}");
    let counts = site.counts().unwrap();
    assert!(counts.sum("certificate_expires_timestamp_seconds") > 2 * 4_000_000_000);
    assert_eq!(counts.of("reloads_total{result=\"refused\"}"), 2);
}

#[test]
fn a_relay_does_not_start_with_a_certificate_that_is_over() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let address = site.chain.access.far.v4.to_string();
    site.write_identity("relay", &site.authority.issue_until(&[&address], 2020).unwrap()).unwrap();
    let file = site.write_second().unwrap();
    let arguments = ["run".into(), "--config".into(), file];
    let mut second = site.chain.target.start(lab::program("paced").unwrap(), arguments).unwrap();
    assert_eq!(second.wait(SOON).unwrap().code(), Some(1));
    let said = second.output();
    assert!(said.contains("relay.pem") && said.contains("the certificate expired"), "{said}");
}

#[test]
fn development_mode_does_without_ipv6_where_there_is_none() {
    lab::ring!(Netns);
    let chain = lab::netns::Chain::new().unwrap();
    let off = || std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
    chain.client.run(off).unwrap().unwrap();
    let folder = Folder::new(&format!("{}-development", chain.client.name())).unwrap();
    let arguments = ["run".as_ref(), "--state-dir".as_ref(), folder.path()];
    let daemon = chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
    daemon.wait_for_line("Try, in another terminal", SOON).unwrap();
    let said = daemon.output();
    assert!(said.contains("development mode does without it") && said.contains("127.0.0.1:4433"), "{said}");
}

#[test]
fn development_mode_ends_with_its_terminal() {
    lab::ring!(Netns);
    let chain = lab::netns::Chain::new().unwrap();
    let folder = Folder::new(&format!("{}-development", chain.client.name())).unwrap();
    let arguments = ["run".as_ref(), "--state-dir".as_ref(), folder.path()];
    let mut daemon = chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
    daemon.wait_for_line("Try, in another terminal", SOON).unwrap();
    daemon.signal(libc::SIGHUP).unwrap();
    assert!(daemon.wait(SOON).unwrap().success(), "{}", daemon.output());
}

#[test]
fn development_mode_does_without_metrics_where_their_port_is_taken() {
    lab::ring!(Netns);
    let chain = lab::netns::Chain::new().unwrap();
    let _other = chain.client.run(|| std::net::TcpListener::bind("127.0.0.1:9433").unwrap()).unwrap();
    let folder = Folder::new(&format!("{}-development", chain.client.name())).unwrap();
    let arguments = ["run".as_ref(), "--state-dir".as_ref(), folder.path()];
    let daemon = chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
    daemon.wait_for_line("Try, in another terminal", SOON).unwrap();
    let why = daemon.wait_for_line("there are no metrics: failed to serve metrics", SOON).unwrap();
    assert!(why.contains("another program does"), "{why}");
}
