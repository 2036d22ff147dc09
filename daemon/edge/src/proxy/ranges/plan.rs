//! Which bytes of an answer each fetcher asks for, and their order for the client. No IO.
//!
//! The answer begins as one part, which the first fetcher receives. Once a server has shown that it serves ranges (RFC 9110 §14), this
//! part is cut, and fetchers take further parts, within a window after the bytes that the client has taken. A fetcher that finds nothing
//! there takes over bytes from the fetcher that would end last, so that a path that becomes slow or fails does not hold up the client.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

/// How many bytes that the client has not taken the plan may hold or ask for. Two paths stay full if each carries at most an eighth of this
/// in a round trip.
pub const WINDOW_BYTES: u64 = 16 << 20;

/// The least capacity of a block of bytes that have arrived. A server decides how few bytes arrive at once, so that memory of its own for each
/// arrival could be many times as much as the window.
const BLOCK_BYTES: usize = 4 << 10;

/// A part of fewer bytes is not worth a request of its own.
const LEAST_BYTES: u64 = 128 << 10;

/// A fetcher that has nothing else to do takes over no fewer bytes of a part that is under way.
const RELIEF_BYTES: u64 = 16 << 10;

/// The length of the first part of a fetcher that is assumed to be as fast as the first one.
const FIRST_BYTES: u64 = 1 << 20;

/// How long the first fetcher should take until the first part of another fetcher. If this were less than the other one needs to begin, the
/// first fetcher would receive these bytes itself.
const LEAD: Duration = Duration::from_millis(500);

/// A shorter time shows no rate.
const SHORTEST: Duration = Duration::from_millis(5);

/// Names a fetcher.
pub type FetcherId = usize;

/// The parts of an answer.
pub struct RangePlan {
    length: u64,
    /// How many bytes the client has taken.
    taken: u64,
    /// By their first byte. They follow each other without gaps, from the byte that the client takes next.
    parts: BTreeMap<u64, Part>,
    fetchers: Vec<Fetcher>,
    /// Whether fetchers may take parts.
    is_divided: bool,
}

/// Consecutive bytes of the answer, which one fetcher receives, if any.
struct Part {
    /// The byte after its last.
    end: u64,
    /// The next byte to arrive.
    next: u64,
    /// What has arrived and the client has not taken, in blocks that are full except for the last one.
    arrived: VecDeque<BytesMut>,
}

impl Part {
    fn new(Range { start, end }: Range<u64>) -> Self {
        Self { end, next: start, arrived: VecDeque::new() }
    }

    fn rest(&self) -> u64 {
        self.end - self.next
    }

    /// Copies the next bytes.
    fn receive(&mut self, bytes: &[u8]) {
        self.next += bytes.len() as u64;
        let room = self.arrived.back().map_or(0, |last| last.capacity() - last.len());
        let (fit, rest) = bytes.split_at(room.min(bytes.len()));
        if let Some(last) = self.arrived.back_mut() {
            last.extend_from_slice(fit);
        }
        if !rest.is_empty() {
            let mut block = BytesMut::with_capacity(rest.len().max(BLOCK_BYTES));
            block.extend_from_slice(rest);
            self.arrived.push_back(block);
        }
    }
}

/// What is known of a fetcher.
#[derive(Default)]
struct Fetcher {
    /// Its assumed rate, in bytes per second, which counts until it has shown one.
    assumed: Option<f64>,
    /// Its rate in earlier parts, in bytes per second.
    bytes_per_sec: Option<f64>,
    /// How long its last request took to bring the first byte.
    wait: Duration,
    /// The first byte of its part.
    part: Option<u64>,
    /// When it asked for its part, when the first bytes of that arrived, and how many have arrived after these.
    asked: Option<Instant>,
    began: Option<Instant>,
    received: u64,
}

impl Fetcher {
    /// Returns its rate in the current part, if that tells one.
    fn current(&self, now: Instant) -> Option<f64> {
        let since = now.saturating_duration_since(self.began?);
        (since >= SHORTEST && self.received > 0).then(|| self.received as f64 / since.as_secs_f64())
    }

    /// Returns its rate. A path that has become slower shows that in the current part.
    fn rate(&self, now: Instant) -> Option<f64> {
        match (self.bytes_per_sec, self.current(now)) {
            (Some(earlier), Some(current)) => Some(earlier.min(current)),
            (earlier, current) => earlier.or(current).or(self.assumed),
        }
    }

    fn ask(&mut self, start: u64, now: Instant) {
        (self.part, self.asked, self.began, self.received) = (Some(start), Some(now), None, 0);
    }

    /// Notes that its part has ended.
    fn end(&mut self, now: Instant) {
        if let Some(current) = self.current(now) {
            self.bytes_per_sec = Some(self.bytes_per_sec.map_or(current, |earlier| (earlier + current) / 2.0));
        }
        (self.part, self.asked, self.began) = (None, None, None);
    }
}

