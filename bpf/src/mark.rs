//! The mark of a packet (`SO_MARK`). Sockets set it, so that the kernel's programs know the packet's class.
//!
//! The upper 16 bits are a tag that distinguishes our marks from others; bits 8 and 9 are the direction, bits 0 to 7 the
//! class, and the rest is zero.

/// The side toward which a packet leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Toward clients, in QUIC packets.
    Down,
    /// To targets, in packets of one tunnel each.
    Up,
    /// From an edge to its relay, in QUIC packets.
    UpToRelay,
}

/// The upper half of all marks of one daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag(u16);

impl Tag {
    /// Makes a tag from the upper 16 bits of a mark; `None` if a lower bit is set, or no bit at all: a tag of zero
    /// would make every packet without a mark one of ours.
    #[must_use]
    pub const fn new(mark: u32) -> Option<Self> {
        let [high, low] = [mark >> 16, mark & 0xffff];
        if low == 0 && high != 0 { Some(Self(high as u16)) } else { None }
    }

    /// Returns the tag as a mark without class and direction.
    #[must_use]
    pub const fn value(self) -> u32 {
        (self.0 as u32) << 16
    }
}

impl Default for Tag {
    /// `0x70ac0000`.
    fn default() -> Self {
        Self(0x70ac)
    }
}

/// Class and direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mark {
    /// The side toward which it leaves.
    pub direction: Direction,
    /// The index of its class in the policy.
    pub class: u8,
}

impl Mark {
    /// Returns the value for `SO_MARK`.
    #[must_use]
    pub const fn encode(self, tag: Tag) -> u32 {
        tag.value() | self.slot()
    }

    /// Reads the value of `SO_MARK`; `None` if it is not one of ours.
    #[must_use]
    pub const fn decode(value: u32, tag: Tag) -> Option<Self> {
        Self::of_slot(value ^ tag.value())
    }

    /// Returns the index of class and direction in the kernel's tables.
    pub(crate) const fn slot(self) -> u32 {
        self.class as u32 | (self.direction as u32) << 8
    }

    pub(crate) const fn of_slot(slot: u32) -> Option<Self> {
        let direction = match slot >> 8 {
            0 => Direction::Down,
            1 => Direction::Up,
            2 => Direction::UpToRelay,
            _ => return None,
        };
        Some(Self { direction, class: (slot & 0xff) as u8 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REALTIME_UP: Mark = Mark { direction: Direction::Up, class: 7 };

    #[test]
    fn a_mark_is_tag_direction_and_class() {
        assert_eq!(REALTIME_UP.encode(Tag::default()), 0x70ac_0107);
        assert_eq!(Mark { direction: Direction::Down, class: 255 }.encode(Tag::default()), 0x70ac_00ff);
        assert_eq!(Mark { direction: Direction::UpToRelay, class: 1 }.encode(Tag::default()), 0x70ac_0201);
    }

    #[test]
    fn an_encoded_mark_is_decoded_and_a_foreign_mark_is_not() {
        for slot in 0..crate::intf::SLOTS {
            let mark = Mark::of_slot(slot).unwrap();
            assert_eq!(Mark::decode(mark.encode(Tag::default()), Tag::default()), Some(mark));
        }
        for foreign in [0, 7, 0x70ad_0007, 0x70ac_0300, 0x70ac_8007, u32::MAX] {
            assert_eq!(Mark::decode(foreign, Tag::default()), None, "{foreign:#x}");
        }
    }

    #[test]
    fn a_tag_has_upper_bits_only() {
        assert_eq!(Tag::new(0x70ac_0000), Some(Tag::default()));
        assert_eq!((Tag::new(0), Tag::new(0x70ac_0001), Tag::new(0x100)), (None, None, None));
    }
}
