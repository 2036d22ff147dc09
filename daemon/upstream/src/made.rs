//! A connection that knows when it was made.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::time::Instant;

/// When a connection was made, among what hyper tells of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MadeAt(pub(super) Instant);

/// A connection, and when it was made.
#[derive(Debug)]
pub(super) struct MadeStream<S> {
    stream: S,
    made: MadeAt,
}

impl<S> MadeStream<S> {
    /// Takes over a connection that was made just now.
    pub(super) fn new(stream: S) -> Self {
        Self { stream, made: MadeAt(Instant::now()) }
    }
}

impl MadeAt {
    /// Returns when the connection was made.
    pub(super) fn of(connected: &Connected) -> Option<Self> {
        let mut extras = hyper::http::Extensions::new();
        connected.get_extras(&mut extras);
        extras.get().copied()
    }
}

impl<S: Connection> Connection for MadeStream<S> {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.made)
    }
}

impl<S: Read + Unpin> Read for MadeStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: Write + Unpin> Write for MadeStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A connection whose other properties are those of every other.
    struct Plain;

    impl Connection for Plain {
        fn connected(&self) -> Connected {
            Connected::new().extra("plain")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_keeps_its_time_whatever_is_made_later() {
        let began = Instant::now();
        let mut streams = Vec::new();
        for _ in 0..10_000 {
            streams.push(MadeStream::new(Plain));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        for (ms, stream) in (0..).zip(&streams) {
            let connected = stream.connected();
            assert_eq!(MadeAt::of(&connected).unwrap().0 - began, Duration::from_millis(ms));
            let mut extras = hyper::http::Extensions::new();
            connected.get_extras(&mut extras);
            assert_eq!(extras.get(), Some(&"plain"), "what it told before");
        }
        assert!(MadeAt::of(&Plain.connected()).is_none());
    }
}
