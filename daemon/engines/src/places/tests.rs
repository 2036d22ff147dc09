use std::{
    sync::{
        Barrier,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    task::Waker,
};

use sched::stream::{Low, Service};

use super::*;
use crate::health::SILENCES;

mod asked_back;
mod closed;

fn engines(replicas: usize, most_in_flight: u32) -> Arc<Engines> {
    Engines::new(replicas, most_in_flight, 3, Discipline::Edf { expiry: sched::stream::Expiry::Soft }, || 5_000_000_000)
}

fn due(deadline_ns: u64) -> Service {
    Service { deadline_ns: Some(deadline_ns), ..Service::default() }
}

fn to_engine(wish: Wish) -> Claim {
    Claim { wish, ..Claim::default() }
}

fn now(turn: Result<Turn, NoPlace>) -> EnginePlace {
    match turn {
        Ok(Turn::Now(place)) => place,
        other => panic!("{other:?}"),
    }
}

fn later(turn: Result<Turn, NoPlace>) -> QueuedRequest {
    match turn {
        Ok(Turn::Later(waiting)) => waiting,
        other => panic!("{other:?}"),
    }
}

fn poll(waiting: &mut QueuedRequest) -> Poll<Result<EnginePlace, NoPlace>> {
    Pin::new(waiting).poll(&mut Context::from_waker(Waker::noop()))
}

fn head() -> masque::h3::RequestHead {
    masque::h3::RequestHead {
        method: "POST".into(),
        scheme: None,
        authority: None,
        path: None,
        protocol: None,
        fields: Vec::new(),
    }
}

#[test]
fn requests_go_to_the_engine_with_the_least_to_do() {
    let engines = engines(2, 2);
    let places: Vec<_> = (0..4).map(|_| now(engines.take(Service::default(), &[]))).collect();
    assert_eq!(places.iter().map(|place| place.replica).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert_eq!(engines.loads(), [(2, true), (2, true)]);
    drop(places);
    assert_eq!(engines.loads(), [(0, true), (0, true)]);
}

#[test]
fn the_next_turn_of_a_chat_goes_where_the_one_before_was_unless_that_engine_is_much_busier() {
    let engines = engines(3, 16);
    let prefixes = Prefixes::default();
    let turn = |turns: usize| Wish {
        prefix: prefixes.of(&head(), None, ["x".repeat(600 * turns).as_bytes(), b""]),
        ..Wish::default()
    };
    let _busy = now(engines.take(Service::default(), &[]));
    let first = now(engines.take(to_engine(turn(1)), &[]));
    assert_eq!((first.replica, first.affinity), (1, PrefixAffinity::New));
    let second = now(engines.take(to_engine(turn(2)), &[]));
    assert_eq!((second.replica, second.affinity), (1, PrefixAffinity::Kept), "though the third one has nothing to do");
    let third = now(engines.take(to_engine(turn(3)), &[]));
    assert_eq!((third.replica, third.affinity), (1, PrefixAffinity::Kept));
    let fourth = now(engines.take(to_engine(turn(4)), &[]));
    assert_eq!((fourth.replica, fourth.affinity), (2, PrefixAffinity::Moved), "three more than that one");
    engines.failed(2, Fault::OutOfReach, "");
    let fifth = now(engines.take(to_engine(turn(5)), &[]));
    assert_eq!((fifth.replica, fifth.affinity), (0, PrefixAffinity::Moved), "it failed");
    assert_eq!(now(engines.take(to_engine(turn(6)), &[0])).affinity, PrefixAffinity::Moved, "it was tried");
}

#[test]
fn a_prompt_whose_engine_keeps_none_is_not_new() {
    let engines = engines(2, 16);
    let wish = Wish { prefix: Prefixes::default().of(&head(), None, [&[b'x'; 600], b""]), ..Wish::default() };
    let first = now(engines.take(to_engine(wish.clone()), &[]));
    assert_eq!((first.replica, first.affinity), (0, PrefixAffinity::New));
    (0..20).for_each(|_| _ = engines.confirm_cached(0, wish.prefix.user, 1, Some(0)));
    let second = now(engines.take(to_engine(wish), &[]));
    assert_eq!((second.replica, second.affinity), (1, PrefixAffinity::Moved), "the least busy one");
}

#[test]
fn the_engine_that_was_chosen_serves_while_it_has_room_and_none_knows_the_prompt() {
    let engines = engines(3, 2);
    let to = |preferred| Wish { preferred: Some(preferred), ..Wish::default() };
    let places: Vec<_> = (0..3).map(|_| now(engines.take(to_engine(to(1)), &[]))).collect();
    assert_eq!(places.iter().map(|place| place.replica).collect::<Vec<_>>(), [1, 1, 0], "two have room there");
    assert_eq!(now(engines.take(to_engine(to(2)), &[2])).replica, 0, "it was tried");
    assert_eq!(now(engines.take(to_engine(to(9)), &[])).replica, 2, "there is no such engine");
    engines.failed(2, Fault::OutOfReach, "");
    assert_eq!(now(engines.take(to_engine(to(2)), &[])).replica, 0, "it failed");
    let mut waiting = {
        let _full = now(engines.take(to_engine(to(0)), &[]));
        assert_eq!(engines.foresee(&to(1)), None, "it would have to wait");
        later(engines.take(to_engine(to(1)), &[]))
    };
    match poll(&mut waiting) {
        Poll::Ready(Ok(place)) => assert_eq!(place.replica, 0, "where a place is free first"),
        other => panic!("{other:?}"),
    }
    drop(places);

    let engines = self::engines(3, 16);
    let prefix = || Prefixes::default().of(&head(), None, [&[b'x'; 600], b""]);
    let prefix = prefix();
    let with = |preferred| Wish { prefix: prefix.clone(), preferred: Some(preferred), ..Wish::default() };
    assert_eq!(engines.foresee(&with(1)), Some(1));
    let first = now(engines.take(to_engine(with(1)), &[]));
    assert_eq!((first.replica, engines.foresee(&with(2))), (1, Some(1)), "it knows the prompt by now");
    let second = now(engines.take(to_engine(with(2)), &[]));
    assert_eq!((second.replica, second.affinity), (1, PrefixAffinity::Kept));
    let _third = now(engines.take(to_engine(with(2)), &[]));
    let fourth = now(engines.take(to_engine(with(2)), &[]));
    assert_eq!((fourth.replica, fourth.affinity), (2, PrefixAffinity::Moved), "the other one has three more");
    drop(fourth);
    let _busy = now(engines.take(to_engine(with(2)), &[]));
    let _busier = [(); 3].map(|()| now(engines.take(to_engine(with(2)), &[])));
    let last = now(engines.take(to_engine(with(2)), &[]));
    assert_eq!((last.replica, last.affinity), (2, PrefixAffinity::Kept), "it is the chosen one, and the known one");
}

#[test]
fn a_choice_that_weighs_cached_prompts_holds_even_if_another_engine_knows_the_prompt() {
    let engines = engines(3, 2);
    let prefix = Prefixes::default().of(&head(), None, [&[b'x'; 600], b""]);
    let with = |preferred, weighs_cache| Wish { prefix: prefix.clone(), preferred: Some(preferred), weighs_cache };
    let first = now(engines.take(to_engine(with(1, true)), &[]));
    assert_eq!((first.replica, first.affinity), (1, PrefixAffinity::New));
    assert_eq!(engines.cached_bytes(&prefix).iter().map(|cached| cached.expected).collect::<Vec<_>>(), [0, 512, 0]);
    assert_eq!((engines.foresee(&with(2, true)), engines.foresee(&with(2, false))), (Some(2), Some(1)));
    let second = now(engines.take(to_engine(with(2, true)), &[]));
    assert_eq!((second.replica, second.affinity), (2, PrefixAffinity::Moved));
    let third = now(engines.take(to_engine(with(2, true)), &[]));
    assert_eq!((third.replica, third.affinity), (2, PrefixAffinity::Kept));
    let fourth = now(engines.take(to_engine(with(2, true)), &[]));
    assert_eq!((fourth.replica, fourth.affinity), (0, PrefixAffinity::Moved), "it has no room");
}

#[test]
fn waiting_requests_get_places_in_the_order_of_the_discipline_and_excess_ones_are_refused() {
    let engines = engines(1, 1);
    let first = now(engines.take(due(1), &[]));
    let mut waiting: Vec<_> = [30, 10, 20].map(|due_ns| later(engines.take(due(due_ns << 4), &[]))).into();
    assert!(matches!(engines.take(due(1), &[]), Err(NoPlace::Crowded)));
    drop(first);
    let place = match poll(&mut waiting[1]) {
        Poll::Ready(Ok(place)) => place,
        other => panic!("{other:?}"),
    };
    assert!(poll(&mut waiting[0]).is_pending() && poll(&mut waiting[2]).is_pending());
    drop(place);
    assert!(poll(&mut waiting[2]).is_ready() && poll(&mut waiting[0]).is_ready(), "each gave its place back");
    assert_eq!((engines.waiting(), engines.loads()), (0, vec![(0, true)]));
}

#[test]
fn a_user_whose_requests_wait_leaves_places_in_the_queue_to_others() {
    let engines = Engines::new(1, 1, 8, Discipline::Fcfs, || 0);
    let first = now(engines.take(Claim::default(), &[]));
    let of = |user: &str| engines.take(Claim { user: Some(user.into()), ..Claim::default() }, &[]);
    let mut waiting: Vec<_> = (0..4).map(|_| later(of("greedy"))).collect();
    assert!(matches!(of("greedy"), Err(NoPlace::Crowded)), "as many as are left");
    waiting.extend([later(of("other")), later(of("other"))]);
    assert!(matches!(of("other"), Err(NoPlace::Crowded)));
    waiting.push(later(of("third")));
    drop(waiting.drain(..4));
    waiting.push(later(of("greedy")));
    waiting.extend((0..2).map(|_| later(engines.take(Claim::default(), &[]))));
    waiting.push(later(of("fourth")));
    waiting.push(later(of("fifth")));
    assert!(matches!(of("sixth"), Err(NoPlace::Crowded)), "all are taken");
    drop((first, waiting));
    assert_eq!(engines.waiting(), 0);
}

#[test]
fn a_request_that_gives_up_waits_no_longer_and_keeps_no_place() {
    let engines = engines(1, 1);
    let first = now(engines.take(due(1), &[]));
    let (gone, mut stays) = (later(engines.take(due(16), &[])), later(engines.take(due(32), &[])));
    drop(gone);
    assert_eq!(engines.waiting(), 1);
    drop(first);
    assert_eq!(engines.loads(), [(1, true)], "the place is on its way");
    let another = later(engines.take(due(48), &[]));
    drop(stays.place.try_recv());
    drop(stays);
    drop(another);
    assert_eq!((engines.waiting(), engines.loads()), (0, vec![(0, true)]), "whatever was on its way came back");
}

#[test]
fn a_failed_engine_gets_no_requests_and_without_engines_no_request_waits() {
    let engines = engines(2, 1);
    let (first, second) = (now(engines.take(due(1), &[])), now(engines.take(due(2), &[])));
    let mut waiting = later(engines.take(due(16), &[]));
    engines.failed(first.replica, Fault::OutOfReach, "");
    drop(first);
    assert!(poll(&mut waiting).is_pending(), "the place of an engine that failed is given to no request");
    assert!(matches!(engines.take(due(1), &[1]), Err(NoPlace::NoEngine)), "the only one left was tried");
    engines.failed(second.replica, Fault::OutOfReach, "");
    assert!(matches!(poll(&mut waiting), Poll::Ready(Err(NoPlace::NoEngine))));
    assert!(matches!(engines.take(due(1), &[]), Err(NoPlace::NoEngine)));
    engines.succeeded(0);
    assert_eq!(now(engines.take(due(1), &[])).replica, 0);
    drop(second);
}

#[test]
fn a_request_that_makes_engines_fail_never_takes_the_last_one_from_others() {
    let engines = engines(2, 1);
    let is_usable = |replica: usize| engines.loads()[replica].1;
    for _ in 1..crate::health::FAULTS {
        [0, 1].into_iter().for_each(|replica| engines.failed(replica, Fault::Answer, ""));
    }
    assert!(is_usable(0) && is_usable(1), "it may be the request");
    [0, 1].into_iter().for_each(|replica| engines.failed(replica, Fault::Answer, ""));
    assert!(!is_usable(0) && is_usable(1), "one of them is left");
    (0..100).for_each(|_| engines.failed(1, Fault::Answer, ""));
    assert!(is_usable(1));
    engines.succeeded(1);
    engines.failed(1, Fault::OutOfReach, "");
    assert!(!engines.is_alive());
}

thread_local! { static NOW_NS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) }; }

