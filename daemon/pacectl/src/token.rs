//! `pacectl token`: bearer tokens.

use std::time::SystemTime;

use anyhow::{Result, anyhow};
use api::{say, token};
use clap::Subcommand;
use config::{hash::hex, moment::Moment, text::is_text};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Makes a token; prints it once, with the lines to add to the relay's or the gateway's configuration
    New {
        /// The user's name
        #[arg(default_value = "user", value_parser = user_name)]
        name: String,
        /// When the token expires: a date (midnight UTC) or a time of RFC 3339
        #[arg(long, value_name = "DATE", value_parser = moment)]
        expires: Option<Moment>,
        /// Makes a key for clients of a gateway, which they use as their API key
        #[arg(long)]
        gateway: bool,
    },
}

fn user_name(text: &str) -> Result<String, &'static str> {
    if is_text(text) { Ok(text.to_owned()) } else { Err("a name has 1 to 255 printable ASCII characters") }
}

fn moment(text: &str) -> Result<Moment, &'static str> {
    let moment =
        Moment::parse(text).ok_or("write a date such as 2027-01-31, or a time such as 2027-01-31T12:00:00Z")?;
    match moment.days_left(SystemTime::now()) {
        Some(_) => Ok(moment),
        None => Err("this date is in the past, so no client could use the token; write a date in the future"),
    }
}

pub(crate) fn run(command: &Command, as_json: bool) -> Result<()> {
    let Command::New { name, expires, gateway } = command;
    let (token, sha256) =
        token::generate_token().map_err(|_| anyhow!("the system's source of random numbers failed"))?;
    let sha256 = hex(&sha256);
    if as_json {
        let expires = expires.map(|expires| expires.to_string());
        say!("{}", serde_json::json!({ "name": name, "token": token, "sha256": sha256, "expires": expires }));
        return Ok(());
    }
    let (what, whose, section) = match gateway {
        false => (
            "token (shown only now; store it where the client reads it: --token-file, token_file)",
            "relay",
            "relay.token",
        ),
        true => ("key (shown only now; the client uses it as its API key)", "gateway", "gateway.key"),
    };
    say!("The {what}:\n");
    say!("{token}\n");
    say!("For the {whose}'s configuration, which needs no secret:\n");
    say!("[[{section}]]\nname = {}\nsha256 = \"{sha256}\"", serde_json::Value::from(name.as_str()));
    if let Some(expires) = expires {
        say!("expires = \"{expires}\"");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_made_for_a_name_that_the_configuration_refuses() {
        for (name, is_accepted) in [("alice", true), ("team a", true), ("Zoë", false), ("", false), ("a\nb", false)] {
            let text = format!("name = {}", serde_json::Value::from(name));
            let text = format!("[[relay.token]]\n{text}");
            let refused = config::Config::from_toml(&text).unwrap_err().to_string().contains("relay.token.name");
            assert_eq!((user_name(name).is_ok(), !refused), (is_accepted, is_accepted), "{name:?}");
        }
    }

    #[test]
    fn a_token_is_not_made_for_a_time_that_is_over() {
        assert!(moment("2020-01-31").is_err_and(|error| error.contains("in the past")));
        assert!(moment("9999-01-31").is_ok());
    }
}
