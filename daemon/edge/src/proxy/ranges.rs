//! Answers to requests for `http` URIs that may be fetched in ranges (RFC 9110 §14), so that one download uses several paths.
//!
//! | module | what it holds |
//! |---|---|
//! | [`answer`] | the heads of answers: whether ranges are possible, and whether an answer is the range that was requested |
//! | [`plan`] | which fetcher asks for which bytes, and the order of the bytes for the client |
//! | [`origin`] | a connection to the server, through a tunnel |
//! | [`fetch`] | the fetchers: two for each path |
//! | [`setbacks`] | when a fetcher asks again after a failure, and when it gives up |
//!
//! The request goes to the server unchanged. If the answer is long, and says that ranges of it can be had, further requests follow over the
//! other paths. The client receives the head of the first answer, and the bytes in their order.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use masque::target::Target;
use role::{door::reset, tcp::is_another_request};
use tokio::{
    io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::Notify,
    task::JoinSet,
    time::timeout,
};
use tracing::debug;
use uplink::PathBeside;

use self::{
    answer::{AnswerHead, WholeAnswer},
    fetch::{Begun, DividedDownload},
    origin::{OriginConnection, Tunnels},
};
use super::Shared;
use crate::{connect::OpenedTcp, roster::LocalClient};

mod answer;
mod fetch;
mod origin;
mod plan;
mod setbacks;

/// How many answers the clients of a proxy may receive in ranges at once. Further ones take one path.
pub const MOST_DIVIDED: usize = 8;

/// The largest number of paths for one answer. Each has two connections to the server, and browsers have six.
const PATHS: usize = 3;

/// Serves a client whose request `asked` is sent to the server through an open tunnel.
pub(super) async fn serve(
    shared: &Arc<Shared>,
    opened: OpenedTcp,
    mut stream: TcpStream,
    (known, target): (&LocalClient, &Target),
    asked: &[u8],
) {
    let tunnels = Arc::new(Tunnels::new(shared, known, target));
    let (mut read, mut write) = stream.split();
    let ended = Notify::new();
    let is_whole = tokio::select! {
        carried = carry(shared, &tunnels, opened, (&mut write, &ended), asked) => carried.is_some(),
        () = broken(&mut read, &ended) => false,
    };
    if is_whole {
        _ = write.shutdown().await;
    } else {
        reset(&stream);
    }
    tunnels.close().await;
}

