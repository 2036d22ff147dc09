//! The tunnel of an association to one target: it is opened, moved to other connections, and carries payloads in both directions.

use std::{
    future::poll_fn,
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
};

use config::targets::Protocol;
use quic::segments::Segments;
use relay_client::{
    TunnelSecret,
    backoff::{Backoff, random},
};
use role::traffic::Traffic;
use tokio::{
    net::UdpSocket,
    time::{Instant, timeout},
};
use tracing::debug;
use uplink::{LinkId, OpenTunnel};

use super::{
    super::shared::CLIENT_GONE,
    Shared,
    flow::{EVICTED, Flow, WAITING_BYTES},
};
use crate::{
    connect::{NoConnection, OPERATOR, OpenedUdp, word_of_udp},
    parting::FormerTunnel,
    roster::{EdgeTunnel, LocalClient},
};

/// Carries a flow.
pub(super) struct Carrier {
    pub(super) shared: Arc<Shared>,
    pub(super) socket: Arc<UdpSocket>,
    pub(super) client: LocalClient,
    pub(super) flow: Arc<Flow>,
    /// The header before each payload for the client.
    pub(super) header: Vec<u8>,
}

impl Carrier {
    /// Opens the tunnel and carries it until it ends, or until the flow is closed.
    pub(super) async fn run(self) -> Arc<Flow> {
        let secret = TunnelSecret::new();
        let opened = tokio::select! {
            opened = self.open(secret, None) => Some(opened),
            () = self.flow.closed() => None,
        };
        match opened {
            Some(Ok(opened)) => {
                self.shared.access.counters.tunnels_opened.inc();
                self.carry(opened, secret).await;
            }
            // Payloads that arrive for the target meanwhile do not justify another request.
            Some(Err(_)) => _ = timeout(self.shared.backoff.0, self.flow.closed()).await,
            None => {
                let reason = self.flow.inbox().closed.filter(|reason| *reason == EVICTED).unwrap_or(CLIENT_GONE);
                self.shared.access.deny(&self.client, Some((Protocol::Udp, &self.flow.target)), reason);
            }
        }
        let mut inbox = self.flow.inbox();
        self.shared.access.counters.dropped_waiting.inc_by(inbox.payloads.len() as u64);
        inbox.payloads.clear();
        inbox.place = None;
        inbox.closed = Some("finished");
        drop(inbox);
        self.flow
    }

    /// Opens a tunnel, which may leave the place `left`.
    async fn open(&self, secret: Option<TunnelSecret>, left: Option<&LinkId>) -> Result<OpenedUdp, NoConnection> {
        let (access, target) = (&self.shared.access, &self.flow.target);
        let opened = access.open_udp(&self.client, target, self.shared.mode, (secret, left)).await;
        opened.inspect_err(|error| {
            debug!(client = %self.client.address, target = %self.flow.target, "no tunnel: {error}");
        })
    }

    /// Waits until the tunnel's connection is left, or until there is a better path, then opens the tunnel that replaces it. Also returns
    /// whether it found a better path.
    async fn reopen(&self, place: LinkId, secret: Option<TunnelSecret>) -> (OpenedUdp, bool) {
        let mut backoff = Backoff::new(self.shared.backoff);
        let access = &self.shared.access;
        let _moves = place.line().hold_movable();
        loop {
            let tunnel = OpenTunnel {
                place: &place,
                membership: &access.membership,
                target: (&self.flow.target, self.shared.mode),
                secret,
            };
            tokio::select! {
                () = place.line().left() => {}
                better = access.better_udp(&tunnel) => return (better, true),
            }
            match self.open(secret, Some(&place)).await {
                // Also on the old connection, if that is in use again: the relay sends to the newest tunnel.
                Ok(opened) => return (opened, false),
                Err(error) => {
                    let wait = backoff.failed(Instant::now(), random()).unwrap_or_default();
                    let asked = error.retry_after();
                    if asked.is_none() || !access.uplink.has_willing() {
                        access.uplink.pause(&place, wait.max(asked.unwrap_or_default())).await;
                    }
                }
            }
        }
    }

