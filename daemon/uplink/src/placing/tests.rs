//! Which connection new tunnels get, and which one tunnels get that leave theirs.

use std::{collections::BTreeMap, time::Duration};

use config::policy::Policy;
use futures::future::join_all;
use masque::tunnel::Form;
use quic::class::PolicyRole;
use role::{classes::Classes, traffic::Traffic};
use test_relay::{Does, PATIENCE, TestRelay, eventually};

use super::{super::choice::Choices, *};
use crate::{Path, PathTerms, UplinkResources};

/// The only class of a policy, with this placement.
fn class(placement: Placement) -> Arc<Class> {
    let policy = Policy::from_toml(&format!("[class.spread]\nplacement = \"{}\"\n", placement.name())).unwrap();
    Classes::new(policy, PolicyRole::Edge, &Default::default(), |_| Default::default()).get("spread").unwrap().clone()
}

/// The terms of a path that costs so many seconds.
fn costs(seconds: u64) -> PathTerms {
    PathTerms { cost: Duration::from_secs(seconds), rate: None }
}

/// Starts two relays, and an uplink with a connection over each of `paths`. A path is the index of its relay, and its cost in seconds.
async fn connected<const N: usize>(paths: [(usize, u64); N]) -> ([TestRelay; 2], Arc<Uplink>, [Arc<Line>; N]) {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let name = |(relay, cost): (usize, u64)| format!("{relay}-{cost}");
    let path = |of: (usize, u64)| Path::new(&name(of), vec![relays[of.0].endpoint()]);
    let uplink = Uplink::over(paths.map(path).into(), None, (PATIENCE, PATIENCE), UplinkResources::default());
    uplink.set_terms(&paths.map(|of| (name(of), costs(of.1))).into());
    let lines = join_all((0..N).map(|path| uplink.connect(path))).await;
    (relays, uplink, lines.try_into().ok().unwrap())
}

#[tokio::test]
async fn a_tunnel_finds_a_better_path_only_to_its_relay() {
    let (_relays, uplink, lines) = connected([(0, 0), (0, 9), (1, 99)]).await;
    let membership = Membership::default();
    let found = |line: &Arc<Line>| {
        let link = uplink.find_better(&LinkId::unused(line), &membership.get());
        link.map(|link| link.line().path_place)
    };
    assert_eq!(found(&lines[1]), Some(0));
    assert_eq!(found(&lines[0]), None, "it has the best path");
    assert_eq!(found(&lines[2]), None, "the others lead to another relay");
    lines[0].doubt(true);
    assert_eq!(found(&lines[1]), None, "the better path is silent");
}

/// Returns the path and the relay of the connection that a tunnel gets.
async fn place_of(uplink: &Uplink, class: &Class, left: Option<&Arc<Line>>) -> (usize, usize) {
    let left = left.map(LinkId::unused);
    let link = timeout(PATIENCE, uplink.link_for(class, left.as_ref())).await.expect("it has a place").unwrap();
    (link.line().path_place, link.line().place)
}

#[tokio::test]
async fn a_tunnel_that_leaves_its_path_stays_at_its_relay_over_the_best_path_to_that() {
    let (relays, uplink, lines) = connected([(1, 0), (0, 0), (1, 99), (1, 9)]).await;
    let class = class(Placement::Paced);
    let path_of = async |left| place_of(&uplink, &class, left).await.0;
    lines[0].doubt(true);
    lines[0].leave();
    assert_eq!(path_of(None).await, 1, "a new tunnel takes the path that costs least");
    assert_eq!(path_of(Some(&lines[0])).await, 3);
    let name = relays[0].endpoint().origin().to_string();
    uplink.state.send_modify(|state| state.chosen.relay = Some(name));
    assert_eq!(path_of(Some(&lines[0])).await, 1, "an operator has chosen the other relay");
    uplink.state.send_modify(|state| state.chosen = Choices { path: Some(1), relay: None });
    assert_eq!(path_of(Some(&lines[0])).await, 1, "an operator has chosen another path");
    uplink.state.send_modify(|state| state.chosen = Choices::default());
    lines[3].note_slow(true);
    assert_eq!(path_of(Some(&lines[0])).await, 2, "a slow path takes no tunnels");
    lines[2].doubt(true);
    assert_eq!(path_of(Some(&lines[0])).await, 1, "no path to its relay works");
    lines[2].doubt(false);
    lines[0].close();
    eventually(|| !lines[0].relay.http().takes_requests()).await;
    assert_eq!(path_of(Some(&lines[0])).await, 1, "its relay has said that it goes away");
}

