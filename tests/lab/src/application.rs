//! Applications in the client's namespace that know nothing of relays, and send UDP to a local address that forwards it.

#![expect(clippy::unwrap_used, reason = "called by tests, and fails them")]

use std::{io::ErrorKind, net::UdpSocket, time::Duration};

use crate::{
    process::wait_for,
    site::{SOON, Site},
};

/// The time that an application waits for an answer before it asks again.
pub const BRIEF: Duration = Duration::from_millis(200);

/// Returns an application's socket, which is connected to this address and waits [`BRIEF`] for each payload.
///
/// # Panics
/// Without root, or when the address is invalid.
pub fn application(site: &Site, to: &str) -> UdpSocket {
    let socket = site.chain.client.run(|| UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(BRIEF)).unwrap();
    socket
}

/// Receives the next payload, and returns its length. With a timeout on the socket, the kernel does not restart the call after a signal
/// (signal(7)), such as SIGCHLD for another test's process; an interrupted call does not mean that an answer is missing.
///
/// # Errors
/// When nothing comes before the socket's timeout, or the address that it is connected to is closed.
pub fn receive_into(socket: &UdpSocket, received: &mut [u8]) -> Result<usize, ErrorKind> {
    loop {
        match socket.recv(received).map_err(|error| error.kind()) {
            Err(ErrorKind::Interrupted) => {}
            other => return other,
        }
    }
}

/// Sends a payload, and returns whether the next one received is the same.
pub fn echoes(socket: &UdpSocket, payload: &[u8]) -> bool {
    socket.send(payload).is_ok() && receive(socket).is_ok_and(|received| received == payload)
}

/// Waits until a first payload of `len` bytes comes back, and then requires that 49 later ones come back, one after another.
///
/// # Panics
/// When one does not come back within [`SOON`].
pub fn assert_carries(site: &Site, socket: &UdpSocket, len: usize) {
    socket.set_read_timeout(Some(BRIEF)).unwrap();
    wait_for("the first echo", SOON, || echoes(socket, &vec![0; len]).then_some(())).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    for seed in 1..50 {
        socket.send(&vec![seed; len]).unwrap();
        // Echoes of the repeated first payload may still arrive.
        let came = std::iter::repeat_with(|| receive(socket)).find(|came| *came != Ok(vec![0; len])).unwrap();
        assert_eq!(came, Ok(vec![seed; len]), "payload {seed}; the relay counted {:#?}", site.counts());
    }
}

fn receive(socket: &UdpSocket) -> Result<Vec<u8>, ErrorKind> {
    let mut received = vec![0; 2048];
    let len = receive_into(socket, &mut received)?;
    received.truncate(len);
    Ok(received)
}
