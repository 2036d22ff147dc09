//! Simulates packets of several streams over several paths, event by event.
//!
//! One simulator runs packet schedulers and placements of whole streams, so that all use the same links, windows and losses;
//! only the [`Sender`] differs. The simulator reads no clock: a run is a function of its arguments and its seed.

use std::{cmp::Reverse, collections::BinaryHeap};

use instruments::random::Random;

use super::{
    link::Link,
    stream::{Piece, Sending, Stream},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Begin,
    Arrived { path: usize, stream: usize, number: usize },
    Acknowledged { path: usize, number: u64 },
    Probe { path: usize },
}

/// The decisions of a simulation: the order of packets, their paths, and further requests.
pub(super) trait Sender {
    /// Chooses the stream and the path of the next packet; `None` if no packet can be sent now.
    fn next(&mut self, now_ns: u64, streams: &[Sending], links: &[Link], random: &mut Random)
    -> Option<(usize, usize)>;

    /// Returns the streams that are requested because more of this one has arrived. They are appended to the list.
    fn progressed(&mut self, now_ns: u64, stream: usize, streams: &[Sending], links: &[Link]) -> Vec<Stream> {
        let _ = (now_ns, stream, streams, links);
        Vec::new()
    }
}

/// The outcome of the streams.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ended {
    /// When each stream had arrived in full.
    pub(super) ended_ns: Vec<u64>,
    /// By stream and path: packets sent.
    pub(super) sent: Vec<Vec<u64>>,
    /// Packets that routers dropped.
    pub(super) dropped: u64,
}

/// Simulated time after which streams that have not ended mean a fault of the simulator.
const LONGEST_NS: u64 = 3_600 * 1_000_000_000;

/// Sends all streams; returns when each has arrived in full. `None` if they do not end within an hour of simulated time.
pub(super) fn run(
    mut links: Vec<Link>,
    streams: &[Stream],
    sender: &mut impl Sender,
    random: &mut Random,
) -> Option<Ended> {
    let mut sending: Vec<_> = streams.iter().map(|stream| Sending::new(stream, links.len())).collect();
    let mut events: BinaryHeap<Reverse<(u64, Event)>> =
        streams.iter().map(|stream| Reverse((stream.begins_ns, Event::Begin))).collect();
    // The time for which each path's next probe timeout has been queued as an event.
    let mut probes: Vec<Option<u64>> = vec![None; links.len()];
    while let Some(Reverse((now_ns, event))) = events.pop() {
        if now_ns > LONGEST_NS {
            return None;
        }
        let mut lost = Vec::new();
        match event {
            Event::Begin => {}
            Event::Arrived { stream, number, .. } => {
                if sending[stream].arrive(now_ns, number) {
                    for asked in sender.progressed(now_ns, stream, &sending, &links) {
                        events.push(Reverse((asked.begins_ns, Event::Begin)));
                        sending.push(Sending::new(&asked, links.len()));
                    }
                }
            }
            Event::Acknowledged { path, number } => lost = links[path].acknowledged(now_ns, number),
            Event::Probe { path } => {
                probes[path] = None;
                if links[path].probe_at_ns().is_some_and(|due| due <= now_ns) {
                    lost = links[path].probe();
                }
            }
        }
        lost.into_iter().for_each(|piece| sending[piece.stream].lose(piece.number));
        if sending.iter().all(|stream| stream.ended_ns.is_some()) {
            break;
        }
        if !matches!(event, Event::Arrived { .. }) {
            while let Some((stream, path)) = sender.next(now_ns, &sending, &links, random) {
                let Some(number) = sending[stream].next() else { break };
                sending[stream].sent[path] += 1;
                let departure = links[path].send(now_ns, Piece { stream, number }, random);
                if let Some((arrived, acknowledged)) = departure.times {
                    events.push(Reverse((arrived, Event::Arrived { path, stream, number })));
                    events.push(Reverse((acknowledged, Event::Acknowledged { path, number: departure.number })));
                }
            }
            for (path, link) in links.iter().enumerate() {
                if let Some(due) = link.probe_at_ns().filter(|due| probes[path].is_none_or(|known| *due < known)) {
                    probes[path] = Some(due);
                    events.push(Reverse((due.max(now_ns + 1), Event::Probe { path })));
                }
            }
        }
    }
    let ended_ns = sending.iter().map(|stream| stream.ended_ns).collect::<Option<Vec<_>>>()?;
    let dropped = links.iter().map(|link| link.dropped).sum();
    Some(Ended { ended_ns, sent: sending.into_iter().map(|stream| stream.sent).collect(), dropped })
}
