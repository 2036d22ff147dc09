//! A link that requests and answers share: the product's disciplines, packet by packet, on an idealized path.
//!
//! `sched::stream` chooses the stream of each packet, as in the product. The link always runs at its rate while anything
//! waits: congestion control, handshakes and the windows of streams are not simulated, so effects that depend on them (TLS
//! over TCP, with one connection or with many) cannot be expressed here. The sender knows of a lost packet after a round
//! trip, and the packet's bytes then need another turn.

use std::{cmp::Reverse, collections::BinaryHeap};

use instruments::random::Random;
use plan::{
    Class, Scheduler,
    serving::{Link, ServingPlan},
};
use sched::{
    route::{
        ClientPath, Slo,
        serving::{Arrival, RunOutcome, Setup},
    },
    stream::{Discipline, DisciplineClock, Service, Streams},
};
use slab::Slab;

use super::answer::Answered;

/// Payload of a packet, and the bytes of QUIC, UDP, IP and Ethernet headers.
const PACKET_BYTES: u64 = 1_200;
const HEADER_BYTES: u64 = 70;

const NS_PER_MS: f64 = 1e6;

/// The purposes of random numbers.
const CLASSES: u64 = 0x636c_6173;
const LOSS_UP: u64 = 0x7570;
const LOSS_BACK: u64 = 0x6261_636b;

/// What the gateway does not see of requests.
pub(super) struct Carried {
    link: Link,
    discipline: Discipline,
    seed: u64,
    /// Of all requests, in the order in which they were sent: the task, and the class of the link.
    sent: Vec<(usize, Class)>,
    /// By arrival: the index of its request.
    requests: Vec<usize>,
}

/// A stream's bytes, and the time at which they are ready.
#[derive(Clone, Copy, Debug)]
struct Job {
    ready_ns: u64,
    bytes: u64,
    service: Service,
}

/// Carries requests to the gateway. Requests that a scheduler discards do not arrive.
pub(super) fn up(
    plan: &ServingPlan,
    link: &Link,
    scheduler: Scheduler,
    sent: Vec<Arrival>,
    seed: u64,
) -> (Vec<Arrival>, Carried) {
    let mut random = Random::new(seed, CLASSES);
    let mut draw = |task: usize| {
        let names = plan.tasks.get(task).map_or(&[][..], |task| &task.classes);
        let name = names.get(random.below(names.len()));
        name.and_then(|name| link.classes.iter().find(|class| class.name == *name)).or(link.classes.first()).cloned()
    };
    let classes: Vec<_> =
        sent.iter().filter_map(|arrival| Some((arrival.request.class, draw(arrival.request.class)?))).collect();
    let discipline = scheduler.of_streams().map(|(discipline, _)| discipline).unwrap_or_default();
    let jobs = sent.iter().zip(&classes).map(|(arrival, (_, class))| {
        let deadline_ns = Some(arrival.sent_ns.saturating_add(network_ns(class)));
        Job {
            ready_ns: arrival.sent_ns,
            bytes: class.bytes as u64,
            service: Service { deadline_ns, ..class.service() },
        }
    });
    let delivered = carry(link, discipline, &jobs.collect::<Vec<_>>(), &mut Random::new(seed, LOSS_UP));
    let expected_tokens = plan.lengths.output_tokens as u32;
    let mut arrived: Vec<_> = (sent.into_iter().zip(&classes).zip(delivered).enumerate())
        .filter_map(|(request, ((arrival, (_, class)), delivered_ns))| {
            let arrived_ns = delivered_ns?;
            let allowed_ns = |tokens: u32| {
                let tokens_ns = (plan.per_token_ms * NS_PER_MS * f64::from(tokens)) as u64;
                tokens_ns.saturating_add(if link.allows_for_network { network_ns(class) } else { 0 })
            };
            let prompt_tokens = (class.bytes as f64 / link.bytes_per_prompt_token) as u32;
            let left = link.context_tokens.saturating_sub(expected_tokens).max(1);
            let budget_ns = allowed_ns(arrival.request.expected_tokens).saturating_sub(arrived_ns - arrival.sent_ns);
            let known = sched::route::RoutedRequest {
                prompt_tokens: prompt_tokens.min(left),
                slo: Slo::within(budget_ns),
                ..arrival.request
            };
            let path = ClientPath { smoothed_rtt_ns: round_trip_ns(link), ..ClientPath::default() };
            let deadline_ns = arrival.sent_ns.saturating_add(allowed_ns(arrival.output_tokens));
            Some((request, Arrival { arrived_ns, deadline_ns, request: known, path, ..arrival }))
        })
        .collect();
    arrived.sort_by_key(|(_, arrival)| arrival.arrived_ns);
    let (requests, arrivals) = arrived.into_iter().unzip();
    (arrivals, Carried { link: link.clone(), discipline, seed, sent: classes, requests })
}

