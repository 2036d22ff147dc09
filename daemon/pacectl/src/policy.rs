//! `pacectl policy`: the classes, and their terms.

use std::{fs, io::Read as _, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, ensure};
use api::{ControlClient, print, say, v1};
use clap::{Args, Subcommand};
use config::policy::MAX_TEXT_BYTES;

use super::table::{age, show, table, time};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Prints the policy in force, or an earlier revision
    Get {
        /// The revision [default: the one in force]
        revision: Option<u64>,
    },
    /// Lists the policy's revisions, including the current one
    List,
    /// Sets the policy; a policy that is refused changes nothing
    Set(Set),
    /// Shows what a policy would change
    Diff {
        /// The policy, in TOML; `-` reads standard input
        file: PathBuf,
    },
    /// Checks whether a policy would be accepted, and changes nothing
    Check {
        /// The policy, in TOML; `-` reads standard input
        file: PathBuf,
    },
    /// Confirms the policy on trial, so that it stays in force
    Confirm {
        /// The revision on trial [default: the one in force]
        revision: Option<u64>,
        /// Saves the policy: it survives restarts and takes precedence over the files
        #[arg(long, visible_alias = "persist")]
        save: bool,
    },
    /// Rolls back to an earlier revision
    Rollback {
        /// The revision [default: the one before]
        revision: Option<u64>,
        /// Fails unless this revision is in force
        #[arg(long, value_name = "REVISION")]
        expect: Option<u64>,
        /// Saves the policy: it survives restarts and takes precedence over the files
        #[arg(long, visible_alias = "persist")]
        save: bool,
    },
    /// Deletes the saved policy; the files apply again from the next reload
    Forget,
}

#[derive(Args)]
pub(crate) struct Set {
    /// The policy, in TOML; `-` reads standard input
    file: PathBuf,
    /// Fails unless this revision is in force
    #[arg(long, value_name = "REVISION")]
    expect: Option<u64>,
    /// Rolls back unless you run `pacectl policy confirm` within this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600), conflicts_with = "save")]
    confirm_within: Option<u64>,
    /// Saves the policy: it survives restarts and takes precedence over the files
    #[arg(long, visible_alias = "persist")]
    save: bool,
}

pub(crate) async fn run(client: &mut ControlClient, command: Command, as_json: bool) -> Result<()> {
    match command {
        Command::Get { revision } => {
            let request = v1::GetPolicyRequest { revision: revision.unwrap_or(0) };
            let answer = client.get_policy(request).await?.into_inner();
            show(as_json, answer, |answer| print::text(answer.revision.unwrap_or_default().text))
        }
        Command::List => {
            let answer = client.list_revisions(v1::ListRevisionsRequest {}).await?.into_inner();
            show(as_json, answer, |v1::ListRevisionsResponse { revisions, revision: in_force }| {
                let row = |of: v1::Revision| {
                    let state = if of.number == in_force { state(of.confirm_by) } else { String::new() };
                    [of.number.to_string(), state, format!("{} ago", age(of.since.as_ref())), of.author, of.origin]
                };
                table(["revision", "state", "set", "by", "from"], revisions.into_iter().map(row));
            })
        }
        Command::Set(Set { file, expect, confirm_within, save }) => {
            let confirm_within = confirm_within.map(|seconds| Duration::from_secs(seconds).try_into()).transpose()?;
            let expected_revision = expect.unwrap_or(0);
            let request =
                v1::SetPolicyRequest { text: read(&file)?, expected_revision, dry_run: false, confirm_within, save };
            let answer = client.set_policy(request).await?.into_inner();
            show(as_json, answer, |answer| in_force(&answer.revision.unwrap_or_default()))
        }
        Command::Diff { file } => {
            let answer = try_out(client, &file).await?;
            show(as_json, answer, |answer| print::text(answer.revision.unwrap_or_default().diff))
        }
        Command::Check { file } => {
            let answer = try_out(client, &file).await?;
            show(as_json, answer, |answer| {
                say!("valid; it would be revision {}", answer.revision.unwrap_or_default().number)
            })
        }
        Command::Confirm { revision, save } => {
            let revision = match revision {
                Some(revision) => revision,
                None => client.get_status(v1::GetStatusRequest {}).await?.into_inner().revision,
            };
            let answer = client.confirm_policy(v1::ConfirmPolicyRequest { revision, save }).await?.into_inner();
            show(as_json, answer, |_| say!("revision {revision} stays in force"))
        }
        Command::Rollback { revision, expect, save } => {
            let (revision, expected_revision) = (revision.unwrap_or(0), expect.unwrap_or(0));
            let request = v1::RollbackPolicyRequest { revision, save, expected_revision };
            let answer = client.rollback_policy(request).await?.into_inner();
            show(as_json, answer, |answer| in_force(&answer.revision.unwrap_or_default()))
        }
        Command::Forget => {
            let answer = client.forget_saved_policy(v1::ForgetSavedPolicyRequest {}).await?.into_inner();
            show(as_json, answer, |answer| {
                let forgotten = "forgotten; the policy in force stays until the next reload: pacectl reload";
                say!("{}", if answer.forgotten { forgotten } else { "no policy was saved" })
            })
        }
    }
}

async fn try_out(client: &mut ControlClient, file: &PathBuf) -> Result<v1::SetPolicyResponse> {
    let request = v1::SetPolicyRequest { text: read(file)?, dry_run: true, ..v1::SetPolicyRequest::default() };
    Ok(client.set_policy(request).await?.into_inner())
}

fn in_force(revision: &v1::Revision) {
    print::text(&revision.diff);
    say!("revision {} is in force", revision.number);
    if let Some(by) = revision.confirm_by.map(time) {
        say!("until {by}, unless it is confirmed: pacectl policy confirm");
    }
}

/// Says whether the revision in force is on trial, and until when.
fn state(confirm_by: Option<prost_types::Timestamp>) -> String {
    confirm_by.map_or_else(|| "in force".to_owned(), |by| format!("on trial until {}", time(by)))
}

/// Reads a policy, at most as long as the daemon accepts.
fn read(file: &PathBuf) -> Result<String> {
    let mut text = Vec::new();
    let limit = MAX_TEXT_BYTES as u64 + 1;
    let failed = || format!("failed to read {}", file.display());
    match file.as_os_str() == "-" {
        true => std::io::stdin().take(limit).read_to_end(&mut text).with_context(failed)?,
        false => fs::File::open(file).with_context(failed)?.take(limit).read_to_end(&mut text).with_context(failed)?,
    };
    ensure!(text.len() <= MAX_TEXT_BYTES, "{} is longer than {MAX_TEXT_BYTES} bytes", file.display());
    String::from_utf8(text).with_context(|| format!("{} is not UTF-8", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_on_trial_is_marked_with_the_end_of_its_trial() {
        assert_eq!(state(None), "in force");
        let by = prost_types::Timestamp { seconds: 1_800_000_000, nanos: 0 };
        assert_eq!(state(Some(by)), "on trial until 2027-01-15T08:00:00Z");
    }
}
