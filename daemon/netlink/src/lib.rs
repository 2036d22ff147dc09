//! The kernel's view of this network namespace through rtnetlink(7): changes as they happen, lists, and requests.
//!
//! The message types are those of [`message`]; the callers interpret them.

use std::{io, net::IpAddr, time::Duration};

use futures::{FutureExt as _, Stream, StreamExt as _, channel::mpsc::UnboundedReceiver, stream};
use rtnetlink::{
    Handle,
    packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::{RouteAddress, RouteAttribute, RouteMessage},
        tc::TcHandle,
    },
    sys::{self, AsyncSocket as _, SocketAddr, protocols::NETLINK_ROUTE},
};
pub use rtnetlink::{MulticastGroup as Group, packet_core as core, packet_route as message};
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep_until},
};

/// The longest answer to [`ask_at_once`], in bytes: as long as the kernel's own buffer for one (`NLMSG_GOODSIZE`, include/linux/netlink.h).
const ANSWER_BYTES: usize = 8 << 10;

/// How long [`Socket::settled`] waits for further changes, which come in bursts.
const SETTLE: Duration = Duration::from_millis(20);

/// Why the kernel gave no answer, or an incomplete one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no socket, or it failed.
    #[error("the netlink socket failed")]
    Socket(#[source] io::Error),
    /// The kernel refused the request.
    #[error("the kernel refused the netlink request")]
    Refused(#[source] io::Error),
    /// Messages were lost, or the listed objects changed during the list (NLM_F_DUMP_INTR).
    #[error("the kernel's list is incomplete")]
    Gaps,
}

/// An event of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// One change.
    Message(Box<RouteNetlinkMessage>),
    /// Changes were missed, because the socket's buffer overran or the socket failed: subscribe and list again.
    Lost,
}

type Message = NetlinkMessage<RouteNetlinkMessage>;

/// Returns a request for the route of packets `to` an address, optionally `from` an address of this host. The request leaves out a `from`
/// that is unspecified or of the other IP version.
#[must_use]
pub fn route_request(to: IpAddr, from: Option<IpAddr>) -> RouteMessage {
    let mut message = RouteMessage::default();
    let bits = if to.is_ipv4() { 32 } else { 128 };
    message.header.address_family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.destination_prefix_length = bits;
    message.attributes.push(RouteAttribute::Destination(RouteAddress::from(to)));
    if let Some(from) = from.filter(|from| !from.is_unspecified() && from.is_ipv4() == to.is_ipv4()) {
        message.header.source_prefix_length = bits;
        message.attributes.push(RouteAttribute::Source(RouteAddress::from(from)));
    }
    message
}

/// Whether a queueing discipline with this `parent` serves one hardware queue of a device whose root has this kind and handle. The root has
/// to be `mq` or `mqprio`: these have a child for each queue, and packets leave only through children.
#[must_use]
pub fn serves_queue(parent: TcHandle, (root_kind, root): (&str, TcHandle)) -> bool {
    ["mq", "mqprio"].contains(&root_kind) && parent.major == root.major && parent.minor != 0
}

/// Like [`Socket::ask`], but without a runtime: the kernel has answered a request for one object by the time that it has taken the request,
/// so this waits for no more than that.
///
/// # Errors
/// As [`Socket::ask`]. The socket also fails if the answer cannot be read.
pub fn ask_at_once(asked: RouteNetlinkMessage) -> Result<Option<RouteNetlinkMessage>, Error> {
    let mut request = NetlinkMessage::from(asked);
    request.header.flags = NLM_F_REQUEST;
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    let mut answer = Vec::with_capacity(ANSWER_BYTES);
    let socket = sys::Socket::new(NETLINK_ROUTE).map_err(Error::Socket)?;
    let asked = socket.set_non_blocking(true).and_then(|()| socket.send(&bytes, 0));
    asked.and_then(|_| socket.recv(&mut answer, 0)).map_err(Error::Socket)?;
    let answer = Message::deserialize(&answer);
    let answer =
        answer.map_err(|error| Error::Socket(io::Error::new(io::ErrorKind::InvalidData, error.to_string())))?;
    read_answer(stream::iter([answer])).now_or_never().unwrap_or_else(|| Err(closed()))
}

/// A netlink socket, driven by a task of the current tokio runtime until it is dropped.
pub struct Socket {
    handle: Handle,
    events: UnboundedReceiver<(Message, SocketAddr)>,
    connection: AbortHandle,
    /// Until when further changes are awaited, after the first.
    settles: Option<Instant>,
}

impl Socket {
    /// Opens a socket that receives every change in `groups`; without groups it is for requests only.
    ///
    /// # Errors
    /// No descriptor is left, or netlink is not permitted.
    pub fn open(groups: &[Group]) -> io::Result<Self> {
        Self::start(groups, false)
    }

    /// Like [`Socket::open`], but the kernel applies more of the filters in a list request, such as the type of routes.
    /// Kernels before 4.20 lack the option (NETLINK_GET_STRICT_CHK), and list more.
    ///
    /// # Errors
    /// See [`Socket::open`].
    pub fn open_strict(groups: &[Group]) -> io::Result<Self> {
        Self::start(groups, true)
    }

