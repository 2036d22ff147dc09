//! QUIC connections inside the tunnels of a relay: `paced` in both roles, as separate processes, in the lab.
//!
//! ```text
//! client: inner connections ── edge ══ bottleneck ══ relay ── target: echo
//! ```
//!
//! Each inner connection has its own socket, for which the edge opens a tunnel: an outer stream. Each class has a forward
//! at the edge and a port at the target. The relay's rules recognize the class by the port. Both ends schedule the outer
//! streams alike. Inner endpoints are stock s2n-quic and schedule their own streams round robin.

use std::{
    fmt::Write as _,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use ends::stock::{self, Ends};
use futures::future::{join_all, try_join_all};
use instruments::{load::Figure, random::Random};
use lab::{
    process::{Process, wait_for},
    program,
    site::{Counts, Family, SOON, Site, Terms},
};
use plan::{Class, Level, Mode, Plan, Scheduler};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{
    Request, Run,
    emulated::{Emulated, block_on},
    requests,
};

/// The port of the first class, at the edge and at the target; further classes use the following ports.
const FIRST_PORT: u16 = 5_001;

/// Where the edge serves its metrics.
const EDGE_METRICS: &str = "127.0.0.1:9434";

/// Runs one repetition in the lab.
///
/// # Errors
/// When this is not the lab, a daemon does not start or does not know the scheduler, or the target cannot be reached at
/// all.
pub fn run(plan: &Plan, scheduler: Scheduler, seed: u64) -> Result<Run> {
    let network = Emulated::verified(&plan.network, seed)?;
    network.delay_target(plan.tunnel.target_delay_ms)?;
    let sections = format!("[transport]\ncongestion = \"{}\"\n{}", plan.congestion, policy(plan, scheduler)?);
    let relay = Terms { limits: "connection_idle_seconds = 300", sections: &sections, ..Terms::default() };
    let Emulated { chain, bottleneck, .. } = network;
    let site = Site::on(chain, relay)?;
    let mut edge = start_edge(&site, plan, &sections)?;

    let requests = requests(plan, seed);
    let bind = |address, ports: Vec<u16>| ports.into_iter().map(move |port| UdpSocket::bind((address, port)));
    let servers = (0..plan.classes.len()).map(port).collect();
    let servers: Vec<_> =
        site.chain.target.run(|| bind(Ipv4Addr::UNSPECIFIED, servers).collect::<Result<_, _>>())??;
    // One more client, to check that the target can be reached.
    let clients = vec![0; plan.workload.connections + 1];
    let clients: Vec<_> = site.chain.client.run(|| bind(Ipv4Addr::LOCALHOST, clients).collect::<Result<_, _>>())??;
    let ends = Ends::new(Duration::from_secs(plan.workload.limit_s))?;
    let mut run = block_on(async {
        for socket in servers {
            tokio::spawn(stock::serve(ends.server(socket)?));
        }
        let mut clients = clients.into_iter().map(|socket| ends.client(socket)).collect::<Result<Vec<_>>>()?;
        let probe = clients.pop().context("no client for the probe")?;
        stock::connect(&probe, edge_address(0)).await.context("the target cannot be reached through the relay")?;
        ends.losses.reset();
        measure(plan, &requests, &clients, &order(clients.len(), seed)).await
    })?;

    run.figures.push(Figure { metric: "lost_packets", value: ends.losses.packets(), unit: "packets" });
    run.figures.push(Figure { metric: "timeouts", value: ends.losses.timeouts(), unit: "timeouts" });
    // The relay counts the drops of tunnels when they end.
    let of_edge = Counts::read(&site.chain.client, EDGE_METRICS)?;
    edge.signal(libc::SIGTERM)?;
    edge.wait(SOON)?;
    let of_relay = site.wait_for_counts("the tunnels to end", |counts| counts.udp_tunnels() == 0)?;
    judge(plan.tunnel.mode, of_relay.sum("datagrams_total"), of_relay.sum("packets_total"))?;
    let dropped =
        of_relay.sum("dropped_packets_total") + of_edge.sum("dropped_packets_total") + of_edge.sum("edge_dropped");
    run.figures.push(Figure { metric: "dropped_packets", value: dropped as f64, unit: "packets" });
    drop((site, bottleneck));
    Ok(run)
}

/// Refuses a run in which payloads did not travel in the mode's form. Before a peer's settings have arrived, a tunnel in datagrams can
/// only use capsules.
fn judge(mode: Mode, datagrams: i64, payloads: i64) -> Result<()> {
    match mode {
        Mode::Stream => {
            ensure!(datagrams == 0, "{datagrams} of {payloads} payloads left in datagrams, not in the stream")
        }
        Mode::Datagram => {
            ensure!(10 * datagrams >= 9 * payloads, "only {datagrams} of {payloads} payloads left in datagrams");
        }
    }
    Ok(())
}

fn port(class: usize) -> u16 {
    // A plan has at most 256 classes.
    FIRST_PORT + class as u16
}

fn edge_address(class: usize) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port(class)).into()
}

