//! The folder of state of a daemon that runs: no other daemon uses it, and it is there.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;

/// The mode of a folder that was not there: for its owner only.
const MODE: u32 = 0o700;

/// The file in a folder of state whose lock is the claim to the folder. Every user who may read the folder could lock the folder
/// itself.
const LOCK: &str = ".lock";

/// A folder of state, and the claim of this process to it until the last clone is dropped or the process ends. Programs that this process
/// starts do not inherit the claim.
#[derive(Clone, Debug)]
pub struct StateFolder(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    /// The mode with which it is made again.
    mode: u32,
    claim: Mutex<Claim>,
}

/// Whether this process has the claim to a folder.
#[derive(Debug)]
enum Claim {
    /// It has none, and needs none.
    None,
    /// It has the lock (flock(2)) of this file.
    Held(File),
    /// The folder or its lock file was gone, and must be claimed before anything is written.
    Lost,
}

impl StateFolder {
    /// Makes a folder if there is none, and claims it. Where it cannot be made or locked, paced runs without; the log says so.
    ///
    /// # Errors
    /// Another process, most likely another paced, uses the folder: each would overwrite what the other saves.
    pub fn open(path: &Path) -> io::Result<Self> {
        let folder = path.display();
        if let Err(error) = fs::create_dir_all(path) {
            tracing::warn!(
                %folder,
                %error,
                "failed to create the state folder: no policy can be saved, and a restart loses what paced has learned"
            );
            return Ok(Self::unclaimed(path));
        }
        Self::claim(path).or_else(|failure| match failure {
            TryLockError::WouldBlock => Err(taken(path)),
            TryLockError::Error(error) => {
                tracing::warn!(%folder, %error, "failed to lock the state folder: make sure that no other paced uses it");
                Ok(Self::unclaimed(path))
            }
        })
    }

    /// Takes a folder without a claim to it, for example because its file system has no locks.
    #[must_use]
    pub fn unclaimed(path: &Path) -> Self {
        Self::new(path, Claim::None)
    }

    /// Claims a folder without waiting. Its lock file, which only the user of the first claim may open, stays in it.
    ///
    /// # Errors
    /// [`TryLockError::WouldBlock`] if another process has claimed the folder. Otherwise this user may not write the lock file, or
    /// the file system has no locks.
    fn claim(path: &Path) -> Result<Self, TryLockError> {
        Ok(Self::new(path, Claim::Held(lock(path)?)))
    }

    fn new(path: &Path, claim: Claim) -> Self {
        let mode = fs::metadata(path).map_or(MODE, |about| about.mode() & 0o7777);
        Self(Arc::new(Shared { path: path.to_owned(), mode, claim: Mutex::new(claim) }))
    }

    /// Returns the path of a file in the folder.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path.join(name)
    }

    /// Makes the folder again if it is gone, with the mode that it had, and claims it again if its lock file is gone or is another one. To
    /// be called before each change of a file in it.
    ///
    /// # Errors
    /// The folder cannot be made, or another process has claimed it in the meantime: each would overwrite what the other saves.
    pub fn prepare(&self) -> io::Result<()> {
        let Shared { path, mode, claim } = &*self.0;
        let mut claim = claim.lock();
        let is_gone = is_missing(path);
        let stands = match &*claim {
            Claim::None => true,
            Claim::Held(file) => is_lock_of(file, path),
            Claim::Lost => false,
        };
        if stands && !is_gone {
            return Ok(());
        }
        // Also drops a lock that means nothing any more.
        *claim = Claim::Lost;
        let folder = path.display();
        if is_gone {
            DirBuilder::new().recursive(true).mode(*mode).create(path)?;
            tracing::warn!(
                %folder,
                "the state folder was gone, and paced has made it again: restart paced, which then writes its secret there"
            );
        }
        *claim = match lock(path) {
            Ok(file) => Claim::Held(file),
            Err(TryLockError::WouldBlock) => return Err(taken(path)),
            Err(TryLockError::Error(error)) => {
                tracing::warn!(%folder, %error, "failed to lock the state folder again: make sure that no other paced uses it");
                Claim::None
            }
        };
        Ok(())
    }
}

