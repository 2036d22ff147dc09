//! `pacectl paths`: how each path of the edge does, once or as it happens.

use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, IsTerminal as _},
    time::Duration,
};

use anyhow::Result;
use api::{ControlClient, print, say, v1};
use clap::Args;
use tokio::time::{MissedTickBehavior, interval};

use super::{
    status::through,
    table::{lines, or_dash, rate, show},
};

/// How often paths are looked at.
const WHILE: Duration = Duration::from_secs(1);

/// Moves a terminal's cursor to the top left corner and clears everything after it (ECMA-48, CUP and ED).
const CLEAR: &str = "\x1b[H\x1b[J";

#[derive(Args)]
pub(crate) struct Arguments {
    /// Shows the paths again each second, with the losses of that second, until interrupted; with --json, one line each second
    #[arg(long)]
    watch: bool,
}

pub(crate) async fn run(client: &mut ControlClient, arguments: &Arguments, as_json: bool) -> Result<()> {
    if !arguments.watch {
        let start = Losses::default();
        return show(as_json, list(client).await?, |answer| {
            table(&answer.paths, &start).for_each(|line| say!("{line}"))
        });
    }
    let mut before = Losses::of(&list(client).await?.paths);
    let is_terminal = !as_json && io::stdout().is_terminal();
    let mut ticks = interval(WHILE);
    // A slow reader gets fewer, not later ones.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.reset();
    loop {
        ticks.tick().await;
        let answer = list(client).await?;
        let now = Losses::of(&answer.paths);
        if is_terminal {
            let width = crossterm::terminal::size().map_or(usize::MAX, |(columns, _)| columns.into());
            let shown = table(&answer.paths, &before).map(|line| line.chars().take(width).collect::<String>() + "\n");
            print::text(CLEAR.to_owned() + &shown.collect::<String>());
        } else {
            show(as_json, answer, |answer| {
                table(&answer.paths, &before).for_each(|line| say!("{line}"));
                say!("");
            })?;
        }
        before = now;
    }
}

async fn list(client: &mut ControlClient) -> Result<v1::ListPathsResponse> {
    Ok(client.list_paths(v1::ListPathsRequest {}).await?.into_inner())
}

/// The packets that each path had sent and lost at one moment, by the path's name and connections: other connections count from zero.
#[derive(Default)]
struct Losses(HashMap<(String, Vec<u64>), (u64, u64)>);

impl Losses {
    fn of(paths: &[v1::Path]) -> Self {
        let of = |path: &v1::Path| (Self::key(path), (path.sent_packets, path.lost_packets));
        Self(paths.iter().map(of).collect())
    }

    fn key(path: &v1::Path) -> (String, Vec<u64>) {
        (path.name.clone(), path.connections.clone())
    }

    /// How many packets a path has sent and lost since.
    fn since(&self, path: &v1::Path) -> (u64, u64) {
        let (sent, lost) = self.0.get(&Self::key(path)).copied().unwrap_or_default();
        (path.sent_packets.saturating_sub(sent), path.lost_packets.saturating_sub(lost))
    }
}

