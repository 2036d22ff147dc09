//! The QUIC endpoints of experiments.
//!
//! Each kind of endpoint compiles the whole transport for its own providers. In this crate, that happens once, with optimisation, for
//! `experiment` and for its unit tests. So that it does not happen there again, no public function is generic.
//!
//! | module | its endpoints |
//! |---|---|
//! | [`direct`] | both ends of a plan without a relay |
//! | [`inner`] | inside tunnels over the simulated network |
//! | [`stock`] | inside tunnels between processes |

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
