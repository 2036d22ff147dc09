//! The connection of a tunnel or request: a place on a connection with room, on the path that the placement chooses.

use std::{
    pin::pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use config::forward::TunnelMode;
use masque::{h3::Code, priority::Priority, target::Target};
use quic::class::{Class, Membership, Terms};
use relay_client::{Opened, TunnelSecret, error::ConnectError};
use sched::path::{PathChoice, Placement, back};
use tokio::time::{Instant, timeout};

use super::{Uplink, state::State};
use crate::{
    link::{Line, Link},
    path::{PathDemand, PathView},
};

/// How long a relay may take to answer the request for a tunnel on a better path. The tunnel works meanwhile, and is asked again later.
const RETURN: Duration = Duration::from_secs(2);

/// A UDP tunnel that is open, and may be opened again on a better path.
pub struct OpenTunnel<'a> {
    /// Its connection.
    pub line: &'a Line,
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
        self.link_of(None).await
    }

    /// Like [`link`](Self::link), for a tunnel or request of a class, on the path that its placement chooses.
    ///
    /// # Errors
    /// As [`link`](Self::link).
    pub async fn link_for(&self, class: &Class) -> Result<Link, Arc<ConnectError>> {
        let ask = self.has_several_paths().then(|| PathDemand::of(class, &self.sizes));
        self.link_of(ask).await
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
        let link = self.link_of(ask).await?;
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
            tunnel.line.recalled().await;
            let class = tunnel.membership.get();
            let Some(link) = self.find_better(tunnel.line, &class) else { continue };
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

    /// Takes a place for a tunnel of a class on a better path to the same relay than that of its connection, if there is one. At another
    /// relay, the target would see another source address. The path that an operator has chosen is better than all others.
    fn find_better(&self, line: &Line, class: &Class) -> Option<Link> {
        let (state, relay) = (self.state.borrow(), &line.way().relay);
        let chosen = state.chosen();
        if !line.is_usable() || chosen.has_path_of(line) {
            return None;
        }
        let ask = PathDemand::of(class, &self.sizes);
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
            view.path.placed.push(ask.request.part(ask.request.bytes));
        }
        others.into_iter().filter(|other| other.path_place == place).find_map(Line::link)
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
        let lines = state.in_order(Instant::now());
        let other = self.choose(ask, &state, &lines, |choice, candidates| {
            let PathChoice::Copies(copies) = choice else { return None };
            let mut places = copies.iter().filter_map(|at| candidates.get(*at).copied());
            places.find(|place| *place != first.line().path_place)
        })?;
        lines.into_iter().filter(|line| line.path_place == other).find_map(Line::link)
    }

    /// Chooses among the paths with room, and returns the index of the path that `pick` takes. The choice consists of indices into the
    /// candidates, which `pick` gets as well. If an operator has chosen a path that has room, it is the only candidate; if an operator has
    /// chosen a relay that has room, only paths to it are candidates.
    fn choose(
        &self,
        ask: &PathDemand,
        state: &State,
        lines: &[&Arc<Line>],
        pick: impl FnOnce(&PathChoice, &[usize]) -> Option<usize>,
    ) -> Option<usize> {
        let mut with_room: Vec<_> = lines.iter().copied().filter(|line| line.has_room()).collect();
        state.chosen().narrow(&mut with_room);
        let mut candidates: Vec<usize> = Vec::new();
        for line in with_room {
            if !candidates.contains(&line.path_place) {
                candidates.push(line.path_place);
            }
        }
        candidates.sort_unstable();
        let mut views = self.views.lock();
        // The path of a new connection was not examined yet, and would seem to carry nothing.
        for at in &candidates {
            let Some(view) = views.get_mut(*at) else { continue };
            if !view.is_known() {
                let of_path: Vec<_> = lines.iter().copied().filter(|line| line.path_place == *at).collect();
                view.refresh(Instant::now(), &of_path);
            }
        }
        let paths: Vec<_> = candidates.iter().filter_map(|at| views.get(*at)).map(|view| view.path.clone()).collect();
        let turn = self.turn.fetch_add(1, Relaxed);
        let (request, paths) = ask.as_served(paths, self.discipline());
        let choice = sched::path::place(ask.placement, &request, &paths, turn)?;
        let chosen = pick(&choice, &candidates)?;
        // Placements before the next look must see it.
        if let Some(view) = views.get_mut(chosen) {
            view.path.placed.push(ask.request.part(ask.request.bytes));
        }
        Some(chosen)
    }

    /// Sorts connections in the order in which to try them: connections of the chosen path first.
    fn placed<'a>(&self, ask: Option<&PathDemand>, state: &'a State) -> Vec<&'a Arc<Line>> {
        let lines = state.in_order(Instant::now());
        let Some(ask) = ask else { return lines };
        let best = |choice: &PathChoice, candidates: &[usize]| candidates.get(choice.path()).copied();
        let Some(chosen) = self.choose(ask, state, &lines, best) else { return lines };
        let (mut first, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.path_place == chosen);
        first.extend(others);
        first
    }

    async fn link_of(&self, ask: Option<PathDemand>) -> Result<Link, Arc<ConnectError>> {
        let mut changes = self.state.subscribe();
        let failures = changes.borrow().failures;
        loop {
            let mut freed = pin!(self.freed.notified());
            freed.as_mut().enable();
            {
                let state = changes.borrow_and_update();
                if let Some(link) = self.placed(ask.as_ref(), &state).into_iter().find_map(Line::link) {
                    return Ok(link);
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
            }
        }
    }

    /// If there is no connection that takes tunnels, returns why, as far as it is known.
    #[must_use]
    pub fn unreached(&self) -> Option<Option<Arc<ConnectError>>> {
        let state = self.state.borrow();
        state.usable().next().is_none().then(|| state.failure.clone())
    }

    /// Whether all places are taken and no further connection will soon bring more: a tunnel must end before another can be opened.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let state = self.state.borrow();
        state.is_alone && state.usable().next().is_some() && !state.has_room()
    }
}

