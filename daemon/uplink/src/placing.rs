//! The connection of a tunnel or request: a place on a connection with room, on the path that the placement chooses.

use std::{
    pin::pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use config::forward::TunnelMode;
use masque::{h3::Code, priority::Priority, target::Target};
use parking_lot::MutexGuard;
use quic::class::{Class, Membership, Terms};
use relay_client::{Opened, TunnelSecret, error::ConnectError};
use sched::path::{PathChoice, Placement, back};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use super::{Uplink, places::FORGET, state::State};
use crate::{
    line::{Line, Link, LinkId},
    path::{PathDemand, PathView},
};

mod divided;

pub use divided::PathBeside;

/// How long a relay may take to answer the request for a tunnel on a better path. The tunnel works meanwhile, and is asked again later.
const RETURN: Duration = Duration::from_secs(2);

/// A UDP tunnel that is open, and may be opened again on a better path.
pub struct OpenTunnel<'a> {
    /// Its place.
    pub place: &'a LinkId,
    /// Its class.
    pub membership: &'a Membership,
    /// Its target, and the form that the configuration allows.
    pub target: (&'a Target, TunnelMode),
    /// Names it to the relay.
    pub secret: Option<TunnelSecret>,
}

impl Uplink {
    /// Returns a place for a tunnel, on a connection that takes requests. If there is none, waits for a connection, back-off included,
    /// or for the end of another tunnel.
    ///
    /// # Errors
    /// There is no connection, and the awaited attempt to make one failed.
    pub async fn link(&self) -> Result<Link, Arc<ConnectError>> {
        self.link_of(None, None).await
    }

    /// Like [`link`](Self::link), for a tunnel or request of a class, on the path that its placement chooses. A tunnel that leaves the
    /// place `left` stays at its relay if another connection to that has room: only if there are several, its placement chooses among
    /// their paths, by what this tunnel still has to carry. At another relay, the target would see another source address.
    ///
    /// # Errors
    /// As [`link`](Self::link).
    pub async fn link_for(&self, class: &Class, left: Option<&LinkId>) -> Result<Link, Arc<ConnectError>> {
        let load = left.and_then(LinkId::load);
        let ask = self.has_several_paths().then(|| PathDemand::of_open(class, &self.sizes, load));
        Ok(self.link_of(ask, left.map(|left| &**left.line())).await?.after(load))
    }

    /// Like [`link`](Self::link), for a request for a model with these terms and this size of its body. If the request needs a copy and
    /// another path has room, the second place is for the copy.
    ///
    /// # Errors
    /// As [`link`](Self::link).
    pub async fn links_for_request(
        &self,
        terms: &Terms,
        body_bytes: u64,
    ) -> Result<(Link, Option<Link>), Arc<ConnectError>> {
        let ask = self.has_several_paths().then(|| PathDemand::of_request(terms, &self.sizes, body_bytes));
        let link = self.link_of(ask, None).await?;
        let copy = ask.filter(|ask| ask.placement == Placement::Redundant).and_then(|ask| self.other_link(&ask, &link));
        Ok((link.for_request(), copy.map(Link::for_request)))
    }

    /// Waits until a tunnel is to look for a better path, finds one, and is open there; also returns the class of the request.
    /// `signal` gives the priority signal of a class. Each time, the tunnel asks the relay once. If that fails, nothing else happens: the
    /// tunnel works where it is, so it waits for no place, and no other tunnel makes room for it.
    pub async fn better_tunnel(
        &self,
        tunnel: &OpenTunnel<'_>,
        signal: impl Fn(&Class) -> Option<Priority>,
    ) -> (Link, Opened, Arc<Class>) {
        let (target, mode) = tunnel.target;
        loop {
            tunnel.place.line().recalled().await;
            let class = tunnel.membership.get();
            let Some(link) = self.find_better(tunnel.place, &class) else { continue };
            let signal = signal(&class);
            let opened = tokio::select! {
                opened = timeout(RETURN, link.relay.open_udp_with(target, signal.as_ref(), tunnel.secret)) => opened,
                () = link.line().left() => continue,
            };
            match (opened, link.allows(mode)) {
                (Ok(Ok(opened)), Ok(())) => return (link, opened, class),
                (Ok(Ok(opened)), Err(_)) => opened.tunnel.reset(Code::RequestCancelled),
                (Ok(Err(_)) | Err(_), _) => {}
            }
        }
    }

    /// Takes a place for a tunnel of a class on a better path to the same relay than that of its current place, if there is one. At another
    /// relay, the target would see another source address. The path that an operator has chosen is better than all others.
    fn find_better(&self, present: &LinkId, class: &Class) -> Option<Link> {
        let (line, load) = (present.line(), present.load());
        let (state, relay) = (self.state.borrow(), &line.way().relay);
        let chosen = state.chosen();
        if !line.is_usable() || chosen.has_path_of(line) {
            return None;
        }
        let ask = PathDemand::of_open(class, &self.sizes, load);
        let lines = state.in_order(Instant::now());
        let is_candidate =
            |other: &&Arc<Line>| other.path_place != line.path_place && other.has_room() && other.leads_to(relay);
        let others: Vec<_> = lines.into_iter().filter(is_candidate).collect();
        let mut views = self.views.lock();
        let place = match others.iter().find(|other| chosen.has_path_of(other)) {
            Some(other) => other.path_place,
            None => self.estimated_better(&ask, line.path_place, &others, &views)?,
        };
        if let Some(view) = views.get_mut(place) {
            view.path.placed.push(ask.placed());
        }
        let link = others.into_iter().filter(|other| other.path_place == place).find_map(Line::link);
        link.map(|link| link.after(load).expecting(Some(ask.placed())))
    }

    /// Returns the index of a path of `others` that is estimated to be better than that at index `present`, if one is.
    fn estimated_better(
        &self,
        ask: &PathDemand,
        present: usize,
        others: &[&Arc<Line>],
        views: &[PathView],
    ) -> Option<usize> {
        let mut places = vec![present];
        for other in others {
            if !places.contains(&other.path_place) {
                places.push(other.path_place);
            }
        }
        // A path that was not examined yet would seem to carry nothing.
        places.retain(|place| views.get(*place).is_some_and(PathView::is_known));
        let paths = places.iter().filter_map(|place| views.get(*place)).map(|view| view.path.clone()).collect();
        let (request, paths) = ask.as_served(paths, self.discipline());
        let present = places.iter().position(|place| *place == present)?;
        places.get(back::better(ask.placement, &request, &paths, present)?).copied()
    }

    /// Takes a place for a copy of a request that already has a place, over the best of the other paths.
    fn other_link(&self, ask: &PathDemand, first: &Link) -> Option<Link> {
        let state = self.state.borrow();
        let lines = state.with_room(Instant::now(), None);
        let other = self.choose(ask, (&state, None), &lines, |choice, candidates| {
            let PathChoice::Copies(copies) = choice else { return None };
            let mut places = copies.iter().filter_map(|at| candidates.get(*at).copied());
            places.find(|place| *place != first.line().path_place)
        })?;
        let link = lines.into_iter().filter(|line| line.path_place == other).find_map(Line::link);
        link.map(|link| link.expecting(Some(ask.placed())))
    }

    /// Returns the indices of the paths of `lines` whose connections have the lowest [rank](super::choice::Choices::rank), and what is known
    /// of all paths. Returns `None` without lines.
    fn candidates(
        &self,
        (state, left): (&State, Option<&Line>),
        lines: &[&Arc<Line>],
    ) -> Option<(Vec<usize>, MutexGuard<'_, Vec<PathView>>)> {
        let chosen = state.chosen();
        // The states of connections may change meanwhile, so each rank is looked up once.
        let ranks: Vec<_> = lines.iter().map(|line| chosen.rank(line, left)).collect();
        let lowest = ranks.iter().min()?;
        let mut candidates: Vec<usize> = Vec::new();
        for (line, rank) in lines.iter().zip(&ranks) {
            if rank == lowest && !candidates.contains(&line.path_place) {
                candidates.push(line.path_place);
            }
        }
        candidates.sort_unstable();
        let mut views = self.views.lock();
        // The path of a new connection was not examined yet, and would seem to carry nothing.
        for at in &candidates {
            let Some(view) = views.get_mut(*at) else { continue };
            if !view.is_known() {
                let is_open = |line: &&Arc<Line>| line.path_place == *at && !line.is_closed();
                let of_path: Vec<_> = state.lines.iter().filter(is_open).collect();
                view.refresh(Instant::now(), &of_path);
            }
        }
        Some((candidates, views))
    }

    /// Chooses among the paths of `lines`, which are [those with room](State::with_room), and returns the index of the
    /// path that `pick` takes. The choice consists of indices into the candidates, which `pick` gets as well. Only
    /// paths of connections with the lowest [rank](super::choice::Choices::rank) are candidates.
    fn choose(
        &self,
        ask: &PathDemand,
        (state, left): (&State, Option<&Line>),
        lines: &[&Arc<Line>],
        pick: impl FnOnce(&PathChoice, &[usize]) -> Option<usize>,
    ) -> Option<usize> {
        let (candidates, mut views) = self.candidates((state, left), lines)?;
        let paths: Vec<_> = candidates.iter().filter_map(|at| views.get(*at)).map(|view| view.path.clone()).collect();
        let turn = self.turn.fetch_add(1, Relaxed);
        let (request, paths) = ask.as_served(paths, self.discipline());
        let choice = sched::path::place(ask.placement, &request, &paths, turn)?;
        let chosen = pick(&choice, &candidates)?;
        // Placements before the next look must see it.
        if let Some(view) = views.get_mut(chosen) {
            view.path.placed.push(ask.placed());
        }
        Some(chosen)
    }

    /// Returns the connections with room in the order in which to try them: connections of the chosen path first. A tunnel may leave the
    /// connection `left`.
    fn placed<'a>(&self, ask: Option<&PathDemand>, state: &'a State, left: Option<&Line>) -> Vec<&'a Arc<Line>> {
        let lines = state.with_room(Instant::now(), left);
        let Some(ask) = ask else { return lines };
        let best = |choice: &PathChoice, candidates: &[usize]| candidates.get(choice.path()).copied();
        let Some(chosen) = self.choose(ask, (state, left), &lines, best) else { return lines };
        let (mut first, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.path_place == chosen);
        first.extend(others);
        first
    }

    async fn link_of(&self, ask: Option<PathDemand>, left: Option<&Line>) -> Result<Link, Arc<ConnectError>> {
        let mut changes = self.state.subscribe();
        let failures = changes.borrow().failures;
        loop {
            let mut freed = pin!(self.freed.notified());
            freed.as_mut().enable();
            {
                let state = changes.borrow_and_update();
                if let Some(link) = self.placed(ask.as_ref(), &state, left).into_iter().find_map(Line::link) {
                    return Ok(link.expecting(ask.as_ref().map(PathDemand::placed)));
                }
                let failed = state.failures > failures && state.usable().next().is_none();
                if let Some(failure) = state.failure.as_ref().filter(|_| failed) {
                    return Err(failure.clone());
                }
            }
            self.wanted.notify_one();
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    // The sender is a part of `self`.
                    std::future::pending::<()>().await;
                },
                () = freed => {}
                // Nothing else tells that a relay may be asked for more tunnels again than it allowed.
                () = sleep(FORGET) => {}
            }
        }
    }

    /// Asks all local addresses for so many places: the address of the senders that need them has no sender that can leave.
    pub fn crowd(&self, places: usize) {
        self.crowding.send_replace(places);
    }

    /// Returns the number of places that local addresses are [asked](Self::crowd) for, and its changes.
    #[must_use]
    pub fn crowding(&self) -> watch::Receiver<usize> {
        self.crowding.subscribe()
    }

    /// Makes senders leave for others: `evict` removes one, and returns whether there was one that could leave.
    pub fn make_room(&self, mut evict: impl FnMut() -> bool) {
        // Under the lock of the number, so that no two addresses serve the same request.
        self.crowding.send_if_modified(|places| {
            while *places > 0 && evict() {
                *places -= 1;
            }
            false
        });
    }

    /// Notes how long a relay that has refused a request asks to wait, if it does: [tunnels that leave](Self::link_for) their connections take
    /// others first, for the longest wait between attempts to connect at most.
    pub fn put_off(&self, link: &Link, wait: Option<Duration>) {
        if let Some(wait) = wait {
            link.line().put_off(wait.min(self.backoff.1));
        }
    }

    /// Whether a connection takes tunnels, has room, and its relay has not [put off](Self::put_off) requests. A tunnel that another relay has
    /// put off need not wait then, and so finds one connection fewer each time.
    #[must_use]
    pub fn has_willing(&self) -> bool {
        self.state.borrow().with_room(Instant::now(), None).iter().any(|line| !line.is_put_off())
    }

    /// Waits for the time `pause` after a failed attempt to replace the tunnel in the place `left`, but not longer than the longest wait
    /// between attempts to connect. Ends earlier if the tunnel may stay, or once a connection takes tunnels that takes none now.
    pub async fn pause(&self, left: &LinkId, pause: Duration) {
        let mut changes = self.state.subscribe();
        let known: Vec<u64> = changes.borrow_and_update().usable().map(|line| line.id).collect();
        let is_new = |line: &Arc<Line>| !known.contains(&line.id);
        tokio::select! {
            () = sleep(pause.min(self.backoff.1)) => {}
            () = left.line().kept() => {}
            // The sender is a part of `self`.
            _ = changes.wait_for(|state| state.usable().any(is_new)) => {}
        }
    }

    /// If there is no connection that takes tunnels, returns why, as far as it is known.
    #[must_use]
    pub fn unreached(&self) -> Option<Option<Arc<ConnectError>>> {
        let state = self.state.borrow();
        state.usable().next().is_none().then(|| state.failure.clone())
    }

    /// If there is no connection and no attempt to make one is in progress, returns the time until the next attempt, if one is planned. A
    /// connection that is silent may answer again earlier.
    #[must_use]
    pub fn next_attempt_in(&self) -> Option<Duration> {
        let state = self.state.borrow();
        let has_none = state.lines.iter().all(|line| line.is_closed());
        state.next_attempt.filter(|_| has_none).map(|next| next.saturating_duration_since(Instant::now()))
    }

    /// If no connection can take tunnels or requests within `wait`, returns why. A relay of which nothing was heard may come within reach
    /// earlier than the next attempt to connect is due, as this host's addresses change.
    #[must_use]
    pub fn unreached_for(&self, wait: Duration) -> Option<Arc<ConnectError>> {
        let is_late = self.next_attempt_in().is_some_and(|next| next > wait);
        self.state.borrow().failure.clone().filter(|failure| is_late && !failure.is_unanswered())
    }

    /// Whether all places are taken and no further connection will soon bring more: a tunnel must end before another can be opened.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let state = self.state.borrow();
        state.is_alone() && state.usable().next().is_some() && !state.has_room(Instant::now())
    }
}

#[cfg(test)]
impl Uplink {
    /// Makes a connection to the first relay of a path, which is driven but not watched, and the last one to be expected.
    pub(crate) async fn connect(&self, path: usize) -> Arc<Line> {
        self.connect_to((path, 0)).await
    }

    /// Like [`connect`](Self::connect), to any relay of the path.
    pub(crate) async fn connect_to(&self, (path, place): (usize, usize)) -> Arc<Line> {
        let connected = self.attempt((path, place)).await.1.unwrap();
        let id = self.ids.fetch_add(1, Relaxed) + 1;
        let line = Line::new(&connected, (id, path, place), self.freed.clone(), self.sizes.clone());
        tokio::spawn(relay_client::drive(connected.connection));
        self.state.send_modify(|state| state.lines.push(line.clone()));
        self.views.lock()[path].refresh(Instant::now(), &[&line]);
        line
    }
}

#[cfg(test)]
mod tests;
