//! `pacectl`: the command-line tool of paced. Inspects a running daemon and changes its policy; makes tokens, probes
//! relays, forwards ports through them, and makes policies that choose models.

mod ask;
mod columns;
mod door;
mod flamegraph;
mod forward;
mod models;
mod options;
mod paths;
mod perf;
mod piped;
mod policy;
mod probe;
mod qlog;
mod route;
mod status;
mod table;
mod token;
mod top;
mod trace;

use std::{io::IsTerminal as _, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand, error::ErrorKind};
use clap_complete::Shell;
use role::verbosity;
use tracing_subscriber::{filter::LevelFilter, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use self::door::Door;

const EXIT_CODES: &str = "Exit codes: 0 done (`forward`, `trace`, `qlog` and `flamegraph` also when interrupted), 1 failed, 2 wrong usage, \
    3 refused (the message says why), 4 this user is not allowed to do that, 5 no daemon, relay or server of models answers.\n\
    Logs go to standard error; RUST_LOG chooses how much (error, warn, info, debug, trace).";

/// Inspects and controls a running paced; makes tokens, probes relays, and forwards ports through relays
#[derive(Parser)]
#[command(name = "pacectl", version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(flatten)]
    door: Door,
    /// Prints JSON in place of text
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows what is running, and what the kernel enforces
    Status,
    /// Shows the traffic of each class
    Classes,
    /// Shows and changes the policy: the classes, and how they are scheduled
    #[command(subcommand)]
    Policy(policy::Command),
    /// Reloads the configuration, and waits until it is in force or refused
    Reload,
    /// Lists open tunnels
    Tunnels(status::Tunnels),
    /// Lists the open connections: of clients, and to the relays that the edge uses
    Connections,
    /// Lists the requests that the gateway serves now
    Requests,
    /// Lists the engines of the gateway: load, health and learned speed of each
    Engines,
    /// Lists the paths of the edge: state, whether an operator has chosen it, round trips, rate and load of each; with --watch, live
    Paths(paths::Arguments),
    /// Changes where the edge's tunnels go
    #[command(subcommand)]
    Edge(Edge),
    /// Closes a tunnel
    Close {
        /// The tunnel's ID, from `pacectl tunnels`
        tunnel: u64,
    },
    /// Assigns a class to a tunnel, regardless of the rules; without a class, the rules decide again
    Class {
        /// The tunnel's ID, from `pacectl tunnels`
        tunnel: u64,
        /// The class
        class: Option<String>,
    },
    /// Shows the traffic of classes and tunnels, live; with --json, prints one line each second
    Top,
    /// Prints events until interrupted: changes by operators, tunnels that end, requests that are refused
    Events(status::Events),
    /// Traces each outgoing QUIC packet: when it was scheduled, sent to the kernel, due, and sent by the device
    Trace(trace::Arguments),
    /// Records a connection as qlog, with its classes, turns and departures
    Qlog(qlog::Arguments),
    /// Draws flame graphs of a process: its time on the CPU, and its time waiting
    Flamegraph(flamegraph::Arguments),
    /// Makes bearer tokens, which authenticate users at a relay
    #[command(subcommand)]
    Token(token::Command),
    /// Checks that a relay answers and admits this client; with a UDP echo as target, also measures round trips and loss
    Probe(probe::Arguments),
    /// Forwards a local UDP or TCP address to a target through a relay, until interrupted
    Forward(forward::Arguments),
    /// Asks a model for one answer, and shows its tokens as they arrive and how long they took
    Ask(ask::Arguments),
    /// Makes and scores policies that choose models, from recorded decisions; needs no daemon
    #[command(subcommand)]
    Route(route::Command),
    /// Prints the completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Writes the manual pages of pacectl and its commands
    Man {
        /// The folder to write them to
        folder: PathBuf,
    },
}

#[derive(Subcommand)]
enum Edge {
    /// Moves tunnels to another configured relay or path, and opens new ones there; without --relay and --path, the
    /// order of preference and the placement of classes decide again
    Move {
        /// Host and port of the relay, as `pacectl status` shows them
        #[arg(long)]
        relay: Option<String>,
        /// Name of the path, as `pacectl paths` shows it
        #[arg(long, conflicts_with = "relay")]
        path: Option<String>,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    // Exits with code 2 if the usage is wrong.
    let matches = Arguments::command().get_matches();
    let mut arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    if let Err(message) = arguments.door.settle(&matches) {
        Arguments::command().error(ErrorKind::ArgumentConflict, message).exit();
    }
    if let Some(option) = arguments.door.missing() {
        let message = format!(
            "a daemon on another machine takes --remote, --remote-ca, --remote-cert and --remote-key: add {option}"
        );
        Arguments::command().error(ErrorKind::MissingRequiredArgument, message).exit();
    }
    start_log(if matches!(arguments.command, Command::Forward(_)) { LevelFilter::INFO } else { LevelFilter::ERROR });
    let is_remote = arguments.door.is_remote();
    match run(arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pacectl: {}", door::message(&error, is_remote));
            ExitCode::from(door::exit_code(&error))
        }
    }
}

