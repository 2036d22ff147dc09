//! How many clients get in, and what they may use: plain numbers, which the caller takes from its configuration, and their names.

use std::time::Duration;

/// The limits of all endpoints that share their [places](super::strangers::ConnectionPlaces).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Connections at once.
    pub connections: u32,
    /// How many of them strangers may have whose prefix has no known user.
    pub places_for_strangers: u32,
    /// Strangers at once from one /24 (IPv4) or /56 (IPv6).
    pub strangers_per_prefix: u32,
    /// What each stranger may use.
    pub stranger: StrangerTerms,
}

impl Default for AdmissionLimits {
    /// The limits of a relay whose configuration names none.
    fn default() -> Self {
        Self {
            connections: 10_000,
            places_for_strangers: 7_500,
            strangers_per_prefix: 256,
            stranger: StrangerTerms::default(),
        }
    }
}

/// What a client may use while it is a stranger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrangerTerms {
    /// How long it may stay one.
    pub time: Duration,
    /// Packets that it may send.
    pub packets: u32,
    /// Bytes that it may make us hold.
    pub held_bytes: u32,
    /// Requests that may wait for an answer at once.
    pub waiting_requests: u32,
    /// Requests that may be refused.
    pub refused_requests: u32,
}

impl Default for StrangerTerms {
    fn default() -> Self {
        Self {
            time: Duration::from_secs(10),
            packets: 4_096,
            held_bytes: 512 << 10,
            waiting_requests: 64,
            refused_requests: 128,
        }
    }
}

/// How many frames and capsules a user may send within a second. [`UserFrames`](super::user_frames::UserFrames) says which of them are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameRates {
    /// Over all of its connections.
    pub user_frames_per_second: u32,
    /// Over one connection, however many the user's others send.
    pub connection_frames_per_second: u32,
}

impl Default for FrameRates {
    /// The rates of a relay whose configuration names none.
    fn default() -> Self {
        Self { user_frames_per_second: 1_000_000, connection_frames_per_second: 3_906 }
    }
}

/// A limit of `[relay.limits]` that was reached, by the name under which it is counted.
pub type Limit = &'static str;
