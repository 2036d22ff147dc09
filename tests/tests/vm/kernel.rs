//! The lab's kernel has what the vm ring's other tests rely on.

use std::{fs, net::UdpSocket, time::Duration};

use anyhow::Result;
use bpf::Availability;
use lab::{
    netem::Netem,
    netns::{Chain, End},
};

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

/// Numbered packets that the client sends to the relay over the chain's access link: few enough for the receiver's buffer.
const PACKETS: u32 = 200;

/// Returns which of the packets arrive.
fn arrivals(chain: &Chain) -> Result<Vec<u32>> {
    let receiver = chain.relay.run(|| UdpSocket::bind((chain.access.far.v4, 0)))??;
    let to = receiver.local_addr()?;
    // The last packet is sent again until it arrives.
    receiver.set_read_timeout(Some(Duration::from_millis(50)))?;
    let sender = chain.client.run(|| UdpSocket::bind("0.0.0.0:0"))??;
    let send = |number: u32| sender.send_to(&number.to_be_bytes(), to);
    for number in 0..PACKETS {
        send(number)?;
    }
    let (mut arrived, mut packet) = (Vec::new(), [0; 4]);
    while !arrived.ends_with(&[PACKETS]) {
        match receiver.recv(&mut packet) {
            Ok(_) => arrived.push(u32::from_be_bytes(packet)),
            Err(_) => _ = send(PACKETS)?,
        }
    }
    Ok(arrived)
}

#[test]
fn links_of_the_same_seed_lose_the_same_packets() {
    lab::ring!(Vm);
    let chain = Chain::new().unwrap();
    [&chain.access.near, &chain.access.far].into_iter().try_for_each(End::keep_neighbours).unwrap();
    // Finds the neighbour: packets of IPv6 and ARP would take numbers of the seed.
    arrivals(&chain).unwrap();
    for host in [&chain.client, &chain.relay] {
        host.sysctl("net.ipv6.conf.all.disable_ipv6", "1").unwrap();
    }
    let with = |seed| {
        let link = Netem { limit_packets: 1_000, bytes_per_sec: 0, delay: Duration::ZERO, loss: 0.25, seed };
        chain.access.near.emulate(&link).unwrap();
        arrivals(&chain).unwrap()
    };
    let [first, again, other] = [7, 7, 8].map(with);
    assert_eq!(first, again);
    assert_ne!(first, other);
    // 50 are lost on average; the bounds are five standard deviations away.
    assert!((PACKETS as usize - first.len()).abs_diff(50) < 31, "{} of {PACKETS} arrived", first.len());
}

#[test]
fn a_delay_on_a_link_is_a_delay_of_the_answer() {
    lab::ring!(Vm);
    let chain = Chain::new().unwrap();
    let _echo = chain.relay.echo(7).unwrap();
    chain.access.near.set_qdisc("netem delay 30ms").unwrap();
    let elapsed = chain.client.run(|| {
        let socket = UdpSocket::bind("[::]:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let begin = std::time::Instant::now();
        socket.send_to(b"marco", (chain.access.far.v6, 7)).unwrap();
        socket.recv(&mut [0; 8]).unwrap();
        begin.elapsed()
    });
    assert!(elapsed.unwrap().as_millis() >= 30);
}