/// Completes when the client breaks its connection, or sends another request, which would get no answer. Notifies `ended` when the client
/// will send no more; it may still receive.
async fn broken(read: &mut ReadHalf<'_>, ended: &Notify) {
    let mut buffer = [0; 512];
    loop {
        match read.read(&mut buffer).await {
            Ok(0) => {
                ended.notify_one();
                std::future::pending().await
            }
            Ok(len) if !is_another_request(&buffer[..len]) => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// Carries the answer to the client, whose bytes have `ended` if it is notified. Returns `None` if bytes are missing.
async fn carry(
    shared: &Shared,
    tunnels: &Arc<Tunnels>,
    opened: OpenedTcp,
    (write, ended): (&mut WriteHalf<'_>, &Notify),
    asked: &[u8],
) -> Option<()> {
    let mut first = tunnels.connection(opened, asked);
    let head = tokio::select! {
        head = first.head() => head,
        () = ended.notified() => {
            first.end().await;
            first.head().await
        }
    };
    // What is no answer of HTTP/1.1 goes to the client as it is.
    let head = head.ok().flatten();
    let mut rest = None;
    if let Some((head, len)) = head {
        rest = head.content_bytes.map(|bytes| bytes.saturating_add(len as u64));
        if let Some(rest) = rest {
            first.place.ends_after(rest.saturating_sub(first.available() as u64));
        }
        if let Some((whole, paths)) = divisible(shared, &first, &head)
            && let Ok(_place) = shared.divided.try_acquire()
        {
            write_within(write, first.take(len as u64), shared.access.idle).await?;
            return divide(shared, tunnels, first, write, (asked, whole, &paths)).await;
        }
    }
    // The server may keep its connection open after an answer whose length it has told.
    while rest != Some(0) {
        let bytes = first.take(rest.unwrap_or(u64::MAX));
        if bytes.is_empty() {
            let has_more = tokio::select! {
                has_more = first.fill() => has_more,
                () = ended.notified() => {
                    first.end().await;
                    continue;
                }
            };
            if !has_more {
                return first.has_finished().await.then_some(());
            }
        }
        rest = rest.map(|rest| rest - bytes.len() as u64);
        write_within(write, bytes, shared.access.idle).await?;
    }
    Some(())
}

/// Writes bytes to the client. Returns `None` if its connection is broken, or if it takes nothing for the time `idle`.
async fn write_within(write: &mut (impl AsyncWrite + Unpin), mut bytes: Bytes, idle: Duration) -> Option<()> {
    while !bytes.is_empty() {
        timeout(idle, write.write_buf(&mut bytes)).await.ok()?.ok()?;
    }
    Some(())
}

/// Returns what identifies the answer, and the paths beside the one of its connection, if it is worth fetching over these too.
fn divisible(shared: &Shared, first: &OriginConnection, head: &AnswerHead) -> Option<(WholeAnswer, Vec<PathBeside>)> {
    let (access, least) = (&shared.access, shared.split_bytes?);
    let whole = head.whole().filter(|whole| whole.bytes >= least)?;
    let mut paths = access.uplink.paths_beside(&access.membership.get(), &first.place, whole.bytes);
    paths.truncate(PATHS - 1);
    (!paths.is_empty()).then_some((whole, paths))
}

/// Fetches an answer over the path of `first` and the others, and writes it to the client. Returns `None` if bytes are missing.
async fn divide(
    shared: &Shared,
    tunnels: &Arc<Tunnels>,
    first: OriginConnection,
    write: &mut WriteHalf<'_>,
    (asked, whole, others): (&[u8], WholeAnswer, &[PathBeside]),
) -> Option<()> {
    let counters = &shared.access.counters;
    let path = first.place.line().path_place();
    let download = DividedDownload::new(tunnels.clone(), asked, whole, counters.ranges_failed.clone());
    let mut fetchers: JoinSet<Option<(usize, Begun)>> = JoinSet::new();
    let fetch = |fetchers: &mut JoinSet<_>, id, path, begun| {
        let download = download.clone();
        fetchers.spawn(async move {
            download.fetch(id, path, begun).await;
            None
        });
    };
    let fetching = download.clone();
    fetchers.spawn(async move {
        fetching.fetch_first(first).await;
        None
    });
    // Each path has two fetchers.
    let add = |path: &PathBeside| download.add(Some(path.bytes_per_sec as f64 / 2.0));
    let (prober, probing) = (others.first().map_or_else(|| download.add(None), add), download.clone());
    let paths: Vec<_> = others.iter().map(|other| other.path).collect();
    fetchers.spawn(async move { probing.probe(prober, &paths).await });
    loop {
        if fetchers.is_empty() && !download.has_arrived() {
            // No server and no path brings the rest.
            return None;
        }
        tokio::select! {
            bytes = timeout(shared.access.idle, download.next()) => match bytes {
                Ok(Some(bytes)) => write_within(write, bytes, shared.access.idle).await?,
                Ok(None) => return Some(()),
                Err(_) => return None,
            },
            Some(ended) = fetchers.join_next() => {
                if let Ok(Some((probed, begun))) = ended {
                    debug!(paths = others.len() + 1, "the answer is fetched in ranges");
                    counters.answers_divided.inc();
                    fetch(&mut fetchers, prober, probed, Some(begun));
                    for other in others {
                        fetch(&mut fetchers, add(other), other.path, None);
                        if other.path != probed {
                            fetch(&mut fetchers, add(other), other.path, None);
                        }
                    }
                    fetch(&mut fetchers, download.add(None), path, None);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_may_take_bytes_slowly_but_not_stop() {
        const IDLE: Duration = Duration::from_secs(60);
        let (mut ours, mut client) = tokio::io::duplex(16);
        let reading = tokio::spawn(async move {
            for _ in 0..4 {
                tokio::time::sleep(IDLE / 2).await;
                client.read_exact(&mut [0; 16]).await.unwrap();
            }
            client
        });
        let bytes = Bytes::from_static(&[7; 64]);
        assert_eq!(write_within(&mut ours, bytes.clone(), IDLE).await, Some(()), "it takes some each half minute");
        let _client = reading.await.unwrap();
        assert_eq!(write_within(&mut ours, bytes, IDLE).await, None, "it takes nothing");
    }
}
