//! Floods: worthless packets for a listener, as fast as one core sends them.

use std::{
    io::IoSlice,
    iter::repeat_with,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags, sendmmsg};
use serde::Deserialize;

use crate::random::Random;

/// A kind of worthless packets. All go to a listener.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Flood {
    /// Random bytes.
    Random,
    /// Short headers with connection IDs that look like ours except for their tags.
    ForgedIds,
    /// Initials that cannot be decrypted.
    Initials,
}

/// How many different payloads there are.
const PAYLOADS: usize = 1_024;

/// Messages per system call.
const BATCH: usize = 64;

/// Bytes of payloads without a required size: small ones allow more packets.
const SMALL_BYTES: usize = 64;

/// Bytes of Initials, the fewest that a server accepts (RFC 9000 §14.1).
const INITIAL_BYTES: usize = 1_200;

/// The longest flood.
const LONGEST: Duration = Duration::from_secs(30);

/// Floods `to` from this thread until `over` is set, and returns how many packets the kernel accepted and in how long.
///
/// # Errors
/// When no packet could be sent to `to`.
pub fn send(flood: Flood, to: SocketAddr, seed: u64, over: &AtomicBool) -> Result<(u64, Duration)> {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(to)?;
    let payloads = payloads(flood, seed);
    let parts: Vec<_> = payloads.iter().map(|payload| [IoSlice::new(payload)]).collect();
    let mut controls: Vec<_> = parts.iter().map(|_| SendAncillaryBuffer::default()).collect();
    let messages = parts.iter().zip(&mut controls);
    let mut messages: Vec<_> = messages.map(|(part, control)| MMsgHdr::new(part, control)).collect();
    let (begun, mut sent) = (Instant::now(), 0);
    while !over.load(Relaxed) && begun.elapsed() < LONGEST {
        for batch in messages.chunks_mut(BATCH) {
            // Packets that the kernel does not accept are lost, as in a network.
            sent += sendmmsg(&socket, batch, SendFlags::empty()).map_or(0, |taken| taken as u64);
        }
    }
    ensure!(sent > 0, "nothing could be sent to {to}");
    Ok((sent, begun.elapsed()))
}

/// The payloads, which are sent in turns.
fn payloads(flood: Flood, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random::new(seed, 4);
    let bytes = if flood == Flood::Initials { INITIAL_BYTES } else { SMALL_BYTES };
    let payload = || {
        let mut payload: Vec<_> = (0..bytes).map(|_| random.below(256) as u8).collect();
        match flood {
            Flood::Random => {}
            Flood::ForgedIds => {
                payload[0] = 0x40 | payload[0] & 0x3f;
                // Any config, and the same length as in our own IDs.
                payload[1] = payload[1] & 0xe0 | 0x0b;
            }
            Flood::Initials => {
                // An ID of eight bytes for us, none for the sender, no token, and the length of what follows.
                payload[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
                payload[14..16].fill(0);
                payload[16..18].copy_from_slice(&(0x4000 | (INITIAL_BYTES - 18) as u16).to_be_bytes());
            }
        }
        payload
    };
    repeat_with(payload).take(PAYLOADS).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, thread};

    use super::*;

    #[test]
    fn payloads_are_what_they_are_called_and_all_different() {
        for (flood, bytes, mask, first) in
            [(Flood::Random, 64, 0, 0), (Flood::ForgedIds, 64, 0xc0, 0x40), (Flood::Initials, 1_200, 0xf0, 0xc0)]
        {
            let payloads = payloads(flood, 1);
            assert!(payloads.iter().all(|payload| payload.len() == bytes && payload[0] & mask == first), "{flood:?}");
            assert_eq!(payloads.iter().collect::<HashSet<_>>().len(), PAYLOADS);
        }
    }

    #[test]
    fn packets_of_a_flood_arrive_until_it_is_over() {
        let listener = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (to, over) = (listener.local_addr().unwrap(), AtomicBool::new(false));
        thread::scope(|scope| {
            let flood = scope.spawn(|| send(Flood::ForgedIds, to, 1, &over).unwrap());
            let mut payload = [0; 2_048];
            for expected in &payloads(Flood::ForgedIds, 1)[..100] {
                let len = listener.recv(&mut payload).unwrap();
                assert_eq!(payload[..len], expected[..]);
            }
            over.store(true, Relaxed);
            assert!(flood.join().unwrap().0 >= 100);
        });
    }
}
