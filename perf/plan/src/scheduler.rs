//! The schedulers that experiments compare.

use quic::dispatch::Binding;
use sched::stream::{Discipline, Expiry, Low};
use serde::{Deserialize, Serialize};

/// A discipline, or what is compared with it.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Scheduler {
    /// s2n-quic as it is: all bytes are handed over at once, and it serves streams in turns of a packet.
    Plain,
    /// Round robin.
    Rr,
    /// First come, first served.
    Fcfs,
    /// Earliest deadline first; what has missed its deadline is discarded.
    EdfHard,
    /// Earliest deadline first, whether met or missed.
    EdfSoft,
    /// Absolute priority, first come first served among equals.
    Abs,
    /// Two levels: the high one by deadline, the low one round robin.
    MlRr,
    /// Two levels, the low one first come first served.
    MlFcfs,
    /// Two levels, both by deadline.
    MlEdf,
    /// Two levels, the low one by weight.
    MlWfq,
    /// Shares by weight.
    Wfq,
    /// Shares by weight, drawn by lot.
    Lottery,
    /// What the product does by default, over s2n-quic's own IO provider.
    Stock,
    /// The same over paced's own provider, which gives every packet a departure time that `fq` enforces.
    Paced,
    /// As `stock`, but all packets that the congestion window allows leave at once.
    Unpaced,
    /// As `paced` without `fq`: the process keeps every packet until it departs, and never sleeps meanwhile.
    ActiveWait,
    /// As `paced` without `fq`: the process keeps packets until they depart, and wakes once for those of a millisecond.
    PassiveWait,
    /// What the product does by default, by one worker.
    #[serde(rename = "workers-1")]
    #[value(name = "workers-1")]
    Workers1,
    /// The same by two.
    #[serde(rename = "workers-2")]
    #[value(name = "workers-2")]
    Workers2,
    /// The same by four.
    #[serde(rename = "workers-4")]
    #[value(name = "workers-4")]
    Workers4,
    /// What the product does by default, where nobody attacks; XDP guards it.
    Calm,
    /// The same under a flood.
    Guarded,
    /// The same under the same flood, but nothing guards it.
    Unguarded,
    /// No proxy: connections from the client to the server.
    NoProxy,
    /// Connections in tunnels whose payloads travel in QUIC datagrams.
    Datagram,
    /// The same, but the relay serves tunnels first come first served.
    DatagramFcfs,
    /// Connections in tunnels whose payloads travel in capsules; the relay serves their streams as the product does by default.
    Stream,
    /// The same, but the relay serves them first come first served.
    StreamFcfs,
    /// Connections in tunnels whose form the edge chooses, by what it measured of the path.
    Auto,
    /// quic-go as it is, which serves streams in turns.
    QuicGo,
    /// quic-go as it is, told to serve streams in the order in which they were opened.
    QuicGoFcfs,
    /// The same by the priority of their classes, in the order in which they were opened among equals.
    QuicGoAbs,
    /// The same in two levels: the high one in the order in which streams were opened, which is by deadline where all there have
    /// the same; the low one in turns.
    QuicGoMlRr,
    /// TLS over TCP, a connection for each request.
    TlsN,
    /// TLS over TCP, one connection for all requests.
    #[serde(rename = "tls-1")]
    #[value(name = "tls-1")]
    Tls1,
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
            Self::Stream => "stream",
            Self::StreamFcfs => "stream-fcfs",
            Self::Auto => "auto",
            Self::QuicGo => "quic-go",
            Self::QuicGoFcfs => "quic-go-fcfs",
            Self::QuicGoAbs => "quic-go-abs",
            Self::QuicGoMlRr => "quic-go-ml-rr",
            Self::TlsN => "tls-n",
            Self::Tls1 => "tls-1",
        }
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
            Self::NoProxy | Self::Datagram | Self::DatagramFcfs => return None,
            Self::Stream | Self::StreamFcfs | Self::Auto => return None,
            Self::QuicGo | Self::QuicGoFcfs | Self::QuicGoAbs | Self::QuicGoMlRr => return None,
            Self::TlsN | Self::Tls1 => return None,
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
