//! The connection to the daemon: through its control socket, or through its door for other machines.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Result, ensure};
use api::ControlClient;
use clap::{ArgMatches, Args, parser::ValueSource};
use quic::{
    h3,
    tls::{self, Trust},
};
use relay_client::{OpenError, error::ConnectError};
use tonic::{Code, Status, transport::Uri};

use super::{
    ask::{NoServer, RefusedByServer},
    forward::NotAdmitted,
    piped,
    table::printable,
};

/// The heading of these options in the help of each command, below its own.
const HEADING: &str = "Which daemon";

/// The socket of an installed daemon.
const INSTALLED: &str = "/run/paced/control.sock";

#[derive(Args)]
pub(crate) struct Door {
    /// The daemon's control socket [default: that of the service, else that of `paced run` in development mode]
    // clap refuses an empty PathBuf, but an empty PACED_SOCKET counts as none.
    #[arg(long, global = true, help_heading = HEADING, value_name = "PATH", env = "PACED_SOCKET", value_parser = clap::value_parser!(OsString))]
    socket: Option<OsString>,
    #[command(flatten)]
    remote: RemoteOptions,
}

/// A daemon on another machine: all options, or none.
#[derive(Args, Default)]
struct RemoteOptions {
    /// A daemon on another machine: the `listen` address of its [control.tcp]
    #[arg(long, global = true, help_heading = HEADING, value_name = "HOST:PORT", env = "PACED_REMOTE", value_parser = remote)]
    remote: Option<Uri>,
    /// A PEM file of the certificate authorities to trust for that daemon
    #[arg(long, global = true, help_heading = HEADING, value_name = "FILE", env = "PACED_REMOTE_CA")]
    remote_ca: Option<PathBuf>,
    /// A PEM file of the client certificate to present
    #[arg(long, global = true, help_heading = HEADING, value_name = "FILE", env = "PACED_REMOTE_CERT")]
    remote_cert: Option<PathBuf>,
    /// A PEM file of that certificate's private key
    #[arg(long, global = true, help_heading = HEADING, value_name = "FILE", env = "PACED_REMOTE_KEY")]
    remote_key: Option<PathBuf>,
}

/// A daemon on another machine, and how to reach it.
struct Remote<'a> {
    place: &'a Uri,
    authorities: &'a Path,
    certificate: &'a Path,
    private_key: &'a Path,
}

impl RemoteOptions {
    fn whole(&self) -> Option<Remote<'_>> {
        Some(Remote {
            place: self.remote.as_ref()?,
            authorities: self.remote_ca.as_deref()?,
            certificate: self.remote_cert.as_deref()?,
            private_key: self.remote_key.as_deref()?,
        })
    }

    /// Returns the first option that is missing, if any is given.
    fn missing(&self) -> Option<&'static str> {
        let options = [
            ("--remote", self.remote.is_some()),
            ("--remote-ca", self.remote_ca.is_some()),
            ("--remote-cert", self.remote_cert.is_some()),
            ("--remote-key", self.remote_key.is_some()),
        ];
        let is_used = options.iter().any(|(_, is_given)| *is_given);
        options.into_iter().find(|(_, is_given)| is_used && !is_given).map(|(name, _)| name)
    }
}

/// Returns the socket of the installed daemon if it exists, or if this user may not look into its folder. Otherwise returns the socket of
/// development mode.
fn default_socket(is_installed: io::Result<bool>) -> PathBuf {
    match is_installed {
        Ok(false) => state::development_dir().join("control.sock"),
        Ok(true) | Err(_) => INSTALLED.into(),
    }
}

fn remote(text: &str) -> Result<Uri, String> {
    let place = format!("https://{text}").parse::<Uri>().map_err(|error| error.to_string())?;
    let is_whole = place.port_u16().is_some() && place.path() == "/" && place.query().is_none();
    if is_whole { Ok(place) } else { Err("write a host and a port, such as relay.example.org:9443".into()) }
}

