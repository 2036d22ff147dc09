//! The results of the kernel probe with all capabilities, and with none, and a relay that has none.

use std::thread;

use bpf::Availability;
use lab::{
    client::Client,
    process::Process,
    site::{Family, SOON, Site, Terms},
};
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

#[test]
fn a_relay_without_rights_relays_reloads_and_says_what_the_kernel_does_not_enforce() {
    lab::ring!(Netns);
    let kernel = "[kernel]\ndevices = [\"client\"]\n[class.echo]\nrate_up = \"50 Mbit/s\"\n[[rule]]\nclass = \"echo\"\nports = 7";
    let terms = Terms { relay: "auth = \"none\"\ndrain_seconds = 0", sections: kernel, ..Terms::default() };
    let mut site = Site::new(terms).unwrap();
    site.signal(libc::SIGTERM).unwrap();
    site.relay.wait(SOON).unwrap();
    site.chain.relay.sysctl("net.ipv4.ip_unprivileged_port_start", "0").unwrap();
    let mut without_rights = site.chain.relay.command("setpriv").unwrap();
    without_rights.args(["--bounding-set=-all", "--inh-caps=-all"]).arg(lab::program("paced").unwrap());
    without_rights.arg("run").arg("--config").arg(site.path("paced.toml"));
    site.relay = Process::start(without_rights).unwrap();
    site.wait_for_counts("the relay", |_| true).unwrap();

    let _echo = site.chain.target.echo(7).unwrap();
    let echo = async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        assert_eq!(tunnel.echo(None, b"without rights").await, b"without rights");
    };
    site.client(echo).unwrap();
    let (code, said) = site.pacectl(&["status"], "").unwrap();
    let is_told = |line: &str| line.contains("egress   no") && line.contains("without CAP_BPF");
    assert!(code == Some(0) && said.lines().any(is_told), "{said}");
    site.configure(Terms { limits: "tunnels_per_user = 9", ..terms }).unwrap();
    site.signal(libc::SIGHUP).unwrap();
    site.wait_for_counts("a reload", |counts| counts.of("reloads_total{result=\"applied\"}") == 1).unwrap();
    site.client(echo).unwrap();
    site.signal(libc::SIGTERM).unwrap();
    assert!(site.relay.wait(SOON).unwrap().success(), "{}", site.relay.output());
}

/// Empties the capability sets of the calling thread only.
fn give_up_all_rights() {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
        .expect("any thread may give up its capabilities");
}
