//! `paced`: the daemon's command line.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use config::Config;
use paced::{monitor, run, state};

/// Relays UDP and TCP by MASQUE over HTTP/3.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the daemon; without a configuration in development mode, for this machine only.
    Run {
        /// The configuration (TOML).
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Where development mode keeps its certificate.
        #[arg(long, value_name = "DIR", conflicts_with = "config")]
        state_dir: Option<PathBuf>,
    },
    /// Validates a configuration and explains what it does.
    Check {
        /// The configuration (TOML).
        file: PathBuf,
    },
    /// The privileged half, which `run` starts.
    #[command(name = monitor::SUBCOMMAND, hide = true)]
    Monitor,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run { config: Some(file), .. } => run::production(&file),
        Command::Run { config: None, state_dir } => run::development(&state_dir.unwrap_or_else(state::development_dir)),
        Command::Check { file } => check(&file),
        Command::Monitor => monitor::serve(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("paced: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn check(file: &PathBuf) -> Result<()> {
    let text = fs::read_to_string(file).with_context(|| format!("failed to read {}", file.display()))?;
    let config = Config::from_toml(&text).with_context(|| format!("{} is not valid", file.display()))?;
    run::read_identities(&config)?;
    println!("{}", config::explain(&config));
    Ok(())
}
