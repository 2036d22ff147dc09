//! What is open: tunnels and connections of both roles, listed in pages and changed one by one, and sums by class.

use std::{collections::HashMap, sync::Arc};

use config::policy;
use edge::roster::{self, Roster};
use quic::class::{ClassCounters, Role};
use relay::{Relay, tunnels::Tunnel};
use role::table::Table;

use super::{Caller, Control, Error};

/// Rows of one page at most.
pub const PAGE: usize = 1000;

/// What became of the traffic of a class in one role, since the start.
#[derive(Clone, Debug)]
pub struct ClassStats {
    /// The class.
    pub class: String,
    /// The role, as metrics name it.
    pub role: Role,
    /// Counters of what left for peers, and of what did not.
    pub counters: ClassCounters,
    /// Packets of the class, in both roles, that were handed to the kernel late.
    pub late_packets: u64,
    /// Tunnels that are open.
    pub tunnels: u64,
}

/// A page of a list.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// What is on it.
    pub rows: Vec<Arc<T>>,
    /// Where the next one begins, if there is one.
    pub next: Option<u64>,
}

/// Which tunnels are meant.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Of this class.
    pub class: Option<String>,
    /// Of this user.
    pub user: Option<String>,
    /// Over this connection.
    pub connection: Option<u64>,
}

impl Control {
    /// Lists tunnels behind an ID.
    #[must_use]
    pub fn tunnels(&self, filter: &Filter, after: u64, limit: usize) -> Page<Tunnel> {
        let is_wanted = |tunnel: &Tunnel| {
            filter.connection.is_none_or(|id| tunnel.caller.id == id)
                && filter.user.as_deref().is_none_or(|user| tunnel.asked.user.as_deref() == Some(user))
                && filter.class.as_deref().is_none_or(|class| tunnel.class().policy().name == class)
        };
        page(self.relay.as_ref().map(|relay| &relay.tunnels), after, limit, is_wanted, |tunnel| tunnel.id)
    }

    /// Lists connections behind an ID.
    #[must_use]
    pub fn connections(&self, after: u64, limit: usize) -> Page<relay::Caller> {
        page(self.relay.as_ref().map(|relay| &relay.connections), after, limit, |_| true, |caller| caller.id)
    }

    /// What the edge role has open.
    #[must_use]
    pub fn edge(&self) -> &Roster {
        &self.parts.edge.roster
    }

    /// Lists the edge's tunnels behind an ID, `limit` at most.
    #[must_use]
    pub fn edge_tunnels(&self, filter: &Filter, after: u64, limit: usize) -> Vec<Arc<roster::Tunnel>> {
        let is_wanted = |tunnel: &roster::Tunnel| {
            filter.user.is_none()
                && filter.connection.is_none_or(|id| tunnel.connection == id)
                && filter.class.as_deref().is_none_or(|class| tunnel.class().policy().name == class)
        };
        self.edge().tunnels.page(after, limit, is_wanted)
    }

    fn tunnel(&self, id: u64) -> Result<Arc<Tunnel>, Error> {
        let found = self.relay.as_ref().and_then(|relay| relay.tunnels.get(id));
        found.ok_or_else(|| Error::Unknown { what: "tunnel", name: id.to_string() })
    }

    /// Ends a tunnel.
    ///
    /// # Errors
    /// The caller may not, or there is none.
    pub fn close_tunnel(&self, caller: &Caller, id: u64) -> Result<(), Error> {
        let author = caller.to_write()?;
        match self.edge().tunnels.get(id) {
            Some(tunnel) => tunnel.close(),
            None => self.tunnel(id)?.close(),
        }
        tracing::info!(tunnel = id, author, "tunnel closed by operator");
        self.tell("tunnel", format!("tunnel {id} was closed by {author}"));
        Ok(())
    }

    /// Gives a tunnel a class whatever the rules say; `None` has rules decide again.
    ///
    /// # Errors
    /// The caller may not, or there is no such tunnel or class.
    pub fn set_tunnel_class(&self, caller: &Caller, id: u64, class: Option<String>) -> Result<Arc<Tunnel>, Error> {
        let author = caller.to_write()?;
        if self.edge().tunnels.get(id).is_some() {
            return Err(Error::OfEdge { tunnel: id });
        }
        let tunnel = self.tunnel(id)?;
        let Some(relay) = &self.relay else { return Err(Error::Ending) };
        let classes = relay.classes();
        if let Some(class) = &class
            && classes.get(class).is_none()
        {
            return Err(Error::Unknown { what: "class", name: class.clone() });
        }
        tunnel.set_pin(class, &classes);
        let class = tunnel.class().policy().name.clone();
        tracing::info!(tunnel = id, class, author, "class of a tunnel set by operator");
        self.tell("tunnel", format!("tunnel {id} was given the class {class} by {author}"));
        Ok(tunnel)
    }

    /// How many connections and tunnels there are.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let of = |relay: &Arc<Relay>| (relay.connections.len() as u64, relay.tunnels.len() as u64);
        let (connections, tunnels) = self.relay.as_ref().map(of).unwrap_or_default();
        (connections + self.edge().connections(0).len() as u64, tunnels + self.edge().tunnels.len() as u64)
    }

    /// What became of each class's traffic.
    #[must_use]
    pub fn classes(&self) -> Vec<ClassStats> {
        let mut tunnels = HashMap::<(Role, String), u64>::new();
        for tunnel in self.relay.iter().flat_map(|relay| relay.tunnels.all()) {
            *tunnels.entry((Role::Relay, tunnel.class().policy().name.clone())).or_default() += 1;
        }
        for tunnel in self.edge().tunnels.all() {
            *tunnels.entry((Role::Edge, tunnel.class().policy().name.clone())).or_default() += 1;
        }
        let roles =
            [self.relay.is_some().then_some(Role::Relay), (!self.facts().forwards.is_empty()).then_some(Role::Edge)];
        let policy = self.policies.current();
        let classes = policy.policy.classes.iter();
        let of = |(role, class): (Role, &policy::Class)| ClassStats {
            class: class.name.clone(),
            role,
            counters: self.parts.classes.of(role, &class.name),
            late_packets: self.parts.io.departures.late_packets(&class.name),
            tunnels: tunnels.get(&(role, class.name.clone())).copied().unwrap_or(0),
        };
        roles.into_iter().flatten().flat_map(|role| classes.clone().map(move |class| (role, class))).map(of).collect()
    }

    /// How many packets left late.
    #[must_use]
    pub fn late_packets(&self) -> u64 {
        self.parts.io.late.get()
    }
}

fn page<T>(
    table: Option<&Table<T>>,
    after: u64,
    limit: usize,
    is_wanted: impl Fn(&T) -> bool,
    id: impl Fn(&T) -> u64,
) -> Page<T> {
    let limit = if limit == 0 { PAGE } else { limit.min(PAGE) };
    // One more, to know whether that was all.
    let mut rows = table.map(|table| table.page(after, limit + 1, is_wanted)).unwrap_or_default();
    let is_last = rows.len() <= limit;
    rows.truncate(limit);
    Page { next: if is_last { None } else { rows.last().map(|row| id(row)) }, rows }
}
