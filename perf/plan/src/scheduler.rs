//! The schedulers that experiments compare.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use quic::dispatch::Binding;
use sched::stream::{Discipline, Expiry, Low};
use serde::{Deserialize, Serialize};

/// A discipline, or an alternative to compare it with.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Scheduler {
    /// The order of s2n-quic itself: it gets all bytes at once, and serves streams in turns of one packet.
    Plain,
    /// Round robin.
    Rr,
    /// First come, first served.
    Fcfs,
    /// Earliest deadline first; streams that miss their deadlines are discarded.
    EdfHard,
    /// Earliest deadline first; streams that miss their deadlines are still served.
    EdfSoft,
    /// Absolute priority; first come, first served among equals.
    Abs,
    /// Two levels: the high one by deadline, the low one by round robin.
    MlRr,
    /// Two levels: the high one by deadline, the low one first come, first served.
    MlFcfs,
    /// Two levels: both by deadline.
    MlEdf,
    /// Two levels: the high one by deadline, the low one by weight.
    MlWfq,
    /// Shares by weight.
    Wfq,
    /// Shares by weight, drawn by lottery.
    Lottery,
    /// The product's default, over s2n-quic's own IO provider.
    Stock,
    /// The product's default, over paced's own IO provider, which gives every packet a departure time that `fq` enforces.
    Paced,
    /// As `stock`, but all packets that the congestion window allows leave at once.
    Unpaced,
    /// As `paced` without `fq`: the process holds each packet until its departure time, and never sleeps meanwhile.
    ActiveWait,
    /// As `paced` without `fq`: the process holds packets until their departure times, and wakes once for all packets of a
    /// millisecond.
    PassiveWait,
    /// The product's default, with one worker.
    #[serde(rename = "workers-1")]
    #[value(name = "workers-1")]
    Workers1,
    /// The product's default, with two workers.
    #[serde(rename = "workers-2")]
    #[value(name = "workers-2")]
    Workers2,
    /// The product's default, with four workers.
    #[serde(rename = "workers-4")]
    #[value(name = "workers-4")]
    Workers4,
    /// The product's default, guarded by XDP, without an attack.
    Calm,
    /// The product's default, guarded by XDP, under a flood.
    Guarded,
    /// The product's default, without a guard, under the same flood.
    Unguarded,
    /// No proxy: connections from the client to the server.
    NoProxy,
    /// Connections in tunnels that carry payloads in QUIC datagrams.
    Datagram,
    /// As `datagram`, but the relay serves tunnels first come, first served.
    DatagramFcfs,
    /// As `datagram`, but each tunnel's share at the relay is proportional to its inner round trip, as estimated from its first answer.
    DatagramByRtt,
    /// Connections in tunnels that carry payloads in capsules; the relay serves their streams in the product's default order.
    Stream,
    /// As `stream`, but the relay serves the streams first come, first served.
    StreamFcfs,
    /// Connections in tunnels whose form the edge chooses from its measurements of the path.
    Auto,
    /// Unmodified quic-go, which serves streams in turns.
    QuicGo,
    /// Unmodified quic-go, instructed to serve streams in the order in which they were opened.
    QuicGoFcfs,
    /// Unmodified quic-go, instructed to serve streams by the priority of their classes; equals in the order of opening.
    QuicGoAbs,
    /// Unmodified quic-go, instructed to serve streams in two levels: the high one in the order of opening, which is by deadline
    /// if all its streams have the same; the low one in turns.
    QuicGoMlRr,
    /// TLS over TCP, one connection for each request.
    TlsN,
    /// TLS over TCP, one connection for all requests.
    #[serde(rename = "tls-1")]
    #[value(name = "tls-1")]
    Tls1,
    /// A gateway for models by HTTP/3: one QUIC connection for all requests, on which the gateway orders answers by class and
    /// deadline.
    Http3,
    /// The same, but the gateway serves answers in turns, whatever their class.
    Http3Rr,
    /// A gateway for models by HTTP/2: one connection with TLS over TCP for all requests.
    Http2,
    /// A gateway for models by HTTP/1.1: a connection with TLS over TCP for each request.
    Http1,
}

