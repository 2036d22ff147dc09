//! A value that is kept across restarts in a file of the state folder.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use parking_lot::Mutex;
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use serde::{Serialize, de::DeserializeOwned};
use state::StateFolder;

use crate::seldom::Seldom;

/// Counts the failed saves of each file.
#[derive(Clone, Debug, Default)]
pub struct SaveFailures(Family<[(&'static str, String); 1], Counter>);

impl SaveFailures {
    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Failed saves of a file in the state folder; each is tried again";
        registry.register("state_save_failures", help, self.0.clone());
    }

    /// Returns the counter of a file, which is shown from now on.
    fn of(&self, file: &Path) -> Counter {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.0.get_or_create_owned(&[("file", name)])
    }
}

/// A value's file, which is replaced as a whole, and the saved value.
#[derive(Debug)]
pub struct StateFile<T> {
    folder: StateFolder,
    file: PathBuf,
    /// A description of the value, for log messages.
    what: &'static str,
    saved: Mutex<Saved<T>>,
    not_saved: Seldom,
    failures: Counter,
}

/// The content of the file.
#[derive(Debug)]
struct Saved<T> {
    value: Option<T>,
    /// Whether the file could not be read, and is still in its place.
    is_damaged: bool,
}

impl<T: Serialize + DeserializeOwned + PartialEq + Clone> StateFile<T> {
    /// Reads the value of the file `name` of a folder; `None` if there is no file. An unreadable file is logged, with `what` it contains,
    /// and also gives `None`; the first save moves it to a file of the same name with `.damaged` behind it. Failed saves will be counted in
    /// `failures`.
    #[must_use]
    pub fn open(folder: &StateFolder, name: &str, what: &'static str, failures: &SaveFailures) -> (Self, Option<T>) {
        let file = folder.file(name);
        let (value, is_damaged): (Option<T>, _) = read(&file).map(|value| (value, false)).unwrap_or_else(|error| {
            let (name, damaged) = (file.display(), damaged(&file));
            let damaged = damaged.display();
            tracing::error!(file = %name, %error, "failed to read {what}: starting without it; the next save keeps it as {damaged}");
            (None, true)
        });
        let kept = Self {
            failures: failures.of(&file),
            folder: folder.clone(),
            file,
            what,
            saved: Mutex::new(Saved { value: value.clone(), is_damaged }),
            not_saved: Seldom::default(),
        };
        (kept, value)
    }

    /// Passes the saved value to `present`, and saves the value that `present` returns, unless it equals the saved one. `None` saves
    /// nothing. A failed save is counted and logged, and retried at the next call. If the folder is gone, it is made again
    /// ([`StateFolder::prepare`]). `present` must not save to the same file, because the saved value is locked while it runs.
    pub fn save(&self, present: impl FnOnce(Option<&T>) -> Option<T>) {
        // Locked before `present` reads the value: otherwise, a thread that has read an older value could save it last.
        let mut saved = self.saved.lock();
        let known = saved.value.as_ref();
        let Some(value) = present(known).filter(|value| known != Some(value)) else { return };
        match self.replace(&value, &mut saved.is_damaged) {
            Ok(()) => saved.value = Some(value),
            Err(error) => {
                self.failures.inc();
                self.not_saved.note(|unsaid| {
                    tracing::error!(file = %self.file.display(), %error, unsaid, "failed to save {}", self.what);
                });
            }
        }
    }

    fn replace(&self, value: &T, is_damaged: &mut bool) -> io::Result<()> {
        self.folder.prepare()?;
        self.keep_damaged(is_damaged)?;
        state::replace(&self.file, &serde_json::to_vec(value)?)
    }

    /// Moves a damaged file aside, in place of an earlier damaged one, so that an operator can still read it.
    fn keep_damaged(&self, is_damaged: &mut bool) -> io::Result<()> {
        if *is_damaged {
            let kept = damaged(&self.file);
            match fs::rename(&self.file, &kept) {
                Ok(()) => tracing::warn!(file = %kept.display(), "this is the damaged file with {}", self.what),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let why = format!("the damaged file cannot be moved to {}: {error}", kept.display());
                    return Err(io::Error::new(error.kind(), why));
                }
            }
            *is_damaged = false;
        }
        Ok(())
    }
}

/// Returns the place of a damaged file.
fn damaged(file: &Path) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(".damaged");
    file.with_file_name(name)
}

