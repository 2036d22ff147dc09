//! A file server whose urgent answers overtake: while a large file is being sent through a slow link, a client requests
//! small ones over the same connection, first under a discipline that knows no urgency, then under one that does.
//!
//! `cargo run --release -p quic --example file_server`

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use quic::{
    application::{ApplicationSettings, ClassSettings, Connection, Connector, Discipline, Listener, Stream},
    tls::{self, Trust},
};
use tokio::{sync::watch, task::JoinSet, time::sleep};

mod slow_link;

/// The server's files: name, size in bytes, and the class in which each is answered.
const FILES: [(&str, usize, &str); 2] = [("film", 3_000_000, "bulk"), ("page", 8_000, "urgent")];

/// How long a page may take, from its first byte on.
const DEADLINE: Duration = Duration::from_millis(100);

/// How many answers with a deadline met it.
#[derive(Clone, Copy, Default)]
struct Tally {
    in_time: u32,
    late: u32,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("quic-file-server-{}", std::process::id()));
    for (name, discipline) in [("first come, first served", Discipline::Fcfs), ("by priority", Discipline::Abs)] {
        let bulk = ClassSettings { priority: 1, ..ClassSettings::named("bulk") };
        let urgent = ClassSettings { priority: 200, ..ClassSettings::named("urgent") };
        let settings = ApplicationSettings { classes: vec![bulk, urgent], ..ApplicationSettings::new(b"files") };
        let identity = tls::development_identity(&folder)?;
        let trust = Trust::Pinned(tls::fingerprint(identity.chain.first().context("a chain has a certificate")?));
        let mut listener = Listener::bind(([127, 0, 0, 1], 0).into(), identity, &settings)?;
        let address = slow_link::toward(listener.local_address()?).await?;
        let (tally, told) = watch::channel(Tally::default());
        let server = tokio::spawn(async move {
            while let Some(connection) = listener.accept().await {
                // The discipline is the connection's own.
                connection.set_discipline(discipline);
                tokio::spawn(serve(connection, tally.clone()));
            }
        });
        let mut connection = Connector::new(trust, None, &settings)?.connect(address, "localhost").await?;
        let film = tokio::spawn(get(connection.open("default").await?, "film"));
        let mut asked = JoinSet::new();
        for _ in 0..20 {
            sleep(Duration::from_millis(40)).await;
            asked.spawn(get(connection.open("default").await?, "page"));
        }
        let mut pages = asked.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
        let film = film.await??;
        pages.sort_unstable();
        let Tally { in_time, late } = *told.borrow();
        println!("{name}");
        println!("  pages: median {:.1?}, longest {:.1?}; {in_time} in time, {late} late", pages[10], pages[19]);
        println!("  film:  {film:.1?}");
        connection.close(0);
        server.abort();
    }
    Ok(std::fs::remove_dir_all(&folder)?)
}

/// Requests a file; returns how long it took to arrive.
async fn get(mut stream: Stream, name: &'static str) -> Result<Duration> {
    let begun = Instant::now();
    stream.send.send(Bytes::from_static(name.as_bytes())).await?;
    stream.send.finish();
    let mut bytes = 0;
    while let Some(chunk) = stream.receive.receive().await? {
        bytes += chunk.len();
    }
    ensure!(FILES.contains(&(name, bytes, if name == "film" { "bulk" } else { "urgent" })), "{name} has {bytes} bytes");
    Ok(begun.elapsed())
}

async fn serve(mut connection: Connection, tally: watch::Sender<Tally>) -> Result<()> {
    while let Some(mut stream) = connection.accept().await? {
        let [film, page] = FILES.map(|(_, _, class)| connection.terms(class));
        // A deadline of these streams alone, whatever their class says.
        let terms = [film, page.with_deadline(DEADLINE)];
        let tally = tally.clone();
        tokio::spawn(async move {
            let mut asked = Vec::new();
            while let Some(chunk) = stream.receive.receive().await? {
                asked.extend_from_slice(&chunk);
                ensure!(asked.len() < 256, "names are short");
            }
            let place = FILES.iter().position(|(name, ..)| name.as_bytes() == asked).context("no such file")?;
            stream.set_terms(&terms[place]);
            for chunk in vec![b'.'; FILES[place].1].chunks(16 << 10) {
                stream.send.send(Bytes::copy_from_slice(chunk)).await?;
            }
            stream.send.finish();
            let delivery = stream.send.delivered().await?;
            if delivery.deadline.is_some() {
                tally.send_modify(|tally| match delivery.is_in_time() {
                    true => tally.in_time += 1,
                    false => tally.late += 1,
                });
            }
            Ok(())
        });
    }
    Ok(())
}
