//! Open tunnels and connections of both roles, listed in pages and changed one by one.

use std::{collections::HashSet, sync::Arc};

use config::targets::Protocol;
use edge::roster::{self, EdgeTunnel, LocalEntrance, Roster};
use futures::future::join_all;
use relay::tunnels::RelayTunnel;
use sched::class::ClassSettings;
use serving::view::{AliasView, EngineView, RequestView};
use uplink::{Destination, NotMoved, PathReport, PreparedMove};

use super::{
    Caller, Control, Error,
    view::{ConnectionView, Page, TunnelView, UplinkView, page_rows},
};

/// Selects tunnels.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only of this class.
    pub class: Option<String>,
    /// Only of this user.
    pub user: Option<String>,
    /// Only over this connection.
    pub connection: Option<u64>,
}

impl Control {
    /// Lists tunnels of both roles with IDs above `after`, at most `limit`; up to a full page if `limit` is 0.
    #[must_use]
    pub fn tunnels(&self, caller: &Caller, filter: &Filter, after: u64, limit: usize) -> Page<TunnelView> {
        let limit = page_rows(limit);
        // One more, to see whether another page follows.
        let (accepted, opened) = self.found_tunnels(filter, after, limit + 1);
        let accepted = accepted.iter().map(|found| TunnelView::of_relay(found, caller));
        let opened = opened.iter().map(|found| TunnelView::of_edge(found, caller));
        Page::of(accepted.chain(opened).collect(), limit, |tunnel| tunnel.id)
    }

    /// Finds tunnels with IDs above `after`, at most `limit` of each role.
    pub(super) fn found_tunnels(
        &self,
        filter: &Filter,
        after: u64,
        limit: usize,
    ) -> (Vec<Arc<RelayTunnel>>, Vec<Arc<roster::EdgeTunnel>>) {
        let Filter { class, user, connection } = filter;
        let is_of = |found: &ClassSettings| class.as_ref().is_none_or(|class| found.name == *class);
        let is_over = |found: u64| connection.is_none_or(|id| found == id);
        let accepted = |tunnel: &RelayTunnel| {
            is_over(tunnel.client.id)
                && user.as_ref().is_none_or(|user| tunnel.asked.user.as_deref() == Some(user))
                && is_of(tunnel.class().policy())
        };
        // An edge knows no users, and hops have no class.
        let opened = |tunnel: &roster::EdgeTunnel| {
            user.is_none()
                && is_over(tunnel.connection)
                && tunnel.class().map_or(class.is_none(), |class| is_of(class.policy()))
        };
        let relay = self.relay.as_ref();
        let accepted = relay.map(|relay| relay.tunnels.page(after, limit, accepted)).unwrap_or_default();
        (accepted, self.edge().tunnels.page(after, limit, opened))
    }

    /// Lists connections of clients with IDs above `after`, at most `limit`; up to a full page if `limit` is 0.
    #[must_use]
    pub fn client_connections(&self, caller: &Caller, after: u64, limit: usize) -> Page<ConnectionView> {
        let limit = page_rows(limit);
        Page::of(self.found_clients(caller, after, limit + 1), limit, |connection| connection.id)
    }

    /// Like [`Control::client_connections`], and includes the edge's connections to relays.
    #[must_use]
    pub fn connections(&self, caller: &Caller, after: u64, limit: usize) -> Page<ConnectionView> {
        let limit = page_rows(limit);
        let mut rows = self.found_clients(caller, after, limit + 1);
        rows.extend(self.edge().connections(after).iter().map(ConnectionView::of_edge));
        Page::of(rows, limit, |connection| connection.id)
    }

    fn found_clients(&self, caller: &Caller, after: u64, limit: usize) -> Vec<ConnectionView> {
        let Some(relay) = &self.relay else { return Vec::new() };
        let found = relay.connections.page(after, limit, |_| true);
        found.iter().map(|found| ConnectionView::of_relay(found, relay.schedule_of(found), caller)).collect()
    }

    /// Lists the relays that the edge uses.
    #[must_use]
    pub fn uplinks(&self, caller: &Caller) -> Vec<UplinkView> {
        let uplinks = self.edge().uplinks();
        let found = uplinks.iter().flat_map(|uplink| uplink.standpoints());
        found.map(|standpoint| UplinkView::new(standpoint, caller)).collect()
    }

    /// Lists the paths of the edge, for each set of local addresses that share connections.
    #[must_use]
    pub fn paths(&self) -> Vec<PathReport> {
        self.edge().uplinks().iter().flat_map(|uplink| uplink.path_states()).collect()
    }

