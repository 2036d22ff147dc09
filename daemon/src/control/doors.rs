//! The doors that a configuration names: opened at the start, and replaced at a reload.

use std::{
    io,
    net::SocketAddr,
    os::unix::{fs::MetadataExt as _, net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use config::{
    control::{Bus, ControlSettings as Settings, TcpDoor},
    targets::Protocol,
};
use quic::tls;
use role::{accept::Acceptor, bind_error::BindError};
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, UnixListener as Socket},
    runtime::Handle,
    sync::watch,
    task::AbortHandle,
};

use super::{
    Control, SharedControl,
    caller::{Bearers, Writers},
    dbus,
    grpc::{self, Certificates, ControlListener, Stay},
};
use crate::{certificates::Certificate, configuration::control_identity};

/// The open doors, on the runtime of the control plane.
pub struct Doors {
    control: SharedControl,
    runtime: Handle,
    /// The Unix socket, if the service manager has opened it. It then cannot be moved, and its file is not ours.
    given: Option<UnixListener>,
    /// Turns away callers of that socket while its door is shut.
    turning_away: Option<AbortHandle>,
    unix: Option<UnixDoor>,
    tcp: Option<(SocketAddr, OpenDoor)>,
    bus: Option<(Bus, AbortHandle)>,
    writers: Writers,
    bearers: Bearers,
    certificates: Option<Certificates>,
    /// The contents of the files that admit callers over TCP.
    admitting: Vec<Vec<u8>>,
}

/// A door that is being served. Dropping it ends its connections.
struct OpenDoor {
    task: AbortHandle,
    /// Ends the connections that exist when it sends.
    end: watch::Sender<()>,
}

impl Drop for OpenDoor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The door on the Unix socket at `path`.
struct UnixDoor {
    path: PathBuf,
    /// `None` if the service manager has opened the socket: its file is not ours.
    file: Option<SocketFile>,
    _door: OpenDoor,
}

impl UnixDoor {
    /// Returns whether callers who look at `path` find this door.
    fn is_at(&self, path: &Path) -> bool {
        self.path == path && self.file.as_ref().is_none_or(SocketFile::is_there)
    }
}

/// The file of a Unix socket that paced has made.
struct SocketFile {
    path: PathBuf,
    /// Its device and inode, which no other file gets while the socket is open.
    id: Option<(u64, u64)>,
}

impl SocketFile {
    /// Returns the file that was just made at `path`.
    fn made(path: &Path) -> Self {
        Self { path: path.to_owned(), id: Self::id(path) }
    }

    fn id(path: &Path) -> Option<(u64, u64)> {
        std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
    }

    /// Returns whether nothing has deleted or replaced it.
    fn is_there(&self) -> bool {
        self.id.is_some() && self.id == Self::id(&self.path)
    }

    fn remove(&self) {
        _ = self.is_there().then(|| std::fs::remove_file(&self.path));
    }
}

/// Doors that are ready to open: their addresses are bound, and their files could be used.
pub struct PreparedDoors {
    settings: Settings,
    /// The sockets to serve; `None` for a door that is open already, or cannot be opened.
    unix: Option<Bound>,
    tcp: Option<TcpListener>,
    shown: Option<Shown>,
}

/// The files of `[control.tcp]`.
struct Shown {
    identity: Arc<ServerConfig>,
    /// The contents of `client_ca` and `client_crl`.
    admitting: Vec<Vec<u8>>,
}

impl Shown {
    fn read(tcp: &TcpDoor, in_force: &[Certificate]) -> Result<Self> {
        let files = std::iter::once(&tcp.client_ca).chain(&tcp.client_crl);
        // Before the identity, so that a change in between shows at the next reload.
        let admitting = files.map(|file| tls::read_configured(file).unwrap_or_default()).collect();
        Ok(Self { identity: control_identity(tcp, in_force)?, admitting })
    }
}

/// A Unix socket that is not served yet; dropping it removes its file if paced has made it.
struct Bound {
    socket: Option<Socket>,
    file: Option<SocketFile>,
}

impl Bound {
    fn new(path: &Path) -> Result<Self> {
        Ok(Self { socket: Some(grpc::bind(path)?), file: Some(SocketFile::made(path)) })
    }

