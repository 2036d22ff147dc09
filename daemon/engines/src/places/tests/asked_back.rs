//! Places that are asked back for requests that wait.

use super::*;

type Asked<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

fn asked(place: &EnginePlace) -> Asked<'_> {
    Box::pin(place.asked_back())
}

fn is_asked(asked: &mut Asked<'_>) -> bool {
    asked.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn as_many_places_are_asked_back_as_requests_wait_and_none_while_none_waits() {
    let engines = engines(1, 3);
    let [first, second, third] = [(); 3].map(|()| now(engines.take(Service::default(), &[])));
    let mut both = [&first, &second].map(asked);
    assert!(!both.iter_mut().any(is_asked), "no request waits");
    let waiting = [(); 2].map(|()| later(engines.take(Service::default(), &[])));
    assert_eq!(both.each_mut().map(is_asked), [true; 2]);
    assert!(!is_asked(&mut asked(&third)), "two are on their way for two requests");
    drop(both);
    drop(first);
    let [mut served, left] = waiting;
    let Poll::Ready(Ok(_served)) = poll(&mut served) else { panic!("it has waited for longest") };
    assert!(!is_asked(&mut asked(&third)), "the other one is still on its way");
    // Its client leaves, and another one comes.
    drop(left);
    let _next = later(engines.take(Service::default(), &[]));
    assert!(!is_asked(&mut asked(&third)), "the second one is for it");
    let _more = later(engines.take(Service::default(), &[]));
    assert!(is_asked(&mut asked(&third)));
}

#[test]
fn a_place_of_a_gateway_before_a_reload_is_asked_back_for_a_request_after_it() {
    let (before, after) = (engines(1, 1), engines(1, 1));
    let begun = now(before.take(Service::default(), &[]));
    after.share(0, &before, 0, true);
    let mut asked = asked(&begun);
    assert!(!is_asked(&mut asked));
    let mut waiting = later(after.take(Service::default(), &[]));
    assert!(is_asked(&mut asked));
    drop(asked);
    drop(begun);
    assert!(poll(&mut waiting).is_ready());
}

#[test]
fn a_place_that_is_given_back_early_comes_back_once_and_is_asked_back_by_none() {
    let engines = engines(1, 1);
    let early = now(engines.take(Service::default(), &[]));
    let mut waiting = later(engines.take(Service::default(), &[]));
    early.give_back();
    let Poll::Ready(Ok(_place)) = poll(&mut waiting) else { panic!("the place is free") };
    let _waiting = later(engines.take(Service::default(), &[]));
    assert!(!is_asked(&mut asked(&early)));
    drop(early);
    assert_eq!(engines.loads(), [(1, true)]);
}

#[test]
fn a_place_that_was_given_back_early_takes_no_wake_up_of_another() {
    let engines = engines(1, 1);
    let early = now(engines.take(Service::default(), &[]));
    early.give_back();
    let other = now(engines.take(Service::default(), &[]));
    let [mut early, mut other] = [&early, &other].map(asked);
    assert!(![&mut early, &mut other].into_iter().any(is_asked), "no request waits");
    let _waiting = later(engines.take(Service::default(), &[]));
    assert!(is_asked(&mut other));
}

#[test]
fn no_place_is_asked_back_at_an_engine_that_refuses_requests() {
    let engines = engines(1, 1);
    let place = now(engines.take(Service::default(), &[]));
    engines.refused(0, None);
    let _waiting = later(engines.take(Service::default(), &[]));
    assert!(!is_asked(&mut asked(&place)));
}
