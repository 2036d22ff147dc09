//! `pacectl route`: policies that choose models, made from recorded decisions. Needs no daemon.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};
use api::say;
use clap::{Args, Subcommand};
use config::routing::Routing;
use routing::{
    decision::{self, Decision},
    learn::{self, RateResult},
    policy::{self, PolicyFile},
    replay::{self, Replayed},
    scenario::{self, Scenario},
};
use sched::route::{DOUBT, MARGIN, RoutingPolicy};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use self::learning::{Train, Tune};
use super::table::table;

mod learning;

/// The state folder of the service, with its records.
const STATE_DIR: &str = "/var/lib/paced";

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Makes a scenario from recorded decisions: speed of engines, lengths and rates of requests
    Calibrate(Calibrate),
    /// Tunes thresholds on a scenario, by a cross-entropy search
    Tune(Tune),
    /// Trains a network on a scenario, by double deep Q-learning
    Train(Train),
    /// Scores policies on a scenario with new requests, compared with simple policies
    Eval(Eval),
    /// Shows where a policy would have decided otherwise about recorded requests
    Replay(Replay),
}

#[derive(Args)]
pub(crate) struct Calibrate {
    #[command(flatten)]
    records: Records,
    /// The file to write the scenario to [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Args)]
struct Records {
    /// The alias that the decisions are about
    #[arg(long, value_name = "NAME")]
    alias: String,
    /// A file of records; may be given several times [default: those in the state folder of the service]
    #[arg(long, value_name = "FILE")]
    decisions: Vec<PathBuf>,
}

#[derive(Args)]
pub(crate) struct Eval {
    /// The scenario, from `pacectl route calibrate`
    #[arg(long, value_name = "FILE")]
    scenario: PathBuf,
    /// A file of a policy; may be given several times
    #[arg(long, value_name = "FILE")]
    policy: Vec<PathBuf>,
    /// The number of seeds for each rate; more seeds make narrower intervals
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    seeds: u32,
}

#[derive(Args)]
pub(crate) struct Replay {
    #[command(flatten)]
    records: Records,
    /// The policy to ask: a file, or "rule", "considerate", "least-loaded", "round-robin"
    #[arg(long, value_name = "POLICY")]
    policy: String,
}

pub(crate) fn run(command: &Command, as_json: bool) -> Result<()> {
    match command {
        Command::Calibrate(arguments) => calibrate(arguments, as_json),
        Command::Tune(arguments) => tune(arguments, as_json),
        Command::Train(arguments) => train(arguments, as_json),
        Command::Eval(arguments) => eval(arguments, as_json),
        Command::Replay(arguments) => replay(arguments, as_json),
    }
}

impl Records {
    /// Reads the decisions about the alias, in order of time.
    fn read(&self) -> Result<Vec<Decision>> {
        let own = ["decisions.1.jsonl", "decisions.jsonl"].map(|file| Path::new(STATE_DIR).join(file));
        // The older file does not exist until the newer one has been full once.
        let files: Vec<_> = match self.decisions.is_empty() {
            // A folder that this user may not search holds perhaps both: the error of reading says so.
            true => own.into_iter().filter(|file| file.try_exists().unwrap_or(true)).collect(),
            false => self.decisions.clone(),
        };
        ensure!(
            !files.is_empty(),
            "there are no decisions in {STATE_DIR}: set decisions_bytes in [gateway] to record some, or name a file with \
             --decisions"
        );
        let texts = files.iter().map(|file| {
            fs::read_to_string(file).with_context(|| format!("failed to read the decisions in {}", file.display()))
        });
        let (mut decisions, unreadable) = decision::read(&texts.collect::<Result<Vec<_>>>()?.concat());
        if unreadable > 0 {
            eprintln!("pacectl: skipped {unreadable} lines that are not decisions");
        }
        let aliases: Vec<&str> = decisions.iter().map(|decision| decision.alias.as_str()).collect();
        if let Some(missing) = missing(&aliases, &self.alias) {
            bail!("{missing}");
        }
        decisions.retain(|decision| decision.alias == self.alias);
        Ok(decisions)
    }
}

/// Says what is missing if no decision is about `alias`. `aliases` names the alias of each decision.
fn missing(aliases: &[&str], alias: &str) -> Option<String> {
    let known: BTreeSet<&str> = aliases.iter().copied().collect();
    if known.is_empty() {
        return Some(format!(
            "there are no decisions yet: to record some, send requests to {alias} with a limit, such as x-paced-budget-ms or a class with a deadline"
        ));
    }
    let names = known.iter().copied().collect::<Vec<_>>().join(", ");
    (!known.contains(alias))
        .then(|| format!("none of the {} decisions is about {alias}; they are about {names}", aliases.len()))
}

fn calibrate(Calibrate { records, output }: &Calibrate, as_json: bool) -> Result<()> {
    let scenario::Calibrated { scenario, used, without_budget } =
        scenario::calibrate(&records.read()?, &records.alias)?;
    let text = format!(
        "# Made by pacectl {} of {used} decisions about {}. Edit the values that will change; each rate is simulated separately.\n{}",
        env!("CARGO_PKG_VERSION"),
        records.alias,
        scenario.to_toml()?
    );
    let Some(output) = output else {
        if as_json {
            say!("{}", json!({ "used": used, "without_budget": without_budget, "scenario": text }));
        } else {
            say!("{}", text.trim_end());
        }
        return Ok(());
    };
    write(output, text.as_bytes())?;
    let left_out = match without_budget {
        0 => String::new(),
        some => format!("; {some} about requests without a budget for the whole answer are left out"),
    };
    report(as_json, json!({ "used": used, "without_budget": without_budget }), || {
        format!("{}: made of {used} decisions{left_out}", output.display())
    })
}

fn tune(arguments: &Tune, as_json: bool) -> Result<()> {
    let Tune { scenario: file, output, .. } = arguments;
    let search = arguments.search()?;
    let (scenario, sha256) = read_scenario(file)?;
    let began = Instant::now();
    let tuned = learn::tune(&scenario, arguments.measured(), &search);
    let made = format!("{}{}", made_by(&sha256), arguments.command());
    let bytes = tuned.to_bytes(&made)?;
    let Some(output) = output else {
        say!("{}", String::from_utf8_lossy(&bytes).trim_end());
        return Ok(());
    };
    write(output, &bytes)?;
    let seconds = began.elapsed().as_secs();
    report(as_json, json!({ "seconds": seconds }), || format!("{}: tuned in {seconds} s", output.display()))
}

fn train(arguments: &Train, as_json: bool) -> Result<()> {
    let Train { scenario: file, output, .. } = arguments;
    let training = arguments.training()?;
    let (scenario, sha256) = read_scenario(file)?;
    let began = Instant::now();
    let (trained, course) = learn::train(&scenario, &training);
    let made = format!("{}{}", made_by(&sha256), arguments.command());
    write(output, &trained.to_bytes(&made)?)?;
    let seconds = began.elapsed().as_secs();
    report(as_json, json!({ "seconds": seconds, "losses": course.losses, "rewards": course.rewards }), || {
        let row = |(tenth, (reward, loss)): (usize, (&f64, &f64))| {
            format!("{:>3} %  reward {reward:.3}  loss {loss:.4}\n", (tenth + 1) * 10)
        };
        let rows: String = course.rewards.iter().zip(&course.losses).enumerate().map(row).collect();
        format!("{rows}{}: trained in {seconds} s", output.display())
    })
}

fn eval(Eval { scenario, policy, seeds }: &Eval, as_json: bool) -> Result<()> {
    let (scenario, _) = read_scenario(scenario)?;
    let mut policies = Vec::new();
    for file in policy {
        let fitted = read_policy(file).and_then(|read| learn::fit(&scenario, &read));
        policies
            .push((file.display().to_string(), fitted.with_context(|| format!("failed to use {}", file.display()))?));
    }
    policies.push(("rule".to_owned(), RoutingPolicy::Rule { margin: MARGIN }));
    policies.push(("considerate".to_owned(), RoutingPolicy::Considerate { doubt: DOUBT }));
    policies.extend(
        [("least-loaded", RoutingPolicy::LeastLoaded), ("round-robin", RoutingPolicy::RoundRobin)]
            .map(|(name, policy)| (name.to_owned(), policy)),
    );
    let models = scenario.model_names().into_iter().enumerate();
    policies.extend(models.map(|(at, name)| (format!("only {name}"), RoutingPolicy::Fixed(at))));
    let scored: Vec<(String, Vec<RateResult>)> = (policies.into_iter())
        .map(|(name, policy)| (name, learn::evaluate(&scenario, &policy, u64::from(*seeds))))
        .collect();
    if as_json {
        say!(
            "{}",
            Value::Array(
                scored
                    .iter()
                    .map(|(name, rows)| json!({ "policy": name, "rates": rows.iter().map(rate).collect::<Vec<_>>() }))
                    .collect()
            )
        );
        return Ok(());
    }
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    for (at, requests_per_sec) in scenario.requests_per_sec.iter().enumerate() {
        say!("at {requests_per_sec} requests/s, {seeds} seeds of {} s", scenario.seconds);
        let row = |(name, rows): &(String, Vec<RateResult>)| {
            let row = rows.get(at)?;
            Some([name.clone(), row.score.to_text(Some(1.0), 3), percent(row.met.mean)])
        };
        table(["policy", "score, 95 %", "in time"], scored.iter().filter_map(row));
        say!("");
    }
    let mean = |rows: &[RateResult]| rows.iter().map(|row| row.score.mean).sum::<f64>() / rows.len().max(1) as f64;
    say!("at all rates alike");
    table(["policy", "score"], scored.iter().map(|(name, rows)| [name.clone(), format!("{:.3}", mean(rows))]));
    Ok(())
}

fn rate(row: &RateResult) -> Value {
    let RateResult { requests_per_sec, score, met, requests } = row;
    json!({
        "requests_per_sec": requests_per_sec,
        "requests": requests,
        "score": { "mean": score.mean, "low": score.low, "high": score.high },
        "in_time": { "mean": met.mean, "low": met.low, "high": met.high },
    })
}

fn replay(Replay { records, policy }: &Replay, as_json: bool) -> Result<()> {
    let decisions = records.read()?;
    let without_file = |policy| Ok(PolicyFile { models: Vec::new(), classes: Vec::new(), policy });
    let from_file = |file: &Path| read_policy(file).with_context(|| format!("failed to use {}", file.display()));
    let file = match policy.parse() {
        Ok(Routing::Rule) => without_file(RoutingPolicy::Rule { margin: MARGIN }),
        Ok(Routing::Considerate) => without_file(RoutingPolicy::Considerate { doubt: DOUBT }),
        Ok(Routing::LeastLoaded) => without_file(RoutingPolicy::LeastLoaded),
        Ok(Routing::RoundRobin) => without_file(RoutingPolicy::RoundRobin),
        Ok(Routing::File(file)) => from_file(&file),
        // Unlike a configuration, a command may name a file from the current folder.
        Err(_) => from_file(Path::new(policy)),
    };
    let PolicyFile { models, classes, policy } = &file?;
    let replayed = replay::replay(&decisions, replay::NamedPolicy { policy, models, classes });
    let Replayed { asked, other_models, same, pairs, in_time, worth, met } = &replayed;
    ensure!(
        *asked > 0,
        "the policy is for the models {}, and all {other_models} decisions are about other models",
        models.join(", ")
    );
    if as_json {
        let pairs =
            pairs.iter().map(|((before, now), count)| json!({ "recorded": before, "replayed": now, "count": count }));
        say!(
            "{}",
            json!({
                "asked": asked, "other_models": other_models, "same": same, "pairs": pairs.collect::<Vec<_>>(),
                "in_time": { "recorded": in_time.0, "replayed": in_time.1 },
                "worth": { "recorded": worth.0, "replayed": worth.1 },
                "met": { "in_time": met.0, "answered": met.1 },
            })
        );
        return Ok(());
    }
    say!("{asked} decisions replayed, {same} with the same result");
    if *other_models > 0 {
        say!("{other_models} decisions are about other models and were skipped");
    }
    say!("{} of {} answers were in time for their budget", met.0, met.1);
    say!("");
    let per_request = |worth: f64| format!("{:.3}", worth / *asked as f64);
    table(
        ["", "recorded", "replayed"],
        [
            ["predicted in time".to_owned(), in_time.0.to_string(), in_time.1.to_string()],
            ["predicted worth of a request".to_owned(), per_request(worth.0), per_request(worth.1)],
        ],
    );
    say!("");
    let name = |model: &Option<String>| model.clone().unwrap_or_else(|| "none".to_owned());
    let row = |((before, now), count): (&(Option<String>, Option<String>), &usize)| {
        [name(before), name(now), count.to_string()]
    };
    table(["recorded", "replayed", "decisions"], pairs.iter().map(row));
    Ok(())
}

/// Reads a scenario; also returns the hash of its file.
fn read_scenario(file: &Path) -> Result<(Scenario, String)> {
    let text = fs::read_to_string(file).with_context(|| format!("failed to read the scenario {}", file.display()))?;
    let scenario = Scenario::parse(&text).with_context(|| format!("failed to use the scenario {}", file.display()))?;
    let digest: [u8; 32] = Sha256::digest(&text).into();
    Ok((scenario, config::hash::hex(&digest)))
}

fn read_policy(file: &Path) -> Result<PolicyFile> {
    let size = fs::metadata(file)?.len();
    ensure!(size <= policy::MOST_BYTES, "it has {size} bytes, too many for a policy");
    PolicyFile::parse(&fs::read(file)?)
}

/// Returns the note in a file about how it was made, up to the command.
fn made_by(scenario_sha256: &str) -> String {
    format!("Made by pacectl {} of the scenario with the SHA-256 {scenario_sha256}:\n", env!("CARGO_PKG_VERSION"))
}

/// Replaces a file as a whole, so that a running paced never reads half of it. Unlike a file of state, it has the mode
/// that the user's umask gives, because paced may run as another user.
fn write(file: &Path, bytes: &[u8]) -> Result<()> {
    state::replace_with_mode(file, bytes, 0o666).with_context(|| format!("failed to write {}", file.display()))
}

fn report(as_json: bool, facts: Value, words: impl FnOnce() -> String) -> Result<()> {
    if as_json {
        say!("{facts}");
    } else {
        say!("{}", words());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_about_other_aliases_or_none_at_all_are_told_apart() {
        assert_eq!(missing(&["auto", "fast"], "auto"), None);
        let said = missing(&["fast", "auto", "fast"], "slow").unwrap();
        assert_eq!(said, "none of the 3 decisions is about slow; they are about auto, fast");
        assert!(
            missing(&[], "auto")
                .unwrap()
                .starts_with("there are no decisions yet: to record some, send requests to auto with a limit")
        );
    }
}
