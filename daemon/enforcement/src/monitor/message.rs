//! Messages between the processes: JSON, accompanied by file descriptors (unix(7), SCM_RIGHTS).

use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Serialize, de::DeserializeOwned};

/// More bytes than any message needs.
const MOST_BYTES: usize = 16 * 1024;
/// The most descriptors that a message may carry.
pub const MOST_FDS: usize = 16;

/// Space for the control message of that many descriptors.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(MOST_FDS));

/// Sends a message with copies of file descriptors; never waits.
///
/// # Errors
/// The other process is gone, or so far behind that its socket buffer is full.
pub fn send(socket: impl AsFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "the message has more descriptors than it can carry"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags)?;
    Ok(())
}

/// Receives a message and its descriptors; `None` once the other process has closed its end.
///
/// # Errors
/// There is none yet (on a non-blocking socket), or the message is unreadable ([`is_unreadable`]): it is invalid, or it
/// brings more descriptors than this process may still open. The descriptors of an unreadable message are closed.
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = [0; MOST_BYTES];
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = message {
            fds.extend(given);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let unreadable = |why: &str| Err(io::Error::new(ErrorKind::InvalidData, why));
    if received.flags.contains(ReturnFlags::TRUNC) || fds.len() > MOST_FDS {
        return unreadable("the message is longer than any that paced sends");
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // The kernel fills the space, unless it finds no number for a descriptor (`scm_detach_fds`, net/core/scm.c).
        return unreadable(match fds.len() {
            MOST_FDS => "the message has more descriptors than any that paced sends",
            _ => "this process has no free descriptors for those of the message",
        });
    }
    let bytes = bytes.get(..received.bytes).unwrap_or(&bytes);
    Ok(Some((serde_json::from_slice(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?, fds)))
}

/// Whether [`receive`] failed because of the message, which it has taken from the socket, and not because of the socket.
pub fn is_unreadable(error: &io::Error) -> bool {
    error.raw_os_error().is_none()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    };

    use socket2::{Domain, Socket, Type};

    use super::*;

    fn pair() -> (Socket, Socket) {
        Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap()
    }

    fn inode(file: impl Into<OwnedFd>) -> u64 {
        File::from(file.into()).metadata().unwrap().ino()
    }

    #[test]
    fn messages_arrive_with_as_many_descriptors_as_were_sent_in_order() {
        let paths = ["/proc/self/comm", "/dev/null", "/proc/self/maps"];
        // Odd numbers leave padding behind the last descriptor, which must not be read as one.
        for count in [0, 1, 2, 3, 15, MOST_FDS] {
            let (near, far) = pair();
            let files: Vec<_> = paths.iter().cycle().take(count).map(|path| File::open(path).unwrap()).collect();
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            send(&near, &"text", &fds).unwrap();
            let (text, received) = receive::<String>(&far).unwrap().unwrap();
            assert!(received.iter().all(|fd| fd.as_raw_fd() > 2), "{count}: {received:?}");
            let received: Vec<_> = received.into_iter().map(inode).collect();
            assert_eq!((&text[..], received), ("text", files.into_iter().map(inode).collect()), "{count}");
        }
    }

    #[test]
    fn a_message_with_more_descriptors_than_any_of_ours_is_refused_and_they_are_closed() {
        let (near, far) = pair();
        let file = File::open("/dev/null").unwrap();
        let fds = [file.as_fd(); 2 * MOST_FDS];
        assert_eq!(send(&near, &"text", &fds).unwrap_err().kind(), ErrorKind::InvalidInput);
        // From a foreign sender: one descriptor more than allowed, and more than there is space for.
        for count in [MOST_FDS + 1, 2 * MOST_FDS] {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * MOST_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds[..count])));
            sendmsg(&near, &[IoSlice::new(b"\"text\"")], &mut control, SendFlags::empty()).unwrap();
            assert_eq!(receive::<String>(&far).unwrap_err().kind(), ErrorKind::InvalidData, "{count}");
        }
        // The other end of a pipe shows when the last copy of a descriptor is closed.
        let (reader, writer) = io::pipe().unwrap();
        let fds = vec![writer.as_fd(); MOST_FDS];
        near.send(&vec![b' '; MOST_BYTES + 1]).unwrap();
        send(&near, &"x".repeat(MOST_BYTES), &fds).unwrap();
        for _ in 0..2 {
            assert_eq!(receive::<String>(&far).unwrap_err().kind(), ErrorKind::InvalidData);
        }
        drop(writer);
        assert_eq!(io::read_to_string(reader).unwrap(), "");
    }

    #[test]
    fn a_closed_end_is_told_and_garbage_is_an_error() {
        let (near, far) = pair();
        near.send(b"{").unwrap();
        assert!(receive::<String>(&far).is_err());
        drop(near);
        assert!(receive::<String>(&far).unwrap().is_none());
    }
}
