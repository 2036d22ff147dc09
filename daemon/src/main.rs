//! `paced`: the daemon's command line.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::SystemTime,
};

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, Parser, Subcommand};
use paced::{configuration, monitor, policy, print, run, say, state};

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
    /// Shows configurations, and what they consist of.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Writes the manual pages of paced and of its configuration.
    Man {
        /// Where to.
        folder: PathBuf,
    },
    /// The privileged half, which `run` starts.
    #[command(name = monitor::SUBCOMMAND, hide = true)]
    Monitor {
        /// What it does, to which devices.
        plan: String,
    },
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Prints a configuration with its drop-ins as one text, defaults included.
    Show {
        /// The configuration (TOML).
        #[arg(default_value = "/etc/paced/paced.toml")]
        file: PathBuf,
        /// With the saved policy, if there is one that takes precedence: what a daemon started now would use.
        #[arg(long)]
        effective: bool,
    },
    /// Prints the JSON Schema of configurations, for editors.
    Schema {
        /// That of a policy alone, which `pacectl policy set` takes.
        #[arg(long)]
        policy: bool,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run { config: Some(file), .. } => run::production(&file),
        Command::Run { config: None, state_dir } => run::development(&state_dir.unwrap_or_else(state::development_dir)),
        Command::Check { file } => check(&file),
        Command::Config(ConfigCommand::Show { file, effective }) => show(&file, effective),
        Command::Config(ConfigCommand::Schema { policy }) => {
            print::text(if policy { config::policy::Policy::schema() } else { config::Config::schema() });
            Ok(())
        }
        Command::Man { folder } => man(&folder),
        Command::Monitor { plan } => monitor::serve(&plan),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("paced: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn check(file: &Path) -> Result<()> {
    let config = configuration::read(file)?;
    configuration::read_identities(&config)?;
    say!("{}", config::explain(&config, SystemTime::now()));
    Ok(())
}

fn show(file: &Path, effective: bool) -> Result<()> {
    let mut config = configuration::read(file)?;
    if effective {
        policy::prefer_saved(&mut config)?;
    }
    print::text(config.to_toml());
    Ok(())
}

/// Writes paced(8) and paced.toml(5).
fn man(folder: &Path) -> Result<()> {
    let page = clap_mangen::Man::new(Arguments::command()).section("8");
    let mut text = Vec::new();
    page.render(&mut text)?;
    let pages = [("paced.8", text), ("paced.toml.5", config::manual().into_bytes())];
    for (name, text) in pages {
        let file = folder.join(name);
        fs::write(&file, text).with_context(|| format!("failed to write {}", file.display()))?;
    }
    Ok(())
}
