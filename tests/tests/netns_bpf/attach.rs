//! Attaching programs to devices.

use std::{
    collections::BTreeMap,
    error::Error,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    process::Command,
    time::Duration,
};

use bpf::{
    egress::{Attached, Egress, KernelClasses, KernelTerms, PROGRAM, remove_leftovers},
    ingress::Ingress,
    mark::{Direction, Mark, Tag},
};
use lab::netns::{Chain, Link, Namespace};
use rustix::{
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    net::sockopt::{set_ip_recvtos, set_ipv6_recvtclass},
    thread::{UnshareFlags, unshare_unsafe},
};
use socket2::SockRef;

const CLASS: Mark = Mark { direction: Direction::Up, class: 9 };

/// Sends marked and unmarked payloads from the relay to the target in both families, and returns the DSCPs of the
/// marked ones as they arrived.
fn send(chain: &Chain) -> Vec<u8> {
    let receive = |ip: IpAddr| chain.target.run(|| UdpSocket::bind((ip, 9)).unwrap()).unwrap();
    let mut arrived = Vec::new();
    for (to, local) in [(IpAddr::from(chain.egress.far.v4), "0.0.0.0:0"), (chain.egress.far.v6.into(), "[::]:0")] {
        let target = receive(to);
        target.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        want_traffic_class(&target);
        chain
            .relay
            .run(|| {
                let socket = UdpSocket::bind(local).unwrap();
                socket.send_to(b"plain", (to, 9)).unwrap();
                SockRef::from(&socket).set_mark(CLASS.encode(Tag::default())).unwrap();
                socket.send_to(b"marked", (to, 9)).unwrap();
            })
            .unwrap();
        // The packets may be reordered if the sender moves to another CPU.
        let both = BTreeMap::from([receive_traffic_class(&target), receive_traffic_class(&target)]);
        assert_eq!(both[&b"plain"[..]], 0, "an unmarked packet is left alone");
        arrived.push(both[&b"marked"[..]] >> 2);
    }
    arrived
}

/// Makes the socket report the traffic class of each payload.
pub fn want_traffic_class(socket: &UdpSocket) {
    match socket.local_addr().unwrap() {
        SocketAddr::V4(_) => set_ip_recvtos(socket, true).unwrap(),
        SocketAddr::V6(_) => set_ipv6_recvtclass(socket, true).unwrap(),
    }
}

/// Receives one payload and its traffic class.
pub fn receive_traffic_class(socket: &UdpSocket) -> (Vec<u8>, u8) {
    let (mut payload, mut control) = (vec![0; 2048], [0_u64; 16]);
    let mut vector = libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() };
    // SAFETY: `msghdr` consists of integers and pointers, for which zero is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut vector, 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
    // SAFETY: the message names buffers with their true sizes, which outlive the call.
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    payload.truncate(usize::try_from(len).expect("a payload"));
    // SAFETY: the kernel has filled in the control messages that the header describes; the only one is a byte or an int.
    let traffic_class = unsafe { *libc::CMSG_DATA(libc::CMSG_FIRSTHDR(&raw const message)) };
    (payload, traffic_class)
}

fn load() -> (Egress, KernelClasses) {
    let egress = Egress::load(Tag::default()).unwrap();
    let mut classes = egress.classes().unwrap();
    classes.publish([(CLASS, KernelTerms { dscp: Some(46), ..KernelTerms::default() })]).unwrap();
    (egress, classes)
}

/// The filters in the egress hook of a device's clsact.
fn filters(namespace: &Namespace, device: &str) -> String {
    let shown = Command::new("tc").args(["-n", namespace.name(), "filter", "show", "dev", device, "egress"]).output();
    String::from_utf8(shown.unwrap().stdout).unwrap()
}