#[test]
fn load_of_others_moves_requests_to_other_engines_until_it_is_old_and_takes_no_place() {
    let engines = Engines::new(2, 2, 3, Discipline::Edf { expiry: sched::stream::Expiry::Soft }, || NOW_NS.get());
    engines.expect(false, 100);
    let first = now(engines.take(Service::default(), &[]));
    assert_eq!(first.replica, 0);
    // Of three, one is ours.
    engines.report(0, Reported { running: 2, waiting: 1 }, 1);
    assert_eq!(engines.others(), [Reported { running: 1, waiting: 1 }, Reported::default()].map(Some));
    // Requests that have begun since then were ours as well.
    let places: Vec<_> = (0..3).map(|_| now(engines.take(Service::default(), &[]))).collect();
    assert_eq!(places.iter().map(|place| place.replica).collect::<Vec<_>>(), [1, 1, 0]);
    engines.report(0, Reported { running: 2, waiting: 0 }, 1);
    assert_eq!(engines.others(), [Some(Reported::default()); 2]);
    drop(places);
    engines.report(0, Reported { running: u32::MAX, waiting: u32::MAX }, 0);
    let place = now(engines.take(Service::default(), &[1]));
    assert_eq!(place.replica, 0, "whatever an engine says, it gets requests");
    drop((first, place));
    assert_eq!(now(engines.take(Service::default(), &[])).replica, 1);
    NOW_NS.set(101);
    assert_eq!(engines.others(), [None, Some(Reported::default())], "only an engine that has reported can cease to");
    assert_eq!(now(engines.take(Service::default(), &[])).replica, 0, "what it said is old");
}

