//! The limits of one user, over all connections and tunnels together.

use std::ops::RangeInclusive;

use serde_json::Value as Json;
use toml::de::DeValue;

use crate::{
    policy::{PACKETS, rate},
    section::{Section, Value, text},
    text::quoted,
};

/// The limits of a user; `None` for no limit of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Bytes to and from targets per calendar month (UTC): UDP payloads and the data of TCP connections.
    pub monthly_bytes: Option<u64>,
    /// Bytes per second to targets, headers included.
    pub rate_up: Option<u64>,
    /// Bytes per second from targets, headers included.
    pub rate_down: Option<u64>,
    /// Packets per second to targets.
    pub packets_up: Option<u64>,
    /// Packets per second from targets.
    pub packets_down: Option<u64>,
    /// Requests per second, after a burst of as many; `None` stands for
    /// [`RelayLimits::requests_per_second`](crate::relay::RelayLimits::requests_per_second).
    pub requests_per_second: Option<u32>,
}

/// How many requests a user may make per second: the range of the user's own limit and of the limit for all users.
pub(crate) const REQUESTS: RangeInclusive<u64> = 1..=1 << 20;

/// Walks through the limits of a user.
pub(crate) fn walk(section: &mut Section<'_>, of: Quota) -> Quota {
    Quota {
        monthly_bytes: section.optional("monthly_quota", of.monthly_bytes.map(Volume)).map(|Volume(bytes)| bytes),
        rate_up: rate(section, "rate_up", of.rate_up),
        rate_down: rate(section, "rate_down", of.rate_down),
        packets_up: section.optional_number("packets_up", PACKETS, of.packets_up),
        packets_down: section.optional_number("packets_down", PACKETS, of.packets_down),
        requests_per_second: section.optional_number("requests_per_second", REQUESTS, of.requests_per_second),
    }
}

const UNITS: [(&str, u64); 3] = [("TB", 1_000_000_000_000), ("GB", 1_000_000_000), ("MB", 1_000_000)];

/// A number of bytes.
struct Volume(u64);

impl Value for Volume {
    const EXPECTED: &'static str =
        "a volume as a whole number, a space and MB, GB or TB, such as \"500 GB\", from 1 MB to 1000000 TB";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        let (number, unit) = value.as_str()?.split_once(' ')?;
        let (_, unit) = UNITS.into_iter().find(|(name, _)| *name == unit)?;
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
        let bytes = number.parse::<u64>().ok().filter(|_| is_number)?.checked_mul(unit)?;
        (1_000_000..=1_000_000_000_000_000_000).contains(&bytes).then_some(Self(bytes))
    }

    fn write(&self) -> String {
        quoted(&volume(self.0))
    }

    fn schema() -> Json {
        text("^[0-9]+ [MGT]B$")
    }
}

/// Writes bytes in the largest unit that gives a whole number.
pub(crate) fn volume(bytes: u64) -> String {
    let (unit, in_bytes) = UNITS.into_iter().find(|(_, unit)| bytes.is_multiple_of(*unit)).unwrap_or(UNITS[2]);
    format!("{} {unit}", bytes / in_bytes)
}
