//! Files of state that is kept between runs.

use std::{
    env,
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

pub use self::folder::StateFolder;

mod folder;

/// Returns the state folder of development mode: `paced` in the user's state folder (XDG Base Directory), or for a user
/// without a home directory a folder in `/var/lib` that no service uses.
#[must_use]
pub fn development_dir() -> PathBuf {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    folder(absolute("XDG_STATE_HOME"), absolute("HOME"))
}

fn folder(state_home: Option<PathBuf>, home: Option<PathBuf>) -> PathBuf {
    let state = state_home.or_else(|| home.map(|home| home.join(".local/state")));
    state.map_or_else(|| PathBuf::from("/var/lib/paced-development"), |state| state.join("paced"))
}

/// Returns the commands by which a user tries a relay in development mode that has this state folder, certificate (SHA-256, in
/// hexadecimal digits) and control socket. `pacectl` finds these by itself only in the folder of [`development_dir`].
#[must_use]
pub fn first_commands(pacectl: &Path, state_dir: &Path, certificate: &str, socket: &str) -> String {
    commands(pacectl, state_dir == development_dir(), certificate, socket)
}

fn commands(pacectl: &Path, is_usual: bool, certificate: &str, socket: &str) -> String {
    let pacectl = word(pacectl);
    if is_usual {
        return format!("{pacectl} probe");
    }
    // The other terminal may be in another folder.
    let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.into());
    format!("{pacectl} probe --pin {certificate}\n{pacectl} status --socket {}", word(&socket))
}

