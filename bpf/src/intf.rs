//! `intf.h` in Rust: every size and offset is asserted to be the header's at compile time.

use aya::Pod;

/// The number of slots: class and direction, as in a mark.
pub(crate) const SLOTS: u32 = 768;
/// The values in the terms that leave a packet's priority and DSCP unchanged.
pub(crate) const KEEP_PRIORITY: u32 = u32::MAX;
pub(crate) const KEEP_DSCP: u8 = u8::MAX;
/// Flags of a device.
pub(crate) const DEVICE_FQ: u32 = 1;
pub(crate) const DEVICE_NO_ETHERNET: u32 = 2;

/// `struct class_terms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawTerms {
    pub(crate) bytes_per_sec: u64,
    pub(crate) burst_ns: u64,
    pub(crate) priority: u32,
    pub(crate) dscp: u8,
    pub(crate) unused: [u8; 3],
}

/// `struct class_counters`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawCounters {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) delayed_packets: u64,
    pub(crate) dropped_packets: u64,
}

/// The number of configs that connection IDs may have.
pub(crate) const ID_CONFIGS: u32 = 8;

/// The number of places for listeners, and of places that a lookup tries, from the hash's place on.
pub(crate) const LISTENER_PLACES: u32 = 2_048;
pub(crate) const LISTENER_PROBES: u32 = 8;
/// The port of an entry that marks an address as one of the daemon's.
pub(crate) const ANY_PORT: u16 = 0;

/// The number of class numbers.
pub(crate) const CLASSES: u32 = 256;

/// `struct listener`; address and port in network order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct RawListener {
    pub(crate) address: [u64; 2],
    pub(crate) port: u16,
    pub(crate) in_use: u16,
    pub(crate) class: u8,
    pub(crate) unused: [u8; 3],
}

impl RawListener {
    /// `listener_place`.
    pub(crate) fn place(&self) -> u32 {
        let mixed = self.address[0] ^ self.address[1].rotate_left(32) ^ u64::from(self.port);
        (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as u32
    }
}

/// `struct id_keys`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawIdKeys {
    pub(crate) tag: [u64; 2],
    pub(crate) mask: [u64; 2],
    pub(crate) in_force: u32,
    pub(crate) unused: u32,
}

/// `struct stamp_key`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawStampKey {
    pub(crate) key: [u64; 2],
    pub(crate) in_force: u32,
    pub(crate) unused: u32,
}

/// `struct limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawLimit {
    pub(crate) interval_ns: u64,
    pub(crate) burst_ns: u64,
}

/// `struct limits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawLimits {
    pub(crate) prefix: RawLimit,
    pub(crate) total: RawLimit,
    pub(crate) id: RawLimit,
    pub(crate) resets: RawLimit,
    pub(crate) fragments: RawLimit,
}

/// `struct arrivals`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawArrivals {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) shed_packets: u64,
}

// `aya` derives this promise for no type, and takes only types with it as keys and values of maps.
// SAFETY: all consist of integers in C's layout, without padding that could be uninitialised.
unsafe impl Pod for RawTerms {}
// SAFETY: as above.
unsafe impl Pod for RawCounters {}
// SAFETY: as above.
unsafe impl Pod for RawListener {}
// SAFETY: as above.
unsafe impl Pod for RawIdKeys {}
// SAFETY: as above.
unsafe impl Pod for RawStampKey {}
// SAFETY: as above.
unsafe impl Pod for RawLimit {}
// SAFETY: as above.
unsafe impl Pod for RawLimits {}
// SAFETY: as above.
unsafe impl Pod for RawArrivals {}

/// Asserts that a mirrored struct has the size and offsets of the header.
macro_rules! layout {
    ($name:ident, $size:literal, $($field:ident @ $offset:literal),+) => {
        const _: () = assert!(size_of::<$name>() == $size $(&& std::mem::offset_of!($name, $field) == $offset)+);
    };
}

layout!(RawTerms, 24, bytes_per_sec @ 0, burst_ns @ 8, priority @ 16, dscp @ 20);
layout!(RawCounters, 32, packets @ 0, bytes @ 8, delayed_packets @ 16, dropped_packets @ 24);
layout!(RawListener, 24, address @ 0, port @ 16, in_use @ 18, class @ 20);
layout!(RawIdKeys, 40, tag @ 0, mask @ 16, in_force @ 32);
layout!(RawStampKey, 24, key @ 0, in_force @ 16);
layout!(RawLimits, 80, prefix @ 0, total @ 16, id @ 32, resets @ 48, fragments @ 64);
layout!(RawArrivals, 24, packets @ 0, bytes @ 8, shed_packets @ 16);
const _: () = assert!(CLASSES == 256);