    /// Returns the socket that the service manager has opened.
    fn given(given: &UnixListener) -> Result<Self> {
        let socket = given.try_clone().and_then(Socket::from_std);
        Ok(Self { socket: Some(socket.context("failed to use the control socket of paced.socket")?), file: None })
    }

    fn take(mut self) -> Option<(Socket, Option<SocketFile>)> {
        Some((self.socket.take()?, self.file.take()))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.file.iter().for_each(SocketFile::remove);
    }
}

impl Doors {
    /// Returns doors that are all shut.
    #[must_use]
    pub fn new(control: Arc<Control>, runtime: Handle) -> Self {
        let (follower, keeper) = (control.clone(), control.clone());
        runtime.spawn(async move { follower.follow_policies().await });
        runtime.spawn(async move { keeper.expire_trials().await });
        let (control, writers, bearers) = (Arc::new(control), Writers::new(&[]), Bearers::new(&[]));
        let (given, turning_away, certificates, admitting) = (None, None, None, Vec::new());
        let (unix, tcp, bus) = (None, None, None);
        Self { control, runtime, given, turning_away, unix, tcp, bus, writers, bearers, certificates, admitting }
    }

    /// Opens the doors that the configuration names at the start; `given` is the Unix socket if the service manager has
    /// opened it. If a door cannot be opened, this is logged, and the others open anyway.
    ///
    /// # Errors
    /// A file of `[control.tcp]` cannot be used.
    pub fn start(&mut self, settings: &Settings, given: Option<UnixListener>) -> Result<()> {
        self.given = given;
        let given = self.given.as_ref();
        let shown = settings.tcp.as_ref().map(|tcp| Shown::read(tcp, &[])).transpose()?;
        let log = |error: &anyhow::Error| tracing::warn!("cannot serve gRPC on one address: {error:#}");
        let within = self.runtime.enter();
        let unix = settings.socket.as_ref().and_then(|path| {
            if let Some(at) = given.and_then(|given| elsewhere(given, path)) {
                tracing::warn!(
                    "paced.socket listens on {}, but `socket` in [control] is {}, so paced does not listen where callers look: change \
                     ListenStream= of paced.socket, or `socket`",
                    at.display(),
                    path.display()
                );
            }
            given.map_or_else(|| Bound::new(path), Bound::given).inspect_err(log).ok()
        });
        let tcp = settings.tcp.as_ref().and_then(|tcp| listen(tcp).inspect_err(log).ok());
        drop(within);
        self.open(PreparedDoors { settings: settings.clone(), unix, tcp, shown });
        Ok(())
    }

    /// Prepares to open these doors and no others, without changing the open ones. An expired certificate is accepted if it is one of
    /// those `in_force`.
    ///
    /// # Errors
    /// A door cannot be opened; if it could not be opened before either, this is logged instead. Or a file of
    /// `[control.tcp]` cannot be used.
    pub fn prepare(&self, before: &Settings, settings: &Settings, in_force: &[Certificate]) -> Result<PreparedDoors> {
        let shown = settings.tcp.as_ref().map(|tcp| Shown::read(tcp, in_force)).transpose()?;
        let _within = self.runtime.enter();
        let unix = match &settings.socket {
            Some(path) if self.unix.as_ref().is_none_or(|door| !door.is_at(path)) => {
                let is_known = before.socket.as_ref() == Some(path);
                ensure!(
                    is_known || self.given.as_ref().is_none_or(|given| elsewhere(given, path).is_none()),
                    "paced.socket has opened the control socket: to move it, change ListenStream= there and `socket` in \
                     [control], and restart both units"
                );
                unless_known(self.given.as_ref().map_or_else(|| Bound::new(path), Bound::given), is_known)?
            }
            _ => None,
        };
        let tcp = match &settings.tcp {
            Some(tcp) if self.tcp.as_ref().is_none_or(|(known, _)| *known != tcp.address) => {
                let is_known = before.tcp.as_ref().is_some_and(|before| before.address == tcp.address);
                unless_known(listen(tcp), is_known)?
            }
            _ => None,
        };
        Ok(PreparedDoors { settings: settings.clone(), unix, tcp, shown })
    }

