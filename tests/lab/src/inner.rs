//! A QUIC connection of applications inside a tunnel of an edge.

#![expect(clippy::unwrap_used, reason = "called by tests, and fails them")]

use crate::{
    authority::Authority,
    process::Process,
    site::{Counts, Family, SOON, Site},
};

/// The address at which the inner client listens for its applications.
pub const INSIDE: &str = "127.0.0.1:5010";

/// What figures call their traffic.
pub const INSIDE_PAYLOADS: &str = "UDP payloads in an inner QUIC connection";

/// A QUIC server in the target's namespace and its client, whose packets go through the forward at 127.0.0.1:5002. They are a
/// paced relay and a paced edge: their connection lasts as long as a client's, and follows changes of the client's address.
pub struct Inner {
    _server: Process,
    _client: Process,
}

impl Inner {
    /// Returns the forward that the outer edge needs, through the site's relay.
    pub fn forward(site: &Site) -> String {
        Self::forward_through(site, &format!("\"{}\"", site.template(Family::V4)))
    }

    /// As [`Inner::forward`], through these relays: a text or a list in TOML.
    pub fn forward_through(site: &Site, relays: &str) -> String {
        format!(
            "[[forward]]\nlisten = \"127.0.0.1:5002\"\nrelay = {relays}\ntarget = \"10.0.2.2:443\"\nca = \"{}\"\n\
             class = \"spread\"\nbackoff_longest_seconds = 1\n",
            site.path("authority.pem").display(),
        )
    }

    /// Starts both, with a forward to port 7 of the target at [`INSIDE`].
    ///
    /// # Panics
    /// As [`Inner::with`].
    pub fn start(site: &Site) -> Self {
        Self::with(site, &[])
    }

    /// Also forwards UDP and TCP of these ports of 127.0.0.1 to the same ports of the target.
    ///
    /// # Panics
    /// When one of them does not come up.
    pub fn with(site: &Site, ports: &[u16]) -> Self {
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
        let run = |namespace: &crate::netns::Namespace, name: &str, text: &str, said: &str| {
            let file = site.write(name, text).unwrap();
            let process =
                namespace.start(crate::program("paced").unwrap(), ["run".into(), "--config".into(), file]).unwrap();
            process.wait_for_line(said, SOON).unwrap();
            process
        };
        let _server = run(&site.chain.target, "inner-server.toml", &server, "10.0.2.2:443");
        Self { _server, _client: run(&site.chain.client, "inner-client.toml", &client, "forwarding") }
    }

    /// The number of connections that the client has made.
    ///
    /// # Panics
    /// When its metrics cannot be read.
    pub fn connections(&self, site: &Site) -> i64 {
        let counts = Counts::read(&site.chain.client, "127.0.0.1:9101").unwrap();
        counts.of("edge_uplink_connects_total{relay=\"127.0.0.1:5002\"}")
    }
}
