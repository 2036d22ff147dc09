//! `intf.h` in Rust: every size and offset is held to the header's at compile time.

use aya::Pod;

/// How many slots there are: class and direction, as in a mark.
pub(crate) const SLOTS: u32 = 512;
/// What a half of the terms says of priorities and DSCPs that stay as they are.
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

/// How many configs connection IDs may have.
pub(crate) const ID_CONFIGS: u32 = 8;

/// `struct listener`; the port in network order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub(crate) struct RawListener {
    pub(crate) address: [u8; 16],
    pub(crate) port: [u8; 2],
    pub(crate) unused: [u8; 2],
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
    pub(crate) resets: RawLimit,
}

// SAFETY: all are made of integers in C's layout, without padding that could be uninitialised.
unsafe impl Pod for RawTerms {}
// SAFETY: as above.
unsafe impl Pod for RawCounters {}
// SAFETY: as above.
unsafe impl Pod for RawListener {}
// SAFETY: as above.
unsafe impl Pod for RawIdKeys {}
// SAFETY: as above.
unsafe impl Pod for RawLimits {}

/// Holds a mirrored struct to the numbers of the header.
macro_rules! layout {
    ($name:ident, $size:literal, $($field:ident @ $offset:literal),+) => {
        const _: () = assert!(size_of::<$name>() == $size $(&& std::mem::offset_of!($name, $field) == $offset)+);
    };
}

layout!(RawTerms, 24, bytes_per_sec @ 0, burst_ns @ 8, priority @ 16, dscp @ 20);
layout!(RawCounters, 32, packets @ 0, bytes @ 8, delayed_packets @ 16, dropped_packets @ 24);
layout!(RawListener, 20, address @ 0, port @ 16);
layout!(RawIdKeys, 40, tag @ 0, mask @ 16, in_force @ 32);
layout!(RawLimits, 48, prefix @ 0, total @ 16, resets @ 32);
const _: () = assert!(crate::ingress::Reason::ALL.len() == 13);
