//! What the probe of the kernel says with all rights, and with none.

use std::thread;

use bpf::State;

#[test]
fn root_may_load_programs_and_mark_packets() {
    lab::ring!(Netns);
    let found = bpf::probe();
    for finding in [&found.cap_bpf, &found.cap_net_admin, &found.cap_net_raw, &found.bpf, &found.mark] {
        assert_eq!(finding.state, State::Yes, "\n{found}");
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
        assert_eq!(finding.state, State::No, "\n{found}");
    }
    for finding in [&found.txtime, &found.gso, &found.gro] {
        assert_eq!(finding.state, State::Yes, "\n{found}");
    }
}

/// Empties the capability sets of the calling thread, and of no other.
fn give_up_all_rights() {
    const VERSION_3: u32 = 0x2008_0522;
    let (header, sets) = ([VERSION_3, 0], [0_u32; 6]);
    // SAFETY: capset reads a header of two words and, for version 3, two records of three words each.
    let given_up = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    assert_eq!(given_up, 0);
}