/// Returns a path as one word of a shell.
fn word(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = path.chars().all(|character| character.is_alphanumeric() || "/._-+:@".contains(character));
    if is_plain { path } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

/// Replaces the content of a file, by [`Staged::write`] and [`Staged::replace`].
///
/// # Errors
/// See these functions.
pub fn replace(file: &Path, bytes: &[u8]) -> io::Result<()> {
    Staged::write(file, bytes)?.replace()
}

/// Replaces the content of a file like [`replace`], but with the permissions in `mode` that this process's umask leaves.
///
/// # Errors
/// As [`replace`].
pub fn replace_with_mode(file: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    Staged::with_mode(file, bytes, mode)?.replace()
}

/// The maximum size of a file of state that is read, in bytes. The longest ones hold an amount for each user in each of several months.
const MOST_BYTES: u64 = 64 << 20;

/// Reads a file of state.
///
/// # Errors
/// There is no such file, it cannot be read, it is not a regular file, or it has more than 64 MiB.
pub fn read(file: &Path) -> io::Result<Vec<u8>> {
    Ok(read_regular(file, MOST_BYTES)?.0)
}

/// Reads a file that only this user should read, as [`read`] does, and logs a warning if every user of this machine can.
///
/// # Errors
/// As [`read`].
pub fn read_private(file: &Path) -> io::Result<Vec<u8>> {
    let (contents, about) = read_regular(file, MOST_BYTES)?;
    if is_public(&about) {
        let file = file.display();
        tracing::warn!(%file, "every user of this machine can read {file}: chmod o-r, or delete it, and paced makes a new one");
    }
    Ok(contents)
}

/// Reads a regular file of at most `most_bytes` bytes, without waiting for another process. Also returns what the system says about it.
///
/// # Errors
/// There is no such file, it cannot be read, it is not a regular file, or it is larger.
pub fn read_regular(file: &Path, most_bytes: u64) -> io::Result<(Vec<u8>, Metadata)> {
    // Otherwise, opening a FIFO waits until another process writes to it.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(file)?;
    let about = file.metadata()?;
    let kind = about.file_type();
    if !kind.is_file() {
        let what = match (kind.is_dir(), kind.is_fifo()) {
            (true, _) => "a folder",
            (_, true) => "a FIFO",
            _ => "a device",
        };
        return Err(io::Error::other(format!("it is {what}: put a regular file in its place")));
    }
    let mut contents = Vec::new();
    // Its size says too little: it may grow, and files in /proc have none.
    file.take(most_bytes.saturating_add(1)).read_to_end(&mut contents)?;
    if contents.len() as u64 > most_bytes {
        let why = format!("it has more than {} MiB", most_bytes >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok((contents, about))
}

/// Whether every user of this machine can read a file, as far as its mode tells.
#[must_use]
pub fn is_public(about: &Metadata) -> bool {
    about.mode() & 0o004 != 0
}

/// Removes a file, and waits until the disk knows it.
///
/// # Errors
/// There is no such file, or the folder does not permit it. If only the wait fails, the file is gone, and a warning is logged.
pub fn remove(file: &Path) -> io::Result<()> {
    let folder = File::open(folder_of(file))?;
    fs::remove_file(file)?;
    folder.sync_all().unwrap_or_else(|error| {
        tracing::warn!(file = %file.display(), %error, "removed, but a crash of this machine may bring it back");
    });
    Ok(())
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

/// The next content of a file, on disk beside it. Removed on drop unless it was put in place.
#[derive(Debug)]
pub struct Staged<'a> {
    file: &'a Path,
    staged: PathBuf,
    /// Opened in advance: once the file is in place, there is no way back.
    folder: File,
}

impl<'a> Staged<'a> {
    /// Writes the next content of `file`, readable only by this user, and waits until it is on disk.
    ///
    /// # Errors
    /// The folder does not permit it, or the disk is full. The file stays as it is.
    pub fn write(file: &'a Path, bytes: &[u8]) -> io::Result<Self> {
        Self::with_mode(file, bytes, 0o600)
    }

    fn with_mode(file: &'a Path, bytes: &[u8], mode: u32) -> io::Result<Self> {
        let mut name = file.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        name.push(".new");
        let staged = Self { file, staged: file.with_file_name(name), folder: File::open(folder_of(file))? };
        // Left by a process that was killed before it finished.
        _ = fs::remove_file(&staged.staged);
        let mut new = OpenOptions::new().write(true).create_new(true).mode(mode).open(&staged.staged)?;
        new.write_all(bytes)?;
        new.sync_all()?;
        Ok(staged)
    }

    /// Puts it in place. A process that reads in the meantime, or after a crash, finds either all of the old content or
    /// all of the new.
    ///
    /// # Errors
    /// The folder does not permit it. The file stays as it is.
    pub fn replace(self) -> io::Result<()> {
        fs::rename(&self.staged, self.file)?;
        // The folder holds the new name, so it is synced too. A failure is no error: every reader finds the new content.
        self.folder.sync_all().unwrap_or_else(|error| {
            tracing::warn!(file = %self.file.display(), %error, "saved, but a crash of this machine may bring back the previous content");
        });
        Ok(())
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        // If it was put in place, it is no longer there.
        _ = fs::remove_file(&self.staged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn development_never_shares_the_folder_of_the_service() {
        let paths = |state: Option<&str>, home: Option<&str>| folder(state.map(Into::into), home.map(Into::into));
        assert_eq!(paths(Some("/s"), Some("/h")), PathBuf::from("/s/paced"));
        assert_eq!(paths(None, Some("/home/ada")), PathBuf::from("/home/ada/.local/state/paced"));
        let service = config::Config::from_toml("").unwrap().state_dir;
        assert!(!paths(None, None).starts_with(&service) && !service.starts_with(paths(None, None)));
    }

    #[test]
    fn the_commands_to_try_name_what_pacectl_does_not_find_in_another_state_folder() {
        let of = |folder: &Path| first_commands(Path::new("/bin/pacectl"), folder, "0f0f", "/tmp/s/control.sock");
        assert_eq!(of(&development_dir()), "/bin/pacectl probe");
        assert_eq!(
            of(Path::new("/tmp/s")),
            "/bin/pacectl probe --pin 0f0f\n/bin/pacectl status --socket /tmp/s/control.sock"
        );
        assert_eq!(
            commands(Path::new("/my bin/it's"), true, "", ""),
            r"'/my bin/it'\''s' probe",
            "a shell reads one word"
        );
        let here = env::current_dir().unwrap().join("s/control.sock");
        let relative = first_commands(Path::new("pacectl"), Path::new("s"), "0f0f", "s/control.sock");
        assert!(relative.ends_with(&format!("--socket {}", here.display())), "{relative}");
    }

    #[test]
    fn only_a_regular_file_is_read_and_one_for_every_user_is_known() {
        use std::os::unix::fs::PermissionsExt as _;

        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let folder = env::temp_dir().join(format!("paced-state-private-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("kept");
        assert_eq!(read_private(&file).unwrap_err().kind(), io::ErrorKind::NotFound);
        replace(&file, b"one").unwrap();
        for (mode, is_for_all) in [(0o600, false), (0o640, false), (0o644, true)] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_public(&fs::metadata(&file).unwrap()), is_for_all, "{mode:o}");
            assert_eq!(read_private(&file).unwrap(), b"one");
        }
        mknodat(CWD, folder.join("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for (other, what) in [(folder.join("pipe"), "FIFO"), (folder.clone(), "folder"), ("/dev/zero".into(), "device")]
        {
            let (tell, told) = std::sync::mpsc::channel();
            std::thread::spawn(move || tell.send(read_private(&other)));
            let read = told.recv_timeout(std::time::Duration::from_secs(10)).expect("an answer without a writer");
            assert_eq!(read.unwrap_err().to_string(), format!("it is a {what}: put a regular file in its place"));
        }
        // A hole, which takes no space.
        File::create(&file).unwrap().set_len(MOST_BYTES + 1).unwrap();
        assert_eq!(read(&file).unwrap_err().to_string(), "it has more than 64 MiB");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_is_not_replaced_for_its_folder_keeps_its_content() {
        use std::os::unix::fs::PermissionsExt as _;

        use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
        let folder = env::temp_dir().join(format!("paced-state-unreadable-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("saved.toml");
        replace(&file, b"one").unwrap();
        // Names can be changed in it, but it cannot be opened, and so not be synced.
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o300)).unwrap();
        let replaced = std::thread::scope(|scope| {
            let without_rights = || {
                let none = CapabilitySet::empty();
                set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none }).unwrap();
                replace(&file, b"two")
            };
            scope.spawn(without_rights).join().unwrap()
        });
        assert_eq!(replaced.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(fs::read(&file).unwrap(), b"one");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_for_its_owner_only_or_not_at_all() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = env::temp_dir().join(format!("paced-state-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("saved.toml");
        let names = || fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
        replace(&file, b"one").unwrap();
        // Left by a process that was killed.
        fs::write(folder.join("saved.toml.new"), "part").unwrap();
        let staged = Staged::write(&file, b"two").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"one", "not before it is put in place");
        drop(staged);
        assert_eq!((fs::read(&file).unwrap(), names()), (b"one".to_vec(), vec!["saved.toml".into()]));
        replace(&file, b"two").unwrap();
        assert_eq!((fs::read(&file).unwrap(), names()), (b"two".to_vec(), vec!["saved.toml".into()]));
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        // No umask takes the owner's rights, so the mode shows however this test was started.
        replace_with_mode(&file, b"three", 0o700).unwrap();
        assert_eq!((fs::read(&file).unwrap(), names()), (b"three".to_vec(), vec!["saved.toml".into()]));
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(replace(&folder.join("missing/file"), b"").is_err());
        remove(&file).unwrap();
        assert!(names().is_empty());
        assert_eq!(remove(&file).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::remove_dir_all(folder).unwrap();
    }
}