impl Carried {
    /// Carries answers back, and returns the outcome of each request, in the order in which they were sent.
    pub fn back(&self, setup: &Setup, arrivals: &[Arrival], outcomes: &[RunOutcome]) -> Vec<Answered> {
        let finished: Vec<_> = (self.requests.iter().zip(arrivals).zip(outcomes))
            .filter(|(_, outcome)| outcome.finished_ns > 0)
            .map(|((request, arrival), outcome)| (*request, arrival, outcome))
            .collect();
        let jobs = finished.iter().map(|(request, arrival, outcome)| {
            let service = self.sent.get(*request).map_or(Service::default(), |(_, class)| class.service());
            let bytes = (f64::from(arrival.output_tokens) * self.link.bytes_per_token) as u64;
            let deadline_ns = Some(arrival.deadline_ns);
            Job { ready_ns: outcome.finished_ns, bytes: bytes.max(1), service: Service { deadline_ns, ..service } }
        });
        let mut random = Random::new(self.seed, LOSS_BACK);
        let delivered = carry(&self.link, self.discipline, &jobs.collect::<Vec<_>>(), &mut random);
        let never = |(task, _): &(usize, Class)| Answered { task: *task, model: None, met: false, reward: 0.0 };
        let mut answered: Vec<_> = self.sent.iter().map(never).collect();
        for (request, outcome) in self.requests.iter().zip(outcomes) {
            if let Some(one) = answered.get_mut(*request) {
                one.model = outcome.choice.map(|choice| choice.model);
            }
        }
        for ((request, arrival, _), delivered_ns) in finished.into_iter().zip(delivered) {
            let Some(one) = answered.get_mut(request) else { continue };
            one.met = delivered_ns.is_some_and(|delivered_ns| delivered_ns <= arrival.deadline_ns);
            let model = one.model.and_then(|model| setup.models.get(model)).filter(|_| one.met);
            one.reward = model.map_or(0.0, |model| f64::from(model.reward(one.task)));
        }
        answered
    }
}

fn network_ns(class: &Class) -> u64 {
    class.deadline_ms.unwrap_or_default().saturating_mul(1_000_000)
}

fn round_trip_ns(link: &Link) -> u64 {
    (2.0 * link.delay_ms * NS_PER_MS) as u64
}

/// The bytes of a job on the link.
#[derive(Clone, Default)]
struct JobBytes {
    /// The name of its stream, while it has one.
    name: Option<u32>,
    has_begun: bool,
    waiting: u64,
    arrived: u64,
    /// When the last byte arrived.
    done_ns: Option<u64>,
}

/// Returns when each job's last byte has arrived, or `None` if the job was discarded.
fn carry(link: &Link, discipline: Discipline, jobs: &[Job], random: &mut Random) -> Vec<Option<u64>> {
    let packet_ns = |bytes: u64| ((bytes + HEADER_BYTES) as f64 * 8e3 / link.rate_mbit) as u64;
    let delay_ns = (link.delay_ms * NS_PER_MS) as u64;
    let mut clock = DisciplineClock::new(discipline, 0);
    let mut streams = Streams::new();
    // By the names of the streams: the places of their jobs.
    let mut named = Slab::new();
    let mut carried = vec![JobBytes::default(); jobs.len()];
    let mut ready: BinaryHeap<_> =
        jobs.iter().enumerate().map(|(at, job)| Reverse((job.ready_ns, at, job.bytes))).collect();
    let mut now_ns = 0;
    loop {
        while let Some(Reverse((_, at, bytes))) = ready.peek().copied().filter(|Reverse((at_ns, ..))| *at_ns <= now_ns)
        {
            ready.pop();
            let (Some(job), Some(of)) = (jobs.get(at), carried.get_mut(at)) else { continue };
            if !std::mem::replace(&mut of.has_begun, true) {
                let name = named.insert(at) as u32;
                streams.insert(&mut clock, name, job.service);
                of.name = Some(name);
            }
            of.waiting += bytes;
            // A discarded job has no stream.
            if let Some(name) = of.name {
                streams.wake(&mut clock, name);
            }
        }
        while let Some(expired) = streams.expired(&clock, now_ns) {
            streams.remove(&mut clock, expired);
            if let Some(of) = named.try_remove(expired as usize).and_then(|at| carried.get_mut(at)) {
                of.name = None;
            }
        }
        let Some((stream, _)) = streams.turn() else {
            let Some(Reverse((next_ns, ..))) = ready.peek() else { break };
            now_ns = now_ns.max(*next_ns);
            continue;
        };
        let Some(&at) = named.get(stream as usize) else { break };
        let (Some(job), Some(of)) = (jobs.get(at), carried.get_mut(at)) else { break };
        let bytes = of.waiting.min(PACKET_BYTES);
        of.waiting -= bytes;
        now_ns += packet_ns(bytes);
        if random.share() < link.loss {
            ready.push(Reverse((now_ns + round_trip_ns(link), at, bytes)));
        } else {
            of.arrived += bytes;
        }
        streams.end_turn(&mut clock, stream, bytes, of.waiting > 0);
        if of.arrived == job.bytes {
            (of.done_ns, of.name) = (Some(now_ns + delay_ns), None);
            streams.remove(&mut clock, stream);
            named.try_remove(stream as usize);
        }
    }
    carried.into_iter().map(|of| of.done_ns).collect()
}

