//! The reasons to pass or drop packets to listeners.

/// Whether a packet to a listener passes or is dropped, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum GuardReason {
    /// Passed: its connection ID is ours.
    Connection,
    /// Passed: it begins a connection.
    Initial,
    /// Passed: it begins a connection, and shows an address token of ours.
    InitialToken,
    /// Passed: it begins a connection, and a handshake was completed from its address before.
    InitialKnown,
    /// Passed: it begins a connection under an ID of ours.
    InitialId,
    /// Passed: of an unknown version; the endpoint can answer with the versions that it supports.
    Version,
    /// Passed: of an unknown connection; the endpoint can answer with a stateless reset.
    UnknownId,
    /// Passed: a later fragment to a listener's address, which may be for another program there.
    Fragment,
    /// Dropped: no endpoint could read it.
    Malformed,
    /// Dropped: an Initial in less than 1,200 bytes (RFC 9000 §14.1).
    ShortInitial,
    /// Dropped: a first packet whose connection ID has less than 8 bytes (RFC 9000 §7.2).
    ShortId,
    /// Dropped: a version negotiation packet, which only servers send.
    VersionNegotiation,
    /// Dropped: of an unknown version, and too short to deserve an answer.
    ShortVersion,
    /// Dropped: a handshake under a connection ID that is not ours.
    ForgedId,
    /// Dropped: the first fragment of a packet to a listener (RFC 9000 §14).
    FirstFragment,
    /// Dropped: after more IPv6 extension headers than the program reads, or after an incomplete one.
    Hidden,
    /// Dropped: more first packets from a /24 or /56 than its limit.
    PrefixLimit,
    /// Dropped: more first packets than the limit for all sources.
    TotalLimit,
    /// Dropped: more first packets under one ID of ours than a handshake needs.
    IdLimit,
    /// Dropped: more packets of unknown connections than are answered.
    ResetLimit,
    /// Dropped: more fragments to listeners' addresses than may pass.
    FragmentLimit,
    /// Dropped: too many packets arrive, and its class is too low.
    ArrivalsLimit,
}

impl GuardReason {
    /// The number of reasons.
    pub const COUNT: usize = 22;

    /// All reasons, in the order of the program's counters.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Connection,
        Self::Initial,
        Self::InitialToken,
        Self::InitialKnown,
        Self::InitialId,
        Self::Version,
        Self::UnknownId,
        Self::Fragment,
        Self::Malformed,
        Self::ShortInitial,
        Self::ShortId,
        Self::VersionNegotiation,
        Self::ShortVersion,
        Self::ForgedId,
        Self::FirstFragment,
        Self::Hidden,
        Self::PrefixLimit,
        Self::TotalLimit,
        Self::IdLimit,
        Self::ResetLimit,
        Self::FragmentLimit,
        Self::ArrivalsLimit,
    ];

    /// Returns whether the packet passed.
    #[must_use]
    pub const fn passes(self) -> bool {
        (self as u32) < Self::Malformed as u32
    }
}
