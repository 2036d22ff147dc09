//! One-way transfers, as fast as possible: how much CPU time do they cost the sender?
//!
//! Each end has its own thread, and natively its own core, so that the sender's CPU time is that of its thread. It
//! counts from the end of the handshake until the server has read everything. `plain` is s2n-quic without our providers:
//! its own congestion controller, no subscriber to its events, and direct writes to streams.

use std::{
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bytes::Bytes;
use ends::{
    Carrier,
    direct::{Ends, connect},
};
use futures::future::try_join_all;
use instruments::{
    load::{Figure, value},
    process,
};
use plan::{self, Class, Plan, Reader, Scheduler};
use quic::{clock::Clock, dispatch::Dispatcher};
use rustix::time::{ClockId, clock_gettime};
use s2n_quic::{
    connection::Handle,
    stream::{ReceiveStream, SendStream},
};
use tokio::sync::oneshot;

use super::{
    Request, Run, backlog,
    direct::terms,
    emulated::{Emulated, block_on},
    reader, requests, train,
};

/// Runs one repetition between two hosts of the lab, or over loopback.
///
/// # Errors
/// If this is not the lab, the scheduler is not a scheduler of QUIC, or a stream ends early.
pub fn run(plan: &Plan, scheduler: Scheduler, clock: plan::Clock, seed: u64) -> Result<Run> {
    let ends = Ends::new(plan, scheduler, Clock::system(), seed)?;
    let requests = requests(plan, seed);
    let network = (clock == plan::Clock::Lab).then(|| Emulated::verified(&plan.network, seed)).transpose()?;
    let host = network.as_ref().map_or(Ipv4Addr::LOCALHOST, |network| network.chain.access.far.v4);
    let (started, address) = oneshot::channel();
    let (done, ended) = oneshot::channel::<()>();
    let reader = plan.workload.reader;
    thread::scope(|scope| {
        let serve = || serve(&ends, host, reader, started, ended);
        let server = scope.spawn(|| match &network {
            Some(network) => network.chain.relay.run(serve)?,
            None => process::bind_to_core(0).map_err(Into::into).and_then(|()| serve()),
        });
        let send = || -> Result<Run> {
            let server = address.blocking_recv().context("no server")?;
            block_on(send(&ends, server, plan, &requests, scheduler))
        };
        let run = match &network {
            // Observing packets costs CPU time, which would count as the dispatcher's.
            Some(network) if scheduler.is_of_packets() => {
                if matches!(scheduler, Scheduler::Stock | Scheduler::Paced) {
                    network.enforce_departures()?;
                }
                let run = observed(network, || network.chain.client.run(send)?)?;
                judge(scheduler, &run.figures)?;
                Ok(run)
            }
            Some(network) => network.chain.client.run(send)?,
            None => process::bind_to_core(1).map_err(Into::into).and_then(|()| send()),
        };
        drop(done);
        let served = server.join().map_err(|_| anyhow!("the server's thread panicked"))?;
        served.and(run)
    })
}

/// In the lab, packets that leave one by one at full speed have gaps below this: a system call for a packet takes 13 µs.
const AT_ONCE_US: f64 = 25.0;

/// Refuses a run in which packets did not leave as the scheduler's name says.
fn judge(scheduler: Scheduler, figures: &[Figure]) -> Result<()> {
    let figure = |metric| value(figures, metric).unwrap_or_default();
    let (alone, median_us, gap_us) = (figure("train_le_1_pct"), figure("gap_p50_us"), figure("gap_p90_us"));
    let short = figure("train_le_5_pct");
    match scheduler {
        Scheduler::ActiveWait => {
            ensure!(
                median_us >= AT_ONCE_US,
                "active-wait does not wait: half of all packets leave within {median_us:.0} µs of the last"
            );
        }
        Scheduler::PassiveWait => {
            ensure!(
                gap_us >= 500.0,
                "passive-wait does not wait: nine of ten packets leave within {gap_us:.0} µs of the last"
            );
        }
        Scheduler::Unpaced => ensure!(alone < 50.0, "unpaced waits: {alone:.1} % of packets leave alone"),
        // The bursts of s2n-quic's pacer have ten packets.
        Scheduler::Stock => {
            ensure!(short < 50.0, "stock is paced: {short:.1} % of packets leave in trains of at most five")
        }
        Scheduler::Paced => {
            ensure!(short >= 75.0, "paced sends bursts: {short:.1} % of packets leave in trains of at most five");
        }
        _ => {}
    }
    Ok(())
}

/// Runs `send`, and adds how its packets left and how many were dropped.
fn observed(network: &Emulated, send: impl FnOnce() -> Result<Run>) -> Result<Run> {
    let before = [network.dropped_packets()?, reader::overflowed_packets(&network.chain.relay)?];
    let capture = network.capture()?;
    let mut run = send()?;
    let after = [network.dropped_packets()?, reader::overflowed_packets(&network.chain.relay)?];
    for (index, metric) in ["dropped_packets", "overflowed_packets"].into_iter().enumerate() {
        let value = (after[index] - before[index]) as f64;
        run.figures.push(Figure { metric, value, unit: "packets" });
    }
    run.figures.extend(train::figures(&capture.read()?));
    Ok(run)
}

fn serve(
    ends: &Ends,
    host: Ipv4Addr,
    reader: Option<Reader>,
    started: oneshot::Sender<SocketAddr>,
    ended: oneshot::Receiver<()>,
) -> Result<()> {
    block_on(async {
        let server = match reader {
            Some(reader) => {
                // The lab has one CPU; a reader with its own CPU would not wait for the sender's.
                process::run_first()?;
                ends.server(Carrier::Sockets(reader::sockets(host, reader)?))?
            }
            None => ends.receiver(host)?,
        };
        let read = |bytes| reader.into_iter().for_each(|reader| reader::read(reader, bytes));
        _ = started.send(server.local_addr()?);
        tokio::select! {
            () = backlog::serve(server, read) => bail!("the server ended"),
            _ = ended => Ok(()),
        }
    })
}

/// How many bytes a stream queues at once.
const CHUNK_BYTES: usize = 64 * 1024;

static CHUNK: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];

