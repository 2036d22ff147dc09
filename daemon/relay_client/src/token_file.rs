//! Reads the file of a token for one attempt to connect, whatever keeps the file from being read.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::FileTypeExt as _,
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use tokio::{
    io::AsyncReadExt as _,
    net::unix::pipe,
    sync::{Semaphore, oneshot},
    time::timeout,
};

/// How long an attempt to connect waits for the token in a file.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long it waits for the token in a pipe. The command that writes it may ask a person for a passphrase.
const PIPE_PATIENCE: Duration = Duration::from_secs(120);

/// How many bytes of the file are read.
const MOST_BYTES: u64 = 1 << 20;

/// The right to read the file of a token, which one attempt to connect has at a time. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct ReadingTurn(Arc<Semaphore>);

impl Default for ReadingTurn {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl ReadingTurn {
    /// Returns the text of a file. If it is a pipe, waits for the text: a shell may pass one (`<(command)`).
    ///
    /// # Errors
    /// It cannot be read, or not within ten seconds, a pipe not within two minutes.
    pub(crate) async fn read(&self, path: &Path) -> io::Result<String> {
        if let Some(text) = within(PATIENCE, "check its file system", self.unless_pipe(path)).await? {
            return Ok(text);
        }
        of_pipe(path).await
    }

    /// Returns the text of a file, or `None` if it is a pipe.
    async fn unless_pipe(&self, path: &Path) -> io::Result<Option<String>> {
        let file = path.to_owned();
        let read = move || {
            if fs::metadata(&file)?.file_type().is_fifo() {
                return Ok(None);
            }
            let mut text = String::new();
            File::open(&file)?.take(MOST_BYTES).read_to_string(&mut text)?;
            Ok(Some(text))
        };
        self.aside(read).await
    }

    /// Runs `read` on a thread of its own. Nothing ends a thread that waits for a file system, so it has the turn until `read` returns,
    /// and no second thread waits beside it. The runtime has none of these threads, because it would wait for them at its end.
    async fn aside<T: Send + 'static>(&self, read: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
        // The semaphore is never closed, so there is always a permit.
        let turn = self.0.clone().acquire_owned().await.ok();
        let (sender, outcome) = oneshot::channel();
        thread::Builder::new().name("token".to_owned()).spawn(move || {
            let read = read();
            drop(turn);
            // The attempt may have been given up.
            _ = sender.send(read);
        })?;
        outcome.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }
}

/// Returns what is written to a pipe. No thread waits for it, so an attempt that is given up leaves the token there for the next one.
async fn of_pipe(path: &Path) -> io::Result<String> {
    let read = async {
        let (mut text, pipe) = (String::new(), pipe::OpenOptions::new().open_receiver(path)?);
        pipe.take(MOST_BYTES).read_to_string(&mut text).await?;
        Ok(text)
    };
    within(PIPE_PATIENCE, "check what writes to this pipe", read).await
}

async fn within<T>(time: Duration, remedy: &str, read: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(time, read).await.unwrap_or_else(|_| {
        let why = format!("reading it takes longer than {} s: {remedy}", time.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, why))
    })
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, process::Command, sync::mpsc};

    use tokio::time::{Instant, resume};

    use super::*;
    use crate::access::TokenSource;

    /// Far more than an attempt may take, so that a test without the bound fails.
    const TOO_LONG: Duration = Duration::from_secs(3_600);

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("paced-token-{name}-{}", std::process::id()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_pipe_that_says_nothing_ends_the_attempt_and_the_next_one_gets_its_token() {
        let (pipe, turn, begun) = (file("pipe"), ReadingTurn::default(), Instant::now());
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let error = timeout(TOO_LONG, of_pipe(&pipe)).await.expect("it waits for ever").unwrap_err();
        assert_eq!(error.to_string(), "reading it takes longer than 120 s: check what writes to this pipe");
        assert_eq!(begun.elapsed().as_secs(), 120);
        // The threads of this test take real time.
        resume();
        let end = pipe.clone();
        thread::spawn(move || fs::write(end, "token\n").unwrap());
        assert_eq!(&*TokenSource::File(pipe.clone()).read(&turn).await.unwrap(), "token");
        fs::remove_file(pipe).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_system_that_does_not_answer_holds_one_thread_up_and_every_attempt_ends() {
        let (regular, turn) = (file("regular"), ReadingTurn::default());
        fs::write(&regular, "token").unwrap();
        let (answer, answers) = mpsc::channel();
        let hung = turn.aside(move || answers.recv().map_err(io::Error::other));
        assert!(timeout(TOO_LONG, hung).await.is_err(), "nothing ends it");
        let (token, begun) = (TokenSource::File(regular.clone()), Instant::now());
        for attempt in 1..=3 {
            let error = timeout(TOO_LONG, token.read(&turn)).await.expect("it waits for ever").unwrap_err();
            let why = format!("the token from {}: reading it takes longer than 10 s", regular.display());
            assert!(error.to_string().contains(&why) && !error.is_unanswered(), "{error}");
            assert_eq!(begun.elapsed().as_secs(), attempt * 10, "no second thread reads");
        }
        resume();
        answer.send(()).unwrap();
        assert_eq!(turn.read(&regular).await.unwrap(), "token");
        fs::remove_file(regular).unwrap();
    }
}
