//! The program at tc egress.

use std::{num::NonZeroU64, time::Duration};

use bpf::{
    egress::{Egress, KernelClasses, KernelCounters, KernelTerms},
    mark::{Direction, Mark, Tag},
    trial::{SocketBuffer, TrialOutcome},
};
use lab::{
    frame::{Frame, sum},
    netns::Namespace,
    process::wait_for,
};
use pacing::monotonic::now_ns;

const CLASS: Mark = Mark { direction: Direction::Down, class: 5 };
const OTHER: Mark = Mark { direction: Direction::Up, class: 5 };
/// `TC_ACT_UNSPEC` and `TC_ACT_SHOT` (`include/uapi/linux/pkt_cls.h`).
const PASS: i32 = -1;
const DROP: i32 = 2;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

/// A program with these terms for `CLASS`, on a loopback device with or without fq.
fn program(terms: KernelTerms, has_fq: bool) -> (Egress, KernelClasses) {
    let egress = Egress::load(Tag::default()).unwrap();
    let mut classes = egress.classes().unwrap();
    classes.set_fq("lo", has_fq).unwrap();
    classes.publish([(CLASS, terms)]).unwrap();
    (egress, classes)
}

fn marked(mark: Mark) -> SocketBuffer {
    SocketBuffer { mark: mark.encode(Tag::default()), ..SocketBuffer::default() }
}

fn send(egress: &Egress, frame: &Frame, about: SocketBuffer) -> TrialOutcome {
    egress.try_on(&frame.bytes(), about, 1).unwrap()
}

/// A message that takes 900 ms at 71,000 bytes/s.
fn long() -> SocketBuffer {
    SocketBuffer { wire_bytes: 450 * 142, ..marked(CLASS) }
}

fn rate(bytes_per_sec: u64) -> KernelTerms {
    KernelTerms { bytes_per_sec: NonZeroU64::new(bytes_per_sec), ..KernelTerms::default() }
}

/// Terms with all settings of a class.
fn all_terms() -> KernelTerms {
    KernelTerms { priority: Some(3), dscp: Some(46), ..rate(1_000) }
}

#[test]
fn packets_without_our_mark_pass_untouched_and_uncounted() {
    lab::ring!(Netns);
    let (egress, classes) = program(all_terms(), true);
    let frame = Frame { traffic_class: 0x21, ..Frame::v4(&[0; 100]) };
    for mark in [0, 5, 0x70ad_0005, 0x70ac_0305, 0x70ac_8005, u32::MAX] {
        let about = SocketBuffer { mark, priority: 9, departure_ns: 77, ..SocketBuffer::default() };
        let TrialOutcome { verdict, packet, about: after, .. } = send(&egress, &frame, about);
        assert_eq!((verdict, packet), (PASS, frame.bytes()), "{mark:#x}");
        assert_eq!((after.mark, after.priority, after.departure_ns), (mark, 9, 77));
    }
    assert_eq!(classes.counters(CLASS).unwrap(), KernelCounters::default());
}

#[test]
fn another_tag_makes_other_marks_ours() {
    lab::ring!(Netns);
    let tag = Tag::new(0x1234_0000).unwrap();
    let egress = Egress::load(tag).unwrap();
    let mut classes = egress.classes().unwrap();
    classes.publish([(CLASS, all_terms())]).unwrap();
    let about = |tag| SocketBuffer { mark: CLASS.encode(tag), ..SocketBuffer::default() };
    assert_eq!(send(&egress, &Frame::v4(&[]), about(tag)).about.priority, 3);
    assert_eq!(send(&egress, &Frame::v4(&[]), about(Tag::default())).about.priority, 0);
}

#[test]
fn dscp_is_set_in_ipv4_with_a_right_checksum_and_ecn_kept() {
    lab::ring!(Netns);
    let (egress, _classes) = program(KernelTerms { dscp: Some(46), ..KernelTerms::default() }, false);
    for ecn in 0..4 {
        let frame = Frame { traffic_class: 10 << 2 | ecn, ..Frame::v4(&[1; 50]) };
        let packet = send(&egress, &frame, marked(CLASS)).packet;
        assert_eq!(packet[15], 46 << 2 | ecn);
        assert_eq!(sum(&packet[14..34]), 0xffff);
        let expected = Frame { traffic_class: 46 << 2 | ecn, ..frame };
        assert_eq!(packet, expected.bytes(), "nothing else changes");
    }
}

#[test]
fn dscp_is_set_in_ipv6_with_flow_label_and_ecn_kept() {
    lab::ring!(Netns);
    let (egress, _classes) = program(KernelTerms { dscp: Some(46), ..KernelTerms::default() }, false);
    for ecn in 0..4 {
        let frame = Frame { traffic_class: 63 << 2 | ecn, ..Frame::v6(&[1; 50]) };
        let packet = send(&egress, &frame, marked(CLASS)).packet;
        assert_eq!(packet, Frame { traffic_class: 46 << 2 | ecn, ..frame }.bytes());
    }
}

