//! The sk_reuseport program.

use std::{net::UdpSocket, time::Duration};

use admission::connection_id::{IdLabel, Keys};
use bpf::steer::Steer;
use lab::netns::Namespace;
use socket2::{Domain, Socket, Type};

const KEYS: Keys = Keys { tag: *b"the key of a tag", mask: *b"that of the mask" };
const WORKERS: u8 = 4;

/// Sockets that share one address, one per worker.
fn workers() -> Vec<UdpSocket> {
    let mut address = "127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap();
    (0..WORKERS)
        .map(|_| {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
            socket.set_reuse_port(true).unwrap();
            socket.bind(&address.into()).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            address = socket.local_addr().unwrap().as_socket().unwrap();
            socket.into()
        })
        .collect()
}

/// The worker at which a payload arrives.
fn arrives_at(workers: &[UdpSocket], from: &UdpSocket, payload: &[u8]) -> u8 {
    from.send_to(payload, workers[0].local_addr().unwrap()).unwrap();
    workers.iter().for_each(|worker| worker.set_nonblocking(true).unwrap());
    let receive = || (0..WORKERS).find(|worker| workers[usize::from(*worker)].recv(&mut [0; 2048]).is_ok());
    lab::process::wait_for("the payload", Duration::from_secs(10), receive).unwrap()
}

fn packet(first: u8, config: u8, worker: u8) -> Vec<u8> {
    let id = KEYS.seal(config, [worker, 7, 7, 7, first], IdLabel { class: 0, worker });
    let head = if first & 0x80 == 0 { vec![first] } else { vec![first, 0, 0, 0, 1, id.len() as u8] };
    [&head, &id[..], &[0xab; 30]].concat()
}

/// Runs `scenario` in a new namespace, with workers among which the keys of config 3 steer packets.
fn steered(scenario: impl FnOnce(&[UdpSocket]) + Send) {
    let namespace = Namespace::new("workers").unwrap();
    namespace
        .run(|| {
            let workers = workers();
            let _steer = Steer::attach(&workers, &[(3, KEYS.into())]).unwrap();
            scenario(&workers);
        })
        .unwrap();
}

#[test]
fn packets_go_to_the_worker_in_their_connection_id_wherever_they_come_from() {
    lab::ring!(Netns);
    steered(|workers| {
        for _ in 0..10 {
            let from = UdpSocket::bind("127.0.0.1:0").unwrap();
            for worker in 0..WORKERS {
                for first in [0x40, 0xc0, 0xe0] {
                    assert_eq!(arrives_at(workers, &from, &packet(first, 3, worker)), worker, "{first:#x}");
                }
            }
        }
    });
}

#[test]
fn packets_whose_payload_is_not_in_the_linear_part_are_steered_as_well() {
    lab::ring!(Netns);
    steered(|workers| {
        for _ in 0..10 {
            let from = UdpSocket::bind("127.0.0.1:0").unwrap();
            // The kernel then fragments payloads (net/ipv4/ip_output.c), even payloads of a single segment.
            pacing::descriptor::set_option(&from, libc::SOL_UDP, libc::UDP_SEGMENT, 1_200).unwrap();
            for worker in 0..WORKERS {
                assert_eq!(arrives_at(workers, &from, &packet(0x40, 3, worker)), worker);
            }
        }
    });
}

#[test]
fn sockets_that_outlive_a_process_are_steered_for_the_next_one() {
    lab::ring!(Netns);
    let namespace = Namespace::new("workers").unwrap();
    namespace
        .run(|| {
            let workers = workers();
            // As when the service manager keeps the sockets open: the program stays attached, and they stay in its
            // table.
            drop(Steer::attach(&workers, &[(2, KEYS.into())]).unwrap());
            let _next = Steer::attach(&workers, &[(3, KEYS.into())]).unwrap();
            let from = UdpSocket::bind("127.0.0.1:0").unwrap();
            for worker in 0..WORKERS {
                assert_eq!(arrives_at(&workers, &from, &packet(0x40, 3, worker)), worker);
            }
        })
        .unwrap();
}

#[test]
fn everything_else_goes_by_its_addresses() {
    lab::ring!(Netns);
    steered(|workers| {
        let mut chosen = [0; WORKERS as usize];
        for _ in 0..100 {
            let from = UdpSocket::bind("127.0.0.1:0").unwrap();
            let first = arrives_at(workers, &from, b"a payload that is no packet of ours");
            chosen[usize::from(first)] += 1;
            // With another config, for a missing worker, too short, with an ID of another length.
            let [mut long, none, other] = [packet(0xc0, 3, 1), packet(0x40, 3, 200), packet(0x40, 2, 1)];
            long[5] = 8;
            for payload in [long, none, other, packet(0x40, 3, 1)[..12].to_vec(), Vec::new()] {
                assert_eq!(arrives_at(workers, &from, &payload), first, "always the same worker for one sender");
            }
        }
        assert!(chosen.iter().all(|count| *count > 0), "{chosen:?}");
    });
}
