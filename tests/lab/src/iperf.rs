//! Runs of iperf3 through forwards, and what an event cost them.

use std::{
    ops::Range,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{
    process::{KilledOnDrop, Process, send_signal},
    report::Figure,
    site::{SOON, Site},
};

/// What iperf3 calls the end by [`Load::stop`].
const STOPPED: &str = "interrupt - the client has terminated";

/// A run of iperf3, whose server sends from the target to the client.
pub struct Load {
    client: KilledOnDrop,
    begun: Instant,
    _server: Process,
}

/// What a client received.
#[derive(Debug)]
pub struct Received {
    intervals: Vec<Interval>,
}

/// What a client received in an interval of 0.1 s.
#[derive(Debug)]
struct Interval {
    time: Range<Instant>,
    bytes: u64,
    packets: u64,
    lost: u64,
}

impl Load {
    /// Sends packets or writes of 1,000 bytes at this rate (such as `500k`, in bit/s) through the forwards of a port of the client's 127.0.0.1,
    /// which lead to the same port of the target. `options` go to the client; `-u` is for UDP.
    ///
    /// # Errors
    /// When iperf3 is missing, or the client does not reach the server.
    pub fn start(site: &Site, port: u16, rate: &str, seconds: u32, options: &[&str]) -> Result<Self> {
        let port = port.to_string();
        let server = site.chain.target.start("iperf3", ["-s", "-p", &port, "--forceflush"])?;
        server.wait_for_line("Server listening", SOON)?;
        let mut client = site.chain.client.command("iperf3")?;
        client.args(["-c", "127.0.0.1", "-p", &port, "-R", "-J", "-i", "0.1", "-b", rate, "-l", "1000"]);
        client.args(["-t", &seconds.to_string()]).args(options);
        let client = KilledOnDrop::start(client.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
        server.wait_for_line("Accepted connection", SOON)?;
        Ok(Self { client, begun: Instant::now(), _server: server })
    }

    /// Ends the run before its time, and returns what the client received.
    ///
    /// # Errors
    /// As [`Load::end`].
    pub fn stop(self) -> Result<Received> {
        send_signal(self.client.id(), libc::SIGINT)?;
        self.received(true)
    }

    /// Waits for the end of the run, and returns what the client received.
    ///
    /// # Errors
    /// When the run ended with an error.
    pub fn end(self) -> Result<Received> {
        self.received(false)
    }

    fn received(self, may_be_stopped: bool) -> Result<Received> {
        let output = self.client.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let answer: Value = serde_json::from_str(&said).with_context(|| format!("iperf3 said {said}"))?;
        let is_whole = output.status.success() && answer["error"].is_null();
        let is_stopped = may_be_stopped && answer["error"] == STOPPED;
        ensure!(is_whole || is_stopped, "iperf3: {}: {}", output.status, answer["error"]);
        let time = |seconds: &Value| -> Result<_> {
            let seconds = seconds.as_f64().context("an interval without times")?;
            Ok(self.begun + Duration::try_from_secs_f64(seconds)?)
        };
        let interval = |it: &Value| -> Result<_> {
            let (sum, count) = (&it["sum"], |key: &str| it["sum"][key].as_u64().unwrap_or(0));
            let time = time(&sum["start"])?..time(&sum["end"])?;
            Ok(Interval { time, bytes: count("bytes"), packets: count("packets"), lost: count("lost_packets") })
        };
        let intervals = answer["intervals"].as_array().context("no intervals")?;
        Ok(Received { intervals: intervals.iter().map(interval).collect::<Result<_>>()? })
    }
}

impl Received {
    /// Returns the cost of the event with which this period begins; `None` if the run had ended by then. The gap is the longest time without a
    /// byte that begins in the period, in steps of 0.1 s: a shorter gap shows only as lost packets.
    pub fn figure(&self, period: Range<Instant>) -> Option<Figure> {
        let (mut longest, mut begun, mut packets, mut lost) = (Duration::ZERO, None, 0, 0);
        let mut is_empty = true;
        for interval in &self.intervals {
            if period.contains(&interval.time.start) {
                is_empty = false;
                (packets, lost) = (packets + interval.packets, lost + interval.lost);
            }
            if interval.bytes > 0 {
                begun = None;
                continue;
            }
            let begun = *begun.get_or_insert(interval.time.start);
            if period.contains(&begun) {
                longest = longest.max(interval.time.end - begun);
            }
        }
        (!is_empty).then_some(Figure { gap: longest, lost_of: (packets > 0).then_some((lost, packets)) })
    }

    /// Returns how many bytes arrived in the run, and in the last fifth of it.
    pub fn bytes(&self) -> [u64; 2] {
        let of = |intervals: &[Interval]| intervals.iter().map(|it| it.bytes).sum();
        [of(&self.intervals), of(&self.intervals[self.intervals.len() * 4 / 5..])]
    }
}
