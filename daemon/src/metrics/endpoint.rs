//! The smallest HTTP/1.1 server that a scraper is content with: one request per connection, one resource.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::Metrics;

/// Most bytes of a request's head.
const MAX_HEAD_BYTES: usize = 4096;

/// Connections at once; more are closed at once.
const MAX_CONNECTIONS: usize = 16;

/// How long a whole exchange may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait when the system has no descriptor for the next connection.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Serves `GET /metrics` on `listener` until the task is dropped. Whoever reaches the listener may read.
pub async fn serve(listener: TcpListener, metrics: Metrics) -> Infallible {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a scraper's connection was not accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else { continue };
        let metrics = metrics.clone();
        tokio::spawn(async move {
            let exchange = tokio::time::timeout(TIMEOUT, answer(stream, &metrics)).await;
            tracing::trace!(?exchange, "metrics were asked for");
            drop(permit);
        });
    }
}

/// Reads one request and answers it.
async fn answer(mut stream: TcpStream, metrics: &Metrics) -> io::Result<()> {
    let head = read_head(&mut stream).await?;
    let (status, header, body) = match head.as_deref().map(request) {
        None => ("431 Request Header Fields Too Large", "", String::new()),
        Some(Request::Metrics) => {
            let text = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
            ("200 OK", text, metrics.text())
        }
        Some(Request::OtherPath) => ("404 Not Found", "", String::new()),
        Some(Request::OtherMethod) => ("405 Method Not Allowed", "allow: GET\r\n", String::new()),
        Some(Request::Malformed) => ("400 Bad Request", "", String::new()),
    };
    let len = body.len();
    let response = format!("HTTP/1.1 {status}\r\n{header}content-length: {len}\r\nconnection: close\r\n\r\n{body}");
    stream.write_all(response.as_bytes()).await?;
    stream.shutdown().await
}

/// Reads up to the empty line. Returns `None` if it does not come within [`MAX_HEAD_BYTES`].
///
/// # Errors
/// `UnexpectedEof` when the client leaves before.
async fn read_head(stream: &mut TcpStream) -> io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    loop {
        let left = MAX_HEAD_BYTES - head.len();
        if left == 0 {
            return Ok(None);
        }
        if stream.take(left as u64).read_buf(&mut head).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if head.windows(4).any(|window| window == b"\r\n\r\n") {
            return Ok(Some(head));
        }
    }
}

/// What a request asks for.
enum Request {
    Metrics,
    OtherPath,
    OtherMethod,
    Malformed,
}

/// Parses a request line (RFC 9112 §3).
fn request(head: &[u8]) -> Request {
    let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let parts: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let [method, target, b"HTTP/1.1" | b"HTTP/1.0"] = parts[..] else { return Request::Malformed };
    match (method, target.split(|&byte| byte == b'?').next()) {
        (b"GET", Some(b"/metrics")) => Request::Metrics,
        (b"GET", _) => Request::OtherPath,
        _ => Request::OtherMethod,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;

    #[tokio::test]
    async fn a_scrape_shows_what_was_counted() {
        let metrics = Metrics::new();
        metrics.tunnels_opened.inc_by(7);
        let address = start(metrics).await;
        let response = ask(address, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"));
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())));
        assert!(body.contains("\npaced_tunnels_opened_total 7\n") && body.ends_with("# EOF\n"));
    }

    #[tokio::test]
    async fn everything_else_is_refused() {
        let address = start(Metrics::new()).await;
        let long = [b"GET /metrics HTTP/1.1\r\nx: ", &[b'a'; MAX_HEAD_BYTES][..]].concat();
        let cases: [(&[u8], &str); 6] = [
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"GET /metrics/x HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET /metrics\r\n\r\n", "400"),
            (b"\r\n\r\n", "400"),
            (&long[..MAX_HEAD_BYTES], "431"),
        ];
        for (request, status) in cases {
            assert_eq!(ask(address, request).await.split(' ').nth(1), Some(status));
        }
    }

    #[tokio::test]
    async fn idle_connections_are_bounded() {
        let address = start(Metrics::new()).await;
        let mut idle = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        // One too many is closed without an answer; when one of the idle ones goes, there is room again.
        let mut surplus = TcpStream::connect(address).await.unwrap();
        assert_eq!(surplus.read(&mut [0; 1]).await.unwrap(), 0);
        drop(idle.pop());
        let request = b"GET /metrics HTTP/1.1\r\n\r\n";
        while !ask(address, request).await.starts_with("HTTP/1.1 200") {
            tokio::task::yield_now().await;
        }
    }

    async fn start(metrics: Metrics) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, metrics));
        address
    }

    /// Returns the response, or nothing if the server closed the connection without one.
    async fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut response = String::new();
        // Where the server closes first, either of them may fail.
        let _ = stream.write_all(request).await;
        let _ = stream.read_to_string(&mut response).await;
        response
    }
}