    async fn carry(&self, mut opened: OpenedUdp, secret: Option<TunnelSecret>) {
        let mut downlink = Segments::new(WAITING_BYTES);
        let access = &self.shared.access;
        let enter = |opened: &OpenedUdp| {
            let (target, stream_id) = ((Protocol::Udp, &self.flow.target), opened.tunnel.stream_id());
            let terms = (&access.membership, Some(opened.tunnel.losses().clone()));
            access.entrance.enter(&self.client, target, (&opened.link, stream_id), terms)
        };
        let mut entry = enter(&opened);
        let mut moving = pin!(self.reopen(opened.link.id(), secret));
        let mut counted = (0, 0);
        let mut former = None;
        loop {
            let moved = poll_fn(|cx| {
                FormerTunnel::poll(&mut former, cx, &mut downlink, |payloads, traffic| {
                    access.counters.bytes_down.inc_by(self.deliver(payloads, traffic));
                });
                self.poll(cx, &mut opened, &mut downlink, &entry)
            });
            let moved = tokio::select! {
                moved = timeout(self.shared.udp_idle, moved) => moved.unwrap_or(Err("idle")),
                () = entry.closed() => Err(OPERATOR),
                // The next tunnel is opened before this one ends.
                (next, is_return) = &mut moving => {
                    access.counters.count(&entry.traffic, &mut counted);
                    access.uplink.note_move(opened.link.line(), next.link.line(), is_return);
                    let before = std::mem::replace(&mut entry, enter(&next));
                    counted = (0, 0);
                    moving.set(self.reopen(next.link.id(), secret));
                    let OpenedUdp { tunnel, link, .. } = std::mem::replace(&mut opened, next);
                    former = FormerTunnel::keep(tunnel, link, before, opened.link.line());
                    continue;
                }
            };
            access.counters.count(&entry.traffic, &mut counted);
            if let Err(reason) = moved {
                entry.note_end(reason);
                return opened.tunnel.finish();
            }
        }
    }

    /// Sends payloads to the client, counts them, and returns how many bytes they have.
    fn deliver(&self, downlink: &mut Segments, traffic: &Traffic) -> u64 {
        let counters = &self.shared.access.counters;
        let (mut bytes, mut count) = (0, 0);
        for payload in downlink.iter() {
            let datagram = [&self.header[..], payload].concat();
            // As in a router: if the socket does not accept a payload at once, it is dropped.
            let sent = self.socket.try_send_to(&datagram, self.client.address);
            if sent.is_ok() {
                bytes += payload.len() as u64;
                count += 1;
            } else {
                counters.dropped_down.inc();
                traffic.add_unsent(0, 1);
            }
        }
        counters.packets_down.inc_by(count);
        traffic.add_down(bytes, count);
        downlink.clear();
        bytes
    }

    /// Moves payloads in both directions. Ready if any moved.
    ///
    /// # Errors
    /// The tunnel has ended; the error is the access log's word for that.
    fn poll(
        &self,
        cx: &mut Context<'_>,
        opened: &mut OpenedUdp,
        downlink: &mut Segments,
        entry: &EdgeTunnel,
    ) -> Poll<Result<(), &'static str>> {
        let counters = &self.shared.access.counters;
        opened.follow(&self.shared.access);
        let mut inbox = self.flow.inbox();
        inbox.waker.clone_from(cx.waker());
        if let Some(reason) = inbox.closed {
            return Poll::Ready(Err(reason));
        }
        let mut has_moved = !inbox.payloads.is_empty();
        if has_moved {
            let mut batch = opened.tunnel.batch(opened.link.form(self.shared.mode));
            inbox.payloads.iter().for_each(|payload| batch.push(payload));
            entry.note_form(batch.form());
            counters.packets_up.inc_by(inbox.payloads.len() as u64);
            entry.traffic.add_up(inbox.payloads.bytes() as u64, inbox.payloads.len() as u64);
            inbox.payloads.clear();
        }
        drop(inbox);
        match opened.tunnel.poll_recv(cx, downlink) {
            Poll::Ready(Ok(true)) => {
                has_moved = true;
                _ = self.deliver(downlink, &entry.traffic);
            }
            Poll::Ready(Ok(false)) => return Poll::Ready(Err("finished")),
            Poll::Ready(Err(error)) => return Poll::Ready(Err(word_of_udp(&error))),
            Poll::Pending => {
                if let Err(error) = opened.tunnel.poll_stopped(cx) {
                    return Poll::Ready(Err(word_of_udp(&error)));
                }
            }
        }
        if has_moved { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}