#[test]
fn an_attached_program_marks_and_counts_what_leaves_until_it_is_detached() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let (mut egress, classes) = load();
    let device = &chain.egress.near.device;
    let counted = || classes.counters(CLASS).unwrap().packets;
    chain.relay.run(|| egress.attach(device, false)).unwrap().unwrap();
    assert_eq!((send(&chain), counted()), (vec![46, 46], 2));
    chain.relay.run(|| egress.attach(device, false)).unwrap().unwrap();
    assert_eq!((send(&chain), counted()), (vec![46, 46], 4), "attached again, each packet is counted once");
    chain.relay.run(|| egress.detach(device)).unwrap().unwrap();
    assert_eq!((send(&chain), counted()), (vec![0, 0], 4));
}

#[test]
fn a_dropped_program_is_detached() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let (mut egress, classes) = load();
    chain.relay.run(|| egress.attach(&chain.egress.near.device, false)).unwrap().unwrap();
    chain.relay.run(move || drop(egress)).unwrap();
    assert_eq!((send(&chain), classes.counters(CLASS).unwrap().packets), (vec![0, 0], 0));
}

#[test]
fn a_program_comes_before_those_that_are_there_and_is_told_of_one_that_came_before_it() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let [(mut first, _), (mut second, _)] = [load(), load()];
    let device = &chain.egress.near.device;
    chain
        .relay
        .run(|| {
            let index = bpf::NetworkDevice::find(device).unwrap().unwrap().index;
            first.attach(device, false).unwrap();
            if first.attachment(device) == Some(Attached::Filter) {
                return;
            }
            assert_eq!(first.preceded_by(index), None);
            second.attach(device, false).unwrap();
            assert_eq!((second.preceded_by(index), first.preceded_by(index)), (None, second.id()));
            second.detach(device).unwrap();
            assert_eq!(first.preceded_by(index), None);
        })
        .unwrap();
}

#[test]
fn a_device_that_vanishes_takes_the_program_with_it_and_nothing_fails() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let (mut egress, _classes) = load();
    let device = chain.egress.near.device.clone();
    chain
        .relay
        .run(|| {
            egress.attach(&device, false).unwrap();
            let index = bpf::NetworkDevice::find(&device).unwrap().unwrap().index;
            egress.take_over_clsact(index);
            chain.relay.ip(&format!("link delete {device}")).unwrap();
            egress.detach(&device).unwrap();
            assert!(egress.attach(&device, false).is_err(), "the device is gone");
            assert!(!egress.has_made_clsact(index), "the next device of this index has a `clsact` of others");
        })
        .unwrap();
}

#[test]
fn programs_are_attached_even_if_another_user_has_taken_every_port() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let (mut egress, _classes) = load();
    let mut ingress = Ingress::load().unwrap();
    let device = &chain.egress.near.device;
    chain.relay.sysctl("net.ipv4.ip_local_port_range", "40000 40003").unwrap();
    chain
        .relay
        .run(|| {
            let take = |address: &str| std::iter::from_fn(|| UdpSocket::bind(address).ok()).collect::<Vec<_>>();
            let taken = ["127.0.0.1:0", "[::1]:0"].map(take);
            assert_eq!(taken.each_ref().map(Vec::len), [4, 4], "all ports that the kernel gives");
            egress.attach(device, false).unwrap();
            ingress.attach(device).unwrap();
            assert!(bpf::NetworkDevice::find("no-such-device").unwrap().is_none());
        })
        .unwrap();
}

/// Whether the program made the `clsact` of the relay's device toward the target.
fn has_made_clsact(chain: &Chain, egress: &Egress) -> bool {
    let find = || bpf::NetworkDevice::find(&chain.egress.near.device).unwrap().unwrap().index;
    egress.has_made_clsact(chain.relay.run(find).unwrap())
}

/// The error number with which the kernel refused to attach a program.
fn errno(error: &bpf::Error) -> Option<i32> {
    let bpf::Error::Attach { cause, .. } = error else { return None };
    let first: &(dyn Error + 'static) = cause.as_ref();
    let causes = std::iter::successors(Some(first), |&error| error.source());
    causes.filter_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error()).next()
}

