//! QUIC connections of applications inside tunnels, while paths fail and relays change.

use lab::authority::Authority;
use lab::process::Process;
use lab::site::{Counts, Family, SOON, Site, Terms};

use super::forward::{application, assert_carries};
use super::uplinks::{ROUND_ROBIN, Uplinks, assert_short_gap, edge, paths, wait_until_up};

/// The address at which the inner client listens for its applications.
pub(super) const INSIDE: &str = "127.0.0.1:5010";

/// A QUIC server in the target's namespace and its client, whose packets go through the forward at 127.0.0.1:5002. They are a
/// paced relay and a paced edge: their connection lasts as long as a client's, and follows changes of the client's address.
pub(super) struct Inner {
    _server: Process,
    _client: Process,
}

impl Inner {
    /// Returns the forward that the outer edge needs.
    pub(super) fn forward(site: &Site) -> String {
        let folder = site.path("").display().to_string();
        format!(
            "[[forward]]\nlisten = \"127.0.0.1:5002\"\nrelay = \"{}\"\ntarget = \"10.0.2.2:443\"\nca = \"{}/authority.pem\"\n\
             class = \"spread\"\nbackoff_longest_seconds = 1\n",
            site.template(Family::V4),
            folder.trim_end_matches('/'),
        )
    }

    fn start(site: &Site) -> Self {
        Self::with(site, &[])
    }

    /// Also forwards UDP and TCP of these ports of 127.0.0.1 to the same ports of the target.
    pub(super) fn with(site: &Site, ports: &[u16]) -> Self {
        let authority = Authority::new().unwrap();
        let identity = site.write_identity("inner", &authority.issue(&["127.0.0.1"]).unwrap()).unwrap();
        let trusted = site.write("inner-authority.pem", &authority.pem()).unwrap();
        let template = "https://127.0.0.1:5002/.well-known/masque/udp/{target_host}/{target_port}/";
        let server = format!(
            "state_dir = \"{}\"\n[control]\nsocket = \"{}\"\n[relay]\nauth = \"none\"\nlisten = [\"10.0.2.2:443\"]\ncertificate = \"{}\"\n\
             private_key = \"{}\"\ntemplates = [\"{template}\"]\n[relay.targets]\nallow = [{{ to = \"10.0.2.2/32\", ports = [7{}] }}]\n",
            site.path("inner-server").display(),
            site.path("inner-server.sock").display(),
            identity.certificate.display(),
            identity.private_key.display(),
            ports.iter().map(|port| format!(", {port}")).collect::<String>(),
        );
        let authority = trusted.display();
        let forwards = ports.iter().flat_map(|port| ["udp", "tcp"].map(|protocol| (port, protocol)));
        let forwards = forwards.map(|(port, protocol)| {
            format!(
                "[[forward]]\nlisten = \"127.0.0.1:{port}\"\nprotocol = \"{protocol}\"\nrelay = \"{template}\"\n\
                 target = \"10.0.2.2:{port}\"\nca = \"{authority}\"\n"
            )
        });
        let client = format!(
            "state_dir = \"{}\"\n[control]\nsocket = \"{}\"\n[metrics]\nlisten = \"127.0.0.1:9101\"\n[[forward]]\nlisten = \"{INSIDE}\"\n\
             relay = \"{template}\"\ntarget = \"10.0.2.2:7\"\nca = \"{authority}\"\n{}",
            site.path("inner-client").display(),
            site.path("inner-client.sock").display(),
            forwards.collect::<String>(),
        );
        let run = |namespace: &lab::netns::Namespace, name: &str, text: &str, said: &str| {
            let file = site.write(name, text).unwrap();
            let process =
                namespace.start(lab::program("paced").unwrap(), ["run".into(), "--config".into(), file]).unwrap();
            process.wait_for_line(said, SOON).unwrap();
            process
        };
        let _server = run(&site.chain.target, "inner-server.toml", &server, "10.0.2.2:443");
        Self { _server, _client: run(&site.chain.client, "inner-client.toml", &client, "forwarding") }
    }

    /// The number of connections that the client has made.
    pub(super) fn connections(&self, site: &Site) -> i64 {
        let counts = Counts::read(&site.chain.client, "127.0.0.1:9101").unwrap();
        counts.of("edge_uplink_connects_total{relay=\"127.0.0.1:5002\"}")
    }
}

#[test]
fn a_quic_connection_inside_a_tunnel_sees_a_gap_and_no_end_when_its_path_falls_silent() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    let edge = uplinks.edge(&format!("{}{ROUND_ROBIN}", Inner::forward(site)));
    wait_until_up(site);
    let inner = Inner::start(site);
    let sockets: Vec<_> = (0..3).map(|_| application(site, INSIDE)).collect();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
    assert_eq!(inner.connections(site), 1);
    // The edge's first tunnel takes either path by round robin; its path falls silent.
    let second = paths(site)[1].1 == 1;
    let cut = || if second { uplinks.cut(true) } else { uplinks.cut_first(true) };
    let gap = assert_short_gap(&sockets, &edge, cut);
    println!("a silent path cost a connection inside a tunnel {gap:?}");
    assert_eq!(inner.connections(site), 1, "the edge said:\n{}", edge.output());
}

#[test]
fn a_quic_connection_inside_a_tunnel_goes_on_when_its_relay_falls_silent_and_when_the_next_one_ends() {
    lab::ring!(Netns);
    let site = Site::new(Terms { relay: "auth = \"none\"\ndrain_seconds = 5", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let mut second = site.start_beside("auth = \"none\"\ndrain_seconds = 5", "").unwrap();
    let template = site.template(Family::V4);
    let relays = format!("[\"{template}\", \"{}\"]", site.template_beside());
    let forward = Inner::forward(&site).replace(&format!("\"{template}\""), &relays);
    let edge = edge(&site, &relays, &format!("{forward}[class.spread]\n"));
    let inner = Inner::start(&site);
    let sockets: Vec<_> = (0..3).map(|_| application(&site, INSIDE)).collect();
    sockets.iter().for_each(|socket| assert_carries(&site, socket, 600));

    let gap = assert_short_gap(&sockets, &edge, || site.signal(libc::SIGSTOP).unwrap());
    println!("a silent relay cost a connection inside a tunnel {gap:?}");
    site.signal(libc::SIGCONT).unwrap();

    let gap = assert_short_gap(&sockets, &edge, || second.signal(libc::SIGTERM).unwrap());
    println!("a relay that ended cost a connection inside a tunnel {gap:?}");
    second.wait(SOON).unwrap();
    assert_eq!(inner.connections(&site), 1, "the edge said:\n{}", edge.output());
}
