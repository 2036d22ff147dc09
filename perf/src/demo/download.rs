//! A download beside the requests, which fills the rest of the link: endless bytes over TCP.

use std::{
    cell::{Cell, RefCell},
    io::{self, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use lab::netns::Namespace;
use tokio::task::{JoinHandle as Task, spawn_local};

/// Bytes written and read at once.
const CHUNK_BYTES: usize = 16 << 10;

/// How long the server waits before it checks again whether to stop, or whether a client has come.
const SOON: Duration = Duration::from_millis(20);

/// Serves downloads until it is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Server {
    /// Listens on a port of all IPv4 addresses of a namespace.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn start(namespace: &Namespace, port: u16) -> Result<Self> {
        let listener = namespace.run(|| TcpListener::bind(("0.0.0.0", port)))?.context("the download's port")?;
        listener.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let until = stop.clone();
        let thread = thread::Builder::new().name("download".into()).spawn(move || serve(&listener, &until))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // An error shows at the client, whose download breaks off.
            _ = thread.join();
        }
    }
}

/// Serves one client after another.
fn serve(listener: &TcpListener, stop: &AtomicBool) -> io::Result<()> {
    while !stop.load(Relaxed) {
        match listener.accept() {
            Ok((client, _)) => {
                client.set_nonblocking(false)?;
                client.set_write_timeout(Some(SOON))?;
                fill(client, stop);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(SOON),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes until the client leaves.
fn fill(mut client: TcpStream, stop: &AtomicBool) {
    while !stop.load(Relaxed) {
        match client.write(&[0; CHUNK_BYTES]) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
    }
}

/// A download that continues until it is dropped. It belongs to the local task set in which it was begun.
#[derive(Debug)]
pub struct Download {
    seen: Rc<Seen>,
    task: Task<()>,
}

#[derive(Debug, Default)]
struct Seen {
    bytes: Cell<u64>,
    broken: RefCell<Option<String>>,
}

impl Download {
    /// Begins to download.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn begin(from: SocketAddr) -> Result<Self> {
        let socket = tokio::net::TcpStream::connect(from).await.with_context(|| format!("the download from {from}"))?;
        let seen = Rc::<Seen>::default();
        let own = seen.clone();
        let task = spawn_local(async move {
            let broken = read(&socket, &own.bytes).await;
            own.broken.replace(Some(broken.to_string()));
        });
        Ok(Self { seen, task })
    }

    /// Returns how many bytes have arrived.
    ///
    /// # Errors
    /// When the download broke off.
    pub fn bytes(&self) -> Result<u64> {
        if let Some(broken) = &*self.seen.broken.borrow() {
            bail!("the download broke off: {broken}");
        }
        Ok(self.seen.bytes.get())
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reads and counts until the connection ends, and returns why it did.
async fn read(socket: &tokio::net::TcpStream, bytes: &Cell<u64>) -> io::Error {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        if let Err(error) = socket.readable().await {
            return error;
        }
        match socket.try_read(&mut buffer) {
            Ok(0) => return io::ErrorKind::UnexpectedEof.into(),
            Ok(len) => bytes.set(bytes.get() + len as u64),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return error,
        }
    }
}
