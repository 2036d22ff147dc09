//! The peers between clients and the engine: none, paced, or plain reverse proxies, as processes of this machine.

use std::{
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use instruments::{
    process::{self, Process},
    relay::{self, COALESCING, GENERATOR_CORE, Kind, RELAY_CORE},
};
use quic::tls;

/// How long a process may take to start.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long litellm may take to start; it is large.
const LITELLM_PATIENCE: Duration = Duration::from_secs(60);

/// Who passes requests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// No peer: clients ask the engine directly.
    Direct,
    /// An edge and a gateway.
    Paced,
    /// The same with `coalesce_us = 1000`.
    PacedCoalescing,
    /// An edge and a gateway of another build.
    PacedBefore,
    /// nginx.
    Nginx,
    /// nginx in front of nginx.
    NginxTwice,
    /// nginx in front of nginx, with TLS in between.
    NginxTwiceTls,
    /// litellm's proxy, which parses every event and writes it again.
    Litellm,
}

impl Peer {
    /// The name in tables and results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Paced => "paced",
            Self::PacedCoalescing => Kind::Coalescing.name(),
            Self::PacedBefore => "paced before",
            Self::Nginx => "nginx",
            Self::NginxTwice => "nginx twice",
            Self::NginxTwiceTls => "nginx twice, TLS between",
            Self::Litellm => "litellm",
        }
    }

    /// Returns the peer's program, or `None` for [`Self::Direct`]; `before` is that of [`Self::PacedBefore`].
    ///
    /// # Errors
    /// When it is missing; the message says where to get it.
    pub fn program(self, before: Option<&Path>) -> Result<Option<PathBuf>> {
        match self {
            Self::Direct => Ok(None),
            Self::Paced | Self::PacedCoalescing => relay::program(Kind::Paced).map(Some),
            Self::PacedBefore => Ok(Some(before.context("--before names no program")?.to_owned())),
            Self::Nginx | Self::NginxTwice | Self::NginxTwiceTls => {
                let path = PathBuf::from("/usr/sbin/nginx");
                ensure!(path.exists(), "{} is missing: Debian's nginx-light has it", path.display());
                Ok(Some(path))
            }
            Self::Litellm => relay::peer("litellm/bin/litellm", "perf/peers/litellm.sh").map(Some),
        }
    }
}

/// A running peer, which is killed when dropped.
pub struct Running {
    /// The address to which clients send requests.
    pub address: SocketAddr,
    /// The processes, with their names in results.
    pub processes: Vec<(&'static str, Process)>,
    children: Vec<Child>,
    folder: Option<PathBuf>,
}

/// The requirements of a peer.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Where the engine listens.
    pub engine: SocketAddr,
    /// How many requests one connection of paced may have at once.
    pub requests: u32,
}

impl Running {
    /// Starts a peer on [`RELAY_CORE`] and waits until it serves.
    ///
    /// # Errors
    /// When its program is missing, or it does not start.
    pub fn start(peer: Peer, wanted: Wanted, before: Option<&Path>) -> Result<Self> {
        let Some(program) = peer.program(before)? else {
            return Ok(Self { address: wanted.engine, processes: Vec::new(), children: Vec::new(), folder: None });
        };
        process::bind_to_core(RELAY_CORE)?;
        let started = match peer {
            Peer::Paced | Peer::PacedBefore => paced(&program, wanted, ""),
            Peer::PacedCoalescing => paced(&program, wanted, &format!("[transport]\n{COALESCING}\n")),
            Peer::Litellm => litellm(&program, wanted),
            Peer::Nginx => nginx(&program, wanted, &["nginx"], false),
            _ => nginx(&program, wanted, &["front", "back"], peer == Peer::NginxTwiceTls),
        };
        process::bind_to_core(GENERATOR_CORE)?;
        started.with_context(|| format!("failed to start {}", peer.name()))
    }

