//! Pipes in place of files: a shell passes one for `<(command)`, so that a key need not be on a disk.

use std::{
    io::{self, ErrorKind, Write as _},
    os::{fd::IntoRawFd as _, unix::fs::FileTypeExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use quic::tls::MOST_CONFIGURED_BYTES;
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::{io::AsyncReadExt as _, net::unix::pipe, time::timeout};

/// How long to wait for the end of what is written to a pipe. The command that writes may ask a person for a passphrase.
const PATIENCE: Duration = Duration::from_secs(120);

/// Returns a file that can be read like a file of the daemon's configuration, and more than once: the given one, or, if that is a pipe, a
/// file in memory with what was written to the pipe. That file is there until this process ends.
///
/// # Errors
/// It is a pipe that nothing was written to, or more than 16 MiB, or whose writer does not finish within two minutes.
pub(crate) async fn file_of(given: &Path) -> Result<PathBuf> {
    // A file that is not there is told with what it is for by its reader.
    if !given.metadata().is_ok_and(|about| about.file_type().is_fifo()) {
        return Ok(given.to_owned());
    }
    let kept = async { keep(&written_to(given).await?) };
    kept.await.with_context(|| format!("failed to read the pipe {}", given.display()))
}

/// Returns what `read` makes of a file, or of what was written to a pipe in its place.
///
/// # Errors
/// As [`file_of`], or those of `read`, which name the pipe that was given.
pub(crate) async fn read<T>(given: &Path, read: fn(&Path) -> Result<T>) -> Result<T> {
    let file = file_of(given).await?;
    if file == given { read(&file) } else { read(&file).with_context(|| format!("the pipe {}", given.display())) }
}

/// Returns a file as [`file_of`] does. Its reader does not know of the pipe, so `read` first tries what was written to it, and errors name
/// the pipe.
///
/// # Errors
/// As [`read`], but a file that is no pipe is not read.
pub(crate) async fn tried_file_of<T>(given: &Path, read: fn(&Path) -> Result<T>) -> Result<PathBuf> {
    let file = file_of(given).await?;
    if file != given {
        read(&file).with_context(|| format!("the pipe {}", given.display()))?;
    }
    Ok(file)
}

/// Reads a pipe to its end.
async fn written_to(given: &Path) -> io::Result<Vec<u8>> {
    let read = async {
        let mut contents = Vec::new();
        let pipe = pipe::OpenOptions::new().open_receiver(given)?;
        pipe.take(MOST_CONFIGURED_BYTES + 1).read_to_end(&mut contents).await?;
        Ok(contents)
    };
    let late = |_| Err(io::Error::new(ErrorKind::TimedOut, "its writer does not finish within two minutes"));
    let contents = timeout(PATIENCE, read).await.unwrap_or_else(late)?;
    match contents.len() as u64 {
        0 => Err(io::Error::new(ErrorKind::UnexpectedEof, "nothing was written to it, or it was read before")),
        1..=MOST_CONFIGURED_BYTES => Ok(contents),
        _ => Err(io::Error::new(ErrorKind::FileTooLarge, "more than 16 MiB were written to it")),
    }
}

/// Puts bytes into a file in memory, which programs that this one starts do not get.
fn keep(contents: &[u8]) -> io::Result<PathBuf> {
    let mut file = std::fs::File::from(memfd_create("pacectl", MemfdFlags::CLOEXEC)?);
    file.write_all(contents)?;
    Ok(format!("/proc/self/fd/{}", file.into_raw_fd()).into())
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsRawFd as _, thread};

    use quic::tls::{read_configured, read_key};

    use super::*;

    /// What is read of a pipe that this is written to.
    async fn read(written: Vec<u8>) -> Result<PathBuf> {
        let (near, far) = io::pipe().unwrap();
        let writing =
            thread::spawn(move || _ = std::fs::File::from(std::os::fd::OwnedFd::from(far)).write_all(&written));
        let read = file_of(Path::new(&format!("/proc/self/fd/{}", near.as_raw_fd()))).await;
        drop(near);
        writing.join().unwrap();
        read
    }

    #[tokio::test]
    async fn what_a_pipe_carried_is_read_like_a_file_also_twice() {
        // More than a pipe holds at once.
        let written = vec![b'k'; 1 << 20];
        let file = read(written.clone()).await.unwrap();
        for _ in 0..2 {
            assert_eq!(read_configured(&file).unwrap(), written);
        }
    }

    #[tokio::test]
    async fn an_empty_pipe_and_one_without_end_are_refused_by_name() {
        for (written, why) in [(Vec::new(), "nothing was written"), (vec![0; (16 << 20) + 1], "16 MiB")] {
            let error = format!("{:#}", read(written).await.unwrap_err());
            assert!(error.contains("the pipe /proc/self/fd/") && error.contains(why), "{error}");
        }
    }

    #[tokio::test]
    async fn what_is_wrong_with_the_contents_of_a_pipe_is_told_with_its_name() {
        for is_read in [true, false] {
            let (near, mut far) = io::pipe().unwrap();
            far.write_all(b"no key").unwrap();
            drop(far);
            let given = PathBuf::from(format!("/proc/self/fd/{}", near.as_raw_fd()));
            let error = match is_read {
                true => super::read(&given, read_key).await.unwrap_err(),
                false => tried_file_of(&given, read_key).await.unwrap_err(),
            };
            assert!(
                format!("{error:#}").starts_with(&format!("the pipe {}: failed to read", given.display())),
                "{error:#}"
            );
        }
        let missing = Path::new("/no/such/file");
        assert_eq!(tried_file_of(missing, read_key).await.unwrap(), missing, "its reader tells of it");
        let error = super::read(missing, read_key).await.unwrap_err();
        assert!(!format!("{error:#}").contains("pipe"), "{error:#}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pipe_whose_writer_does_not_finish_is_not_waited_for_for_ever() {
        let (near, _far) = io::pipe().unwrap();
        let error = file_of(Path::new(&format!("/proc/self/fd/{}", near.as_raw_fd()))).await.unwrap_err();
        assert!(format!("{error:#}").contains("two minutes"), "{error:#}");
    }

    #[tokio::test]
    async fn a_file_stays_as_it_was_given() {
        for file in ["/proc/self/status", "/no/such/file", "/dev/zero"] {
            assert_eq!(file_of(Path::new(file)).await.unwrap(), Path::new(file));
        }
    }
}
