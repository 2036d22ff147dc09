//! Unmodified quic-go as a baseline, since the thesis built its schedulers into quic-go. The client, the server and the relay are
//! processes of the program in `perf/peers/quic-go-streams`, and make the same requests as other schedulers.
//!
//! quic-go serves streams in turns unless an application sets priorities (RFC 9218). With priorities it also does FCFS, ABS and ML as
//! the thesis has them, but not EDF: it has eight urgencies and no deadlines.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use instruments::relay::{self, scratch_folder};
use lab::{netns::Namespace, process::Process};
use plan::{Class, Congestion, Level, Mode, Plan, Scheduler, Topology};
use serde::{Deserialize, Serialize};

use super::{Request, Run, emulated::Emulated, requests};

/// The only congestion controller of quic-go: New Reno with an initial window of 32 packets.
pub const CONGESTION: &str = "reno (quic-go's own)";

/// The name of the program.
const PROGRAM: &str = "quic-go-streams";

/// The port on which servers and relays listen.
const PORT: u16 = 443;

/// How long a process may take to start, or to end after the time limit of its requests.
const PATIENCE: Duration = Duration::from_secs(30);

/// RFC 9218 has eight urgencies.
const URGENCIES: usize = 8;

/// The urgency of streams without a priority (RFC 9218 §4.1).
const DEFAULT_URGENCY: u8 = 3;

/// A stream's priority (RFC 9218).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Order {
    /// 0 to 7; 0 is sent first.
    urgency: u8,
    /// Whether the stream takes turns with other streams of its urgency. Otherwise these are sent in the order of their IDs.
    incremental: bool,
}

/// A request as the program reads it.
#[derive(Debug, Serialize)]
struct Told {
    bytes: usize,
    start_ns: u64,
    order: Option<Order>,
}

/// A line that the program prints about a request, or about all together.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Request { request: usize, latency_ns: Option<u64>, error: Option<String> },
    All { protocol: String, total_ns: u64 },
}

/// Checks that a scheduler of quic-go can run a plan. Other schedulers always pass.
///
/// # Errors
/// When the program was not built, or quic-go cannot run the plan.
pub fn check(plan: &Plan, scheduler: Scheduler) -> Result<()> {
    if scheduler.is_of_quic_go() {
        suits(plan, scheduler)?;
        relay::peer(PROGRAM, relay::PEERS_BUILD)?;
    }
    Ok(())
}

fn suits(plan: &Plan, scheduler: Scheduler) -> Result<()> {
    let workload = plan.workload;
    ensure!(plan.congestion == Congestion::Cubic, "quic-go has only its own congestion controller");
    ensure!(!workload.one_way && workload.backlog == 0, "the program can only echo requests");
    if plan.topology == Topology::Masque {
        ensure!(plan.tunnel.mode == Mode::Stream, "its tunnels are streams");
        ensure!(workload.connections == workload.requests, "each of its requests has its own connection");
    }
    orders(plan, scheduler).map(drop)
}

/// Returns the order of each class's streams, or `None` for quic-go's default.
fn orders(plan: &Plan, scheduler: Scheduler) -> Result<Vec<Option<Order>>> {
    let of_all = |order: Option<Order>| vec![order; plan.classes.len()];
    match scheduler {
        Scheduler::QuicGo => Ok(of_all(None)),
        Scheduler::QuicGoFcfs => Ok(of_all(Some(Order { urgency: DEFAULT_URGENCY, incremental: false }))),
        Scheduler::QuicGoAbs => {
            let priorities: BTreeSet<u8> = plan.classes.iter().map(|class| class.priority).collect();
            ensure!(priorities.len() <= URGENCIES, "{} priorities, but quic-go has {URGENCIES}", priorities.len());
            let urgency =
                |class: &Class| priorities.iter().filter(|priority| **priority > class.priority).count() as u8;
            Ok(plan.classes.iter().map(|class| Some(Order { urgency: urgency(class), incremental: false })).collect())
        }
        Scheduler::QuicGoMlRr => {
            let high = plan.classes.iter().filter(|class| class.level == Level::High);
            let deadlines: BTreeSet<_> = high.map(|class| class.deadline_ms).collect();
            ensure!(deadlines.len() <= 1, "quic-go has no deadlines, and those of the high level differ");
            let order = |class: &Class| match class.level {
                Level::High => Order { urgency: 0, incremental: false },
                Level::Low => Order { urgency: DEFAULT_URGENCY, incremental: true },
            };
            Ok(plan.classes.iter().map(|class| Some(order(class))).collect())
        }
        _ => bail!("not a scheduler of quic-go"),
    }
}

