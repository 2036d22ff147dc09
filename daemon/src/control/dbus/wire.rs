//! A bus for tests, which never answers.

use std::os::fd::OwnedFd;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use zbus::{
    Message,
    connection::{
        Builder,
        socket::{ReadHalf, Socket, Split, WriteHalf},
    },
};

/// A connection to a bus.
struct Wire(Incoming, Outgoing);

#[derive(Debug)]
struct Incoming(UnboundedReceiver<Message>);

#[derive(Debug)]
struct Outgoing(UnboundedSender<Message>);

impl Socket for Wire {
    type ReadHalf = Incoming;
    type WriteHalf = Outgoing;

    fn split(self) -> Split<Incoming, Outgoing> {
        Split::new(self.0, self.1)
    }
}

#[tonic::async_trait]
impl ReadHalf for Incoming {
    async fn receive_message(&mut self, _: u64, _: &mut Vec<u8>, _: &mut Vec<OwnedFd>) -> zbus::Result<Message> {
        match self.0.recv().await {
            Some(message) => Ok(message),
            None => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl WriteHalf for Outgoing {
    async fn send_message(&mut self, message: &Message) -> zbus::Result<()> {
        _ = self.0.send(message.clone());
        Ok(())
    }

    async fn close(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns a connection to a bus, a sender of messages to it, and a receiver of the messages that it sends.
pub(super) fn silent_bus() -> (Builder<'static>, UnboundedSender<Message>, UnboundedReceiver<Message>) {
    let ((calls, arriving), (leaving, said)) = (unbounded_channel(), unbounded_channel());
    let guid = "0123456789abcdef0123456789abcdef";
    (Builder::authenticated_socket(Wire(Incoming(arriving), Outgoing(leaving)), guid), calls, said)
}
