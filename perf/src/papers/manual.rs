//! Checks that `perf/experiments.md` explains every key of plans and every field of rows, and no other.

use std::{collections::BTreeSet, fs, path::Path};

use clap::ValueEnum as _;
use experiment::Row;
use plan::{
    Any, METRICS, Plan, ProcessesPlan, Scheduler, ServingPlan, Varied as _, paths, processes, serving, stack, trees,
};
use serde::de::DeserializeOwned;

/// A key that nothing has.
const NOTHING: &str = "nothing";

fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

/// The names that an error lists as known: serde's as code spans, those of the forms of an enum as words.
fn expected(error: &str) -> BTreeSet<String> {
    let names: BTreeSet<_> = match error.split_once("available keys: ") {
        Some((_, list)) => list.split(", ").map(str::to_owned).collect(),
        None => spans(error.split_once("expected ").unwrap_or_else(|| panic!("{error}")).1).into_iter().collect(),
    };
    assert!(!names.is_empty(), "{error}");
    names
}

/// The keys of a struct that refuses unknown ones.
fn keys<T: DeserializeOwned>() -> BTreeSet<String> {
    keys_below::<T>(&format!("{NOTHING} = 0"))
}

/// The same, of a struct inside `T`, for which the text has a wrong key.
fn keys_below<T: DeserializeOwned>(text: &str) -> BTreeSet<String> {
    let Err(error) = toml::from_str::<T>(text) else { panic!("{text} was accepted") };
    expected(error.message())
}

/// The names of an enum's variants.
fn variants<T: DeserializeOwned>() -> BTreeSet<String> {
    let Err(error) = toml::Value::String(NOTHING.to_owned()).try_into::<T>() else { panic!("{NOTHING} was accepted") };
    expected(error.message())
}

fn text(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The text below a heading, up to the next one.
fn below<'a>(page: &'a str, heading: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("there is no {heading}"));
    rest.split_once("\n#").map_or(rest, |(section, _)| section)
}

/// The code spans of a table's cell.
fn spans(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The code spans in the first column of the tables below a heading.
fn explained(page: &str, heading: &str) -> BTreeSet<String> {
    let rows = below(page, heading).lines().filter(|line| line.starts_with("| `"));
    rows.filter_map(|row| row.split(" |").next()).flat_map(spans).collect()
}

#[test]
fn the_page_explains_every_key_of_every_plan_and_no_other() {
    let page = text("experiments.md");
    for (heading, keys) in [
        ("### Keys of `verdicts`", keys::<plan::Verdict>()),
        ("## Plans with a network", keys::<Plan>()),
        ("### Topologies", variants::<plan::Topology>()),
        ("### Keys of `network`", keys::<plan::Network>()),
        ("### Keys of `tunnel`", keys::<plan::Tunnel>()),
        ("### Keys of `engine`", keys::<plan::Engine>()),
        ("### Keys of `workload`", keys::<plan::Workload>()),
        ("### Keys of `reader`", keys::<plan::Reader>()),
        ("### Keys of `classes`", keys::<plan::Class>()),
        ("### Keys of `published`", keys::<plan::Published>()),
        ("### Keys of `queues`", keys::<plan::ManagedBy>()),
        ("### Schedulers", Scheduler::value_variants().iter().map(|of| of.name().to_owned()).collect()),
        ("## Plans of model serving", keys::<ServingPlan>()),
        ("### Keys of `seeds`", keys::<serving::Seeds>()),
        ("### Keys of `lengths`", keys::<serving::Lengths>()),
        ("### Keys of `models`", keys::<serving::Model>()),
        ("### Keys of `tasks`", keys::<serving::Task>()),
        ("### Keys of `latency`", keys::<serving::Latency>()),
        ("### Keys of the link of model serving", keys::<serving::Link>()),
        ("### Keys of `tuned`", keys::<serving::Tuned>()),
        ("### Keys of `dqn`", keys::<serving::Dqn>()),
        ("### Keys of `policies`", keys::<serving::Policy>()),
        ("### Keys of `goals`", keys::<serving::Goals>()),
        ("### Keys of `published` of model serving", keys::<serving::Published>()),
        ("## Plans of processes", keys::<ProcessesPlan>()),
        ("## Plans with several paths", keys::<paths::PathsPlan>()),
        ("### Keys of `links`", keys::<paths::Links>()),
        ("### Keys of `streams`", keys::<paths::Stream>()),
        ("### Keys of `cells`", keys::<paths::Path>()),
        ("## Plans of pages", keys::<trees::TreesPlan>()),
        ("### Keys of `resources`", keys::<trees::Resource>()),
        ("## Plans of the kernel's stack", keys::<stack::StackPlan>()),
    ] {
        assert_eq!(explained(&page, heading), keys, "{heading}");
    }
    // The values that an enum of a key allows, and the keys of small tables, are in one cell.
    for (heading, key, names) in [
        ("## Plans of processes", "link", keys::<processes::Link>()),
        ("## Plans of processes", "warm_up", keys::<processes::WarmUp>()),
        ("### Keys of `goals`", "heavy", keys::<serving::Heavy>()),
        ("## Plans of pages", "pages", keys::<trees::Page>()),
        ("## Plans of pages", "browsers", variants::<trees::Browser>()),
        ("## Plans of pages", "schedulers", variants::<trees::TreesScheduler>()),
        ("### Keys of `resources`", "kind", variants::<trees::ResourceKind>()),
        ("## Plans with several paths", "schedulers", variants::<paths::Scheduler>()),
        ("## Plans of the kernel's stack", "streams", keys::<stack::Transfer>()),
        ("## Plans of the kernel's stack", "congestion", variants::<stack::Congestion>()),
        ("### Keys of `verdicts`", "judgement", variants::<plan::Judgement>()),
        ("### Keys of `queues`", "queue", variants::<plan::Queue>()),
    ] {
        let row = below(&page, heading).lines().find(|line| line.starts_with(&format!("| `{key}` |"))).unwrap();
        let said: BTreeSet<_> = spans(row).into_iter().collect();
        assert!(names.is_subset(&said), "{heading}, {key}: {names:?}");
    }
    let cells = below(&page, "### Keys of `cells`");
    assert!(keys::<paths::Cell>().iter().all(|key| cells.contains(&format!("`{key}`"))));
}

#[test]
fn the_page_explains_every_form_of_arrivals() {
    let page = text("experiments.md");
    let section = below(&page, "### Keys of `workloads`");
    let mut said: BTreeSet<String> = BTreeSet::new();
    for row in section.split("| form |").nth(1).unwrap().lines().filter(|line| line.starts_with("| `")) {
        let spans: Vec<_> = row.split('|').skip(1).take(2).flat_map(spans).collect();
        said.insert(spans.join("."));
    }
    let forms = variants::<serving::Arrivals>();
    let of = |form: &String| {
        let text = format!("name = \"a\"\narrivals.{form} = {{ {NOTHING} = 0 }}");
        keys_below::<serving::Workload>(&text).into_iter().map(|key| format!("{form}.{key}")).collect::<Vec<_>>()
    };
    assert_eq!(said, forms.iter().flat_map(of).collect());
    let first = section.split("| form |").next().unwrap();
    let of_workload = keys::<serving::Workload>();
    assert!(of_workload.iter().all(|key| first.contains(&format!("| `{key}` |"))), "{of_workload:?}");
}

/// The fields of all rows of the plans for which `is_of_kind` holds.
fn fields(is_of_kind: impl Fn(&Any) -> bool) -> BTreeSet<String> {
    let mut fields = BTreeSet::new();
    for plan in plan::names().unwrap().iter().map(|name| Any::read(name).unwrap()).filter(is_of_kind) {
        for file in [format!("results/{}.json", plan.name()), format!("results/{}-lab.json", plan.name())] {
            let Ok(rows) = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)) else { continue };
            for row in rows.lines() {
                let row: serde_json::Map<_, _> = serde_json::from_str(row).unwrap();
                fields.extend(row.into_iter().map(|(field, _)| field));
            }
        }
    }
    fields
}

