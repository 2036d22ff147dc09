//! Waiting for room in the buffer of a socket that took no more packets.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    time::{Sleep, sleep},
};

use super::descriptor::{Owner, watch};

/// The pause before the next send through a full socket, if the process has no descriptor left to watch it with.
const NO_DESCRIPTOR_PAUSE: Duration = Duration::from_millis(10);

/// The wait for room in the full buffer of one socket. It watches a second descriptor `T` of the socket, and only from the first wait
/// until [`end`](Self::end): the kernel reports room for every packet that leaves, and each report would wake the task.
#[derive(Debug)]
pub struct RoomWait<T: Owner>(Option<Waiting<T>>);

#[derive(Debug)]
enum Waiting<T: Owner> {
    /// The second descriptor reports room.
    Watch(Box<AsyncFd<T>>),
    /// No descriptor was left.
    Pause(Pin<Box<Sleep>>),
}

impl<T: Owner> Default for RoomWait<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Owner> RoomWait<T> {
    /// Ready once the socket may have room. The first wait opens the descriptor that `second` returns, and further waits use it again.
    /// Without a descriptor, the wait is a pause of 10 ms, and the next send shows whether there is room.
    ///
    /// # Errors
    /// The runtime shuts down.
    ///
    /// # Panics
    /// Outside a tokio runtime with IO and time enabled.
    pub fn poll(&mut self, cx: &mut Context<'_>, second: impl FnOnce() -> io::Result<T>) -> Poll<io::Result<()>> {
        let waiting =
            self.0.get_or_insert_with(|| match second().and_then(|second| watch(second, Interest::WRITABLE)) {
                Ok(second) => Waiting::Watch(Box::new(second)),
                Err(_) => Waiting::Pause(Box::pin(sleep(NO_DESCRIPTOR_PAUSE))),
            });
        let is_over = match waiting {
            Waiting::Pause(pause) => {
                ready!(pause.as_mut().poll(cx));
                true
            }
            Waiting::Watch(second) => {
                let mut guard = ready!(second.poll_write_ready(cx))?;
                guard.clear_ready();
                // The runtime reports an error of the socket as its end, for as long as it watches the descriptor.
                guard.ready().is_write_closed()
            }
        };
        if is_over {
            self.end();
        }
        Poll::Ready(Ok(()))
    }

    /// Closes the second descriptor, because nothing is left to send.
    pub fn end(&mut self) {
        self.0 = None;
    }

    /// Whether it waits, or keeps the second descriptor for the next wait.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::poll_fn,
        net::UdpSocket,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering::Relaxed},
        },
        task::Wake,
    };

    use tokio::time::timeout;

    use super::*;

    /// Counts how often its task is woken.
    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_free_descriptor_a_full_socket_is_tried_again_after_a_pause_and_not_at_once() {
        let (mut room, wakes) = (RoomWait::<UdpSocket>::default(), Arc::<Wakes>::default());
        let waker = wakes.clone().into();
        let none_left = || Err(io::Error::from_raw_os_error(libc::EMFILE));
        let mut poll = || room.poll(&mut Context::from_waker(&waker), none_left);
        assert!(poll().is_pending());
        tokio::time::sleep(NO_DESCRIPTOR_PAUSE - Duration::from_millis(1)).await;
        assert!(poll().is_pending() && wakes.0.load(Relaxed) == 0, "the thread would spin");
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(wakes.0.load(Relaxed) == 1 && poll().is_ready());
        assert!(poll().is_pending(), "each further try has its own pause");
    }

    #[tokio::test]
    async fn a_wait_opens_the_second_descriptor_and_its_end_closes_it() {
        let socket = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let (mut room, mut opened) = (RoomWait::default(), 0);
        for waits in 1..=2 {
            let wait = poll_fn(|cx| {
                room.poll(cx, || {
                    opened += 1;
                    socket.try_clone()
                })
            });
            timeout(Duration::from_secs(60), wait).await.expect("this socket has room").unwrap();
            assert!(room.is_open());
            room.end();
            assert!(!room.is_open());
            assert_eq!(opened, waits);
        }
    }
}
