//! The ring of network namespaces tests itself: its parts work, and it leaves nothing behind.

use std::{
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::Path,
    process::Command,
    time::Duration,
};

use lab::{
    capture::Capture,
    netns::{Chain, Namespace, remove_leftovers},
    process::{KilledOnDrop, wait_for},
    site::Folder,
};
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};

const SOON: Duration = Duration::from_secs(10);

fn ask(from: &Namespace, to: SocketAddr, payload: &[u8]) -> anyhow::Result<Vec<u8>> {
    from.run(|| {
        let local = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(local)?;
        socket.set_read_timeout(Some(SOON))?;
        socket.connect(to)?;
        socket.send(payload)?;
        let mut answer = vec![0; 2048];
        let len = socket.recv(&mut answer)?;
        answer.truncate(len);
        Ok(answer)
    })?
}

#[test]
fn every_hop_answers_in_both_address_families() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let (_relay, _target) = (chain.relay.echo(7).unwrap(), chain.target.echo(7).unwrap());
    for (from, to) in [(&chain.client, &chain.access.far), (&chain.relay, &chain.egress.far)] {
        for address in [IpAddr::from(to.v4), IpAddr::from(to.v6)] {
            assert_eq!(ask(from, (address, 7).into(), b"marco").unwrap(), b"marco", "{address}");
        }
    }
}

#[test]
fn the_client_cannot_reach_the_target_by_itself() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let _echo = chain.target.echo(7).unwrap();
    let error = ask(&chain.client, (chain.egress.far.v4, 7).into(), b"marco").unwrap_err();
    assert_eq!(error.downcast::<std::io::Error>().unwrap().kind(), std::io::ErrorKind::NetworkUnreachable);
}

#[test]
fn a_links_mtu_bounds_what_leaves_unfragmented() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let _echo = chain.relay.echo(7).unwrap();
    chain.access.set_mtu(1280).unwrap();
    let (relay, fits) = ((chain.access.far.v4, 7).into(), 1280 - 20 - 8);
    assert_eq!(ask(&chain.client, relay, &vec![1; fits]).unwrap().len(), fits);
    let error = chain.client.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        set_dont_fragment(&socket);
        socket.send_to(&vec![1; fits + 1], relay).unwrap_err()
    });
    assert_eq!(error.unwrap().raw_os_error(), Some(libc::EMSGSIZE));
}

fn set_dont_fragment(socket: &UdpSocket) {
    set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::DO).expect("an option of every socket");
}

#[test]
fn a_token_bucket_holds_a_link_to_its_rate() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let _echo = chain.relay.echo(7).unwrap();
    let relay = (chain.access.far.v4, 7).into();
    ask(&chain.client, relay, b"resolves the link address first").unwrap();
    // Ten payloads of 1,000 bytes (1,042 in frames). The bucket covers one and a half. The other 8.5 wait 1 ms each at
    // 8 Mbit/s.
    chain.access.near.set_qdisc("tbf rate 8mbit burst 1563 latency 1s").unwrap();
    let begin = std::time::Instant::now();
    chain
        .client
        .run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_read_timeout(Some(SOON)).unwrap();
            for _ in 0..10 {
                socket.send_to(&[0; 1000], relay).unwrap();
            }
            for _ in 0..10 {
                socket.recv(&mut [0; 1000]).unwrap();
            }
        })
        .unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(8), "{:?}", begin.elapsed());
}

#[test]
fn a_namespace_and_its_devices_have_no_settings_of_the_host_for_routes() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let said = chain.relay.run(|| {
        ["ip_forward", "conf/all/rp_filter", "conf/client/rp_filter", "conf/client/accept_redirects"]
            .map(|key| fs::read_to_string(Path::new("/proc/sys/net/ipv4").join(key)).unwrap().trim().to_owned())
    });
    assert_eq!(said.unwrap(), ["0", "0", "0", "1"]);
}

#[test]
fn a_dropped_namespace_is_gone_with_its_devices() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let paths =
        [&chain.client, &chain.relay, &chain.target].map(|namespace| Path::new("/run/netns").join(namespace.name()));
    assert!(paths.iter().all(|path| path.exists()));
    drop(chain);
    assert!(!paths.iter().any(|path| path.exists()));
}

