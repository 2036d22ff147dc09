//! A value that is kept across restarts in a file of the state folder.

use std::{
    io,
    path::{Path, PathBuf},
};

use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};

use crate::seldom::Seldom;

/// A value's file, which is replaced as a whole, and the saved value.
#[derive(Debug)]
pub struct StateFile<T> {
    file: PathBuf,
    /// A description of the value, for log messages.
    what: &'static str,
    saved: Mutex<Option<T>>,
    not_saved: Seldom,
}

impl<T: Serialize + DeserializeOwned + PartialEq + Clone> StateFile<T> {
    /// Reads the value of a file; `None` if there is no file. An unreadable file is logged, with `what` it contains, and
    /// also gives `None`.
    #[must_use]
    pub fn open(file: PathBuf, what: &'static str) -> (Self, Option<T>) {
        let value: Option<T> = read(&file).unwrap_or_else(|error| {
            tracing::error!(file = %file.display(), %error, "failed to read {what}: starting without it");
            None
        });
        let kept = Self { file, what, saved: Mutex::new(value.clone()), not_saved: Seldom::default() };
        (kept, value)
    }

    /// Passes the saved value to `present`, and saves the value that `present` returns, unless it equals the saved one. `None` saves
    /// nothing. A failed save is logged, and retried at the next call. `present` must not save to the same file, because
    /// the saved value is locked while it runs.
    pub fn save(&self, present: impl FnOnce(Option<&T>) -> Option<T>) {
        // Locked before `present` reads the value: otherwise, a thread that has read an older value could save it last.
        let mut saved = self.saved.lock();
        let Some(value) = present(saved.as_ref()).filter(|value| saved.as_ref() != Some(value)) else { return };
        let text = serde_json::to_vec(&value).map_err(io::Error::from);
        match text.and_then(|text| state::replace(&self.file, &text)) {
            Ok(()) => *saved = Some(value),
            Err(error) => self.not_saved.note(|unsaid| {
                tracing::error!(file = %self.file.display(), %error, unsaid, "failed to save {}", self.what);
            }),
        }
    }
}

fn read<T: DeserializeOwned>(file: &Path) -> io::Result<Option<T>> {
    match state::read(file) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::mpsc, thread, time::Duration};

    use super::*;

    #[test]
    fn a_save_that_begins_later_saves_the_later_value() {
        let file = std::env::temp_dir().join(format!("paced-kept-{}.json", std::process::id()));
        let (kept, before) = StateFile::<u32>::open(file.clone(), "a number");
        assert_eq!(before, None);
        thread::scope(|scope| {
            let (kept, (done, is_done)) = (&kept, mpsc::channel());
            kept.save(|_| {
                scope.spawn(move || {
                    kept.save(|saved| saved.map(|saved| saved + 1));
                    _ = done.send(());
                });
                // The second save waits for the first, so it cannot be done yet.
                assert!(is_done.recv_timeout(Duration::from_millis(50)).is_err());
                Some(1)
            });
        });
        assert_eq!(StateFile::<u32>::open(file.clone(), "a number").1, Some(2));
        kept.save(|_| None);
        assert_eq!(fs::read_to_string(&file).unwrap(), "2");
        fs::remove_file(file).unwrap();
    }
}