    fn start(groups: &[Group], strict: bool) -> io::Result<Self> {
        let (mut connection, handle, events) = rtnetlink::new_multicast_connection(groups)?;
        // Otherwise a truncated list looks like a complete one, and a change without an answer like an acknowledged one.
        connection.set_forward_done(true);
        connection.set_forward_ack(true);
        if strict {
            _ = connection.socket_mut().socket_ref().set_netlink_get_strict_chk(true);
        }
        Ok(Self { handle, events, connection: tokio::spawn(connection).abort_handle(), settles: None })
    }

    /// Makes the socket fail, to test how a caller handles [`Change::Lost`].
    pub fn fail(&mut self) {
        self.events.close();
    }

    /// Waits for the next change. Cancelling loses no change.
    pub async fn next(&mut self) -> Change {
        loop {
            match self.events.next().await.map(|(message, _)| message.payload) {
                Some(NetlinkPayload::InnerMessage(message)) => return Change::Message(Box::new(message)),
                Some(NetlinkPayload::Overrun(_)) | None => return Change::Lost,
                Some(_) => {}
            }
        }
    }

    /// Waits for a change, and then 20 ms for the changes that come with it. Lost messages count as a change. Cancelling
    /// loses no change.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn settled(&mut self) -> io::Result<()> {
        let settles = match self.settles {
            Some(settles) => settles,
            None => {
                self.events.next().await.ok_or(io::ErrorKind::ConnectionAborted)?;
                *self.settles.insert(Instant::now() + SETTLE)
            }
        };
        sleep_until(settles).await;
        self.settles = None;
        while self.events.try_recv().is_ok() {}
        Ok(())
    }

    /// Lists the objects that `asked` requests, message by message.
    ///
    /// # Errors
    /// The list is incomplete, or there is none; `each` may have received part of it.
    pub async fn list(&self, asked: RouteNetlinkMessage, each: impl FnMut(RouteNetlinkMessage)) -> Result<(), Error> {
        read_list(self.request(asked, NLM_F_DUMP)?, each).await
    }

    /// Requests one object; `None` if the kernel acknowledges without a message.
    ///
    /// # Errors
    /// The object does not exist, or the socket failed.
    pub async fn ask(&self, asked: RouteNetlinkMessage) -> Result<Option<RouteNetlinkMessage>, Error> {
        read_answer(self.request(asked, 0)?).await
    }

    /// Asks the kernel to change an object; `flags` say how (NLM_F_CREATE, NLM_F_REPLACE …).
    ///
    /// # Errors
    /// The kernel refuses, or the socket failed before the kernel acknowledged the change.
    pub async fn change(&self, wanted: RouteNetlinkMessage, flags: u16) -> Result<(), Error> {
        read_answer(self.request(wanted, NLM_F_ACK | flags)?).await.map(drop)
    }

    fn request(&self, asked: RouteNetlinkMessage, flags: u16) -> Result<impl Stream<Item = Message> + use<>, Error> {
        let mut request = NetlinkMessage::from(asked);
        request.header.flags = NLM_F_REQUEST | flags;
        self.handle.clone().request(request).map_err(|_| closed())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Reads the reply to a list request.
async fn read_list(
    mut reply: impl Stream<Item = Message> + Unpin,
    mut each: impl FnMut(RouteNetlinkMessage),
) -> Result<(), Error> {
    while let Some(message) = reply.next().await {
        if message.header.flags & NLM_F_DUMP_INTR != 0 {
            return Err(Error::Gaps);
        }
        match message.payload {
            NetlinkPayload::InnerMessage(listed) => each(listed),
            NetlinkPayload::Done(_) => return Ok(()),
            NetlinkPayload::Error(error) => return Err(Error::Refused(error.to_io())),
            _ => return Err(Error::Gaps),
        }
    }
    Err(closed())
}

/// Reads the answer to a request for one object or one change; `None` is a mere acknowledgement.
async fn read_answer(mut reply: impl Stream<Item = Message> + Unpin) -> Result<Option<RouteNetlinkMessage>, Error> {
    while let Some(message) = reply.next().await {
        match message.payload {
            NetlinkPayload::InnerMessage(message) => return Ok(Some(message)),
            NetlinkPayload::Error(error) if error.code.is_some() => return Err(Error::Refused(error.to_io())),
            NetlinkPayload::Error(_) => return Ok(None),
            _ => {}
        }
    }
    Err(closed())
}

fn closed() -> Error {
    Error::Socket(io::ErrorKind::ConnectionAborted.into())
}

#[cfg(test)]
mod tests {
    use rtnetlink::{
        packet_core::{DoneMessage, ErrorMessage, NetlinkHeader},
        packet_route::{address::AddressMessage, link::LinkMessage},
    };

    use super::*;

    fn reply(flags: u16, payload: NetlinkPayload<RouteNetlinkMessage>) -> Message {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        NetlinkMessage::new(header, payload)
    }

    fn address() -> RouteNetlinkMessage {
        RouteNetlinkMessage::NewAddress(AddressMessage::default())
    }

    #[tokio::test]
    async fn only_a_whole_and_undisturbed_list_counts() {
        let listed = |flags| reply(flags, NetlinkPayload::InnerMessage(address()));
        let done = || reply(0, NetlinkPayload::Done(DoneMessage::default()));
        let mut count = 0;
        read_list(stream::iter([listed(0), listed(0), done()]), |_| count += 1).await.unwrap();
        assert_eq!(count, 2);
        let broken_off = read_list(stream::iter([listed(0)]), |_| {}).await;
        assert!(matches!(broken_off, Err(Error::Socket(_))));
        let disturbed = read_list(stream::iter([listed(NLM_F_DUMP_INTR), done()]), |_| {}).await;
        assert!(matches!(disturbed, Err(Error::Gaps)));
        let error = NetlinkPayload::Error(ErrorMessage::default());
        let refused = read_list(stream::iter([reply(0, error)]), |_| {}).await;
        assert!(matches!(refused, Err(Error::Refused(_))));
    }

    #[tokio::test]
    async fn a_change_without_an_answer_was_not_made() {
        let read = async |messages: Vec<Message>| read_answer(stream::iter(messages)).await;
        assert!(matches!(read(Vec::new()).await, Err(Error::Socket(_))));
        let acknowledged = reply(0, NetlinkPayload::Error(ErrorMessage::default()));
        assert!(matches!(read(vec![acknowledged]).await, Ok(None)));
        let answered = reply(0, NetlinkPayload::InnerMessage(address()));
        assert!(matches!(read(vec![answered]).await, Ok(Some(RouteNetlinkMessage::NewAddress(_)))));
        let socket = Socket::open(&[]).unwrap();
        let mut lo = LinkMessage::default();
        lo.header.index = 1;
        // Root may make this change, which changes nothing; others are refused.
        let changed = socket.change(RouteNetlinkMessage::SetLink(lo), 0).await;
        assert!(matches!(changed, Ok(()) | Err(Error::Refused(_))), "{changed:?}");
    }

    /// A socket whose events come from the test.
    fn told() -> (futures::channel::mpsc::UnboundedSender<(Message, SocketAddr)>, Socket) {
        let (tell, events) = futures::channel::mpsc::unbounded();
        let mut socket = Socket::open(&[]).unwrap();
        socket.events = events;
        (tell, socket)
    }

    fn tell(sender: &futures::channel::mpsc::UnboundedSender<(Message, SocketAddr)>) {
        let message = reply(0, NetlinkPayload::InnerMessage(address()));
        sender.unbounded_send((message, SocketAddr::new(0, 0))).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn changes_that_come_together_are_one_and_cancelling_loses_none() {
        let (sender, mut socket) = told();
        (0..3).for_each(|_| tell(&sender));
        assert!(socket.settled().now_or_never().is_none(), "others may follow");
        let began = Instant::now();
        socket.settled().await.unwrap();
        assert!(began.elapsed() <= SETTLE);
        assert!(socket.settled().now_or_never().is_none(), "all three were one change");
        tell(&sender);
        socket.settled().await.unwrap();
        drop(sender);
        assert!(socket.settled().await.is_err());
    }

    #[tokio::test]
    async fn an_overrun_and_a_lost_socket_are_told_from_changes() {
        let (sender, mut socket) = told();
        tell(&sender);
        assert_eq!(socket.next().await, Change::Message(Box::new(address())));
        drop(sender);
        assert_eq!(socket.next().await, Change::Lost);
    }

    #[tokio::test]
    async fn the_kernel_lists_answers_and_refuses() {
        let socket = Socket::open(&[]).unwrap();
        let mut links = Vec::new();
        socket.list(RouteNetlinkMessage::GetLink(LinkMessage::default()), |link| links.push(link)).await.unwrap();
        assert!(!links.is_empty(), "there is always a loopback device");
        let mut first = LinkMessage::default();
        first.header.index = 1;
        let one = socket.ask(RouteNetlinkMessage::GetLink(first.clone())).await.unwrap();
        assert!(matches!(one, Some(RouteNetlinkMessage::NewLink(_))));
        let at_once = ask_at_once(RouteNetlinkMessage::GetLink(first.clone())).unwrap();
        assert!(matches!(at_once, Some(RouteNetlinkMessage::NewLink(_))));
        first.header.index = i32::MAX as u32;
        let none = ask_at_once(RouteNetlinkMessage::GetLink(first.clone()));
        assert!(matches!(none, Err(Error::Refused(error)) if error.raw_os_error() == Some(19)), "ENODEV");
        let none = socket.ask(RouteNetlinkMessage::GetLink(first.clone())).await;
        assert!(matches!(none, Err(Error::Refused(error)) if error.raw_os_error() == Some(19)), "ENODEV");
        let refused = socket.change(RouteNetlinkMessage::DelLink(first), 0).await;
        assert!(matches!(refused, Err(Error::Refused(_))));
    }
}
