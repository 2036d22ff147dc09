use plan::{Any, serving::Goals};

use super::*;

/// Returns a plan of the project, made as small as possible.
fn tiny(name: &str) -> ServingPlan {
    let Any::Serving(mut plan) = Any::read(name).unwrap() else { panic!("{name} is no plan of model serving") };
    plan.seeds.evaluations = 2;
    for workload in &mut plan.workloads {
        use plan::serving::Arrivals;
        match &mut workload.arrivals {
            Arrivals::Stable { rates, duration_s } => (*rates, *duration_s) = (vec![1.0, 12.0], 10.0),
            Arrivals::Bursts { requests, .. } => *requests = 60,
            Arrivals::Diurnal { duration_s, .. } | Arrivals::Spikes { duration_s, .. } => *duration_s = 10.0,
        }
    }
    for recipe in plan.tuned.values_mut() {
        (recipe.generations, recipe.candidates, recipe.elites, recipe.trainings) = (2, 4, 2, 2);
    }
    for recipe in plan.dqn.values_mut() {
        (recipe.updates, recipe.warm_up, recipe.trainings) = (20, 50, 1);
        recipe.hidden = vec![4];
    }
    *plan
}

#[test]
fn every_policy_has_rows_in_every_cell_and_a_run_repeats_them() {
    for name in plan::names().unwrap() {
        let Ok(Any::Serving(_)) = Any::read(&name) else { continue };
        let plan = tiny(&name);
        let rows = run(&plan, &[]).unwrap();
        assert_eq!(rows, run(&plan, &[]).unwrap());
        for policy in &plan.policies {
            for cell in Cell::all(&plan) {
                let workload = &cell.workload(&plan).name;
                let score = rows.iter().find(|row| {
                    (&row.policy, &row.workload, row.rate) == (&policy.name, workload, cell.rate)
                        && (row.task.as_str(), row.metric.as_str()) == ("all", "score")
                });
                let score = score.unwrap_or_else(|| panic!("{name}: no score of {} in {workload}", policy.name));
                assert!(score.low <= score.value && score.value <= score.high && score.samples > 0, "{score:?}");
            }
        }
        let text: String = rows.iter().map(|row| serde_json::to_string(row).unwrap() + "\n").collect();
        assert_eq!(Row::parse_all(&text).unwrap(), rows, "rows are read as they are written");
        let tables = tables(&rows, &plan.goals);
        assert!(plan.policies.iter().all(|policy| tables.contains(&policy.name)), "{tables}");
        assert!(pictures(&rows).iter().all(|(_, svg)| svg.ends_with("</svg>\n") && !svg.contains("NaN")));
    }
}

#[test]
fn a_policy_alone_is_what_it_is_among_others() {
    let plan = tiny("routing-fig4-6");
    let (all, alone) = (run(&plan, &[]).unwrap(), run(&plan, &["rule".to_owned()]).unwrap());
    let scores = |rows: &[Row]| -> Vec<f64> {
        rows.iter().filter(|row| row.policy == "rule" && row.metric == "score").map(|row| row.value).collect()
    };
    assert_eq!(scores(&all), scores(&alone));
    let message = run(&plan, &["no-such".to_owned()]).unwrap_err().to_string();
    assert!(message.contains("no-such"), "{message}");
}

#[test]
fn windows_are_drawn_for_each_policy_without_the_guard_where_they_are_counted() {
    let plan = tiny("routing-fig4-6");
    let (rows, drawn) = run_and_draw(&plan, &["6.7b", "rule", "tuned", "tuned-guarded"].map(str::to_owned)).unwrap();
    let names: Vec<_> = drawn.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["base-windows-bursts", "base-windows-bursts-wide"]);
    for (name, svg) in &drawn {
        let panels: Vec<_> = svg.lines().filter(|line| line.contains("font-weight=\"bold\">")).skip(1).collect();
        let titles = ["requests per second", "6.7b", "rule", "tuned"];
        assert!(
            panels.len() == 4 && panels.iter().zip(titles).all(|(panel, title)| panel.contains(title)),
            "{panels:?}"
        );
        assert!(svg.matches("<polyline").count() == 7 && !svg.contains("NaN"), "{name}: {svg}");
    }
    assert!(pictures(&rows).iter().all(|(name, _)| !names.contains(&name.as_str())), "rows do not tell the course");
    let (_, drawn) = run_and_draw(&tiny("routing-table3-4"), &["1.3b".to_owned()]).unwrap();
    assert!(drawn.is_empty(), "no windows are counted");
}

#[test]
fn tables_say_which_goals_are_met() {
    let plan = tiny("routing-fig4-6");
    let mut rows = run(&plan, &[]).unwrap();
    for row in &mut rows {
        if row.metric == "over_best_model" && row.policy == "rule" {
            (row.value, row.low, row.high) = (0.02, 0.01, 0.03);
        }
        if row.metric == "over_best_model" && row.policy == "tuned" {
            (row.value, row.low, row.high) = (-0.02, -0.03, -0.01);
        }
    }
    let tables = tables(&rows, &plan.goals);
    let is_of = |line: &&str, policy: &str| line.split('|').nth(1).is_some_and(|cell| cell.trim() == policy);
    let line = |policy: &str| tables.lines().find(|line| is_of(line, policy) && line.contains(": ")).unwrap();
    assert!(line("rule").contains("met: +0.020 at 1") && line("rule").contains("1, 12"), "{tables}");
    assert!(line("tuned").contains("failed: -0.020 at 1"), "{tables}");
    assert!(tables.contains("at 20/s, ten times the rate at which 6.7b breaks down: 95 %"), "{tables}");
    let goals = Goals { below_best: Some(0.05), ..Goals::default() };
    let tables = super::tables(&rows, &goals);
    assert!(tables.contains("at most 0.05 below") && tables.contains("met: -0.020 at 1"), "{tables}");
    assert!(!tables.contains("6.7b breaks down"), "{tables}");
    assert!(!super::tables(&rows, &Goals::default()).contains("goals"), "without goals there is nothing to meet");
}

#[test]
fn nothing_is_reported_on_what_was_learned_from() {
    let mut checked = 0;
    for name in plan::names().unwrap() {
        let Ok(Any::Serving(plan)) = Any::read(&name) else { continue };
        let results =
            std::fs::read_to_string(format!("{}/../results/{name}.json", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let rows = Row::parse_all(&results).unwrap();
        let learned = plan.seeds.tuning..plan.seeds.training + 100;
        assert!(rows.iter().all(|row| row.seed == plan.seeds.evaluation && !learned.contains(&row.seed)), "{name}");
        checked += 1;
    }
    assert!(checked >= 3);
}