/// The refusal to use a folder that another process has claimed.
fn taken(folder: &Path) -> io::Error {
    let why = format!(
        "another process, most likely another paced, uses the state folder {}, and each would overwrite what the other saves there: stop it, \
         or give this one its own `state_dir` (in development mode, `--state-dir`)",
        folder.display()
    );
    io::Error::new(io::ErrorKind::ResourceBusy, why)
}

/// Locks a folder by its lock file, which is made if it is not there.
fn lock(folder: &Path) -> Result<File, TryLockError> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(folder.join(LOCK));
    let file = file.map_err(TryLockError::Error)?;
    file.try_lock()?;
    Ok(file)
}

/// Whether a file is the lock file of a folder; true if the system does not say.
fn is_lock_of(file: &File, folder: &Path) -> bool {
    match (fs::metadata(folder.join(LOCK)), file.metadata()) {
        (Ok(there), Ok(held)) => (there.dev(), there.ino()) == (held.dev(), held.ino()),
        (Err(error), _) => error.kind() != io::ErrorKind::NotFound,
        (Ok(_), Err(_)) => true,
    }
}

fn is_missing(folder: &Path) -> bool {
    fs::metadata(folder).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use std::{env, os::unix::fs::PermissionsExt as _};

    use super::*;
    use crate::replace;

    fn folder(name: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("paced-state-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn is_claimed_by_another(folder: &Path) -> bool {
        matches!(StateFolder::claim(folder), Err(TryLockError::WouldBlock))
    }

    #[test]
    fn a_folder_has_one_claim_at_a_time_even_while_files_are_written_in_it() {
        let folder = folder("claimed");
        // Every user may do this.
        let other = File::open(&folder).unwrap();
        other.try_lock().unwrap();
        let claim = StateFolder::claim(&folder).unwrap();
        assert_eq!(fs::metadata(folder.join(LOCK)).unwrap().permissions().mode() & 0o777, 0o600);
        // Opens the folder, and closes it again.
        replace(&folder.join("saved.toml"), b"one").unwrap();
        claim.prepare().unwrap();
        let error = StateFolder::open(&folder).unwrap_err().to_string();
        assert!(error.contains(folder.to_str().unwrap()) && error.contains("its own `state_dir`"), "{error}");
        drop(claim);
        StateFolder::claim(&folder).unwrap();
        let missing = folder.join("missing");
        assert!(matches!(StateFolder::claim(&missing), Err(TryLockError::Error(_))));
        let made = StateFolder::open(&missing).unwrap();
        assert!(is_claimed_by_another(&missing));
        drop(made);
        StateFolder::open(&folder.join(LOCK)).unwrap();
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_deleted_folder_is_made_and_claimed_again_with_its_mode() {
        let folder = folder("deleted");
        // What the umask leaves of the mode of a folder for a group.
        let like = folder.with_extension("like");
        DirBuilder::new().mode(0o750).create(&like).unwrap();
        let mode = fs::metadata(&like).unwrap().permissions();
        fs::remove_dir(like).unwrap();
        fs::set_permissions(&folder, mode.clone()).unwrap();
        for claimed in [StateFolder::unclaimed(&folder), StateFolder::claim(&folder).unwrap()] {
            fs::remove_dir_all(&folder).unwrap();
            claimed.prepare().unwrap();
            assert_eq!(fs::metadata(&folder).unwrap().mode(), mode.mode());
            assert!(is_claimed_by_another(&folder));
            fs::remove_file(folder.join(LOCK)).unwrap();
            claimed.prepare().unwrap();
            assert!(is_claimed_by_another(&folder), "a new lock file is locked, too");
        }
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&folder, "").unwrap();
        let unclaimed = StateFolder::unclaimed(&folder);
        fs::remove_file(&folder).unwrap();
        unclaimed.prepare().unwrap();
        assert!(folder.is_dir());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_another_process_has_claimed_anew_is_not_written_until_that_one_ends() {
        let folder = folder("taken");
        let first = StateFolder::claim(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        let second = StateFolder::claim(&folder).unwrap();
        for _ in 0..2 {
            let refused = first.prepare().unwrap_err().to_string();
            assert!(refused.contains("another process") && refused.contains("its own `state_dir`"), "{refused}");
        }
        second.prepare().unwrap();
        drop(second);
        first.prepare().unwrap();
        assert!(is_claimed_by_another(&folder));
        fs::remove_dir_all(folder).unwrap();
    }
}