#[test]
fn leftovers_of_a_dead_run_are_removed_with_what_runs_in_them() {
    lab::ring!(Netns);
    // This process removes leftovers with its first namespace, and not in the middle of this test.
    let _first = Namespace::new("client").unwrap();
    // After the wait, no process has this pid.
    let mut dead = Command::new("true").spawn().unwrap();
    dead.wait().unwrap();
    let name = format!("paced-{}-0-client", dead.id());
    let (left, living) =
        (std::env::temp_dir().join(&name), Folder::new(&format!("paced-{}-0-files", std::process::id())));
    fs::create_dir_all(left.join("inner")).unwrap();
    let (file, living) = (left.with_extension("resolv.conf"), living.unwrap());
    fs::write(&file, "").unwrap();
    assert!(Command::new("ip").args(["netns", "add", &name]).status().unwrap().success());
    let mut orphan = KilledOnDrop::start(Command::new("ip").args(["netns", "exec", &name, "sleep", "1000"])).unwrap();
    wait_for("a process in the namespace", SOON, || {
        let pids = Command::new("ip").args(["netns", "pids", &name]).output().unwrap().stdout;
        String::from_utf8(pids).unwrap().contains(&orphan.id().to_string()).then_some(())
    })
    .unwrap();
    remove_leftovers();
    assert!(!Path::new("/run/netns").join(&name).exists());
    assert!(!left.exists() && !file.exists() && living.path().exists());
    let ended = wait_for("the end of the process", SOON, || orphan.try_wait().unwrap());
    assert!(!ended.unwrap().success());

    // The dead run may have had the process ID of this one: the shell becomes a test that makes a namespace of this name.
    let script =
        "ip netns add paced-$$-0-client && exec \"$0\" --exact ring::a_dropped_namespace_is_gone_with_its_devices";
    let output = Command::new("sh").args(["-c", script]).arg(std::env::current_exe().unwrap()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_program_ends_with_its_handle() {
    lab::ring!(Netns);
    let namespace = Namespace::new("client").unwrap();
    let process = namespace.start("sh", ["-c", "readlink /proc/self/ns/net; exec sleep 1000"]).unwrap();
    let inode = process.wait_for_line("net:", SOON).unwrap();
    assert_ne!(Path::new(&inode), fs::read_link("/proc/self/ns/net").unwrap(), "the process runs in its own namespace");
    let folder = Path::new("/proc").join(process.id().to_string());
    assert!(folder.exists());
    drop(process);
    assert!(!folder.exists());
    let process = KilledOnDrop::start(namespace.command("sleep").unwrap().arg("1000")).unwrap();
    let folder = Path::new("/proc").join(process.id().to_string());
    assert!(folder.exists());
    drop(process);
    assert!(!folder.exists());
}

#[test]
fn a_program_sees_the_resolver_that_its_namespace_was_given() {
    lab::ring!(Netns);
    let before = fs::read("/etc/resolv.conf").unwrap();
    let mut namespace = Namespace::new("client").unwrap();
    namespace.resolve_with(&["10.0.1.2".parse().unwrap()]).unwrap();
    let mut cat = namespace.start("cat", ["/etc/resolv.conf"]).unwrap();
    assert!(cat.wait(SOON).unwrap().success());
    assert_eq!(cat.output(), "nameserver 10.0.1.2");
    assert_eq!(fs::read("/etc/resolv.conf").unwrap(), before, "other processes keep the old file");
}

#[test]
fn a_capture_has_udp_packets_in_order_with_their_length() {
    lab::ring!(Netns);
    let namespace = Namespace::new("client").unwrap();
    let packets = namespace.run(|| {
        let capture = Capture::start("lo").unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(socket.local_addr().unwrap()).unwrap();
        for len in [100, 321, 100] {
            socket.send(&vec![0; len]).unwrap();
        }
        capture.read().unwrap()
    });
    let packets = packets.unwrap();
    assert_eq!(packets.iter().map(|packet| packet.frame_bytes).collect::<Vec<_>>(), [142, 363, 142]);
    assert!(packets.is_sorted_by_key(|packet| packet.at_ns));
}