#[test]
fn a_ready_engine_gets_the_waiting_requests_and_an_unready_one_leaves_none_waiting() {
    let engines = engines(2, 1);
    engines.expect(true, u64::MAX);
    engines.checked(1, Found::NotReady, "loading");
    let first = now(engines.take(due(1), &[]));
    let mut waiting = later(engines.take(due(16), &[]));
    engines.checked(1, Found::Ready, "");
    let second = match poll(&mut waiting) {
        Poll::Ready(Ok(place)) => place,
        other => panic!("{other:?}"),
    };
    assert_eq!(second.replica, 1);
    let mut waiting = later(engines.take(due(16), &[]));
    engines.checked(1, Found::NotReady, "loading");
    engines.checked(0, Found::NotReady, "gone");
    assert!(matches!(poll(&mut waiting), Poll::Ready(Err(NoPlace::NoEngine))));
    drop((first, second));
}

#[tokio::test(start_paused = true)]
async fn a_waiting_request_gets_the_place_of_an_engine_whose_ejection_ends_without_another_event() {
    fn sleep_until(at_ns: u64) -> quic::clock::Sleep {
        Box::pin(async move {
            tokio::time::sleep(std::time::Duration::from_nanos(at_ns - NOW_NS.get())).await;
            NOW_NS.set(at_ns);
        })
    }
    let clock = Clock { now_ns: || NOW_NS.get(), sleep_until };
    let engines = Engines::new(2, 1, 3, Discipline::Fcfs, clock.now_ns);
    let returning = tokio::spawn(engines.clone().readmit(clock));
    let first = now(engines.take(due(1), &[]));
    let waiting = {
        let second = now(engines.take(due(1), &[]));
        let waiting = later(engines.take(due(1), &[]));
        engines.failed(second.replica, Fault::OutOfReach, "");
        waiting
    };
    let began = tokio::time::Instant::now();
    let place = waiting.await.unwrap();
    assert_eq!((place.replica, began.elapsed().as_secs()), (1, 1), "the first one still has its request");
    returning.abort();
    drop(first);
}