    fn add(&mut self, name: &'static str, child: Child) {
        self.processes.push((name, Process { pid: child.id() }));
        self.children.push(child);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.children {
            // The child has not been waited for, so the ID is still its own.
            _ = child.kill();
            _ = child.wait();
        }
        if let Some(folder) = &self.folder {
            _ = fs::remove_dir_all(folder);
        }
    }
}

/// Returns an address of loopback with a TCP port that is free now.
fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// Starts an edge and a gateway with these further sections.
fn paced(program: &Path, wanted: Wanted, sections: &str) -> Result<Running> {
    let folder = relay::scratch_folder()?;
    let (gateway, edge) = (free_address()?, free_address()?);
    let identity = tls::development_identity(&folder)?;
    let fingerprint = identity.chain.first().map(tls::fingerprint).context("no certificate")?;
    let mut running =
        Running { address: edge, processes: Vec::new(), children: Vec::new(), folder: Some(folder.clone()) };
    for (name, text) in [
        ("gateway", gateway_configuration(gateway, wanted, &folder)),
        ("edge", edge_configuration(edge, gateway, &fingerprint, &folder)),
    ] {
        let config = folder.join(format!("{name}.toml"));
        fs::write(&config, text + sections)?;
        let ready = folder.join(format!("{name}.ready"));
        let readiness = UnixDatagram::bind(&ready)?;
        readiness.set_read_timeout(Some(PATIENCE))?;
        let mut command = Command::new(program);
        command.args(["run", "--config"]).arg(&config).env("NOTIFY_SOCKET", &ready);
        running.add(name, command.spawn()?);
        let mut state = [0; 256];
        let len = readiness.recv(&mut state).with_context(|| format!("the {name} did not become ready"))?;
        ensure!(state[..len].starts_with(b"READY=1"), "the {name} did not become ready");
    }
    Ok(running)
}

/// Clients need no credentials, and no limit slows a benchmark.
fn gateway_configuration(listen: SocketAddr, wanted: Wanted, folder: &Path) -> String {
    let (folder, Wanted { engine, requests }) = (folder.display(), wanted);
    format!(
        r#"state_dir = "{folder}/gateway"
[relay]
listen = ["{listen}"]
certificate = "{folder}/certificate.pem"
private_key = "{folder}/private-key.pem"
auth = "none"
templates = ["https://localhost:{port}/.well-known/masque/udp/{{target_host}}/{{target_port}}/"]
[relay.limits]
tunnels_per_connection = {requests}
tunnels_per_user = 100000
requests_per_second = 1000000
[gateway]
[[gateway.model]]
name = "large"
engines = ["http://{engine}"]
max_in_flight = 65536
[control]
enabled = false
[log]
level = "warn"
"#,
        port = listen.port(),
    )
}

fn edge_configuration(listen: SocketAddr, gateway: SocketAddr, fingerprint: &[u8; 32], folder: &Path) -> String {
    let folder = folder.display();
    let fingerprint = config::hash::hex(fingerprint);
    format!(
        r#"state_dir = "{folder}/edge"
[[serve]]
listen = "{listen}"
relay = "https://localhost:{port}/.well-known/masque/udp/{{target_host}}/{{target_port}}/"
certificate_sha256 = "{fingerprint}"
max_connections = 65536
[control]
enabled = false
[log]
level = "warn"
"#,
        port = gateway.port(),
    )
}

