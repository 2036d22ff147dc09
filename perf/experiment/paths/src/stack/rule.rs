//! How MPTCP in Linux chooses the path of data (`mptcp_subflow_get_send` and `__subflow_push_pending` in net/mptcp/protocol.c of 6.12):
//! not packet by packet, but in bursts, which it hands to the TCP queue of a subflow.

use instruments::random::Random;
use plan::paths::Links;

use super::super::{link::Link, simulator::Sender, stream::Sending};

/// `MPTCP_SEND_BURST_SIZE`: 64 KiB less the largest headers.
const BURST_BYTES: u64 = 65_428;

/// MPTCP keeps the application's data in pieces of a page fragment (32 KiB) with a header of 40 bytes (`struct mptcp_data_frag`), and
/// hands over whole pieces.
const PIECE_BYTES: u64 = 32_728;

/// The memory that a subflow's send buffer allows for each packet of two windows: at first, and again whenever the window has room for
/// more packets than the buffer holds (`tcp_sndbuf_expand` and `tcp_should_expand_sndbuf` in net/ipv4/tcp_input.c). A packet of TCP
/// takes that much; MPTCP's packets take little more than their payload.
const BUFFER_BYTES_PER_PACKET: u64 = 4_352;

/// The scheduler `default` of the kernel's MPTCP. Each burst goes to the subflow that will be the first to have sent its queue, at its
/// average pacing rate. If the queue of that subflow is full, the scheduler hands over nothing, however much room other subflows have.
pub(super) struct KernelDefault {
    piece_packets: u64,
    payload_bytes: u64,
    paths: Vec<Subflow>,
}

#[derive(Clone, Copy, Default)]
struct Subflow {
    /// Packets that the scheduler has handed to the subflow.
    given: u64,
    /// `avg_pacing_rate`, in packets per nanosecond.
    pace: f64,
    /// The most packets that its send buffer holds.
    buffer: u64,
}

impl KernelDefault {
    /// Makes a scheduler that knows these initial pacing rates of its subflows.
    pub(super) fn new(links: &Links, pacing_mbit: &[f64]) -> Self {
        let packets_per_ns = |mbit: &f64| mbit / 8e3 / links.payload_bytes as f64;
        let subflow = |mbit| Subflow { pace: packets_per_ns(mbit), ..Subflow::default() };
        Self {
            piece_packets: PIECE_BYTES.div_ceil(links.payload_bytes),
            payload_bytes: links.payload_bytes,
            paths: pacing_mbit.iter().map(subflow).collect(),
        }
    }

    /// Returns how many packets were handed to a path and are not yet acknowledged (`sk_wmem_queued`).
    fn queued(&self, path: usize, links: &[Link]) -> u64 {
        self.paths[path].given.saturating_sub(links[path].delivered())
    }

    /// Lets buffers grow, and hands over bursts while there is room.
    fn push(&mut self, streams: &[Sending], links: &[Link], now_ns: u64) {
        let sent_later: u64 =
            (0..links.len()).map(|path| self.queued(path, links).saturating_sub(links[path].in_flight())).sum();
        let waiting = streams.iter().filter(|stream| stream.has_data(now_ns)).map(|stream| stream.waiting() as u64);
        let mut left = waiting.sum::<u64>().saturating_sub(sent_later);
        for (path, link) in links.iter().enumerate() {
            let queued = self.queued(path, links);
            let subflow = &mut self.paths[path];
            if subflow.buffer == 0 || queued <= link.in_flight() && link.has_window() {
                let buffer = 2 * link.window() as u64 * BUFFER_BYTES_PER_PACKET / self.payload_bytes;
                subflow.buffer = subflow.buffer.max(buffer);
            }
        }
        while left > 0 {
            let Some(path) = self.soonest(links) else { return };
            let queued = self.queued(path, links);
            if queued >= self.paths[path].buffer {
                return;
            }
            let pieces = BURST_BYTES.div_ceil(PIECE_BYTES);
            let (weight, burst) = (queued as f64, (pieces * self.piece_packets) as f64);
            let now = links[path].pacing_packets_per_ns();
            let subflow = &mut self.paths[path];
            subflow.pace = (subflow.pace * weight + now * burst) / (weight + burst);
            for _ in 0..pieces {
                let piece = left.min(self.piece_packets);
                self.paths[path].given += piece;
                left -= piece;
                if self.queued(path, links) >= self.paths[path].buffer {
                    break;
                }
            }
        }
    }

    /// Returns the path whose queue is empty soonest. Among equals, the first wins.
    fn soonest(&self, links: &[Link]) -> Option<usize> {
        let lingers = |path: usize| self.queued(path, links) as f64 / self.paths[path].pace;
        (0..links.len()).min_by(|a, b| lingers(*a).total_cmp(&lingers(*b)))
    }
}

impl Sender for KernelDefault {
    /// A connection is one stream of bytes: streams follow each other. A lost packet is sent again on the path that lost it, whose
    /// queue still holds it; which of the lost packets goes there is left to chance.
    fn next(&mut self, now_ns: u64, streams: &[Sending], links: &[Link], _: &mut Random) -> Option<(usize, usize)> {
        self.push(streams, links, now_ns);
        let stream = (0..streams.len()).find(|at| streams[*at].has_data(now_ns))?;
        let may = |path: &usize| links[*path].has_window() && self.queued(*path, links) > links[*path].in_flight();
        (0..links.len()).find(may).map(|path| (stream, path))
    }
}

#[cfg(test)]
mod tests {
    use plan::{Any, paths::Links};

    use super::*;
    use crate::stream::Stream;

    #[test]
    fn bursts_go_where_the_queue_is_sent_soonest_and_wait_while_that_one_is_full() {
        let Any::Stack(plan) = Any::read("mptcp").unwrap() else { panic!("it is no plan of the stack") };
        // Five payloads make a piece and ten a burst;
        // a window of 10 packets makes a buffer of 13.
        let common = Links { initial_window: 10, payload_bytes: 6_546, ..plan.links };
        let link = |rtt_ms: u64| Link::new(1_000_000, rtt_ms * 1_000_000, rtt_ms as f64 * 1e6, &common);
        let links = [link(10), link(40)];
        let stream = Stream { of: 0, packets: 100, weight: 1, begins_ns: 5, path: None, signal: crate::BY_WEIGHT };
        let streams = [Sending::new(&stream, 2)];
        // 2 and 0.5 packets per millisecond, in Mbit/s.
        let mut rule = KernelDefault::new(&common, &[2.0 * 6.546 * 8.0, 0.5 * 6.546 * 8.0]);
        let given = |rule: &KernelDefault| [rule.paths[0].given, rule.paths[1].given];
        rule.push(&streams, &links, 4);
        assert_eq!(given(&rule), [0, 0], "nothing has been asked for");
        // The queues take 0 and 0 ms, then 5 and 0, then 5 and 20. A piece fills the first path. That path would still be free the
        // soonest, so the remaining data waits for it, although the second has room.
        rule.push(&streams, &links, 5);
        assert_eq!(given(&rule), [15, 10]);
        let mut random = Random::new(1, 1);
        assert_eq!(rule.next(5, &streams, &links, &mut random), Some((0, 0)), "the window is open");
    }
}
