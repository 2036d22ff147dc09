//! Messages between the two processes: JSON, and file descriptors beside it (unix(7), SCM_RIGHTS).

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use serde::{Serialize, de::DeserializeOwned};
use socket2::{MaybeUninitSlice, MsgHdr, MsgHdrMut, Socket};

/// More than any message needs.
const MOST_BYTES: usize = 16 * 1024;
const MOST_FDS: usize = 16;

/// The head of a control message, `struct cmsghdr`: its length with this head, its level and its type.
const HEAD_BYTES: usize = size_of::<libc::cmsghdr>();
const FD_BYTES: usize = size_of::<RawFd>();

/// Sends a message with copies of file descriptors.
///
/// # Errors
/// The other process is gone.
pub(super) fn send(socket: &Socket, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut control = Vec::new();
    if !fds.is_empty() {
        control.extend((HEAD_BYTES + fds.len() * FD_BYTES).to_ne_bytes());
        control.extend(libc::SOL_SOCKET.to_ne_bytes());
        control.extend(libc::SCM_RIGHTS.to_ne_bytes());
        control.extend(fds.iter().flat_map(|fd| fd.as_raw_fd().to_ne_bytes()));
    }
    let slices = [IoSlice::new(&bytes)];
    let header = MsgHdr::new().with_buffers(&slices).with_control(&control);
    socket.sendmsg(&header, libc::MSG_NOSIGNAL).map(drop)
}

/// Receives a message and what came with it; `None` once the other process has closed its end.
///
/// # Errors
/// Time is up, or what came is no such message.
pub(super) fn receive<T: DeserializeOwned>(socket: &Socket) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = [MaybeUninit::new(0); MOST_BYTES];
    let mut control = [MaybeUninit::new(0); HEAD_BYTES + MOST_FDS * FD_BYTES];
    let (len, control_len) = {
        let mut slices = [MaybeUninitSlice::new(&mut bytes)];
        let mut header = MsgHdrMut::new().with_buffers(&mut slices).with_control(&mut control);
        let len = socket.recvmsg(&mut header, libc::MSG_CMSG_CLOEXEC)?;
        (len, header.control_len())
    };
    // SAFETY: all of it was initialised above, whatever the kernel has written since.
    let (bytes, control) = unsafe { (bytes[..len].assume_init_ref(), control[..control_len].assume_init_ref()) };
    let fds = descriptors(control);
    if bytes.is_empty() {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(bytes)?, fds)))
}

/// Takes the descriptors of the only control message there may be.
fn descriptors(control: &[u8]) -> Vec<OwnedFd> {
    let kind = [libc::SOL_SOCKET.to_ne_bytes(), libc::SCM_RIGHTS.to_ne_bytes()].concat();
    let Some((head, rest)) = control.split_at_checked(HEAD_BYTES) else { return Vec::new() };
    if head[size_of::<usize>()..] != kind {
        return Vec::new();
    }
    let fds = rest.as_chunks().0.iter().map(|fd| RawFd::from_ne_bytes(*fd));
    // SAFETY: the kernel has just put these descriptors into this process, and nobody else owns them.
    fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read as _, os::fd::AsFd as _};

    use socket2::{Domain, Type};

    use super::*;

    fn pair() -> (Socket, Socket) {
        Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap()
    }

    #[test]
    fn messages_arrive_with_their_descriptors_in_order() {
        let (near, far) = pair();
        let files = ["/proc/self/comm", "/dev/null"].map(|path| File::open(path).unwrap());
        send(&near, &"with two", &[files[0].as_fd(), files[1].as_fd()]).unwrap();
        send(&near, &"with none", &[]).unwrap();
        let (text, fds) = receive::<String>(&far).unwrap().unwrap();
        let read = fds.into_iter().map(|fd| {
            let mut text = String::new();
            File::from(fd).read_to_string(&mut text).unwrap();
            text.is_empty()
        });
        assert_eq!((&text[..], read.collect::<Vec<_>>()), ("with two", vec![false, true]));
        let (text, fds) = receive::<String>(&far).unwrap().unwrap();
        assert_eq!((&text[..], fds.len()), ("with none", 0));
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