/// Returns the policy of both roles.
fn policy(plan: &Plan, scheduler: Scheduler) -> Result<String> {
    let discipline = match scheduler {
        Scheduler::Rr => "discipline = \"rr\"",
        Scheduler::Fcfs => "discipline = \"fcfs\"",
        Scheduler::EdfHard => "discipline = \"edf\"\nexpiry = \"hard\"",
        Scheduler::EdfSoft => "discipline = \"edf\"\nexpiry = \"soft\"",
        Scheduler::Abs => "discipline = \"abs\"",
        Scheduler::MlRr | Scheduler::Paced => "discipline = \"ml\"\nlow = \"rr\"",
        Scheduler::MlFcfs => "discipline = \"ml\"\nlow = \"fcfs\"",
        Scheduler::MlEdf => "discipline = \"ml\"\nlow = \"edf\"",
        Scheduler::MlWfq => "discipline = \"ml\"\nlow = \"wfq\"",
        Scheduler::Wfq => "discipline = \"wfq\"",
        Scheduler::Lottery => "discipline = \"lottery\"",
        _ => bail!("no relay has this discipline"),
    };
    let mut text = format!("[schedule]\n{discipline}\n");
    for (index, class) in plan.classes.iter().enumerate() {
        text += &class_section(class);
        write!(text, "[[rule]]\nclass = \"{}\"\nports = {}\n", class.name, port(index))?;
    }
    Ok(text)
}

/// Returns the section of a policy that defines a class.
pub(super) fn class_section(class: &Class) -> String {
    let Class { name, level, priority, weight, deadline_ms, .. } = class;
    let level = match level {
        Level::High => "high",
        Level::Low => "low",
    };
    let deadline = deadline_ms.map_or(String::new(), |ms| format!("deadline_ms = {ms}\n"));
    format!("[class.{name}]\nlevel = \"{level}\"\npriority = {priority}\nweight = {weight}\n{deadline}")
}

/// Starts the edge with a forward for each class, and waits until it serves.
fn start_edge(site: &Site, plan: &Plan, sections: &str) -> Result<Process> {
    let folder = site.path("");
    let folder = folder.display().to_string();
    let folder = folder.trim_end_matches('/');
    let (relay, mode) = (site.template(Family::V4), plan.tunnel.mode.name());
    let mut text = format!("state_dir = \"{folder}/edge\"\n[metrics]\nlisten = \"{EDGE_METRICS}\"\n{sections}");
    for (index, class) in plan.classes.iter().enumerate() {
        let (listen, target) = (edge_address(index), site.target(Family::V4, port(index)));
        write!(
            text,
            r#"
            [[forward]]
            listen = "{listen}"
            relay = "{relay}"
            target = "{target}"
            class = "{name}"
            mode = "{mode}"
            ca = "{folder}/authority.pem"
            "#,
            name = class.name
        )?;
    }
    let file = site.write("edge.toml", &text)?;
    let edge = site.chain.client.start(program("paced")?, ["run".into(), "--config".into(), file])?;
    wait_for("the edge", SOON, || Counts::read(&site.chain.client, EDGE_METRICS).ok())
        .with_context(|| format!("the edge said:\n{}", edge.output()))?;
    Ok(edge)
}

