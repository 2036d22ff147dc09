//! `pacectl`: the hand tool of paced. Makes tokens, probes relays, forwards ports through them.

mod forward;
mod options;
mod probe;
mod token;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 wrong usage.\n\
    Logs go to standard error; RUST_LOG chooses how much (error, warn, info, debug, trace).";

#[derive(Parser)]
#[command(name = "pacectl", version, about = "Makes tokens, probes relays, forwards ports through them", after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bearer tokens, by which a relay knows its users
    #[command(subcommand, after_help = EXIT_CODES)]
    Token(token::Command),
    /// Opens a UDP tunnel to an echo and measures set-up time, round trips and loss
    #[command(after_help = EXIT_CODES)]
    Probe(probe::Arguments),
    /// Forwards a local UDP address, or a TCP one, to a target through a relay, until interrupted
    #[command(after_help = EXIT_CODES)]
    Forward(forward::Arguments),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    // Ends the process with code 2 by itself where the usage is wrong.
    let arguments = Arguments::parse();
    let quiet = if matches!(arguments.command, Command::Forward(_)) { "info" } else { "error" };
    let filter = EnvFilter::builder().with_default_directive(tracing::Level::WARN.into());
    let filter = filter.parse_lossy(std::env::var("RUST_LOG").unwrap_or_else(|_| format!("paced={quiet}")));
    tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_writer(std::io::stderr).init();
    let outcome = match arguments.command {
        Command::Token(command) => token::run(&command),
        Command::Probe(arguments) => probe::run(&arguments).await,
        Command::Forward(arguments) => forward::run(&arguments).await,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pacectl: {error:#}");
            ExitCode::FAILURE
        }
    }
}
