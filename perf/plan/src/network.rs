//! Links, and what decides how much is in flight on them.

use std::fmt;

use serde::Deserialize;

/// An IP version.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// IPv4.
    #[default]
    V4,
    /// IPv6.
    V6,
}

/// A congestion controller.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// RFC 9438.
    #[default]
    Cubic,
    /// BBRv2.
    Bbr,
    /// None: sends at this rate, in Mbit/s of Ethernet frames, whatever happens. `stock` then sends bursts of ten packets, as
    /// s2n-quic's pacer would.
    FixedMbit(f64),
}

/// A link.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Its rate in each direction, in Mbit/s of Ethernet frames.
    pub rate_mbit: f64,
    /// The share of packets that it loses in each direction, each packet independently.
    pub loss: f64,
    /// How long a packet travels, in each direction.
    pub delay_ms: f64,
    /// The share that it loses from server to client, if different.
    pub return_loss: Option<f64>,
    /// How much longer a packet travels from server to client. The queue does not count packets on this part of the path, so
    /// that a whole round trip can be outside a queue of a few packets.
    #[serde(default)]
    pub return_delay_ms: f64,
    /// How many packets the link holds in each direction, including packets in flight, as `netem` counts. Packets that arrive when it
    /// is full are dropped.
    pub queue_packets: usize,
    /// In the simulated network, how long a packet may wait in the queue, in milliseconds, as `tbf` bounds it: a packet that
    /// would wait longer is dropped, whatever the number of packets.
    pub queue_ms: Option<f64>,
}

impl Network {
    /// Returns the link from server to client as a link of its own.
    #[must_use]
    pub fn back(&self) -> Self {
        Self {
            loss: self.return_loss.unwrap_or(self.loss),
            return_loss: None,
            delay_ms: self.delay_ms + self.return_delay_ms,
            return_delay_ms: 0.0,
            ..*self
        }
    }
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cubic => f.write_str("cubic"),
            Self::Bbr => f.write_str("bbr"),
            Self::FixedMbit(mbit) => write!(f, "fixed, {mbit} Mbit/s"),
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rate_mbit, loss, return_loss, delay_ms, return_delay_ms, queue_packets, queue_ms } = self;
        let loss_pct = loss * 100.0;
        write!(f, "{rate_mbit} Mbit/s, {loss_pct} % loss, {delay_ms} ms, ")?;
        match queue_ms {
            Some(queue_ms) => write!(f, "a queue of {queue_ms} ms, each way")?,
            None => write!(f, "{queue_packets} packets, each way")?,
        }
        if let Some(loss) = return_loss {
            write!(f, "; {} % loss on the way back", loss * 100.0)?;
        }
        if *return_delay_ms > 0.0 { write!(f, "; {return_delay_ms} ms more on the way back") } else { Ok(()) }
    }
}
