//! The settings of a class of traffic. They apply to all traffic of the class, whichever rule or program chose the class.

use std::{ops::RangeInclusive, time::Duration};

use crate::{path::Placement, stream::Level};

/// The class of traffic to which no rule gives another one. Every policy has it.
pub const DEFAULT: &str = "default";

/// The priority of a class that sets none: RFC 9218's default, urgency 3. So a client that signals the default is equal to a client that
/// signals nothing.
pub const DEFAULT_PRIORITY: u8 = 159;

/// A named kind of traffic and its terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassSettings {
    /// The name: 1 to 32 of `a` to `z`, `0` to `9` and `-`.
    pub name: String,
    /// The level of the discipline `ml` that serves it. No signal moves it.
    pub level: Level,
    /// The priority without a signal; higher goes first. Within `priorities`.
    pub priority: u8,
    /// The range within which a signal may move the priority; not empty.
    pub priorities: RangeInclusive<u8>,
    /// The share under `wfq` and `lottery`, relative to other classes; at least 1.
    pub weight: u16,
    /// The time in which its bytes are useful, without a signal: for a request stream from its first byte, for a tunnel
    /// from the arrival of each payload. Not shorter than `shortest_deadline`.
    pub deadline: Option<Duration>,
    /// The shortest deadline that a signal may set; `None` ignores signalled deadlines.
    pub shortest_deadline: Option<Duration>,
    /// What a tunnel of the class drops when it has more to send than it may.
    pub drop: DropRule,
    /// The most that all its traffic may send toward targets, in bytes per second, headers included.
    pub rate_up: Option<u64>,
    /// The most that all its traffic may send toward clients, in bytes per second, headers of payloads included.
    pub rate_down: Option<u64>,
    /// The most packets that all its traffic may send toward targets, per second.
    pub packets_up: Option<u64>,
    /// The most payloads that all its traffic may send toward clients, per second.
    pub packets_down: Option<u64>,
    /// The codepoint of its packets (RFC 2474 §3), 0 to 63: toward targets, and if the kernel enforces classes also
    /// toward peers of QUIC connections; `None` leaves them unchanged.
    pub dscp: Option<u8>,
    /// What happens to a request for a model if no model is predicted to answer within its deadline.
    pub late: Late,
    /// Which path of an edge its tunnels and requests use, if there are several.
    pub placement: Placement,
}

/// What a gateway does with a request that will be late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Late {
    /// The request is answered as early as possible.
    #[default]
    Serve,
    /// The request is refused at once, so that its client can turn elsewhere and no engine works in vain.
    Refuse,
}

/// Which payloads a tunnel drops. Queues are bounded in bytes under every rule, and drop their oldest payloads when
/// full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DropRule {
    /// Only the oldest, once the queue is full.
    #[default]
    Oldest,
    /// Also payloads that have waited longer than this.
    Sojourn(Duration),
    /// Also the payloads that CoDel drops to keep waits short (RFC 8289).
    CoDel {
        /// The wait that is acceptable indefinitely (RFC 8289 §4.3).
        target: Duration,
        /// For how long a longer wait is acceptable: about a round trip of the slowest clients (RFC 8289 §4.3).
        interval: Duration,
    },
}

impl ClassSettings {
    /// Returns a class with this name and the default settings: no deadline, no rates, and signals that may only lower its priority.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            level: Level::Low,
            priority: DEFAULT_PRIORITY,
            priorities: 0..=DEFAULT_PRIORITY,
            weight: 1,
            deadline: None,
            shortest_deadline: None,
            drop: DropRule::Oldest,
            rate_up: None,
            rate_down: None,
            packets_up: None,
            packets_down: None,
            dscp: None,
            late: Late::Serve,
            placement: Placement::Paced,
        }
    }
}
