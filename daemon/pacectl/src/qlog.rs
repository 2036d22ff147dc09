//! `pacectl qlog`: the events of one connection, as a file for viewers of qlogs.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use api::{ControlClient, print, say, v1};
use clap::Args;
use serde::Serialize;
use tokio::signal::ctrl_c;

use super::table::show;

#[derive(Args)]
pub(crate) struct Arguments {
    /// The connection's ID, from `pacectl connections`
    connection: u64,
    /// How long to record; stops early when the connection ends, or at Ctrl-C
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    /// The file to write; `-` writes standard output [default: connection-ID.sqlog]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The file written.
#[derive(Serialize)]
struct Written {
    file: PathBuf,
    events: usize,
}

/// Writes the file, which is JSON in any case; `as_json` concerns only the summary.
pub(crate) async fn run(client: &mut ControlClient, arguments: &Arguments, as_json: bool) -> Result<()> {
    let Arguments { connection, seconds, output } = arguments;
    let duration = prost_types::Duration { seconds: (*seconds).cast_signed(), nanos: 0 };
    let request = v1::WatchQlogRequest { connection: *connection, duration: Some(duration) };
    // Before the file is created, so that a refusal leaves no empty file.
    let mut answers = client.watch_qlog(request).await?.into_inner();
    let file = output.clone().unwrap_or_else(|| format!("connection-{connection}.sqlog").into());
    let is_standard = file == Path::new("-");
    let failed = || format!("failed to write {}; name another place with --output", file.display());
    let mut to: Box<dyn Write> = if is_standard {
        Box::new(print::Out)
    } else {
        Box::new(io::BufWriter::new(fs::File::create(&file).with_context(failed)?))
    };
    let mut records = 0;
    loop {
        let answer = tokio::select! {
            answer = answers.message() => answer?,
            _ = ctrl_c() => None,
        };
        let Some(answer) = answer else { break };
        records += answer.records.matches('\u{1e}').count();
        to.write_all(answer.records.as_bytes()).with_context(failed)?;
    }
    to.flush().with_context(failed)?;
    if is_standard {
        return Ok(());
    }
    // The first record is the file's header.
    show(as_json, Written { file, events: records.saturating_sub(1) }, |Written { file, events }| {
        say!("{}: {events} events of connection {connection}", file.display());
    })
}