impl RangePlan {
    /// Returns the plan of an answer of `length` bytes, which the first fetcher receives.
    #[must_use]
    pub fn new(length: u64, now: Instant) -> Self {
        let mut first = Fetcher::default();
        first.ask(0, now);
        let parts = BTreeMap::from([(0, Part::new(0..length))]);
        Self { length, taken: 0, parts, fetchers: vec![first], is_divided: false }
    }

    /// Adds a fetcher, with its assumed rate in bytes per second, if there is an estimate.
    pub fn add(&mut self, assumed: Option<f64>) -> FetcherId {
        self.fetchers.push(Fetcher { assumed, ..Fetcher::default() });
        self.fetchers.len() - 1
    }

    /// Returns the range by which a fetcher has to find out whether the server serves ranges: bytes that the first fetcher will probably not
    /// have received when that answer begins. `None` if the first fetcher will soon have all bytes.
    #[must_use]
    pub fn probe(&self, fetcher: FetcherId, now: Instant) -> Option<Range<u64>> {
        let part = self.parts.last_key_value()?.1;
        let rate = self.fetchers.first()?.rate(now).unwrap_or(0.0);
        let lead = (rate * LEAD.as_secs_f64()) as u64;
        let start = part.next + lead.clamp(FIRST_BYTES, WINDOW_BYTES / 2);
        let end = self.length.min(start + self.first_bytes(fetcher, now));
        (start + LEAST_BYTES <= end).then_some(start..end)
    }

    /// Hands a range, whose answer has begun, to a fetcher. Returns whether that succeeded: the first fetcher may have received some of it
    /// by now, and then nothing changes.
    pub fn divide(&mut self, fetcher: FetcherId, range: Range<u64>, now: Instant) -> bool {
        let Some((_, part)) = self.parts.range_mut(..range.start).next_back() else { return false };
        if part.next >= range.start || part.end < range.end {
            return false;
        }
        part.end = range.start;
        self.insert(range, fetcher, now);
        self.is_divided = true;
        true
    }

    /// Whether fetchers may take parts.
    #[must_use]
    pub fn is_divided(&self) -> bool {
        self.is_divided
    }

    fn insert(&mut self, range: Range<u64>, fetcher: FetcherId, now: Instant) {
        if let Some(of) = self.fetchers.get_mut(fetcher) {
            of.ask(range.start, now);
        }
        self.parts.insert(range.start, Part::new(range));
    }

    /// Gives a fetcher the range that it has to request next; `None` if there is none now.
    pub fn take(&mut self, fetcher: FetcherId, now: Instant) -> Option<Range<u64>> {
        if !self.is_divided {
            return None;
        }
        let wanted = self.wanted(fetcher, now);
        let range = self.abandoned(wanted).or_else(|| self.further(wanted)).or_else(|| self.relief(fetcher, now))?;
        self.insert(range.clone(), fetcher, now);
        Some(range)
    }

    /// Returns how many bytes to give a fetcher. All fetchers should take about equally long, so that none holds up the client.
    fn wanted(&self, fetcher: FetcherId, now: Instant) -> u64 {
        let Some(own) = self.fetchers.get(fetcher).and_then(|of| of.bytes_per_sec.and(of.rate(now))) else {
            return self.first_bytes(fetcher, now);
        };
        let share = own / (self.mean_rate(now) * self.fetchers.len() as f64).max(1.0);
        ((WINDOW_BYTES / 2) as f64 * share).clamp(LEAST_BYTES as f64, (WINDOW_BYTES / 4) as f64) as u64
    }

    /// Returns the length of the first part of a fetcher: one that is slower than the first one would hold up the client at the end.
    fn first_bytes(&self, fetcher: FetcherId, now: Instant) -> u64 {
        let rate = |fetcher: FetcherId| self.fetchers.get(fetcher).and_then(|of| of.rate(now));
        let share = rate(fetcher).zip(rate(0)).map_or(1.0, |(own, first)| own / first.max(1.0));
        ((FIRST_BYTES as f64 * share) as u64).clamp(LEAST_BYTES, FIRST_BYTES)
    }

    /// Returns the mean rate of the fetchers whose rates are known, in bytes per second.
    fn mean_rate(&self, now: Instant) -> f64 {
        let known: Vec<f64> = self.fetchers.iter().filter_map(|fetcher| fetcher.rate(now)).collect();
        known.iter().sum::<f64>() / known.len().max(1) as f64
    }

    /// Cuts up to `wanted` bytes from the first part that nobody fetches.
    fn abandoned(&mut self, wanted: u64) -> Option<Range<u64>> {
        let is_fetched = |start: &u64| self.fetchers.iter().any(|of| of.part == Some(*start));
        let (&start, part) = self.parts.iter().find(|(start, part)| part.rest() > 0 && !is_fetched(start))?;
        let end = part.end;
        self.parts.remove(&start);
        // A rest that is not worth a request goes along.
        let cut = if end - start < wanted + LEAST_BYTES { end } else { start + wanted };
        if cut < end {
            self.parts.insert(cut, Part::new(cut..end));
        }
        Some(start..cut)
    }

