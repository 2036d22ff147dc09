//! What the relay does at the ends of tunnels: its pumps, over a simulated network, toward real sockets of the loopback device. The kernel
//! does not follow virtual time, so no tunnel here waits for its socket.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    future::poll_fn,
    io::{ErrorKind, Read as _},
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::stopped::{READER_PATIENCE, ReaderOwner};
use config::targets::Protocol;
use lab::{
    client::Tunnel,
    simulation::{CLOCK, Ends, SEED, accept, simulate_served, target, within},
};
use masque::{
    h3::{Code, Part, data_frame},
    request::TunnelProtocol,
    tunnel::Form,
};
use quic::{
    cap::UserRate,
    class::{Membership, Terms},
    h3::{self, Request},
};
use relay::{
    udp::UdpPump,
    udp_target::{SocketBuffers, UdpTarget},
};
use role::{
    gate::Gate,
    tcp::{End, TcpPump},
    traffic::Traffic,
    tunnel::UdpTunnel,
};
use s2n_quic::provider::io::testing::{Model, spawn, time};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    runtime::{Builder, Runtime},
};

/// Longer than any expected event takes.
const LONG: Duration = Duration::from_secs(60);

const QUEUE_BYTES: usize = 16 << 20;

fn network() -> Model {
    let model = Model::default();
    model.set_delay(Duration::from_millis(10));
    model
}

/// The runtime of the relay's sockets.
fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn gate(protocol: Protocol) -> Gate {
    Gate::new(Membership::default(), Arc::default(), true, protocol)
}

#[test]
fn a_flood_of_empty_payloads_leaves_other_tasks_their_turns() {
    const PAYLOADS: u64 = 3_000;
    let runtime = runtime();
    let _entered = runtime.enter();
    let sink = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = sink.local_addr().unwrap();
    for form in [Form::Datagram, Form::Capsule] {
        let (sent, most) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let counts = (sent.clone(), most.clone());
        let serve = move |mut request: Request, client: h3::Client| {
            let (sent, most) = counts.clone();
            async move {
                let Ok(Some(TunnelProtocol::Udp)) = accept(&mut request, &client).await else { return };
                let target = UdpTarget::connect(to, None, SocketBuffers::default()).unwrap();
                let traffic = Arc::<Traffic>::default();
                let (of, gate) = ((request, client), gate(Protocol::Udp));
                let pump = UdpPump::new(of, target, gate, traffic.clone(), QUEUE_BYTES, LONG, Arc::default());
                let mut running = pin!(pump.run());
                // All have arrived before its first turn.
                time::delay(Duration::from_secs(2)).await;
                poll_fn(|cx| {
                    let polled = running.as_mut().poll(cx);
                    let now = traffic.moved().0.packets;
                    most.fetch_max(now - sent.swap(now, Relaxed), Relaxed);
                    polled
                })
                .await;
            }
        };
        let scenario = move |ends: Ends| async move {
            let mut tunnel = ends.relay.open_udp(&target()).await.unwrap().tunnel;
            {
                let mut batch = tunnel.batch(Some(form));
                (0..PAYLOADS).for_each(|_| batch.push(b""));
            }
            time::delay(Duration::from_secs(4)).await;
            assert_eq!(sent.load(Relaxed), PAYLOADS, "all are sent as {form:?}");
            let most = most.load(Relaxed);
            assert!((200..=256).contains(&most), "{most} sends in one turn as {form:?}");
        };
        simulate_served(&network(), SEED, serve, scenario).unwrap();
    }
}

/// How the end of a tunnel goes on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum After {
    /// The client reads what waits.
    Reads,
    /// The client reads nothing.
    Keeps,
    /// The client reads nothing, and someone ends the wait.
    Cut,
}