/// Runs one repetition in the lab, directly or through a relay.
///
/// # Errors
/// As [`check`]; also outside the lab, when a process fails, or when a request without a relay fails before the time limit.
pub fn run(plan: &Plan, scheduler: Scheduler, seed: u64) -> Result<Run> {
    suits(plan, scheduler)?;
    let program = relay::peer(PROGRAM, relay::PEERS_BUILD)?;
    let network = Emulated::verified(&plan.network, seed)?;
    let chain = &network.chain;
    let requests = requests(plan, seed);
    let folder = Scratch(scratch_folder()?);
    let file = folder.0.join("requests.json");
    fs::write(&file, serde_json::to_vec(&told(plan, &requests, &orders(plan, scheduler)?))?)?;

    let tunnelled = plan.topology == Topology::Masque;
    let limit = Duration::from_secs(plan.workload.limit_s);
    let everywhere = format!("0.0.0.0:{PORT}");
    let near = format!("{}:{PORT}", chain.access.far.v4);
    let servers = if tunnelled {
        network.delay_target(plan.tunnel.target_delay_ms)?;
        let target = format!("{}:{PORT}", chain.egress.far.v4);
        vec![
            listening(&chain.target, &program, &["serve", "-listen", &everywhere])?,
            listening(&chain.relay, &program, &["relay", "-listen", &everywhere, "-target", &target])?,
        ]
    } else {
        vec![listening(&chain.relay, &program, &["serve", "-listen", &everywhere])?]
    };
    let (limit_s, file) = (format!("{}s", limit.as_secs()), file.display().to_string());
    let mut asking = vec!["request", "-server", &near, "-requests", &file, "-limit", &limit_s];
    if tunnelled {
        asking.push("-tunnelled");
    }
    let mut client = chain.client.start(&program, asking)?;
    let status = client.wait(limit + PATIENCE).with_context(|| client.output())?;
    let said = client.output();
    ensure!(status.success(), "the client ended with {status}:\n{said}");
    drop(servers);
    let (latencies, total) = read(&said, requests.len(), tunnelled)?;
    Ok(Run::new(plan, &requests, &latencies, total))
}

/// A folder that is removed with its files.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that stays behind does no harm.
        _ = fs::remove_dir_all(&self.0);
    }
}

fn listening(host: &Namespace, program: &Path, arguments: &[&str]) -> Result<Process> {
    let process = host.start(program, arguments)?;
    process.wait_for_line("\"listen\"", PATIENCE)?;
    Ok(process)
}

fn told(plan: &Plan, requests: &[Request], orders: &[Option<Order>]) -> Vec<Told> {
    let told = |request: &Request| Told {
        bytes: plan.classes[request.class].bytes,
        start_ns: request.start_ns,
        order: orders[request.class],
    };
    requests.iter().map(told).collect()
}

/// Reads the client's output: the latency of each request, and the total time. With `lenient`, a failed request counts as one without
/// an answer.
fn read(said: &str, requests: usize, lenient: bool) -> Result<(Vec<Option<Duration>>, Duration)> {
    let (mut latencies, mut all) = (vec![None; requests], None);
    let mut seen = 0;
    for line in said.lines().filter(|line| line.starts_with('{')) {
        match serde_json::from_str(line).with_context(|| format!("the client printed {line}"))? {
            Line::Request { request, latency_ns, error } => {
                if let Some(error) = error.filter(|_| !lenient) {
                    bail!("request {request} failed: {error}");
                }
                *latencies.get_mut(request).with_context(|| format!("there is no request {request}"))? =
                    latency_ns.map(Duration::from_nanos);
                seen += 1;
            }
            Line::All { protocol, total_ns } => all = Some((protocol, Duration::from_nanos(total_ns))),
        }
    }
    let (protocol, total) = all.context("the client ended early")?;
    let expected = protocol_of(include_str!("../../peers/go.mod")).context("go.mod requires no quic-go")?;
    ensure!(protocol == expected, "both ends spoke {protocol:?}, not {expected:?}: build the peer again");
    ensure!(seen == requests, "the client reported {seen} requests, not {requests}");
    Ok((latencies, total))
}

/// Returns the ALPN protocol of a program that was built with this `go.mod`.
fn protocol_of(go_mod: &str) -> Option<String> {
    let mut words = go_mod.split_whitespace().skip_while(|word| *word != "github.com/quic-go/quic-go");
    words.nth(1).map(|version| format!("quic-go/{version}"))
}