async fn send(ends: &Ends, server: SocketAddr, plan: &Plan, requests: &[Request], scheduler: Scheduler) -> Result<Run> {
    let client = ends.sender()?;
    let awake = (scheduler == Scheduler::ActiveWait).then(|| tokio::spawn(stay_awake()));
    let mut handle = connect(&client, server).await?;
    let now_ns = Clock::system().now_ns;
    let (began_ns, cpu_before_ns) = (now_ns(), thread_cpu_ns());
    let since = move |start_ns: u64| Duration::from_nanos(now_ns() - start_ns);
    let classes = || requests.iter().map(|request| plan.classes[request.class].clone());
    let schedules = scheduler != Scheduler::Plain;
    let (dispatcher, driver) = if schedules { Some(Dispatcher::of(&mut handle)?) } else { None }.unzip();
    // A separate task for each stream, as in the product, so that only the woken task is polled.
    let driver = driver.map(|driver| tokio::spawn(driver.run()));
    let streams = classes().map(|class| {
        let (handle, dispatcher) = (handle.clone(), dispatcher.clone());
        tokio::spawn(async move {
            let (receive, send) = open(handle).await?;
            match dispatcher {
                Some(dispatcher) => send_by_turns(send, receive, &dispatcher, &class).await?,
                None => send_plainly(send, receive, class.bytes).await?,
            }
            Ok::<_, anyhow::Error>(Some(since(began_ns)))
        })
    });
    let latencies: Vec<_> = try_join_all(streams).await?.into_iter().collect::<Result<_>>()?;
    for task in driver.into_iter().chain(awake) {
        task.abort();
    }
    let (total, cpu_ns) = (since(began_ns), thread_cpu_ns() - cpu_before_ns);
    handle.close(0_u8.into());
    let mut run = Run::new(plan, requests, &latencies, total);
    let bytes: usize = classes().map(|class| class.bytes).sum();
    run.figures.push(Figure { metric: "cpu_s_per_gb", value: cpu_ns as f64 / bytes as f64, unit: "s/GB" });
    Ok(run)
}

