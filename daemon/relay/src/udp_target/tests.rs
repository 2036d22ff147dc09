use std::{
    future::poll_fn,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Poll, Wake},
    time::Duration,
};

use pacing::descriptor::set_option;
use quic::segments::Segments;
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, ip_mtu_discover, ipv6_mtu_discover};
use tokio::{net::UdpSocket, time::timeout};

use super::*;

#[tokio::test]
async fn a_run_of_equal_sizes_is_one_message_and_keeps_its_order() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let sizes: Vec<usize> = std::iter::repeat_n(1200, 40).chain([7]).collect();
    let counters = send(&target, &payloads(&sizes)).await;
    assert_eq!((counters.sent, counters.messages, counters.sent_bytes), (41, 1, 48_007));
    assert_eq!(receive_at(&peer, 41).await, payloads(&sizes));
}

#[tokio::test]
async fn mixed_sizes_are_split_into_runs_and_empty_payloads_go_alone() {
    for host in loopbacks("mixed_sizes_are_split_into_runs_and_empty_payloads_go_alone") {
        let (peer, target) = pair(host).await;
        let sizes = [100, 100, 50, 200, 0, 0, 1, 300];
        let counters = send(&target, &payloads(&sizes)).await;
        assert_eq!((counters.sent, counters.messages), (8, 6));
        assert_eq!(receive_at(&peer, 8).await, payloads(&sizes));
    }
}

#[tokio::test]
async fn a_flush_makes_no_more_sends_than_it_may_and_leaves_the_rest_in_order() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let sent = payloads(&[0, 0, 300, 300, 300, 0, 0]);
    let (mut queue, mut counters) = (queue_of(&sent), UplinkCounters::default());
    let mut left = Vec::new();
    for may in [0, 1, 2, 1] {
        let mut sends = may;
        assert_eq!(target.flush(&mut queue, &mut sends, &mut counters).unwrap(), Flush::Paused);
        assert_eq!(sends, 0);
        left.push((queue.len(), counters.messages));
    }
    assert_eq!(left, [(7, 0), (6, 1), (2, 3), (1, 4)], "a run of equal sizes is one send");
    let mut sends = 2;
    assert_eq!(target.flush(&mut queue, &mut sends, &mut counters).unwrap(), Flush::Done);
    assert_eq!((sends, receive_at(&peer, 7).await), (1, sent));
}

#[tokio::test]
async fn batches_from_the_target_arrive_joined_and_are_split_again() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let address = target.raw().local_addr().unwrap();
    peer.connect(address.as_socket().unwrap()).await.unwrap();
    let sizes: Vec<usize> = std::iter::repeat_n(1000, 30).chain([1]).collect();
    let batch = payloads(&sizes).concat();
    let control = socket::segment_size_message(1000);
    let slices = [std::io::IoSlice::new(&batch)];
    let message = socket2::MsgHdr::new().with_buffers(&slices).with_control(&control);
    socket2::SockRef::from(&peer).sendmsg(&message, 0).unwrap();
    let (got, received) = receive(&target).await.unwrap();
    assert_eq!(got, payloads(&sizes));
    assert_eq!((received.payloads, received.messages, received.bytes), (31, 1, 30_001));
    assert!(!received.more);
}

#[tokio::test]
async fn empty_payloads_come_in_as_payloads() {
    for host in loopbacks("empty_payloads_come_in_as_payloads") {
        let (peer, target) = pair(host).await;
        let address = target.raw().local_addr().unwrap().as_socket().unwrap();
        for payload in [&b"a"[..], b"", b"b"] {
            peer.send_to(payload, address).await.unwrap();
        }
        let (got, _) = receive(&target).await.unwrap();
        assert_eq!(got, [b"a".to_vec(), vec![], b"b".to_vec()]);
    }
}

#[tokio::test]
async fn the_latest_tunnel_of_a_socket_receives_and_after_its_end_the_one_before_it_which_is_woken() {
    struct Woken(AtomicUsize);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }
    let woken = Arc::new(Woken(AtomicUsize::new(0)));
    let waker = || woken.clone().into();
    let (peer, earlier) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let address = earlier.raw().local_addr().unwrap().as_socket().unwrap();
    earlier.receive(waker);
    let later = earlier.origin().target().unwrap();
    assert!(earlier.receives() && !later.receives(), "it is not open yet");
    assert!(!earlier.must_mark() && !later.must_mark(), "the socket was marked when it was made");
    later.receive(waker);
    assert!(later.must_mark() && !later.must_mark());
    peer.send_to(b"answer", address).await.unwrap();
    assert_eq!(receive(&later).await.unwrap().0, [b"answer".to_vec()]);

    let latest = later.origin().target().unwrap();
    latest.receive(waker);
    drop(later);
    assert!(latest.receives(), "one between them has ended");
    earlier.receive(waker);
    assert!(earlier.receives() && !latest.receives(), "its client sends again");
    latest.receive(waker);
    assert_eq!(woken.0.load(Relaxed), 0);
    drop(latest);
    assert_eq!((earlier.receives(), woken.0.load(Relaxed)), (true, 1));
    assert!(earlier.must_mark(), "the socket has the marks of a tunnel that has ended");
    peer.send_to(b"more", address).await.unwrap();
    assert_eq!(receive(&earlier).await.unwrap().0, [b"more".to_vec()]);
}