#[cfg(test)]
mod tests {
    use plan::Varied as _;

    use super::*;

    fn plan(name: &str) -> Plan {
        Plan::read(name).unwrap()
    }

    fn order(urgency: u8, incremental: bool) -> Option<Order> {
        Some(Order { urgency, incremental })
    }

    #[test]
    fn classes_become_urgencies_and_the_default_stays_what_it_is() {
        let plan = plan("thesis-fig7-8");
        let of = |scheduler| orders(&plan, scheduler).unwrap();
        assert_eq!(of(Scheduler::QuicGo), [None; 3]);
        assert_eq!(of(Scheduler::QuicGoFcfs), [order(3, false); 3]);
        assert_eq!(of(Scheduler::QuicGoAbs), [order(0, false), order(1, false), order(1, false)]);
        assert_eq!(of(Scheduler::QuicGoMlRr), [order(0, false), order(3, true), order(3, true)]);
        assert!(orders(&plan, Scheduler::Rr).is_err());
    }

    #[test]
    fn features_that_quic_go_lacks_are_refused() {
        let refused = |plan: &Plan, scheduler| suits(plan, scheduler).unwrap_err().to_string();
        let ten = plan("thesis-fig2-10-11");
        assert!(refused(&ten, Scheduler::QuicGoAbs).contains("10 priorities"));
        assert!(suits(&ten, Scheduler::QuicGo).is_ok());
        let mut two = plan("thesis-fig7-8");
        two.classes[1].level = Level::High;
        assert!(refused(&two, Scheduler::QuicGoMlRr).contains("deadlines"));
        let bbr = plan("thesis-fig7-8").variant("bbr").unwrap();
        assert!(refused(&bbr, Scheduler::QuicGo).contains("congestion controller"));
        let datagrams = plan("thesis-fig2-6").variant("datagram").unwrap();
        assert!(refused(&datagrams, Scheduler::QuicGo).contains("streams"));
        assert!(refused(&plan("thesis-fig2-9"), Scheduler::QuicGo).contains("its own connection"));
        assert!(check(&bbr, Scheduler::Rr).is_ok(), "other schedulers are not checked");
    }

    #[test]
    fn the_program_is_told_the_requests_that_others_make() {
        let plan = plan("thesis-fig7-8").variant("poisson").unwrap();
        let requests = requests(&plan, 1);
        let told = told(&plan, &requests, &orders(&plan, Scheduler::QuicGoAbs).unwrap());
        assert_eq!(told.len(), requests.len());
        for (told, request) in told.iter().zip(&requests) {
            assert_eq!((told.bytes, told.start_ns), (plan.classes[request.class].bytes, request.start_ns));
        }
        let urgent = requests.iter().position(|request| request.class == 0).unwrap();
        let json = serde_json::to_string(&told[urgent]).unwrap();
        assert!(json.ends_with("\"order\":{\"urgency\":0,\"incremental\":false}}"), "{json}");
    }

    #[test]
    fn latencies_are_read_by_number_and_another_version_is_refused() {
        let expected = protocol_of(include_str!("../../peers/go.mod")).unwrap();
        let end = format!("{{\"protocol\":\"{expected}\",\"total_ns\":5000000}}");
        let late = "{\"request\":0,\"latency_ns\":null}";
        let first = format!("a line for people\n{{\"request\":1,\"latency_ns\":2000000}}\n{late}\n");
        let (latencies, total) = read(&format!("{first}{end}"), 2, false).unwrap();
        assert_eq!(
            (latencies.as_slice(), total),
            (&[None, Some(Duration::from_millis(2))][..], Duration::from_millis(5))
        );
        let error = |said: &str| read(said, 2, false).unwrap_err().to_string();
        assert!(error(&first).contains("ended early"));
        assert!(error(&format!("{first}{{\"protocol\":\"quic-go/v0.1.0\",\"total_ns\":1}}")).contains("v0.1.0"));
        assert!(error(&format!("{late}\n{end}")).contains("1 requests"));
        assert!(error(&format!("{first}{{\"request\":7,\"latency_ns\":1}}\n{end}")).contains("no request 7"));
        let failed = format!("{first}{end}").replace("\"latency_ns\":null", "\"latency_ns\":null,\"error\":\"reset\"");
        assert!(error(&failed).contains("reset"));
        assert_eq!(read(&failed, 2, true).unwrap().0[0], None);
    }
}
