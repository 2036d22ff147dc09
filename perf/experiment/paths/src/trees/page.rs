//! A page while it loads: the resources found so far, their paths, and the bytes that have arrived.

use std::collections::{BTreeMap, VecDeque};

use instruments::random::Random;
use plan::{
    paths::{Links, Path},
    trees::{Page, ResourceKind},
};
use sched::path::{self as placement, PathChoice, Placed, Placement, StreamProfile};

use super::{
    super::{
        link::Link,
        simulator::Sender,
        strategy::{Order, Rule, Strategy},
        stream::{Sending, Stream},
        stream_bytes_per_sec,
    },
    browser,
    setting::Setting,
};

/// One resource.
#[derive(Clone, Debug)]
pub(super) struct Item {
    kind: ResourceKind,
    /// The usual size of such a resource. The client knows only this before the answer begins.
    expected_bytes: u64,
    bytes: u64,
    /// The resource that refers to it, and the fraction of that resource that has to arrive first, from 0 to 1.
    found: Option<(usize, f64)>,
    blocks_render: bool,
    is_divisible: bool,
}

impl Item {
    fn goes_first(&self) -> bool {
        self.blocks_render || self.kind == ResourceKind::Document
    }
}

/// Returns the resources of a page, each with its own size. The document is the first.
pub(super) fn items(page: &Page, spread: f64, random: &mut Random) -> Vec<Item> {
    let mut items = Vec::new();
    let mut places = BTreeMap::new();
    for resource in &page.resources {
        places.insert(resource.name.as_str(), items.len());
        let last = resource.to_pct.unwrap_or(resource.at_pct);
        for number in 0..resource.count {
            let step = (last - resource.at_pct) / f64::from(resource.count.max(2) - 1);
            let at = (resource.at_pct + step * f64::from(number)) / 100.0;
            let factor = 1.0 + spread * (2.0 * random.share() - 1.0);
            items.push(Item {
                kind: resource.kind,
                expected_bytes: resource.bytes,
                bytes: ((resource.bytes as f64 * factor) as u64).max(1),
                found: places.get(resource.after.as_str()).map(|parent| (*parent, at)),
                blocks_render: resource.blocks_render,
                is_divisible: resource.divisible,
            });
        }
    }
    items
}

/// How paths are chosen, and in which order streams are sent.
#[derive(Clone, Debug)]
pub(super) enum Placing {
    /// Packet by packet, as MPQUIC.
    LowestRtt {
        /// Whether streams are sent by the priorities of requests, or take turns.
        by_signals: bool,
    },
    /// Packet by packet, as SA-ECF.
    SaEcf {
        /// Whether streams share by priority, or take turns.
        by_priority: bool,
    },
    /// Stream by stream by the server, which knows all sizes; the streams of a path share it by lottery.
    FStream,
    /// Stream by stream by the client.
    Paced {
        /// The resources that may be requested in ranges.
        divided: Divided,
    },
    /// The document and the render-blocking resources over the first path, the others over the second, which may be the same path.
    ByGroup([usize; 2]),
}

/// Which resources may be requested in ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Divided {
    /// None.
    None,
    /// The resources that the plan calls divisible.
    AsPlanned,
    /// All but the document, which the browser reads while it arrives.
    AllButTheDocument,
}

/// A client's estimate of a sender's congestion window: the packets that arrive within a round trip.
#[derive(Clone, Debug, Default)]
struct Window {
    lately_ns: VecDeque<u64>,
    most: usize,
}

impl Window {
    fn note(&mut self, now_ns: u64, rtt_ns: u64) {
        self.lately_ns.push_back(now_ns);
        while self.lately_ns.front().is_some_and(|arrived| arrived + rtt_ns < now_ns) {
            self.lately_ns.pop_front();
        }
        self.most = self.most.max(self.lately_ns.len());
    }

    /// Estimates how many packets the next round trip may carry: twice as many in slow start, and at least the initial window.
    fn packets(&self, links: &Links) -> u64 {
        (2 * self.most as u64).max(links.initial_window.into())
    }
}

/// The loading times of one page, in milliseconds from the first request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Loaded {
    /// Until the last render-blocking resource has arrived.
    pub(super) render_ms: f64,
    /// Until the whole page has arrived.
    pub(super) load_ms: f64,
}

/// A page that is being loaded.
pub(super) struct Loader<'a> {
    setting: &'a Setting<'a>,
    items: &'a [Item],
    placing: Placing,
    strategy: Strategy,
    /// By stream: its resource, and the expected bytes of this stream.
    parts: Vec<(usize, u64)>,
    /// By path: the estimate of its sender's window.
    windows: Vec<Window>,
    /// By resource: its streams; none before it is requested.
    streams: Vec<Vec<usize>>,
    ended_ns: Vec<Option<u64>>,
}

