//! The connection to the daemon: through its control socket, or through its door for other machines.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use api::ControlClient;
use clap::Args;
use edge::client::{OpenError, error::ConnectError};
use quic::tls::{self, Trust};
use tonic::{Code, Status, transport::Uri};

/// The socket of an installed daemon.
const INSTALLED: &str = "/run/paced/control.sock";

#[derive(Args)]
pub(crate) struct Door {
    /// The daemon's control socket [default: that of the service, else that of `paced run` in development mode]
    #[arg(long, value_name = "PATH", env = "PACED_SOCKET")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    remote: Option<Remote>,
}

/// A daemon on another machine.
#[derive(Args)]
#[group(requires_all = ["remote", "remote_ca", "remote_cert", "remote_key"])]
struct Remote {
    /// A daemon on another machine: the `listen` address of its [control.tcp]
    #[arg(long, value_name = "HOST:PORT", env = "PACED_REMOTE", required = false, value_parser = remote)]
    remote: Uri,
    /// A PEM file of the certificate authorities to trust for that daemon
    #[arg(long, value_name = "FILE", env = "PACED_REMOTE_CA", required = false)]
    remote_ca: PathBuf,
    /// A PEM file of the client certificate to present
    #[arg(long, value_name = "FILE", env = "PACED_REMOTE_CERT", required = false)]
    remote_cert: PathBuf,
    /// A PEM file of that certificate's private key
    #[arg(long, value_name = "FILE", env = "PACED_REMOTE_KEY", required = false)]
    remote_key: PathBuf,
}

fn remote(text: &str) -> Result<Uri, String> {
    let place = format!("https://{text}").parse::<Uri>().map_err(|error| error.to_string())?;
    let is_whole = place.port_u16().is_some() && place.path() == "/" && place.query().is_none();
    if is_whole { Ok(place) } else { Err("write a host and a port, such as relay.example.org:9443".into()) }
}

/// No daemon answers.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreachable {
    #[error("no daemon answers at {place}: {error}; is it running, and may this user connect (group paced)?")]
    Socket { place: String, error: String },
    #[error(
        "no daemon answers at {place}: {error}; does it have [control.tcp], and does each side know the authority that \
             signed the other's certificate?"
    )]
    Remote { place: String, error: String },
}

impl Door {
    fn path(&self) -> PathBuf {
        let development = || state::development_dir().join("control.sock");
        let installed = PathBuf::from(INSTALLED);
        self.socket.clone().unwrap_or_else(|| if installed.exists() { installed } else { development() })
    }

    /// Connects to the daemon.
    pub(crate) async fn open(&self) -> Result<ControlClient> {
        if let (None, Some(remote)) = (&self.socket, &self.remote) {
            return remote.open().await;
        }
        let path = self.path();
        let place = path.display().to_string();
        Ok(api::connect(&path).await.map_err(|error| Unreachable::Socket { place, error: cause(&error) })?)
    }

    /// Refuses commands that must run on the daemon's machine.
    pub(crate) fn ensure_local(&self) -> Result<()> {
        let is_local = self.socket.is_some() || self.remote.is_none();
        ensure!(is_local, "this command inspects the daemon's machine: run it there, without --remote");
        Ok(())
    }
}

impl Remote {
    async fn open(&self) -> Result<ControlClient> {
        let trust = Trust::Authorities(tls::read_certificates(&self.remote_ca)?);
        let identity = (tls::read_certificates(&self.remote_cert)?, tls::read_key(&self.remote_key)?);
        let opened = api::connect_tcp(self.remote.clone(), tls::client_http2(trust, identity)?).await;
        let place = self.remote.authority().map(ToString::to_string).unwrap_or_default();
        Ok(opened.map_err(|error| Unreachable::Remote { place, error: cause(&error) })?)
    }
}

/// Returns the innermost cause of an error: outer errors only say that something failed.
fn cause(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).last().unwrap_or(error).to_string()
}

/// Returns the exit code for a failure, by what the user can do about it.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<Unreachable>() || broken(error).is_some() {
        return 5;
    }
    if error.chain().any(|cause| matches!(cause.downcast_ref(), Some(OpenError::Refused(_)))) {
        return 3;
    }
    if matches!(error.downcast_ref(), Some(ConnectError::NoAnswer(_))) {
        return 5;
    }
    match error.downcast_ref::<Status>().map(Status::code) {
        Some(Code::InvalidArgument | Code::Aborted | Code::FailedPrecondition | Code::NotFound | Code::OutOfRange) => 3,
        Some(Code::PermissionDenied | Code::Unauthenticated) => 4,
        Some(Code::Unavailable) => 5,
        _ => 1,
    }
}

/// Returns what broke the connection, if a call failed because of that.
fn broken(error: &anyhow::Error) -> Option<&dyn std::error::Error> {
    let status: &dyn std::error::Error = error.downcast_ref::<Status>()?;
    status.source().filter(|source| source.is::<tonic::transport::Error>())
}

/// Returns the message for people about a failure.
pub(crate) fn message(error: &anyhow::Error) -> String {
    if let Some(broken) = broken(error) {
        // A client learns the server's verdict on its certificate only once it has begun to send (RFC 8446 §4.4.2.4,
        // §2).
        let cause = cause(broken);
        return format!(
            "the daemon does not answer any more: {cause}; it ended, or, with --remote, it does not know the authority that \
             signed this certificate"
        );
    }
    match error.downcast_ref::<Status>() {
        Some(status) => status.message().to_owned(),
        None => format!("{error:#}"),
    }
}
