//! Engines that refuse requests for their load.

use std::{cell::Cell, time::Duration};

use tokio::time::{Instant, sleep};

use super::*;
use crate::{FULL_PERMILLE, NO_ENGINE_PERMILLE, health::EngineHealth};

const S: u64 = 1_000_000_000;

thread_local! { static START: Cell<Option<Instant>> = const { Cell::new(None) }; }

/// The time of the test's runtime since its beginning.
fn now_ns() -> u64 {
    START.get().unwrap().elapsed().as_nanos() as u64
}

fn sleep_until(at_ns: u64) -> quic::clock::Sleep {
    Box::pin(sleep(Duration::from_nanos(at_ns.saturating_sub(now_ns()))))
}

/// Idle engines for two requests each, for which three others may wait. They come back by the runtime's time.
fn returning(replicas: usize) -> Arc<Engines> {
    // A thread may run several tests.
    START.set(Some(Instant::now()));
    again(replicas)
}

/// The same as another gateway has them.
fn again(replicas: usize) -> Arc<Engines> {
    let engines = Engines::new(replicas, 2, 3, Discipline::Edf { expiry: sched::stream::Expiry::Soft }, now_ns);
    // Aborted with the test's runtime.
    tokio::spawn(engines.clone().readmit(Clock { now_ns, sleep_until }));
    engines
}

#[tokio::test(start_paused = true)]
async fn requests_go_to_engines_that_take_them_and_else_wait_in_their_order_until_one_does() {
    let engines = returning(2);
    assert_eq!(engines.refused(0, Some(5 * S)), Some(5 * S));
    assert_eq!(engines.refused(0, Some(2 * S)), None, "it was closed before");
    let others: Vec<_> = (0..2).map(|_| now(engines.take(due(1), &[]))).collect();
    assert!(others.iter().all(|place| place.replica == 1));
    let mut waiting = later(engines.take(due(S), &[]));
    drop(others);
    assert!(matches!(poll(&mut waiting), Poll::Ready(Ok(place)) if place.replica == 1));
    assert_eq!(engines.refused(1, None), Some(S));
    let mut waiting = [3, 1, 2].map(|due_s| later(engines.take(due(due_s * S), &[])));
    assert!(matches!(engines.take(due(1), &[]), Err(NoPlace::Crowded)), "as if all places were taken");
    sleep(Duration::from_millis(999)).await;
    assert!(waiting.iter_mut().all(|waiting| poll(waiting).is_pending()));
    let [third, first, second] = waiting;
    let first = first.await.unwrap();
    assert_eq!((first.replica, now_ns() / 1_000_000), (1, 1_000), "at once, and without another event");
    let second = second.await.unwrap();
    assert_eq!(second.replica, 1);
    assert_eq!(third.await.unwrap().replica, 0);
    assert_eq!(now_ns() / 1_000_000, 5_000, "the other one had two requests");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_engines_have_tried_prefers_engines_that_take_requests_and_else_finds_a_place_all_the_same() {
    let engines = returning(3);
    engines.refused(0, Some(60 * S));
    let busy = now(engines.take(due(1), &[]));
    assert_eq!(busy.replica, 1);
    assert_eq!(now(engines.take(due(1), &[2])).replica, 1, "the other one is idle, and refuses requests");
    assert_eq!(now(engines.take(due(1), &[1, 2])).replica, 0, "otherwise it would fail");
    engines.refused(1, Some(60 * S));
    engines.refused(2, Some(60 * S));
    assert_eq!(now(engines.take(due(1), &[0])).replica, 2, "the less busy one");
    let waiting = later(engines.take(due(1), &[]));
    assert_eq!(now(engines.take(due(1), &[0, 2])).replica, 1, "it has waited before");
    assert!(matches!(engines.take(due(1), &[0, 1, 2]), Err(NoPlace::NoEngine)));
    drop(waiting);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_requests_is_full_and_neither_ejected_nor_gone() {
    let engines = returning(2);
    let place = now(engines.take(due(1), &[]));
    let status = |replica: usize| engines.status()[replica].health;
    engines.refused(1, Some(7 * S));
    assert_eq!((status(0), status(1)), (EngineHealth::Untried, EngineHealth::Refusing { for_ns: 7 * S }));
    assert_eq!((status(1).name(), status(1).refuses_for_ns(), status(1).ejected_for_ns()), ("refusing", 7 * S, 0));
    assert_eq!([0, 1].map(|replica| engines.closed_ns(replica)), [0, 7 * S]);
    assert_eq!(engines.load_permille(), FULL_PERMILLE * 3 / 4);
    let _second = now(engines.take(due(1), &[]));
    let _waits = [(); 2].map(|()| later(engines.take(due(1), &[])));
    assert_eq!((engines.waiting_each().0, engines.has_room(), engines.is_alive()), (2, false, true));
    engines.refused(0, Some(7 * S));
    assert_eq!((engines.waiting_each().0, engines.load_permille()), (1, FULL_PERMILLE * 3 / 2));
    drop(place);
    assert_eq!(engines.waiting(), 2, "a place that is given back is not free yet");
    (0..crate::health::FAULTS).for_each(|_| engines.failed(0, Fault::Answer, ""));
    assert_eq!(status(0).name(), "ejected", "the other one is left, as before");
    engines.failed(1, Fault::OutOfReach, "");
    assert_eq!((engines.waiting(), engines.load_permille()), (0, NO_ENGINE_PERMILLE), "none waits for none");
    assert_eq!(status(1).name(), "ejected");
    sleep(Duration::from_secs(1)).await;
    assert_eq!(status(1), EngineHealth::Refusing { for_ns: 6 * S }, "its return opens it no earlier");
}

#[tokio::test(start_paused = true)]
async fn a_reload_keeps_an_engine_closed_and_what_it_refuses_the_old_gateway_counts_for_both() {
    let before = returning(1);
    before.refused(0, Some(3 * S));
    let after = again(1);
    after.share(0, &before, 0, true);
    let mut waiting = [&before, &after].map(|engines| later(engines.take(due(1), &[])));
    sleep(Duration::from_secs(1)).await;
    assert_eq!((before.refused(0, Some(9 * S)), after.closed_ns(0)), (None, 9 * S));
    sleep(Duration::from_millis(8_999)).await;
    assert!(waiting.iter_mut().all(|waiting| poll(waiting).is_pending()));
    let [old, new] = waiting;
    let places = (old.await.unwrap(), new.await.unwrap());
    assert_eq!(now_ns() / 1_000_000, 10_000);
    drop(places);
    before.refused(0, None);
    let waits = later(after.take(due(1), &[]));
    drop(waits.await.unwrap());
    assert_eq!(now_ns() / 1_000_000, 12_000, "the new gateway is told until when");
    after.refused(0, Some(S));
    let elsewhere = again(1);
    elsewhere.share(0, &after, 0, false);
    assert_eq!((after.closed_ns(0), elsewhere.closed_ns(0)), (S, 0), "with another key it may take them");
}
