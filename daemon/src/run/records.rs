//! Writes the gateways' decisions to files in the state folder. `pacectl route` learns from these files.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use role::seldom::Seldom;
use serving::decisions::{Decisions, Record};
use state::StateFolder;
use tokio::{task::spawn_blocking, time::sleep};

/// The files in the state folder: the newest records, and those before them. Each may take half of the configured
/// bytes.
const FILES: [&str; 2] = ["decisions.jsonl", "decisions.1.jsonl"];

/// How long a record waits for others, to be written together.
const PAUSE: Duration = Duration::from_secs(1);

/// The writer of records.
pub(super) struct Records {
    decisions: Decisions,
    folder: StateFolder,
    newest: PathBuf,
    before: PathBuf,
    /// Held while the files change.
    writing: Mutex<()>,
    not_written: Seldom,
}

impl Records {
    pub(super) fn new(folder: StateFolder, decisions: Decisions) -> Arc<Self> {
        let [newest, before] = FILES.map(|file| folder.file(file));
        Arc::new(Self { decisions, folder, newest, before, writing: Mutex::default(), not_written: Seldom::default() })
    }

    /// Writes records as they arrive, until dropped.
    pub(super) async fn keep(self: Arc<Self>) {
        loop {
            self.decisions.wait().await;
            sleep(PAUSE).await;
            let records = self.clone();
            // The blocking task cannot be cancelled, and panics only with the runtime.
            _ = spawn_blocking(move || records.save()).await;
        }
    }

    /// Writes all records that wait. Counts records that cannot be written as lost.
    pub(super) fn save(&self) {
        let _writing = self.writing.lock();
        let taken = self.decisions.take();
        // The newest record's limit holds for all of them.
        let most_bytes = taken.last().map_or(0, |record| record.most_bytes / FILES.len() as u64);
        let mut rest = taken.as_slice();
        while !rest.is_empty() {
            match self.write(rest, most_bytes) {
                Ok(written) if written > 0 => rest = &rest[written.min(rest.len())..],
                failed => {
                    let lost = if failed.is_err() { rest.len() } else { 1 };
                    self.decisions.lose(lost as u64);
                    let error =
                        failed.err().unwrap_or_else(|| io::Error::other("a record is larger than its file may be"));
                    self.not_written.note(|unsaid| {
                        let file = self.newest.display();
                        tracing::error!(%file, %error, unsaid, "decisions were not recorded");
                    });
                    rest = &rest[lost..];
                }
            }
        }
    }

    /// Makes room in the newest file, and writes as many records as fit; returns how many.
    fn write(&self, records: &[Record], most_bytes: u64) -> io::Result<usize> {
        self.folder.prepare()?;
        for file in [&self.before, &self.newest] {
            // An earlier configuration may have allowed larger files.
            if fs::metadata(file).is_ok_and(|found| found.len() > most_bytes) {
                fs::remove_file(file)?;
            }
        }
        let mut file = open(&self.newest)?;
        let mut bytes = end(&mut file)?;
        let first = records.first().map_or(0, |record| record.line.len() as u64);
        if bytes > 0 && bytes + first > most_bytes {
            fs::rename(&self.newest, &self.before)?;
            (file, bytes) = (open(&self.newest)?, 0);
        }
        let mut text = String::new();
        let fits = |record: &&Record| {
            bytes += record.line.len() as u64;
            bytes <= most_bytes
        };
        let written = records.iter().take_while(fits).inspect(|record| text.push_str(&record.line)).count();
        file.write_all(text.as_bytes())?;
        Ok(written)
    }
}

fn open(file: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(file)
}

/// Returns the length of a file of lines, after ending its last line if a full disk cut it off.
fn end(file: &mut File) -> io::Result<u64> {
    let bytes = file.seek(SeekFrom::End(0))?;
    if bytes == 0 {
        return Ok(0);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    if last != *b"\n" {
        file.write_all(b"\n")?;
        return Ok(bytes + 1);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(name: &str) -> (Arc<Records>, PathBuf) {
        let folder = std::env::temp_dir().join(format!("paced-records-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        (Records::new(StateFolder::unclaimed(&folder), Decisions::default()), folder)
    }

    fn lines(numbers: impl IntoIterator<Item = u32>, most_bytes: u64) -> Vec<Record> {
        numbers.into_iter().map(|number| Record { line: format!("{number:09}\n"), most_bytes }).collect()
    }

    fn write(records: &Records, all: &[Record]) {
        let mut rest = all;
        while let Some(first) = rest.first() {
            rest = &rest[records.write(rest, first.most_bytes / 2).unwrap()..];
        }
    }

    #[test]
    fn the_newest_records_stay_and_no_more_than_may() {
        let (records, folder) = records("rotated");
        let text = |file: &PathBuf| fs::read_to_string(file).unwrap();
        write(&records, &lines(0..27, 100));
        assert_eq!(text(&records.newest), "000000025\n000000026\n");
        assert_eq!(
            text(&records.before).lines().collect::<Vec<_>>(),
            ["000000020", "000000021", "000000022", "000000023", "000000024"]
        );
        // The limit is smaller from here on.
        write(&records, &lines(27..28, 30));
        assert_eq!(text(&records.newest), "000000027\n");
        assert!(!records.before.exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_line_that_was_cut_off_spoils_no_other() {
        let (records, folder) = records("cut");
        fs::write(&records.newest, "000000001\n00000").unwrap();
        write(&records, &lines(2..3, 100));
        assert_eq!(fs::read_to_string(&records.newest).unwrap(), "000000001\n00000\n000000002\n");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn records_that_cannot_be_written_are_counted() {
        let (records, folder) = records("lost");
        let save = |most_bytes: &[u64]| {
            let of = |most_bytes: &u64| lines(0..1, *most_bytes).remove(0);
            most_bytes.iter().map(of).for_each(|record| records.decisions.leave(record));
            records.save();
            records.decisions.lost()
        };
        assert_eq!(save(&[100, 100]), 0);
        assert_eq!(save(&[100, 10]), 2, "they are larger than their file may be");
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(save(&[100, 100]), 2, "the folder is made again");
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&folder, "").unwrap();
        assert_eq!(save(&[100, 100]), 4, "a file has the folder's name");
        fs::remove_file(&folder).unwrap();
    }
}