/// No daemon answers.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreachable {
    #[error("no daemon answers at {place}: {error}; {remedy}")]
    Socket { place: String, error: String, remedy: &'static str },
    #[error(
        "no daemon answers at {place}: {error}; does it have [control.tcp], and does each side know the authority that \
             signed the other's certificate?"
    )]
    Remote { place: String, error: String },
}

impl Door {
    fn path(&self) -> PathBuf {
        let given = self.socket.as_ref().map(PathBuf::from);
        given.unwrap_or_else(|| default_socket(Path::new(INSTALLED).try_exists()))
    }

    /// Decides between a socket and another machine: an option on the command line goes before a variable. Returns the message for a
    /// command line that names both.
    pub(crate) fn settle(&mut self, matches: &ArgMatches) -> Result<(), &'static str> {
        let is_option = |id| matches.value_source(id) == Some(ValueSource::CommandLine);
        self.prefer([is_option("socket"), is_option("remote")])
    }

    fn prefer(&mut self, options: [bool; 2]) -> Result<(), &'static str> {
        match options {
            [true, true] => return Err("--socket and --remote name two daemons: give one of them"),
            [false, true] => self.socket = None,
            [false, false] => _ = self.socket.take_if(|path| path.is_empty()),
            [true, false] => {}
        }
        Ok(())
    }

    /// Returns the first option that a daemon on another machine still needs, unless `--socket` decides.
    pub(crate) fn missing(&self) -> Option<&'static str> {
        if self.socket.is_some() { None } else { self.remote.missing() }
    }

    /// Connects to the daemon.
    pub(crate) async fn open(&self) -> Result<ControlClient> {
        if let (None, Some(remote)) = (&self.socket, self.remote.whole()) {
            return remote.open().await;
        }
        let path = self.path();
        let place = path.display().to_string();
        Ok(api::connect(&path).await.map_err(|error| Unreachable::Socket {
            place,
            error: cause(&error),
            remedy: remedy(&path, kind(&error)),
        })?)
    }

    /// Returns whether the daemon may be on another machine.
    pub(crate) fn is_remote(&self) -> bool {
        self.socket.is_none() && self.remote.remote.is_some()
    }

    /// Refuses commands that must run on the daemon's machine.
    pub(crate) fn ensure_local(&self) -> Result<()> {
        ensure!(!self.is_remote(), "this command inspects the daemon's machine: run it there, without --remote");
        Ok(())
    }
}

impl Remote<'_> {
    async fn open(&self) -> Result<ControlClient> {
        let trust = Trust::Authorities(piped::read(self.authorities, tls::read_certificates).await?);
        let chain = piped::read(self.certificate, tls::read_certificates).await?;
        let identity = (chain, piped::read(self.private_key, tls::read_key).await?);
        let opened = api::connect_tcp(self.place.clone(), tls::client_http2(trust, identity)?).await;
        let place = self.place.authority().map(ToString::to_string).unwrap_or_default();
        Ok(opened.map_err(|error| Unreachable::Remote { place, error: cause(&error) })?)
    }
}

/// Returns the kind of the system's error behind an error.
fn kind(error: &(dyn std::error::Error + 'static)) -> Option<io::ErrorKind> {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.find_map(|error| error.downcast_ref().map(io::Error::kind))
}

/// Returns what to do if a socket cannot be connected to.
fn remedy(socket: &Path, kind: Option<io::ErrorKind>) -> &'static str {
    match kind {
        Some(io::ErrorKind::PermissionDenied) => {
            "this user may not connect: use root, or add the user to the socket's group (`adduser USER paced`) and log in again"
        }
        Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) if socket == Path::new(INSTALLED) => {
            "is paced running? `systemctl status paced` says so, and `systemctl start paced` starts it"
        }
        Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            "is paced running? Start it (`systemctl start paced`, or `paced run`), or name its control socket with --socket"
        }
        _ => "is paced running, and may this user connect (group paced)?",
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
    if error.chain().any(is_refusal) {
        return 3;
    }
    if error.is::<NoServer>() || matches!(error.chain().find_map(connect_error), Some(ConnectError::NoAnswer(_))) {
        return 5;
    }
    match error.downcast_ref::<Status>().map(Status::code) {
        Some(
            Code::InvalidArgument
            | Code::Aborted
            | Code::FailedPrecondition
            | Code::NotFound
            | Code::OutOfRange
            | Code::ResourceExhausted,
        ) => 3,
        Some(Code::PermissionDenied | Code::Unauthenticated) => 4,
        Some(Code::Unavailable) => 5,
        _ => 1,
    }
}