#[tokio::test]
async fn few_tunnels_share_a_socket_which_stays_open_for_the_last_of_them() {
    let (_peer, first) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let origin = first.origin().clone();
    let noop = || std::task::Waker::noop().clone();
    first.receive(noop);
    let mut others = Vec::new();
    while let Some(other) = origin.target() {
        other.receive(noop);
        others.push(other);
        assert!(others.len() < 10, "each packet wakes the threads of all of them");
    }
    drop(first);
    others.truncate(1);
    assert_eq!(send(&others[0], &payloads(&[10])).await.sent, 1);
    others.clear();
    assert!(origin.target().is_none(), "all have ended");
}

#[tokio::test]
async fn one_call_delivers_a_bounded_share_and_says_that_more_waits() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let address = target.raw().local_addr().unwrap().as_socket().unwrap();
    for n in 0..20u8 {
        peer.send_to(&[n], address).await.unwrap();
    }
    let (first, received) = receive(&target).await.unwrap();
    assert!(received.more && first.len() == 16);
    let (rest, received) = receive(&target).await.unwrap();
    assert!(!received.more);
    assert_eq!([first, rest].concat(), (0..20).map(|n| vec![n]).collect::<Vec<_>>());
}

#[tokio::test]
async fn the_largest_payload_passes_and_a_larger_one_is_dropped_alone() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let sizes = [10, 65_508, 65_507, 10];
    let counters = send(&target, &payloads(&sizes)).await;
    assert_eq!((counters.sent, counters.dropped_too_big), (3, 1));
    let expected: Vec<_> = payloads(&sizes).into_iter().filter(|payload| payload.len() != 65_508).collect();
    assert_eq!(receive_at(&peer, 3).await, expected);
}

#[tokio::test]
async fn a_batch_the_device_refuses_is_sent_singly_and_nothing_is_lost() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    // The kernel cannot segment without checksums: it answers a GSO message with EINVAL, as for some devices with EIO.
    set_option(target.raw(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    let sizes = [500, 500, 500];
    let counters = send(&target, &payloads(&sizes)).await;
    assert_eq!((counters.sent, counters.messages, counters.gso_refused), (3, 3, 1));
    assert_eq!(receive_at(&peer, 3).await, payloads(&sizes));
    let counters = send(&target, &payloads(&sizes)).await;
    assert_eq!((counters.sent, counters.messages, counters.gso_refused), (3, 3, 0), "it is not tried again");
}

#[tokio::test]
async fn a_closed_port_ends_a_sending_tunnel_when_a_send_or_a_receive_reads_the_error() {
    for host in loopbacks("a_closed_port_ends_a_sending_tunnel_when_a_send_or_a_receive_reads_the_error") {
        for is_listening in [false, true] {
            let (peer, target) = pair(host).await;
            drop(peer);
            let began = tokio::time::Instant::now();
            let ended = async {
                loop {
                    let (mut queue, mut counters) = (queue_of(&payloads(&[1])), UplinkCounters::default());
                    if let Err(error) = target.flush(&mut queue, &mut { ALL }, &mut counters) {
                        return error;
                    }
                    if is_listening
                        && let Ok(Err(error)) = timeout(Duration::from_millis(50), try_receive(&target)).await
                    {
                        return error;
                    }
                    tokio::task::yield_now().await;
                }
            };
            let error = timeout(SOON, ended).await.expect("the tunnel ends");
            assert!(matches!(error, TargetError::Refused), "{error:?}");
            assert!(began.elapsed() >= reachability::SILENT, "after {:?}", began.elapsed());
        }
    }
}

#[tokio::test]
async fn a_port_that_is_closed_for_a_moment_costs_payloads_and_not_the_tunnel() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let address = peer.local_addr().unwrap();
    drop(peer);
    for _ in 0..10 {
        send(&target, &payloads(&[1, 1, 1])).await;
    }
    let peer = UdpSocket::bind(address).await.unwrap();
    let counters = send(&target, &payloads(&[5, 5, 5])).await;
    assert_eq!((counters.sent, counters.messages), (3, 1), "an error about earlier payloads splits no run");
    assert_eq!(receive_at(&peer, 3).await, payloads(&[5, 5, 5]));
}

