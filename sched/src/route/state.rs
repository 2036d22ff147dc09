//! The state of the system when a request arrives: replicas, their load, and the way back to the client; and the
//! predictions made from it.

use super::{
    admitted::Commitment,
    curve::Curve,
    request::{RoutedRequest, Slo},
};

/// What the router knows of the system.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// Every replica of every model. A [`ModelChoice`](super::ModelChoice) names one by its index here.
    pub replicas: &'a [Replica],
    /// The requests that these replicas work on. Only [`RoutingPolicy::Considerate`](super::RoutingPolicy::Considerate)
    /// reads them; without them it counts no cost to others.
    pub admitted: &'a [Commitment],
    /// The expected number of the prompt's tokens in each replica's cache, in the order of `replicas`. A replica beyond the end has none.
    pub cached: &'a [u32],
    /// The way back to the requesting client.
    pub path: ClientPath,
}

impl State<'_> {
    /// Returns the expected number of the prompt's tokens in the cache of the replica with this index.
    #[must_use]
    pub fn cached_tokens(&self, replica: usize) -> u32 {
        self.cached.get(replica).copied().unwrap_or_default()
    }
}

/// An engine that serves one model: a process with its own batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replica {
    /// The index of the model. A replica of a model that the router does not know is never chosen.
    pub model: usize,
    /// A number shared by engines on the same GPU.
    pub group: u32,
    /// Whether requests can be sent there at all.
    pub usable: bool,
    /// The largest number of sequences that run at once; 0 counts as 1. Further requests wait in the engine, first come,
    /// first served.
    pub most_running: u32,
    /// Its current load.
    pub load: EngineLoad,
    /// The cost of its work.
    pub curve: Curve,
}

/// The load of an engine, as counted by the gateway itself: polled metrics are late.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Sequences in the batch.
    pub running: u32,
    /// Requests sent to the engine that wait there for a place in the batch.
    pub waiting: u32,
    /// Tokens that all of these are still expected to produce.
    pub outstanding_tokens: u64,
    /// How much other engines use of the same GPU, from 0 to 1 each. [`share_groups`] fills it in.
    pub others_utilisation: f64,
    /// How long the engine still refuses further requests, as it has said or shown; 0 if it takes them. Requests wait until it
    /// does.
    pub closed_ns: u64,
    /// When these numbers were correct.
    pub updated_ns: u64,
}

/// The age beyond which a load is stale.
const STALE_NS: u64 = 1_000_000_000;

impl EngineLoad {
    /// Whether these numbers are older than a second, and so too old for policies that decide by loads.
    #[must_use]
    pub const fn is_stale(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.updated_ns) > STALE_NS
    }

    /// Returns how many requests the engine has.
    #[must_use]
    pub const fn in_flight(&self) -> u32 {
        self.running.saturating_add(self.waiting)
    }

    /// Whether the engine refuses further requests now.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.closed_ns > 0
    }
}

/// Sets [`EngineLoad::others_utilisation`] of each replica from the load and the curves of the replicas with the same
/// group. The time is quadratic in their number; the result changes only when a load or a curve does.
pub fn share_groups(replicas: &mut [Replica]) {
    for at in 0..replicas.len() {
        let group = replicas.get(at).map(|replica| replica.group);
        let used = |(other, replica): (usize, &Replica)| {
            let neighbour = other != at && Some(replica.group) == group;
            if neighbour { replica.curve.utilisation(replica.load.running) } else { 0.0 }
        };
        let others = replicas.iter().enumerate().map(used).sum();
        if let Some(replica) = replicas.get_mut(at) {
            replica.load.others_utilisation = others;
        }
    }
}

/// The way back from the gateway to the client, as known from the transport and its stream scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientPath {
    /// The smoothed round-trip time (RFC 9002 §5.3).
    pub smoothed_rtt_ns: u64,
    /// The bytes queued on the path ahead of a byte of this request's class. The queue is assumed to be standing: equally
    /// long when the answer comes.
    pub backlog_bytes: u64,
    /// The rate at which the path carries these bytes; 0 means unknown, and then they take no time.
    pub bytes_per_sec: u64,
    /// The share of that rate with which the answer's own bytes travel; 0 means all of it.
    pub share_bytes_per_sec: u64,
    /// The bytes of a token on the path, including framing.
    pub bytes_per_token: u32,
}

const NS_PER_SEC: u64 = 1_000_000_000;

