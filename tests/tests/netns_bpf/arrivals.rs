//! XDP ingress: arriving packets are counted by class, and under overload the lowest classes are shed first.

use admission::connection_id::IdLabel;
use bpf::ingress::{Arrivals, Guard, GuardReason, GuardedListener, Ingress};
use lab::{
    client::Client,
    frame::Frame,
    site::{Family, SOON, Site, Terms},
};

use super::ingress::{CONFIG, INITIAL, KEYS, VERSION_1, few, generous, judge, long, short};

/// A packet of 40 bytes on a connection of this class.
fn of_class(class: u8) -> Vec<u8> {
    Frame::v4(&short(&KEYS.seal(CONFIG, [9; 5], IdLabel { class, worker: 0 }), 40)).bytes()
}

/// How many of a hundred packets of this class pass.
fn passing(program: &(Ingress, Guard), class: u8) -> usize {
    let packet = of_class(class);
    let reasons: Vec<_> = (0..100).map(|_| judge(program, &packet).1.unwrap()).collect();
    let passed = reasons.iter().take_while(|reason| **reason == GuardReason::Connection).count();
    assert!(reasons[passed..].iter().all(|reason| *reason == GuardReason::ArrivalsLimit), "{reasons:?}");
    passed
}

#[test]
fn packets_count_for_the_class_in_their_id_and_others_for_that_of_their_listener() {
    lab::ring!(Netns);
    let (ingress, mut guard) = generous();
    guard
        .listen([
            GuardedListener { address: Frame::v4(&[]).to, class: 7 },
            GuardedListener { address: Frame::v6(&[]).to, class: 255 },
        ])
        .unwrap();
    let program = (ingress, guard);
    let [first, nonsense] = [long(INITIAL, VERSION_1, b"by a client", 1_200), vec![0x80; 30]];
    for (frame, class, arrived) in [
        (of_class(3), 3, Arrivals { packets: 1, bytes: 40, shed_packets: 0 }),
        (of_class(200), 200, Arrivals { packets: 1, bytes: 40, shed_packets: 0 }),
        (Frame::v4(&first).bytes(), 7, Arrivals { packets: 1, bytes: 1_200, shed_packets: 0 }),
        (Frame::v6(&first).bytes(), 255, Arrivals { packets: 1, bytes: 1_200, shed_packets: 0 }),
        // A packet that is dropped for another reason does not count as an arrival.
        (Frame::v4(&nonsense).bytes(), 7, Arrivals { packets: 1, bytes: 1_200, shed_packets: 0 }),
    ] {
        judge(&program, &frame);
        assert_eq!(program.1.arrivals(class).unwrap(), arrived, "class {class}");
    }
}

#[test]
fn the_lowest_class_is_shed_first_and_the_highest_last_under_too_many_arrivals() {
    lab::ring!(Netns);
    let mut program = generous();
    // The highest class may use 30 in a row, the next 20, the lowest 10. A class without a rank counts as the lowest.
    program.1.set_arrivals(Some(few(29)), &[(5, 2), (1, 0), (2, 1)]).unwrap();
    assert_eq!([1, 77, 2, 1, 5, 2].map(|class| passing(&program, class)), [10, 0, 10, 0, 10, 0]);
    let shed = program.1.arrivals(1).unwrap();
    assert_eq!((shed.packets, shed.shed_packets), (200, 190));
    program.1.set_arrivals(None, &[(5, 2)]).unwrap();
    assert_eq!([1, 5].map(|class| passing(&program, class)), [100; 2], "without a limit, nothing is shed");
}

#[test]
fn classes_of_one_rank_are_shed_alike() {
    lab::ring!(Netns);
    let mut program = generous();
    program.1.set_arrivals(Some(few(9)), &[(1, 0), (2, 0)]).unwrap();
    assert_eq!([1, 2, 0].map(|class| passing(&program, class)), [10, 0, 0]);
}

#[test]
fn connections_are_of_the_class_of_their_listener_and_new_ones_of_another_after_a_reload() {
    lab::ring!(Netns);
    const SECTIONS: &str = "[kernel]\ndevices = [\"client\", \"target\"]\n[class.voice]\n[class.bulk]";
    let of = |relay| Terms { relay, sections: SECTIONS, ..Terms::default() };
    let site = Site::new(of("auth = \"none\"\nclass = \"voice\"")).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let arrived =
        |class: &str| site.counts().unwrap().of(&format!("kernel_arrived_packets_total{{class=\"{class}\"}}"));
    let use_it = || {
        site.client(async || {
            let client = Client::connect(site.access(Family::V6).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(Family::V6, 7)).await.unwrap();
            for number in 0..20_u8 {
                assert_eq!(tunnel.echo(None, &[number; 100]).await, [number; 100]);
            }
        })
        .unwrap();
    };
    use_it();
    assert!(arrived("voice") >= 20);
    assert_eq!((arrived("bulk"), arrived("default")), (0, 0));
    site.configure(of("auth = \"none\"\nclass = \"bulk\"")).unwrap();
    site.signal(libc::SIGHUP).unwrap();
    site.relay.wait_for_line("configuration reloaded", SOON).unwrap();
    use_it();
    assert!(arrived("bulk") >= 20);
    assert_eq!(arrived("default"), 0);
}
