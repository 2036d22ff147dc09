//! Connections to the server of an answer, each through a tunnel of its own.

use std::{io, sync::Arc, time::Duration};

use bytes::{Buf as _, Bytes, BytesMut};
use masque::target::Target;
use parking_lot::Mutex;
use role::tcp::End;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    sync::oneshot,
    task::JoinSet,
    time::timeout,
};
use uplink::LinkId;

use super::{
    super::Shared,
    answer::{self, AnswerHead, MalformedAnswer},
};
use crate::{
    connect::{NotOpenedOn, OpenedTcp},
    roster::LocalClient,
};

/// How many bytes a tunnel holds for a connection.
const PIPE_BYTES: usize = 64 * 1024;

/// How many bytes are read at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// How long tunnels may take to end after the answer.
const LAST: Duration = Duration::from_secs(1);

/// The tunnels to the server of one answer. Dropping it ends them.
pub struct Tunnels {
    shared: Arc<Shared>,
    client: LocalClient,
    target: Target,
    tasks: Mutex<JoinSet<()>>,
}

impl Tunnels {
    /// Returns no tunnels yet, for a client of a proxy.
    pub fn new(shared: &Arc<Shared>, client: &LocalClient, target: &Target) -> Self {
        let (shared, client, target) = (shared.clone(), client.clone(), target.clone());
        Self { shared, client, target, tasks: Mutex::default() }
    }

    /// Returns the connection in a tunnel that is open, on which `first` is sent.
    pub fn connection(&self, opened: OpenedTcp, first: &[u8]) -> OriginConnection {
        let (pipe, end) = duplex(PIPE_BYTES);
        let (place, (tell, ended)) = (opened.place(), oneshot::channel());
        let (shared, client, target, first) =
            (self.shared.clone(), self.client.clone(), self.target.clone(), first.to_vec());
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            let end = shared.access.carry(opened, end, (&client, &target), (&first, u64::MAX)).await;
            // The connection may have been dropped first.
            _ = tell.send(matches!(end, Some(End::Finished)));
        });
        OriginConnection { place, pipe, read: BytesMut::new(), ended }
    }

    /// Connects to the server over the path with this index.
    ///
    /// # Errors
    /// See [`NotOpenedOn`].
    pub async fn connect(&self, path: usize) -> Result<OriginConnection, NotOpenedOn> {
        let opened = self.shared.access.open_on(path, &self.target).await?;
        Ok(self.connection(opened, &[]))
    }

    /// Lets the tunnels end properly, after their connections were dropped.
    pub async fn close(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        _ = timeout(LAST, async { while tasks.join_next().await.is_some() {} }).await;
    }
}

/// A connection to the server.
pub struct OriginConnection {
    /// The place of its tunnel.
    pub place: LinkId,
    pipe: DuplexStream,
    read: BytesMut,
    ended: oneshot::Receiver<bool>,
}

impl OriginConnection {
    /// Sends a request.
    ///
    /// # Errors
    /// The tunnel has ended.
    pub async fn send(&mut self, request: &[u8]) -> io::Result<()> {
        self.pipe.write_all(request).await
    }

    /// Sends no more.
    pub async fn end(&mut self) {
        // If the tunnel has ended, reading tells that.
        _ = self.pipe.shutdown().await;
    }

    /// Reads more, and returns whether there was more.
    pub async fn fill(&mut self) -> bool {
        self.read.reserve(CHUNK_BYTES);
        self.pipe.read_buf(&mut self.read).await.is_ok_and(|read| read > 0)
    }

    /// Reads the head of an answer; what was read stays available. Returns `None` if the connection ends first.
    ///
    /// # Errors
    /// The server sends something else.
    pub async fn head(&mut self) -> Result<Option<(AnswerHead, usize)>, MalformedAnswer> {
        loop {
            if let Some(found) = answer::head(&self.read)? {
                return Ok(Some(found));
            }
            if !self.fill().await {
                return Ok(None);
            }
        }
    }

    /// Returns how many bytes were read and not taken.
    pub fn available(&self) -> usize {
        self.read.len()
    }

    /// Takes up to so many of the bytes that were read.
    pub fn take(&mut self, most: u64) -> Bytes {
        let most = usize::try_from(most).unwrap_or(usize::MAX).min(self.read.len());
        self.read.split_to(most).freeze()
    }

    /// Discards bytes that were read.
    pub fn skip(&mut self, bytes: usize) {
        self.read.advance(bytes.min(self.read.len()));
    }

    /// Whether the server has ended the connection, and not the tunnel. Waits for the end of the tunnel.
    pub async fn has_finished(self) -> bool {
        let Self { pipe, ended, .. } = self;
        drop(pipe);
        ended.await.unwrap_or(false)
    }
}
