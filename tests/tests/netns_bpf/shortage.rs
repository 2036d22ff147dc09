//! Processes of a relay that lack descriptors, a reader or their program, or whose monitor falls at the start.

use std::fs;

use lab::{
    netns::Chain,
    process::{child_of, limit_descriptors, send_signal, wait_for},
    site::{Family, SOON, Site, Terms},
};

use super::monitor::{KERNEL, all_in_force, assert_serves, child, kill, monitor_of, rights_of, site};

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
    site.relay.wait_for_line("no free descriptors", SOON).unwrap();
    limit_descriptors(site.relay.id(), before).unwrap();
    site.relay.wait_for_line("the monitor has ended", SOON).unwrap();
    site.wait_for_counts("another monitor", |counts| counts.of("kernel_monitor") == 1).unwrap();
    assert_eq!(all_in_force(&site), [true; 3]);
    assert_eq!(site.counts().unwrap().of("kernel_monitor_keeper"), 1);
    site.signal(libc::SIGTERM).unwrap();
    assert!(site.relay.wait(SOON).unwrap().success());
}

#[test]
fn a_keeper_without_descriptors_for_the_next_monitor_tries_again() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let keeper = child(site.relay.id());
    let before = limit_descriptors(keeper, NONE).unwrap();
    kill(child(keeper));
    site.relay.wait_for_line("paced monitor: failed to start", SOON).unwrap();
    limit_descriptors(keeper, before).unwrap();
    site.relay.wait_for_line("the monitor has ended", SOON).unwrap();
    site.wait_for_counts("another monitor", |counts| counts.of("kernel_monitor") == 1).unwrap();
    assert_eq!(all_in_force(&site), [true; 3]);
    assert_eq!(child(site.relay.id()), keeper);
}

#[test]
fn packets_are_marked_though_the_first_monitor_falls_at_the_start() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    // Kills the first monitor while it loads the programs: the only child of the only child of this thread's only child.
    let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
    let monitor = move || {
        let children = fs::read_to_string(format!("/proc/self/task/{thread}/children")).ok()?;
        child_of(child_of(children.trim().parse().ok()?)?)
    };
    let killer = std::thread::spawn(move || wait_for("a monitor", SOON, || monitor().map(kill)));
    let site = Site::on(chain, Terms { sections: KERNEL, ..Terms::default() }).unwrap();
    killer.join().unwrap().unwrap();
    site.relay.wait_for_line("the monitor has ended", SOON).unwrap();
    site.wait_for_counts("another monitor", |counts| counts.of("kernel_monitor") == 1).unwrap();
    assert_eq!(all_in_force(&site), [true; 3]);
    let marked =
        ["up", "down"].map(|direction| format!("kernel_packets_total{{class=\"default\",direction=\"{direction}\"}}"));
    assert_serves(&site, Family::V4);
    site.wait_for_counts("marked packets", |counts| marked.iter().all(|packets| counts.of(packets) > 0)).unwrap();
}

#[test]
fn a_relay_that_cannot_start_its_monitor_gives_up_its_rights_all_the_same() {
    lab::ring!(Netns);
    let (bind, raw) = (1 << 10, 1 << 13);
    let mut site = Site::new(Terms { sections: KERNEL, ..Terms::default() }).unwrap();
    site.signal(libc::SIGTERM).unwrap();
    site.relay.wait(SOON).unwrap();
    // The name of a deleted file leads to no program.
    let copy = site.path("paced");
    fs::copy(lab::program("paced").unwrap(), &copy).unwrap();
    let script = format!(
        "exec 3<{0} && rm {0} && exec /proc/self/fd/3 run --config {1}",
        copy.display(),
        site.path("paced.toml").display()
    );
    let relay = site.chain.relay.start("sh", ["-c", &script]).unwrap();
    relay.wait_for_line("nothing is enforced in the kernel", SOON).unwrap();
    relay.wait_for_line("ready", SOON).unwrap();
    assert_eq!(["CapEff", "CapPrm"].map(|set| rights_of(relay.id(), set)), [bind | raw; 2]);
}

/// A process that is killed when this is dropped.
struct Killed(u32);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        _ = send_signal(self.0, libc::SIGKILL);
    }
}

#[test]
fn a_monitor_is_started_again_though_standard_error_has_no_reader() {
    lab::ring!(Netns);
    let mut site = site();
    site.signal(libc::SIGTERM).unwrap();
    site.relay.wait(SOON).unwrap();
    let (program, file) = (lab::program("paced").unwrap(), site.path("paced.toml"));
    let script = format!("{{ exec {} run --config {} 2>&1; }} | grep -m 1 ready", program.display(), file.display());
    let shell = site.chain.relay.start("bash", ["-c", &script]).unwrap();
    shell.wait_for_line("ready", SOON).unwrap();
    // Once the reader has ended.
    let relay = Killed(child(shell.id()));
    let keeper = child(relay.0);
    kill(child(keeper));
    site.wait_for_counts("another monitor", |counts| {
        counts.of("kernel_monitor_restarts_total") == 1 && counts.of("kernel_monitor") == 1
    })
    .unwrap();
    assert_eq!(child(relay.0), keeper);
}