impl Scheduler {
    /// Its name in plans and results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Rr => "rr",
            Self::Fcfs => "fcfs",
            Self::EdfHard => "edf-hard",
            Self::EdfSoft => "edf-soft",
            Self::Abs => "abs",
            Self::MlRr => "ml-rr",
            Self::MlFcfs => "ml-fcfs",
            Self::MlEdf => "ml-edf",
            Self::MlWfq => "ml-wfq",
            Self::Wfq => "wfq",
            Self::Lottery => "lottery",
            Self::Stock => "stock",
            Self::Paced => "paced",
            Self::Unpaced => "unpaced",
            Self::ActiveWait => "active-wait",
            Self::PassiveWait => "passive-wait",
            Self::Workers1 => "workers-1",
            Self::Workers2 => "workers-2",
            Self::Workers4 => "workers-4",
            Self::Calm => "calm",
            Self::Guarded => "guarded",
            Self::Unguarded => "unguarded",
            Self::NoProxy => "no-proxy",
            Self::Datagram => "datagram",
            Self::DatagramFcfs => "datagram-fcfs",
            Self::DatagramByRtt => "datagram-by-rtt",
            Self::Stream => "stream",
            Self::StreamFcfs => "stream-fcfs",
            Self::Auto => "auto",
            Self::QuicGo => "quic-go",
            Self::QuicGoFcfs => "quic-go-fcfs",
            Self::QuicGoAbs => "quic-go-abs",
            Self::QuicGoMlRr => "quic-go-ml-rr",
            Self::TlsN => "tls-n",
            Self::Tls1 => "tls-1",
            Self::Http3 => "http3",
            Self::Http3Rr => "http3-rr",
            Self::Http2 => "http2",
            Self::Http1 => "http1",
        }
    }

    /// Whether it is a version of HTTP by which a gateway is asked for tokens.
    #[must_use]
    pub fn is_of_http(self) -> bool {
        matches!(self, Self::Http3 | Self::Http3Rr | Self::Http2 | Self::Http1)
    }

    /// Whether it determines when packets leave, rather than their order.
    #[must_use]
    pub fn is_of_packets(self) -> bool {
        matches!(self, Self::Stock | Self::Paced | Self::Unpaced | Self::ActiveWait | Self::PassiveWait)
    }

    /// Whether its transport is quic-go.
    #[must_use]
    pub fn is_of_quic_go(self) -> bool {
        matches!(self, Self::QuicGo | Self::QuicGoFcfs | Self::QuicGoAbs | Self::QuicGoMlRr)
    }

    /// How it orders the streams of a connection, and how late it decides. Returns `None` for other transports, and for
    /// schedulers that compare relays or tunnels.
    #[must_use]
    pub fn of_streams(self) -> Option<(Discipline, Binding)> {
        let discipline = match self {
            Self::Plain => return Some((Discipline::Rr, Binding::Early)),
            Self::Workers1 | Self::Workers2 | Self::Workers4 => return None,
            Self::Calm | Self::Guarded | Self::Unguarded => return None,
            Self::NoProxy | Self::Datagram | Self::DatagramFcfs | Self::DatagramByRtt => return None,
            Self::Stream | Self::StreamFcfs | Self::Auto => return None,
            Self::QuicGo | Self::QuicGoFcfs | Self::QuicGoAbs | Self::QuicGoMlRr => return None,
            Self::TlsN | Self::Tls1 => return None,
            Self::Http3 | Self::Http3Rr | Self::Http2 | Self::Http1 => return None,
            Self::Rr => Discipline::Rr,
            Self::Fcfs => Discipline::Fcfs,
            Self::EdfHard => Discipline::Edf { expiry: Expiry::Hard },
            Self::EdfSoft => Discipline::Edf { expiry: Expiry::Soft },
            Self::Abs => Discipline::Abs,
            Self::MlFcfs => Discipline::Ml { low: Low::Fcfs },
            Self::MlEdf => Discipline::Ml { low: Low::Edf },
            Self::MlWfq => Discipline::Ml { low: Low::Wfq },
            Self::Wfq => Discipline::Wfq,
            Self::Lottery => Discipline::Lottery,
            // The product's default.
            Self::MlRr | Self::Stock | Self::Paced | Self::Unpaced | Self::ActiveWait | Self::PassiveWait => {
                Discipline::Ml { low: Low::Rr }
            }
        };
        Some((discipline, Binding::default()))
    }

    /// How many workers its relay has. Returns `None` if workers are not compared.
    #[must_use]
    pub const fn workers(self) -> Option<usize> {
        match self {
            Self::Workers1 => Some(1),
            Self::Workers2 => Some(2),
            Self::Workers4 => Some(4),
            _ => None,
        }
    }
}

/// Checks that no name is there twice: rows of both would be about the same.
///
/// # Errors
/// When one is; the error names it.
pub fn named_once<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let mut seen = BTreeSet::new();
    names.into_iter().try_for_each(|name| {
        ensure!(seen.insert(name), "{name} is named twice");
        Ok(())
    })
}
