//! Clients of the API: streams that begin when they are due, whatever happened to others, and answers one after another.

use std::{
    cell::{Cell, RefCell},
    io,
    net::SocketAddr,
    rc::Rc,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use instruments::{payload::now_ns, random::Random};
use tokio::{
    net::TcpStream,
    task::{JoinHandle, spawn_local},
    time::{sleep, timeout},
};

use super::wire::{Answers, Stamp};

/// The longest time that a client waits for anything before it counts an error.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How long it takes until the intended number of streams run at once.
const FILL_NS: f64 = 1e9;

/// Bytes read at once.
const READ_BYTES: usize = 16 << 10;

/// The clients' observations during a measurement.
pub struct Seen {
    /// The time from the engine's writing of a token until the client reads it, in nanoseconds.
    pub delay: Histogram<u64>,
    /// The time from the request to its first token, less the engine's own delay.
    pub first: Histogram<u64>,
    /// How much the time between two tokens of a stream differs from that at the engine (RFC 3550 §6.4.1, D).
    pub jitter: Histogram<u64>,
    /// Tokens that were read.
    pub tokens: u64,
    /// Answers that ended properly.
    pub answers: u64,
    /// Answers that did not.
    pub errors: u64,
    /// The reason for the first of these.
    pub first_error: Option<String>,
}

impl Seen {
    fn new() -> Result<Self> {
        // Precise to 0.1 %, and up to a minute.
        let histogram = || Histogram::new_with_max(60_000_000_000, 3);
        let (delay, first, jitter) = (histogram()?, histogram()?, histogram()?);
        Ok(Self { delay, first, jitter, tokens: 0, answers: 0, errors: 0, first_error: None })
    }
}

/// State that all clients of a measurement share.
pub struct Clients {
    at: SocketAddr,
    patience: Duration,
    idle: RefCell<Vec<TcpStream>>,
    running: Cell<u64>,
    is_measuring: Cell<bool>,
    seen: RefCell<Seen>,
}

/// Streams that begin at random times (a Poisson process), at a rate at which about `streams` run at once.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Streams at once, on average.
    pub streams: u64,
    /// Tokens of each stream.
    pub tokens: u64,
    /// The time between two tokens of a stream.
    pub period_ns: u64,
    /// The seed of the streams' start times.
    pub seed: u64,
}

impl Clients {
    /// Creates clients that send requests to `at`. It is an error if a connection is not made within `patience`, or an answer pauses
    /// for longer.
    ///
    /// # Errors
    /// When there is no memory for histograms.
    pub fn new(at: SocketAddr, patience: Duration) -> Result<Rc<Self>> {
        Ok(Rc::new(Self {
            at,
            patience,
            idle: RefCell::default(),
            running: Cell::new(0),
            is_measuring: Cell::new(false),
            seen: RefCell::new(Seen::new()?),
        }))
    }

    /// Returns how many streams are running.
    #[must_use]
    pub fn running(&self) -> u64 {
        self.running.get()
    }

    /// Begins to measure.
    pub fn measure(&self) {
        self.is_measuring.set(true);
    }

    /// Ends the measurement, and returns the observations.
    ///
    /// # Errors
    /// When there is no memory for histograms.
    pub fn measured(&self) -> Result<Seen> {
        self.is_measuring.set(false);
        Ok(self.seen.replace(Seen::new()?))
    }

    /// Begins streams when they are due, until the task is aborted. The streams of the first second start in the middle
    /// of their answers, as if others had preceded them.
    #[must_use]
    pub fn offer(self: &Rc<Self>, load: Load) -> JoinHandle<()> {
        let clients = self.clone();
        spawn_local(async move {
            let mut random = Random::new(load.seed, 0x5e71);
            let mut at_ns = now_ns() as f64;
            for _ in 0..load.streams {
                clients.begin(1 + random.below(load.tokens as usize) as u64);
                // Not all at the same time: that would be another load.
                at_ns += FILL_NS / load.streams as f64;
                sleep_until_ns(at_ns as u64).await;
            }
            let per_ns = load.streams as f64 / (load.period_ns as f64 * load.tokens as f64);
            loop {
                at_ns += random.exponential() / per_ns;
                sleep_until_ns(at_ns as u64).await;
                clients.begin(load.tokens);
            }
        })
    }

    fn begin(self: &Rc<Self>, tokens: u64) {
        let clients = self.clone();
        self.running.set(self.running.get() + 1);
        spawn_local(async move {
            let asked = clients.ask(tokens, tokens).await;
            clients.count(asked.map(drop));
            clients.running.set(clients.running.get() - 1);
        });
    }

