//! The gateway for models under load, beside plain reverse proxies: each peer in turns, at the same load.
//!
//! ```text
//! core 1: client ── HTTP ──▶ core 0: proxies ── HTTP ──▶ core 1: engine
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`engine`] | writes tokens when they are due |
//! | [`client`] | sends requests, and measures answers |
//! | [`tokens`], [`whole`], [`leave`] | the loads: streams of tokens, whole answers, clients that leave |
//! | [`wire`] | the messages between the two |
//! | [`peer`] | the proxies between them, as processes |
//! | `trial` | one measurement of one peer, and the meters of its processes |
//! | [`rows`] | results and their table |

pub mod client;
pub mod engine;
pub mod leave;
pub mod peer;
pub mod rows;
pub mod tokens;
mod trial;
pub mod whole;
pub mod wire;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use instruments::origin::Origin;

pub use self::trial::Trial;
use self::{leave::Leave, peer::Peer, rows::Rows, tokens::Tokens, whole::Whole};

/// What is measured, and how often.
#[derive(Clone, Debug, clap::Args)]
pub struct Serving {
    /// The peers to measure [default: all except `paced-before`, and except `litellm`, which handles little load].
    #[arg(long, value_delimiter = ',')]
    peers: Vec<Peer>,
    /// Another build of paced, for the peer `paced-before`.
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// The number of measurements of each peer, in turns.
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    /// The seed of the first round; each further round uses the next one.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The file for results, as lines of JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(subcommand)]
    scenario: Scenario,
}

/// The load that clients cause.
#[derive(Clone, Debug, clap::Subcommand)]
enum Scenario {
    /// Open loop: streams of tokens.
    Tokens(Tokens),
    /// Closed loop: whole answers, one after another on lasting connections.
    Whole(Whole),
    /// Clients that leave in the middle of their answers.
    Leave(Leave),
    /// Tokens per second of engine and clients without a peer.
    Ceiling(Tokens),
    /// Measures nothing: prints the table of existing rows.
    Table {
        /// Files of rows, as lines of JSON.
        #[arg(required = true)]
        rows: Vec<PathBuf>,
    },
}

/// Measures all peers in turns, prints the table and writes the rows. A peer whose program is missing is reported and
/// omitted; a peer that fails is reported.
///
/// # Errors
/// When the results cannot be written.
pub async fn run(serving: &Serving) -> Result<()> {
    if let Scenario::Table { rows } = &serving.scenario {
        let lines = rows.iter().map(std::fs::read_to_string).collect::<Result<String, _>>();
        println!("{}", Rows::read(&lines.context("failed to read rows")?)?.table());
        return Ok(());
    }
    let all = [Peer::Direct, Peer::Paced, Peer::PacedCoalescing, Peer::Nginx, Peer::NginxTwice, Peer::NginxTwiceTls];
    let wanted = match &serving.scenario {
        Scenario::Ceiling(_) => &all[..1],
        _ if serving.peers.is_empty() => &all[..],
        _ => &serving.peers,
    };
    let mut peers = Vec::new();
    for peer in wanted {
        match peer.program(serving.before.as_deref()) {
            Ok(_) => peers.push(*peer),
            Err(reason) => println!("comparison with {} SKIPPED: {reason:#}", peer.name()),
        }
    }
    let mut rows = Rows::default();
    for round in 0..serving.rounds {
        for peer in &peers {
            let seed = serving.seed + round;
            eprintln!("round {} of {}: {}", round + 1, serving.rounds, peer.name());
            let trial = Trial { peer: *peer, before: serving.before.as_deref(), seed };
            let (config, measured) = match &serving.scenario {
                Scenario::Tokens(tokens) => (tokens.name(), tokens::run(tokens, trial).await),
                Scenario::Whole(whole) => (whole.name(), whole::run(whole, trial).await),
                Scenario::Leave(leave) => (leave.name(), leave::run(leave, trial).await),
                Scenario::Ceiling(tokens) => {
                    ("engine and clients alone".to_owned(), tokens::ceiling(tokens, trial).await)
                }
                // Nothing to measure.
                Scenario::Table { .. } => continue,
            };
            match measured {
                Ok(samples) => rows.add(&config, peer.name(), seed, &samples),
                Err(error) => println!("FAILED {config}, {}: {error:#}", peer.name()),
            }
        }
        // Each peer begins a round in its turn. Their circle stays, so a peer mostly follows the same one.
        peers.rotate_left(1);
    }
    for (metric, name) in [
        ("first token, median", "added to the first token, median"),
        ("first token, 99 %", "added to the first token, 99 %"),
        ("token, median", "added to a token, median"),
        ("token, 99 %", "added to a token, 99 %"),
        ("jitter between tokens, median", "added jitter, median"),
        ("jitter between tokens, 99 %", "added jitter, 99 %"),
    ] {
        rows.add_difference(Peer::Direct.name(), metric, name);
    }
    println!("\n{}", rows.table());
    if let Some(path) = &serving.json {
        let lines = rows.json_lines(&Origin::of_this_run("wall")?)?;
        std::fs::write(path, lines).with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}
