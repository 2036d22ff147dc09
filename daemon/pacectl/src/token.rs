//! `pacectl token`: bearer tokens.

use anyhow::{Result, anyhow};
use api::say;
use api::token;
use clap::Subcommand;
use config::{hash::hex, moment::Moment};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Makes a token; prints it once, with the lines to add to the relay's configuration
    New {
        /// The user's name
        #[arg(default_value = "user")]
        name: String,
        /// When the token expires: a date (midnight UTC) or a time of RFC 3339
        #[arg(long, value_name = "DATE", value_parser = moment)]
        expires: Option<Moment>,
    },
}

fn moment(text: &str) -> Result<Moment, &'static str> {
    Moment::parse(text).ok_or("write a date such as 2027-01-31, or a time such as 2027-01-31T12:00:00Z")
}

pub(crate) fn run(command: &Command, as_json: bool) -> Result<()> {
    let Command::New { name, expires } = command;
    let (token, sha256) =
        token::generate_token().map_err(|_| anyhow!("the system's source of random numbers failed"))?;
    let sha256 = hex(&sha256);
    if as_json {
        let expires = expires.map(|expires| expires.to_string());
        say!("{}", serde_json::json!({ "name": name, "token": token, "sha256": sha256, "expires": expires }));
        return Ok(());
    }
    say!("The token, which is shown only now; keep it where the client finds it (--token-file, token_file):\n");
    say!("{token}\n");
    say!("For the relay's configuration, which needs no secret:\n");
    say!("[[relay.token]]\nname = {}\nsha256 = \"{sha256}\"", serde_json::Value::from(name.as_str()));
    if let Some(expires) = expires {
        say!("expires = \"{expires}\"");
    }
    Ok(())
}