    /// Counts the outcome of a request.
    pub fn count(&self, asked: Result<()>) {
        let mut seen = self.seen.borrow_mut();
        match asked {
            Ok(()) => seen.answers += 1,
            Err(error) => {
                seen.errors += 1;
                seen.first_error.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }

    /// Requests a stream of `tokens` tokens, and leaves after `wanted` tokens, if that is before the end.
    ///
    /// # Errors
    /// When the answer is not as expected.
    pub async fn ask(&self, tokens: u64, wanted: u64) -> Result<()> {
        let idle = self.idle.borrow_mut().pop();
        let socket = match idle {
            Some(socket) => socket,
            None => self.connect().await?,
        };
        let sent_ns = now_ns();
        write(&socket, &stream_request(tokens)).await?;
        let (mut answers, mut number, mut last_delay_ns) = (Answers::default(), 0, None);
        let mut buffer = [0; READ_BYTES];
        while number < wanted || wanted == tokens {
            let len = self.read(&socket, &mut buffer).await?;
            let read_ns = now_ns();
            answers.push(&buffer[..len]).map_err(|wrong| anyhow!("{wrong:?}"))?;
            let mut in_order = true;
            answers.events(|event| {
                let Some(stamp) = Stamp::read(event) else { return };
                in_order &= stamp.number == number;
                number += 1;
                self.note(&stamp, sent_ns, &mut last_delay_ns, read_ns);
            });
            ensure!(in_order, "a token before number {number} is missing");
            if let Some(rest) = answers.end() {
                ensure!(number == tokens && rest.is_empty(), "{number} of {tokens} tokens arrived");
                self.idle.borrow_mut().push(socket);
                return Ok(());
            }
        }
        Ok(())
    }

    fn note(&self, stamp: &Stamp, sent_ns: u64, last_delay_ns: &mut Option<u64>, read_ns: u64) {
        let delay_ns = read_ns - stamp.written_ns;
        let last_delay_ns = last_delay_ns.replace(delay_ns);
        if !self.is_measuring.get() {
            return;
        }
        let mut seen = self.seen.borrow_mut();
        seen.tokens += 1;
        seen.delay.saturating_record(delay_ns);
        match last_delay_ns {
            None => seen.first.saturating_record((read_ns - sent_ns).saturating_sub(stamp.waited_ns)),
            Some(last_delay_ns) => seen.jitter.saturating_record(delay_ns.abs_diff(last_delay_ns)),
        }
    }

    /// Requests whole answers, `times` times one after another on one connection.
    ///
    /// # Errors
    /// When an answer is not as expected.
    pub async fn ask_again_and_again(&self, times: u64) -> Result<()> {
        let socket = self.connect().await?;
        let (mut answers, mut buffer) = (Answers::default(), [0; READ_BYTES]);
        for answered in 0..times {
            let sent_ns = now_ns();
            write(
                &socket,
                &request(r#"{"model":"large","messages":[{"role":"user","content":"yes?"}],"max_tokens":1}"#),
            )
            .await?;
            loop {
                let len = self.read(&socket, &mut buffer).await.with_context(|| format!("after {answered} answers"))?;
                answers.push(&buffer[..len]).map_err(|wrong| anyhow!("{wrong:?} after {answered} answers"))?;
                if let Some(content) = answers.end() {
                    ensure!(content.ends_with(b"\"total_tokens\":10}}"), "an answer belongs to another request");
                    break;
                }
            }
            let mut seen = self.seen.borrow_mut();
            seen.answers += 1;
            seen.first.saturating_record(now_ns() - sent_ns);
        }
        Ok(())
    }

    async fn connect(&self) -> Result<TcpStream> {
        let socket = timeout(self.patience, TcpStream::connect(self.at)).await.context("no connection in time")??;
        socket.set_nodelay(true)?;
        Ok(socket)
    }

    async fn read(&self, socket: &TcpStream, buffer: &mut [u8]) -> Result<usize> {
        loop {
            match socket.try_read(buffer) {
                Ok(0) => return Err(anyhow!("the connection ended")),
                Ok(len) => return Ok(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    timeout(self.patience, socket.readable()).await.context("nothing arrived in time")??;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn stream_request(tokens: u64) -> Vec<u8> {
    request(&format!(
        r#"{{"model":"large","messages":[{{"role":"user","content":"Say something."}}],"stream":true,"max_tokens":{tokens}}}"#
    ))
}

fn request(content: &str) -> Vec<u8> {
    let length = content.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8100\r\naccept: application/json\r\nuser-agent: OpenAI/Python 1.99.0\r\n\
        authorization: Bearer sk-none\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{content}"
    )
    .into_bytes()
}

async fn write(socket: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match socket.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => socket.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn sleep_until_ns(at_ns: u64) {
    let left_ns = at_ns.saturating_sub(now_ns());
    // The runtime's timer has a resolution of milliseconds; the next call makes up for shorter waits.
    if left_ns >= 500_000 {
        sleep(Duration::from_nanos(left_ns)).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::{LocalSet, yield_now};

    use super::*;

    #[tokio::test]
    async fn a_stream_that_stalls_is_an_error_of_the_measurement() {
        // The kernel accepts connections, and nothing answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let clients = Clients::new(silent.local_addr().unwrap(), Duration::from_millis(1)).unwrap();
        let seen = LocalSet::new()
            .run_until(async {
                clients.measure();
                clients.begin(10);
                while clients.running() > 0 {
                    yield_now().await;
                }
                clients.measured().unwrap()
            })
            .await;
        assert_eq!(
            (seen.answers, seen.errors, seen.first_error.unwrap().as_str()),
            (0, 1, "nothing arrived in time: deadline has elapsed")
        );
    }
}
