//! Downloads by plain HTTP through the proxy of an edge: a web server with one file that it offers in ranges, and curl.

#![expect(clippy::unwrap_used, reason = "called by tests, and fails them")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    process::{KilledOnDrop, Process, wait_for},
    site::{Family, SOON, Site},
};

/// The address of the proxy at the client.
pub const PROXY: &str = "127.0.0.1:1080";

/// What a server does with requests for ranges, which it has offered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ranges {
    /// It serves them.
    Serve,
    /// It sends the whole file.
    Ignore,
    /// The file has another `ETag` by now.
    Change,
    /// It sends the wrong range.
    Misplace,
    /// It closes the connection in the middle of each.
    Break,
    /// It closes the connection after each, without saying so.
    Close,
    /// It refuses all but the first.
    Refuse,
    /// It is too busy for some of them.
    Limit,
    /// It sends the whole file, and keeps the connection open, although the request asks it to close it.
    Linger,
    /// The same, without telling the length.
    Hide,
}

/// A web server at the target, with one file.
pub struct Server(Arc<Service>);

struct Service {
    content: Vec<u8>,
    ranges: Mutex<Ranges>,
    /// How many ranges were requested since it was told what to do with them.
    asked: AtomicUsize,
}

impl Server {
    /// Starts it with a file of about this length, which it serves in ranges.
    pub fn start(site: &Site, bytes: usize) -> Self {
        let listener = site.chain.target.run(|| TcpListener::bind(("::", 80)).unwrap()).unwrap();
        let service = Arc::new(Service {
            // Bytes by which any shift shows.
            content: (0..bytes / 4).flat_map(|word| (word as u32).to_le_bytes()).collect(),
            ranges: Mutex::new(Ranges::Serve),
            asked: AtomicUsize::new(0),
        });
        let server = Self(service.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let service = service.clone();
                thread::spawn(move || while answer(&stream, &service).is_some() {});
            }
        });
        server
    }

    /// Says what it does from now on.
    pub fn set(&self, ranges: Ranges) {
        *self.0.ranges.lock().unwrap() = ranges;
        self.0.asked.store(0, Relaxed);
    }

    /// Returns how many ranges were requested since it was told what to do with them.
    pub fn asked(&self) -> usize {
        self.0.asked.load(Relaxed)
    }

    /// Returns its file.
    pub fn file(&self) -> &[u8] {
        &self.0.content
    }
}

/// Answers the next request of a connection; `None` if the connection ends.
fn answer(mut stream: &TcpStream, service: &Service) -> Option<()> {
    let (mut reader, mut range, mut closes) = (BufReader::new(stream), None, false);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end().to_ascii_lowercase().split_once(": ") {
            Some(("range", value)) => {
                let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
                range = Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?));
            }
            Some(("connection", "close")) => closes = true,
            Some(_) => {}
            None if line.trim_end().is_empty() => break,
            None => {}
        }
    }
    let (ranges, content) = (*service.ranges.lock().unwrap(), &service.content);
    let tag = if ranges == Ranges::Change && range.is_some() { "\"v2\"" } else { "\"v1\"" };
    let fields = format!("ETag: {tag}\r\nAccept-Ranges: bytes\r\n");
    let has_none = matches!(ranges, Ranges::Ignore | Ranges::Change | Ranges::Linger | Ranges::Hide);
    let Some((first, last)) = range.filter(|_| !has_none) else {
        let length = format!("Content-Length: {}\r\n", content.len());
        let head = format!("HTTP/1.1 200 OK\r\n{fields}{}\r\n", if ranges == Ranges::Hide { "" } else { &length });
        stream.write_all(head.as_bytes()).ok()?;
        stream.write_all(content).ok()?;
        return (!closes || matches!(ranges, Ranges::Linger | Ranges::Hide)).then_some(());
    };
    let asked = service.asked.fetch_add(1, Relaxed);
    let refused = match ranges {
        Ranges::Refuse if asked > 0 => Some("403 Forbidden"),
        // More often than there are fetchers.
        Ranges::Limit if (1..10).contains(&asked) => Some("503 Service Unavailable"),
        _ => None,
    };
    if let Some(status) = refused {
        return stream.write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes()).ok();
    }
    let shift = usize::from(ranges == Ranges::Misplace);
    let part = content.get(first - shift..=last - shift)?;
    let (first, last, length) = (first - shift, last - shift, content.len());
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\n{fields}Content-Range: bytes {first}-{last}/{length}\r\nContent-Length: {}\r\n\r\n",
        part.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    let whole = if ranges == Ranges::Break { part.len().div_ceil(2) } else { part.len() };
    stream.write_all(&part[..whole]).ok()?;
    let ends = matches!(ranges, Ranges::Break | Ranges::Close);
    if ends {
        _ = stream.shutdown(std::net::Shutdown::Both);
    }
    (!ends).then_some(())
}

/// A curl at the client that downloads the file.
pub struct Curl {
    child: KilledOnDrop,
    file: PathBuf,
}

impl Curl {
    /// Starts it with these further options.
    pub fn start(site: &Site, options: &[&str]) -> Self {
        let file = site.write("downloaded", "").unwrap();
        let mut command = site.chain.client.command("curl").unwrap();
        command.args(["--silent", "--show-error", "--max-time", "120", "--proxy", &format!("http://{PROXY}")]);
        command.args(["--no-buffer", "--output"]).arg(&file).args(options);
        command.arg(format!("http://{}/file", site.target(Family::V4, 80)));
        Self { child: KilledOnDrop::start(command.stderr(Stdio::piped())).unwrap(), file }
    }

    /// Waits until so many bytes have arrived.
    pub fn wait_for(&self, bytes: u64) {
        let has = || fs::metadata(&self.file).is_ok_and(|file| file.len() >= bytes);
        wait_for("bytes to arrive", SOON, || has().then_some(())).unwrap();
    }

    /// Ends it in the middle.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        _ = self.end();
    }

    /// Waits for the end; returns the exit code, what curl said, and the file.
    pub fn end(mut self) -> (Option<i32>, String, Vec<u8>) {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let code = self.child.wait().unwrap().code();
        (code, said, fs::read(&self.file).unwrap())
    }
}

/// Downloads the file, asserts that it is whole, and returns how long that took.
pub fn download(site: &Site, server: &Server, edge: &Process) -> Duration {
    let begun = Instant::now();
    let (code, said, file) = Curl::start(site, &[]).end();
    let time = begun.elapsed();
    assert_eq!((code, file.len()), (Some(0), server.file().len()), "{said}; the edge said:\n{}", edge.output());
    assert!(file == server.file(), "other bytes arrived");
    time
}
