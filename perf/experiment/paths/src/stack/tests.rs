use plan::Any;

use super::*;

fn plan() -> StackPlan {
    let Any::Stack(plan) = Any::read("mptcp").unwrap() else { panic!("it is no plan of the stack") };
    *plan
}

#[test]
fn tcp_and_mptcp_are_simulated_with_packets_of_their_own() {
    let plan = plan();
    let of = |cell: &str| Setting::all(&plan).into_iter().find(|setting| setting.cell.name == cell).unwrap();
    let [tcp, mptcp] = [of("1, 1"), of("1, 1 and 1, 1")].map(|setting| setting.links().payload_bytes);
    assert_eq!((tcp, mptcp), (1_448, 1_448 - plan.mptcp_option_bytes));
}

#[test]
fn both_schedulers_share_a_stream_evenly_between_paths_that_are_alike() {
    let plan = plan();
    let all = Setting::all(&plan);
    let is_wanted = |it: &&Setting| it.cell.name == "1, 1 and 1, 1" && it.stream.name == "B";
    let setting = all.iter().find(is_wanted).unwrap();
    let known = [Known { rtt_ms: 1.0, pacing_mbit: 700.0 }; 2];
    for runs in [setting.simulated(&known).unwrap(), setting.lowest_rtt(&known).unwrap()] {
        for Simulated { packets, .. } in runs {
            let share = packets[1] as f64 / packets.iter().sum::<u64>() as f64;
            assert!((0.4..0.6).contains(&share), "{packets:?}");
        }
    }
}

/// Returns what the kernel knew before the request, by path.
fn known(row: &Row) -> Vec<Known> {
    let both = row.known_rtt_ms.iter().zip(&row.known_pacing_mbit);
    both.map(|(rtt_ms, pacing_mbit)| Known { rtt_ms: *rtt_ms, pacing_mbit: *pacing_mbit }).collect()
}

#[test]
fn rows_are_what_the_plan_gives_for_the_measured_times() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
    let rows = Row::parse_all(&std::fs::read_to_string(format!("{root}results/mptcp-lab.json")).unwrap()).unwrap();
    let plan = plan();
    let settings = Setting::all(&plan);
    assert_eq!(rows.len(), settings.len());
    // Simulates again. The measured means are reproduced by a single transfer with the same times.
    for (setting, kept) in settings.iter().zip(&rows) {
        let measured = Measured {
            completion_ms: kept.measured_ms,
            known: known(kept),
            packets: Vec::new(),
            dropped: 0,
            retransmitted: 0,
            reinjected: 0,
        };
        let again = Row {
            measured_deviation_ms: kept.measured_deviation_ms,
            measured_ci_ms: kept.measured_ci_ms,
            measured_last_path_pct: kept.measured_last_path_pct,
            measured_dropped: kept.measured_dropped,
            retransmitted: kept.retransmitted,
            reinjected: kept.reinjected,
            ..setting.row(&[measured]).unwrap()
        };
        assert_eq!(&again, kept, "run it again: perf/vm-plan.sh mptcp");
    }
}
