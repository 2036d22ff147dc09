//! Leaves out the addresses of an engine that this host has no source for, and tells such an address from a shortage of ports.

use std::{
    iter,
    net::{IpAddr, SocketAddr},
};

use hyper::Uri;
use hyper_util::client::legacy::connect::dns::Name;
use pacing::source::exists_for;
use tower::{Service, util::MapResponse};

/// Leaves out the addresses that this host has no source for.
type Usable<A> = iter::Filter<A, fn(&SocketAddr) -> bool>;

/// A resolver that leaves these addresses out. Otherwise, the error for such an address, which hyper may try last, would hide that the
/// engine refuses connections at the others.
pub(super) type UsableResolver<R, A> = MapResponse<R, fn(A) -> Usable<A>>;

/// Makes a resolver leave out the addresses that this host has no source for.
pub(super) fn usable<R, A>(resolver: R) -> UsableResolver<R, A>
where
    R: Service<Name, Response = A>,
    A: Iterator<Item = SocketAddr>,
{
    MapResponse::new(resolver, |addresses| addresses.filter(exists_for as fn(&SocketAddr) -> bool))
}

/// Whether a URL names its host by an address that this host has no source for.
pub(super) fn is_missing_for(url: &Uri) -> bool {
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    host.parse().is_ok_and(|host: IpAddr| !exists_for(&(host, 0).into()))
}
