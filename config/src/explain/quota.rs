//! Words for the limits of users, some of which classes have, too.

use crate::{
    quota::{Quota, volume},
    text,
};

/// The limits of a user, each after a comma.
pub(super) fn quota(quota: &Quota) -> String {
    let month = quota.monthly_bytes.map(|bytes| format!("{} a month", volume(bytes)));
    let limits = [
        month,
        rate_words("up", quota.rate_up),
        rate_words("down", quota.rate_down),
        packet_words("up", quota.packets_up),
        packet_words("down", quota.packets_down),
        quota.requests_per_second.map(|requests| format!("{requests} requests a second")),
    ];
    limits.into_iter().flatten().map(|limit| format!(", {limit}")).collect()
}

/// A limit in bytes per second, if there is one.
pub(super) fn rate_words(way: &str, rate: Option<u64>) -> Option<String> {
    rate.map(|rate| format!("{way} at most {}", text::rate(rate)))
}

/// A limit in packets per second, if there is one.
pub(super) fn packet_words(way: &str, packets: Option<u64>) -> Option<String> {
    packets.map(|packets| format!("{way} at most {packets} packets a second"))
}
