//! A value that is kept across restarts in a file of the state folder.

use std::{
    fs, io,
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

    /// Saves a value unless the file already contains it. A failed save is logged, and retried at the next call.
    pub fn save(&self, value: T) {
        let mut saved = self.saved.lock();
        if saved.as_ref() == Some(&value) {
            return;
        }
        let text = serde_json::to_vec(&value).map_err(io::Error::from);
        match text.and_then(|text| state::replace(&self.file, &text)) {
            Ok(()) => *saved = Some(value),
            Err(error) => self.not_saved.note(|unsaid| {
                tracing::error!(file = %self.file.display(), %error, unsaid, "failed to save {}", self.what);
            }),
        }
    }

    /// Whether the file has no value yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.saved.lock().is_none()
    }
}

fn read<T: DeserializeOwned>(file: &Path) -> io::Result<Option<T>> {
    match fs::read(file) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