/// Starts two relays, and an uplink whose two paths lead to both.
fn uplink_to_both() -> ([TestRelay; 2], Arc<Uplink>) {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let endpoints = || relays.iter().map(TestRelay::endpoint).collect();
    let path = |name: &str| Path::new(name, endpoints());
    let paths = vec![path("a"), path("b")];
    let uplink = Uplink::over(paths, None, (PATIENCE, Duration::ZERO), UplinkResources::default());
    (relays, uplink)
}

#[tokio::test]
async fn a_tunnel_that_leaves_its_path_stays_at_its_relay_though_the_other_path_prefers_another() {
    let (_relays, uplink) = uplink_to_both();
    let left = uplink.connect_to((0, 1)).await;
    let same_path = uplink.connect_to((0, 1)).await;
    for place in [0, 1] {
        uplink.connect_to((1, place)).await;
    }
    left.leave();
    for placement in Placement::ALL {
        let class = class(placement);
        left.doubt(false);
        assert_eq!(place_of(&uplink, &class, Some(&left)).await.1, 1, "{}", placement.name());
        left.doubt(true);
        same_path.note_slow(true);
        assert_eq!(place_of(&uplink, &class, Some(&left)).await, (1, 1), "{}", placement.name());
        same_path.note_slow(false);
        uplink.state.send_modify(|state| state.chosen.path = Some(1));
        assert_eq!(place_of(&uplink, &class, Some(&left)).await, (1, 1), "an operator has chosen the other path");
        uplink.state.send_modify(|state| state.chosen.path = None);
    }
}

#[tokio::test]
async fn a_tunnel_whose_connection_is_silent_prefers_no_other_connection_over_its_path_to_its_relay() {
    let (_relays, uplink) = uplink_to_both();
    let left = uplink.connect_to((0, 1)).await;
    uplink.connect_to((0, 1)).await;
    uplink.connect_to((1, 0)).await;
    uplink.set_terms(&[("a".to_owned(), costs(9))].into());
    let class = class(Placement::Paced);
    left.leave();
    assert_eq!(place_of(&uplink, &class, Some(&left)).await, (0, 1));
    left.doubt(true);
    assert_eq!(place_of(&uplink, &class, Some(&left)).await, (1, 0));
}

#[tokio::test]
async fn new_tunnels_use_the_own_relay_of_a_path_and_tunnels_that_leave_another_path_their_own_relay() {
    let (_relays, uplink) = uplink_to_both();
    let (own, other) = (uplink.connect_to((0, 0)).await, uplink.connect_to((0, 1)).await);
    let left = uplink.connect_to((1, 1)).await;
    left.leave();
    let full: Vec<_> = std::iter::from_fn(|| own.link()).collect();
    let (class, grows) = (class(Placement::Paced), |grows| {
        uplink.state.send_modify(|state| state.may_grow = vec![grows, false]);
    });
    grows(true);
    let has_room = || uplink.state.borrow().has_room(Instant::now());
    let mut new = Box::pin(uplink.link_for(&class, None));
    assert!(futures::poll!(&mut new).is_pending(), "another connection to the relay is near");
    let mut on_any = Box::pin(uplink.link());
    assert!(futures::poll!(&mut on_any).is_pending() && !has_room() && !uplink.is_full());
    assert_eq!(place_of(&uplink, &class, Some(&left)).await, (0, 1), "that tunnel is at this relay");
    let another = uplink.connect_to((0, 0)).await;
    let placed = new.await.unwrap();
    assert!(Arc::ptr_eq(placed.line(), &another) && has_room());
    drop((placed, on_any));

    let more: Vec<_> = std::iter::from_fn(|| another.link()).collect();
    assert!(!has_room());
    grows(false);
    assert_eq!(place_of(&uplink, &class, None).await, (0, 1), "no other connection is near");
    assert!(has_room() && !uplink.is_full());
    grows(true);
    let name = uplink.endpoint_of(&other).unwrap().origin().to_string();
    uplink.state.send_modify(|state| state.chosen.relay = Some(name));
    drop((full, more));
    assert_eq!(place_of(&uplink, &class, None).await, (0, 1), "an operator has chosen that relay");
    let _full: Vec<_> = std::iter::from_fn(|| other.link()).collect();
    assert!(!has_room(), "the others are beside it");
}