    /// Opens the prepared doors, and shuts unwanted doors, whose connections end within a second. If `client_ca` or
    /// `client_crl` has changed, all connections over TCP end as well.
    pub fn open(&mut self, PreparedDoors { settings, unix, tcp, shown }: PreparedDoors) {
        self.writers.replace(&settings.writers);
        self.bearers.replace(settings.tcp.as_ref().map_or(&[][..], |tcp| &tcp.writers));
        if let Some(door) = self.unix.take_if(|door| settings.socket.as_ref() != Some(&door.path)) {
            door.file.iter().for_each(SocketFile::remove);
        }
        drop(self.tcp.take_if(|(at, _)| settings.tcp.as_ref().is_none_or(|tcp| tcp.address != *at)));
        if let Some((_, keeper)) = self.bus.take_if(|(bus, _)| settings.bus.as_ref() != Some(&*bus)) {
            keeper.abort();
        }
        if let Some(Shown { identity, admitting }) = shown {
            match &self.certificates {
                Some(certificates) => certificates.replace(identity),
                None => self.certificates = Some(Certificates::new(identity)),
            }
            let has_changed = std::mem::replace(&mut self.admitting, admitting) != self.admitting;
            if let (true, Some((_, door))) = (has_changed, &self.tcp) {
                door.end.send_replace(());
            }
        }
        if let (Some((socket, file)), Some(path)) = (unix.and_then(Bound::take), settings.socket) {
            if self.unix.is_some() {
                tracing::warn!("{} was deleted or replaced, and has been made again", path.display());
            }
            let writers = self.writers.clone();
            let door = self.serve(|stay| ControlListener::Unix { socket, writers, stay });
            self.unix = Some(UnixDoor { path, file, _door: door });
        }
        self.turn_away();
        if let (Some(socket), Some(tcp), Some(certificates)) = (tcp, &settings.tcp, self.certificates.clone()) {
            let bearers = self.bearers.clone();
            let listener = |stay| ControlListener::Tcp { socket, certificates, bearers, stay };
            self.tcp = Some((tcp.address, self.serve(listener)));
        }
        if let (Some(bus), None) = (settings.bus, &self.bus) {
            // In a task, so that a slow bus delays nothing else.
            let keeper = dbus::keep(self.control.clone(), bus.clone(), self.writers.clone());
            self.bus = Some((bus, self.runtime.spawn(keeper).abort_handle()));
        }
    }

    /// Turns away callers of a given socket exactly while its door is shut. The service manager keeps that socket open, so without this
    /// they would wait for an answer.
    fn turn_away(&mut self) {
        match &self.given {
            Some(given) if self.unix.is_none() => {
                if self.turning_away.is_some() {
                    return;
                }
                let within = self.runtime.enter();
                let socket = Bound::given(given).map(Bound::take);
                drop(within);
                let log =
                    |error: &anyhow::Error| tracing::warn!("callers of the control socket get no answer: {error:#}");
                let Ok(Some((socket, _))) = socket.inspect_err(log) else { return };
                let counters = self.control.parts().doors.clone();
                let turning_away = self.runtime.spawn(async move {
                    let mut acceptor = Acceptor::new("control socket", &counters);
                    loop {
                        drop(acceptor.next(|| socket.accept()).await);
                    }
                });
                self.turning_away = Some(turning_away.abort_handle());
            }
            _ => self.turning_away.take().iter().for_each(AbortHandle::abort),
        }
    }

    fn serve(&self, listener: impl FnOnce(Stay) -> ControlListener) -> OpenDoor {
        let (end, stay) = Stay::new();
        let task = self.runtime.spawn(grpc::serve(self.control.clone(), listener(stay))).abort_handle();
        OpenDoor { task, end }
    }
}

