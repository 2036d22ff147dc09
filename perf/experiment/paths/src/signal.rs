//! The priorities that requests carry.

/// The priority of one request. A stream waits for all streams that are more urgent (RFC 9218 §4.1). Among streams of the same urgency,
/// non-incremental ones are sent first, one by one in the order of their requests (§4.2, §10). Incremental ones share the connection by
/// weight, within their groups (RFC 7540 §5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signal {
    /// 0 to 7; 0 is the most urgent.
    pub(super) urgency: u8,
    pub(super) is_incremental: bool,
    /// The idle stream that the request depends on; `None` for the root.
    pub(super) group: Option<Group>,
    /// 1 to 256.
    pub(super) weight: u32,
}

/// The idle streams that Firefox opens, so that requests can depend on them.
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

    /// Returns the group that it depends on, or `None` for the root.
    pub(super) const fn parent(self) -> Option<Self> {
        match self {
            Self::Followers => Some(Self::Leaders),
            Self::Leaders | Self::Others => None,
        }
    }
}