/// Logs to standard error, at `level` unless RUST_LOG asks for others.
fn start_log(level: LevelFilter) {
    let asked = verbosity::asked().unwrap_or_else(|error| {
        eprintln!("pacectl: {error}");
        None
    });
    let filter = asked.unwrap_or_else(|| verbosity::own(level));
    let has_colours =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let text = tracing_subscriber::fmt::layer().with_target(false);
    let text = text.with_ansi(has_colours).with_writer(std::io::stderr);
    tracing_subscriber::registry().with(filter).with(text).init();
}

async fn run(Arguments { door, json, command }: Arguments) -> Result<()> {
    match command {
        Command::Status => status::status(&mut door.open().await?, json).await,
        Command::Classes => status::classes(&mut door.open().await?, json).await,
        Command::Policy(command) => policy::run(&mut door.open().await?, command, json).await,
        Command::Reload => status::reload(&mut door.open().await?, json).await,
        Command::Tunnels(arguments) => status::tunnels(&mut door.open().await?, arguments, json).await,
        Command::Connections => status::connections(&mut door.open().await?, json).await,
        Command::Requests => models::requests(&mut door.open().await?, json).await,
        Command::Engines => models::engines(&mut door.open().await?, json).await,
        Command::Paths(arguments) => paths::run(&mut door.open().await?, &arguments, json).await,
        Command::Edge(Edge::Move { relay, path }) => {
            status::move_edge(&mut door.open().await?, relay, path, json).await
        }
        Command::Close { tunnel } => status::close(&mut door.open().await?, tunnel, json).await,
        Command::Class { tunnel, class } => status::class(&mut door.open().await?, tunnel, class, json).await,
        Command::Top => top::run(&mut door.open().await?, json).await,
        Command::Events(arguments) => status::events(&mut door.open().await?, arguments, json).await,
        Command::Trace(arguments) => trace::run(&door, &arguments, json).await,
        Command::Qlog(arguments) => qlog::run(&mut door.open().await?, &arguments, json).await,
        Command::Flamegraph(arguments) => flamegraph::run(&door, &arguments, json).await,
        Command::Token(command) => token::run(&command, json),
        Command::Probe(arguments) => probe::run(&arguments, json).await,
        Command::Forward(arguments) => forward::run(&arguments, json).await,
        Command::Ask(arguments) => ask::run(&arguments, json).await,
        Command::Route(command) => route::run(&command, json),
        Command::Completions { shell } => {
            api::print::text(completions(shell));
            Ok(())
        }
        Command::Man { folder } => man(&folder),
    }
}

/// Returns the completion script for a shell. It is made in memory, because the generator panics if a write fails.
fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "pacectl", &mut script);
    script
}

/// Writes a manual page for `pacectl` and one for each of its commands.
fn man(folder: &std::path::Path) -> Result<()> {
    let failed = || format!("failed to write the manual pages to {}", folder.display());
    clap_mangen::generate_to(Arguments::command(), folder).with_context(failed)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Asserts that a command and its subcommands have pages that `groff` accepts and that name all options.
    fn check(command: &clap::Command, name: &str, folder: &std::path::Path) -> usize {
        let file = folder.join(format!("{name}.1"));
        let output =
            std::process::Command::new("groff").args(["-man", "-Tutf8", "-Kutf8", "-P-cbou"]).arg(&file).output();
        let output = output.expect("groff is installed (Debian's groff-base; `tests/setup pure` installs it)");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "nothing is wrong with {name}");
        let page = String::from_utf8(output.stdout).unwrap();
        assert!(page.chars().all(|letter| letter == '\n' || !letter.is_control()), "{page:?}");
        let options = command.get_arguments().filter(|of| !of.is_hide_set()).filter_map(|of| of.get_long());
        for option in options {
            assert!(page.contains(&format!("--{option}")), "--{option} is missing in\n{page}");
        }
        let below = command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
        1 + below.map(|below| check(below, &format!("{name}-{}", below.get_name()), folder)).sum::<usize>()
    }

    #[test]
    fn the_daemon_may_be_named_before_or_after_the_command() {
        let settled = |words: &str| {
            let matches = Arguments::command().try_get_matches_from(words.split(' ')).unwrap();
            let mut arguments = Arguments::from_arg_matches(&matches).unwrap();
            arguments.door.settle(&matches).map(|()| arguments.door.missing())
        };
        for words in ["pacectl --remote a.example:9443 policy get", "pacectl policy get --remote a.example:9443"] {
            assert_eq!(settled(words), Ok(Some("--remote-ca")), "{words}");
        }
        assert_eq!(settled("pacectl policy --socket a.sock get"), Ok(None));
        assert!(settled("pacectl --remote a.example:9443 status --socket a.sock").is_err());
    }

    #[test]
    fn a_completion_script_is_whole_before_it_is_printed() {
        let script = String::from_utf8(completions(Shell::Bash)).unwrap();
        assert!(script.contains("--remote-ca") && script.trim_end().ends_with("fi"), "{script}");
    }

    #[test]
    fn every_command_has_a_page_that_names_its_options() {
        let folder = std::env::temp_dir().join(format!("pacectl-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        man(&folder).unwrap();
        let pages = check(&Arguments::command(), "pacectl", &folder);
        fs::remove_dir_all(folder).unwrap();
        assert!(pages > 20, "{pages}");
    }
}