/// Attaches through netlink: the only way before Linux 6.6. Later kernels may lack the kind of queueing discipline or of filter (`ENOENT`);
/// then reports the test as skipped and returns `false`.
fn attach_as_filter(chain: &Chain, egress: &mut Egress, test: &str) -> bool {
    let attached = chain.relay.run(|| egress.attach_filter(&chain.egress.near.device, false)).unwrap();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    match attached {
        Ok(()) => {
            assert_eq!(egress.attachment(&chain.egress.near.device), Some(Attached::Filter));
            true
        }
        Err(error) => {
            assert!(!kernel.contains("deb12"), "the lab's kernels have cls_bpf: {error}");
            assert_eq!(errno(&error), Some(libc::ENOENT), "{error}");
            let has_failed_late = error.to_string().contains("filter");
            assert_eq!(has_made_clsact(chain, egress), has_failed_late, "it made clsact before: {error}");
            lab::report::skipped(test, &error.to_string());
            false
        }
    }
}

#[test]
fn as_a_filter_it_does_the_same_and_leaves_when_it_is_detached_or_swept_away() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let (mut egress, classes) = load();
    let test = "as_a_filter_it_does_the_same_and_leaves_when_it_is_detached_or_swept_away";
    if !attach_as_filter(&chain, &mut egress, test) {
        return;
    }
    assert!(has_made_clsact(&chain, &egress));
    let device = &chain.egress.near.device;
    assert!(filters(&chain.relay, device).contains(PROGRAM));
    assert_eq!((send(&chain), classes.counters(CLASS).unwrap().packets), (vec![46, 46], 2));
    chain.relay.run(|| egress.detach(device)).unwrap().unwrap();
    assert_eq!(filters(&chain.relay, device), "");
    assert!(attach_as_filter(&chain, &mut egress, test));
    chain.relay.run(|| remove_leftovers(device)).unwrap();
    assert_eq!(filters(&chain.relay, device), "");
    assert_eq!(send(&chain), [0, 0]);
}

#[test]
fn a_filter_says_by_its_handle_whether_paced_made_the_clsact() {
    lab::ring!(Netns);
    let test = "a_filter_says_by_its_handle_whether_paced_made_the_clsact";
    for is_own in [true, false] {
        let (chain, (mut egress, _classes)) = (Chain::new().unwrap(), load());
        let device = &chain.egress.near.device;
        if !is_own && let Err(error) = chain.relay.tc(&format!("qdisc add dev {device} clsact")) {
            return lab::report::skipped(test, &error.to_string());
        }
        if !attach_as_filter(&chain, &mut egress, test) {
            return;
        }
        let shown = filters(&chain.relay, device);
        assert_eq!((shown.contains("handle 0x70ac "), has_made_clsact(&chain, &egress)), (is_own, is_own), "{shown}");
    }
}

#[test]
fn a_removed_filter_or_clsact_is_attached_again_at_once() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let (mut egress, _classes) = load();
    let test = "a_removed_filter_or_clsact_is_attached_again_at_once";
    if !attach_as_filter(&chain, &mut egress, test) {
        return;
    }
    let device = &chain.egress.near.device;
    for removal in ["filter delete", "qdisc delete"] {
        let what = if removal.starts_with("qdisc") { "clsact" } else { "egress" };
        chain.relay.tc(&format!("{removal} dev {device} {what}")).unwrap();
        assert!(attach_as_filter(&chain, &mut egress, test), "after {removal}");
        assert!(filters(&chain.relay, device).contains(PROGRAM));
        assert_eq!(send(&chain), [46, 46]);
    }
}

#[test]
fn a_filter_is_attached_to_the_next_device_of_its_name_too() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let (mut egress, classes) = load();
    let test = "a_filter_is_attached_to_the_next_device_of_its_name_too";
    if !attach_as_filter(&chain, &mut egress, test) {
        return;
    }
    let device = &chain.egress.near.device;
    chain.relay.ip(&format!("link delete {device}")).unwrap();
    Link::new(&chain.relay, &chain.target, 2).unwrap();
    assert!(attach_as_filter(&chain, &mut egress, test));
    assert!(has_made_clsact(&chain, &egress) && filters(&chain.relay, device).contains(PROGRAM));
    assert_eq!((send(&chain), classes.counters(CLASS).unwrap().packets), (vec![46, 46], 2));
}

