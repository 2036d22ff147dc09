//! The kernel's terms: the budgets of first packets and fragments, which class is shed first, and the rate and DSCP of each class, as
//! policy and configuration say.

use std::{collections::BTreeSet, num::NonZeroU64};

use bpf::{
    egress::KernelTerms,
    ingress::{GuardLimits, RateLimit},
    mark::{Direction, Mark},
};
use config::{kernel::Kernel, policy::Policy};
use sched::{class::ClassSettings, stream::Level};

use crate::marks::{Marks, Numbers};

/// The budgets of packets that begin a connection, and of fragments.
pub(super) fn limits(kernel: &Kernel) -> GuardLimits {
    let (prefix, total) = (kernel.initials_per_second_from_prefix, kernel.initials_per_second);
    GuardLimits {
        prefix: RateLimit::per_second(prefix, prefix),
        total: RateLimit::per_second(total, total / 2),
        fragments: RateLimit::per_second(kernel.fragments_per_second, kernel.fragments_per_second),
        ..GuardLimits::default()
    }
}

/// The ranks in which classes are shed when too many packets arrive: the low level before the high one, and on one
/// level lower priorities first. Equal classes share a rank.
pub(super) fn ranks(policy: &Policy, numbers: &Numbers) -> Vec<(u8, u8)> {
    let place = |class: &ClassSettings| (class.level == Level::High, class.priority);
    let places: BTreeSet<_> = policy.classes.iter().map(place).collect();
    let ranked = policy.classes.iter().filter_map(|class| {
        let rank = places.range(..place(class)).count();
        Some((numbers.of(&class.name)?, u8::try_from(rank).ok()?))
    });
    ranked.collect()
}

/// The terms that the kernel enforces for each class. Only packets to targets have a rate there. A QUIC packet has the mark
/// of one class, but may carry payloads of others: the kernel would charge the class for all of them, delay packets of a class
/// that keeps its rate, and so reorder those of a connection.
pub(super) fn terms(policy: &Policy, marks: &Marks) -> impl Iterator<Item = (Mark, KernelTerms)> {
    policy.classes.iter().flat_map(|class| {
        [(Direction::Up, class.rate_up), (Direction::Down, None), (Direction::UpToRelay, None)].into_iter().filter_map(
            |(direction, rate)| {
                Some((marks.of(&class.name, direction)?, KernelTerms { dscp: class.dscp, ..capped(rate) }))
            },
        )
    })
}

/// Returns the terms of a rate that the kernel enforces as a guard rail: twice the rate. `role::gate` keeps the rate itself and
/// counts IP, UDP and TCP headers; the kernel counts link headers as well, which make an empty payload half as large again. So
/// no second queue builds up behind that of paced while only payloads count. TCP's acknowledgements and retransmissions count
/// in the kernel alone.
fn capped(bytes_per_sec: Option<u64>) -> KernelTerms {
    const BURST_NS: u64 = 10_000_000;
    let with_margin = bytes_per_sec.and_then(|rate| NonZeroU64::new(rate.saturating_mul(2)));
    KernelTerms { bytes_per_sec: with_margin, burst_ns: BURST_NS, ..KernelTerms::default() }
}

#[cfg(test)]
mod tests {
    use bpf::mark::Tag;

    use super::*;
    use crate::marks::Permission;

    #[test]
    fn every_class_has_its_terms_and_only_packets_to_targets_have_a_rate() {
        let text = "[class.voice]\nrate_up = \"8 Mbit/s\"\nrate_down = \"80 Mbit/s\"\ndscp = 46";
        let policy = config::Config::from_toml(text).unwrap().policy;
        let mut marks = Marks::new(Tag::default(), Permission { sockets: true, packets: true });
        let mut numbers = Numbers::default();
        numbers.learn(&policy);
        marks.number_by(&numbers);
        let terms: Vec<_> = terms(&policy, &marks).collect();
        assert_eq!(terms.len(), 6, "two classes, three directions");
        let of = |direction, class| {
            let found = terms.iter().find(|(mark, _)| *mark == Mark { direction, class });
            found.map(|(_, terms)| (terms.bytes_per_sec.map(NonZeroU64::get), terms.dscp)).unwrap()
        };
        assert_eq!(of(Direction::Up, 1), (Some(2_000_000), Some(46)), "twice as much, for headers");
        // QUIC packets may carry payloads of several classes.
        assert_eq!(of(Direction::Down, 1), (None, Some(46)));
        assert_eq!(of(Direction::UpToRelay, 1), (None, Some(46)));
        assert_eq!(of(Direction::Up, 0), (None, None));
    }

    #[test]
    fn a_class_whose_smallest_packets_keep_its_rate_is_not_held_back_by_the_kernel() {
        const ETHERNET_AND_VLAN: u64 = 14 + 4;
        let rate = 1_000_000;
        let of_kernel = capped(Some(rate)).bytes_per_sec.unwrap().get();
        // Empty payloads: IPv4 and IPv6, UDP; a byte of TCP, with timestamps.
        for counted in [20 + 8, 40 + 8, 20 + 32 + 1, 40 + 32 + 1] {
            assert!((counted + ETHERNET_AND_VLAN) * rate <= of_kernel * counted, "{counted}");
        }
    }

    #[test]
    fn without_other_limits_those_of_the_guard_hold() {
        assert_eq!(limits(&Kernel::default()), GuardLimits::default());
    }
}
