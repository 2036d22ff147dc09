use plan::{Any, Varied as _};

use super::{
    tables::{LONGEST, SHARES_PCT, TIMES},
    *,
};

const PLANS: [&str; 5] = ["fstream-fig2ab", "fstream-fig2cd", "fstream-fig3ab", "fstream-fig3cd", "fstream-fig4"];

fn read(name: &str) -> PathsPlan {
    let Any::Paths(mut plan) = Any::read(name).unwrap() else { panic!("{name} is no plan with several paths") };
    plan.repetitions = 3;
    *plan
}

/// Returns the rows of a plan that are kept beside it.
fn kept(name: &str) -> Vec<Row> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
    Row::parse_all(&std::fs::read_to_string(format!("{root}results/{name}.json")).unwrap()).unwrap()
}

fn of<'a>(rows: &'a [Row], cell: &str, scheduler: Scheduler, stream: &str) -> &'a Row {
    let wanted = (cell, scheduler, stream);
    rows.iter().find(|row| (row.cell.as_str(), row.scheduler, row.stream.as_str()) == wanted).unwrap()
}

/// Returns a plan of one cell with one path, whose links have neither jitter nor losses.
fn calm(rate_mbit: f64, rtt_ms: f64, streams: usize) -> PathsPlan {
    let mut plan = read("fstream-fig2ab");
    plan.cells.truncate(1);
    plan.cells[0].paths = vec![Path { rate_mbit, rtt_ms }];
    plan.streams.truncate(streams);
    (plan.links.jitter_ms, plan.links.rtt_error, plan.links.buffer_packets) = (0.0, 0.0, 10_000);
    plan
}

#[test]
fn a_run_repeats_itself_and_seeds_differ() {
    let plan = read("fstream-fig2ab");
    let cell = &plan.cells[3];
    let shown = |seed| Of { plan: &plan, cell, seed }.run(Scheduler::MpquicLowestRtt).unwrap();
    assert_eq!(shown(1), shown(1));
    assert_ne!(shown(1), shown(2));
}

#[test]
fn on_calm_links_the_closed_form_is_what_happens() {
    for (rate_mbit, rtt_ms) in [(1.0, 1.0), (1.0, 400.0), (10.0, 40.0), (100.0, 1.0), (100.0, 400.0)] {
        let plan = calm(rate_mbit, rtt_ms, 2);
        for scheduler in [Scheduler::MpquicLowestRtt, Scheduler::Paced, Scheduler::Fstream, Scheduler::MpquicSaEcf] {
            // Only the closed form of pinned streams includes slow start.
            let pinned = matches!(scheduler, Scheduler::Paced | Scheduler::Fstream);
            if !pinned && rtt_ms > 1.0 {
                continue;
            }
            for (name, shown) in
                ["A", "B"].iter().zip(Of { plan: &plan, cell: &plan.cells[0], seed: 1 }.run(scheduler).unwrap())
            {
                let ratio = shown.completion_ms / shown.closed_ms;
                // By lottery, A may be a few packets late; a packet is 0.05 of A; windows grow packet by packet.
                let most = if scheduler == Scheduler::Fstream && *name == "A" { 1.5 } else { 1.15 };
                let what = format!("{} of {name} over {rate_mbit} Mbit/s, {rtt_ms} ms: {shown:?}", scheduler.name());
                assert!((0.9..most).contains(&ratio), "{what}");
            }
        }
    }
}

#[test]
fn lost_packets_are_sent_again_until_all_have_arrived() {
    let mut plan = calm(1.0, 50.0, 2);
    plan.links.buffer_packets = 5;
    let of = Of { plan: &plan, cell: &plan.cells[0], seed: 1 };
    let way = of.way(Scheduler::Paced);
    let links = vec![Link::new(11_024_000, 50_000_000, 5e7, &plan.links)];
    let mut strategy = Strategy::new(way.rule, way.order);
    let ended = simulator::run(links, &way.streams, &mut strategy, &mut Random::new(1, 1)).unwrap();
    assert!(ended.dropped > 20, "{}", ended.dropped);
    let sent: u64 = ended.sent.iter().flatten().sum();
    let packets: usize = way.streams.iter().map(|stream| stream.packets).sum();
    assert!(sent >= packets as u64 + ended.dropped && sent < 2 * packets as u64, "{sent} packets for {packets}");
    assert!(ended.ended_ns.iter().all(|end| *end < 20_000_000_000), "{ended:?}");
}

