//! When a stream would end on a path: what placements compare.
//!
//! All times are nanoseconds from now until the last byte has arrived, as `f64`, so that extreme sizes and rates neither
//! overflow nor round to nothing.

use super::{
    candidate::CandidatePath,
    precedence::EarlierStream,
    stream::{Placed, StreamProfile},
};

/// FStream's equations 1 and 2: `SIZE / b + RTT / 2` with `b = PRT / (SUM + PRT) · BW`, where SUM is the weight of all streams
/// on the path.
///
/// The equations assume that every stream on the path lasts as long as the new one. They ignore the backlog, and precedence: behind
/// more urgent streams, a stream would never end.
#[must_use]
pub fn fstream_ns(path: &CandidatePath, bytes: u64, weight: u32) -> f64 {
    let own = f64::from(weight.max(1));
    let sum: f64 = path.placed.iter().map(|placed| f64::from(placed.weight.max(1))).sum();
    let share = own / (sum + own) * rate(path);
    bytes as f64 / share + path.smoothed_rtt_ns as f64 / 2.0
}

/// The end of a stream that shares the path by weight with the streams on it (generalized processor sharing: a stream that
/// ends leaves its share to the others), behind the backlog.
///
/// Until a stream of `s` bytes and weight `w` has ended, another of `b` bytes and weight `v` has sent `v·s/w`, or all of
/// its `b` if that is less. So the path has to carry `backlog + s + Σ min(b, v·s/w)` from `lead` on, and idles while its
/// window is smaller than the bytes it carries in a round trip (`pauses_ns`). Exact if nothing is placed there later and
/// nothing is lost.
///
/// The stream waits for all bytes of streams that go before it by their [precedence](super::precedence::Precedence): more urgent
/// streams, and earlier streams of its urgency that are sent to their end. Streams that go after it do not delay it.
#[must_use]
pub fn finish_ns(path: &CandidatePath, stream: Placed) -> f64 {
    let Placed { bytes, weight, precedence } = stream;
    let turns = bytes as f64 / f64::from(weight.max(1));
    let others = path.placed.iter().map(|placed| match placed.precedence.before(&precedence) {
        EarlierStream::GoesFirst => placed.bytes as f64,
        EarlierStream::Shares => (placed.bytes as f64).min(f64::from(placed.weight.max(1)) * turns),
        EarlierStream::Waits => 0.0,
    });
    ends_ns(path, others.sum::<f64>() + bytes as f64)
}

/// When `bytes` of a request would end, plus the cost of the path.
pub(super) fn request_ns(path: &CandidatePath, request: &StreamProfile, bytes: u64) -> f64 {
    finish_ns(path, request.part(bytes)) + path.cost_ns as f64
}

/// Like [`finish_ns`], but with equal shares for all streams, which is the result of schedulers without weights.
#[must_use]
pub fn fair_ns(path: &CandidatePath, bytes: u64) -> f64 {
    let others = path.placed.iter().map(|placed| placed.bytes.min(bytes) as f64);
    ends_ns(path, others.sum::<f64>() + bytes as f64)
}

/// When `bytes` behind the backlog have arrived.
fn ends_ns(path: &CandidatePath, bytes: f64) -> f64 {
    let carried = path.backlog_bytes as f64 + bytes;
    path.lead_ns as f64 + carried / rate(path) + pauses_ns(path, carried) + path.smoothed_rtt_ns as f64 / 2.0
}

/// How long a path idles in slow start (RFC 9002 §7.3.1) before it has carried `bytes`: each round trip carries one window
/// and idles for the rest, and the next window is twice as large. The round trip is the shortest one if that is known: data
/// waiting in the path's queue is no reason to idle.
fn pauses_ns(path: &CandidatePath, bytes: f64) -> f64 {
    let rtt_ns = path.shortest_rtt_ns() as f64;
    let (mut window_ns, mut left_ns) = (path.window_bytes as f64 / rate(path), bytes / rate(path));
    let mut pauses = 0.0;
    // The window doubles each time, so there are few rounds.
    while window_ns > 0.0 && window_ns < rtt_ns && left_ns > window_ns {
        pauses += rtt_ns - window_ns;
        left_ns -= window_ns;
        window_ns *= 2.0;
    }
    pauses
}

/// Bytes per nanosecond.
fn rate(path: &CandidatePath) -> f64 {
    path.bytes_per_sec.max(1) as f64 / 1e9
}