impl<'a> Loader<'a> {
    pub(super) fn new(setting: &'a Setting<'a>, items: &'a [Item], placing: Placing) -> Self {
        let strategy = match &placing {
            Placing::LowestRtt { by_signals: true } => Strategy::new(Rule::LowestRtt, Order::Signals),
            Placing::LowestRtt { by_signals: false } => Strategy::new(Rule::LowestRtt, Order::Turns),
            Placing::SaEcf { by_priority: true } => Strategy::new(Rule::SaEcf, Order::Priority),
            Placing::SaEcf { by_priority: false } => Strategy::new(Rule::SaEcf, Order::Turns),
            Placing::FStream => Strategy::new(Rule::Pinned, Order::Lottery),
            Placing::Paced { .. } | Placing::ByGroup(_) => Strategy::new(Rule::Pinned, Order::Signals),
        };
        let (streams, ended_ns) = (vec![Vec::new(); items.len()], vec![None; items.len()]);
        let windows = vec![Window::default(); setting.cell.paths.len()];
        Self { setting, items, placing, strategy, parts: Vec::new(), windows, streams, ended_ns }
    }

    /// Returns the loading times, or `None` while a resource is missing.
    pub(super) fn loaded(&self) -> Option<Loaded> {
        let ends: Vec<(u64, bool)> = self
            .items
            .iter()
            .zip(&self.ended_ns)
            .map(|(item, ended_ns)| Some(((*ended_ns)?, item.blocks_render)))
            .collect::<Option<_>>()?;
        let last = |only_blocking: bool| {
            let ends = ends.iter().filter(|(_, blocks)| *blocks || !only_blocking);
            ends.map(|(end, _)| *end).max().unwrap_or_default() as f64 / 1e6
        };
        Some(Loaded { render_ms: last(true), load_ms: last(false) })
    }

    /// Requests resources at the same time, and returns their streams.
    pub(super) fn ask(&mut self, now_ns: u64, found: &[usize], streams: &[Sending], links: &[Link]) -> Vec<Stream> {
        let choices = self.choices(found, streams, links);
        let mut asked = Vec::new();
        for (item, choice) in found.iter().zip(choices) {
            let Item { kind, expected_bytes, bytes, .. } = self.items[*item];
            let parts = match choice {
                None => vec![(None, bytes, expected_bytes)],
                Some(PathChoice::One(path) | PathChoice::Copies([path, _])) => {
                    vec![(Some(path), bytes, expected_bytes)]
                }
                Some(PathChoice::Ranges(ranges)) => self.ranges(*item, &ranges),
            };
            for (path, bytes, expected_bytes) in parts {
                let browser = self.setting.browser;
                self.streams[*item].push(self.parts.len());
                self.parts.push((*item, expected_bytes));
                asked.push(Stream {
                    of: *item,
                    packets: bytes.div_ceil(self.setting.plan.links.payload_bytes) as usize,
                    weight: browser::priority(browser, kind),
                    begins_ns: now_ns + self.request_ns(path),
                    path,
                    signal: browser::signal(browser, kind),
                });
            }
        }
        asked
    }

    /// Chooses a path for each resource. Returns `None` for it if each packet is placed separately.
    fn choices(&self, found: &[usize], streams: &[Sending], links: &[Link]) -> Vec<Option<PathChoice>> {
        let (placement, divided) = match &self.placing {
            Placing::LowestRtt { .. } | Placing::SaEcf { .. } => return vec![None; found.len()],
            Placing::ByGroup([first, others]) => {
                let path = |item: &Item| if item.goes_first() { *first } else { *others };
                return found.iter().map(|item| Some(PathChoice::One(path(&self.items[*item])))).collect();
            }
            Placing::FStream => (Placement::FStream, Divided::None),
            Placing::Paced { divided } => (Placement::Paced, *divided),
        };
        let request = |item: &usize| {
            let item = &self.items[*item];
            let bytes = if placement == Placement::FStream { item.bytes } else { item.expected_bytes };
            let Placed { bytes, weight, precedence } = self.part(placement, item.kind, bytes);
            let is_divisible = match divided {
                Divided::None => false,
                Divided::AsPlanned => item.is_divisible,
                Divided::AllButTheDocument => item.kind != ResourceKind::Document,
            };
            StreamProfile { bytes, weight, precedence, is_urgent: false, is_idempotent: true, is_divisible }
        };
        let requests: Vec<_> = found.iter().map(request).collect();
        let choices = placement::place_all(placement, &requests, &mut self.views(placement, streams, links), 0);
        choices.into_iter().map(Some).collect()
    }

