//! The handle that the tasks of one connection share, and how requests are opened in the client role.

use std::{
    future::poll_fn,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

use admission::{
    stopped::{ReaderOwner, StoppedReaders},
    strangers::{ClientStanding, StreamFrames},
    uploads::{OpenUpload, Uploads},
};
use masque::{
    h3::{self, Code, RequestHead, RequestStream, Role, Settings},
    priority::Priority,
};
use s2n_quic::{connection::Handle, stream};

use super::{
    error::{Error, close},
    message::{MessageLimits, RecvStream, SendStream},
    peer::Peer,
    request::Request,
};
use crate::{
    class::{Class, Terms},
    datagrams::Hub,
    dispatch::Dispatcher,
    events::ConnectionState,
};

/// The handle that the tasks of one connection share; opens requests in the client role.
#[derive(Clone)]
pub struct Client {
    pub(super) handle: Handle,
    /// Lets one task at a time open a stream. The transport keeps the wakers of tasks that gave up and spends credit on
    /// waking them; so the tasks wait here, and it knows one waker.
    pub(super) opener: Arc<tokio::sync::Mutex<Handle>>,
    pub(super) hub: Arc<Hub>,
    pub(super) dispatcher: Dispatcher,
    pub(super) peer: Arc<Peer>,
    pub(super) standing: ClientStanding,
    pub(super) limits: MessageLimits,
    pub(super) stopped_readers: Arc<StoppedReaders>,
    /// Only in the client role: a server knows one owner of all streams, its user.
    pub(super) uploads: Option<Arc<Uploads>>,
}

/// A stream that the peer's credit allows (RFC 9000 §4.6), for a later request.
pub struct Reserved(stream::BidirectionalStream);

impl Client {
    /// Returns the QUIC connection.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns what is known about the peer.
    #[must_use]
    pub fn standing(&self) -> &ClientStanding {
        &self.standing
    }

    /// Returns the readers of the connection's streams, some of which may have stopped.
    #[must_use]
    pub const fn stopped_readers(&self) -> &Arc<StoppedReaders> {
        &self.stopped_readers
    }

    /// Adds a stream by which `owner` uploads bytes; `None` if it has ended, or in the server role.
    #[must_use]
    pub fn upload(&self, stream_id: u64, owner: ReaderOwner) -> Option<OpenUpload> {
        Some(self.uploads.as_ref()?.open(owner, self.dispatcher.books(stream_id)?))
    }

    /// Ends uploads that hold all credit of the connection. See [`Uploads::look`].
    pub fn look_at_uploads(&self, now: Instant) {
        if let Some(uploads) = &self.uploads {
            uploads.look(self.dispatcher.credit(), now);
        }
    }

    /// Notes that nothing of a stream is held any more, because we stopped and reset it.
    pub fn forget(&self, stream_id: u64) {
        // Fails only once the connection is gone.
        let forget = |state: &mut ConnectionState| state.budget.release(stream_id, &state.standing);
        _ = self.handle.clone().query_event_context_mut(forget);
    }

    /// Rejects a request that was not processed at all, so that the peer may send it again (RFC 9114 §4.1.1).
    pub(super) fn reject(&self, stream_id: u64, recv: RecvStream, send: SendStream) {
        recv.stop(Code::RequestRejected);
        send.reset(Code::RequestRejected);
        self.forget(stream_id);
    }

    /// Closes the connection with an error code; `NoError` where nothing is wrong (RFC 9114 §5.3).
    pub fn close(&self, code: Code) {
        close(&self.handle, code);
    }

    /// Returns the peer's settings, once they have arrived.
    #[must_use]
    pub fn settings(&self) -> Option<&Settings> {
        self.peer.settings.get()
    }

    /// Waits for the peer's settings, which have to be known before extended CONNECT and datagrams may be used
    /// (RFC 8441 §3, RFC 9297 §2.1.1).
    ///
    /// # Errors
    /// The connection ended first.
    pub async fn wait_for_settings(&self) -> Result<&Settings, Error> {
        loop {
            let changed = self.peer.changed.notified();
            if let Some(settings) = self.peer.settings.get() {
                return Ok(settings);
            }
            if self.peer.goaway.load(Relaxed) == 0 {
                return Err(self.gone());
            }
            changed.await;
        }
    }

    /// Returns why the peer takes no new requests: the connection has ended, or the peer said that it goes away.
    fn gone(&self) -> Error {
        self.peer.ended.get().cloned().unwrap_or(Error::GoingAway)
    }

    /// Whether the peer still takes new requests.
    #[must_use]
    pub fn takes_requests(&self) -> bool {
        self.peer.goaway.load(Relaxed) == u64::MAX
    }

    /// Waits until the peer takes no new requests. Returns whether it said that it goes away (RFC 9114 §5.2) and serves the
    /// open requests; otherwise the connection has ended.
    pub async fn goes_away(&self) -> bool {
        loop {
            let changed = self.peer.changed.notified();
            if !self.takes_requests() {
                return self.peer.ended.get().is_none();
            }
            changed.await;
        }
    }

    /// Whether HTTP Datagrams may be sent in DATAGRAM frames: the transport allows it and the peer has said so
    /// (RFC 9297 §2.1.1).
    #[must_use]
    pub fn datagrams_allowed(&self) -> bool {
        self.hub.peer_accepts() && self.settings().is_some_and(|settings| settings.h3_datagram)
    }

    /// Opens a request stream and sends the request's head.
    ///
    /// # Errors
    /// The connection ended, the peer goes away, or the head exceeds what the peer accepts.
    pub async fn request(&self, head: &RequestHead) -> Result<Request, Error> {
        self.request_on(self.reserve().await?, head)
    }

    /// Opens a stream for a request. Ready at once unless the peer's stream credit is used up; callers that wait for more get
    /// it in the order of their calls.
    ///
    /// # Errors
    /// The connection ended, or the peer goes away.
    pub async fn reserve(&self) -> Result<Reserved, Error> {
        let mut opener = self.opener.lock().await;
        loop {
            let changed = self.peer.changed.notified();
            if !self.takes_requests() {
                return Err(self.gone());
            }
            let opened = poll_fn(|cx| {
                self.dispatcher.go_first();
                opener.poll_open_bidirectional_stream(cx)
            });
            tokio::select! {
                biased;
                stream = opened => return Ok(Reserved(stream?)),
                () = changed => {}
            }
        }
    }

    /// Sends a request's head on a stream that was reserved for it.
    ///
    /// # Errors
    /// The peer goes away, or the head exceeds what the peer accepts.
    pub fn request_on(&self, Reserved(stream): Reserved, head: &RequestHead) -> Result<Request, Error> {
        if !self.takes_requests() {
            return Err(self.gone());
        }
        let max = self.settings().and_then(|settings| settings.max_field_section_size);
        let head = h3::encode_request(head, max)?;
        let stream_id = stream.id();
        let flow = self.hub.open(stream_id);
        let (recv, mut send) = self.split(stream, Role::Client);
        send.stream.push(head);
        Ok(Request { stream_id, recv, send, flow, signal: None, waiting: None })
    }

    /// Moves what we send on a request's stream, and in its datagrams, to another class.
    pub fn reclass(&self, stream_id: u64, class: &Arc<Class>) {
        self.change_terms(stream_id, |terms| terms.reclassed(class));
    }

    /// Makes what waits on a request's stream, and in its datagrams, follow a changed rate of its user.
    pub fn follow_rate(&self, stream_id: u64) {
        self.change_terms(stream_id, Terms::clone);
    }

    pub(super) fn change_terms(&self, stream_id: u64, change: impl Fn(&Terms) -> Terms) {
        self.hub.change_terms(stream_id, &change);
        self.dispatcher.change_terms(stream_id, &change);
    }

    /// Asks the peer to change the priority of the data that it sends on a request's stream (PRIORITY_UPDATE, RFC 9218 §7.2).
    /// This is advice: if many streams have updates at once, only the latest 64 are sent.
    pub fn reprioritize(&self, stream_id: u64, signal: Priority) {
        self.peer.signals().put(stream_id, signal);
        self.peer.signalled.wake();
    }

    pub(super) fn split(&self, stream: stream::BidirectionalStream, role: Role) -> (RecvStream, SendStream) {
        let (recv, send) = stream.split();
        let parser = RequestStream::new(role, self.limits.field_section_bytes);
        let send = self.dispatcher.attach(send, self.hub.terms().clone());
        let (frames, standing) = (StreamFrames::default(), self.standing.clone());
        let recv = RecvStream { stream: recv, parser, frames, standing, finished: false };
        (recv, SendStream { stream: send, peer: self.peer.clone() })
    }
}
