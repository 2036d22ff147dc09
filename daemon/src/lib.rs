//! The daemon: sockets, clocks and tasks around the pure crates.

pub mod segments;