impl ClientPath {
    /// Returns how long a token travels: half a round trip, and the queue ahead of it.
    #[must_use]
    pub const fn return_ns(&self) -> u64 {
        (self.smoothed_rtt_ns / 2).saturating_add(transfer_ns(self.backlog_bytes, self.bytes_per_sec))
    }

    /// Returns how long the path needs to carry `tokens` tokens with the answer's share.
    #[must_use]
    pub const fn carry_ns(&self, tokens: u32) -> u64 {
        let rate = if self.share_bytes_per_sec == 0 { self.bytes_per_sec } else { self.share_bytes_per_sec };
        transfer_ns((tokens as u64).saturating_mul(self.bytes_per_token as u64), rate)
    }
}

const fn transfer_ns(bytes: u64, bytes_per_sec: u64) -> u64 {
    if bytes_per_sec == 0 {
        return 0;
    }
    let ns = bytes as u128 * NS_PER_SEC as u128 / bytes_per_sec as u128;
    if ns > u64::MAX as u128 { u64::MAX } else { ns as u64 }
}

/// When an answer is expected at the client, from now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    /// The first token.
    pub first_ns: u64,
    /// The mean gap between tokens after it.
    pub per_token_ns: u64,
    /// The last token.
    pub finish_ns: u64,
    /// Whether the engine's costs are known. If not, these times are those of the path and of a closed engine alone.
    pub is_known: bool,
}

impl Prediction {
    /// Predicts how `replica` would answer the request if it has `cached_tokens` of the request's prompt in its cache: it reads
    /// only the [rest](RoutedRequest::unread_tokens). Waiting prompts are assumed to be as long as this one, and in no cache.
    ///
    /// A place in the batch is free at once, or when enough of the requests ahead have finished, which follows from their
    /// outstanding tokens; both only once the engine takes requests. Then the waiting prompts and this one's are read, followed
    /// by steps of a batch that stays as large as it is now. The prediction ignores later arrivals: a margin has to cover those.
    /// It never shrinks when one of the numbers of [`EngineLoad`] grows.
    #[must_use]
    pub fn of(request: &RoutedRequest, replica: &Replica, cached_tokens: u32, path: &ClientPath) -> Self {
        let (load, curve) = (&replica.load, &replica.curve);
        let most = replica.most_running.max(1);
        let ahead = load.in_flight();
        let batch = ahead.saturating_add(1).min(most);
        let step_ns = curve.step_ns(batch, load.others_utilisation);
        let without_place = f64::from(ahead.saturating_add(1).saturating_sub(most));
        let tokens_ahead = if ahead == 0 { 0.0 } else { load.outstanding_tokens as f64 / f64::from(ahead) };
        let wait_ns = load.closed_ns as f64 + without_place / f64::from(most) * tokens_ahead * step_ns;
        let prompts_ahead = f64::from(load.waiting).min(f64::from(most));
        let own_ns = curve.prefill_ns(request.unread_tokens(cached_tokens));
        let first_ns = prompts_ahead.mul_add(curve.prefill_ns(request.prompt_tokens), wait_ns + own_ns);
        let gaps = request.tokens() - 1;
        let finish_ns = f64::from(gaps).mul_add(step_ns, first_ns).max(path.carry_ns(request.tokens()) as f64);
        let back_ns = path.return_ns();
        let per_token_ns = if gaps == 0 { 0.0 } else { (finish_ns - first_ns) / f64::from(gaps) };
        Self {
            first_ns: whole(first_ns).saturating_add(back_ns),
            per_token_ns: whole(per_token_ns),
            finish_ns: whole(finish_ns).saturating_add(back_ns),
            is_known: curve.is_known(),
        }
    }

    /// Returns the fraction of its limits that the answer would use, by the tightest limit: at most 1 is in time, 0 means
    /// no limits, infinity means hopeless. It is never NaN.
    #[must_use]
    pub fn tightness(&self, slo: &Slo) -> f64 {
        let used = |time_ns: u64, limit_ns: u64| match limit_ns {
            Slo::NONE => 0.0,
            0 => f64::INFINITY,
            _ => time_ns as f64 / limit_ns as f64,
        };
        used(self.first_ns, slo.first_token_ns)
            .max(used(self.per_token_ns, slo.per_token_ns))
            .max(used(self.finish_ns, slo.budget_ns))
    }
}

/// Rounds up to whole nanoseconds; NaN becomes `u64::MAX`.
const fn whole(ns: f64) -> u64 {
    if ns.is_nan() { u64::MAX } else { ns.ceil() as u64 }
}

#[cfg(test)]
mod tests;
