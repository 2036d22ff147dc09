//! The marks of packets. They tell the kernel's programs the class of each packet.
//!
//! | packet | mark |
//! |---|---|
//! | packet to a target | the class of its tunnel, [`Direction::Up`] |
//! | QUIC packet from the relay | the class of the first payload or piece of a stream in it, [`Direction::Down`] |
//! | QUIC packet from the edge | the same, but [`Direction::UpToRelay`]: for the policy, it travels toward a target |
//! | QUIC packet without payload of any class (a handshake, a pure acknowledgement, a probe) | none |

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
};

use bpf::mark::{Direction, Mark, Tag};
use config::policy::Policy;
use pacing::io::message::{self, Message};
use quic::class::{ClassMarks, PolicyRole};
use s2n_quic_core::{
    inet::ExplicitCongestionNotification,
    path::{Handle as _, RemoteAddress},
};
use s2n_quic_platform::message::default::Handle;
use socket2::SockRef;

/// The numbers of classes in the kernel's programs. A class keeps its number while the daemon runs,
/// wherever a later policy names it, so that tunnels opened under an earlier policy keep their class.
#[derive(Clone, Debug, Default)]
pub struct Numbers(Vec<String>);

impl Numbers {
    /// Numbers those classes of a policy that have no number yet. There are 256 numbers; further classes get none.
    pub fn learn(&mut self, policy: &Policy) {
        for class in &policy.classes {
            if self.0.len() <= usize::from(u8::MAX) && !self.0.contains(&class.name) {
                self.0.push(class.name.clone());
            }
        }
    }

    /// Returns all classes that have a number.
    pub fn all(&self) -> impl Iterator<Item = (&str, u8)> {
        self.0.iter().map(String::as_str).zip(0..=u8::MAX)
    }

    /// Returns the number of a class, if it has one.
    #[must_use]
    pub fn of(&self, class: &str) -> Option<u8> {
        self.all().find_map(|(name, number)| (name == class).then_some(number))
    }
}

/// The marks of all classes, by their numbers.
#[derive(Clone, Debug)]
pub struct Marks {
    tag: Tag,
    numbers: Numbers,
    permission: Permission,
}

/// Which marks this process may set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permission {
    /// On sockets, for all their packets.
    pub sockets: bool,
    /// On single packets, by a control message. With CAP_NET_RAW alone, Linux allows this since 6.2.
    pub packets: bool,
}

impl Permission {
    /// Tries to mark a socket, and a packet, which is not sent: a firewall's refusal would look like a lack of rights.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn probe(mark: u32) -> io::Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        let itself = (Ipv4Addr::LOCALHOST, socket.local_addr()?.port());
        let path = Handle::from_remote_address(RemoteAddress(std::net::SocketAddr::from(itself).into()));
        let ecn = ExplicitCongestionNotification::NotEct;
        let message =
            Message { payload: &[], segment_bytes: 1, path: &path, ecn, departure_ns: None, mark: Some(mark) };
        // The kernel checks rights before routes, so any other error does not concern rights.
        let is_permitted = |tried: io::Result<()>| !tried.is_err_and(|error| error.raw_os_error() == Some(libc::EPERM));
        let packets = is_permitted(message::check(&socket, &message));
        Ok(Self { sockets: is_permitted(SockRef::from(&socket).set_mark(mark)), packets })
    }
}

impl Marks {
    /// Returns the marks of no class yet.
    #[must_use]
    pub fn new(tag: Tag, permission: Permission) -> Self {
        Self { tag, numbers: Numbers::default(), permission }
    }

    /// Uses these numbers from now on.
    pub fn number_by(&mut self, numbers: &Numbers) {
        self.numbers.clone_from(numbers);
    }

    /// Returns all classes that have a number, with the mark of each in a direction.
    pub fn all(&self, direction: Direction) -> impl Iterator<Item = (&str, Mark)> {
        self.numbers.all().map(move |(name, class)| (name, Mark { direction, class }))
    }

    /// Returns the mark of a class in a direction, if it has a number.
    #[must_use]
    pub fn of(&self, class: &str, direction: Direction) -> Option<Mark> {
        self.numbers.of(class).map(|class| Mark { direction, class })
    }

