//! Downloads by plain HTTP through the proxy of an edge with two uplinks, which fetches them in ranges over both.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use lab::{
    process::{Process, wait_for},
    site::{Counts, Family, SOON, Site},
    uplinks::{METRICS, Uplinks, edge, wait_until_up},
};

/// The length of the file, which takes seconds on one uplink.
const BYTES: usize = 12 << 20;

/// The qdisc of uplinks toward the client.
const RATE: &str = "tbf rate 40mbit burst 64kb limit 256kb";

/// What a server does with requests for ranges, which it has offered.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ranges {
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
    /// It sends the whole file, and keeps the connection open, although the request asks it to close it.
    Linger,
    /// The same, without telling the length.
    Hide,
}

/// A web server at the target, with one file.
struct Server(Arc<Service>);

struct Service {
    content: Vec<u8>,
    ranges: Mutex<Ranges>,
    /// How many ranges were requested since it was told what to do with them.
    asked: AtomicUsize,
}

impl Server {
    fn start(site: &Site) -> Self {
        let listener = site.chain.target.run(|| TcpListener::bind(("::", 80)).unwrap()).unwrap();
        let service = Arc::new(Service {
            // Bytes by which any shift shows.
            content: (0..BYTES / 4).flat_map(|word| (word as u32).to_le_bytes()).collect(),
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
    fn set(&self, ranges: Ranges) {
        *self.0.ranges.lock().unwrap() = ranges;
        self.0.asked.store(0, Relaxed);
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
    if service.asked.fetch_add(1, Relaxed) > 0 && ranges == Ranges::Refuse {
        return stream.write_all(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n").ok();
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

/// Starts an edge with both uplinks, and a proxy with these keys.
fn proxy(uplinks: &Uplinks, keys: &str) -> Process {
    let (site, relay) = (&uplinks.site, format!("\"{}\"", uplinks.site.template(Family::V4)));
    let proxy = format!(
        "[[proxy]]\nlisten = \"127.0.0.1:1080\"\nrelay = {relay}\nca = \"{}\"\nclass = \"spread\"\n\
         backoff_longest_seconds = 1\n{keys}\n[class.spread]\n\
         [[path]]\nname = \"first\"\ninterface = \"relay\"\n[[path]]\nname = \"second\"\ninterface = \"router\"\n",
        site.path("authority.pem").display(),
    );
    let edge = edge(site, &relay, &proxy);
    wait_until_up(site);
    edge
}

/// Two uplinks of the same rate.
fn uplinks() -> Uplinks {
    let uplinks = Uplinks::new();
    uplinks.second.far.set_qdisc(RATE).unwrap();
    uplinks.site.chain.access.far.set_qdisc(RATE).unwrap();
    uplinks
}

/// A curl at the client that downloads the file.
struct Curl {
    child: Child,
    file: PathBuf,
}

impl Curl {
    fn start(site: &Site, options: &[&str]) -> Self {
        let file = site.write("downloaded", "").unwrap();
        let mut command = site.chain.client.command("curl").unwrap();
        command.args(["--silent", "--show-error", "--max-time", "120", "--proxy", "http://127.0.0.1:1080"]);
        command.args(["--no-buffer", "--output"]).arg(&file).args(options).arg("http://10.0.2.2/file");
        Self { child: command.stderr(Stdio::piped()).spawn().unwrap(), file }
    }

    /// Waits until so many bytes have arrived.
    fn wait_for(&self, bytes: u64) {
        let has = || fs::metadata(&self.file).is_ok_and(|file| file.len() >= bytes);
        wait_for("bytes to arrive", SOON, || has().then_some(())).unwrap();
    }

    /// Waits for the end; returns the exit code, what curl said, and the file.
    fn end(mut self) -> (Option<i32>, String, Vec<u8>) {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let code = self.child.wait().unwrap().code();
        (code, said, fs::read(&self.file).unwrap())
    }
}

fn counts(site: &Site) -> Counts {
    Counts::read(&site.chain.client, METRICS).unwrap()
}

/// Downloads the file, asserts that it is whole, and returns how long that took.
fn download(site: &Site, server: &Server, edge: &Process) -> Duration {
    let begun = Instant::now();
    let (code, said, file) = Curl::start(site, &[]).end();
    assert_eq!((code, file.len()), (Some(0), BYTES), "{said}; the edge said:\n{}", edge.output());
    assert!(file == server.0.content, "other bytes arrived");
    begun.elapsed()
}

#[test]
fn one_download_takes_both_uplinks_and_arrives_as_it_is() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let (site, mut times) = (&uplinks.site, Vec::new());
    let server = Server::start(site);
    for keys in ["", "split_bytes = 1048576"] {
        let edge = proxy(&uplinks, keys);
        let received = |device| site.chain.client.packets(device).unwrap()[0];
        let before = ["relay", "router"].map(received);
        times.push(download(site, &server, &edge));
        let after = ["relay", "router"].map(received);
        let share = (after[1] - before[1]) as f64 / (after[0] + after[1] - before[0] - before[1]) as f64;
        let divided = counts(site).sum("edge_answers_divided_total");
        match keys {
            "" => assert!(divided == 0 && !(0.1..0.9).contains(&share), "{share}"),
            _ => assert!(divided == 1 && (0.2..0.8).contains(&share), "{share}, {divided}\n{}", edge.output()),
        }
        wait_for("the tunnels to end", SOON, || (counts(site).sum("edge_tunnels{") == 0).then_some(())).unwrap();
    }
    println!("12 MiB took {:?} over one uplink of 40 Mbit/s, {:?} over two", times[0], times[1]);
}

#[test]
fn a_download_goes_on_over_the_other_uplink_whichever_falls_silent() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let site = &uplinks.site;
    let server = Server::start(site);
    for cut in [Uplinks::cut, Uplinks::cut_first] {
        let edge = proxy(&uplinks, "split_bytes = 1048576");
        let curl = Curl::start(site, &[]);
        wait_for("ranges", SOON, || (counts(site).sum("edge_answers_divided_total") == 1).then_some(())).unwrap();
        curl.wait_for(2 << 20);
        cut(&uplinks, true);
        let (code, said, file) = curl.end();
        assert_eq!((code, file.len()), (Some(0), BYTES), "{said}; the edge said:\n{}", edge.output());
        assert!(file == server.0.content, "other bytes arrived");
        assert!(counts(site).sum("edge_ranges_failed_total") > 0, "the edge said:\n{}", edge.output());
        cut(&uplinks, false);
    }
}

#[test]
fn a_server_that_breaks_its_word_about_ranges_never_causes_wrong_bytes() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let site = &uplinks.site;
    let server = Server::start(site);
    let edge = proxy(&uplinks, "split_bytes = 1048576");
    for (ranges, is_divided) in [
        (Ranges::Ignore, false),
        (Ranges::Change, false),
        (Ranges::Misplace, false),
        (Ranges::Break, true),
        (Ranges::Close, true),
    ] {
        server.set(ranges);
        let divided = || counts(site).sum("edge_answers_divided_total");
        let before = divided();
        let time = download(site, &server, &edge);
        println!("{ranges:?}: {time:?}");
        assert_eq!(divided() - before, i64::from(is_divided), "{ranges:?}; the edge said:\n{}", edge.output());
    }
    server.set(Ranges::Refuse);
    let (code, said, file) = Curl::start(site, &[]).end();
    assert!(code != Some(0) && file.len() < BYTES, "{code:?}, {said}, {} bytes", file.len());
    assert!(server.0.content.starts_with(&file), "other bytes arrived");
}

#[test]
fn a_server_that_keeps_its_connection_open_keeps_no_tunnel() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let site = &uplinks.site;
    let server = Server::start(site);
    let edge = proxy(&uplinks, "");
    let ended = || (counts(site).sum("edge_tunnels{") == 0).then_some(());
    server.set(Ranges::Linger);
    download(site, &server, &edge);
    wait_for("the tunnel to end", SOON, ended).unwrap();
    // The client does not know where the answer ends, and waits until it has had enough.
    server.set(Ranges::Hide);
    let curl = Curl::start(site, &["--max-time", "5"]);
    curl.wait_for(BYTES as u64);
    let (code, said, file) = curl.end();
    assert_eq!((code, file.len()), (Some(28), BYTES), "{said}");
    wait_for("the tunnel to end", SOON, ended).unwrap();
}

#[test]
fn a_client_that_goes_away_leaves_no_tunnels() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let site = &uplinks.site;
    let server = Server::start(site);
    let _edge = proxy(&uplinks, "split_bytes = 1048576");
    let mut curl = Curl::start(site, &["--limit-rate", "800k"]);
    curl.wait_for(1 << 20);
    curl.child.kill().unwrap();
    _ = curl.end();
    wait_for("the tunnels to end", SOON, || (counts(site).sum("edge_tunnels{") == 0).then_some(())).unwrap();
    assert!(server.0.asked.load(Relaxed) > 0);
}
