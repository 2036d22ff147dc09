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

// SAFETY: both are made of integers in C's layout, without padding that could be uninitialised.
unsafe impl Pod for RawTerms {}
// SAFETY: as above.
unsafe impl Pod for RawCounters {}

/// Holds a mirrored struct to the numbers of the header.
macro_rules! layout {
    ($name:ident, $size:literal, $($field:ident @ $offset:literal),+) => {
        const _: () = assert!(size_of::<$name>() == $size $(&& std::mem::offset_of!($name, $field) == $offset)+);
    };
}

layout!(RawTerms, 24, bytes_per_sec @ 0, burst_ns @ 8, priority @ 16, dscp @ 20);
layout!(RawCounters, 32, packets @ 0, bytes @ 8, delayed_packets @ 16, dropped_packets @ 24);
