//! Relays under test: their addresses, and relays that are started here as processes.

use std::{
    fs,
    io::{self, BufRead as _, BufReader},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use lab::site::Site;
use quic::tls;
use rustls_pki_types::{CertificateDer, pem::PemObject as _};
use serde::Deserialize;

use crate::{
    process::{self, Process},
    stack,
};

/// The core of relays; generator and target run on [`GENERATOR_CORE`].
pub const RELAY_CORE: usize = 0;

/// The core of the generator.
pub const GENERATOR_CORE: usize = 1;

/// How long paced may take to start.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often paced is started if it is not ready in time. In the lab, time jumps while paced waits for a file of the host, so that
/// [`PATIENCE`] may be over at once; when paced starts again, the guest has this file.
const ATTEMPTS: usize = 3;

/// Which relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// This project's relay, from this program's folder.
    Paced,
    /// The same with `coalesce_us = 1000`.
    Coalescing,
    /// The same with `busy_poll_us = 50`.
    Polling,
    /// The peer on quinn and h3 in `perf/peers/quinn-relay`.
    Quinn,
    /// The quic-go peer in `perf/peers/quic-go-relay`.
    QuicGo,
}

impl Kind {
    /// The name in tables and results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Paced => "paced",
            Self::Coalescing => "paced, coalescing",
            Self::Polling => "paced, polling",
            Self::Quinn => "quinn",
            Self::QuicGo => "quic-go",
        }
    }

    /// Whether it is this project's relay, however it is configured.
    #[must_use]
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Paced | Self::Coalescing | Self::Polling)
    }

    /// Names the allocator of the relay's memory.
    #[must_use]
    pub fn allocator(self) -> &'static str {
        match self {
            Self::Paced | Self::Coalescing | Self::Polling | Self::Quinn => "glibc malloc",
            Self::QuicGo => "Go runtime",
        }
    }
}

/// A relay as its clients know it, and as a process on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Relay {
    /// Where it listens.
    pub address: SocketAddr,
    /// SHA-256 of its certificate.
    pub fingerprint: [u8; 32],
    /// The process, whose CPU time and memory are read.
    pub process: Process,
}

impl Relay {
    /// Returns the relay of a site, as its clients know it in IPv4.
    ///
    /// # Errors
    /// When its certificate is gone.
    pub fn of(site: &Site) -> Result<Self> {
        let certificate = CertificateDer::from_pem_file(site.path("relay.pem"))?;
        let address = (site.chain.access.far.v4, HTTPS).into();
        Ok(Self { address, fingerprint: tls::fingerprint(&certificate), process: Process { pid: site.relay.id() } })
    }

    /// Returns the authority of its template: a name for relays on loopback, an address for relays of sites.
    #[must_use]
    pub fn authority(&self) -> String {
        match self.address {
            address if address.ip().is_loopback() => format!("localhost:{}", address.port()),
            address if address.port() == HTTPS => address.ip().to_string(),
            address => address.to_string(),
        }
    }
}

/// The port that a template omits, on which relays of sites listen.
pub const HTTPS: u16 = 443;

/// A relay that was started here, and is killed when dropped.
pub struct Started {
    /// The relay.
    pub relay: Relay,
    /// The QUIC stack that a peer names with its version; `None` for paced, whose version is that of the results.
    pub stack: Option<String>,
    child: Child,
    /// The configuration, certificate and other files.
    folder: PathBuf,
}

impl Started {
    /// Starts a relay on a free port of loopback and on [`RELAY_CORE`], and waits until it serves.
    ///
    /// # Errors
    /// When its program is missing ([`program`] checks that beforehand), was built with other versions than this repository names, or
    /// does not start.
    pub fn start(kind: Kind) -> Result<Self> {
        let program = program(kind)?;
        match kind {
            Kind::Paced => on_relay_core(|| start_paced(&program, (UNLIMITED_REQUESTS, ""))),
            Kind::Coalescing => on_relay_core(|| start_paced(&program, (UNLIMITED_REQUESTS, COALESCING))),
            Kind::Polling => on_relay_core(|| start_paced(&program, (UNLIMITED_REQUESTS, POLLING))),
            Kind::Quinn => on_relay_core(|| start_peer(&program, stack::quinn())),
            Kind::QuicGo => on_relay_core(|| start_peer(&program, stack::quic_go())),
        }
        .with_context(|| format!("failed to start {}", kind.name()))
    }