#[test]
fn the_page_explains_every_field_of_every_row_and_every_metric() {
    let page = text("experiments.md");
    let common = explained(&page, "## Where a row comes from");
    let of = |heading: &str| &explained(&page, heading) | &common;
    let serving = |plan: &Any| matches!(plan, Any::Serving(_));
    // Rows of model serving and their metrics are in one section.
    let in_serving = explained(&page, "## Rows of model serving");
    let metrics: BTreeSet<_> = serving::METRICS.iter().map(|metric| (*metric).to_owned()).collect();
    assert_eq!(&in_serving | &common, &fields(serving) | &metrics);
    assert_eq!(of("## Rows of processes"), fields(|plan| matches!(plan, Any::Processes(_))));
    assert_eq!(of("## Rows of several paths"), fields(|plan| matches!(plan, Any::Paths(_))));
    assert_eq!(of("## Rows of pages"), fields(|plan| matches!(plan, Any::Trees(_))));
    // Committed rows of the stack are older than fingerprints.
    let stack = fields(|plan| matches!(plan, Any::Stack(_)));
    assert_eq!(of("## Rows of the kernel's stack"), &stack | &names(["fingerprint"]));

    let row = Row::parse_all(text("results/urgent.json").lines().next().unwrap()).unwrap().remove(0);
    let row = serde_json::to_value(Row { lower_bound: true, ..row }).unwrap();
    let row: BTreeSet<_> = row.as_object().unwrap().keys().cloned().collect();
    assert_eq!(of("## Rows of plans with a network"), row);
    let metrics: BTreeSet<_> = METRICS.iter().map(|metric| (*metric).to_owned()).collect();
    assert_eq!(explained(&page, "### Metrics of plans with a network"), metrics);
}

#[test]
fn the_example_is_a_plan_and_its_rows_answer_the_question() {
    let page = text("experiments.md");
    let example = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let plan = Plan::from_toml(example).unwrap();
    assert_eq!(plan.variants().collect::<Vec<_>>(), ["base", "far"]);
    for asked in ["my-plan.toml", &*plan.classes[0].name, "latency_p95_ms"] {
        assert!(page.matches(asked).count() > 1, "{asked}");
    }
}