#[test]
fn an_engine_that_answers_although_it_was_down_gets_waiting_requests_at_once() {
    for note in [Engines::began, Engines::succeeded] {
        let engines = Engines::new(2, 2, 3, Discipline::Fcfs, || 0);
        // Only an engine with checks can be down.
        engines.expect(true, u64::MAX);
        let mut places: Vec<_> = (0..4).map(|_| now(engines.take(due(1), &[]))).collect();
        engines.failed(1, Fault::OutOfReach, "");
        let at = places.iter().position(|place| place.replica == 1).unwrap();
        drop(places.remove(at));
        let mut waiting = later(engines.take(due(1), &[]));
        assert!(poll(&mut waiting).is_pending());
        note(&engines, 1);
        assert!(matches!(poll(&mut waiting), Poll::Ready(Ok(place)) if place.replica == 1));
    }
}

#[test]
fn another_discipline_orders_what_waits_already() {
    let engines = engines(1, 1);
    let first = now(engines.take(due(1), &[]));
    let mut waiting: Vec<_> = [20, 10].map(|due_ns| later(engines.take(due(due_ns << 4), &[]))).into();
    engines.reorder(Discipline::Ml { low: Low::Fcfs });
    drop(first);
    assert!(poll(&mut waiting[1]).is_ready(), "what was first in the old order arrives first in the new one");
}