#[test]
fn a_device_without_ethernet_headers_is_refused_to_the_guard_which_reads_them() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let mut ingress = Ingress::load().unwrap();
    // The lab's kernel has no node of tun, and others lack tunnels of IP in IP.
    let tun = chain.relay.ip("tuntap add dev bare mode tun");
    tun.or_else(|_| chain.relay.ip("link add bare type ipip local 10.9.0.1 remote 10.9.0.2")).unwrap();
    let error = chain.relay.run(|| ingress.attach("bare")).unwrap().unwrap_err().to_string();
    assert!(error.contains("bare (XDP)") && error.contains("no Ethernet header"), "{error}");
    assert!(!ingress.is_attached("bare"));
    chain.relay.run(|| ingress.attach(&chain.egress.near.device)).unwrap().unwrap();
}

/// Runs a closure in a namespace, with a `/sys` that shows its devices, as `ip netns exec` does.
fn with_sysfs<T: Send>(namespace: &Namespace, work: impl FnOnce() -> T + Send) -> T {
    let run = || {
        // SAFETY: only mounts are unshared, by a thread that ends with the closure.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
        mount(c"sysfs", c"/sys", c"sysfs", MountFlags::empty(), None).unwrap();
        work()
    };
    namespace.run(run).unwrap()
}

#[test]
fn another_xdp_program_on_the_device_is_named_as_the_reason() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let [mut other, mut ingress] = [Ingress::load().unwrap(), Ingress::load().unwrap()];
    let device = &chain.egress.near.device;
    let attach = |ingress: &mut Ingress| chain.relay.run(|| ingress.attach(device)).unwrap();
    attach(&mut other).unwrap();
    let error = attach(&mut ingress).unwrap_err().to_string();
    assert!(error.contains(&format!("another XDP program is on {device}")), "{error}");
    drop(other);
    attach(&mut ingress).unwrap();
}

#[test]
fn behind_the_driver_of_a_device_that_stands_on_another_the_guard_is_refused() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let below = &chain.egress.near.device;
    let made = chain.relay.ip(&format!("link add link {below} name above type macvlan"));
    made.or_else(|_| chain.relay.ip(&format!("link add above type bridge\nlink set {below} master above"))).unwrap();
    let mut ingress = Ingress::load().unwrap();
    with_sysfs(&chain.relay, || {
        assert!(bpf::lower_devices("above").iter().eq([below]));
        let error = ingress.attach("above").unwrap_err().to_string();
        assert!(error.contains("name the lower device instead") && error.contains(below), "{error}");
        assert!(!ingress.is_attached("above"));
        for device in [below, "lo"] {
            ingress.attach(device).unwrap();
        }
    });
}

#[test]
fn devices_that_are_gone_make_room_for_new_ones() {
    lab::ring!(Netns);
    /// As many as the table has room for.
    const PAIRS: usize = 128;
    let chain = Chain::new().unwrap();
    let (mut egress, mut classes) = load();
    let pair = |at| format!("link add a{at} group 7 type veth peer name b{at}\n");
    chain.relay.ip(&(0..PAIRS).map(pair).collect::<String>()).unwrap();
    let fill = || {
        for at in 0..PAIRS {
            classes.set_fq(&format!("a{at}"), false).unwrap();
            classes.set_fq(&format!("b{at}"), false).unwrap();
        }
        classes.set_fq("lo", false).unwrap_err()
    };
    chain.relay.run(fill).unwrap();
    chain.relay.ip("link delete group 7").unwrap();
    let device = &chain.egress.near.device;
    chain.relay.run(|| egress.attach(device, false)).unwrap().unwrap();
    assert_eq!(send(&chain), [46, 46]);
}