    /// Starts a given build of paced in the same way, with only the keys that every version knows.
    ///
    /// # Errors
    /// As [`Started::start`].
    pub fn paced(program: &Path) -> Result<Self> {
        on_relay_core(|| start_paced(program, ("", "")))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // The child has not been waited for, so the ID is still its own.
        _ = self.child.kill();
        _ = self.child.wait();
        _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns the built program of a relay: paced beside this program, or a [`peer`].
///
/// # Errors
/// When it does not exist; the message says how to build it.
pub fn program(kind: Kind) -> Result<PathBuf> {
    match kind {
        Kind::Paced | Kind::Coalescing | Kind::Polling => {
            built(own_folder()?.join("paced"), "cargo build --release -p paced -p pacectl")
        }
        Kind::Quinn => peer("quinn-relay", PEERS_BUILD),
        Kind::QuicGo => peer("quic-go-relay", PEERS_BUILD),
    }
}

/// The script that builds the peers on quinn, and on quic-go if Go is installed.
pub const PEERS_BUILD: &str = "perf/peers/build.sh";

/// Returns a program of `perf/peers` that a script has built, in `peers` beside this program's folder.
///
/// # Errors
/// When it does not exist; the message says how to build it.
pub fn peer(name: &str, by: &str) -> Result<PathBuf> {
    built(own_folder()?.join("../peers").join(name), by)
}

fn own_folder() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    // Test executables are in the folder `deps`, which is in the folder of the programs.
    let folder = program.ancestors().skip(1).find(|folder| !folder.ends_with("deps"));
    Ok(folder.map(Path::to_owned).unwrap_or_default())
}

fn built(path: PathBuf, by: &str) -> Result<PathBuf> {
    ensure!(path.exists(), "{} is missing: {by} builds it", path.display());
    Ok(path)
}

/// Runs `start` on [`RELAY_CORE`], and then continues on [`GENERATOR_CORE`].
fn on_relay_core<T>(start: impl FnOnce() -> Result<T>) -> Result<T> {
    process::bind_to_core(RELAY_CORE)?;
    let started = start();
    process::bind_to_core(GENERATOR_CORE)?;
    started
}

/// Starts paced with these keys of `[relay.limits]` and `[transport]`.
fn start_paced(program: &Path, keys: (&str, &str)) -> Result<Started> {
    for _ in 1..ATTEMPTS {
        match try_to_start_paced(program, keys) {
            Err(error) if is_late(&error) => eprintln!("paced was not ready within {PATIENCE:?} and is started again"),
            other => return other,
        }
    }
    try_to_start_paced(program, keys)
}

/// Whether an error says that no readiness was reported in time.
fn is_late(error: &anyhow::Error) -> bool {
    error.root_cause().downcast_ref::<io::Error>().is_some_and(|cause| cause.kind() == io::ErrorKind::WouldBlock)
}

fn try_to_start_paced(program: &Path, keys: (&str, &str)) -> Result<Started> {
    let folder = scratch_folder()?;
    let identity = tls::development_identity(&folder)?;
    let fingerprint = identity.chain.first().map(tls::fingerprint).context("no certificate")?;
    let address = free_address()?;
    let config = folder.join("paced.toml");
    fs::write(&config, configuration(address, &folder, keys))?;
    let ready = folder.join("ready");
    let readiness = UnixDatagram::bind(&ready)?;
    readiness.set_read_timeout(Some(PATIENCE))?;
    let child = Command::new(program).args(["run", "--config"]).arg(&config).env("NOTIFY_SOCKET", &ready).spawn()?;
    let started = Started {
        relay: Relay { address, fingerprint, process: Process { pid: child.id() } },
        stack: None,
        child,
        folder,
    };
    let mut state = [0; 256];
    let len = readiness.recv(&mut state).context("the relay did not become ready")?;
    ensure!(state[..len].starts_with(b"READY=1"), "the relay did not become ready");
    Ok(started)
}

/// Lets `load setup` open as many tunnels per second as it can.
const UNLIMITED_REQUESTS: &str = "requests_per_second = 1000000";

/// The key of `[transport]` that makes paced coalesce events, as [`Kind::Coalescing`] does.
pub const COALESCING: &str = "coalesce_us = 1000";

/// The key of `[transport]` that makes paced poll for events, as [`Kind::Polling`] does.
const POLLING: &str = "busy_poll_us = 50";

/// Clients need no credentials, only loopback can be reached, and no limit slows a benchmark.
fn configuration(address: SocketAddr, folder: &Path, (limits, transport): (&str, &str)) -> String {
    let folder = folder.display();
    format!(
        r#"state_dir = "{folder}"
[relay]
listen = ["{address}"]
certificate = "{folder}/certificate.pem"
private_key = "{folder}/private-key.pem"
auth = "none"
templates = ["https://localhost:{port}/.well-known/masque/udp/{{target_host}}/{{target_port}}/"]
[relay.targets]
allow = ["127.0.0.0/8"]
unlisted = "deny"
[relay.limits]
strangers_percent = 100
strangers_per_prefix = 100000
stranger_seconds = 600
connections_per_user = 100000
tunnels_per_connection = 20000
tunnels_per_user = 100000
{limits}
[transport]
{transport}
[log]
level = "error"
"#,
        port = address.port(),
    )
}

/// Starts a peer, which has to name the stack `expected`: a program that was built long ago may have another.
fn start_peer(program: &Path, expected: Option<String>) -> Result<Started> {
    let folder = scratch_folder()?;
    let listen = free_address()?.to_string();
    let mut child = Command::new(program).args(["-listen", &listen]).stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take();
    let process = Process { pid: child.id() };
    let relay = Relay { address: listen.parse()?, fingerprint: [0; 32], process };
    let mut started = Started { relay, stack: None, child, folder };
    let mut line = String::new();
    BufReader::new(stdout.context("no output")?).read_line(&mut line)?;
    #[derive(Deserialize)]
    struct Ready {
        certificate_sha256: String,
        #[serde(default)]
        stack: String,
    }
    let ready: Ready = serde_json::from_str(&line).context("its first line cannot be read")?;
    let expected = expected.context("the lock files of the peers do not name its stack")?;
    ensure!(ready.stack == expected, "it has {:?}, not {expected:?}: {PEERS_BUILD} builds it again", ready.stack);
    started.relay.fingerprint = parse_fingerprint(&ready.certificate_sha256)?;
    started.stack = Some(ready.stack);
    Ok(started)
}

/// Reads the SHA-256 of a certificate.
///
/// # Errors
/// When the text is anything else.
pub fn parse_fingerprint(text: &str) -> Result<[u8; 32]> {
    config::hash::read(text).context("a fingerprint is 64 hexadecimal digits")
}

/// Makes a folder for the files of a program under test.
pub fn scratch_folder() -> Result<PathBuf> {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("paced-perf.{}.{number}", std::process::id()));
    fs::create_dir(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
    Ok(folder)
}

/// Returns an address with a port that is free now; on a machine used for measurements, no other program should
/// take it meanwhile.
fn free_address() -> Result<SocketAddr> {
    Ok(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_of_the_relay_is_valid() {
        let address = "127.0.0.1:4433".parse().unwrap();
        for (transport, coalesce_us, busy_poll_us) in [("", 0, 0), (COALESCING, 1_000, 0), (POLLING, 0, 50)] {
            let text = configuration(address, Path::new("/run/x"), (UNLIMITED_REQUESTS, transport));
            let config = config::Config::from_toml(&text).unwrap();
            assert_eq!(config.relay.unwrap().listeners[0].address, address);
            let waits = [config.transport.coalesce, config.transport.busy_poll];
            assert_eq!(waits, [coalesce_us, busy_poll_us].map(Duration::from_micros));
        }
    }

    #[test]
    fn only_a_relay_that_was_not_ready_in_time_is_started_again() {
        let silent = UnixDatagram::unbound().unwrap();
        silent.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let late = silent.recv(&mut [0]).context("the relay did not become ready").unwrap_err();
        assert!(is_late(&late), "{late:#}");
        let missing = Command::new("/no/such/relay").spawn().context("failed to start").unwrap_err();
        assert!(!is_late(&missing) && !is_late(&anyhow::anyhow!("another state")), "{missing:#}");
    }

    #[test]
    fn fingerprints_are_64_digits() {
        assert_eq!(parse_fingerprint(&"0f".repeat(32)).unwrap(), [15; 32]);
        for wrong in ["0f".repeat(31), "0g".repeat(32), "é".repeat(32)] {
            assert!(parse_fingerprint(&wrong).is_err(), "{wrong}");
        }
    }
}