    /// Returns the marks of a class's traffic, as a role sends it.
    #[must_use]
    pub fn of_class(&self, class: &str, role: PolicyRole) -> ClassMarks {
        let toward_peers = match role {
            PolicyRole::Relay => Direction::Down,
            PolicyRole::Edge => Direction::UpToRelay,
        };
        ClassMarks { to_peers: self.of_packets(class, toward_peers), to_targets: self.of_sockets(class, Direction::Up) }
    }

    /// Returns the value of `SO_MARK` for sockets of a class, if this process may set it.
    #[must_use]
    pub fn of_sockets(&self, class: &str, direction: Direction) -> Option<u32> {
        self.of(class, direction).filter(|_| self.permission.sockets).map(|mark| mark.encode(self.tag))
    }

    /// Returns the value of `SO_MARK` for single packets of a class, if this process may set it.
    #[must_use]
    pub fn of_packets(&self, class: &str, direction: Direction) -> Option<u32> {
        self.of(class, direction).filter(|_| self.permission.packets).map(|mark| mark.encode(self.tag))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Permission = Permission { sockets: true, packets: true };

    fn policy(classes: impl IntoIterator<Item = String>) -> Policy {
        let text: String = classes.into_iter().map(|name| format!("[class.{name}]\n")).collect();
        config::Config::from_toml(&text).unwrap().policy
    }

    fn learn(marks: &mut Marks, policy: &Policy) {
        let mut numbers = marks.numbers.clone();
        numbers.learn(policy);
        marks.number_by(&numbers);
    }

    #[test]
    fn a_class_keeps_its_mark_when_a_later_policy_names_others_before_it() {
        let mut marks = Marks::new(Tag::default(), ALL);
        learn(&mut marks, &policy(["voice".to_owned()]));
        let voice = marks.of_packets("voice", Direction::Down);
        assert_eq!(voice, Some(0x70ac_0001), "the default class is first");
        learn(&mut marks, &policy(["bulk", "voice"].map(str::to_owned)));
        assert_eq!(marks.of_packets("voice", Direction::Down), voice);
        assert_eq!(marks.of_sockets("bulk", Direction::Up), Some(0x70ac_0102));
        assert_eq!(marks.of("nobody", Direction::Up), None);
    }

    #[test]
    fn classes_beyond_256_have_no_mark_and_take_none_away() {
        let mut marks = Marks::new(Tag::default(), ALL);
        for number in 0..300 {
            learn(&mut marks, &policy([format!("c{number}")]));
        }
        assert_eq!(marks.of("c254", Direction::Up), Some(Mark { direction: Direction::Up, class: 255 }));
        assert_eq!(marks.of("c255", Direction::Up), None);
        assert_eq!(marks.all(Direction::Down).count(), 256);
    }

    #[test]
    fn a_process_without_rights_may_mark_neither_sockets_nor_packets() {
        let probe = || {
            crate::monitor::rights::hold(crate::monitor::rights::Rights::DATA).unwrap();
            Permission::probe(Tag::default().value()).unwrap()
        };
        let permission = std::thread::spawn(probe).join().unwrap();
        assert_eq!(permission, Permission { sockets: false, packets: false });
    }

    #[test]
    fn quic_packets_of_either_role_share_no_mark_with_packets_to_targets() {
        let mut marks = Marks::new(Tag::default(), ALL);
        learn(&mut marks, &Policy::default());
        let of = |role| marks.of_class("default", role);
        let (relay, edge) = (of(PolicyRole::Relay), of(PolicyRole::Edge));
        assert_eq!(
            [relay.to_peers, edge.to_peers, relay.to_targets].map(Option::unwrap),
            [0x70ac_0000, 0x70ac_0200, 0x70ac_0100]
        );
    }

    #[test]
    fn sockets_and_packets_without_permission_have_no_mark() {
        let mut marks = Marks::new(Tag::default(), Permission { sockets: true, packets: false });
        learn(&mut marks, &Policy::default());
        let of = |marks: &Marks| {
            (marks.of_sockets("default", Direction::Up).is_some(), marks.of_packets("default", Direction::Up).is_some())
        };
        assert_eq!(of(&marks), (true, false));
        marks.permission = Permission { sockets: false, packets: true };
        assert_eq!(of(&marks), (false, true));
    }
}