#[tokio::test]
async fn placements_and_tunnels_that_are_asked_follow_new_terms_at_once() {
    let (_relays, uplink, lines) = connected([(0, 0), (0, 9)]).await;
    let class = class(Placement::Paced);
    let placed = async || uplink.link_for(&class, None).await.unwrap().line().path_place;
    let better =
        |line: &Arc<Line>| uplink.find_better(&LinkId::unused(line), &class).map(|link| link.line().path_place);
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
async fn a_tunnel_that_leaves_its_path_or_is_asked_is_placed_by_what_it_carries_and_not_as_a_new_one() {
    let (_relays, uplink, lines) = connected([(0, 0), (0, 1), (0, 2)]).await;
    let slow = PathTerms { rate: Some(1_000_000), ..PathTerms::default() };
    let fast = PathTerms { rate: Some(100_000_000), ..costs(2) };
    uplink.set_terms(&[("0-0".to_owned(), slow), ("0-1".to_owned(), slow), ("0-2".to_owned(), fast)].into());
    let class = class(Placement::Paced);
    let [quiet, busy] = [(); 2].map(|()| lines[0].link().unwrap());
    let traffic = Arc::<Traffic>::default();
    quiet.carries_traffic(Arc::default(), &class, None);
    busy.carries_traffic(traffic.clone(), &class, None);
    traffic.add_down(10_000_000, 1);
    _ = lines[0].placed(Duration::from_secs(1));
    let better = |link: &Link| uplink.find_better(&link.id(), &class).map(|link| link.line().path_place);
    assert_ne!(better(&quiet), Some(2), "that costs more than it gains");
    assert_eq!(better(&busy), Some(2), "it carries ten megabytes a second");
    lines[0].leave();
    let mut moved = Vec::new();
    for left in [&quiet, &busy] {
        moved.push(uplink.link_for(&class, Some(&left.id())).await.unwrap());
    }
    assert_eq!(moved.iter().map(|link| link.line().path_place).collect::<Vec<_>>(), [1, 2]);

    let more = Arc::<Traffic>::default();
    moved[1].carries_traffic(more.clone(), &class, None);
    busy.forget_traffic();
    more.add_up(5, 1);
    let placed = lines[2].placed(Duration::from_millis(1));
    assert!(placed.len() == 1 && placed[0].bytes > 9_000_000, "{placed:?}: it goes on as before");
    drop(moved);
    assert_eq!(uplink.sizes.expected("spread"), 10_000_005, "what it has carried on both paths is its size");
}

#[tokio::test]
async fn a_tunnel_counts_from_its_placement_on_and_not_only_once_it_is_open() {
    let (_relays, uplink, lines) = connected([(0, 0), (1, 9)]).await;
    let class = class(Placement::Paced);
    let expected = || lines[0].placed(Duration::ZERO).iter().map(|placed| placed.bytes).collect::<Vec<_>>();
    let link = uplink.link_for(&class, None).await.unwrap();
    assert_eq!((link.line().path_place, expected()), (0, vec![crate::sizes::FIRST_BYTES]));
    link.carries_traffic(Arc::default(), &class, None);
    assert_eq!(expected().len(), 1, "it counts once");
    let refused = uplink.link_for(&class, None).await.unwrap();
    assert_eq!(expected().len(), 2);
    drop((link, refused));
    assert_eq!(expected().len(), 0);
}

#[tokio::test]
async fn a_large_answer_may_take_the_paths_that_work_cost_little_and_are_not_passed_over_by_an_operator() {
    let (_relays, uplink, lines) = connected([(0, 0), (1, 0), (0, 99_999)]).await;
    let class = class(Placement::Paced);
    let link = uplink.link_for(&class, None).await.unwrap();
    let present = link.line().path_place;
    let other = 1 - present;
    let beside = || uplink.paths_beside(&class, &link.id(), 1 << 30);
    assert_eq!(beside().iter().map(|beside| beside.path).collect::<Vec<_>>(), [other]);
    assert!(beside()[0].bytes_per_sec > 0);
    assert_eq!(uplink.link_on(other).map(|link| link.line().path_place), Some(other));
    lines[other].doubt(true);
    assert!(beside().is_empty() && uplink.link_on(other).is_none(), "it is silent");
    lines[other].doubt(false);
    for chosen in [present, other] {
        uplink.state.send_modify(|state| state.chosen.path = Some(chosen));
        assert!(beside().is_empty(), "an operator has chosen path {chosen}, and the request is on {present}");
        let taken = [present, other].map(|path| uplink.link_on(path).map(|link| link.line().path_place));
        assert_eq!(taken, [Some(chosen); 2], "which path takes further parts");
    }
    uplink.state.send_modify(|state| state.chosen.path = Some(2));
    assert_eq!(uplink.link_on(other).map(|link| link.line().path_place), Some(2), "neither of the two");
    lines[2].doubt(true);
    assert_eq!(uplink.link_on(other).map(|link| link.line().path_place), Some(other), "it does not work");
}

#[tokio::test]
async fn all_placements_keep_to_the_relay_that_an_operator_has_chosen_while_it_has_room() {
    let (relays, uplink, lines) = connected([(0, 0), (1, 9)]).await;
    let name = relays[1].endpoint().origin().to_string();
    let path_of = async |class: &Class| uplink.link_for(class, None).await.unwrap().line().path_place;
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
    let path_of = async |class: &Class| uplink.link_for(class, None).await.unwrap().line().path_place;
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
        uplink.find_better(&LinkId::unused(line), &class).map(|link| link.line().path_place)
    };
    assert_eq!([0, 1, 2].map(|place| found(&lines[place])), [None, Some(0), Some(0)]);
    uplink.state.send_modify(|state| state.chosen.path = Some(1));
    assert_eq!([0, 1, 2].map(|place| found(&lines[place])), [Some(1), None, Some(1)], "whatever it costs");
    assert_eq!(found(&lines[3]), None, "the chosen path leads to another relay");
    lines[1].doubt(true);
    assert_eq!([0, 2].map(|place| found(&lines[place])), [None, Some(0)], "the chosen path is silent");
}

