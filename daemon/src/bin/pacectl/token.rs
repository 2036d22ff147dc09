//! `pacectl token`: bearer tokens.

use anyhow::{Result, anyhow};
use clap::Subcommand;
use paced::{auth, say};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Makes a token; prints it, once, and what the relay's configuration has to say about it
    New {
        /// Whom it is for
        #[arg(default_value = "user")]
        name: String,
    },
}

pub(crate) fn run(command: &Command, as_json: bool) -> Result<()> {
    let Command::New { name } = command;
    let (token, sha256) = auth::generate_token().map_err(|_| anyhow!("the system has no randomness to give"))?;
    let sha256 = auth::hex(&sha256);
    if as_json {
        say!("{}", serde_json::json!({ "name": name, "token": token, "sha256": sha256 }));
        return Ok(());
    }
    say!("The token, which is shown only now; keep it where the client finds it (--token-file, token_file):\n");
    say!("{token}\n");
    say!("For the relay's configuration, which needs no secret:\n");
    say!("[[relay.token]]\nname = {}\nsha256 = \"{sha256}\"", serde_json::Value::from(name.as_str()));
    Ok(())
}
