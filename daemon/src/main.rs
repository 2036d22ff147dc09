//! `paced`: the daemon's command line.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::SystemTime,
};

use anyhow::{Context as _, Result};
use api::{print, say};
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use config::Config;
use enforcement::monitor;
use paced::{configuration, policy, run};

mod manual;

/// The exit status of [`Command::Run`] if its configuration is at fault (EX_CONFIG of sysexits.h): starts fail until it is corrected.
const EX_CONFIG: u8 = 78;

/// The configuration file of the packaged service.
const DEFAULT_FILE: &str = "/etc/paced/paced.toml";

/// Relays UDP and TCP by MASQUE over HTTP/3.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the daemon; without --config in development mode, for this machine only.
    Run {
        /// The configuration (TOML).
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The folder where development mode keeps its certificate.
        #[arg(long, value_name = "DIR", conflicts_with = "config")]
        state_dir: Option<PathBuf>,
    },
    /// Checks a configuration and explains what it does.
    ///
    /// Reads every file that the configuration names, as a start would, and changes nothing. Exit status: 0 if paced could
    /// start with it, with or without warnings; 1 if not; 2 for wrong arguments.
    Check(ConfigurationFile),
    /// Prints configurations, and their schema.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Writes the manual pages of paced and of its configuration.
    Man {
        /// The folder to write them to.
        folder: PathBuf,
    },
    /// The privileged half, which `run` starts.
    #[command(name = monitor::SUBCOMMAND, hide = true)]
    Monitor {
        /// The plan: actions and devices.
        plan: String,
    },
}

/// The configuration of a command that reads one, named with or without `--config`.
#[derive(Args)]
struct ConfigurationFile {
    /// The configuration (TOML).
    #[arg(default_value = DEFAULT_FILE)]
    file: PathBuf,
    /// The same, as `run` takes it.
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    config: Option<PathBuf>,
}

