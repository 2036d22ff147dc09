//! The results of the kernel probe with all capabilities, and with none.

use std::thread;

use bpf::Availability;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

#[test]
fn root_may_load_programs_and_mark_packets() {
    lab::ring!(Netns);
    let found = bpf::probe();
    for finding in [&found.cap_bpf, &found.cap_net_admin, &found.cap_net_raw, &found.bpf, &found.mark] {
        assert_eq!(finding.state, Availability::Yes, "\n{found}");
    }
}

#[test]
fn without_rights_the_table_names_each_that_is_missing_and_what_works_all_the_same() {
    lab::ring!(Netns);
    let found = thread::spawn(|| {
        give_up_all_rights();
        bpf::probe()
    });
    let found = found.join().unwrap();
    for finding in [&found.cap_bpf, &found.cap_net_admin, &found.cap_net_raw, &found.bpf, &found.xdp, &found.mark] {
        assert_eq!(finding.state, Availability::No, "\n{found}");
    }
    for finding in [&found.txtime, &found.gso, &found.gro] {
        assert_eq!(finding.state, Availability::Yes, "\n{found}");
    }
}

/// Empties the capability sets of the calling thread only.
fn give_up_all_rights() {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
        .expect("any thread may give up its capabilities");
}
