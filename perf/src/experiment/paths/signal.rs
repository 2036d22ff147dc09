//! What requests say of the order in which answers are sent.

/// What one request says. Streams of lower urgency wait (RFC 9218 §4.1); of equals, those that are not incremental come one after
/// the other, and before the others (§4.2, §10); the others share by weight, within their groups (RFC 7540 §5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signal {
    /// 0 first.
    pub(super) urgency: u8,
    pub(super) is_incremental: bool,
    /// The idle stream that it depends on; `None` for the root.
    pub(super) group: Option<Group>,
    /// 1 to 256.
    pub(super) weight: u32,
}

/// Idle streams that others depend on: Firefox's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Group {
    /// Depends on the root.
    Leaders,
    /// Depends on the root.
    Others,
    /// Depends on the leaders, beside each of their streams.
    Followers,
}

impl Group {
    /// Its weight, 1 to 256 (RFC 7540 §5.3.2).
    pub(super) const fn weight(self) -> u32 {
        match self {
            Self::Leaders => 201,
            Self::Others => 101,
            Self::Followers => 1,
        }
    }

    /// The group that it depends on; `None` for the root.
    pub(super) const fn parent(self) -> Option<Self> {
        match self {
            Self::Followers => Some(Self::Leaders),
            Self::Leaders | Self::Others => None,
        }
    }
}