#[tokio::test]
async fn an_icmp_error_ends_no_tunnel_at_once_even_if_its_explanation_was_read_before() {
    let (_peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    for errno in [
        libc::ECONNREFUSED,
        libc::ENETUNREACH,
        libc::EHOSTUNREACH,
        libc::EHOSTDOWN,
        libc::ENONET,
        libc::EACCES,
        libc::ENOPROTOOPT,
        libc::EOPNOTSUPP,
        libc::EPROTO,
        libc::EMSGSIZE,
    ] {
        for _ in 0..10 {
            let error = std::io::Error::from_raw_os_error(errno);
            assert!(target.judge(error).is_ok(), "{}", std::io::Error::from_raw_os_error(errno));
        }
    }
    let closed = std::io::Error::from_raw_os_error(libc::EBADF);
    assert!(matches!(target.judge(closed), Err(TargetError::Socket(_))));
}

#[tokio::test]
async fn a_foreign_senders_packet_never_arrives() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    let address = target.raw().local_addr().unwrap().as_socket().unwrap();
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    // The kernel answers the stranger as if the port were closed, which may surface as an error of this send or of the
    // next.
    let _ = stranger.send_to(b"foreign", address).await;
    peer.send_to(b"own", address).await.unwrap();
    let (got, _) = receive(&target).await.unwrap();
    assert_eq!(got, [b"own".to_vec()]);
}

#[tokio::test]
async fn a_full_socket_blocks_and_loses_nothing() {
    // Loopback releases the sender's buffer at once and never blocks; datagrams of a socket pair hold it until they
    // are read.
    let kind = socket2::Type::DGRAM.nonblocking();
    let (near, far) = socket2::Socket::pair(socket2::Domain::UNIX, kind, None).unwrap();
    near.set_send_buffer_size(1).unwrap();
    let target = UdpTarget::register(near).unwrap();
    let far = tokio::net::UnixDatagram::from_std(far.into()).unwrap();
    // Each is longer than the one before, so that each is a run of its own.
    let sent = payloads(&(0..200).collect::<Vec<_>>());
    let (mut queue, mut counters) = (queue_of(&sent), UplinkCounters::default());
    let (mut got, mut blocked, mut buffer) = (Vec::new(), 0, [0; 200]);
    while target.flush(&mut queue, &mut { ALL }, &mut counters).unwrap() == Flush::Blocked {
        blocked += 1;
        assert_eq!(queue.len() as u64 + counters.sent, 200);
        let waits = poll_fn(|cx| Poll::Ready(target.poll_writable(cx).is_pending())).await;
        assert!(waits, "a blocked socket is not writable until the other side has read");
        far.readable().await.unwrap();
        while let Ok(len) = far.try_recv(&mut buffer) {
            got.push(buffer[..len].to_vec());
        }
        timeout(SOON, poll_fn(|cx| target.poll_writable(cx))).await.unwrap().unwrap();
    }
    while got.len() < sent.len() {
        let len = timeout(SOON, far.recv(&mut buffer)).await.unwrap().unwrap();
        got.push(buffer[..len].to_vec());
    }
    assert!(blocked > 0 && got == sent);
}

/// Fills the buffer of one end of a socket pair; returns it with what is left to send, and the other end.
fn filled() -> (UdpTarget, Segments, socket2::Socket) {
    let kind = socket2::Type::DGRAM.nonblocking();
    let (near, far) = socket2::Socket::pair(socket2::Domain::UNIX, kind, None).unwrap();
    near.set_send_buffer_size(1).unwrap();
    let target = UdpTarget::register(near).unwrap();
    let mut queue = queue_of(&payloads(&(0..200).collect::<Vec<_>>()));
    assert_eq!(target.flush(&mut queue, &mut { ALL }, &mut UplinkCounters::default()).unwrap(), Flush::Blocked);
    (target, queue, far)
}

#[tokio::test]
async fn the_second_descriptor_is_kept_until_the_queue_is_empty() {
    let (target, mut queue, far) = filled();
    let mut counters = UplinkCounters::default();
    let mut blocked = 0;
    while target.flush(&mut queue, &mut { ALL }, &mut counters).unwrap() == Flush::Blocked {
        blocked += 1;
        assert_eq!(target.room.borrow().is_open(), blocked > 1);
        while far.recv(&mut []).is_ok() {}
        timeout(SOON, poll_fn(|cx| target.poll_writable(cx))).await.unwrap().unwrap();
    }
    assert!(blocked > 1, "{blocked}");
    assert!(!target.room.borrow().is_open(), "an empty queue needs no descriptor");
}

