use plan::{
    Any,
    paths::Path,
    trees::{Browser, Page, ResourceKind},
};

use super::{super::order::Signals, *};
use crate::{
    signal::Signal,
    stream::{Sending, Stream},
};

fn plan() -> TreesPlan {
    let Any::Trees(mut plan) = Any::read("fstream-trees").unwrap() else { panic!("it is no plan of pages") };
    plan.repetitions = 2;
    *plan
}

/// Returns a plan with only this page, over one path whose links have neither jitter nor losses.
fn calm(page: &str, rate_mbit: f64, rtt_ms: f64) -> TreesPlan {
    let mut plan = plan();
    plan.pages.retain(|it| it.name == page);
    plan.cells.truncate(1);
    plan.cells[0].paths = vec![Path { rate_mbit, rtt_ms }];
    (plan.size_spread, plan.links.jitter_ms, plan.links.rtt_error) = (0.0, 0.0, 0.0);
    (plan.links.buffer_packets, plan.links.initial_window) = (10_000, 10_000);
    plan
}

fn load(plan: &TreesPlan, browser: Browser, scheduler: TreesScheduler) -> Loaded {
    Setting { plan, page: &plan.pages[0], browser, cell: &plan.cells[0] }.load(scheduler, 1).unwrap()
}

/// Returns the streams of the next `turns` packets, if requests of these kinds never end.
fn turns(browser: Browser, kinds: &[ResourceKind], turns: usize) -> Vec<usize> {
    let stream = |kind: &ResourceKind| Stream {
        of: 0,
        packets: 1_000_000,
        weight: 1,
        begins_ns: 0,
        path: Some(0),
        signal: browser::signal(browser, *kind),
    };
    let streams: Vec<_> = kinds.iter().map(|kind| Sending::new(&stream(kind), 1)).collect();
    let all: Vec<_> = (0..kinds.len()).collect();
    let mut order = Signals::default();
    (0..turns).map(|_| order.next(&all, &streams).unwrap()).collect()
}

fn counts(turns: &[usize], streams: usize) -> Vec<usize> {
    (0..streams).map(|stream| turns.iter().filter(|turn| **turn == stream).count()).collect()
}

#[test]
fn each_browser_has_its_order() {
    use ResourceKind::{AsyncScript, Image, Script, Style};
    let kinds = [Image, Style, Script, Image];
    assert_eq!(counts(&turns(Browser::Safari, &kinds, 640), 4), [80, 240, 240, 80], "8, 24, 24, 8");
    assert_eq!(counts(&turns(Browser::ChromiumH2, &kinds, 10), 4), [0, 10, 0, 0], "what is most urgent");
    let images = [Image, AsyncScript, Image];
    assert_eq!(counts(&turns(Browser::ChromiumH2, &images, 10), 3), [10, 0, 0], "of equals the first");
    assert_eq!(counts(&turns(Browser::ChromiumH3, &images, 10), 3), [0, 10, 0], "what does not share goes first");
    assert_eq!(counts(&turns(Browser::ChromiumH3, &[Image, Image], 10), 2), [5, 5]);
    // Two leaders with weight 22 beside the followers with 1, which share theirs.
    let of_firefox = counts(&turns(Browser::FirefoxH2, &kinds, 4_500), 4);
    assert_eq!(of_firefox, [50, 2_200, 2_200, 50]);
    // Leaders have weight 201, others 101.
    assert_eq!(counts(&turns(Browser::FirefoxH2, &[Image, AsyncScript], 302), 2), [201, 101]);
}

#[test]
fn a_stream_that_comes_later_shares_from_then_on() {
    let signal = Signal { urgency: 0, is_incremental: true, group: None, weight: 8 };
    let stream = Stream { of: 0, packets: 1_000, weight: 8, begins_ns: 0, path: Some(0), signal };
    let streams = [Sending::new(&stream, 1), Sending::new(&stream, 1)];
    let mut order = Signals::default();
    (0..500).for_each(|_| assert_eq!(order.next(&[0], &streams), Some(0)));
    let turns: Vec<_> = (0..100).map(|_| order.next(&[0, 1], &streams).unwrap()).collect();
    assert_eq!(counts(&turns, 2), [50, 50]);
}

