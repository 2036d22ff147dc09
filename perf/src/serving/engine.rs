//! An engine that costs next to nothing: its tokens are due at times that were fixed in advance, and are written then.
//!
//! It shares a thread with the client. Streams are spread over the period of a token in groups; all streams of a group
//! get their tokens at once, as the requests of one step of an engine do.

use std::{
    cell::{Cell, RefCell},
    cmp::Reverse,
    collections::BinaryHeap,
    io,
    net::SocketAddr,
    rc::Rc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use instruments::{pace::Ticks, payload::now_ns};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::{JoinHandle, spawn_local},
};

use super::wire::{HEAD, Stamp, end, head};

/// How often the engine checks for due tokens.
const TICK: Duration = Duration::from_micros(250);

/// A whole answer of an engine, with its head.
const WHOLE: &str = concat!(
    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 272\r\n\r\n",
    r#"{"id":"chatcmpl-3b1c60e82f0a4f9d8d0c6c4de2a1","object":"chat.completion","created":1767225600,"model":"large","#,
    r#""choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}],"#,
    r#""usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}"#
);

/// The timing of tokens.
#[derive(Clone, Copy, Debug)]
pub struct Rhythm {
    /// The time between two tokens of a stream.
    pub period_ns: u64,
    /// The number of points in a period over which streams are spread.
    pub groups: u64,
}

/// An engine that runs until it is dropped.
pub struct Engine {
    state: Rc<State>,
    address: SocketAddr,
    tasks: [JoinHandle<io::Result<()>>; 2],
}

struct State {
    rhythm: Rhythm,
    due: RefCell<BinaryHeap<Reverse<Due>>>,
    /// The number of streams so far, which determines their groups.
    begun: Cell<u64>,
    running: Cell<u64>,
    cancelled: Cell<u64>,
    tokens: Cell<u64>,
    /// How often a client had not yet taken the bytes written before.
    stalls: Cell<u64>,
}

/// A stream, in the order of its next token.
struct Due {
    at_ns: u64,
    stream: Rc<Stream>,
}

/// An answer that is a stream of tokens.
struct Stream {
    socket: Rc<TcpStream>,
    asked_ns: u64,
    /// Tokens that are still to come, and tokens that have been made.
    left: Cell<u64>,
    made: Cell<u64>,
    /// The bytes that the socket did not accept.
    unsent: RefCell<Vec<u8>>,
    is_gone: Cell<bool>,
    over: Notify,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.at_ns == other.at_ns
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at_ns.cmp(&other.at_ns)
    }
}

impl Engine {
    /// Starts an engine on a free port of loopback, on this thread.
    ///
    /// # Errors
    /// When the kernel provides no port or no timer.
    pub async fn start(rhythm: Rhythm) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("no port for the engine")?;
        let address = listener.local_addr()?;
        let state = Rc::new(State {
            rhythm,
            due: RefCell::default(),
            begun: Cell::new(0),
            running: Cell::new(0),
            cancelled: Cell::new(0),
            tokens: Cell::new(0),
            stalls: Cell::new(0),
        });
        let tasks =
            [spawn_local(accept(listener, state.clone())), spawn_local(step(state.clone(), Ticks::start(TICK)?))];
        Ok(Self { state, address, tasks })
    }

    /// Returns the address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns how many requests it is working on.
    #[must_use]
    pub fn running(&self) -> u64 {
        self.state.running.get()
    }

    /// Returns how many requests their clients gave up.
    #[must_use]
    pub fn cancelled(&self) -> u64 {
        self.state.cancelled.get()
    }

    /// Returns how many tokens it has written.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.state.tokens.get()
    }

    /// Returns how often a client had not yet taken the bytes written before.
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.state.stalls.get()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn accept(listener: TcpListener, state: Rc<State>) -> io::Result<()> {
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let state = state.clone();
        // An error means that the client left.
        spawn_local(async move { serve(Rc::new(socket), &state).await });
    }
}

/// Answers one request after another, until the client leaves.
async fn serve(socket: Rc<TcpStream>, state: &State) -> io::Result<()> {
    let mut input = Vec::new();
    loop {
        let Some(request) = read(&socket, &mut input).await? else { return Ok(()) };
        let asked_ns = now_ns();
        if super::wire::position(&request, b"\"stream\":true").is_none() {
            write(&socket, WHOLE.as_bytes()).await?;
            continue;
        }
        write(&socket, HEAD).await?;
        let left = number(&request, b"\"max_tokens\":").unwrap_or(16);
        let stream = Rc::new(Stream {
            socket: socket.clone(),
            asked_ns,
            left: Cell::new(left),
            made: Cell::new(0),
            unsent: RefCell::default(),
            is_gone: Cell::new(false),
            over: Notify::new(),
        });
        let at_ns = state.next_ns(asked_ns);
        state.running.set(state.running.get() + 1);
        state.due.borrow_mut().push(Reverse(Due { at_ns, stream: stream.clone() }));
        tokio::select! {
            () = stream.over.notified() => {}
            () = gone(&socket) => stream.is_gone.set(true),
        }
        state.running.set(state.running.get() - 1);
        if stream.is_gone.get() {
            state.cancelled.set(state.cancelled.get() + 1);
            return Ok(());
        }
    }
}