#[test]
fn unread_payloads_of_an_ended_tunnel_are_kept_only_for_a_while() {
    /// More than the client's window for a stream.
    const PAYLOADS: usize = 4_000;
    const LIMIT: Duration = Duration::from_secs(10);
    for after in [After::Reads, After::Keeps, After::Cut] {
        let took_ms = Arc::<AtomicU64>::default();
        let took = took_ms.clone();
        let serve = move |mut request: Request, client: h3::Client| {
            let took_ms = took.clone();
            async move {
                let Ok(Some(TunnelProtocol::Udp)) = accept(&mut request, &client).await else { return };
                let mut tunnel = UdpTunnel::new(request, true, QUEUE_BYTES);
                {
                    let mut batch = tunnel.batch(Some(Form::Capsule));
                    (0..PAYLOADS).for_each(|_| batch.push(&[1; 1_000]));
                }
                let begun_ns = (CLOCK.now_ns)();
                let patience = if after == After::Cut { Duration::from_secs(1) } else { LONG };
                _ = within(patience, tunnel.finish_within(LIMIT)).await;
                took_ms.store(((CLOCK.now_ns)() - begun_ns) / 1_000_000, Relaxed);
            }
        };
        let scenario = move |ends: Ends| async move {
            let mut tunnel = Tunnel::new(ends.relay.open_udp(&target()).await.unwrap().tunnel);
            let mut received = 0;
            if after == After::Reads {
                while tunnel.recv().await.expect("the tunnel ends properly").is_some() {
                    received += 1;
                }
                assert_eq!(received, PAYLOADS);
            }
            time::delay(Duration::from_secs(12)).await;
            assert_eq!(ends.server.streams.get(), 0, "nothing of it is left: {after:?}");
            let took_ms = took_ms.load(Relaxed);
            match after {
                After::Reads => assert!(took_ms < 9_000, "{took_ms} ms"),
                After::Keeps => assert!((10_000..10_010).contains(&took_ms), "{took_ms} ms"),
                After::Cut => assert!((1_000..1_010).contains(&took_ms), "{took_ms} ms"),
            }
            if after != After::Reads {
                let ended = loop {
                    match tunnel.recv().await {
                        Ok(payload) => assert!(payload.is_some(), "a part of the capsules is not taken for all"),
                        Err(error) => break error,
                    }
                };
                assert_eq!(ended.code(), Code::RequestCancelled, "{ended:?}");
            }
        };
        simulate_served(&network(), SEED, serve, scenario).unwrap();
    }
}

#[test]
fn the_last_bytes_of_a_tunnel_that_a_rate_has_just_let_go_have_time_to_arrive() {
    const LIMIT: Duration = Duration::from_secs(10);
    /// Turns of 1,200 bytes, of which the last leaves 9.6 s after the first one.
    const BYTES: usize = 8 * 1_200 + 100;
    let network = network();
    let lossy = network.clone();
    let serve = move |mut request: Request, client: h3::Client| {
        let network = lossy.clone();
        async move {
            let Ok(Some(TunnelProtocol::Tcp)) = accept(&mut request, &client).await else { return };
            let user = Arc::<UserRate>::default();
            user.set(Some(1_000), None);
            request.send.set_terms(Terms { user: Some(user), ..Terms::default() });
            request.send.push(data_frame(&[1; BYTES]));
            spawn(async move {
                // The last turn is lost, and cannot be sent again before the first limit is over.
                time::delay(Duration::from_millis(9_300)).await;
                network.set_drop_rate(1.0);
                time::delay(Duration::from_secs(1)).await;
                network.set_drop_rate(0.0);
            });
            request.send.finish_within(LIMIT).await;
        }
    };
    let scenario = |ends: Ends| async move {
        let mut request = ends.relay.open_tcp(&target(), None).await.unwrap();
        let mut received = 0;
        while let Some(part) = request.recv.part().await.expect("the tunnel ends properly") {
            received += if let Part::Data(bytes) = part { bytes.len() } else { 0 };
        }
        assert_eq!(received, BYTES);
    };
    simulate_served(&network, SEED, serve, scenario).unwrap();
}

/// How a client ends a TCP tunnel although its target is silent.
#[derive(Clone, Copy, Debug)]
enum Ending {
    /// It asks the relay to send no more.
    StopsReading,
    /// It sends a datagram.
    SendsDatagram,
}