#[cfg(test)]
mod tests {
    use sched::stream::Expiry;

    use super::*;

    const MS: u64 = 1_000_000;

    /// Makes a link on which 1,200 bytes of payload take 2 ms.
    fn link(loss: f64) -> Link {
        Link {
            rate_mbit: (PACKET_BYTES + HEADER_BYTES) as f64 * 8.0 / 2_000.0,
            loss,
            delay_ms: 10.0,
            bytes_per_token: 4.0,
            bytes_per_prompt_token: 4.0,
            context_tokens: 2_048,
            allows_for_network: true,
            schedulers: Vec::new(),
            classes: Vec::new(),
        }
    }

    fn job(ready_ms: u64, packets: u64, deadline_ms: u64) -> Job {
        let service = Service { deadline_ns: Some(deadline_ms * MS), ..Service::default() };
        Job { ready_ns: ready_ms * MS, bytes: packets * PACKET_BYTES, service }
    }

    fn arrived_ms(discipline: Discipline, jobs: &[Job]) -> Vec<Option<u64>> {
        let carried = carry(&link(0.0), discipline, jobs, &mut Random::new(1, 0));
        carried.into_iter().map(|ns| ns.map(|ns| ns / MS)).collect()
    }

    #[test]
    fn streams_leave_in_the_order_of_the_discipline() {
        let jobs = [job(0, 4, 100), job(0, 2, 50), job(20, 1, 90)];
        assert_eq!(arrived_ms(Discipline::Fcfs, &jobs), [Some(18), Some(22), Some(32)]);
        assert_eq!(arrived_ms(Discipline::Rr, &jobs), [Some(22), Some(18), Some(32)]);
        let edf = Discipline::Edf { expiry: Expiry::Soft };
        assert_eq!(arrived_ms(edf, &jobs), [Some(22), Some(14), Some(32)]);
    }

    #[test]
    fn late_jobs_are_given_up_if_deadlines_are_hard() {
        let jobs = [job(0, 10, 5), job(0, 2, 50)];
        let hard = Discipline::Edf { expiry: Expiry::Hard };
        // Three packets until the deadline has passed, then the other job's two.
        assert_eq!(arrived_ms(hard, &jobs), [None, Some(20)]);
    }

    #[test]
    fn lost_packets_come_a_round_trip_later_and_every_byte_arrives_once() {
        let jobs: Vec<_> = (0..50).map(|at| job(at, 3, 1_000)).collect();
        let link = link(0.2);
        let carried = carry(&link, Discipline::Rr, &jobs, &mut Random::new(3, 0));
        assert!(carried.iter().all(Option::is_some));
        let late = |(job, at): (&Job, &Option<u64>)| at.is_some_and(|at| at > job.ready_ns + 400 * MS);
        let whole = carry(&Link { loss: 0.0, ..link.clone() }, Discipline::Rr, &jobs, &mut Random::new(3, 0));
        let last = |carried: &[Option<u64>]| carried.iter().flatten().copied().max().unwrap_or_default();
        // A fifth of 150 packets are sent twice.
        assert!(last(&carried) > last(&whole) + 30 * MS, "{} and {}", last(&carried), last(&whole));
        assert!(!jobs.iter().zip(&carried).all(late));
    }
}