#[test]
fn requests_that_began_before_a_reload_count_at_their_engines_and_leave_their_places_to_both() {
    let before = engines(2, 1);
    let begun = now(before.take(due(1), &[]));
    assert_eq!(begun.replica, 0);
    // The other order of engines, and another one.
    let after = engines(3, 1);
    after.share(1, &before, 0, true);
    after.share(0, &before, 1, true);
    assert_eq!(after.loads(), [(0, true), (1, true), (0, true)]);
    let places = [now(after.take(due(1), &[])), now(after.take(due(1), &[]))];
    assert_eq!(places.each_ref().map(|place| place.replica), [0, 2], "the engine with a request gets no other");
    assert!(!before.has_room(), "nor does a request that still waits there");
    let mut waiting = [later(before.take(due(2), &[])), later(after.take(due(2), &[]))];
    assert!(waiting.iter_mut().all(|waiting| poll(waiting).is_pending()));
    drop(begun);
    let Poll::Ready(Ok(place)) = poll(&mut waiting[0]) else { panic!("it has waited for longest") };
    assert!(poll(&mut waiting[1]).is_pending());
    drop(place);
    assert!(matches!(poll(&mut waiting[1]), Poll::Ready(Ok(place)) if place.replica == 1));
    drop(before);
    drop(waiting);
    assert_eq!(after.loads(), [(1, true), (0, true), (1, true)]);
}

#[test]
fn requests_that_end_at_the_gateway_before_a_reload_count_after_it_and_the_other_way_round() {
    let before = engines(2, 1);
    before.succeeded(0);
    let after = engines(2, 1);
    after.share(1, &before, 0, true);
    before.succeeded(0);
    before.failed(0, Fault::Answer, "");
    after.failed(1, Fault::Refusal, "");
    let counts = |engines: &Engines, replica: usize| {
        let status = &engines.status()[replica];
        (status.answered, status.failed)
    };
    assert_eq!([counts(&before, 0), counts(&after, 1)], [(2, 2); 2]);
    assert_eq!([counts(&before, 1), counts(&after, 0)], [(0, 0); 2], "the other engines are not the same");
}