#[test]
fn packets_take_the_path_with_the_lowest_round_trip_until_its_window_is_full() {
    let mut plan = calm(1.0, 100.0, 1);
    plan.cells[0].paths.push(Path { rate_mbit: 1.0, rtt_ms: 10.0 });
    let of = |plan: &PathsPlan| Of { plan, cell: &plan.cells[0], seed: 1 }.run(Scheduler::MpquicLowestRtt).unwrap()[0];
    assert_eq!(of(&plan).slow_pct, 0.0, "20 packets fit into one window");
    plan.links.initial_window = 15;
    let shown = of(&plan);
    assert!((20.0..30.0).contains(&shown.slow_pct), "5 of 20 packets take the other: {shown:?}");
}

#[test]
fn sa_ecf_leaves_a_slow_path_alone_where_lowest_rtt_does_not() {
    let mut plan = calm(100.0, 10.0, 1);
    plan.cells[0].paths.push(Path { rate_mbit: 1.0, rtt_ms: 400.0 });
    plan.streams[0].bytes = 100_000;
    let of = |scheduler| Of { plan: &plan, cell: &plan.cells[0], seed: 1 }.run(scheduler).unwrap()[0];
    let (blind, aware) = (of(Scheduler::MpquicLowestRtt), of(Scheduler::MpquicSaEcf));
    assert!(blind.slow_pct > 10.0 && aware.slow_pct == 0.0, "{blind:?}, {aware:?}");
    assert!(aware.completion_ms * 5.0 < blind.completion_ms, "{blind:?}, {aware:?}");
}

#[test]
fn paced_is_never_5_percent_worse_than_the_best_way_of_whole_streams_where_buffers_hold_what_is_sent() {
    for name in PLANS {
        let mut plan = read(name).variant("large-buffer").unwrap();
        plan.repetitions = 3;
        plan.schedulers = vec![Scheduler::Paced, Scheduler::BestPerStream, Scheduler::PacedRanges];
        let rows = run(&plan).unwrap();
        for cell in &plan.cells {
            let time = |scheduler, stream| of(&rows, &cell.name, scheduler, stream).completion_ms;
            let (paced, best) = (time(Scheduler::Paced, "B"), time(Scheduler::BestPerStream, "B"));
            assert!(paced <= 1.05 * best, "{name}, {}: {paced} ms instead of {best}", cell.name);
        }
    }
}

#[test]
fn a_is_three_times_as_fast_where_lowest_rtt_has_it_share_the_slow_path() {
    let goals = [
        ("fstream-fig2ab", &["5", "10", "20", "50", "100"][..]),
        ("fstream-fig3ab", &["5, 20", "10, 40", "20, 80"]),
        ("fstream-fig3cd", &["100, 1", "50, 20", "20, 80"]),
    ];
    for (name, cells) in goals {
        let mut plan = read(name);
        plan.schedulers = vec![Scheduler::MpquicLowestRtt, Scheduler::Paced];
        plan.repetitions = 20;
        plan.cells.retain(|cell| cells.contains(&cell.name.as_str()));
        assert_eq!(plan.cells.len(), cells.len());
        let rows = run(&plan).unwrap();
        for cell in cells {
            let [blind, paced] = plan.schedulers[..] else { panic!("there are two") };
            let (blind, paced) = (of(&rows, cell, blind, "A"), of(&rows, cell, paced, "A"));
            assert!(blind.slow_path_pct > 10.0, "{name}, {cell}: {blind:?}");
            assert!(blind.completion_ms >= 3.0 * paced.completion_ms, "{name}, {cell}: {blind:?}, {paced:?}");
        }
    }
}

