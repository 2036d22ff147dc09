//! UDP tunnels that can move to another connection.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// How many UDP tunnels on a connection can move to another one. A tunnel to a relay behind a hop counts as the tunnels that can move on
/// the connection inside it: if there are none, the end of the outer connection costs no tunnel that could have moved.
#[derive(Debug, Default)]
pub struct MovableTunnels {
    count: AtomicUsize,
    /// Of the connection whose tunnel carries this one, if it runs in a tunnel.
    outer: Option<Arc<Self>>,
}

/// A UDP tunnel that can move. Its connection counts it, and so do the connections that carry this connection, until this is dropped.
#[derive(Debug)]
pub struct MovableTunnel(Arc<MovableTunnels>);

impl MovableTunnels {
    /// Counts from zero the tunnels on a connection. If that runs in a tunnel, `outer` counts the tunnels of the connection that has it.
    #[must_use]
    pub fn new(outer: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { count: AtomicUsize::new(0), outer })
    }

    /// Counts a tunnel until the returned value is dropped: when it has moved, or has ended.
    #[must_use]
    pub fn hold(self: &Arc<Self>) -> MovableTunnel {
        self.outward().for_each(|tunnels| _ = tunnels.count.fetch_add(1, Relaxed));
        MovableTunnel(self.clone())
    }

    /// Returns how many tunnels can move and have not moved yet.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Returns these tunnels, and those of each connection on the way to the first relay.
    fn outward(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |tunnels| tunnels.outer.as_deref())
    }
}

impl Drop for MovableTunnel {
    fn drop(&mut self) {
        self.0.outward().for_each(|tunnels| _ = tunnels.count.fetch_sub(1, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tunnel_counts_on_its_connection_and_on_those_that_carry_it_until_it_has_moved() {
        let first = MovableTunnels::new(None);
        let second = MovableTunnels::new(Some(first.clone()));
        let third = MovableTunnels::new(Some(second.clone()));
        let counts = || [&first, &second, &third].map(|tunnels| tunnels.count());
        assert_eq!(counts(), [0; 3], "a connection inside another one is no tunnel that can move");
        let (of_second, of_third) = (second.hold(), third.hold());
        assert_eq!(counts(), [2, 2, 1]);
        drop(of_third);
        assert_eq!(counts(), [1, 1, 0]);
        drop(of_second);
        assert_eq!(counts(), [0; 3]);
    }
}
