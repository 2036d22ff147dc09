//! TCP connections as they come, from a listener that outlives whatever goes wrong.

use std::{io, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};

/// How long nothing is accepted after the system refused to: out of descriptors or memory, it may have some again.
const PAUSE: Duration = Duration::from_millis(200);

/// How often the same trouble is told.
const TOLD: Duration = Duration::from_secs(60);

/// A listener whose connections are accepted one by one, for ever.
#[derive(Debug)]
pub struct Accepting {
    listener: TcpListener,
    told: Option<Instant>,
}

impl Accepting {
    /// Accepts from a listener.
    #[must_use]
    pub const fn new(listener: TcpListener) -> Self {
        Self { listener, told: None }
    }

    /// The listener.
    #[must_use]
    pub const fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Returns the next connection and where it comes from. Out of descriptors, it waits and tries again; that is logged
    /// once a minute at most. May be dropped and called again: no connection is lost.
    pub async fn next(&mut self) -> (TcpStream, std::net::SocketAddr) {
        loop {
            let error = match self.listener.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => error,
            };
            if is_of_one(&error) {
                continue;
            }
            let now = Instant::now();
            if self.told.is_none_or(|told| now.duration_since(told) >= TOLD) {
                self.told = Some(now);
                let at = self.listener.local_addr().map(|address| address.to_string()).unwrap_or_default();
                tracing::warn!("no connection is accepted on {at} for the moment: {error}");
            }
            sleep(PAUSE).await;
        }
    }
}

/// Whether an error is about one connection, which is gone already, and says nothing about the next (accept(2)).
fn is_of_one(error: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(
        error.kind(),
        K::ConnectionAborted
            | K::ConnectionReset
            | K::Interrupted
            | K::NetworkDown
            | K::NetworkUnreachable
            | K::HostUnreachable
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_concerns_one_connection_is_no_reason_to_pause() {
        for (code, is_of_one_connection) in [
            (libc::ECONNABORTED, true),
            (libc::EINTR, true),
            (libc::EMFILE, false),
            (libc::ENFILE, false),
            (libc::ENOMEM, false),
        ] {
            assert_eq!(is_of_one(&io::Error::from_raw_os_error(code)), is_of_one_connection, "{code}");
        }
    }
}
