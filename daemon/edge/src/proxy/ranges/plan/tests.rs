//! Fetchers of different rates, in virtual time.

use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

/// The period of the answer's bytes.
const PERIOD: usize = 251;

/// More of these bytes than a test takes at once.
static PATTERN: LazyLock<Bytes> = LazyLock::new(|| (0..20 << 20).map(|at: usize| (at % PERIOD) as u8).collect());

/// Returns these bytes of the answer: each byte tells its place.
fn bytes(range: Range<u64>) -> Bytes {
    let start = (range.start % PERIOD as u64) as usize;
    PATTERN.slice(start..start + (range.end - range.start) as usize)
}

/// An answer, and what its client has received.
struct Download {
    plan: RangePlan,
    start: Instant,
    now: Instant,
    received: u64,
}

impl Download {
    fn new(length: u64) -> Self {
        let now = Instant::now();
        Self { plan: RangePlan::new(length, now), start: now, now, received: 0 }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// Returns the next byte of a fetcher's part.
    fn next(&self, fetcher: FetcherId) -> Option<u64> {
        Some(self.plan.parts.get(&self.plan.fetchers[fetcher].part?)?.next)
    }

    /// Receives up to so many bytes of a fetcher's part, as far as there is room.
    fn receive(&mut self, fetcher: FetcherId, most: u64) {
        let (Some(next), room) = (self.next(fetcher), self.plan.room(fetcher)) else { return };
        if room > 0 {
            self.plan.receive(fetcher, &bytes(next..next + most.min(room)), self.now);
        }
    }

    /// The client takes everything that it may.
    fn pop(&mut self) {
        while let Some(found) = self.plan.pop() {
            let next = self.received + found.len() as u64;
            assert_eq!(found, bytes(self.received..next));
            self.received = next;
        }
    }

    /// Gives a second fetcher the first range.
    fn divided(length: u64) -> Self {
        let mut download = Self::new(length);
        assert_eq!(download.plan.add(None), 1);
        let range = download.plan.probe(1, download.now).unwrap();
        assert!(download.plan.divide(1, range, download.now));
        download
    }

    /// Lets fetchers of these rates, in MiB per second, work with waits of `wait` before each range, until the client has everything or
    /// `most` time has passed. Returns how long that took.
    fn run(&mut self, rates: &[f64], wait: Duration, most: Duration) -> Duration {
        let step = Duration::from_millis(10);
        let mut ready = vec![self.now; rates.len()];
        while !self.plan.is_complete() && self.now - self.start < most {
            for (fetcher, rate) in rates.iter().enumerate() {
                if self.plan.has_ended(fetcher) && self.plan.take(fetcher, self.now).is_some() {
                    ready[fetcher] = self.now + wait;
                }
                if ready[fetcher] <= self.now {
                    self.receive(fetcher, (rate * MIB as f64 * step.as_secs_f64()) as u64);
                }
            }
            self.pop();
            self.pass(step);
        }
        self.now - self.start
    }
}

#[test]
fn two_fetchers_bring_an_answer_nearly_as_fast_as_their_rates_together() {
    for rates in [[4.0, 4.0], [6.0, 2.0], [7.5, 0.5], [1.0, 7.0]] {
        let mut download = Download::divided(80 * MIB);
        let time = download.run(&rates, Duration::from_millis(20), Duration::from_secs(60));
        assert!(download.plan.is_complete(), "{rates:?}");
        assert!(time < Duration::from_secs(12), "{rates:?}: {time:?} instead of 10 s");
    }
}

#[test]
fn a_fetcher_that_stops_is_relieved_and_the_client_does_not_wait_for_it() {
    let mut download = Download::divided(80 * MIB);
    download.run(&[4.0, 4.0], Duration::ZERO, Duration::from_secs(5));
    let before = download.received;
    // Its connection seems to work, but brings nothing.
    let time = download.run(&[4.0, 0.0], Duration::ZERO, Duration::from_secs(60));
    let stuck = download.plan.parts.first_key_value().map(|(_, part)| part.rest());
    assert!(before > 30 * MIB && stuck.is_some_and(|bytes| bytes < 2 * LEAST_BYTES), "{before}, {stuck:?}, {time:?}");
    download.plan.give_back(1, download.now);
    let most = time + Duration::from_secs(60);
    download.run(&[4.0], Duration::ZERO, most);
    assert!(download.plan.is_complete());
}

#[test]
fn nothing_changes_until_the_server_has_shown_a_range() {
    let mut download = Download::new(40 * MIB);
    let other = download.plan.add(None);
    assert_eq!(download.plan.take(other, download.now), None);
    let range = download.plan.probe(other, download.now).unwrap();
    assert_eq!(range, MIB..2 * MIB, "no rate is known yet");
    // The first fetcher is faster than expected.
    download.receive(0, 3 * MIB / 2);
    assert!(!download.plan.divide(other, range, download.now));
    assert!(!download.plan.is_divided());
    download.pop();
    assert_eq!(download.received, 3 * MIB / 2);
    // At 10 MiB per second, it is given half a second.
    download.pass(Duration::from_secs(1));
    download.receive(0, 10 * MIB);
    assert_eq!(download.plan.probe(other, download.now).unwrap().start, 33 * MIB / 2);
    download.pop();
    download.receive(0, 16 * MIB);
    download.pop();
    download.receive(0, 23 * MIB / 2);
    assert_eq!(download.plan.probe(other, download.now), None, "1 MiB is left");
}

#[test]
fn fetchers_wait_for_the_client_at_the_end_of_the_window() {
    let mut download = Download::new(40 * MIB);
    download.receive(0, 40 * MIB);
    assert_eq!((download.next(0), download.plan.room(0)), (Some(WINDOW_BYTES), 0));
    let mut download = Download::divided(100 * MIB);
    for _ in 0..100 {
        for fetcher in [0, 1] {
            download.receive(fetcher, MIB);
            if download.plan.has_ended(fetcher) {
                download.plan.take(fetcher, download.now);
            }
        }
    }
    let held: u64 = download.plan.parts.values().flat_map(|part| &part.arrived).map(|bytes| bytes.len() as u64).sum();
    assert!((WINDOW_BYTES - 4 * MIB..=WINDOW_BYTES).contains(&held), "{held}");
    download.pop();
    assert!(download.plan.take(0, download.now).is_some());
}

#[test]
fn what_a_fetcher_gives_back_is_fetched_first() {
    let mut download = Download::divided(100 * MIB);
    download.receive(1, MIB / 4);
    download.plan.give_back(1, download.now);
    assert!(download.plan.has_ended(1));
    let third = download.plan.add(None);
    assert_eq!(download.plan.take(third, download.now), Some(MIB + MIB / 4..2 * MIB));
    assert_eq!(download.plan.take(1, download.now), Some(2 * MIB..3 * MIB));
    download.plan.give_back(0, download.now);
    download.plan.give_back(0, download.now);
    assert_eq!(download.plan.take(0, download.now), Some(0..MIB));
}

#[test]
fn bytes_after_the_end_of_a_part_are_discarded() {
    let mut download = Download::divided(10 * MIB);
    download.plan.receive(0, &bytes(0..2 * MIB), download.now);
    assert!(download.plan.has_ended(0));
    download.plan.receive(0, &bytes(2 * MIB..3 * MIB), download.now);
    download.pop();
    assert_eq!(download.received, MIB);
    download.receive(1, 5 * MIB);
    download.pop();
    assert_eq!(download.received, 2 * MIB);
}

#[derive(Clone, Debug)]
enum Event {
    Take(FetcherId),
    Receive(FetcherId, u64),
    GiveBack(FetcherId),
    Pop,
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let fetcher = 0..4_usize;
    prop_oneof![
        fetcher.clone().prop_map(Event::Take),
        (fetcher.clone(), 0..3 * MIB).prop_map(|(fetcher, bytes)| Event::Receive(fetcher, bytes)),
        fetcher.prop_map(Event::GiveBack),
        Just(Event::Pop),
        (0..2_000_u64).prop_map(Event::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_the_client_gets_each_byte_once_and_in_order(
        length in 3 * MIB..40 * MIB,
        events in prop::collection::vec(event(), 0..200),
    ) {
        let mut download = Download::divided(length);
        (0..2).for_each(|_| _ = download.plan.add(None));
        for event in events {
            match event {
                Event::Take(fetcher) if download.plan.has_ended(fetcher) => {
                    if let Some(range) = download.plan.take(fetcher, download.now) {
                        prop_assert!(range.end <= length && range.end <= download.received + WINDOW_BYTES + MIB, "{range:?}");
                    }
                }
                Event::Take(_) => {}
                Event::Receive(fetcher, bytes) => download.receive(fetcher, bytes),
                Event::GiveBack(fetcher) => download.plan.give_back(fetcher, download.now),
                Event::Pop => download.pop(),
                Event::Pass(millis) => download.pass(Duration::from_millis(millis)),
            }
            let ends = download.plan.parts.iter().map(|(start, part)| (*start, part.end));
            let follow = ends.collect::<Vec<_>>();
            prop_assert!(follow.windows(2).all(|pair| pair[0].1 == pair[1].0), "{follow:?}");
        }
        download.run(&[4.0; 4], Duration::ZERO, Duration::from_secs(9_000));
        prop_assert_eq!((download.plan.is_complete(), download.received), (true, length));
    }
}

#[test]
fn bytes_that_arrive_one_by_one_take_no_more_memory_than_others() {
    let mut download = Download::divided(64 * MIB);
    let len = 100_000;
    (0..len).for_each(|_| download.receive(1, 1));
    let held: usize = download.plan.parts.values().flat_map(|part| &part.arrived).map(BytesMut::capacity).sum();
    assert!((len..len + BLOCK_BYTES as u64).contains(&(held as u64)), "{held}");
    let first = download.next(1).unwrap() - len;
    download.receive(0, first);
    download.pop();
    assert_eq!(download.received, first + len, "the client gets them as they are");
}

#[test]
fn a_fetcher_on_a_slow_path_begins_with_little_and_does_not_hold_up_the_client_at_the_end() {
    // The first path carries 1.2 MiB per second, the other one a tenth of that, and the estimate is lower still.
    for estimate in [0.05, 0.12] {
        let mut download = Download::new(4 * MIB);
        download.receive(0, 1);
        download.pass(Duration::from_millis(100));
        download.receive(0, MIB * 12 / 100);
        let slow = download.plan.add(Some(estimate * MIB as f64));
        let range = download.plan.probe(slow, download.now).unwrap();
        assert_eq!(range.end - range.start, LEAST_BYTES);
        assert!(download.plan.divide(slow, range, download.now));
        let time = download.run(&[1.2, 0.12], Duration::from_millis(200), Duration::from_secs(60));
        // The first path alone needs 3.33 s. Here, it has one fetcher, which waits for 0.2 s before its second range.
        assert!(time <= Duration::from_millis(3_500), "{time:?}");
    }
}
