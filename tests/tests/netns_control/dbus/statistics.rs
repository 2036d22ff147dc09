//! Statistics over D-Bus, for callers that watch.

use futures::{FutureExt as _, StreamExt as _};

use super::*;

/// A row of `ListClasses`.
type Class = (String, String, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);

/// The arguments of the signal `Stats`.
type Stats = (u64, u64, u64, u64, u64, Vec<Class>);

async fn watch(caller: &zbus::Proxy<'_>, interval_ms: u64) -> zbus::Result<()> {
    caller.call("WatchStats", &interval_ms).await
}

async fn unwatch(caller: &zbus::Proxy<'_>) -> bool {
    caller.call("UnwatchStats", &()).await.unwrap()
}

async fn next(signals: &mut zbus::proxy::SignalStream<'_>) -> Stats {
    signals.next().await.unwrap().body().deserialize().unwrap()
}

/// Takes the signals that have arrived. Returns their number.
fn arrived(signals: &mut zbus::proxy::SignalStream<'_>) -> usize {
    std::iter::from_fn(|| signals.next().now_or_never().flatten()).count()
}

#[test]
fn statistics_come_to_callers_that_watch_while_they_watch_and_to_no_others() {
    lab::ring!(Netns);
    let bus = Bus::new("stats");
    bus.site
        .client(async || {
            let (watcher, other) = (caller(&bus).await, caller(&bus).await);
            let mut seen = watcher.receive_signal("Stats").await.unwrap();
            let mut overheard = other.receive_signal("Stats").await.unwrap();
            watch(&watcher, 100).await.unwrap();
            let (first, second) = (next(&mut seen).await, next(&mut seen).await);
            assert!(first.0 < second.0 && first.1 == 1, "{first:?} {second:?}");
            crate::set(&bus.site, VOICE, &[]);
            let stats = loop {
                let stats = next(&mut seen).await;
                if stats.1 == 2 {
                    break stats;
                }
            };
            assert!(stats.5.iter().any(|class| (&class.0[..], &class.1[..]) == ("voice", "relay")), "{stats:?}");
            // The bus keeps the order, so broadcast signals would arrive before this answer.
            assert!(!unwatch(&other).await);
            assert_eq!(arrived(&mut overheard), 0);

            assert!(unwatch(&watcher).await);
            assert!(!unwatch(&watcher).await);
            arrived(&mut seen);
            watch(&other, 3_600_000).await.unwrap();
            watch(&other, 100).await.unwrap();
            for _ in 0..6 {
                next(&mut overheard).await;
            }
            // One signal may have been on its way.
            assert!(arrived(&mut seen) <= 1);
        })
        .unwrap();
}

#[test]
fn a_door_that_a_reload_shuts_is_off_the_bus_though_a_caller_watches_and_opens_again() {
    lab::ring!(Netns);
    let bus = Bus::new("shut");
    bus.site
        .client(async || {
            let watcher = caller(&bus).await;
            let mut seen = watcher.receive_signal("Stats").await.unwrap();
            watch(&watcher, 100).await.unwrap();
            next(&mut seen).await;

            bus.configure(false);
            wait_for("the name to be free", SOON, || (!bus.is_served()).then_some(())).unwrap();
            bus.configure(true);
            wait_for("the name on the bus", SOON, || bus.is_served().then_some(())).unwrap();
            assert!(!unwatch(&watcher).await, "the watch has ended");
            watch(&watcher, 100).await.unwrap();
            assert!(unwatch(&watcher).await);
        })
        .unwrap();
}

#[test]
fn callers_that_watch_are_bounded_and_make_room_when_they_leave_the_bus() {
    lab::ring!(Netns);
    let bus = Bus::new("watchers");
    bus.site
        .client(async || {
            let mut watchers = Vec::new();
            for _ in 0..32 {
                watchers.push(caller(&bus).await);
                watch(&watchers[watchers.len() - 1], 3_600_000).await.unwrap();
            }
            let another = caller(&bus).await;
            let refusal = watch(&another, 100).await.unwrap_err().to_string();
            assert!(refusal.contains("org.paced.Error.Failed: 32 other callers watch statistics"), "{refusal}");
            watch(&watchers[0], 0).await.unwrap();
            assert!(watch(&another, 100).await.is_err());
            watchers.swap_remove(0).connection().clone().close().await.unwrap();
            // The bus tells the relay a little later.
            while watch(&another, 100).await.is_err() {}
            assert!(unwatch(&another).await);
        })
        .unwrap();
}
