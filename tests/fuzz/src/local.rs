//! Bytes that reach the daemon from its own host: requests for its pages, and messages of the monitor.

use std::{
    fs::File,
    future::Future as _,
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd as _, OwnedFd},
    pin::pin,
    sync::LazyLock,
    task::{Context, Poll, Waker},
};

use enforcement::monitor::{
    MonitorNotice,
    message::{self, MOST_FDS},
};
use paced::{
    metrics::{Metrics, PageSources, page},
    parts::Parts,
};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg, socketpair,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

use crate::input::choice;

static SOURCES: LazyLock<PageSources> = LazyLock::new(|| {
    let parts = Parts::default();
    PageSources { metrics: Metrics::new(&parts), ready: parts.ready }
});

/// A request gets one answer of the announced length, or none if the request itself breaks off.
pub fn page_request(mut input: &[u8]) {
    let cut = usize::from(choice(&mut input, u8::MAX)).min(input.len());
    let talk = async {
        // Larger than any request and any answer.
        let (mut near, far) = duplex(1 << 20);
        let (first, rest) = input.split_at(cut);
        near.write_all(first).await?;
        near.write_all(rest).await?;
        near.shutdown().await?;
        // The error is that of the request, or its early end.
        _ = page::answer(far, &SOURCES).await;
        let mut answer = String::new();
        near.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    // Nothing in it waits for an outside event, but hyper yields now and then.
    let (mut talk, mut context) = (pin!(talk), Context::from_waker(Waker::noop()));
    let mut turns = (0..1_000).map(|_| talk.as_mut().poll(&mut context));
    let Some(Poll::Ready(answer)) = turns.find(Poll::is_ready) else { panic!("the page waits for something") };
    let answer = answer.unwrap_or_else(|error| panic!("{error}"));
    if answer.is_empty() {
        return;
    }
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer} has no end"));
    let len = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    // Empty lines before a request are skipped (RFC 9112 §2.2).
    let is_bare = body.is_empty() && input.trim_ascii_start().starts_with(b"HEAD ");
    assert!(head.starts_with("HTTP/1.") && (is_bare || len == Some(&body.len().to_string())), "{answer}");
}

/// A pair of sockets that all inputs share, because creating a pair takes longer than an input; and a file to send. With a socket
/// instead of the file, each close would make the kernel collect unreachable sockets (`net/unix/garbage.c`).
struct Channel {
    near: OwnedFd,
    far: OwnedFd,
    file: File,
}

thread_local! {
    static CHANNEL: Channel = {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (near, far) = pair.unwrap_or_else(|error| panic!("{error}"));
        Channel { near, far, file: File::open("/dev/null").unwrap_or_else(|error| panic!("{error}")) }
    };
}

/// A message is read with exactly the descriptors that came with it, and is the same when it is sent again.
pub fn monitor_message(input: &[u8]) {
    CHANNEL.with(|channel| read_monitor_message(channel, input));
}

fn read_monitor_message(Channel { near, far, file }: &Channel, mut input: &[u8]) {
    let count = usize::from(choice(&mut input, 24));
    let fds = vec![file.as_fd(); count];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(24))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(count == 0 || control.push(SendAncillaryMessage::ScmRights(&fds)), "there is room");
    let sent = sendmsg(near, &[IoSlice::new(input)], &mut control, SendFlags::DONTWAIT);
    sent.unwrap_or_else(|error| panic!("{error}"));
    let Ok(Some((notice, given))) = message::receive::<MonitorNotice>(far) else { return };
    assert!(given.len() == count && count <= MOST_FDS, "{} descriptors of {count}", given.len());
    // A message may become longer when it is written again, because of escapes.
    if message::send(near, &notice, &[]).is_ok()
        && let Ok(Some((again, given))) = message::receive::<MonitorNotice>(far)
    {
        assert_eq!((format!("{again:?}"), given.len()), (format!("{notice:?}"), 0));
    }
}