    /// Moves the edge's UDP tunnels to a relay or a path, or returns to the order of preference and to placements; returns how many tunnels
    /// move. Nothing moves before all local addresses that name the relay are connected to it, or, in a move to a path, before every local
    /// address has a connection over the path.
    ///
    /// # Errors
    /// The caller has no right to write, there is no such relay or path, or a local address cannot connect to it.
    pub async fn move_edge(&self, caller: &Caller, to: Option<&Destination>) -> Result<usize, Error> {
        let author = caller.to_write()?;
        let uplinks = self.edge().uplinks();
        if uplinks.is_empty() {
            return Err(Error::NoEdge);
        }
        let mut moved = 0;
        match to {
            None => uplinks.iter().for_each(|uplink| uplink.prefer()),
            Some(to) => {
                let (mut prepared, mut errors) = (Vec::new(), Vec::new());
                for outcome in join_all(uplinks.into_iter().map(|uplink| uplink.prepare_move(to))).await {
                    match outcome {
                        Ok(ready) => prepared.push(ready),
                        Err(error) => errors.push(error),
                    }
                }
                // Local addresses that do not name the relay keep theirs. Connections to hops have no paths that tunnels could move to. Both
                // matter only if nothing can move and no attempt has failed.
                let rank = |error: &NotMoved| match error {
                    NotMoved::Unreachable(_) | NotMoved::NoAnswer(_) | NotMoved::Unused(_) | NotMoved::Slow(_) => 0,
                    NotMoved::Unknown { .. } => 1,
                    NotMoved::WithoutPaths => 2,
                };
                let faults = errors.into_iter().filter(|error| prepared.is_empty() || rank(error) == 0);
                if let Some(error) = faults.min_by_key(rank) {
                    return Err(Error::NotMoved(error));
                }
                let left: HashSet<u64> = prepared.into_iter().flat_map(PreparedMove::carry_out).collect();
                let moves = |tunnel: &EdgeTunnel| tunnel.protocol == Protocol::Udp && left.contains(&tunnel.connection);
                moved = self.edge().tunnels.page(0, usize::MAX, moves).len();
            }
        }
        let said = match to {
            Some(to) => format!("{moved} tunnels were moved to {to} by {author}"),
            None => format!("{author} has restored the order of preference and the placement of classes"),
        };
        tracing::info!(tunnels = moved, author, "{said}");
        self.tell("tunnel", said);
        Ok(moved)
    }

    /// Lists the gateway's open requests with IDs above `after`, at most `limit`; up to a full page if `limit` is 0.
    #[must_use]
    pub fn requests(&self, after: u64, limit: usize) -> Page<RequestView> {
        let limit = page_rows(limit);
        Page::of(self.parts.requests.page(after, limit + 1), limit, |request| request.id)
    }

    /// Lists the engines of the gateway. Readers see no URLs.
    #[must_use]
    pub fn engines(&self, caller: &Caller) -> Vec<EngineView> {
        let gateway = self.gateway.gateway();
        let engines = gateway.map(|gateway| gateway.engines()).unwrap_or_default();
        let shown = |view: EngineView| EngineView {
            engine: caller.shown(|| view.engine.clone()),
            trouble: view.trouble.as_ref().map(|trouble| caller.shown(|| trouble.clone())),
            ..view
        };
        engines.into_iter().map(shown).collect()
    }

    /// Lists the gateway's aliases and their policies. Readers see no paths.
    #[must_use]
    pub fn aliases(&self, caller: &Caller) -> Vec<AliasView> {
        let gateway = self.gateway.gateway();
        let shown = |name: String| if name.starts_with('/') { caller.shown(|| name.clone()) } else { name };
        let view = |view: AliasView| AliasView { policy: shown(view.policy), shadow: view.shadow.map(shown), ..view };
        gateway.map(|gateway| gateway.aliases()).unwrap_or_default().into_iter().map(view).collect()
    }

    /// Returns the edge role's open tunnels and connections.
    #[must_use]
    pub fn edge(&self) -> &Roster {
        &self.parts.edge.roster
    }

    /// Returns the local addresses that the edge role serves.
    #[must_use]
    pub fn entrances(&self) -> Vec<Arc<LocalEntrance>> {
        self.parts.edge.roster.entrances()
    }

    fn tunnel(&self, id: u64) -> Result<Arc<RelayTunnel>, Error> {
        let found = self.relay.as_ref().and_then(|relay| relay.tunnels.get(id));
        found.ok_or_else(|| Error::Unknown { what: "tunnel", name: id.to_string() })
    }

    /// Ends a tunnel.
    ///
    /// # Errors
    /// The caller may not write, or there is no such tunnel.
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

    /// Gives a tunnel a class regardless of the rules; an empty `class` lets the rules decide again.
    ///
    /// # Errors
    /// The caller may not write, or there is no such tunnel or class.
    pub fn set_tunnel_class(&self, caller: &Caller, id: u64, class: String) -> Result<TunnelView, Error> {
        let author = caller.to_write()?;
        if self.edge().tunnels.get(id).is_some() {
            return Err(Error::OfEdge { tunnel: id });
        }
        let tunnel = self.tunnel(id)?;
        let class = Some(class).filter(|class| !class.is_empty());
        let Some(relay) = &self.relay else { return Err(Error::Ending) };
        if let Some(class) = &class
            && relay.classes().get(class).is_none()
        {
            return Err(Error::Unknown { what: "class", name: class.clone() });
        }
        relay.pin(&tunnel, class);
        let class = tunnel.class().policy().name.clone();
        tracing::info!(tunnel = id, class, author, "class of a tunnel set by operator");
        self.tell("tunnel", format!("tunnel {id} was given the class {class} by {author}"));
        Ok(TunnelView::of_relay(&tunnel, caller))
    }
}
