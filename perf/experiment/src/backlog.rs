//! Requests beside streams that always have something to send: how long does each request take to leave the sender?
//!
//! All bytes go up, and the server reads them as they arrive. A request has left when its last byte was put into a
//! packet for the first time, according to the transport's events; whether that packet is lost and sent again does not
//! matter here.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use ends::{Departures, direct::connect};
use futures::{StreamExt as _, future::try_join_all, stream::FuturesUnordered};
use instruments::load::Figure;
use plan::Plan;
use quic::{class::Terms, clock::Clock, dispatch::Dispatcher};
use s2n_quic::{Client, Server, connection::Handle};

use super::{
    Request, Run,
    direct::{beside, terms},
};

/// How many bytes a stream of the backlog queues at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// Makes requests beside the plan's backlog until all have left, or the plan's limit has passed. A request's latency is
/// the time from its start until it has left; the goodput is that of all streams, counted in `received` by the server.
///
/// # Errors
/// When there is no connection, or it ends.
pub async fn request(
    (client, departures): (Client, Departures),
    (server, received): (SocketAddr, &AtomicU64),
    plan: &Plan,
    requests: &[Request],
    clock: Clock,
) -> Result<Run> {
    let mut handle = connect(&client, server).await?;
    let (dispatcher, driver) = Dispatcher::of(&mut handle)?;
    let began_ns = (clock.now_ns)();
    let one = |(index, request): (usize, &Request)| {
        let (handle, dispatcher, departures) = (handle.clone(), &dispatcher, &departures);
        let (class, start_ns) = (&plan.classes[request.class], began_ns + request.start_ns);
        async move {
            (clock.sleep_until)(start_ns).await;
            let left_ns = send(handle, dispatcher, departures, terms(class), class.bytes).await?;
            Ok::<_, anyhow::Error>((index, Duration::from_nanos(left_ns - start_ns)))
        }
    };
    let mut pending: FuturesUnordered<_> = requests.iter().enumerate().map(one).collect();
    let backlog = try_join_all((0..plan.workload.backlog).map(|_| send_endlessly(handle.clone(), &dispatcher)));
    let rest = async { tokio::join!(backlog, driver.run()) };
    let limit = (clock.sleep_until)(began_ns + plan.workload.limit_s * 1_000_000_000);
    let (mut rest, mut limit) = (Box::pin(rest), limit);
    let mut latencies = vec![None; requests.len()];
    loop {
        tokio::select! {
            left = pending.next() => match left {
                Some(left) => {
                    let (index, latency) = left?;
                    latencies[index] = Some(latency);
                }
                None => break,
            },
            _ = &mut rest => break,
            () = &mut limit => break,
        }
    }
    let total = Duration::from_nanos((clock.now_ns)() - began_ns);
    handle.close(0_u8.into());
    let goodput_mbit = received.load(Relaxed) as f64 * 8e-6 / total.as_secs_f64();
    let figures = vec![Figure { metric: "goodput_mbit", value: goodput_mbit, unit: "Mbit/s" }];
    let mut run = Run { figures, ..Run::new(plan, requests, &latencies, total) };
    // Bytes that have arrived count, whether or not their request is whole.
    run.lower_bounds.retain(|metric| *metric != "goodput_mbit");
    Ok(run)
}

/// Sends a request and returns when its last byte left, in nanoseconds of the clock.
async fn send(
    mut handle: Handle,
    dispatcher: &Dispatcher,
    departures: &Departures,
    terms: Terms,
    bytes: usize,
) -> Result<u64> {
    let (_receive, stream) = handle.open_bidirectional_stream().await.context("no stream")?.split();
    let left = departures.of(stream.id(), bytes as u64);
    let mut stream = dispatcher.attach(stream, terms);
    stream.send(vec![0; bytes].into()).await?;
    stream.finish();
    left.await.context("the connection ended")
}

/// Sends without end, on a stream of no class.
async fn send_endlessly(mut handle: Handle, dispatcher: &Dispatcher) -> Result<()> {
    let (_receive, stream) = handle.open_bidirectional_stream().await.context("no stream")?.split();
    let mut stream = dispatcher.attach(stream, Terms::default());
    loop {
        stream.send(Bytes::from_static(&[0; CHUNK_BYTES])).await?;
    }
}

/// Returns a function for [`serve`] that counts bytes.
pub fn count(received: Arc<AtomicU64>) -> impl Fn(usize) {
    move |bytes| _ = received.fetch_add(bytes as u64, Relaxed)
}

/// Reads all streams of all connections until the endpoint ends, and calls `read` with the number of bytes of each
/// chunk.
pub async fn serve(mut server: Server, read: impl Fn(usize)) {
    let mut connections = FuturesUnordered::new();
    while let Some(mut connection) = beside(server.accept(), &mut connections).await {
        let read = &read;
        connections.push(async move {
            let mut streams = FuturesUnordered::new();
            while let Ok(Some(mut stream)) = beside(connection.accept_bidirectional_stream(), &mut streams).await {
                streams.push(async move {
                    while let Ok(Some(chunk)) = stream.receive().await {
                        read(chunk.len());
                    }
                });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use plan::{Clock, Plan, Scheduler};

    use crate::run;

    #[test]
    fn requests_leave_at_once_beside_a_backlog_under_two_levels_and_late_in_plain_streams() {
        let mut plan = Plan::read("urgent").unwrap();
        plan.workload.requests = 5;
        let median_ms = |scheduler| {
            let run = run(&plan, scheduler, Clock::VirtualNetwork, plan.seed).unwrap();
            let mut latencies: Vec<_> = run.samples.iter().map(|sample| sample.latency_ns.unwrap()).collect();
            latencies.sort_unstable();
            latencies[latencies.len() / 2] / 1_000_000
        };
        let (ml, plain) = (median_ms(Scheduler::MlRr), median_ms(Scheduler::Plain));
        assert!(ml <= 60 && plain >= 1_000, "{ml} ms, {plain} ms");
    }
}
