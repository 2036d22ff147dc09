//! Which UDP tunnels leave a connection that still exists, and how long it waits for them.

use super::*;

#[tokio::test]
async fn udp_tunnels_leave_a_worn_connection_for_a_new_one_to_the_same_relay_over_the_same_path() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    connect_both(&mut work).await;
    let line = uplink.lines().remove(0);
    let _tunnel = (line.link().unwrap(), line.hold_movable());
    line.wear();
    assert!(matches!(work.next(), Step::Connect((0, 0))));
    assert!(!line.is_left(), "only another path has room, and the tunnel still works");
    let (at, connected) = uplink.attempt((0, 0)).await;
    work.attempted(at, connected);
    work.next();
    assert!(line.is_left() && !line.is_closed());
    line.come_back();
    assert!(line.is_left(), "it is as worn as before");
}

#[tokio::test]
async fn udp_tunnels_move_before_a_connection_without_an_answer_at_its_new_address_ends() {
    let relay = TestRelay::start(Does::Echo, true);
    for is_proved_later in [false, true] {
        let uplink = uplink_to(&relay);
        let mut work = Work::new(&uplink);
        let line = connect(&mut work).await;
        let tunnel = (line.link().unwrap(), line.hold_movable());
        let unheard = || (line.clone(), line.heard(), Instant::now());
        work.proofs.push(unheard());
        work.prove();
        assert!(line.is_doubted() && !line.is_left(), "there is no other connection yet");
        if is_proved_later {
            // The other connection was made for another reason.
            line.doubt(false);
        }
        let (at, connected) = uplink.attempt((0, 0)).await;
        work.attempted(at, connected);
        if is_proved_later {
            work.proofs = vec![unheard()];
            work.prove();
        }
        let until = |work: &mut Work<'_>| match work.next() {
            Step::Wait(until) => until.saturating_duration_since(Instant::now()),
            _ => panic!("it does not look whether the tunnel has moved"),
        };
        assert!(until(&mut work) <= LOOK && line.is_left() && !line.is_closed(), "the tunnel can move");
        drop(tunnel);
        work.next();
        assert!(line.is_closed());
    }
}

#[tokio::test]
async fn a_silent_connection_is_given_up_later_while_udp_tunnels_look_for_another_place() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    connect_both(&mut work).await;
    let line = uplink.lines().remove(0);
    let (_stream, tunnel) = (line.link().unwrap(), line.hold_movable());
    silence(&mut work, &line);
    assert!(line.is_left());
    let (now, lines) = (Instant::now(), uplink.open_lines());
    assert!(!work.give_up(now + 2 * GIVEN_UP, &lines) && !line.is_closed(), "the tunnel would end with it");
    drop(tunnel);
    assert!(work.give_up(now + 2 * GIVEN_UP, &lines) && line.is_closed());

    let other = uplink.lines().remove(0);
    let _held = (other.link().unwrap(), other.hold_movable());
    other.doubt(true);
    other.leave();
    work.pulses.retain(|(known, _)| Arc::ptr_eq(known, &other));
    work.pulses[0].1.silence(now);
    uplink.connect(0).await;
    assert!(work.give_up(now + 4 * GIVEN_UP, &uplink.open_lines()) && other.is_closed(), "that has a bound");
}

#[tokio::test]
async fn a_path_that_flaps_keeps_only_its_newest_silent_connection_and_those_with_tunnels() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    connect_both(&mut work).await;
    let first = uplink.lines().remove(0);
    let tunnel = first.link().unwrap();
    let of_path = || uplink.open_lines().into_iter().filter(|line| line.path_place == 0).collect::<Vec<_>>();
    for flap in 0..2 * CONNECTIONS {
        of_path().iter().for_each(|line| line.doubt(true));
        let (at, connected) = uplink.attempt((0, 0)).await;
        work.attempted(at, connected);
        work.next();
        assert_eq!((of_path().len(), first.is_closed()), (2, false), "{flap}");
    }
    drop(tunnel);
    of_path().iter().for_each(|line| line.doubt(true));
    let (at, connected) = uplink.attempt((0, 0)).await;
    work.attempted(at, connected);
    work.next();
    assert!(of_path().len() == 1 && first.is_closed());
    assert_eq!(uplink.open_lines().len(), 2, "the other path has its own");
}