#[test]
fn a_reload_forgets_neither_that_an_engine_hangs_nor_which_engine_knows_a_chat_and_trusts_no_health_without_checks() {
    let prefix = Prefixes::default().of(&head(), None, [&[b'x'; 600], b""]);
    for (is_checked, is_usable) in [(true, false), (false, true)] {
        let before = engines(2, 2);
        before.expect(true, u64::MAX);
        let place =
            now(before.take(to_engine(Wish { prefix: prefix.clone(), preferred: Some(1), ..Wish::default() }), &[]));
        drop(place);
        (0..SILENCES).for_each(|_| before.checked(0, Found::Silent, "no answer"));
        before.succeeded(1);
        let after = engines(2, 2);
        after.expect(is_checked, u64::MAX);
        (0..2).for_each(|engine| after.share(engine, &before, engine, true));
        after.recall_prompts(&before);
        assert_eq!(after.loads(), [(0, is_usable), (0, true)]);
        let status = after.status();
        assert_eq!([status[0].trouble.is_some(), status[1].trouble.is_some()], [is_checked, false]);
        assert_eq!(status.iter().map(|engine| engine.answered).collect::<Vec<_>>(), [0, 1]);
        let place = now(after.take(to_engine(Wish { prefix: prefix.clone(), ..Wish::default() }), &[]));
        assert_eq!((place.replica, place.affinity), (1, PrefixAffinity::Kept));
        let elsewhere = engines(2, 2);
        elsewhere.expect(is_checked, u64::MAX);
        elsewhere.share(0, &before, 0, false);
        assert_eq!(elsewhere.loads()[0], (0, true), "with another key it may work");
    }
}

#[test]
fn a_request_that_found_an_engine_out_of_reach_waits_once_more_within_the_same_bounds() {
    let engines = engines(2, 1);
    let (dead, busy) = (now(engines.take(due(1), &[])), now(engines.take(due(1), &[])));
    engines.failed(dead.replica, Fault::OutOfReach, "");
    drop(dead);
    let again = || Claim { has_waited: true, ..due(32).into() };
    assert!(matches!(engines.take(again(), &[0]), Err(NoPlace::Crowded)), "an engine has seen this one");
    let mut waiting = [again(), due(16).into(), again()].map(|claim| later(engines.take(claim, &[])));
    assert!(matches!(engines.take(again(), &[]), Err(NoPlace::Crowded)), "no more than others may wait");
    drop(busy);
    let Poll::Ready(Ok(place)) = poll(&mut waiting[1]) else { panic!("it is due first") };
    assert!(poll(&mut waiting[0]).is_pending());
    drop(place);
    assert!(matches!(poll(&mut waiting[0]), Poll::Ready(Ok(place)) if place.replica == 1));
}

#[test]
fn two_gateways_that_give_at_once_never_give_an_engine_more_than_it_may_have() {
    let before = engines(1, 1);
    let after = engines(1, 1);
    after.share(0, &before, 0, true);
    let (most, begin) = (AtomicU32::new(0), Barrier::new(2));
    // A long prompt, because a gateway notes its blocks when it gives a place.
    let prefix = Prefixes::default().of(&head(), None, [&[b'x'; 16 << 10], b""]);
    let serve = &|engines: &Arc<Engines>| {
        begin.wait();
        for _ in 0..60_000 {
            let claim = to_engine(Wish { prefix: prefix.clone(), ..Wish::default() });
            // A request that would wait leaves at once.
            if let Turn::Now(_place) = engines.take(claim, &[]).unwrap() {
                most.fetch_max(engines.in_flight(0), Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        [&before, &after].into_iter().for_each(|engines| _ = scope.spawn(move || serve(engines)));
    });
    assert_eq!((most.into_inner(), after.in_flight(0)), (1, 0));
}

#[test]
fn an_engine_gets_no_more_requests_than_it_may_have() {
    let work = EngineWork::default();
    assert_eq!([work.begin(2), work.begin(2), work.begin(2), work.begin(1)], [true, true, false, false]);
    work.end();
    assert_eq!((work.begin(1), work.begin(2), work.in_flight()), (false, true, 2));
}
