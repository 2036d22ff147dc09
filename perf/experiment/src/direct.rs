//! Requests as streams of one QUIC connection, echoed by the server; over any IO provider.
//!
//! A request's first byte is the index of its class; from it, the server schedules the echo as the client does the
//! request. Deadlines count from the start of a request at the client, and from its arrival at the server.

use std::{net::SocketAddr, pin::pin, sync::Arc, task::Poll, time::Duration};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use ends::direct::connect;
use futures::{
    StreamExt as _,
    future::{Either, poll_fn, select, try_join},
    stream::FuturesUnordered,
};
use plan::{Class, Plan};
use quic::{
    class::Terms,
    clock::Clock,
    dispatch::{self, Dispatcher},
};
use s2n_quic::{
    Client, Connection, Server,
    connection::Handle,
    stream::{BidirectionalStream, Error as StreamError},
};

use super::{Request, Run};

/// Makes requests over one connection until all have ended, or the plan's limit has passed. Returns their outcome.
///
/// # Errors
/// When there is no connection, or a request fails for another reason than its deadline.
pub async fn request(
    client: Client,
    server: SocketAddr,
    plan: &Plan,
    requests: &[Request],
    clock: Clock,
) -> Result<Run> {
    let mut handle = connect(&client, server).await?;
    let (dispatcher, driver) = Dispatcher::of(&mut handle)?;
    let began_ns = (clock.now_ns)();
    let bodies: Vec<_> = plan.classes.iter().enumerate().map(|(index, class)| body(index, class)).collect();
    let mut latencies = vec![None; requests.len()];
    {
        let exchange = |(index, request): (usize, &Request)| {
            let (class, start_ns) = (&plan.classes[request.class], began_ns + request.start_ns);
            let (handle, dispatcher, body) = (handle.clone(), &dispatcher, bodies[request.class].clone());
            async move { (index, exchange(handle, dispatcher, terms(class), body, start_ns, clock).await) }
        };
        let mut pending: FuturesUnordered<_> = requests.iter().enumerate().map(exchange).collect();
        let all = async {
            while let Some((index, latency)) = pending.next().await {
                latencies[index] = latency?;
            }
            Ok::<_, anyhow::Error>(())
        };
        let limit = (clock.sleep_until)(began_ns + plan.workload.limit_s * 1_000_000_000);
        let driven = select(Box::pin(all), Box::pin(driver.run()));
        if let Either::Left((Either::Left((ended, _)), _)) = select(driven, limit).await {
            ended?;
        }
    }
    let total = elapsed(clock, began_ns);
    handle.close(0_u8.into());
    Ok(Run::new(plan, requests, &latencies, total))
}

/// Returns the scheduling terms of a class.
pub(super) fn terms(class: &Class) -> Terms {
    let deadline_ns = class.deadline_ms.map(|ms| ms * 1_000_000);
    Terms::of(class.service(), deadline_ns)
}

/// How many bytes of a body are queued at once.
const CHUNK_BYTES: usize = 16 * 1024;

fn body(index: usize, class: &Class) -> Bytes {
    let mut body = vec![0; class.bytes];
    // A plan has at most 256 classes, and a body has at least one byte.
    body[0] = index as u8;
    body.into()
}

/// Makes one request and returns how long it took. Returns `None` if its deadline ended it, at the client or at the
/// server.
async fn exchange(
    mut handle: Handle,
    dispatcher: &Dispatcher,
    terms: Terms,
    mut body: Bytes,
    start_ns: u64,
    clock: Clock,
) -> Result<Option<Duration>> {
    (clock.sleep_until)(start_ns).await;
    let bytes = body.len();
    let (mut receive, send) = handle.open_bidirectional_stream().await.context("no stream")?.split();
    let mut send = dispatcher.attach(send, terms);
    let sending = async {
        while !body.is_empty() {
            send.send(body.split_to(body.len().min(CHUNK_BYTES))).await?;
        }
        send.finish();
        Ok(())
    };
    let receiving = async {
        let mut received = 0;
        while let Some(chunk) = receive.receive().await? {
            received += chunk.len();
        }
        Ok::<_, dispatch::StreamWriteError>(received)
    };
    match try_join(sending, receiving).await {
        Ok(((), received)) if received == bytes => Ok(Some(elapsed(clock, start_ns))),
        Ok(((), received)) => bail!("{received} of {bytes} bytes came back"),
        Err(
            dispatch::StreamWriteError::Expired | dispatch::StreamWriteError::Stream(StreamError::StreamReset { .. }),
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn elapsed(clock: Clock, since_ns: u64) -> Duration {
    Duration::from_nanos((clock.now_ns)().saturating_sub(since_ns))
}

/// Serves until the endpoint ends.
pub async fn serve(mut server: Server, plan: Arc<Plan>) {
    let mut connections = FuturesUnordered::new();
    while let Some(connection) = beside(server.accept(), &mut connections).await {
        connections.push(echo_all(connection, &plan));
    }
}

/// Serves a connection until it ends.
async fn echo_all(connection: Connection, plan: &Plan) {
    let (mut handle, mut acceptor) = connection.split();
    let Ok((dispatcher, driver)) = Dispatcher::of(&mut handle) else { return };
    let mut echoes = FuturesUnordered::new();
    let all = async {
        while let Ok(Some(stream)) = beside(acceptor.accept_bidirectional_stream(), &mut echoes).await {
            echoes.push(echo(stream, &dispatcher, plan));
        }
    };
    select(pin!(all), pin!(driver.run())).await;
}

/// Waits for `next` while it also drives the others.
pub(super) async fn beside<T, F: Future>(next: impl Future<Output = T>, others: &mut FuturesUnordered<F>) -> T {
    let mut next = pin!(next);
    poll_fn(|cx| {
        while let Poll::Ready(Some(_)) = others.poll_next_unpin(cx) {}
        next.as_mut().poll(cx)
    })
    .await
}

/// Echoes a request's bytes. If the echo ends early, so does the stream, and the client sees that.
async fn echo(stream: BidirectionalStream, dispatcher: &Dispatcher, plan: &Plan) -> Result<()> {
    let (mut receive, send) = stream.split();
    let mut send = dispatcher.attach(send, Terms::default());
    let Some(first) = receive.receive().await? else { return Ok(()) };
    let class = first.first().and_then(|index| plan.classes.get(usize::from(*index))).context("no such class")?;
    send.set_terms(terms(class));
    send.send(first).await?;
    while let Some(chunk) = receive.receive().await? {
        send.send(chunk).await?;
    }
    send.finish();
    Ok(())
}