#[cfg(test)]
impl Uplink {
    /// Makes a connection over a path, which is driven but not watched, and the last one to be expected.
    pub(crate) async fn connect(&self, path: usize) -> Arc<Line> {
        let connected = self.attempt((path, 0)).await.1.unwrap();
        let line = Line::new(&connected, (7, path, 0), self.freed.clone(), self.sizes.clone());
        tokio::spawn(relay_client::drive(connected.connection));
        self.state.send_modify(|state| {
            state.lines.push(line.clone());
            state.is_alone = true;
        });
        self.views.lock()[path].refresh(Instant::now(), &[&line]);
        line
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use config::policy::Policy;
    use futures::future::join_all;
    use quic::class::PolicyRole;
    use role::classes::Classes;

    use super::{super::choice::Choices, *};
    use crate::{
        path::{Path, PathTerms},
        tests::{Does, PATIENCE, TestRelay},
        uplink::UplinkResources,
    };

    /// The only class of a policy, with this placement.
    fn class(placement: Placement) -> Arc<Class> {
        let policy = Policy::from_toml(&format!("[class.spread]\nplacement = \"{}\"\n", placement.name())).unwrap();
        Classes::new(policy, PolicyRole::Edge, &Default::default(), |_| Default::default())
            .get("spread")
            .unwrap()
            .clone()
    }

    /// The terms of a path that costs so many seconds.
    fn costs(seconds: u64) -> PathTerms {
        PathTerms { cost: Duration::from_secs(seconds), rate: None }
    }

    /// Starts two relays, and an uplink with a connection over each of `paths`. A path is the index of its relay, and its cost in seconds.
    async fn connected<const N: usize>(paths: [(usize, u64); N]) -> ([TestRelay; 2], Arc<Uplink>, [Arc<Line>; N]) {
        let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
        let name = |(relay, cost): (usize, u64)| format!("{relay}-{cost}");
        let path = |of: (usize, u64)| Path { name: name(of), ..Path::plain(vec![relays[of.0].endpoint()]) };
        let uplink = Uplink::over(paths.map(path).into(), None, (PATIENCE, PATIENCE), UplinkResources::default());
        uplink.set_terms(&paths.map(|of| (name(of), costs(of.1))).into());
        let lines = join_all((0..N).map(|path| uplink.connect(path))).await;
        (relays, uplink, lines.try_into().ok().unwrap())
    }

    #[tokio::test]
    async fn a_tunnel_finds_a_better_path_only_to_its_relay() {
        let (_relays, uplink, lines) = connected([(0, 0), (0, 9), (1, 99)]).await;
        let membership = Membership::default();
        let found = |line: &Arc<Line>| uplink.find_better(line, &membership.get()).map(|link| link.line().path_place);
        assert_eq!(found(&lines[1]), Some(0));
        assert_eq!(found(&lines[0]), None, "it has the best path");
        assert_eq!(found(&lines[2]), None, "the others lead to another relay");
        lines[0].doubt(true);
        assert_eq!(found(&lines[1]), None, "the better path is silent");
    }

    #[tokio::test]
    async fn placements_and_tunnels_that_are_asked_follow_new_terms_at_once() {
        let (_relays, uplink, lines) = connected([(0, 0), (0, 9)]).await;
        let class = class(Placement::Paced);
        let placed = async || uplink.link_for(&class).await.unwrap().line().path_place;
        let better = |line: &Arc<Line>| uplink.find_better(line, &class).map(|link| link.line().path_place);
        assert_eq!((placed().await, better(&lines[0])), (0, None));
        uplink.set_terms(&[("0-0".to_owned(), costs(9))].into());
        assert_eq!((placed().await, better(&lines[0])), (1, Some(1)), "the second has no cost any more");
        let slow = PathTerms { rate: Some(1), ..PathTerms::default() };
        uplink.set_terms(&[("0-9".to_owned(), slow)].into());
        assert_eq!(placed().await, 0);
        assert_eq!(uplink.path_states()[1].bytes_per_sec, 1);
        uplink.views.lock()[1].refresh(Instant::now(), &[&lines[1]]);
        assert_eq!(uplink.path_states()[1].bytes_per_sec, 1, "what is measured does not replace it");
        uplink.set_terms(&BTreeMap::new());
        assert!(uplink.path_states()[1].bytes_per_sec > 1, "it is measured again");
    }

    #[tokio::test]
    async fn all_placements_keep_to_the_relay_that_an_operator_has_chosen_while_it_has_room() {
        let (relays, uplink, lines) = connected([(0, 0), (1, 9)]).await;
        let name = relays[1].endpoint().origin().to_string();
        let path_of = async |class: &Class| uplink.link_for(class).await.unwrap().line().path_place;
        assert_eq!(path_of(&class(Placement::Paced)).await, 0, "it costs less");
        uplink.state.send_modify(|state| state.chosen.relay = Some(name.clone()));
        for placement in Placement::ALL {
            let class = class(placement);
            assert_eq!([path_of(&class).await, path_of(&class).await], [1, 1], "{}", placement.name());
        }
        let (first, copy) = uplink.links_for_request(&class(Placement::Redundant).terms(None), 1).await.unwrap();
        assert_eq!((first.line().path_place, copy.is_none()), (1, true), "no copy goes to another relay");
        lines[1].doubt(true);
        assert_eq!(path_of(&class(Placement::Paced)).await, 0, "it does not answer");
    }

    #[tokio::test]
    async fn all_placements_keep_to_the_path_that_an_operator_has_chosen_while_it_has_room() {
        let (relays, uplink, lines) = connected([(0, 0), (0, 9), (1, 0)]).await;
        let other_relay = relays[1].endpoint().origin().to_string();
        let path_of = async |class: &Class| uplink.link_for(class).await.unwrap().line().path_place;
        let choose = |path, relay| uplink.state.send_modify(|state| state.chosen = Choices { path, relay });
        for relay in [None, Some(other_relay)] {
            choose(Some(1), relay);
            for placement in Placement::ALL {
                let class = class(placement);
                assert_eq!([path_of(&class).await, path_of(&class).await], [1, 1], "{}", placement.name());
            }
        }
        let (first, copy) = uplink.links_for_request(&class(Placement::Redundant).terms(None), 1).await.unwrap();
        assert_eq!((first.line().path_place, copy.is_none()), (1, true), "no copy takes another path");
        lines[1].doubt(true);
        assert_eq!(path_of(&class(Placement::Paced)).await, 2, "it does not answer: only the relay is chosen");
        choose(Some(1), None);
        assert_eq!(path_of(&class(Placement::RoundRobin)).await + path_of(&class(Placement::RoundRobin)).await, 2);
    }

    #[tokio::test]
    async fn tunnels_that_are_asked_go_to_the_path_that_an_operator_has_chosen_and_do_not_leave_it() {
        let (_relays, uplink, lines) = connected([(0, 0), (0, 9), (0, 99), (1, 0)]).await;
        let found = |line: &Arc<Line>| {
            let class = class(Placement::Paced);
            uplink.find_better(line, &class).map(|link| link.line().path_place)
        };
        assert_eq!([0, 1, 2].map(|place| found(&lines[place])), [None, Some(0), Some(0)]);
        uplink.state.send_modify(|state| state.chosen.path = Some(1));
        assert_eq!([0, 1, 2].map(|place| found(&lines[place])), [Some(1), None, Some(1)], "whatever it costs");
        assert_eq!(found(&lines[3]), None, "the chosen path leads to another relay");
        lines[1].doubt(true);
        assert_eq!([0, 2].map(|place| found(&lines[place])), [None, Some(0)], "the chosen path is silent");
    }
}