#[test]
fn over_one_calm_path_a_page_takes_its_round_trips_and_its_bytes() {
    let plan = calm("chain", 8.0, 100.0);
    let streams = |page: &Page| items(page, 0.0, &mut Random::new(1, 1)).len() as u64;
    let page = &plan.pages[0];
    let bytes: u64 = page.resources.iter().map(|it| u64::from(it.count) * it.bytes).sum();
    let ms = (bytes + streams(page) * plan.links.packet_bytes) as f64 / 1e3 * plan.links.packet_bytes as f64
        / plan.links.payload_bytes as f64;
    for scheduler in &plan.schedulers {
        let loaded = load(&plan, Browser::ChromiumH3, *scheduler);
        // One round trip for each resource of the chain, and at most all bytes.
        let depth = 100.0 * depth(page) as f64;
        let what = format!("{}: {loaded:?}, {depth} + {ms}", scheduler.name());
        assert!(loaded.load_ms > depth.max(ms) && loaded.load_ms < depth + ms, "{what}");
    }
}

/// Returns the length of the longest chain of resources that refer to each other.
fn depth(page: &Page) -> usize {
    let mut depths = std::collections::BTreeMap::new();
    for resource in &page.resources {
        let above = depths.get(resource.after.as_str()).copied().unwrap_or(0);
        depths.insert(resource.name.as_str(), above + 1);
    }
    depths.into_values().max().unwrap_or_default()
}

#[test]
fn render_blocking_resources_go_first_as_far_as_the_browser_signals_them() {
    let mut plan = calm("mixed", 8.0, 40.0);
    // Packets in a router's queue have their order already.
    (plan.links.buffer_packets, plan.links.initial_window) = (20, 10);
    let blind = load(&plan, Browser::ChromiumH2, TreesScheduler::MpquicLowestRtt);
    let bounds =
        [(Browser::Safari, 0.95), (Browser::FirefoxH2, 0.75), (Browser::ChromiumH2, 0.5), (Browser::ChromiumH3, 0.5)];
    for (browser, most) in bounds {
        let loaded = load(&plan, browser, TreesScheduler::MpquicLowestRttSignals);
        assert!(loaded.render_ms < most * blind.render_ms, "{}: {loaded:?}, {blind:?}", browser.name());
        assert!((loaded.load_ms / blind.load_ms - 1.0).abs() < 0.05, "{}: {loaded:?}, {blind:?}", browser.name());
    }
}

#[test]
fn the_best_way_is_no_worse_than_a_way() {
    let plan = plan();
    for cell in &plan.cells {
        let setting = Setting { plan: &plan, page: &plan.pages[2], browser: Browser::Safari, cell };
        let best = setting.load(TreesScheduler::BestPerGroup, 3).unwrap();
        let items = items(setting.page, plan.size_spread, &mut Random::new(3, SIZES));
        let second = setting.place(&items, Placing::ByGroup([1, 1]), 3).unwrap();
        assert!(best.render_ms <= second.render_ms && best.load_ms <= second.load_ms, "{best:?}, {second:?}");
    }
}

#[test]
fn rows_are_what_the_plan_gives() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
    let kept = Row::parse_all(&std::fs::read_to_string(format!("{root}results/fstream-trees.json")).unwrap()).unwrap();
    let Any::Trees(plan) = Any::read("fstream-trees").unwrap() else { panic!("it is no plan of pages") };
    let settings = plan.pages.len() * plan.browsers.len() * plan.cells.len();
    assert_eq!(kept.len(), settings * plan.schedulers.len());
    // Runs one setting again: a run is a function of its plan.
    let mut again = (*plan).clone();
    again.pages.truncate(1);
    again.browsers.truncate(1);
    again.cells = vec![again.cells.remove(1)];
    for row in run(&again).unwrap() {
        let wanted = (&row.page, row.browser, &row.cell, row.scheduler);
        let found = kept.iter().find(|kept| (&kept.page, kept.browser, &kept.cell, kept.scheduler) == wanted);
        assert_eq!(found, Some(&row), "run it again: paced-perf run fstream-trees");
    }
    let tables = tables(&kept);
    assert!(plan.schedulers.iter().all(|scheduler| tables.contains(scheduler.name())));
}
