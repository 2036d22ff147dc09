//! The head of each payload of the generator, which identifies it.

use std::{sync::OnceLock, time::Instant};

/// Bytes of UDP payload, as in other publications' figures.
pub const PAYLOAD_BYTES: usize = 1_200;

/// The head of each payload; what follows is padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The measurement that it belongs to: late payloads of an earlier one are not counted.
    pub trial: u32,
    /// Index of the tunnel.
    pub tunnel: u32,
    /// Counts from 0 for each tunnel and direction.
    pub sequence: u64,
    /// When it was sent, by [`now_ns`].
    pub sent_ns: u64,
}

impl Head {
    /// The length of a head in bytes.
    pub const BYTES: usize = 24;

    /// Writes the head to the front of `payload`.
    pub fn write(&self, payload: &mut [u8; PAYLOAD_BYTES]) {
        payload[..4].copy_from_slice(&self.trial.to_be_bytes());
        payload[4..8].copy_from_slice(&self.tunnel.to_be_bytes());
        payload[8..16].copy_from_slice(&self.sequence.to_be_bytes());
        payload[16..24].copy_from_slice(&self.sent_ns.to_be_bytes());
    }

    /// Reads the head of a payload. Returns `None` if the payload is too short to be one of ours.
    #[must_use]
    pub fn read(payload: &[u8]) -> Option<Self> {
        let (trial, rest) = payload.split_first_chunk()?;
        let (tunnel, rest) = rest.split_first_chunk()?;
        let (sequence, rest) = rest.split_first_chunk()?;
        let (sent_ns, _) = rest.split_first_chunk()?;
        Some(Self {
            trial: u32::from_be_bytes(*trial),
            tunnel: u32::from_be_bytes(*tunnel),
            sequence: u64::from_be_bytes(*sequence),
            sent_ns: u64::from_be_bytes(*sent_ns),
        })
    }
}

/// Returns the nanoseconds of the monotonic clock since the first call.
#[must_use]
pub fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_as_it_was_written_and_what_is_too_short_has_none() {
        let head = Head { trial: 1, tunnel: 2, sequence: 3 << 40, sent_ns: u64::MAX };
        let mut payload = [0; PAYLOAD_BYTES];
        head.write(&mut payload);
        assert_eq!(Head::read(&payload), Some(head));
        assert_eq!(Head::read(&payload[..Head::BYTES]), Some(head));
        assert_eq!(Head::read(&payload[..Head::BYTES - 1]), None);
    }
}
