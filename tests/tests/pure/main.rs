//! The pure ring of whole products: real QUIC endpoints over a simulated network in virtual time, and checks of the
//! sources. Needs neither root nor a kernel.

mod arrows;
mod cancellation;
mod dispatch;
mod documents;
mod edt_pace;
mod guests;
mod install;
mod names;
mod pumps;
mod sizes;
mod soak;
mod strangers;
mod summary;
mod tunnels;