/// Accepts that a door cannot be opened, and logs it, if the same door could not be opened before either.
fn unless_known<T>(opened: Result<T>, is_known: bool) -> Result<Option<T>> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(error) if is_known => {
            tracing::warn!("still cannot serve gRPC on one address: {error:#}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns the path of a socket that the service manager opened, unless `path` leads to the same file.
fn elsewhere(given: &UnixListener, path: &Path) -> Option<PathBuf> {
    let at = given.local_addr().ok()?.as_pathname()?.to_owned();
    let file = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    (file(&at) != file(path)).then_some(at)
}

fn listen(tcp: &TcpDoor) -> Result<TcpListener> {
    let bind = || -> io::Result<TcpListener> {
        let socket = std::net::TcpListener::bind(tcp.address)?;
        socket.set_nonblocking(true)?;
        TcpListener::from_std(socket)
    };
    let bound = bind().map_err(|error| BindError::new(Protocol::Tcp, tcp.address, error));
    bound.context("failed to serve [control.tcp]")
}

#[cfg(test)]
mod tests {
    use std::{error::Error, time::Duration};

    use api::v1::GetStatusRequest;
    use config::Config;
    use tokio::time::timeout;
    use tonic::{Code, Status, transport};

    use super::*;
    use crate::control::tests::control;

    /// Whether a door answers at `path`. If none does, `pacectl` must be able to tell, for its exit code.
    async fn is_open(path: &Path) -> bool {
        let ask = async {
            let status = api::connect(path).await?.get_status(GetStatusRequest {}).await?;
            Ok::<_, Box<dyn Error>>(status.into_inner().pid)
        };
        let Err(error) = timeout(Duration::from_secs(10), ask).await.expect("nobody waits for an answer") else {
            return true;
        };
        let by_status = |status: &Status| {
            status.code() == Code::Unavailable || status.source().is_some_and(|cause| cause.is::<transport::Error>())
        };
        assert!(error.is::<transport::Error>() || error.downcast_ref().is_some_and(by_status), "{error:?}");
        false
    }

    #[tokio::test]
    async fn a_given_socket_opens_and_shuts_by_reload_and_turns_callers_away_while_it_is_shut() {
        let folder = std::env::temp_dir().join(format!("paced-given-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let [at, other] = ["control.sock", "other.sock"].map(|name| folder.join(name));
        let given = UnixListener::bind(&at).unwrap();
        given.set_nonblocking(true).unwrap();
        let settings = |keys: &str| Config::from_toml(&format!("[control]\n{keys}\n")).unwrap().control;
        let shut = settings("enabled = false");
        let [open, moved] = [&at, &other].map(|path| settings(&format!("socket = \"{}\"", path.display())));
        let (control, _wishes) = control("");
        let mut doors = Doors::new(control, Handle::current());
        doors.start(&shut, Some(given)).unwrap();
        assert!(!is_open(&at).await);
        for (before, after) in [(&shut, &open), (&open, &shut), (&shut, &open)] {
            let prepared = doors.prepare(before, after, &[]).unwrap();
            doors.open(prepared);
            assert_eq!((is_open(&at).await, at.exists()), (after.socket.is_some(), true));
        }
        let refusal = doors.prepare(&open, &moved, &[]).err().unwrap().to_string();
        assert!(refusal.starts_with("paced.socket has opened the control socket"), "{refusal}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn a_reload_makes_the_socket_again_if_its_file_was_deleted_or_replaced() {
        let folder = std::env::temp_dir().join(format!("paced-deleted-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = folder.join("control.sock");
        let settings = Config::from_toml(&format!("[control]\nsocket = \"{}\"\n", at.display())).unwrap().control;
        let (control, _wishes) = control("");
        let mut doors = Doors::new(control, Handle::current());
        doors.start(&settings, None).unwrap();
        let reload = |doors: &mut Doors| {
            let prepared = doors.prepare(&settings, &settings, &[]).unwrap();
            let is_made = prepared.unix.is_some();
            doors.open(prepared);
            is_made
        };
        assert!(!reload(&mut doors) && is_open(&at).await, "nothing has happened to the file");
        std::fs::remove_file(&at).unwrap();
        assert!(!is_open(&at).await);
        assert!(reload(&mut doors) && is_open(&at).await);
        std::fs::remove_file(&at).unwrap();
        let other = UnixListener::bind(&at).unwrap();
        assert!(!reload(&mut doors) && at.exists(), "another process serves there, and keeps its file");
        drop(other);
        assert!(reload(&mut doors) && is_open(&at).await);
        assert!(!reload(&mut doors));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_given_socket_is_elsewhere_unless_its_path_leads_to_the_configured_one() {
        let folder = std::env::temp_dir().join(format!("paced-doors-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let [at, link, other] = ["control.sock", "link.sock", "other.sock"].map(|name| folder.join(name));
        let given = UnixListener::bind(&at).unwrap();
        std::os::unix::fs::symlink(&at, &link).unwrap();
        assert_eq!([&at, &link, &other].map(|path| elsewhere(&given, path)), [None, None, Some(at.clone())]);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