/// Connections in random order: the first connection finds an idle path, and its first flight leaves at once, whatever
/// its priority.
fn order(connections: usize, seed: u64) -> Vec<usize> {
    let mut random = Random::new(seed, 3);
    let mut left: Vec<_> = (0..connections).collect();
    (0..connections).map(|_| left.swap_remove(random.below(left.len()))).collect()
}

/// Makes all requests, spread over inner connections in turns; requests that start at the same time start by connection,
/// in `order`.
///
/// A connection that carries one request is opened for it, and opening it, including the tunnel, is part of the latency
/// (thesis §2.4, "MASQUE Scheduling Microbenchmark"). Connections that carry several requests are open before the first
/// request.
async fn measure(plan: &Plan, requests: &[Request], clients: &[s2n_quic::Client], order: &[usize]) -> Result<Run> {
    let (count, classes) = (clients.len(), plan.classes.len());
    ensure!(count >= requests.len() || count % classes == 0, "the requests of a connection are not of one class");
    let edge = |index: usize| edge_address(requests[index % requests.len()].class);
    let limit = Duration::from_secs(plan.workload.limit_s);
    let standing = match count < requests.len() {
        true => {
            let each = clients.iter().enumerate().map(|(index, client)| stock::connect(client, edge(index)));
            Some(
                tokio::time::timeout(limit, try_join_all(each))
                    .await
                    .context("inner connections are not established in time")??,
            )
        }
        false => None,
    };
    let began = Instant::now();
    let by_connection = order.iter().flat_map(|first| (*first..requests.len()).step_by(count));
    let each = by_connection.map(|index| {
        let request = &requests[index];
        let (client, standing) = (&clients[index % count], standing.as_ref().map(|all| all[index % count].handle()));
        async move {
            let start = began + Duration::from_nanos(request.start_ns);
            sleep_until(start).await;
            let echo = async {
                let handle = match standing {
                    Some(handle) => handle,
                    None => stock::connect(client, edge(index)).await?.handle(),
                };
                stock::request(handle, plan.classes[request.class].bytes).await
            };
            // A request that the relay or the inner connection gave up has no latency.
            let echoed = timeout_at(began + limit, echo).await.is_ok_and(|echo| echo.is_ok());
            (index, echoed.then(|| start.elapsed()))
        }
    });
    let mut latencies = vec![None; requests.len()];
    join_all(each).await.into_iter().for_each(|(index, latency)| latencies[index] = latency);
    Ok(Run::new(plan, requests, &latencies, began.elapsed()))
}

#[cfg(test)]
mod tests {
    use config::{
        policy::{Policy, Subject},
        targets::Protocol,
    };
    use plan::{self, Topology};

    use super::*;

    #[test]
    fn a_run_whose_payloads_travel_in_the_other_form_is_refused() {
        assert!(judge(Mode::Stream, 0, 100).is_ok());
        assert!(judge(Mode::Stream, 1, 100).is_err());
        assert!(judge(Mode::Datagram, 95, 100).is_ok());
        assert!(judge(Mode::Datagram, 5, 100).is_err());
    }

    #[test]
    fn all_connections_start_in_an_order_of_the_seed() {
        let mut sorted = order(10, 1);
        assert_ne!(sorted, order(10, 2));
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn the_policy_of_every_plan_gives_each_port_its_class() {
        let plans = plan::names().unwrap().into_iter().filter_map(|name| match plan::Any::read(&name).unwrap() {
            plan::Any::Network(plan) => Some(plan),
            plan::Any::Serving(_)
            | plan::Any::Paths(_)
            | plan::Any::Trees(_)
            | plan::Any::Stack(_)
            | plan::Any::Processes(_) => None,
        });
        for plan in plans.filter(|plan| plan.topology == Topology::Masque) {
            for scheduler in &plan.schedulers {
                let policy = Policy::from_toml(&policy(&plan, *scheduler).unwrap()).unwrap();
                for (index, class) in plan.classes.iter().enumerate() {
                    let (address, listener) = (edge_address(index), edge_address(0));
                    let (protocol, translated) = (Protocol::Udp, None);
                    let subject = Subject { user: None, name: None, address, translated, protocol, listener };
                    assert_eq!(policy.class(policy.classify(&subject)).name, class.name);
                }
            }
        }
    }
}