#[test]
fn a_packet_with_an_invalid_ip_header_is_not_changed() {
    lab::ring!(Netns);
    let (egress, classes) = program(KernelTerms { dscp: Some(46), ..KernelTerms::default() }, false);
    for frame in [Frame::v4(&[1; 50]), Frame::v6(&[1; 50])] {
        // As if the link header were longer than the program thinks.
        let mut bytes = frame.bytes();
        bytes[14] = 0x12;
        assert_eq!(egress.try_on(&bytes, marked(CLASS), 1).unwrap().packet, bytes);
    }
    assert_eq!(classes.counters(CLASS).unwrap().packets, 2);
}

#[test]
fn fields_that_the_terms_do_not_name_stay() {
    lab::ring!(Netns);
    let (egress, _classes) = program(KernelTerms::default(), true);
    let frame = Frame { traffic_class: 0x21, ..Frame::v6(&[0; 100]) };
    let about = SocketBuffer { priority: 9, departure_ns: 77, ..marked(CLASS) };
    let TrialOutcome { verdict, packet, about: after, .. } = send(&egress, &frame, about);
    assert_eq!((verdict, packet, after.priority, after.departure_ns), (PASS, frame.bytes(), 9, 77));
}

#[test]
fn no_packet_leaves_with_a_priority_that_fq_takes_for_control_traffic() {
    lab::ring!(Netns);
    let (egress, mut classes) = program(KernelTerms::default(), false);
    for priority in (0..40).chain([0xffff_fff7, 0x1_0007]) {
        classes.publish([(CLASS, KernelTerms { priority: Some(priority), ..KernelTerms::default() })]).unwrap();
        let after = send(&egress, &Frame::v4(&[]), marked(CLASS)).about.priority;
        assert_ne!(after & 15, 7, "{priority}");
        assert!(after == priority || priority & 15 == 7, "{priority} became {after}");
    }
}

#[test]
fn packets_of_a_class_depart_one_length_apart_and_never_before_their_socket_wants() {
    lab::ring!(Netns);
    // Frames of 142 bytes at 71,000 bytes/s: two milliseconds each.
    let (egress, classes) = program(rate(71_000), true);
    let frame = Frame::v4(&[0; 100]);
    let first_ns = send(&egress, &frame, long()).about.departure_ns;
    let depart =
        |wanted_ns| send(&egress, &frame, SocketBuffer { departure_ns: wanted_ns, ..marked(CLASS) }).about.departure_ns;
    assert_eq!(depart(0), first_ns + 900 * MS, "the class's departure time is the later one");
    assert_eq!(depart(first_ns), first_ns + 902 * MS);
    assert_eq!(depart(first_ns + 950 * MS), first_ns + 950 * MS, "the socket's departure time is the later one");
    assert_eq!(depart(first_ns + 950 * MS), first_ns + 950 * MS, "packets of a socket are as far apart as it wants");
    assert_eq!(depart(0), first_ns + 908 * MS, "each packet takes its place in the class when it comes");
    let counted = classes.counters(CLASS).unwrap();
    assert_eq!(counted, KernelCounters { packets: 6, bytes: 455 * 142, delayed_packets: 3, dropped_packets: 0 });
}

#[test]
fn a_packet_that_its_socket_holds_back_delays_no_other_of_its_class() {
    lab::ring!(Netns);
    let (egress, classes) = program(KernelTerms { burst_ns: 10 * MS, ..rate(1_000_000_000) }, true);
    let frame = Frame::v4(&[0; 100]);
    let depart =
        |wanted_ns| send(&egress, &frame, SocketBuffer { departure_ns: wanted_ns, ..marked(CLASS) }).about.departure_ns;
    for ahead_ns in [200 * MS, 30 * SECOND] {
        let before_ns = now_ns();
        let wanted_ns = before_ns + ahead_ns;
        assert_eq!(depart(wanted_ns), wanted_ns, "a socket's own departure time is left to fq");
        let (other_ns, after_ns) = (depart(0), now_ns());
        assert!((before_ns..=after_ns).contains(&other_ns), "the class is far below its rate");
    }
    let counted = classes.counters(CLASS).unwrap();
    assert_eq!(counted, KernelCounters { packets: 4, bytes: 4 * 142, delayed_packets: 0, dropped_packets: 0 });
}

#[test]
fn attaching_again_keeps_what_is_known_of_a_devices_fq() {
    lab::ring!(Netns);
    let namespace = Namespace::new("again").unwrap();
    for has_fq in [true, false] {
        let (mut egress, _classes) = program(rate(142_000), has_fq);
        namespace.run(|| egress.attach("lo", !has_fq)).unwrap().unwrap();
        let after = send(&egress, &Frame::v4(&[0; 100]), marked(CLASS)).about;
        assert_eq!(after.departure_ns != 0, has_fq, "only where there is fq do packets get departure times");
        namespace.run(|| drop(egress)).unwrap();
    }
}

