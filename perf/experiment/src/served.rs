//! Streams of tokens from a gateway for models, by several versions of HTTP, in the lab.
//!
//! ```text
//! client ══ bottleneck ══ gateway ── emulated engine
//! ```
//!
//! The gateway is `paced`, as a separate process. One version of HTTP differs from another only in what lies between the client and the
//! gateway: the requests, their times, the engine and the congestion controller's name are the same.

pub(crate) mod client;
mod figures;
mod gateway;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::future::join_all;
use instruments::load::Figure;
use lab::{
    engine::{Engine, Speed},
    netns::Namespace,
    site::{Site, Terms},
    stack_counters::{self, StackCounters},
};
use plan::{Class, Plan, Scheduler};
use tokio::time::{Instant, sleep_until, timeout_at};

use self::{
    client::{Answer, Client, Version},
    gateway::{ENGINE_PORT, MODEL},
};
use super::{
    Request, Run, Sample, Stream,
    emulated::{Emulated, block_on},
    requests,
};

/// Runs one repetition.
///
/// # Errors
/// When this is not the lab, the gateway does not start, an answer is not as expected, or the client opened other connections
/// than its version of HTTP should. A request without an answer within the time limit is no error.
pub fn run(plan: &Plan, scheduler: Scheduler, seed: u64) -> Result<Run> {
    let version = Version::of(scheduler).with_context(|| format!("{} is not a version of HTTP", scheduler.name()))?;
    let speed = plan.engine.context("the plan has no engine")?;
    let Emulated { chain, bottleneck, .. } = Emulated::verified(&plan.network, seed)?;
    for host in [&chain.client, &chain.relay] {
        host.sysctl("net.ipv4.tcp_congestion_control", &plan.congestion.to_string())?;
    }
    let millis = Duration::from_millis;
    let speed =
        Speed { prefill: millis(speed.first_ms), step: millis(speed.token_ms), step_per_request: Duration::ZERO };
    let _engine = Engine::start(&chain.target, ENGINE_PORT, MODEL, speed)?;
    let sections = gateway::sections(plan, scheduler, [chain.egress.far.v4, chain.access.far.v4])?;
    let site = Site::on(chain, Terms { sections: &sections, ..Terms::default() })?;
    let requests = requests(plan, seed);

    let measure = async || {
        let client = Client::new(&site, version).await?;
        let before = Counters::read(&site, &bottleneck)?;
        let (answers, total) = ask_all(plan, &requests, &client).await?;
        client.close().await;
        Ok::<_, anyhow::Error>((answers, total, before))
    };
    let (answers, total, before) = site.chain.client.run(|| block_on(measure()))??;
    let after = Counters::read(&site, &bottleneck)?;
    judge(plan, version, &site, (requests.len() as u64, after.opened))?;

    let samples = requests.iter().zip(&answers);
    let samples = samples.map(|(request, answer)| Sample { class: request.class, latency_ns: answer.ended_ns });
    let mut run = Run { samples: samples.collect(), total_ns: total.as_nanos() as u64, ..Run::default() };
    run.figures = figures::of(plan, &requests, &answers);
    let read: usize = answers.iter().map(|answer| answer.read_ns.len()).sum();
    let of = |metric, value, unit| Figure { metric, value, unit };
    run.figures.extend([
        of("wire_bytes_per_token", (after.bytes - before.bytes) as f64 / read.max(1) as f64, "bytes"),
        of("dropped_packets", (after.dropped - before.dropped) as f64, "packets"),
        of("tcp_connections", after.opened as f64, ""),
    ]);
    if version.is_tcp() {
        run.figures.extend([
            of("retransmissions", (after.sent_again - before.sent_again) as f64, "packets"),
            of("timeouts", (after.timeouts - before.timeouts) as f64, "timeouts"),
        ]);
    }
    let stream = |(request, answer): (&Request, Answer)| Stream {
        class: request.class,
        tokens: plan.classes[request.class].tokens,
        read_ns: answer.read_ns,
    };
    run.streams = requests.iter().zip(answers).map(stream).collect();
    Ok(run)
}

/// Makes all requests when they are due, and waits until they have ended or the time limit has passed.
async fn ask_all(plan: &Plan, requests: &[Request], client: &Client) -> Result<(Vec<Answer>, Duration)> {
    let began = Instant::now();
    let limit = began + Duration::from_secs(plan.workload.limit_s);
    let each = requests.iter().map(async |request| {
        let due = began + Duration::from_nanos(request.start_ns);
        sleep_until(due).await;
        let mut answer = Answer::new(due);
        match timeout_at(limit, client.ask(&plan.classes[request.class], &mut answer)).await {
            Ok(asked) => asked.map(|()| answer),
            Err(_) => Ok(answer),
        }
    });
    let answers = join_all(each).await.into_iter().collect::<Result<_>>()?;
    Ok((answers, began.elapsed()))
}

/// Refuses a run in which the answers did not travel as the version's name says.
fn judge(plan: &Plan, version: Version, site: &Site, (requests, opened): (u64, u64)) -> Result<()> {
    let expected = version.connections(requests);
    ensure!(opened == expected, "{version:?}: {opened} TCP connections, not {expected}");
    let counts = site.counts()?;
    let greeted = counts.of("gateway_handshakes_total{result=\"completed\"}");
    ensure!(greeted as u64 == expected, "{version:?}: {greeted} handshakes of TLS over TCP, not {expected}");
    for Class { name, .. } in &plan.classes {
        // Bytes of a class are counted where QUIC takes them.
        let sent = counts.of(&format!("class_bytes_total{{class=\"{name}\",role=\"relay\"}}"));
        ensure!((sent > 0) != version.is_tcp(), "{version:?}: {sent} bytes of {name} in QUIC: {counts:#?}");
        let tokens = counts
            .sum(&format!("gateway_tokens_total{{model=\"{MODEL}\",kind=\"output\",user=\"client\",class=\"{name}\""));
        ensure!(tokens > 0, "no token of {name}: {counts:#?}");
    }
    Ok(())
}

/// Counters of the run's hosts.
struct Counters {
    /// Packets that the bottleneck dropped toward the client, and bytes that it let pass.
    dropped: u64,
    bytes: u64,
    /// TCP connections that the client opened.
    opened: u64,
    /// TCP segments that the gateway sent again, and its timeouts.
    sent_again: u64,
    timeouts: u64,
}

impl Counters {
    fn read(site: &Site, bottleneck: &Namespace) -> Result<Self> {
        let qdisc = bottleneck.qdisc_counters("client")?;
        let [dropped, bytes] = ["drops", "bytes"].map(|key| qdisc[key].as_u64().context("no counter of the qdisc"));
        let [client, relay] = [&site.chain.client, &site.chain.relay].map(stack_counters::read);
        let (client, relay) = (client?, relay?);
        let of = |counters: &StackCounters, name: &str| {
            counters.get(name).copied().with_context(|| format!("the kernel does not count {name}"))
        };
        Ok(Self {
            dropped: dropped?,
            bytes: bytes?,
            opened: of(&client, "Tcp:ActiveOpens")?,
            sent_again: of(&relay, "Tcp:RetransSegs")?,
            timeouts: of(&relay, "TcpExt:TCPTimeouts")?,
        })
    }
}
