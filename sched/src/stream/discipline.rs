//! The disciplines by which streams are ordered, and the parameters of a stream by which they rank.

/// How streams that have something to send are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Discipline {
    /// Round robin, the default of QUIC stacks: one turn each, in the order in which streams were queued.
    #[default]
    Rr,
    /// First come, first served (Enhancing QUIC, ch. 1, §4.1): a stream is served until it has nothing left; when it has
    /// something again, it counts as a new arrival. [Incremental](Service::incremental) streams go to the back after a
    /// turn.
    Fcfs,
    /// Earliest deadline first (§4.1): deadlines closer than four nanoseconds may count as equal. Streams without a
    /// deadline come after streams with one, first come, first served.
    Edf {
        /// What happens to a stream after its deadline.
        expiry: Expiry,
    },
    /// Absolute priority (§4.1): the highest priority first; equal priorities first come, first served.
    /// [Incremental](Service::incremental) streams go behind their equals after a turn. Starves low priorities.
    Abs,
    /// Multi-level (§4.1): [`Level::High`] always before [`Level::Low`]. The high level is served earliest deadline first,
    /// the low one as `low` says. The high level can starve the low one.
    Ml {
        /// How the low level is ordered; the thesis uses round robin.
        low: Low,
    },
    /// Weighted fair queueing by bytes: start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM
    /// 1996), which need not know how long a turn will be. Between two streams that wait all the time, bytes per weight
    /// differ by at most one turn of each. A stream that slept accumulates no credit, and owes nothing for turns from before
    /// a time when no stream waited.
    Wfq,
    /// Lottery: each turn goes to a stream with a probability of its weight's share of the weights of all waiting streams,
    /// however long its turns are (FStream, §II, where the weight is called the stream's priority, PRT).
    Lottery,
}

/// What happens to a stream after its deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Expiry {
    /// It is served anyway, and first.
    #[default]
    Soft,
    /// The caller should give it up; see [`Streams::expired`](super::Streams::expired).
    Hard,
}

/// The order of the low level of [`Discipline::Ml`], as in the discipline of the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Low {
    /// [`Discipline::Rr`].
    #[default]
    Rr,
    /// [`Discipline::Fcfs`].
    Fcfs,
    /// [`Discipline::Edf`] with [`Expiry::Soft`].
    Edf,
    /// [`Discipline::Wfq`].
    Wfq,
}

/// One of the two levels of [`Discipline::Ml`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Level {
    /// Always served before the low level.
    High,
    /// Served when the high level has nothing to send.
    #[default]
    Low,
}

/// The scheduling parameters of a stream. Each discipline uses the ones that it ranks by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Used by [`Discipline::Ml`].
    pub level: Level,
    /// Used by [`Discipline::Abs`]; higher goes first.
    pub priority: u8,
    /// The stream's share under [`Discipline::Wfq`] and [`Discipline::Lottery`]; 0 counts as 1.
    pub weight: u16,
    /// When the whole stream must have left, in nanoseconds of the caller's time. Used by [`Discipline::Edf`] and both
    /// levels of [`Discipline::Ml`].
    pub deadline_ns: Option<u64>,
    /// Whether a stream ranked by arrival or priority alternates with its equals, turn by turn, instead of being served to
    /// its end (the `i` parameter of RFC 9218 §4.2).
    pub incremental: bool,
}

impl Default for Service {
    /// Returns the low level, the lowest priority, weight 1, no deadline, served to its end.
    fn default() -> Self {
        Self { level: Level::Low, priority: 0, weight: 1, deadline_ns: None, incremental: false }
    }
}