/// Returns the table of paths, in lines; losses are those since `before`.
fn table(paths: &[v1::Path], before: &Losses) -> impl Iterator<Item = String> {
    let all: u64 = paths.iter().map(|path| path.used_bytes_per_sec).sum();
    let share =
        |part: u64, of: u64| if of == 0 { "-".to_owned() } else { format!("{:.1} %", 100.0 * part as f64 / of as f64) };
    let row = |of: &v1::Path| {
        let (sent, lost) = before.since(of);
        [
            of.name.clone(),
            of.state.clone(),
            or_dash(if of.chosen { "yes" } else { "" }),
            or_dash(&through(&of.relays.join(", "), &of.via)),
            milliseconds(of.smoothed_rtt),
            milliseconds(of.min_rtt),
            rate(of.bytes_per_sec as f64 * 8.0),
            rate(of.used_bytes_per_sec as f64 * 8.0),
            share(of.used_bytes_per_sec, all),
            share(lost, sent),
            or_dash(&classes(&of.classes)),
            of.tunnels.to_string(),
            of.requests.to_string(),
            of.moved.to_string(),
            or_dash(&of.connections.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        ]
    };
    let heads = [
        "path",
        "state",
        "chosen",
        "relay",
        "RTT",
        "min RTT",
        "rate",
        "used",
        "share",
        "lost",
        "classes",
        "tunnels",
        "requests",
        "moved",
        "connections",
    ];
    let rows: Vec<_> = paths.iter().map(row).collect();
    let none =
        rows.is_empty().then(|| "no paths are configured: the routing table decides how packets leave".to_owned());
    let shown = if none.is_none() { Some(lines(heads, rows)) } else { None };
    none.into_iter().chain(shown.into_iter().flatten())
}

/// Returns how many open tunnels and requests each class has, the largest number first.
fn classes(numbers: &HashMap<String, u32>) -> String {
    let mut numbers: Vec<_> = numbers.iter().collect();
    numbers.sort_unstable_by_key(|(class, number)| (Reverse(**number), *class));
    numbers.iter().map(|(class, number)| format!("{number} {class}")).collect::<Vec<_>>().join(", ")
}

fn milliseconds(time: Option<prost_types::Duration>) -> String {
    let time = time.and_then(|time| Duration::try_from(time).ok()).unwrap_or_default();
    if time.is_zero() { "-".to_owned() } else { format!("{:.1} ms", time.as_secs_f64() * 1e3) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str, connection: u64, sent_packets: u64, lost_packets: u64) -> v1::Path {
        v1::Path {
            name: name.into(),
            state: "up".into(),
            connections: vec![connection],
            smoothed_rtt: Duration::from_micros(20_500).try_into().ok(),
            used_bytes_per_sec: 125_000,
            tunnels: 5,
            requests: 2,
            sent_packets,
            lost_packets,
            ..v1::Path::default()
        }
    }

    fn words(lines: impl Iterator<Item = String>) -> Vec<String> {
        lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn losses_are_those_since_the_last_look_and_of_a_new_connection_all() {
        let first = [path("dsl", 1, 1_000, 500), path("lte", 2, 1_000, 500)];
        let shown = words(table(&first, &Losses::default()));
        assert_eq!(shown[1], "dsl up - - 20.5 ms - 0 bit/s 1.0 Mbit/s 50.0 % 50.0 % - 5 2 0 1");
        let then = [path("dsl", 1, 1_100, 501), path("lte", 3, 100, 50)];
        let shown = words(table(&then, &Losses::of(&first)));
        assert!(shown[1].contains(" 50.0 % 1.0 % - 5 2 "), "{shown:?}");
        assert!(shown[2].contains(" 50.0 % 50.0 % - 5 2 "), "{shown:?}");
        let shown = words(table(&then, &Losses::of(&then)));
        assert!(shown[1].contains(" 50.0 % - - 5 2 "), "nothing was sent: {shown:?}");
    }

    #[test]
    fn a_path_shows_which_classes_are_on_it_the_largest_first() {
        let on_it = [("models", 2), ("voice", 1), ("bulk", 2)].map(|(class, number)| (class.to_owned(), number));
        let shown = words(table(&[v1::Path { classes: on_it.into(), ..path("dsl", 1, 0, 0) }], &Losses::default()));
        assert!(shown[1].contains(" - 2 bulk, 2 models, 1 voice 5 2 "), "{shown:?}");
    }

    #[test]
    fn the_path_that_an_operator_has_chosen_is_marked() {
        let chosen = v1::Path { chosen: true, ..path("lte", 2, 0, 0) };
        let shown = words(table(&[path("dsl", 1, 0, 0), chosen], &Losses::default()));
        let starts =
            [&shown[0], &shown[1], &shown[2]].map(|line| line.split(' ').take(3).collect::<Vec<_>>().join(" "));
        assert_eq!(starts, ["path state chosen", "dsl up -", "lte up yes"]);
    }

    #[test]
    fn without_paths_the_routes_decide() {
        assert_eq!(
            words(table(&[], &Losses::default())),
            ["no paths are configured: the routing table decides how packets leave"]
        );
    }
}