#[test]
fn a_gso_message_counts_with_all_its_packets_and_headers() {
    lab::ring!(Netns);
    let (egress, classes) = program(rate(20_000), true);
    let about = SocketBuffer { wire_bytes: 10 * 1_242, segments: 10, ..marked(CLASS) };
    let first = send(&egress, &Frame::v4(&[0; 1_200]), about);
    let second = send(&egress, &Frame::v4(&[0; 1_200]), about);
    assert_eq!(second.about.departure_ns - first.about.departure_ns, 621 * MS);
    let counted = classes.counters(CLASS).unwrap();
    assert_eq!((counted.packets, counted.bytes, counted.delayed_packets), (20, 20 * 1_242, 1));
}

#[test]
fn packets_beyond_the_horizon_are_dropped_and_do_not_move_the_clock() {
    lab::ring!(Netns);
    // One packet takes 900 ms.
    let (egress, classes) = program(rate(160), true);
    let frame = Frame::v4(&[0; 102]);
    let first = send(&egress, &frame, marked(CLASS));
    let second = send(&egress, &frame, marked(CLASS));
    assert_eq!(second.about.departure_ns, first.about.departure_ns + 900 * MS);
    for _ in 0..100 {
        assert_eq!(send(&egress, &frame, marked(CLASS)).verdict, DROP, "1.8 s ahead");
    }
    let counted = classes.counters(CLASS).unwrap();
    assert_eq!((counted.packets, counted.dropped_packets), (2, 100));
    // The clock stands where two packets left it, not where 102 would have.
    let passed = || Some(send(&egress, &frame, marked(CLASS))).filter(|outcome| outcome.verdict == PASS);
    let third = wait_for("a packet within the horizon", Duration::from_secs(10), passed).unwrap();
    assert_eq!(third.about.departure_ns, first.about.departure_ns + 1_800 * MS);
}

#[test]
fn without_fq_packets_are_marked_and_counted_but_keep_their_times() {
    lab::ring!(Netns);
    let (egress, mut classes) = program(all_terms(), false);
    let about = SocketBuffer { departure_ns: 77, ..marked(CLASS) };
    for _ in 0..20 {
        let TrialOutcome { verdict, packet, about: after, .. } = send(&egress, &Frame::v4(&[0; 1_000]), about);
        assert_eq!((verdict, packet[15], after.priority, after.departure_ns), (PASS, 46 << 2, 3, 77));
    }
    let counted = classes.counters(CLASS).unwrap();
    assert_eq!((counted.packets, counted.dropped_packets), (20, 0), "without fq, no rate is enforced");
    classes.set_fq("lo", true).unwrap();
    assert_ne!(
        send(&egress, &Frame::v4(&[0; 1_000]), about).about.departure_ns,
        77,
        "the program knows that there is fq now"
    );
}

#[test]
fn directions_and_classes_have_terms_clocks_and_counters_of_their_own() {
    lab::ring!(Netns);
    let (egress, mut classes) = program(rate(142), true);
    let slow = KernelTerms { dscp: Some(1), ..rate(142) };
    classes.publish([(CLASS, slow), (OTHER, KernelTerms { dscp: Some(2), ..rate(142) })]).unwrap();
    let frame = Frame::v4(&[0; 100]);
    send(&egress, &frame, marked(CLASS));
    let (before_ns, other) = (now_ns(), send(&egress, &frame, marked(OTHER)));
    assert_eq!(other.packet[15], 2 << 2);
    assert!(
        other.about.departure_ns - before_ns < SECOND,
        "the other direction's backlog of a second does not delay it"
    );
    assert_eq!((classes.counters(CLASS).unwrap().packets, classes.counters(OTHER).unwrap().packets), (1, 1));
}

#[test]
fn new_terms_are_in_force_at_once_and_clocks_survive_them() {
    lab::ring!(Netns);
    let (egress, mut classes) = program(rate(71_000), true);
    let frame = Frame::v4(&[0; 100]);
    let about = SocketBuffer { departure_ns: 77, ..marked(CLASS) };
    let first_ns = send(&egress, &frame, long()).about.departure_ns;
    for revision in 0..5 {
        let terms = KernelTerms { dscp: Some(1 + revision), ..rate(71_000) };
        classes.publish([(CLASS, terms)]).unwrap();
        let after = send(&egress, &frame, about);
        assert_eq!(after.packet[15], (1 + revision) << 2);
        assert_eq!(after.about.departure_ns, first_ns + (900 + 2 * u64::from(revision)) * MS);
    }
    classes.publish([]).unwrap();
    assert_eq!(send(&egress, &frame, about).about.departure_ns, 77, "a class without terms has no rate");
}

#[test]
fn a_message_names_device_hook_kernel_and_missing_rights() {
    lab::ring!(Netns);
    let mut egress = Egress::load(Tag::default()).unwrap();
    let message = egress.attach("no-such-device", false).unwrap_err().to_string();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    for part in ["paced_egress", "no-such-device", "tc egress", kernel.trim()] {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
    assert!(!message.contains("without CAP"), "root has all capabilities: {message}");
}
