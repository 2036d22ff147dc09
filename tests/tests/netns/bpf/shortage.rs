//! Processes of a relay that lack descriptors, or whose monitor falls at the start.

use lab::process::limit_descriptors;
use lab::site::SOON;

use super::monitor::{all_in_force, kill, monitor_of, site};

/// A limit that lets a process open nothing.
const NONE: u64 = 3;

#[test]
fn a_relay_without_descriptors_for_the_next_monitor_follows_a_later_one() {
    lab::ring!(Netns);
    let mut site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let monitor = monitor_of(&site.relay);
    let before = limit_descriptors(site.relay.id(), NONE).unwrap();
    kill(monitor);
    site.relay.wait_for_line("no descriptor left", SOON).unwrap();
    limit_descriptors(site.relay.id(), before).unwrap();
    site.wait_for_counts("another monitor", |counts| counts.of("kernel_monitor") == 1).unwrap();
    assert_eq!(all_in_force(&site), [true; 3]);
    assert_eq!(site.counts().unwrap().of("kernel_monitor_keeper"), 1);
    site.signal(libc::SIGTERM).unwrap();
    assert!(site.relay.wait(SOON).unwrap().success());
}