/// Reads a request with its content. Returns `None` if the client left.
async fn read(socket: &TcpStream, input: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    loop {
        if let Some((end, length)) = head(input)
            && input.len() >= end + length.unwrap_or(0)
        {
            return Ok(Some(input.drain(..end + length.unwrap_or(0)).collect()));
        }
        socket.readable().await?;
        match socket.try_read_buf(input) {
            Ok(0) => return Ok(None),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
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

/// Waits until the client leaves; a client sends nothing while it is being answered.
async fn gone(socket: &TcpStream) {
    loop {
        let readable = socket.readable().await;
        match readable.and_then(|()| socket.try_read(&mut [0])) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}

/// Returns the number after a JSON key.
fn number(text: &[u8], key: &[u8]) -> Option<u64> {
    let from = super::wire::position(text, key)? + key.len();
    let digits: Vec<u8> = text[from..].iter().copied().take_while(u8::is_ascii_digit).collect();
    std::str::from_utf8(&digits).ok()?.parse().ok()
}

impl State {
    /// Returns when a stream requested now gets its first token: at the next due time of its group.
    fn next_ns(&self, now_ns: u64) -> u64 {
        let Rhythm { period_ns, groups } = self.rhythm;
        let group = self.begun.replace(self.begun.get() + 1) % groups.max(1);
        let phase_ns = period_ns / groups.max(1) * group;
        let periods = now_ns.saturating_sub(phase_ns).div_ceil(period_ns);
        periods * period_ns + phase_ns
    }
}

/// Writes due tokens, tick by tick.
async fn step(state: Rc<State>, ticks: Ticks) -> io::Result<()> {
    loop {
        ticks.wait().await?;
        // Tokens that become due meanwhile wait for the next tick, so that clients get their turn.
        let now_ns = now_ns();
        let due = || {
            let mut due = state.due.borrow_mut();
            due.peek().is_some_and(|Reverse(first)| first.at_ns <= now_ns).then(|| due.pop()).flatten()
        };
        while let Some(Reverse(Due { at_ns, stream })) = due() {
            if stream.is_gone.get() {
                continue;
            }
            if stream.token(&state).is_err() {
                stream.is_gone.set(true);
                stream.over.notify_one();
            } else if stream.left.get() == 0 && stream.unsent.borrow().is_empty() {
                stream.over.notify_one();
            } else {
                state.due.borrow_mut().push(Reverse(Due { at_ns: at_ns + state.rhythm.period_ns, stream }));
            }
        }
    }
}

impl Stream {
    /// Writes the next token, and the bytes that did not fit before.
    fn token(&self, state: &State) -> io::Result<()> {
        let mut unsent = self.unsent.borrow_mut();
        if !unsent.is_empty() {
            state.stalls.set(state.stalls.get() + 1);
        }
        let written_ns = now_ns();
        if self.left.get() > 0 {
            let (number, waited_ns) = (self.made.get(), written_ns - self.asked_ns);
            let event = Stamp { number, written_ns, waited_ns }.event();
            unsent.extend_from_slice(&event);
            self.left.set(self.left.get() - 1);
            self.made.set(number + 1);
            state.tokens.set(state.tokens.get() + 1);
            if self.left.get() == 0 {
                unsent.extend_from_slice(&end());
            }
        }
        match self.socket.try_write(&unsent) {
            Ok(written) => _ = unsent.drain(..written),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_whole_answer_is_what_its_head_says() {
        let (end, length) = head(WHOLE.as_bytes()).unwrap();
        assert_eq!(Some(WHOLE.len() - end), length);
        let content: serde_json::Value = serde_json::from_str(&WHOLE[end..]).unwrap();
        assert_eq!(content["usage"]["completion_tokens"], 1);
    }

    #[test]
    fn numbers_are_found_behind_their_keys() {
        assert_eq!(number(br#"{"max_tokens":12,"x":1}"#, b"\"max_tokens\":"), Some(12));
        assert_eq!(number(br#"{"max_tokens":"x"}"#, b"\"max_tokens\":"), None);
    }
}