impl ConfigurationFile {
    fn path(&self) -> &Path {
        self.config.as_ref().unwrap_or(&self.file)
    }
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Prints a configuration as one text, with its drop-ins and all defaults.
    Show {
        #[command(flatten)]
        from: ConfigurationFile,
        /// Uses the saved policy if there is one, as a daemon that starts now would.
        #[arg(long)]
        effective: bool,
    },
    /// Prints the JSON Schema of configurations, for editors.
    Schema {
        /// Prints the schema of a policy alone, as `pacectl policy set` takes it.
        #[arg(long)]
        policy: bool,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run { config: Some(file), .. } => match configuration::read(&file) {
            Ok(config) => run::production(config, &file),
            Err(error) => {
                eprintln!("paced: {error:#}");
                return ExitCode::from(EX_CONFIG);
            }
        },
        Command::Run { config: None, state_dir } => run::development(&state_dir.unwrap_or_else(state::development_dir)),
        Command::Check(file) => check(file.path()),
        Command::Config(ConfigCommand::Show { from, effective }) => show(from.path(), effective),
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
    let (config, warnings) = configuration::check::check(file)?;
    print::text(config::explain(&config, SystemTime::now()));
    let warnings = warnings.into_iter().chain(role::descriptors::warning(&config));
    warnings.for_each(|warning| say!("warning: {warning}"));
    Ok(())
}

fn show(file: &Path, effective: bool) -> Result<()> {
    let mut config = configuration::read(file)?;
    if effective && let Some(warning) = make_effective(&mut config)? {
        eprintln!("paced: {warning}");
    }
    print::text(config.to_toml());
    Ok(())
}

/// Puts the saved policy in the place of the files' policy, as a start does: if it cannot be used, the files' policy stays. Returns a
/// warning then.
///
/// # Errors
/// This user may not read the saved policy, if there is one.
fn make_effective(config: &mut Config) -> Result<Option<String>> {
    match policy::prefer_saved(config) {
        Ok(_) => Ok(None),
        Err(error) if policy::is_hidden(&error) => {
            Err(error.context(format!("failed to read the saved policy in {}", config.state_dir.display())))
        }
        Err(error) => Ok(Some(format!(
            "the saved policy cannot be used; a start puts the policy of the files in force instead: {error:#}"
        ))),
    }
}

/// Writes the manual pages paced(8) and paced.toml(5).
fn man(folder: &Path) -> Result<()> {
    let pages = [("paced.8", manual::page(&Arguments::command())?), ("paced.toml.5", config::manual().into_bytes())];
    for (name, text) in pages {
        let file = folder.join(name);
        fs::write(&file, text).with_context(|| format!("failed to write {}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The manual page as a terminal shows it.
    fn rendered() -> String {
        let file = std::env::temp_dir().join(format!("paced-{}.8", std::process::id()));
        fs::write(&file, manual::page(&Arguments::command()).unwrap()).unwrap();
        let output = Command::new("groff").args(["-man", "-Tutf8", "-Kutf8", "-P-cbou"]).arg(&file).output();
        let output = output.expect("groff is installed (Debian's groff-base; `tests/setup pure` installs it)");
        fs::remove_file(file).unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "nothing is wrong with the page");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn without_a_file_the_services_configuration_is_checked_and_shown() {
        let file = |arguments: &[&str]| match Arguments::try_parse_from(["paced"].iter().chain(arguments))?.command {
            super::Command::Check(from) | super::Command::Config(ConfigCommand::Show { from, .. }) => {
                Ok::<_, clap::Error>(from.path().to_owned())
            }
            _ => panic!("{arguments:?} is another command"),
        };
        for arguments in [&["check"][..], &["config", "show"]] {
            assert_eq!(file(arguments).unwrap(), Path::new(DEFAULT_FILE));
            for other in [&["other.toml"][..], &["--config", "other.toml"]] {
                assert_eq!(file(&[arguments, other].concat()).unwrap(), Path::new("other.toml"));
            }
            assert!(file(&[arguments, &["--config", "other.toml", "third.toml"]].concat()).is_err(), "which one?");
        }
    }

    #[test]
    fn an_unusable_saved_policy_is_not_shown_as_effective() {
        let folder = std::env::temp_dir().join(format!("paced-effective-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let text = format!("state_dir = {folder:?}\n[class.of-files]\n");
        let shown = |saved: &str| {
            fs::write(folder.join("policy.toml"), saved).unwrap();
            let mut config = Config::from_toml(&text).unwrap();
            (make_effective(&mut config).unwrap(), config.to_toml())
        };
        let (warning, toml) = shown("[class.saved]\n");
        assert!(warning.is_none() && toml.contains("[class.saved]"), "{warning:?} {toml}");
        let (warning, toml) = shown("[clas]\n");
        assert!(warning.unwrap().contains("cannot be used") && toml.contains("[class.of-files]"), "{toml}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_manual_page_is_whole_and_names_no_page_that_does_not_exist() {
        let page = rendered();
        for part in [
            "SYNOPSIS",
            "paced run",
            "--config FILE",
            "--state-dir DIR",
            "paced check",
            "paced config show",
            "--effective",
            "/etc/paced/paced.toml",
            "SIGHUP",
            "SIGTERM",
            "/var/lib/paced",
            "RUST_LOG",
            "EXIT STATUS",
        ] {
            assert!(page.contains(part), "{part} is missing in\n{page}");
        }
        let exists = ["paced(8)", "paced.toml(5)", "pacectl(1)", "systemctl(1)", "nohup(1)"];
        let is_page = |word: &&str| word.len() > 3 && ["(1)", "(5)", "(7)", "(8)"].iter().any(|of| word.contains(of));
        for word in page.split_whitespace().filter(is_page) {
            assert!(exists.iter().any(|page| word.starts_with(page)), "{word}");
        }
        assert!(!page.contains("monitor"), "what is hidden stays so");
        assert!(page.chars().all(|letter| letter == '\n' || !letter.is_control()), "{page:?}");
        let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("Without --config it runs in development mode"), "{words}");
    }
}