#[tokio::test]
async fn what_a_connection_sees_of_its_path_ages_while_no_tunnel_is_opened() {
    const SECOND_NS: u64 = 1_000_000_000;
    let (_relays, uplink, [line]) = connected([(0, 0)]).await;
    let ms = Duration::from_millis;
    for minute in 1..=60 {
        (0..10_000).for_each(|_| line.path.sent_packet());
        uplink.observe(60 * minute * SECOND_NS);
    }
    line.path.measured(ms(10), ms(10));
    (1..=50).for_each(|round_trip| line.path.lost_packet(ms(20 * round_trip)));
    assert_eq!(line.observe(3_601 * SECOND_NS), Form::Capsule, "the packets of the hour before dilute no loss");
    for minute in 61..=120 {
        (0..10_000).for_each(|_| line.path.sent_packet());
        uplink.observe(60 * minute * SECOND_NS);
    }
    assert_eq!(line.observe(7_201 * SECOND_NS), Form::Datagram, "losses are forgotten");
}

#[tokio::test]
async fn a_tunnel_that_leaves_passes_over_a_relay_that_puts_requests_off_for_a_while() {
    let (_relays, uplink, lines) = connected([(1, 9), (0, 9), (1, 0)]).await;
    let class = class(Placement::Paced);
    let path_of = async |left| place_of(&uplink, &class, left).await.0;
    lines[0].leave();
    assert_eq!(path_of(Some(&lines[0])).await, 2, "it stays at its relay");
    let hour = Duration::from_secs(3_600);
    uplink.put_off(&lines[2].link().unwrap(), Some(hour));
    assert_eq!(path_of(Some(&lines[0])).await, 1);
    assert_eq!(path_of(None).await, 2, "a new tunnel is told by the relay");
    assert!(uplink.has_willing(), "so it need not wait");
    uplink.put_off(&lines[1].link().unwrap(), Some(hour));
    assert!(!uplink.has_willing());

    let left = LinkId::unused(&lines[0]);
    tokio::time::pause();
    let begun = Instant::now();
    uplink.pause(&left, hour).await;
    assert!((PATIENCE..2 * PATIENCE).contains(&begun.elapsed()), "the relay may change its mind");
    assert_eq!(path_of(Some(&lines[0])).await, 2);

    lines[2].doubt(true);
    let begun = Instant::now();
    let answers = async {
        lines[2].doubt(false);
        uplink.state.send_modify(|_| {});
    };
    tokio::join!(uplink.pause(&left, hour), answers);
    lines[0].come_back();
    uplink.pause(&left, hour).await;
    assert_eq!(begun.elapsed(), Duration::ZERO, "another connection takes it, and then it may stay");
}
