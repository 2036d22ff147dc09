//! The result of a look-up: the addresses of a name, or why there are none.

use std::{borrow::Cow, net::IpAddr};

/// The addresses of a name, or why there are none.
pub(super) type Answer = Result<Vec<IpAddr>, ResolveError>;

/// Why there are no addresses for a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// No name server answered in time.
    #[error("no name server answered in time")]
    Timeout,
    /// Too many lookups are in flight.
    #[error("too many lookups are in flight")]
    Overloaded,
    /// A name server answered with this RCODE, named as in the parameter `rcode` of Proxy-Status (RFC 9209 §2.3.2).
    /// `NOERROR` means that the name exists and has no addresses.
    #[error("a name server answered {0}")]
    Rcode(Cow<'static, str>),
    /// No name server could be queried, its answer was invalid, or the name cannot exist.
    #[error("no name server could be reached, or its answer was not valid")]
    Failed,
}
