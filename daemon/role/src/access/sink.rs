//! The destination of access log records.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::{fs::MetadataExt as _, net::UnixDatagram},
    },
    sync::Arc,
};

use config::log::AccessForm;

use super::record::{AccessRecord, Value};
use crate::journal::{JOURNAL, journal_entry};

/// Standard output, or the journal. A write may block on the reader.
#[derive(Debug, Default)]
pub struct Sink {
    journal: Option<UnixDatagram>,
    /// Whether the current loss of records has been logged.
    is_told: bool,
}

impl Sink {
    /// Writes records in a form; returns how many were lost. A loss is logged once, until a write succeeds.
    pub fn write(&mut self, form: AccessForm, records: &[Arc<AccessRecord>]) -> u64 {
        let (lost, error) = match form {
            AccessForm::Off => return 0,
            AccessForm::Text | AccessForm::Json => print(form, records),
            AccessForm::Journal => self.enter(records),
        };
        if let (Some(error), false) = (&error, self.is_told) {
            tracing::error!("the access log loses records: {error}");
        }
        self.is_told = error.is_some();
        lost
    }

    fn enter(&mut self, records: &[Arc<AccessRecord>]) -> (u64, Option<io::Error>) {
        let (mut lost, mut failed) = (0, None);
        for record in records {
            if let Err(error) = self.journal().and_then(|journal| journal.send(&entry(record))) {
                // The journal may come back with a new socket.
                (self.journal, failed) = (None, Some(error));
                lost += 1;
            }
        }
        (lost, failed)
    }

    fn journal(&mut self) -> io::Result<&UnixDatagram> {
        if self.journal.is_none() {
            let socket = UnixDatagram::unbound()?;
            let failed = |error: io::Error| {
                io::Error::new(
                    error.kind(),
                    format!("{JOURNAL}: {error}; is systemd-journald running? To log elsewhere, set `access` in [log]"),
                )
            };
            socket.connect(JOURNAL).map_err(failed)?;
            self.journal = Some(socket);
        }
        self.journal.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

fn entry(record: &AccessRecord) -> Vec<u8> {
    let fields = record.fields().into_iter().map(|(key, value)| {
        let value = match value {
            Value::Number(number) => number.to_string(),
            Value::Text(text) => text.into_owned(),
        };
        (key, value)
    });
    let fields: Vec<_> = fields.chain([("event".into(), record.event().to_owned())]).collect();
    let fields: Vec<_> = fields.iter().map(|(key, value)| (&**key, &**value)).collect();
    journal_entry(&record.text(), &fields)
}

/// Whether a descriptor is of /dev/null. Rust opens /dev/null as a standard output that was closed before the program started.
fn leads_nowhere(output: BorrowedFd<'_>) -> io::Result<bool> {
    let output = File::from(output.try_clone_to_owned()?).metadata()?;
    Ok(output.rdev() != 0 && output.rdev() == fs::metadata("/dev/null")?.rdev())
}

fn print(form: AccessForm, records: &[Arc<AccessRecord>]) -> (u64, Option<io::Error>) {
    if leads_nowhere(io::stdout().as_fd()).unwrap_or(false) {
        let nowhere = "standard output is closed, or is /dev/null: to log elsewhere, set `access` in [log]";
        return (records.len() as u64, Some(io::Error::other(nowhere)));
    }
    let lines = records.iter().filter_map(|record| match form {
        AccessForm::Json => record.json().ok(),
        _ => Some(record.line()),
    });
    let text: String = lines.flat_map(|line| [line, "\n".into()]).collect();
    let mut output = io::stdout().lock();
    // In one write, so that lines stay whole.
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Ok(()) => (0, None),
        Err(error) => (records.len() as u64, Some(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::record;

    #[test]
    fn records_for_a_closed_standard_output_are_lost() {
        let file = std::env::current_exe().unwrap();
        for (path, expected) in [("/dev/null", true), ("/dev/zero", false), (file.to_str().unwrap(), false)] {
            assert_eq!(leads_nowhere(File::open(path).unwrap().as_fd()).unwrap(), expected, "{path}");
        }
    }

    #[test]
    fn a_journal_entry_has_each_key_as_a_field_and_no_peer_can_add_one() {
        let entry = entry(&record::tests::tunnel("a\nPACED_USER=root", "x"));
        let text = String::from_utf8_lossy(&entry);
        let tunnel = ["PACED_TUNNEL\n\u{2}\0\0\0\0\0\0\0", "17\n"].concat();
        assert!(text.contains(&tunnel), "{text:?}");
        assert!(text.contains("PACED_EVENT\n\u{6}\0\0\0\0\0\0\0tunnel\n"), "{text:?}");
        // The length precedes the value, so that its newline is part of the value.
        assert!(text.contains("PACED_USER\n\u{11}\0\0\0\0\0\0\0a\nPACED_USER=root\n"), "{text:?}");
        assert!(text.contains(r#"user="a\nPACED_USER=root""#), "{text:?}");
    }
}