    /// Describes the paths for placing resources, with the bytes that were requested and have not yet arrived.
    fn views(&self, placement: Placement, streams: &[Sending], links: &[Link]) -> Vec<placement::CandidatePath> {
        let plan = self.setting.plan;
        let view = |(place, (path, link)): (usize, (&Path, &Link))| {
            let mut view = placement::CandidatePath {
                smoothed_rtt_ns: link.smoothed_ns() as u64,
                min_rtt_ns: (path.rtt_ms * 1e6) as u64,
                bytes_per_sec: stream_bytes_per_sec(path, &plan.links),
                window_bytes: self.windows[place].packets(&plan.links) * plan.links.payload_bytes,
                // The edge estimates this in the same way (`PathView` in `uplink::path`).
                lead_ns: link.smoothed_ns() as u64 / 2,
                ..placement::CandidatePath::default()
            };
            let open =
                streams.iter().zip(&self.parts).filter(|(it, _)| it.path == Some(place) && it.ended_ns.is_none());
            for (stream, (item, expected_bytes)) in open {
                // The client learns the stream's length with its first bytes.
                let left = stream.missing as u64 * plan.links.payload_bytes;
                let left = if stream.missing == stream.packets { *expected_bytes } else { left };
                view.placed.push(self.part(placement, self.items[*item].kind, left));
            }
            view
        };
        self.setting.cell.paths.iter().zip(links).enumerate().map(view).collect()
    }

    /// Describes so many bytes of a resource of this kind for placements. FStream knows weights only.
    fn part(&self, placement: Placement, kind: ResourceKind, bytes: u64) -> Placed {
        let browser = self.setting.browser;
        match placement {
            Placement::FStream => Placed::by_weight(bytes, browser::priority(browser, kind)),
            _ => {
                let (weight, precedence) = (browser::share(browser, kind), browser::precedence(browser, kind));
                Placed { bytes, weight, precedence }
            }
        }
    }

    /// Divides a resource by ranges that were made for its expected size. The last range takes up the difference from the real
    /// size.
    fn ranges(&self, item: usize, ranges: &[placement::split::ByteRange]) -> Vec<(Option<usize>, u64, u64)> {
        let bytes = self.items[item].bytes;
        let last = ranges.len().saturating_sub(1);
        let part = |(at, range): (usize, &placement::split::ByteRange)| {
            let end = if at == last { bytes } else { bytes.min(range.offset + range.bytes) };
            (Some(range.path), end.saturating_sub(range.offset), range.bytes)
        };
        ranges.iter().enumerate().map(part).filter(|(_, bytes, _)| *bytes > 0).collect()
    }

    /// Returns how long a request takes: over its stream's path if the client has placed it, otherwise over the shortest path.
    fn request_ns(&self, path: Option<usize>) -> u64 {
        let paths = &self.setting.cell.paths;
        let way_ns = |path: &Path| (path.rtt_ms * 1e6) as u64 / 2;
        match (&self.placing, path) {
            (Placing::Paced { .. } | Placing::ByGroup(_), Some(path)) => way_ns(&paths[path]),
            _ => paths.iter().map(way_ns).min().unwrap_or_default(),
        }
    }
}

impl Sender for Loader<'_> {
    fn next(
        &mut self,
        now_ns: u64,
        streams: &[Sending],
        links: &[Link],
        random: &mut Random,
    ) -> Option<(usize, usize)> {
        self.strategy.next(now_ns, streams, links, random)
    }

    fn progressed(&mut self, now_ns: u64, stream: usize, streams: &[Sending], links: &[Link]) -> Vec<Stream> {
        if let Some(path) = streams[stream].path {
            let rtt_ns = (self.setting.cell.paths[path].rtt_ms * 1e6) as u64;
            self.windows[path].note(now_ns, rtt_ns);
        }
        let (item, _) = self.parts[stream];
        let is_whole = self.streams[item].iter().all(|part| streams[*part].ended_ns.is_some());
        if is_whole {
            self.ended_ns[item] = Some(now_ns);
        }
        // A browser reads a document up to the first gap.
        let read = match self.streams[item][..] {
            _ if is_whole => 1.0,
            [only] => streams[only].in_order as f64 / streams[only].packets as f64,
            _ => 0.0,
        };
        let is_found = |(at, other): &(usize, &Item)| {
            self.streams[*at].is_empty() && other.found.is_some_and(|(parent, part)| parent == item && read >= part)
        };
        let found: Vec<usize> = self.items.iter().enumerate().filter(is_found).map(|(at, _)| at).collect();
        if found.is_empty() { Vec::new() } else { self.ask(now_ns, &found, streams, links) }
    }
}