/// Returns whether a relay or a server of models refused: the request, or this client's certificate.
fn is_refusal(cause: &(dyn std::error::Error + 'static)) -> bool {
    let by_alert = |error: &h3::Error| error.is_refusal_by_tls();
    match (cause.downcast_ref(), connect_error(cause)) {
        (Some(OpenError::Refused(_)), _) => true,
        (Some(OpenError::Http(error)), _) => by_alert(error),
        (_, Some(ConnectError::Http(error))) => by_alert(error),
        (_, Some(ConnectError::Failed { cause, .. })) => h3::refused_by_tls(cause),
        _ => cause.is::<RefusedByServer>() || cause.is::<NotAdmitted>(),
    }
}

/// Returns why there is no connection to a relay; attempts that are made again share their errors.
fn connect_error<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a ConnectError> {
    cause.downcast_ref().or_else(|| cause.downcast_ref::<Arc<ConnectError>>().map(Arc::as_ref))
}

/// Returns what broke the connection, if a call failed because of that.
fn broken(error: &anyhow::Error) -> Option<&(dyn std::error::Error + 'static)> {
    let status: &dyn std::error::Error = error.downcast_ref::<Status>()?;
    status.source().filter(|source| source.is::<tonic::transport::Error>())
}

/// Returns whether a connection broke because its peer answered no ping in time.
fn is_silence(broken: &(dyn std::error::Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(broken), |error| error.source());
    causes.any(|error| error.downcast_ref().is_some_and(hyper::Error::is_timeout))
}

/// Returns the message for people about a failure, of a daemon on another machine if it `is_remote`. It may contain the words of that
/// machine, without characters that a terminal would obey.
pub(crate) fn message(error: &anyhow::Error, is_remote: bool) -> String {
    printable(&raw_message(error, is_remote))
}

fn raw_message(error: &anyhow::Error, is_remote: bool) -> String {
    if let Some(broken) = broken(error) {
        let why = match (is_silence(broken), is_remote) {
            (true, false) => {
                "it hangs, is stopped, or can open no more descriptors: `systemctl status paced` shows its processes and its log"
            }
            (true, true) => {
                "it hangs, is stopped, or can open no more descriptors, or nothing gets through to its machine"
            }
            (false, false) => "it ended",
            // A client learns the server's verdict on its certificate only once it has begun to send (RFC 8446 §4.4.2.4,
            // §2).
            (false, true) => "it ended, or does not know the authority that signed this certificate",
        };
        return format!("the daemon does not answer any more: {}; {why}", cause(broken));
    }
    match error.downcast_ref::<Status>() {
        // tonic gives no reason.
        Some(status) if status.code() == Code::Unimplemented => {
            "the daemon does not know this command, because it is older than this pacectl: restart paced, so that it runs the installed \
             version"
                .to_owned()
        }
        Some(status) if status.message().is_empty() => format!("the daemon gave no reason: {}", status.code()),
        Some(status) => status.message().to_owned(),
        None => format!("{error:#}"),
    }
}

/// Fetches all rows of a list, page by page: each with the token of the page before.
pub(crate) async fn pages<T>(page: impl AsyncFnMut(String) -> Result<(Vec<T>, String)>) -> Result<Vec<T>> {
    Ok(first_pages(usize::MAX, page).await?.0)
}

/// Fetches the rows of the first `most` pages of a list, as [`pages`] does. Returns whether there are more.
pub(crate) async fn first_pages<T>(
    most: usize,
    mut page: impl AsyncFnMut(String) -> Result<(Vec<T>, String)>,
) -> Result<(Vec<T>, bool)> {
    let (mut all, mut token) = (Vec::new(), String::new());
    for _ in 0..most {
        let (rows, next) = page(token).await?;
        all.extend(rows);
        if next.is_empty() {
            return Ok((all, false));
        }
        token = next;
    }
    Ok((all, true))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use api::v1::GetStatusRequest;
    use masque::request::TunnelRefused;
    use relay_client::credentials::CredentialsRefused;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tonic::transport::Endpoint;

    use super::*;

    impl Door {
        /// Returns the door of a daemon on this machine.
        pub(crate) fn of(socket: OsString) -> Self {
            Self { socket: Some(socket), remote: RemoteOptions::default() }
        }
    }

    #[test]
    fn a_folder_that_does_not_let_this_user_look_may_hold_the_installed_socket() {
        let denied = || Err(io::ErrorKind::PermissionDenied.into());
        assert_eq!(default_socket(Ok(true)), Path::new(INSTALLED));
        assert_eq!(default_socket(denied()), Path::new(INSTALLED), "so that its error is shown");
        assert_ne!(default_socket(Ok(false)), Path::new(INSTALLED));
    }

    #[tokio::test]
    async fn a_socket_without_a_daemon_and_one_that_is_closed_to_this_user_have_different_remedies() {
        let folder = std::env::temp_dir().join(format!("pacectl-door-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("control.sock");
        let said = async |path: &Path| Door::of(path.into()).open().await.err().unwrap().to_string();
        assert!(said(&socket).await.contains("is paced running? Start it"));
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        assert!(said(&socket).await.contains("is paced running? Start it"), "its daemon was killed");
        std::fs::remove_dir_all(folder).unwrap();
        let [running, denied] = [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied]
            .map(|kind| remedy(Path::new(INSTALLED), Some(kind)));
        assert!(running.contains("systemctl start paced") && denied.contains("adduser USER paced"));
    }

    #[test]
    fn options_of_another_machine_are_demanded_only_where_they_decide() {
        let remote =
            || RemoteOptions { remote: Some(remote("relay.example:9443").unwrap()), ..RemoteOptions::default() };
        assert_eq!(Door { socket: None, remote: remote() }.missing(), Some("--remote-ca"));
        assert_eq!(Door { socket: Some("control.sock".into()), remote: remote() }.missing(), None);
        assert_eq!(Door { socket: None, remote: RemoteOptions::default() }.missing(), None);
    }

    #[test]
    fn an_option_goes_before_a_variable_and_an_empty_variable_is_none() {
        let settled = |socket: &str, options| {
            let remote =
                RemoteOptions { remote: Some(remote("relay.example:9443").unwrap()), ..RemoteOptions::default() };
            let mut door = Door { socket: Some(socket.into()), remote };
            door.prefer(options).map(|()| door.socket.is_some())
        };
        assert_eq!(settled("edge.sock", [false, true]), Ok(false), "PACED_SOCKET does not override --remote");
        assert_eq!(settled("edge.sock", [true, false]), Ok(true));
        assert_eq!(settled("edge.sock", [false, false]), Ok(true), "of two variables, the socket decides");
        assert_eq!(settled("", [false, false]), Ok(false));
        assert_eq!(settled("", [true, false]), Ok(true), "an empty --socket does not mean another machine");
        assert!(settled("edge.sock", [true, true]).is_err());
    }

    #[test]
    fn a_message_of_another_machine_does_not_reach_the_terminal_as_commands() {
        let words = "no\u{1b}[2J\nmodel";
        let errors = [
            RefusedByServer(words.into()).into(),
            Status::not_found(words).into(),
            anyhow::anyhow!("the answer broke off: {words}"),
        ];
        for error in errors {
            let message = message(&error, true);
            assert!(message.ends_with("no\u{fffd}[2J\nmodel"), "{message:?}");
        }
    }

    #[test]
    fn a_failure_without_words_is_told_by_its_code_and_an_older_daemon_by_the_remedy() {
        let said = |code| message(&Status::new(code, "").into(), false);
        assert_eq!(said(Code::Internal), "the daemon gave no reason: Internal error");
        let older = said(Code::Unimplemented);
        assert!(older.contains("older than this pacectl") && older.contains("restart paced"), "{older}");
    }

    /// What is said of a call to a daemon that accepts a connection, and then ends or is silent.
    async fn said_of_a_daemon(that_ends: bool) -> [String; 2] {
        let path = std::env::temp_dir().join(format!("pacectl-{that_ends}-{}.sock", std::process::id()));
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let daemon = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            // A frame of HTTP/2 with no settings (RFC 9113 §6.5).
            stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
            let mut read = Vec::new();
            _ = if that_ends { stream.read_buf(&mut read).await } else { stream.read_to_end(&mut read).await };
        });
        // As `api::connect` does, but within milliseconds.
        let endpoint = Endpoint::from_shared(format!("unix:{}", path.display())).unwrap();
        let endpoint = endpoint.http2_keep_alive_interval(Duration::from_millis(1));
        let channel = endpoint.keep_alive_timeout(Duration::from_millis(1)).connect().await.unwrap();
        let mut client = ControlClient::new(channel);
        let failed = anyhow::Error::new(client.get_status(GetStatusRequest {}).await.unwrap_err());
        daemon.abort();
        std::fs::remove_file(path).unwrap();
        assert_eq!(exit_code(&failed), 5, "{failed:?}");
        [false, true].map(|is_remote| message(&failed, is_remote))
    }

    #[tokio::test]
    async fn a_daemon_that_is_silent_is_not_said_to_have_ended_and_certificates_concern_only_another_machine() {
        let [here, there] = said_of_a_daemon(false).await;
        assert!(here.contains("timed out") && here.contains("systemctl status paced"), "{here}");
        for said in [&here, &there] {
            assert!(said.contains("hangs") && said.contains("descriptors") && !said.contains("certificate"), "{said}");
        }
        let [here, there] = said_of_a_daemon(true).await;
        assert!(here.ends_with("; it ended") && there.ends_with("that signed this certificate"), "{here}\n{there}");
    }

    #[test]
    fn refusals_have_their_own_exit_code_wherever_they_come_from() {
        let by_relay =
            OpenError::from(TunnelRefused::Status { status: 429, proxy_status: Vec::new(), retry_after_s: None });
        let by_server = RefusedByServer("refused (404)".into());
        assert_eq!(exit_code(&anyhow::Error::from(by_relay).context("the relay is up")), 3);
        assert_eq!(exit_code(&by_server.into()), 3);
        let by_forward = CredentialsRefused { status: 407, details: String::new() };
        assert_eq!(exit_code(&NotAdmitted(by_forward).into()), 3);
        for by_daemon in [Status::resource_exhausted("busy"), Status::aborted("stale"), Status::not_found("tunnel")] {
            assert_eq!(exit_code(&by_daemon.into()), 3);
        }
        assert_eq!(exit_code(&OpenError::NoAnswer.into()), 1);
    }

    #[test]
    fn silence_has_its_own_exit_code_whether_or_not_an_attempt_is_shared() {
        let silent = || ConnectError::NoAnswer("192.0.2.1:443".parse().unwrap());
        assert_eq!(exit_code(&silent().into()), 5, "as of probe");
        assert_eq!(exit_code(&anyhow::Error::new(Arc::new(silent()))), 5, "as of forward");
        let explained = anyhow::Error::new(silent()).context("start a relay");
        assert_eq!(exit_code(&explained), 5, "as of a relay of development mode");
        let no_server = NoServer { url: "http://127.0.0.1:8100".into(), error: "refused".into() };
        assert_eq!(exit_code(&no_server.into()), 5, "as of ask");
    }
}
