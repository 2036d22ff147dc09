//! The pump of one UDP tunnel: payloads from the client to the target and back, until either side ends.

use std::{
    future::{poll_fn, ready},
    mem::replace,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::{
    FutureExt as _,
    task::{waker, waker_ref},
};
use masque::h3::Code;
use quic::{
    h3::{self, Request},
    segments::Segments,
    stirred::Stirred,
};
use role::{
    gate::{Gate, TransferCost},
    traffic::Traffic,
    tunnel::{TunnelEnd, UdpTunnel},
};
use tokio::time::{Instant, Sleep};

use super::{
    RelayMetrics,
    request::{mark, mark_anew},
};
use crate::udp_target::{Flush, TargetError, UdpTarget, UplinkCounters};

/// How many batches one tunnel moves in either direction before other tunnels get a turn.
const ROUNDS: usize = 8;

/// How many messages one tunnel sends to its target before other tunnels get a turn. A full batch of equal payloads takes some fifty at
/// most. Only payloads that cannot share a message need more, and empty ones may come by the ten thousand.
const SENDS: usize = 256;

/// The room for a chunk beyond its last payload, which may be as large as a queue: the bound must not drop the first.
const CHUNK_ROOM_BYTES: usize = 8 * 1024;

/// How long the client of a tunnel that has ended properly may take to receive the capsules that wait for it.
const FAREWELL: Duration = Duration::from_secs(10);

/// Why a tunnel ended.
#[derive(Debug, thiserror::Error)]
pub enum UdpEnd {
    /// The client finished its side.
    #[error("the client closed the tunnel")]
    Finished,
    /// Nothing moved for the configured time.
    #[error("the tunnel was idle")]
    Idle,
    /// The client's side failed.
    #[error(transparent)]
    Client(#[from] TunnelEnd),
    /// The target's side failed.
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl UdpEnd {
    fn label(&self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Idle => "idle",
            Self::Client(end) if end.is_violation() => "violation",
            Self::Client(_) => "client",
            Self::Target(TargetError::Refused) => "target_refused",
            Self::Target(TargetError::Unreachable) => "target_unreachable",
            Self::Target(TargetError::Socket(_)) => "target_failed",
        }
    }
}

/// A UDP tunnel and its target.
pub struct UdpPump {
    tunnel: UdpTunnel,
    target: UdpTarget,
    gate: Gate,
    uplink: Segments,
    /// The part of the uplink that is sent next, if the user or the class has a rate.
    chunk: Segments,
    /// The connection to ask for the client's settings while they are missing: they may arrive after its first request.
    unsettled: Option<Box<h3::Client>>,
    idle: Duration,
    last_moved: Instant,
    idle_timer: Pin<Box<Sleep>>,
    /// Wakes for the idle timer, so that it need not be polled for each payload.
    timer_stirred: Arc<Stirred>,
    /// Wakes when the target's socket is readable.
    target_stirred: Arc<Stirred>,
    /// Whether the socket may have more to read.
    target_due: bool,
    traffic: Arc<Traffic>,
    metrics: Arc<RelayMetrics>,
}

impl UdpPump {
    /// Joins an accepted request of `client` for a tunnel to the target's socket, through the gate of its class. `queue_bytes`
    /// bounds the queue to either side; moved payloads are counted in `traffic`.
    #[must_use]
    pub fn new(
        (request, client): (Request, h3::Client),
        target: UdpTarget,
        gate: Gate,
        traffic: Arc<Traffic>,
        queue_bytes: usize,
        idle: Duration,
        metrics: Arc<RelayMetrics>,
    ) -> Self {
        let (uplink, chunk) = (Segments::new(queue_bytes), Segments::new(queue_bytes + CHUNK_ROOM_BYTES));
        let target_stirred = Arc::<Stirred>::default();
        target.receive(|| waker(target_stirred.clone()));
        let (last_moved, idle_timer) = (Instant::now(), Box::pin(tokio::time::sleep(idle)));
        // Asked first, so that the first turn applies settings that arrive only now.
        let is_settled = client.settings().is_some();
        let tunnel = UdpTunnel::new(request, client.datagrams_allowed(), queue_bytes);
        tunnel.follow_peer();
        // In a box, because most clients' settings arrive before their first request.
        let unsettled = (!is_settled).then(|| Box::new(client));
        Self {
            tunnel,
            target,
            gate,
            uplink,
            chunk,
            unsettled,
            idle,
            last_moved,
            idle_timer,
            timer_stirred: Arc::default(),
            target_stirred,
            target_due: true,
            traffic,
            metrics,
        }
    }

    /// Relays until either side ends; returns a word for the reason.
    ///
    /// Not an `async fn`, whose state has room for its argument as well as for its later form: each idle tunnel would take
    /// twice the memory.
    pub fn run(self) -> impl Future<Output = &'static str> + Send + 'static {
        let mut running = Running(Stage::Moves(self));
        poll_fn(move |cx| running.poll(cx))
    }

    /// Ends both sides for a reason. Returns what completes, with a word for the reason, when the last capsules have left.
    fn end(self, end: &UdpEnd) -> Leaving {
        tracing::debug!(reason = %end, "tunnel ended");
        self.note_unread();
        let label = end.label();
        let code = match end {
            UdpEnd::Finished | UdpEnd::Idle => {
                let finishing = self.tunnel.finish_within(FAREWELL);
                return Box::pin(finishing.map(move |()| label));
            }
            UdpEnd::Client(error) => error.code(),
            // RFC 9298 §3.1: an unreachable target ends the stream.
            UdpEnd::Target(_) => Code::ConnectError,
        };
        self.tunnel.reset(code);
        Box::pin(ready(label))
    }

    /// Counts the payloads that will not reach the target.
    fn note_unread(&self) {
        self.tunnel.losses().note_unread(self.uplink.len() + self.chunk.len());
    }

    /// Moves payloads as far as possible; ready when the tunnel has ended.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<UdpEnd> {
        if let Some(client) = self.unsettled.take_if(|client| client.settings().is_some()) {
            self.tunnel.set_datagrams_usable(client.datagrams_allowed());
        }
        match self.gate.follow() {
            _ if self.target.must_mark() => mark_anew(&self.target.socket(), self.gate.class(), &self.metrics),
            Some((before, class)) if self.target.receives() => {
                mark(&self.target.socket(), Some(&before), class, &self.metrics);
            }
            _ => {}
        }
        match self.try_poll(cx) {
            Ok(poll) => poll,
            Err(end) => Poll::Ready(end),
        }
    }

    fn try_poll(&mut self, cx: &mut Context<'_>) -> Result<Poll<UdpEnd>, UdpEnd> {
        let mut more = false;
        let up = self.poll_up(cx, &mut more)?;
        let moved = self.poll_down(cx, &mut more)? | up.moved;
        if up.finished {
            return Ok(Poll::Ready(UdpEnd::Finished));
        }
        self.tunnel.poll_stopped(cx)?;
        if moved {
            self.last_moved = Instant::now();
        }
        if more {
            cx.waker().wake_by_ref();
            return Ok(Poll::Pending);
        }
        if !self.timer_stirred.take(cx.waker()) {
            return Ok(Poll::Pending);
        }
        // The timer is not reset for every packet; when it fires, it is set to the deadline that the last packet gave.
        let waker = waker_ref(&self.timer_stirred);
        while self.idle_timer.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            if self.gate.is_waiting() || self.tunnel.is_delayed() {
                // Payloads that a rate holds back do not move, but the tunnel is not silent.
                self.last_moved = Instant::now();
            }
            let deadline = self.last_moved + self.idle;
            if deadline <= Instant::now() {
                return Ok(Poll::Ready(UdpEnd::Idle));
            }
            self.idle_timer.as_mut().reset(deadline);
        }
        Ok(Poll::Pending)
    }

    /// Moves payloads from client to target.
    fn poll_up(&mut self, cx: &mut Context<'_>, more: &mut bool) -> Result<Up, UdpEnd> {
        let mut counters = UplinkCounters::default();
        let mut up = Up::default();
        let (mut rounds, mut sends) = (0, SENDS);
        let outcome = loop {
            if self.uplink.is_empty() && self.chunk.is_empty() {
                match self.tunnel.poll_recv(cx, &mut self.uplink) {
                    Poll::Pending => break Ok(()),
                    Poll::Ready(Err(error)) => break Err(error.into()),
                    Poll::Ready(Ok(false)) => {
                        up.finished = true;
                        break Ok(());
                    }
                    Poll::Ready(Ok(true)) => {}
                }
            }
            let Self { uplink, chunk, .. } = self;
            let leaving = match self.gate.turn() {
                // A reserved chunk is sent as it is.
                _ if !chunk.is_empty() => chunk,
                None => uplink,
                Some(turn) => {
                    while let Some(payload) = uplink.front()
                        && chunk.bytes() < turn.bytes
                        && chunk.len() < turn.payloads
                    {
                        chunk.push(payload);
                        uplink.pop();
                    }
                    chunk
                }
            };
            let load = TransferCost { bytes: leaving.bytes() as u64, packets: leaving.len() as u64 };
            if self.gate.poll(cx, load).is_pending() {
                break Ok(());
            }
            match self.target.flush(leaving, &mut sends, &mut counters) {
                Err(error) => break Err(error.into()),
                Ok(Flush::Done) => self.gate.passed(),
                Ok(Flush::Paused) => {
                    *more = true;
                    break Ok(());
                }
                // The socket is full: retry at once if it has room again, otherwise when it wakes us.
                Ok(Flush::Blocked) => match self.target.poll_writable(cx) {
                    Poll::Pending => break Ok(()),
                    Poll::Ready(Err(error)) => break Err(error.into()),
                    Poll::Ready(Ok(())) => {}
                },
            }
            rounds += 1;
            if rounds == ROUNDS {
                *more = true;
                break Ok(());
            }
        };
        up.moved = counters.sent > 0;
        if up.moved {
            if !self.target.receives() {
                // The client uses this tunnel rather than a later one.
                self.target.receive(|| waker(self.target_stirred.clone()));
                self.target_due = true;
            }
            self.traffic.add_up(counters.sent_bytes, counters.sent);
        }
        if counters.dropped_too_big + counters.dropped_by_host > 0 {
            self.traffic.add_unsent(counters.dropped_too_big, counters.dropped_by_host);
        }
        self.metrics.add_uplink(&counters);
        outcome.map(|()| up)
    }

    /// Moves payloads from target to client; returns whether any moved.
    fn poll_down(&mut self, cx: &mut Context<'_>, more: &mut bool) -> Result<bool, UdpEnd> {
        self.target_due |= self.target_stirred.take(cx.waker());
        if !self.target_due || !self.target.receives() {
            return Ok(false);
        }
        let (mut packets, mut bytes) = (0, 0);
        let Self { tunnel, target, gate, target_stirred, target_due, .. } = self;
        let waker = waker_ref(target_stirred);
        let outcome = loop {
            // Created with the first payload: most polls find none.
            let (mut unused, mut batch) = (Some(&mut *tunnel), None);
            let mut deliver = |payload: &[u8]| {
                let begin = || unused.take().map(|tunnel| tunnel.batch(None));
                if let Some(batch) = batch.get_or_insert_with(begin) {
                    batch.push(payload);
                }
            };
            match target.poll_recv(&mut Context::from_waker(&waker), &mut deliver) {
                Poll::Pending => {
                    *target_due = false;
                    break Ok(());
                }
                Poll::Ready(Err(error)) => break Err(error.into()),
                Poll::Ready(Ok(received)) => {
                    packets += received.payloads as u64;
                    bytes += received.bytes as u64;
                    gate.received(received.bytes);
                    if received.more {
                        *more = true;
                        break Ok(());
                    }
                }
            }
        };
        if packets > 0 {
            self.traffic.add_down(bytes, packets);
        }
        self.metrics.add_downlink(packets, bytes);
        outcome.map(|()| packets > 0)
    }
}

/// What remains of a tunnel that has ended.
type Leaving = Pin<Box<dyn Future<Output = &'static str> + Send>>;

/// What a pump does.
#[expect(clippy::large_enum_variant, reason = "a pump is in this state for all its life but the last seconds")]
enum Stage {
    Moves(UdpPump),
    Leaves(Leaving),
    Over,
}

/// A running pump. If it is dropped while it moves payloads, it counts the payloads that still wait as lost.
struct Running(Stage);

impl Running {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<&'static str> {
        loop {
            let end = match &mut self.0 {
                Stage::Moves(pump) => ready!(pump.poll(cx)),
                Stage::Leaves(leaving) => return leaving.as_mut().poll(cx),
                Stage::Over => return Poll::Pending,
            };
            if let Stage::Moves(pump) = replace(&mut self.0, Stage::Over) {
                self.0 = Stage::Leaves(pump.end(&end));
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Stage::Moves(pump) = &self.0 {
            pump.note_unread();
        }
    }
}

#[derive(Default)]
struct Up {
    moved: bool,
    finished: bool,
}