#[tokio::test]
async fn the_room_that_a_payload_leaves_in_the_socket_is_not_reported_unless_a_send_was_blocked() {
    let (peer, target) = pair(Ipv4Addr::LOCALHOST.into()).await;
    send(&target, &payloads(&[10])).await;
    receive_at(&peer, 1).await;
    // The answer takes a turn of the runtime. That turn would have noticed the room.
    peer.send_to(b"answer", target.raw().local_addr().unwrap().as_socket().unwrap()).await.unwrap();
    receive(&target).await.unwrap();
    let reported = poll_fn(|cx| Poll::Ready(target.fd.poll_write_ready(cx).is_ready())).await;
    assert!(!reported);
    timeout(SOON, poll_fn(|cx| target.poll_writable(cx))).await.unwrap().unwrap();
}

#[tokio::test]
async fn packets_carry_df_and_no_ecn_and_mapped_addresses_are_ipv4() {
    let mapped = SocketAddr::new(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(), 9);
    let target = UdpTarget::connect(mapped, None, SocketBuffers::default()).unwrap();
    let socket = target.raw();
    assert!(socket.peer_addr().unwrap().is_ipv4());
    assert_eq!(ip_mtu_discover(socket).unwrap(), Ipv4PathMtuDiscovery::PROBE);
    assert_eq!(socket.tos_v4().unwrap(), 0);
    for host in
        loopbacks("packets_carry_df_and_no_ecn_and_mapped_addresses_are_ipv4").into_iter().filter(IpAddr::is_ipv6)
    {
        let target = UdpTarget::connect((host, 9).into(), None, SocketBuffers::default()).unwrap();
        assert_eq!(ipv6_mtu_discover(target.raw()).unwrap(), Ipv6PathMtuDiscovery::INTERFACE);
        assert_eq!(target.raw().tclass_v6().unwrap(), 0);
    }
}

/// The loopback addresses of this host. Without IPv6, reports that part of a test as skipped.
fn loopbacks(test: &str) -> Vec<IpAddr> {
    let (v4, v6) = (IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST));
    if std::net::UdpSocket::bind((v6, 0)).is_ok() {
        return vec![v4, v6];
    }
    // Past the harness, which would keep the line from the runner (`tests/run`).
    std::io::stderr().write_all(format!("\nskipped: {test}: this host has no IPv6\n").as_bytes()).unwrap();
    vec![v4]
}

/// More sends than any test makes at once.
const ALL: usize = usize::MAX;

/// Far longer than loopback needs; only a failing test waits for it.
const SOON: Duration = Duration::from_secs(10);

/// An unconnected socket on `host`, and a target connected to it.
async fn pair(host: IpAddr) -> (UdpSocket, UdpTarget) {
    let peer = UdpSocket::bind((host, 0)).await.unwrap();
    let target = UdpTarget::connect(peer.local_addr().unwrap(), None, SocketBuffers::default()).unwrap();
    (peer, target)
}

/// Payloads of the given sizes, each filled with its number.
fn payloads(sizes: &[usize]) -> Vec<Vec<u8>> {
    sizes.iter().enumerate().map(|(n, &len)| vec![n as u8; len]).collect()
}

fn queue_of(payloads: &[Vec<u8>]) -> Segments {
    let mut queue = Segments::new(1 << 20);
    assert_eq!(payloads.iter().map(|payload| queue.push(payload)).sum::<usize>(), 0);
    queue
}

async fn send(target: &UdpTarget, payloads: &[Vec<u8>]) -> UplinkCounters {
    let (mut queue, mut counters) = (queue_of(payloads), UplinkCounters::default());
    while target.flush(&mut queue, &mut { ALL }, &mut counters).unwrap() == Flush::Blocked {
        poll_fn(|cx| target.poll_writable(cx)).await.unwrap();
    }
    counters
}

async fn receive_at(peer: &UdpSocket, count: usize) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; 1 << 16];
    let mut got = Vec::new();
    while got.len() < count {
        let len = timeout(SOON, peer.recv(&mut buffer)).await.unwrap().unwrap();
        got.push(buffer[..len].to_vec());
    }
    got
}

async fn receive(target: &UdpTarget) -> Result<(Vec<Vec<u8>>, Received), TargetError> {
    timeout(SOON, try_receive(target)).await.expect("no payload arrived")
}

async fn try_receive(target: &UdpTarget) -> Result<(Vec<Vec<u8>>, Received), TargetError> {
    let mut got = Vec::new();
    let received = poll_fn(|cx| target.poll_recv(cx, |payload| got.push(payload.to_vec()))).await?;
    Ok((got, received))
}
