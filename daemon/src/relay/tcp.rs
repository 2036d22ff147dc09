//! The pump of one TCP tunnel (classic CONNECT, RFC 9114 §4.4): bytes in DATA frames to the target and back.
//!
//! Each direction ends by itself: a FIN of the target finishes the request stream, and the reverse. A reset of the
//! target resets the stream with H3_CONNECT_ERROR.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use masque::h3::{self, Code, Part};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead as _, AsyncWrite as _, ReadBuf},
    net::TcpStream,
    time::timeout,
};

use super::{gate::Gate, request::mark, tunnels::Traffic};
use crate::{
    metrics::Metrics,
    quic::h3::{Error, Request},
};

/// How much is read from the target at once: one DATA frame.
const CHUNK_BYTES: usize = 16 * 1024;

/// Why a TCP tunnel failed.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    /// The client's side failed.
    #[error(transparent)]
    Client(#[from] Error),
    /// The target's side failed.
    #[error("connection to the target failed: {0}")]
    Target(#[from] io::Error),
}

/// A TCP tunnel and its target.
pub struct TcpPump {
    request: Request,
    target: TcpStream,
    gate: Gate,
    /// Read from the client, not yet written to the target.
    up: Bytes,
    client_finished: bool,
    target_finished: bool,
    traffic: Arc<Traffic>,
}

impl TcpPump {
    /// Joins an accepted request to the connection to its target, through the gate of its class; what is moved is noted in
    /// `traffic`.
    #[must_use]
    pub fn new(mut request: Request, target: TcpStream, gate: Gate, traffic: Arc<Traffic>) -> Self {
        request.recv.set_connect();
        Self { request, target, gate, up: Bytes::new(), client_finished: false, target_finished: false, traffic }
    }

    /// Relays until both sides have ended, one has failed, or nothing has moved for `idle`; returns a word for what
    /// ended the tunnel.
    pub async fn run(mut self, idle: Duration, metrics: &Metrics) -> &'static str {
        let mut moved = self.traffic.bytes();
        let end = loop {
            match timeout(idle, poll_fn(|cx| self.poll(cx, metrics))).await {
                Ok(Ok(())) => break "finished",
                Ok(Err(error)) => {
                    tracing::debug!(%error, "tunnel failed");
                    break match error {
                        TcpError::Client(Error::Protocol(_)) => "violation",
                        TcpError::Client(_) => "client",
                        TcpError::Target(_) => "target_failed",
                    };
                }
                Err(_) if self.traffic.bytes() == moved => break "idle",
                Err(_) => moved = self.traffic.bytes(),
            }
        };
        let (up_bytes, down_bytes) = self.traffic.bytes();
        metrics.add_tcp(up_bytes, down_bytes);
        if end != "finished" {
            // RFC 9114 §4.4.
            self.request.send.reset(Code::ConnectError);
            self.request.recv.stop(Code::ConnectError);
        }
        end
    }

    /// Moves what can be moved; ready when both directions have ended.
    fn poll(&mut self, cx: &mut Context<'_>, metrics: &Metrics) -> Poll<Result<(), TcpError>> {
        if let Some((before, class)) = self.gate.follow() {
            mark(&SockRef::from(&self.target), Some(&before), class, metrics);
        }
        let up = self.poll_up(cx)?;
        let down = self.poll_down(cx)?;
        if up.is_ready() && down.is_ready() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TcpError>> {
        loop {
            while !self.up.is_empty() {
                ready!(self.gate.poll(cx, self.up.len()));
                let written = ready!(Pin::new(&mut self.target).poll_write(cx, &self.up))?;
                self.up.advance(written);
                self.traffic.up_bytes.fetch_add(written as u64, Relaxed);
            }
            self.gate.passed();
            if self.client_finished {
                return Pin::new(&mut self.target).poll_shutdown(cx).map_err(TcpError::from);
            }
            match ready!(self.request.recv.poll_part(cx))? {
                Some(Part::Data(bytes)) => self.up = bytes,
                Some(_) => {}
                None => self.client_finished = true,
            }
        }
    }

    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TcpError>> {
        while !self.target_finished {
            // A slow client holds back the target, not our memory.
            ready!(self.request.send.poll_ready(cx))?;
            let frame = ready!(self.poll_read(cx))?;
            if frame.is_empty() {
                self.target_finished = true;
                self.request.send.finish();
            } else {
                self.request.send.push(frame);
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads from the target and puts a DATA frame around it; empty at the end of the target's bytes.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        // Readiness first: a tunnel that waits owns no buffer.
        ready!(self.target.poll_read_ready(cx))?;
        let mut buffer = [0; CHUNK_BYTES];
        let mut read = ReadBuf::new(&mut buffer);
        ready!(Pin::new(&mut self.target).poll_read(cx, &mut read))?;
        let bytes = read.filled();
        if bytes.is_empty() {
            return Poll::Ready(Ok(Bytes::new()));
        }
        self.traffic.down_bytes.fetch_add(bytes.len() as u64, Relaxed);
        let (header, header_len) = h3::data_frame_header(bytes.len() as u64);
        let mut frame = BytesMut::with_capacity(header_len + bytes.len());
        frame.put_slice(&header[..header_len]);
        frame.put_slice(bytes);
        Poll::Ready(Ok(frame.freeze()))
    }
}
