use clap::Args as _;
use instruments::origin::Trees;

use super::{rows_file::with_other_variants, *};
use crate::papers::{Results, cell};

/// A folder for the files of a test, which ends with it.
struct Desk(PathBuf);

impl Desk {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("paced-runs-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// A plan of two requests, which takes some milliseconds.
const SMALL: &str = r#"
    name = "small"
    title = "two requests"
    source = "none"
    topology = "direct"
    clocks = ["virtual-network"]
    seed = 1
    repetitions = 1
    schedulers = ["rr"]
    network = { rate_mbit = 5, loss = 0, delay_ms = 5, queue_packets = 100 }
    workload = { requests = 2, arrivals = "at-once", mix = "even", limit_s = 1 }
    classes = [{ name = "short", bytes = 10 }]
    [variants]
    far.network.delay_ms = 10
"#;

fn experiment(plan: &str) -> Experiment {
    Experiment {
        plan: plan.to_owned(),
        variant: BASE.to_owned(),
        scheduler: Vec::new(),
        path_scheduler: Vec::new(),
        policy: Vec::new(),
        repetitions: None,
        clock: None,
        json: None,
        plot: None,
    }
}

#[test]
fn a_run_of_a_network_leaves_the_rows_of_other_variants_in_its_file() {
    let desk = Desk::new("variants");
    let (plan, rows) = (desk.0.join("small.toml"), desk.0.join("rows.json"));
    fs::write(&plan, SMALL).unwrap();
    let experiment = Experiment { json: Some(rows.clone()), ..experiment(plan.to_str().unwrap()) };
    let variants = || {
        let rows = experiment::Row::parse_all(&fs::read_to_string(&rows).unwrap()).unwrap();
        instruments::rows::distinct(rows.into_iter().map(|row| row.variant))
    };
    run(&experiment).unwrap();
    let of_base = fs::read_to_string(&rows).unwrap();
    run(&Experiment { variant: "far".to_owned(), ..experiment }).unwrap();
    assert!(fs::read_to_string(&rows).unwrap().starts_with(&of_base));
    assert_eq!(variants(), [BASE, "far"]);
}

#[test]
fn a_file_that_cannot_be_written_is_told_with_its_option_before_the_run() {
    let desk = Desk::new("files");
    let plan = desk.0.join("small.toml");
    fs::write(&plan, SMALL).unwrap();
    // Runs of these plans need a VM, root, or minutes.
    let plans = [plan.to_str().unwrap(), "fstream-trees", "routing-fig9", "routing-processes", "mptcp", "fstream-fig4"];
    let (absent, folder) = (desk.0.join("absent/rows.json"), desk.0.clone());
    for (plan, path) in plans.into_iter().flat_map(|plan| [(plan, &absent), (plan, &folder)]) {
        let error = run(&Experiment { json: Some(path.clone()), ..experiment(plan) }).unwrap_err();
        assert_eq!(error.to_string(), format!("--json: {} cannot be written", path.display()), "{plan}: {error:#}");
    }
    for plan in [plans[0], "routing-fig9", "fstream-fig4"] {
        let error = run(&Experiment { plot: Some(absent.clone()), ..experiment(plan) }).unwrap_err().to_string();
        assert!(error.starts_with("--plot: ") && error.ends_with(" cannot be written"), "{plan}: {error}");
    }
    // The check neither makes a file nor changes one.
    let (rows, other) = (desk.0.join("rows.json"), desk.0.join("other.json"));
    let row = |plan| format!("{{\"plan\":\"{plan}\",\"variant\":\"base\",\"clock\":\"lab\"}}\n");
    fs::write(&rows, row("p")).unwrap();
    for path in [&rows, &other] {
        RowsFile::open(path, "p").unwrap();
    }
    assert!(fs::read_to_string(&rows).unwrap() == row("p") && !other.exists());
    fs::write(&rows, [0xff]).unwrap();
    let error = RowsFile::open(&rows, "p").err().unwrap().to_string();
    assert!(error.starts_with("--json: failed to read"), "{error}");
    // A run would replace these lines without a trace.
    for text in ["host\n".to_owned(), row("p") + &row("q")] {
        fs::write(&rows, &text).unwrap();
        let experiment = Experiment { json: Some(rows.clone()), ..experiment(plans[0]) };
        let error = run(&experiment).unwrap_err().to_string();
        assert!(error.starts_with("--json: line 1 of ") && error.ends_with("name another file"), "{error}");
        assert_eq!(fs::read_to_string(&rows).unwrap(), text);
    }
}

#[test]
fn mistakes_in_options_are_told_with_the_option() {
    let desk = Desk::new("options");
    let plan = desk.0.join("small.toml");
    fs::write(&plan, SMALL).unwrap();
    let small = || experiment(plan.to_str().unwrap());
    let twice = vec![Scheduler::Rr, Scheduler::Rr];
    for (experiment, told) in [
        (Experiment { clock: Some(Clock::Native), ..small() }, "--clock: small runs on virtual-network, not on native"),
        (Experiment { scheduler: twice, ..small() }, "--scheduler: rr is named twice"),
        (Experiment { scheduler: vec![Scheduler::Tls1], ..small() }, "--scheduler: tls-1 does not fit this topology"),
        (
            Experiment { path_scheduler: vec![PathScheduler::Paced; 2], ..experiment("fstream-fig4") },
            "--path-scheduler: paced is named twice",
        ),
        (Experiment { repetitions: Some(1), ..experiment("routing-fig9") }, "--repetitions: seeds.evaluations"),
        // The seeds of an evaluation would reach those from which policies learned.
        (Experiment { repetitions: Some(900_000), ..experiment("routing-fig9") }, "--repetitions: seeds"),
    ] {
        let error = format!("{:#}", run(&experiment).unwrap_err());
        assert!(error.starts_with(told), "{error}");
    }
    let parsed = |repetitions| {
        let command = Experiment::augment_args(clap::Command::new("run"));
        command.try_get_matches_from(["run", "small", "--repetitions", repetitions])
    };
    for (repetitions, is_right) in
        [("0", false), ("1", true), ("1000000", true), ("1000001", false), ("18446744073709551615", false)]
    {
        assert_eq!(parsed(repetitions).is_ok(), is_right, "{repetitions}");
    }
}

#[test]
fn a_run_of_one_variant_replaces_no_rows_of_others() {
    let line = |plan, variant, clock, value| {
        format!("{{\"plan\":\"{plan}\",\"variant\":\"{variant}\",\"clock\":\"{clock}\",\"value\":{value}}}\n")
    };
    let [one, two, in_lab] = [line("p", "one", "native", 1), line("p", "two", "native", 1), line("p", "two", "lab", 1)];
    let new = line("p", "two", "native", 2);
    let existing = [&*one, &two, &in_lab].concat();
    assert_eq!(with_other_variants(&existing, &new), [&*one, &in_lab, &new].concat());
    assert_eq!(with_other_variants(&format!("{one}{}no row\n", line("q", "one", "native", 1)), &new), one + &new);
    assert_eq!(with_other_variants("", &new), new);
}

#[test]
fn rows_of_simulations_name_their_variant_as_cells_do() {
    let desk = Desk::new("fingerprints");
    let folder = &desk.0;
    let cells = cell::all(&["routing-fig9".to_owned()], false).unwrap();
    let rows: Vec<_> = cells
        .iter()
        .map(|cell| serde_json::json!({"plan": cell.plan, "variant": cell.variant, "repetitions": cell.repetitions}))
        .collect();
    let origin = Origin::of_this_run("simulated").unwrap();
    let plan::Any::Serving(plan) = plan::Any::read("routing-fig9").unwrap() else { panic!("another kind") };
    let of_row = |row: &serde_json::Value| Ok(plan.variant(row["variant"].as_str().unwrap())?.fingerprint());
    RowsFile::open(&folder.join("routing-fig9.json"), "routing-fig9")
        .unwrap()
        .write_rows(&rows, &origin, of_row)
        .unwrap();
    let (results, trees) = (Results::open(folder).unwrap(), Trees::parse("sched 1"));
    let line = results.lines("routing-fig9", false);
    for cell in &cells {
        assert!(line.contains(&format!("\"fingerprint\":\"{}\"", cell.fingerprint)), "{cell}");
    }
    // Whatever is checked out, a row of another text is not of the cell.
    let text = line.replace(origin.trees(), "sched 1");
    fs::write(folder.join("routing-fig9.json"), text).unwrap();
    let results = Results::open(folder).unwrap();
    assert!(cells.iter().all(|cell| results.is_current(cell, &trees)));
    let changed = |cell: &cell::Cell| cell::Cell { fingerprint: "00000000".to_owned(), ..cell.clone() };
    assert!(!cells.iter().any(|cell| results.is_current(&changed(cell), &trees)));
}