    /// Returns up to `wanted` bytes after all parts, within the window.
    fn further(&self, wanted: u64) -> Option<Range<u64>> {
        let start = self.parts.last_key_value().map_or(self.taken, |(_, part)| part.end);
        let wanted = wanted.min(self.length - start);
        (wanted > 0 && start + wanted <= self.taken + WINDOW_BYTES).then(|| start..start + wanted)
    }

    /// Cuts off the end of the part that will end last, if this fetcher would bring these bytes clearly earlier.
    fn relief(&mut self, fetcher: FetcherId, now: Instant) -> Option<Range<u64>> {
        let mean = self.mean_rate(now);
        let rate = |of: &Fetcher| of.rate(now).unwrap_or(mean).max(1.0);
        let own = self.fetchers.get(fetcher)?;
        let (own_rate, own_wait) = (rate(own), own.wait.as_secs_f64());
        // How long each part still takes. One that has not begun takes at least as long as it has waited already.
        let timed = self.fetchers.iter().filter_map(|of| {
            let start = of.part?;
            let part = self.parts.get(&start).filter(|part| part.rest() >= 2 * RELIEF_BYTES)?;
            let waited = match (of.began, of.asked) {
                (None, Some(asked)) => now.saturating_duration_since(asked).as_secs_f64(),
                _ => 0.0,
            };
            Some((start, part.rest() as f64 / rate(of) + waited, rate(of)))
        });
        let (start, time, of_rate) = timed.max_by(|one, other| one.1.total_cmp(&other.1))?;
        let part = self.parts.get_mut(&start)?;
        let share = (part.rest() as f64 * own_rate / (own_rate + of_rate)) as u64;
        let share = share.clamp(RELIEF_BYTES, part.rest() - RELIEF_BYTES);
        // The other fetcher has to connect anew.
        if own_wait + share as f64 / own_rate > 0.75 * time {
            return None;
        }
        let (cut, end) = (part.end - share, part.end);
        part.end = cut;
        Some(cut..end)
    }

    /// Returns how many bytes a fetcher may receive now. 0 means that it has to wait for the client, or that its part is complete.
    #[must_use]
    pub fn room(&self, fetcher: FetcherId) -> u64 {
        let part = self.fetchers.get(fetcher).and_then(|fetcher| self.parts.get(&fetcher.part?));
        part.map_or(0, |part| part.rest().min((self.taken + WINDOW_BYTES).saturating_sub(part.next)))
    }

    /// Whether the part of a fetcher has arrived.
    #[must_use]
    pub fn has_ended(&self, fetcher: FetcherId) -> bool {
        self.fetchers.get(fetcher).is_none_or(|fetcher| fetcher.part.is_none())
    }

    /// Copies the next bytes of a fetcher's part. Bytes after its end are discarded: another fetcher brings them.
    pub fn receive(&mut self, fetcher: FetcherId, bytes: &[u8], now: Instant) {
        let Some(of) = self.fetchers.get_mut(fetcher) else { return };
        let Some(part) = of.part.and_then(|start| self.parts.get_mut(&start)) else { return };
        let rest = usize::try_from(part.rest()).unwrap_or(usize::MAX);
        let bytes = &bytes[..bytes.len().min(rest)];
        part.receive(bytes);
        match of.began {
            // The first bytes may have waited together.
            None => {
                of.wait = of.asked.map_or(Duration::ZERO, |asked| now.saturating_duration_since(asked));
                of.began = Some(now);
            }
            Some(_) => of.received += bytes.len() as u64,
        }
        if part.rest() == 0 {
            of.end(now);
        }
    }

    /// Notes that a fetcher will bring no more of its part, so that others may take the rest.
    pub fn give_back(&mut self, fetcher: FetcherId, now: Instant) {
        let Some(of) = self.fetchers.get_mut(fetcher) else { return };
        let start = of.part;
        of.end(now);
        let Some(part) = start.and_then(|start| self.parts.get_mut(&start)) else { return };
        let (next, end) = (part.next, part.end);
        if start != Some(next) {
            part.end = next;
            self.parts.insert(next, Part::new(next..end));
        }
    }

    /// Returns the next bytes for the client, if they have arrived.
    pub fn pop(&mut self) -> Option<Bytes> {
        while let Some(mut first) = self.parts.first_entry() {
            if let Some(bytes) = first.get_mut().arrived.pop_front() {
                self.taken += bytes.len() as u64;
                return Some(bytes.freeze());
            }
            if first.get().rest() > 0 {
                return None;
            }
            first.remove();
        }
        None
    }

    /// Whether all bytes have arrived, though the client may not have taken them.
    #[must_use]
    pub fn has_arrived(&self) -> bool {
        let end = self.parts.last_key_value().map_or(self.taken, |(_, part)| part.end);
        end == self.length && self.parts.values().all(|part| part.rest() == 0)
    }

    /// Whether the client has taken everything.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.taken == self.length
    }
}

#[cfg(test)]
mod tests;