/// Starts one nginx for each name, each in front of the next, and the last in front of the engine.
fn nginx(program: &Path, wanted: Wanted, names: &[&'static str], is_tls: bool) -> Result<Running> {
    let folder = relay::scratch_folder()?;
    tls::development_identity(&folder)?;
    let addresses: Vec<_> = names.iter().map(|_| free_address()).collect::<Result<_>>()?;
    let first = *addresses.first().context("no names")?;
    let mut running =
        Running { address: first, processes: Vec::new(), children: Vec::new(), folder: Some(folder.clone()) };
    for (place, (name, listen)) in names.iter().zip(&addresses).enumerate() {
        let next = addresses.get(place + 1);
        let tls = Tls { listens: is_tls && place > 0, asks: is_tls && next.is_some() };
        let config = folder.join(format!("{name}.conf"));
        fs::write(&config, nginx_configuration(*listen, *next.unwrap_or(&wanted.engine), tls, &folder))?;
        let mut command = Command::new(program);
        command.arg("-p").arg(&folder).arg("-c").arg(&config).stderr(Stdio::null());
        running.add(name, command.spawn()?);
        wait_for(*listen, PATIENCE)?;
    }
    Ok(running)
}

/// Starts litellm's proxy in its default form: one process, and no database. As with the others, clients need no credentials.
fn litellm(program: &Path, wanted: Wanted) -> Result<Running> {
    let (folder, listen) = (relay::scratch_folder()?, free_address()?);
    let mut running =
        Running { address: listen, processes: Vec::new(), children: Vec::new(), folder: Some(folder.clone()) };
    let config = folder.join("litellm.yaml");
    fs::write(&config, litellm_configuration(wanted))?;
    let mut command = Command::new(program);
    command.arg("--config").arg(&config).args(["--host", "127.0.0.1", "--port", &listen.port().to_string()]);
    // Otherwise litellm requests prices over the network.
    command.env("LITELLM_LOCAL_MODEL_COST_MAP", "True").env("LITELLM_LOG", "ERROR").current_dir(&folder);
    running.add("litellm", command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    wait_for(listen, LITELLM_PATIENCE)?;
    Ok(running)
}

fn litellm_configuration(Wanted { engine, .. }: Wanted) -> String {
    format!(
        r#"model_list:
  - model_name: large
    litellm_params: {{ model: openai/large, api_base: "http://{engine}/v1", api_key: sk-none }}
litellm_settings: {{ telemetry: false }}
general_settings: {{ dangerously_permit_weak_or_unset_master_key: true }}
"#
    )
}

/// On which sides an nginx uses TLS.
#[derive(Clone, Copy)]
struct Tls {
    listens: bool,
    asks: bool,
}

/// Returns the configuration of one process that forwards events at once, logs nothing and keeps its connections.
fn nginx_configuration(listen: SocketAddr, next: SocketAddr, tls: Tls, folder: &Path) -> String {
    let folder = folder.display();
    let (ssl, scheme) = (if tls.listens { " ssl" } else { "" }, if tls.asks { "https" } else { "http" });
    format!(
        r#"daemon off; master_process off; pid {folder}/{port}.pid; error_log /dev/null crit;
worker_rlimit_nofile 65536;
events {{ worker_connections 16384; multi_accept on; }}
http {{
  access_log off; tcp_nodelay on; keepalive_requests 100000000; keepalive_timeout 600s;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream next {{ server {next}; keepalive 4096; keepalive_requests 100000000; keepalive_timeout 600s; }}
  server {{
    listen {listen}{ssl} backlog=4096;
    ssl_certificate {folder}/certificate.pem; ssl_certificate_key {folder}/private-key.pem;
    location / {{
      proxy_pass {scheme}://next; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_ssl_verify off; proxy_read_timeout 600s;
    }}
  }}
}}
"#,
        port = listen.port(),
    )
}

fn wait_for(address: SocketAddr, patience: Duration) -> Result<()> {
    let until = Instant::now() + patience;
    while Instant::now() < until {
        if TcpStream::connect(address).is_ok() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
    bail!("no process listens at {address}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configurations_of_paced_are_valid() {
        let (listen, engine) = ("127.0.0.1:4433".parse().unwrap(), "127.0.0.1:8001".parse().unwrap());
        let folder = Path::new("/run/x");
        let gateway = gateway_configuration(listen, Wanted { engine, requests: 20_000 }, folder);
        let gateway = config::Config::from_toml(&gateway).unwrap().gateway.unwrap();
        assert_eq!(gateway.models[0].max_in_flight, 65_536);
        let edge = config::Config::from_toml(&edge_configuration(engine, listen, &[7; 32], folder)).unwrap();
        assert_eq!(edge.serves[0].max_connections, 65_536);
    }
}
