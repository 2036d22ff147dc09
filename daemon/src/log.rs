//! Where logs go: to systemd's journal, with their fields, if the service manager has connected standard error to it;
//! else to standard error. `tracing-journald` sends on a blocking socket, so that a slow journal would stop packets.

use std::{
    fmt::{Debug, Write as _},
    io::{self, IsTerminal as _},
    os::{
        fd::AsFd as _,
        unix::{fs::MetadataExt as _, net::UnixDatagram},
    },
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use config::{Config, log::LogLevel};
use role::{
    journal::{IDENTIFIER, JOURNAL, field, own_field, priority},
    verbosity,
};
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer, Registry,
    filter::{LevelFilter, Targets},
    layer::{Context, SubscriberExt as _},
    reload,
    util::SubscriberInitExt as _,
};

/// Changes the log level while the daemon runs.
pub struct LogControl(Option<reload::Handle<Targets, Registry>>);

impl LogControl {
    /// Logs at `level` from now on, unless RUST_LOG sets the level.
    pub fn set_level(&self, level: LogLevel) {
        if let Some(handle) = &self.0 {
            // Fails only if no subscriber is installed any more.
            _ = handle.reload(filter(level));
        }
    }
}

fn filter(level: LogLevel) -> Targets {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    verbosity::own(level).with_default(LevelFilter::WARN)
}

/// Starts logging at the level of RUST_LOG, or else of the configuration.
pub fn start(config: &Config) -> LogControl {
    let (asked, refused) = match verbosity::asked() {
        Ok(asked) => (asked, None),
        Err(error) => (None, Some(error)),
    };
    let is_fixed = asked.is_some();
    let (filter, handle) = reload::Layer::new(asked.unwrap_or_else(|| filter(config.log.level)));
    let journal = Journal::connected();
    // There is no option for colours: a terminal gets them unless NO_COLOR is set, other outputs do not.
    let has_colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let layer = || tracing_subscriber::fmt::layer().with_ansi(has_colours).with_writer(io::stderr);
    let text = journal.is_none().then(layer);
    // Fails if a program that links this library has installed its own subscriber.
    _ = tracing_subscriber::registry().with(filter).with(journal).with(text).try_init();
    if let Some(error) = refused {
        tracing::warn!("{error}");
    }
    LogControl((!is_fixed).then_some(handle))
}

/// Sends entries to the journal. If the journal has no room for an entry, it is lost and counted: logging never blocks.
#[derive(Debug)]
struct Journal {
    socket: UnixDatagram,
    lost: AtomicU64,
}

impl Journal {
    /// Returns the journal if standard error is connected to it (systemd.exec(5), `JOURNAL_STREAM`).
    fn connected() -> Option<Self> {
        let stream = std::env::var("JOURNAL_STREAM").ok()?;
        let file = std::fs::File::from(io::stderr().as_fd().try_clone_to_owned().ok()?).metadata().ok()?;
        if stream != format!("{}:{}", file.dev(), file.ino()) {
            return None;
        }
        let socket = UnixDatagram::unbound().ok()?;
        socket.connect(JOURNAL).ok()?;
        Self::over(socket).ok()
    }

    fn over(socket: UnixDatagram) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, lost: AtomicU64::new(0) })
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let lost = self.lost.swap(0, Relaxed);
        if lost > 0 {
            fields.add("lost_entries", &lost.to_string());
        }
        let mut entry = fields.entries;
        field(&mut entry, "PRIORITY", priority(*event.metadata().level()));
        field(&mut entry, "SYSLOG_IDENTIFIER", IDENTIFIER);
        field(&mut entry, "TARGET", event.metadata().target());
        // The last field, because only the last one may be cut.
        field(&mut entry, "MESSAGE", &format!("{}{}", fields.message, fields.others));
        if self.socket.send(&entry).is_err() {
            self.lost.fetch_add(lost + 1, Relaxed);
        }
    }
}

