//! Streams as placements see them: on a path, and before they have one.

use super::precedence::Precedence;

/// The known properties of a stream on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The bytes that it still has to send.
    pub bytes: u64,
    /// Its weight among the streams with which it shares the path (HTTP/2's priority in FStream); 0 counts as 1.
    pub weight: u32,
    /// Its place in the order of the path, as far as the path's discipline ranks by it ([`Precedence::under`]).
    pub precedence: Precedence,
}

impl Placed {
    /// Returns a stream on a path whose streams share it by weight.
    #[must_use]
    pub const fn by_weight(bytes: u64, weight: u32) -> Self {
        Self { bytes, weight, precedence: Precedence::SHARED }
    }
}

/// A stream to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamProfile {
    /// How many bytes it has to send.
    pub bytes: u64,
    /// Its weight among the streams with which it shares a path; 0 counts as 1.
    pub weight: u32,
    /// Its place in the order of a path, as in [`Placed`].
    pub precedence: Precedence,
    /// Whether its class is urgent.
    pub is_urgent: bool,
    /// Whether it may arrive twice (idempotent, RFC 9110 §9.2.2).
    pub is_idempotent: bool,
    /// Whether it can be fetched in ranges (RFC 9110 §14).
    pub is_divisible: bool,
}

impl StreamProfile {
    /// Returns `bytes` of it as a stream on a path.
    #[must_use]
    pub const fn part(&self, bytes: u64) -> Placed {
        Placed { bytes, weight: self.weight, precedence: self.precedence }
    }
}