#[test]
fn goals_are_missed_in_the_cells_that_the_readme_names() {
    // By variant: cells in which A shares the slower path, and those in which it is three times as fast.
    let mut times_met = std::collections::BTreeMap::<_, [u32; 2]>::new();
    let (mut late, mut undivided) = (Vec::new(), Vec::new());
    for name in PLANS {
        let rows = kept(name);
        let variants = instruments::rows::distinct(rows.iter().map(|row| row.variant.clone()));
        for (variant, cell) in
            variants.iter().flat_map(|it| read(name).cells.into_iter().map(move |cell| (it, cell.name)))
        {
            let here: Vec<_> = rows.iter().filter(|row| row.variant == *variant).cloned().collect();
            let time = |scheduler, stream| of(&here, &cell, scheduler, stream).completion_ms;
            if name != "fstream-fig4" && of(&here, &cell, Scheduler::MpquicLowestRtt, "A").slow_path_pct > SHARES_PCT {
                let times = |scheduler| time(Scheduler::MpquicLowestRtt, "A") / time(scheduler, "A");
                let (is_met, can_be) = (times(Scheduler::Paced) >= TIMES, times(Scheduler::BestPerStream) >= TIMES);
                assert_eq!(is_met, can_be, "{name} {variant}, {cell}: whole streams reach it");
                let [all, met] = times_met.entry(variant.clone()).or_default();
                (*all, *met) = (*all + 1, *met + u32::from(is_met));
            }
            let best = time(Scheduler::BestPerStream, "B");
            if time(Scheduler::Paced, "B") > LONGEST * best {
                late.push(format!("{name} {variant}, {cell}"));
            }
            if variant == "base" && time(Scheduler::PacedRanges, "B") >= best {
                undivided.push(format!("{name}, {cell}"));
            }
        }
    }
    assert_eq!((times_met["base"], times_met["small-window"]), ([25, 11], [25, 6]));
    assert_eq!(
        late,
        ["fstream-fig3ab small-buffer, 100, 400", "fstream-fig3cd base, 2, 320", "fstream-fig4 small-buffer, 100, 400"]
    );
    let of_plan = |name: &str| undivided.iter().filter(|cell| cell.starts_with(&format!("{name},"))).count();
    assert_eq!(PLANS.map(of_plan), [3, 0, 3, 4, 3], "{undivided:?}");
}

#[test]
fn rows_are_what_the_plans_give() {
    for name in PLANS {
        let rows = kept(name);
        // Runs one cell of each plan again: a run is a function of its plan.
        let Any::Paths(mut plan) = Any::read(name).unwrap() else { panic!("{name} is no plan with several paths") };
        plan.cells = vec![plan.cells.remove(2)];
        for row in run(&plan).unwrap() {
            let kept = rows.iter().find(|kept| {
                (&kept.variant, &kept.cell, kept.scheduler, &kept.stream)
                    == (&row.variant, &row.cell, row.scheduler, &row.stream)
            });
            assert_eq!(kept, Some(&row), "run it again: paced-perf run {name} --variant all");
        }
    }
}

#[test]
fn tables_and_pictures_show_every_scheduler() {
    let mut plan = read("fstream-fig4");
    plan.cells.truncate(2);
    let rows = run(&plan).unwrap();
    let text: String = rows.iter().map(|row| serde_json::to_string(row).unwrap() + "\n").collect();
    assert_eq!(Row::parse_all(&text).unwrap(), rows, "rows are read as they are written");
    let (tables, picture) = (tables(&rows), picture(&rows));
    assert!(
        plan.schedulers.iter().all(|scheduler| tables.contains(scheduler.name()) && picture.contains(scheduler.name()))
    );
    assert!(picture.ends_with("</svg>\n") && !picture.contains("NaN"));
}
