//! Applications that send numbered payloads to an echo and notice which come back, and what an event cost them.

use std::{
    net::UdpSocket,
    ops::Range,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::net::{RecvFlags, recv};

use crate::report::Figure;

/// How often an application of [`watch`] sends.
pub const OFTEN: Duration = Duration::from_millis(10);

/// How often a flow looks for what came back.
const LOOK: Duration = Duration::from_millis(5);

/// A flow that is this late was waiting for a CPU. The time beyond it says nothing about the tunnels.
const LATE: Duration = Duration::from_millis(50);

/// How long a flow that has ended waits for payloads on their way.
const LAST: Duration = Duration::from_secs(2);

/// The number of the next flow of this process, so that late payloads of another one on the same socket are told apart.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Applications that send a payload every so often until the flow ends or is dropped.
#[derive(Debug)]
pub struct Flow {
    running: Arc<()>,
    thread: JoinHandle<Echoes>,
}

/// What the applications of a flow sent, and what came back.
#[derive(Debug)]
pub struct Echoes {
    applications: Vec<Application>,
    /// When this thread waited for a CPU.
    stalls: Vec<Range<Instant>>,
    /// When the flow began and when it sent the last payload.
    lasted: Range<Instant>,
}

#[derive(Debug)]
struct Application {
    socket: UdpSocket,
    /// For each payload, by its number: when it was sent, and whether it came back.
    sent: Vec<(Instant, bool)>,
    /// When payloads came back, in order.
    came: Vec<Instant>,
}

impl Flow {
    /// Starts to send from each of these sockets, which are connected to an address that leads to an echo. Nothing else may receive from them
    /// until the flow has ended.
    ///
    /// # Errors
    /// When a socket cannot be duplicated, or a thread not be started.
    pub fn start(sockets: &[UdpSocket], every: Duration) -> Result<Self> {
        let application = |socket: &UdpSocket| -> Result<_> {
            Ok(Application { socket: socket.try_clone()?, sent: Vec::new(), came: Vec::new() })
        };
        let applications = sockets.iter().map(application).collect::<Result<_>>()?;
        let (running, number) = (Arc::new(()), NEXT.fetch_add(1, Relaxed));
        let is_running = Arc::downgrade(&running);
        let thread = thread::Builder::new().spawn(move || run(applications, number, every, &is_running))?;
        Ok(Self { running, thread })
    }

    /// Stops sending, waits up to two seconds for payloads on their way, and returns what came back.
    ///
    /// # Errors
    /// When the flow's thread has panicked.
    pub fn end(self) -> Result<Echoes> {
        drop(self.running);
        self.thread.join().ok().context("the thread of a flow ended early")
    }
}

impl Echoes {
    /// Returns the cost of the event with which this period begins. The gap is the longest time without an echo in any application; it begins
    /// in the period, or counts from the period's start. The losses are the payloads sent in the period that never came back.
    pub fn figure(&self, period: Range<Instant>) -> Figure {
        let (mut gap, mut sent, mut lost) = (Duration::ZERO, 0, 0);
        for of in &self.applications {
            let of_period = of.sent.iter().filter(|(at, _)| period.contains(at));
            let [all, back] = of_period.fold([0, 0], |[all, back], (_, is_back)| [all + 1, back + u64::from(*is_back)]);
            (sent, lost) = (sent + all, lost + all - back);
            let came = of.came.iter().copied().filter(|at| self.lasted.contains(at));
            let times: Vec<_> = [self.lasted.start].into_iter().chain(came).chain([self.lasted.end]).collect();
            let silences = times.windows(2).filter(|pair| pair[0] < period.end && pair[1] > period.start);
            let silence = silences.map(|pair| self.without_stalls(pair[0].max(period.start)..pair[1])).max();
            gap = gap.max(silence.unwrap_or_default());
        }
        Figure { gap, lost_of: Some((lost, sent)) }
    }

    /// How long this took, without the times for which the flow itself waited for a CPU.
    fn without_stalls(&self, silence: Range<Instant>) -> Duration {
        let overlap = |stall: &Range<Instant>| {
            stall.end.min(silence.end).saturating_duration_since(stall.start.max(silence.start))
        };
        let stalled: Duration = self.stalls.iter().map(overlap).sum();
        (silence.end - silence.start).saturating_sub(stalled)
    }
}

/// Sends from these sockets for this time, calls `change` after a fifth of it, and returns what the change cost.
///
/// # Errors
/// As [`Flow::start`] and [`Flow::end`].
pub fn watch(sockets: &[UdpSocket], time: Duration, change: impl FnOnce()) -> Result<Figure> {
    let flow = Flow::start(sockets, OFTEN)?;
    thread::sleep(time / 5);
    let changed = Instant::now();
    change();
    thread::sleep((time - time / 5).saturating_sub(changed.elapsed()));
    let end = Instant::now();
    Ok(flow.end()?.figure(changed..end))
}

/// The work of a flow's thread.
fn run(mut applications: Vec<Application>, number: u64, every: Duration, running: &Weak<()>) -> Echoes {
    let begun = Instant::now();
    let (mut next, mut stalls) = (begun, Vec::new());
    while running.strong_count() > 0 {
        let looked = Instant::now();
        if looked >= next {
            applications.iter_mut().for_each(|of| of.send(number));
            next = looked + every;
        }
        thread::sleep(LOOK);
        applications.iter_mut().for_each(|of| of.receive(number));
        let late = looked + LATE..Instant::now();
        if late.start < late.end {
            stalls.push(late);
        }
    }
    let lasted = begun..Instant::now();
    let misses = |of: &Application| of.sent.iter().any(|(_, is_back)| !is_back);
    while lasted.end.elapsed() < LAST && applications.iter().any(misses) {
        thread::sleep(LOOK);
        applications.iter_mut().for_each(|of| of.receive(number));
    }
    Echoes { applications, stalls, lasted }
}

impl Application {
    fn send(&mut self, flow: u64) {
        let payload = [flow.to_be_bytes(), (self.sent.len() as u64).to_be_bytes()].concat();
        // A payload that the forward does not take is lost, too.
        _ = self.socket.send(&payload);
        self.sent.push((Instant::now(), false));
    }

    /// Receives all that has arrived.
    fn receive(&mut self, flow: u64) {
        let mut payload = [0; 64];
        // An error, such as a closed port, says that nothing is there.
        while let Ok((_, len)) = recv(&self.socket, &mut payload, RecvFlags::DONTWAIT) {
            let Some(number) = payload[..len.min(64)].strip_prefix(&flow.to_be_bytes()) else { continue };
            let number = number.try_into().map(u64::from_be_bytes).ok().and_then(|it| usize::try_from(it).ok());
            let Some((_, is_back)) = number.and_then(|number| self.sent.get_mut(number)) else { continue };
            // The network may deliver a payload twice.
            if !std::mem::replace(is_back, true) {
                self.came.push(Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// An application that sends at these times in milliseconds, with the time at which each payload comes back.
    fn application(begun: Instant, sent: &[(u64, Option<u64>)]) -> Application {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let came = sent.iter().filter_map(|(_, came)| Some(begun + ms((*came)?))).collect();
        let sent = sent.iter().map(|(at, came)| (begun + ms(*at), came.is_some())).collect();
        Application { socket, sent, came }
    }

    #[test]
    fn a_gap_and_losses_count_in_the_period_of_their_event() {
        let begun = Instant::now();
        let at = |time: u64| begun + ms(time);
        let calm = [(0, Some(1)), (100, Some(101)), (200, Some(201)), (300, Some(301)), (400, Some(401))];
        let broken = [(0, Some(1)), (100, Some(101)), (200, None), (300, None), (400, Some(450))];
        let applications = [&calm, &broken].map(|sent| application(begun, sent)).into();
        let mut echoes = Echoes { applications, stalls: Vec::new(), lasted: begun..at(500) };
        assert_eq!(echoes.figure(begun..at(150)), Figure { gap: ms(349), lost_of: Some((0, 4)) });
        assert_eq!(echoes.figure(at(150)..at(350)), Figure { gap: ms(300), lost_of: Some((2, 4)) });
        assert_eq!(echoes.figure(at(460)..at(500)), Figure { gap: ms(40), lost_of: Some((0, 0)) });
        echoes.stalls = vec![at(120)..at(200), at(440)..at(460)];
        assert_eq!(echoes.figure(at(150)..at(350)).gap, ms(240), "without the time for which the flow stalled");
    }

    #[test]
    fn payloads_that_an_echo_returns_are_not_lost_and_others_are() {
        let echo = UdpSocket::bind("127.0.0.1:0").unwrap();
        echo.set_read_timeout(Some(ms(20))).unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(echo.local_addr().unwrap()).unwrap();
        let begun = Instant::now();
        let flow = Flow::start(&[socket], ms(1)).unwrap();
        let mut received = [0; 64];
        for number in 0..20 {
            // The wait ends with each signal for this process.
            let (len, from) = std::iter::repeat_with(|| echo.recv_from(&mut received)).find_map(Result::ok).unwrap();
            if number % 2 == 0 {
                echo.send_to(&received[..len], from).unwrap();
                echo.send_to(&received[..len], from).unwrap();
            }
        }
        let end = Instant::now();
        let figure = flow.end().unwrap().figure(begun..end);
        let (lost, sent) = figure.lost_of.unwrap();
        assert_eq!(sent - lost, 10, "half of the first twenty came back, each twice");
    }
}