#[test]
fn a_client_ends_a_tcp_tunnel_whose_target_is_silent() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    for ending in [Ending::StopsReading, Ending::SendsDatagram] {
        let end = Arc::<Mutex<Option<End>>>::default();
        let ended = end.clone();
        let serve = move |mut request: Request, client: h3::Client| {
            let end = ended.clone();
            async move {
                let Ok(Some(TunnelProtocol::Tcp)) = accept(&mut request, &client).await else { return };
                let socket = TcpStream::connect(to).unwrap();
                socket.set_nonblocking(true).unwrap();
                let socket = tokio::net::TcpStream::from_std(socket).unwrap();
                let of = (&client, ReaderOwner::Address(to.ip()));
                let pump = TcpPump::new(request, of, socket, gate(Protocol::Tcp), Arc::default());
                let ended = pump.run(LONG, |_, _, _| {}).await;
                *end.lock().unwrap() = Some(ended);
            }
        };
        let mut silent = None;
        let accepted = listener.try_clone().unwrap();
        let scenario = move |ends: Ends| async move {
            let request = ends.relay.open_tcp(&target(), None).await.unwrap();
            let (mut peer, _) = accepted.accept().unwrap();
            peer.set_read_timeout(Some(LONG)).unwrap();
            let Request { recv, mut send, flow, .. } = request;
            let code = match ending {
                Ending::StopsReading => {
                    recv.stop(Code::RequestCancelled);
                    Code::ConnectError
                }
                Ending::SendsDatagram => {
                    silent = Some(recv);
                    flow.batch().push(b"of no use");
                    Code::DatagramError
                }
            };
            time::delay(Duration::from_secs(1)).await;
            let end = end.lock().unwrap().take();
            assert!(matches!(end, Some(End::Failed(_))), "{ending:?}: {end:?}");
            let stopped = poll_fn(|cx| std::task::Poll::Ready(send.poll_stopped(cx))).await.unwrap_err();
            assert_eq!(stopped.reset_code(), Some(code.value()), "{ending:?}: {stopped:?}");
            assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset, "{ending:?}");
            drop(silent);
        };
        simulate_served(&network(), SEED, serve, scenario).unwrap();
    }
}

#[test]
fn a_finished_upload_whose_last_bytes_had_to_wait_for_the_target_keeps_its_tunnel_while_the_answer_takes_long() {
    /// One more tunnel than a connection has room for, if no target reads.
    const TUNNELS: usize = 14;
    const BYTES: usize = 16 << 10;
    // The relay's patience runs on this clock, which the test advances.
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let _entered = runtime.enter();
    let (targets, ends) = (Arc::<Mutex<Vec<DuplexStream>>>::default(), Arc::<Mutex<Vec<End>>>::default());
    let (opened, ended) = (targets.clone(), ends.clone());
    let serve = move |mut request: Request, client: h3::Client| {
        let (targets, ends) = (opened.clone(), ended.clone());
        async move {
            let Ok(Some(TunnelProtocol::Tcp)) = accept(&mut request, &client).await else { return };
            let (socket, target) = duplex(BYTES / 4);
            targets.lock().unwrap().push(target);
            let of = (&client, ReaderOwner::Address(Ipv4Addr::LOCALHOST.into()));
            let pump = TcpPump::new(request, of, socket, gate(Protocol::Tcp), Arc::default());
            let end = pump.run(LONG, |_, _, _| {}).await;
            ends.lock().unwrap().push(end);
        }
    };
    let scenario = move |relay: Ends| async move {
        let mut requests = Vec::new();
        for _ in 0..TUNNELS {
            let mut request = relay.relay.open_tcp(&target(), None).await.unwrap();
            request.send.push(data_frame(&[7; BYTES]));
            request.send.finish();
            requests.push(request);
        }
        time::delay(Duration::from_secs(1)).await;
        let mut targets = std::mem::take(&mut *targets.lock().unwrap());
        assert_eq!(targets.len(), TUNNELS);
        for target in &mut targets {
            let mut received = Vec::new();
            target.read_to_end(&mut received).await.unwrap();
            assert_eq!(received.len(), BYTES);
        }
        for _ in 0..3 * READER_PATIENCE.as_secs() {
            runtime.block_on(tokio::time::advance(Duration::from_secs(1)));
            time::delay(Duration::from_millis(100)).await;
        }
        assert_eq!(ends.lock().unwrap().len(), 0);
        for target in &mut targets {
            target.write_all(b"answer").await.unwrap();
        }
        drop(targets);
        for mut request in requests {
            let Some(Part::Data(bytes)) = request.recv.part().await.unwrap() else { panic!("no answer came") };
            assert_eq!(&bytes[..], b"answer");
        }
        time::delay(Duration::from_secs(1)).await;
        let ends = ends.lock().unwrap();
        assert!(ends.len() == TUNNELS && ends.iter().all(|end| matches!(end, End::Finished)), "{ends:?}");
    };
    simulate_served(&network(), SEED, serve, scenario).unwrap();
}
