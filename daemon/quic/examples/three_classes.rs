//! An echo of three classes over one connection through a slow link: how long each class waits for its answers, under round
//! robin and under a discipline that knows deadlines.
//!
//! `cargo run --release -p quic --example three_classes`

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use quic::{
    application::{
        ApplicationSettings, ClassSettings, Connection, Connector, Discipline, Level, Listener, Low, Stream,
    },
    tls::{self, Trust},
};
use tokio::task::JoinSet;

mod slow_link;

fn classes() -> Vec<ClassSettings> {
    let (level, deadline) = (Level::High, Some(Duration::from_millis(50)));
    let urgent = ClassSettings { level, deadline, ..ClassSettings::named("urgent") };
    vec![urgent, ClassSettings::named("normal"), ClassSettings::named("bulk")]
}

/// How many messages each class sends, their size in bytes, and the weight of each.
const MESSAGES: [(&str, usize, usize, u16); 3] =
    [("urgent", 20, 1_000, 1), ("normal", 20, 20_000, 10), ("bulk", 4, 200_000, 1)];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    for (name, discipline) in
        [("round robin", Discipline::Rr), ("deadlines first, then by weight", Discipline::Ml { low: Low::Wfq })]
    {
        println!("{name}");
        let settings = ApplicationSettings { discipline, classes: classes(), ..ApplicationSettings::new(b"echo") };
        round(&settings).await?;
    }
    Ok(())
}

/// Sends all messages at once and waits for their echoes.
async fn round(settings: &ApplicationSettings) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("quic-three-classes-{}", std::process::id()));
    let trust = || -> Result<_> {
        let identity = tls::development_identity(&folder)?;
        let fingerprint = tls::fingerprint(identity.chain.first().context("a chain has a certificate")?);
        Ok((identity, Trust::Pinned(fingerprint)))
    };
    let (identity, trust) = trust()?;
    std::fs::remove_dir_all(&folder)?;
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), identity, settings)?;
    let address = slow_link::toward(listener.local_address()?).await?;
    let server = tokio::spawn(serve(listener));
    let mut connection = Connector::new(trust, None, settings)?.connect(address, "localhost").await?;
    let mut exchanges = JoinSet::new();
    // Bulk comes first, so all later messages have to overtake it.
    for (class, messages, bytes, weight) in MESSAGES.into_iter().rev() {
        for _ in 0..messages {
            let mut stream = connection.open(class).await?;
            stream.set_terms(&connection.terms(class).with_weight(weight));
            exchanges.spawn(async move { Ok::<_, anyhow::Error>((class, exchange(stream, class, bytes).await?)) });
        }
    }
    let mut took: Vec<(&str, Duration)> = Vec::new();
    while let Some(exchange) = exchanges.join_next().await {
        took.push(exchange??);
    }
    for (class, ..) in MESSAGES {
        let mut of: Vec<_> = took.iter().filter(|(name, _)| *name == class).map(|(_, took)| *took).collect();
        of.sort_unstable();
        let (median, longest) = (of[of.len() / 2], of[of.len() - 1]);
        println!("  {class:<8} {:>3} answers, median {median:>8.1?}, longest {longest:>8.1?}", of.len());
    }
    connection.close(0);
    server.abort();
    Ok(())
}

/// Sends a message that begins with its class, and waits for the whole echo.
async fn exchange(mut stream: Stream, class: &str, bytes: usize) -> Result<Duration> {
    let begun = Instant::now();
    let mut message = format!("{class}\n").into_bytes();
    message.resize(bytes, b'.');
    stream.send.send(message.into()).await?;
    stream.send.finish();
    let mut echoed = 0;
    while let Some(chunk) = stream.receive.receive().await? {
        echoed += chunk.len();
    }
    anyhow::ensure!(echoed == bytes, "{echoed} of {bytes} bytes came back");
    Ok(begun.elapsed())
}

async fn serve(mut listener: Listener) {
    while let Some(connection) = listener.accept().await {
        tokio::spawn(echo(connection));
    }
}

/// Echoes messages in the classes that they name.
async fn echo(mut connection: Connection) -> Result<()> {
    while let Some(mut stream) = connection.accept().await? {
        let terms = MESSAGES.map(|(class, _, _, weight)| (class, connection.terms(class).with_weight(weight)));
        tokio::spawn(async move {
            let mut is_known = false;
            while let Some(chunk) = stream.receive.receive().await? {
                if !is_known
                    && let Some((_, terms)) = terms.iter().find(|(class, _)| chunk.starts_with(class.as_bytes()))
                {
                    stream.set_terms(terms);
                    is_known = true;
                }
                stream.send.send(chunk).await?;
            }
            stream.send.finish();
            stream.send.delivered().await?;
            Ok::<_, anyhow::Error>(())
        });
    }
    Ok(())
}