/// Checks whether a start could read the value of a file, if there is one.
///
/// # Errors
/// The file cannot be read, or contains something else.
pub fn check<T: DeserializeOwned>(file: &Path) -> io::Result<()> {
    read::<T>(file).map(drop)
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
    use std::{sync::mpsc, thread, time::Duration};

    use super::*;

    const NAME: &str = "number.json";

    #[test]
    fn a_save_that_begins_later_saves_the_later_value() {
        let (folder, name) =
            (StateFolder::unclaimed(&std::env::temp_dir()), format!("paced-kept-{}.json", std::process::id()));
        let file = folder.file(&name);
        let open = || StateFile::<u32>::open(&folder, &name, "a number", &SaveFailures::default());
        let (kept, before) = open();
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
        assert_eq!(open().1, Some(2));
        kept.save(|_| None);
        assert_eq!(fs::read_to_string(&file).unwrap(), "2");
        fs::remove_file(file).unwrap();
    }

    #[test]
    fn a_damaged_file_is_kept_beside_the_next_one() {
        let folder = std::env::temp_dir().join(format!("paced-kept-damaged-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (file, kept) = (folder.join(NAME), folder.join("number.json.damaged"));
        let of = StateFolder::unclaimed(&folder);
        let open = || StateFile::<u32>::open(&of, NAME, "a number", &SaveFailures::default());
        for damaged in ["", "{", "7 and more"] {
            fs::write(&file, damaged).unwrap();
            assert!(check::<u32>(&file).is_err());
            let (number, before) = open();
            assert_eq!(
                (before, fs::read_to_string(&file).unwrap()),
                (None, damaged.to_owned()),
                "nothing is written yet"
            );
            for next in [1, 2] {
                number.save(|_| Some(next));
            }
            assert_eq!(fs::read_to_string(&kept).unwrap(), damaged);
            assert_eq!(open().1, Some(2));
            check::<u32>(&file).unwrap();
        }
        // Anything else in its place, too.
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        open().0.save(|_| Some(3));
        assert_eq!(open().1, None, "a folder does not replace a file");
        fs::remove_file(&kept).unwrap();
        open().0.save(|_| Some(3));
        assert!(open().1 == Some(3) && kept.is_dir());
        fs::write(&file, "{").unwrap();
        let refused = open().0.keep_damaged(&mut true).unwrap_err().to_string();
        assert!(
            refused.contains("number.json.damaged: Is a directory"),
            "the message names what is in the way: {refused}"
        );
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_failed_save_is_counted_and_a_deleted_folder_is_made_again() {
        let folder = std::env::temp_dir().join(format!("paced-kept-folder-{}", std::process::id()));
        let (file, failures) = (folder.join(NAME), SaveFailures::default());
        fs::create_dir_all(&folder).unwrap();
        let (kept, _) = StateFile::<u32>::open(&StateFolder::unclaimed(&folder), NAME, "a number", &failures);
        let failed = failures.of(&file);
        // A folder has the name that the next content of the file is written to.
        fs::create_dir(folder.join("number.json.new")).unwrap();
        kept.save(|_| Some(1));
        assert_eq!(failed.get(), 1);
        fs::remove_dir_all(&folder).unwrap();
        kept.save(|_| Some(1));
        assert_eq!((fs::read_to_string(&file).unwrap(), failed.get()), ("1".to_owned(), 1));
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&folder, "").unwrap();
        kept.save(|_| Some(2));
        assert_eq!(failed.get(), 2, "a file has the folder's name");
        fs::remove_file(folder).unwrap();
    }
}