/// Keeps the runtime polling for due work; other threads may use this CPU in between.
async fn stay_awake() {
    loop {
        thread::yield_now();
        tokio::task::yield_now().await;
    }
}

async fn open(mut handle: Handle) -> Result<(ReceiveStream, SendStream)> {
    Ok(handle.open_bidirectional_stream().await.context("no stream")?.split())
}

async fn send_plainly(mut send: SendStream, receive: ReceiveStream, bytes: usize) -> Result<()> {
    for chunk in chunks(bytes) {
        send.send(chunk).await?;
    }
    send.finish()?;
    end(receive).await
}

async fn send_by_turns(send: SendStream, receive: ReceiveStream, dispatcher: &Dispatcher, class: &Class) -> Result<()> {
    let mut send = dispatcher.attach(send, terms(class));
    for chunk in chunks(class.bytes) {
        send.send(chunk).await?;
    }
    send.finish();
    end(receive).await
}

fn chunks(bytes: usize) -> impl Iterator<Item = Bytes> {
    (0..bytes).step_by(CHUNK_BYTES).map(move |start| Bytes::from_static(&CHUNK[..CHUNK_BYTES.min(bytes - start)]))
}

/// Waits until the server has read everything: it then ends its side, on which it sends nothing.
async fn end(mut receive: ReceiveStream) -> Result<()> {
    match receive.receive().await? {
        None => Ok(()),
        Some(_) => bail!("the server sends something"),
    }
}

/// Returns the CPU time of the calling thread. Under instruction-count time: its instructions, including the kernel's on
/// its behalf.
fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32).as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use instruments::load::{Figure, value};
    use plan::{Clock, Plan, Scheduler};

    use super::judge;
    use crate::compare;

    #[test]
    fn all_bytes_arrive_and_have_a_price_under_every_scheduler() {
        let mut plan = Plan::read("dispatcher-cost").unwrap();
        plan.classes[0].bytes = 300_000;
        plan.repetitions = 1;
        let outcomes = compare(&plan, &[Scheduler::Plain, Scheduler::MlRr], Clock::Native).unwrap();
        for outcome in &outcomes {
            assert_eq!(outcome.latencies(0).completion_pct(None), Some(100.0));
            assert!(value(&outcome.runs[0].figures, "cpu_s_per_gb").unwrap() > 0.0);
        }
        assert_eq!(value(&outcomes[0].runs[0].figures, "cpu_over_plain_pct"), None);
        assert!(value(&outcomes[1].runs[0].figures, "cpu_over_plain_pct").is_some());
    }

    #[test]
    fn a_sender_that_does_not_do_what_it_is_called_is_refused() {
        let figures = |alone, median_us, gap_us| {
            [
                ("train_le_1_pct", alone, "%"),
                ("train_le_5_pct", 2.0 * alone, "%"),
                ("gap_p50_us", median_us, "µs"),
                ("gap_p90_us", gap_us, "µs"),
            ]
            .map(|(metric, value, unit)| Figure { metric, value, unit })
        };
        for (scheduler, waits, does_not) in [
            // At 200 Mbit/s, even waiting packets follow each other within the 100 µs that define a train.
            (Scheduler::ActiveWait, (12.0, 55.0, 90.0), (2.1, 13.0, 1_095.0)),
            (Scheduler::PassiveWait, (5.0, 0.5, 950.0), (2.1, 13.0, 13.0)),
            (Scheduler::Unpaced, (0.1, 0.5, 20.0), (95.0, 150.0, 150.0)),
            (Scheduler::Stock, (0.2, 0.4, 700.0), (45.0, 230.0, 320.0)),
            (Scheduler::Paced, (45.0, 230.0, 320.0), (0.2, 0.4, 700.0)),
        ] {
            let judged = |(alone, median_us, gap_us)| judge(scheduler, &figures(alone, median_us, gap_us));
            assert!(judged(waits).is_ok(), "{}", scheduler.name());
            assert!(judged(does_not).is_err(), "{}", scheduler.name());
        }
        assert!(judge(Scheduler::MlRr, &figures(0.0, 0.0, 0.0)).is_ok());
    }
}