/// An event's message, its other fields as text that follows the message, and the same fields in the journal's format.
#[derive(Default)]
struct Fields {
    message: String,
    others: String,
    entries: Vec<u8>,
}

impl Fields {
    fn add(&mut self, name: &str, value: &str) {
        // Writing to a string cannot fail.
        _ = write!(self.others, " {name}={value}");
        own_field(&mut self.entries, name, value);
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            self.add(field.name(), value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use role::journal::ENTRY_BYTES;
    use tracing::Level;

    use super::*;

    /// Runs `log` with the journal as its subscriber.
    fn logged(journal: Journal, log: impl FnOnce()) {
        tracing::subscriber::with_default(tracing_subscriber::registry().with(journal), log);
    }

    fn received(socket: &UnixDatagram) -> HashMap<String, String> {
        let mut entry = vec![0; 2 * ENTRY_BYTES];
        let bytes = socket.recv(&mut entry).unwrap();
        let (mut rest, mut found) = (&entry[..bytes], HashMap::new());
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let name = String::from_utf8(rest[..end].to_vec()).unwrap();
            let length = u64::from_le_bytes(rest[end + 1..end + 9].try_into().unwrap()) as usize;
            let value = String::from_utf8(rest[end + 9..end + 9 + length].to_vec()).unwrap();
            assert_eq!(rest[end + 9 + length], b'\n');
            assert!(found.insert(name, value).is_none());
            rest = &rest[end + 10 + length..];
        }
        found
    }

    #[test]
    fn the_level_is_that_of_our_own_crates_and_others_only_warn() {
        const LEVELS: [Level; 4] = [Level::ERROR, Level::WARN, Level::INFO, Level::TRACE];
        for (level, ours) in [(LogLevel::Error, Level::ERROR), (LogLevel::Trace, Level::TRACE)] {
            let filter = filter(level);
            let admitted = |target| LEVELS.map(|level| filter.would_enable(target, &level));
            assert_eq!(admitted("edge::places"), LEVELS.map(|level| level <= ours));
            assert_eq!(admitted("hyper::proto"), [true, true, false, false]);
        }
    }

    #[test]
    fn an_entry_has_the_message_for_people_and_each_field_for_programs() {
        let (ours, journal) = UnixDatagram::pair().unwrap();
        logged(Journal::over(ours).unwrap(), || {
            tracing::warn!(tunnel = 7, user = "alice\nMESSAGE=forged", address = %"::1", "closed");
        });
        let entry = received(&journal);
        assert_eq!(entry["MESSAGE"], "closed tunnel=7 user=alice\nMESSAGE=forged address=::1");
        let fields = ["PACED_TUNNEL", "PACED_USER", "PACED_ADDRESS", "PRIORITY", "SYSLOG_IDENTIFIER"];
        let expected = ["7", "alice\nMESSAGE=forged", "::1", "4", "paced"];
        assert_eq!(fields.map(|name| entry[name].as_str()), expected);
        assert!(entry["TARGET"].starts_with("paced::log"));
    }

    #[test]
    fn logging_never_blocks_and_the_next_entry_counts_lost_ones() {
        let (ours, journal) = UnixDatagram::pair().unwrap();
        logged(Journal::over(ours).unwrap(), || {
            let long = "é".repeat(ENTRY_BYTES);
            for number in 0..1_000 {
                tracing::info!(number, "{long}");
            }
            let mut kept = 1;
            assert!(received(&journal)["MESSAGE"].len() <= ENTRY_BYTES);
            journal.set_nonblocking(true).unwrap();
            while journal.recv(&mut [0]).is_ok() {
                kept += 1;
            }
            tracing::info!("after");
            journal.set_nonblocking(false).unwrap();
            let entry = received(&journal);
            assert_eq!(entry["PACED_LOST_ENTRIES"], (1_000 - kept).to_string());
            assert!(kept < 1_000 && entry["MESSAGE"].starts_with("after lost_entries="));
        });
    }
}
