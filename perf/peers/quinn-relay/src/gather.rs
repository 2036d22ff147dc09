//! Gathers successive payloads for the same target into messages that the kernel segments (GSO).

use std::sync::Arc;

use bytes::Bytes;

use crate::socket::TargetSocket;

/// The most bytes of one message: below what a UDP packet can carry over IPv4 and IPv6.
const MAX_MESSAGE_BYTES: usize = 65_000;

/// A run of payloads for one target. All have the same size, except that the last may be shorter.
#[derive(Default)]
pub struct Run {
    /// The quarter stream ID of the tunnel, and its socket.
    tunnel: Option<(u64, Arc<TargetSocket>)>,
    payloads: Vec<Bytes>,
    bytes: usize,
    /// Payloads side by side, for the kernel.
    message: Vec<u8>,
}

impl Run {
    /// Returns whether the run is of this tunnel, so that its socket need not be looked up.
    pub fn is_of(&self, quarter: u64) -> bool {
        self.tunnel.as_ref().is_some_and(|(current, _)| *current == quarter)
    }

    /// Sends the current run and begins one for another tunnel.
    pub fn begin(&mut self, quarter: u64, socket: Arc<TargetSocket>) {
        self.flush();
        self.tunnel = Some((quarter, socket));
    }

    /// Adds a payload for the current tunnel, after sending the current run if they do not fit together.
    pub fn push(&mut self, payload: Bytes) {
        let most = self.tunnel.as_ref().map_or(1, |(_, socket)| socket.max_segments());
        let sizes = self.payloads.first().zip(self.payloads.last()).map(|(first, last)| (first.len(), last.len()));
        if !sizes.is_none_or(|(first, last)| joins(first, last, payload.len()))
            || self.payloads.len() >= most
            || self.bytes + payload.len() > MAX_MESSAGE_BYTES
        {
            self.flush();
        }
        self.bytes += payload.len();
        self.payloads.push(payload);
    }

    /// Sends the gathered payloads.
    pub fn flush(&mut self) {
        if let Some((_, socket)) = &self.tunnel {
            match &self.payloads[..] {
                [] => {}
                [payload] => socket.send(payload),
                [first, ..] => {
                    self.message.clear();
                    self.payloads.iter().for_each(|payload| self.message.extend_from_slice(payload));
                    socket.send_segments(&self.message, first.len());
                }
            }
        }
        self.payloads.clear();
        self.bytes = 0;
    }

    /// Sends the gathered payloads and forgets the tunnel, which may end before the next payload.
    pub fn end(&mut self) {
        self.flush();
        self.tunnel = None;
    }
}

/// Returns whether a payload may follow in a run whose first and last payload have these sizes.
fn joins(first: usize, last: usize, next: usize) -> bool {
    last == first && next <= first && next > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_payload_ends_a_run() {
        assert!(joins(1200, 1200, 1200) && joins(1200, 1200, 7));
        assert!(!joins(1200, 7, 7) && !joins(1200, 1200, 1201) && !joins(1200, 1200, 0) && !joins(0, 0, 0));
    }
}
