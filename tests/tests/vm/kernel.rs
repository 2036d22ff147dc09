//! The lab's kernel has what the vm ring's other tests rely on.

use std::fs;

use bpf::Availability;
use lab::netns::Chain;

#[test]
fn the_kernel_is_the_labs_and_has_its_queueing_disciplines() {
    lab::ring!(Vm);
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(release.starts_with("6.12.") && release.contains("deb12"), "{release}");
    let chain = Chain::new().unwrap();
    for discipline in
        ["fq", "netem delay 1ms", "etf clockid CLOCK_TAI delta 200000", "tbf rate 1gbit burst 64kb latency 1ms"]
    {
        chain.egress.near.set_qdisc(discipline).unwrap();
    }
}

#[test]
fn the_probe_finds_fq_and_everything_else_there() {
    lab::ring!(Vm);
    let found = bpf::probe();
    for (name, finding) in found.rows() {
        // Only XDP is unknown until it is tried.
        assert!(finding.state == Availability::Yes || name == "XDP", "\n{found}");
    }
}

#[test]
fn a_delay_on_a_link_is_a_delay_of_the_answer() {
    lab::ring!(Vm);
    let chain = Chain::new().unwrap();
    let _echo = chain.relay.echo(7).unwrap();
    chain.access.near.set_qdisc("netem delay 30ms").unwrap();
    let elapsed = chain.client.run(|| {
        let socket = std::net::UdpSocket::bind("[::]:0").unwrap();
        socket.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let begin = std::time::Instant::now();
        socket.send_to(b"marco", (chain.access.far.v6, 7)).unwrap();
        socket.recv(&mut [0; 8]).unwrap();
        begin.elapsed()
    });
    assert!(elapsed.unwrap().as_millis() >= 30);
}
