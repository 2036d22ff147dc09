//! The QUIC endpoints of experiments.
//!
//! Each kind of endpoint compiles the whole transport for its own providers. They have a crate of their own so that this happens once:
//! not again for the unit tests of `experiment`, and with optimisation where those have none. So no public function here is generic.

mod departures;
pub mod direct;
pub mod inner;
pub mod stock;
mod unpaced;

use s2n_quic::provider::io::{testing::Io, tokio::Provider};

pub use self::departures::Departures;

/// The size of IP packets: Ethernet's MTU.
pub const MTU: u16 = 1_500;

/// What carries the packets of an endpoint.
pub enum Carrier {
    /// A simulated network.
    Simulated(Io),
    /// The transport's own sockets.
    Sockets(Provider),
}
