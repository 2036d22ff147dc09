//! `pacectl probe`: checks whether the relay answers, and how well it carries UDP.

use std::{future::poll_fn, task::ready, time::Duration};

use anyhow::{Context as _, Result, bail};
use api::say;
use clap::Args;
use config::forward::TunnelMode;
use masque::{
    proxy_status::ErrorType,
    request::TunnelRefused,
    target::{Host, Target},
    tunnel::Form,
};
use quic::segments::{MAX_MESSAGE_BYTES, Segments};
use relay_client::{
    OpenError, backoff, drive,
    endpoint::{ANSWER_TIMEOUT, Endpoint},
};
use role::tunnel::{TunnelEnd, UdpTunnel};
use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use uplink::Link;

use super::options::{self, RelayOptions};

/// The bytes that identify a probe: a random ID of the run and the probe's number.
const HEADER_BYTES: usize = 12;

/// The payload of UDP that a path carries if it carries QUIC at all (RFC 9000 §14).
const EVERYWHERE_BYTES: u16 = 1_200;

/// How long to wait for answers after the last probe was sent.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Args)]
pub(crate) struct Arguments {
    /// A UDP echo server as HOST:PORT [default: in development mode, the echo of `paced run`. For other relays, pacectl
    /// only checks that the relay answers and admits this client: it requests 0.0.0.0:443, which each relay refuses and
    /// records]
    #[arg(value_parser = options::target)]
    target: Option<Target>,
    #[command(flatten)]
    relay: RelayOptions,
    /// How payloads travel to the relay: `auto`, `datagram` or `stream`
    #[arg(long, default_value = "auto", value_parser = options::mode)]
    mode: TunnelMode,
    /// The number of payloads to send
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// The size of each payload in bytes
    #[arg(long, default_value_t = 1_200, value_parser = clap::value_parser!(u16).range(HEADER_BYTES as i64..=MAX_MESSAGE_BYTES as i64))]
    size: u16,
    /// The time between two payloads in milliseconds
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    interval_ms: u64,
}

/// The results. Times are in microseconds.
#[derive(Serialize)]
struct Report {
    relay: String,
    relay_address: String,
    target: String,
    next_hop: Option<String>,
    form: &'static str,
    handshake_us: u64,
    tunnel_us: u64,
    sent: u32,
    received: usize,
    loss_percent: f64,
    rtt_us: Option<RoundTrips>,
}

/// Round trips in microseconds. Percentiles use the nearest rank.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct RoundTrips {
    min: u64,
    p50: u64,
    p95: u64,
    max: u64,
}

pub(crate) async fn run(arguments: &Arguments, as_json: bool) -> Result<()> {
    let target = match &arguments.target {
        Some(target) => target.clone(),
        None if arguments.relay.is_development() => Target { host: Host::Ip([127, 0, 0, 1].into()), port: 4_434 },
        None => return reach(arguments, as_json).await,
    };
    let endpoint =
        Endpoint::new(arguments.relay.access().await?, options::transport(), <_>::default(), <_>::default())?;
    let connected = endpoint.connect().await.map_err(|error| arguments.relay.explain(error))?;
    let link = Link::alone(&connected);
    let (address, handshake) = (connected.address, connected.handshake);
    let driver = tokio::spawn(drive(connected.connection));

    let echoed = Echoed::of(&target, &link, arguments).await;
    // Also after an error: else the connection counts against the user's limit until it has been idle for a long time.
    endpoint.close(&link.relay).await;
    driver.abort();

    let Echoed { tunnel_time, next_hop, form, round_trips, carries } = echoed?;
    let received = round_trips.len();
    let report = Report {
        relay: endpoint.origin().to_string(),
        relay_address: address.to_string(),
        target: target.to_string(),
        next_hop,
        form: match form {
            Form::Datagram => "datagram",
            Form::Capsule => "stream",
        },
        handshake_us: micros(handshake),
        tunnel_us: micros(tunnel_time),
        sent: arguments.count,
        received,
        loss_percent: 100.0 * (1.0 - received as f64 / f64::from(arguments.count)),
        rtt_us: RoundTrips::of(round_trips),
    };
    if as_json {
        say!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        report.print();
    }
    if received == 0 && form == Form::Datagram && !carries {
        bail!("the path carries no datagrams of {} bytes: use --mode stream or a smaller --size", arguments.size);
    }
    if received == 0 {
        bail!("{}", silence(&target, arguments.size));
    }
    Ok(())
}

/// What a tunnel to the target showed.
struct Echoed {
    tunnel_time: Duration,
    next_hop: Option<String>,
    form: Form,
    round_trips: Vec<Duration>,
    /// Whether datagrams carry payloads of the probes' size.
    carries: bool,
}

impl Echoed {
    /// Opens a tunnel to the target and sends the probes through it.
    async fn of(target: &Target, link: &Link, arguments: &Arguments) -> Result<Self> {
        let begun = Instant::now();
        let answer = timeout(ANSWER_TIMEOUT, link.relay.open_udp(target)).await;
        let opened = answer.context("the relay does not answer")?.with_context(|| format!("no tunnel to {target}"))?;
        let tunnel_time = begun.elapsed();
        link.allows(arguments.mode)?;
        let next_hop = opened.next_hop.map(|address| address.to_string());
        let mut tunnel = opened.tunnel;
        let form = link.form(arguments.mode).unwrap_or_else(|| tunnel.form());
        let round_trips = echo(&mut tunnel, link, arguments).await.context("the tunnel broke")?;
        let carries = link.carries(arguments.size);
        tunnel.finish();
        Ok(Self { tunnel_time, next_hop, form, round_trips, carries })
    }
}

/// Says why nothing may have come back from a target: besides the target, payloads that are longer than the path from the relay
/// carries.
fn silence(target: &Target, size: u16) -> String {
    let mut said = format!("nothing came back from {target}: is there a UDP echo, and may the relay reach it?");
    if size > EVERYWHERE_BYTES {
        said +=
            &format!(" Does the relay's path to it carry packets with {size} bytes of payload? Try a smaller --size");
    }
    said
}

/// Checks without a target whether the relay answers and admits this client: requests a target that every relay must
/// refuse; a relay that requires credentials refuses them first.
async fn reach(arguments: &Arguments, as_json: bool) -> Result<()> {
    let endpoint =
        Endpoint::new(arguments.relay.access().await?, options::transport(), <_>::default(), <_>::default())?;
    let connected = endpoint.connect().await.map_err(|error| arguments.relay.explain(error))?;
    let (relay, address, handshake) = (connected.relay.clone(), connected.address, connected.handshake);
    let driver = tokio::spawn(drive(connected.connection));
    let begun = Instant::now();
    let answer = timeout(ANSWER_TIMEOUT, relay.open_udp(&nowhere())).await;
    let answer_us = micros(begun.elapsed());
    endpoint.close(&relay).await;
    driver.abort();
    let answer = answer.context("the relay does not answer")?;
    let reached = Reached {
        relay: endpoint.origin().to_string(),
        relay_address: address.to_string(),
        handshake_us: micros(handshake),
        answer_us,
        admitted: is_admitted(&answer),
    };
    if as_json {
        say!("{}", serde_json::to_string_pretty(&reached)?);
    } else {
        reached.print();
    }
    match answer {
        Err(OpenError::Refused(TunnelRefused::Status { status: 404 | 405 | 501, .. })) => {
            answer.map(drop).context("the relay is up, but does not serve what this client asks for")
        }
        Err(OpenError::Refused(TunnelRefused::Status { status: 429, .. })) => {
            answer.map(drop).context("the relay knows this client, but grants it nothing more now")
        }
        Err(OpenError::Http(_)) => answer.map(drop).context("the relay ended the connection"),
        Err(_) if !reached.admitted => answer.map(drop).context("the relay is up, but does not admit this client"),
        _ => Ok(()),
    }
}

/// The unspecified address (RFC 6890 §2.2.2), at a port that relays allow.
fn nowhere() -> Target {
    Target { host: Host::Ip([0, 0, 0, 0].into()), port: 443 }
}

/// Returns whether this answer to a request for [`nowhere`] shows that the relay admits the client: it then judged the
/// target. A relay that answers 429 knows the client, but grants it no tunnel.
fn is_admitted<T>(answer: &Result<T, OpenError>) -> bool {
    match answer {
        Ok(_) => true,
        Err(OpenError::Refused(TunnelRefused::Status { status, proxy_status, .. })) => match status {
            401 | 407 => false,
            403 => proxy_status.iter().any(|of| of.error == Some(ErrorType::DestinationIpProhibited)),
            // The target is unreachable, or the relay has no room.
            500..=599 => true,
            _ => false,
        },
        Err(_) => false,
    }
}

/// The results without a target. Times are in microseconds.
#[derive(Serialize)]
struct Reached {
    relay: String,
    relay_address: String,
    handshake_us: u64,
    answer_us: u64,
    /// Whether the relay admits this client.
    admitted: bool,
}

impl Reached {
    fn print(&self) {
        let ms = |us: u64| us as f64 / 1_000.0;
        say!("relay      {} ({}), up", self.relay, self.relay_address);
        say!("set-up     QUIC {:.2} ms, answer {:.2} ms", ms(self.handshake_us), ms(self.answer_us));
        if self.admitted {
            say!("access     granted; name a UDP echo, HOST:PORT, for round trips and loss");
        }
    }
}

/// Sends probes at a steady pace, and returns the round trips of the answered probes.
async fn echo(tunnel: &mut UdpTunnel, link: &Link, arguments: &Arguments) -> Result<Vec<Duration>, TunnelEnd> {
    let run = backoff::random().to_be_bytes();
    let mut payload = vec![0; usize::from(arguments.size)];
    payload[..8].copy_from_slice(&run);
    let mut sent: Vec<Option<Instant>> = Vec::new();
    let mut round_trips = Vec::new();
    let mut arrived = Segments::new(1 << 20);
    let mut pace = interval(Duration::from_millis(arguments.interval_ms));
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Fixed when the last probe goes out: a far side that keeps sending does not prolong it.
    let mut end = None;
    while round_trips.len() < arguments.count as usize {
        let all_sent = sent.len() == arguments.count as usize;
        tokio::select! {
            biased;
            _ = pace.tick(), if !all_sent => {
                payload[8..HEADER_BYTES].copy_from_slice(&(sent.len() as u32).to_be_bytes());
                sent.push(Some(Instant::now()));
                tunnel.batch(link.form(arguments.mode)).push(&payload);
                if sent.len() == arguments.count as usize {
                    end = Some(Instant::now() + PATIENCE);
                }
            }
            () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => break,
            received = receive(tunnel, &mut arrived), if !sent.is_empty() => {
                let now = Instant::now();
                if !received? {
                    break;
                }
                round_trips.extend(arrived.iter().filter_map(|payload| {
                    let number = payload.strip_prefix(&run)?.first_chunk().map(|number| u32::from_be_bytes(*number))?;
                    // A duplicate finds no entry any more.
                    Some(now - sent.get_mut(number as usize)?.take()?)
                }));
                arrived.clear();
            }
        }
    }
    Ok(round_trips)
}

/// Waits for payloads.
async fn receive(tunnel: &mut UdpTunnel, arrived: &mut Segments) -> Result<bool, TunnelEnd> {
    poll_fn(|cx| {
        tunnel.poll_stopped(cx)?;
        let more = ready!(tunnel.poll_recv(cx, arrived))?;
        std::task::Poll::Ready(Ok(more))
    })
    .await
}

impl RoundTrips {
    fn of(round_trips: Vec<Duration>) -> Option<Self> {
        let mut sorted: Vec<u64> = round_trips.into_iter().map(micros).collect();
        sorted.sort_unstable();
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let percentile = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100) - 1];
        Some(Self { min, p50: percentile(50), p95: percentile(95), max })
    }
}

fn micros(duration: Duration) -> u64 {
    duration.as_micros().try_into().unwrap_or(u64::MAX)
}

impl Report {
    fn print(&self) {
        let ms = |us: u64| us as f64 / 1_000.0;
        say!("relay      {} ({})", self.relay, self.relay_address);
        let next_hop = self.next_hop.as_ref().map(|next_hop| format!(" ({next_hop})")).unwrap_or_default();
        say!("target     {}{next_hop}, payloads travel by {}", self.target, self.form);
        say!("set-up     QUIC {:.2} ms, tunnel {:.2} ms", ms(self.handshake_us), ms(self.tunnel_us));
        say!("packets    {} sent, {} came back, {:.1} % lost", self.sent, self.received, self.loss_percent);
        if let Some(RoundTrips { min, p50, p95, max }) = self.rtt_us {
            say!("RTT        min {:.3}, p50 {:.3}, p95 {:.3}, max {:.3} ms", ms(min), ms(p50), ms(p95), ms(max));
        }
    }
}

#[cfg(test)]
mod tests {
    use masque::proxy_status::ProxyStatus;

    use super::*;

    #[test]
    fn a_relay_that_judges_the_target_has_admitted_the_client() {
        let refused = |status, error: Option<ErrorType>| {
            let proxy_status = error.map(|error| ProxyStatus { error: Some(error), ..ProxyStatus::default() });
            Err::<(), _>(OpenError::Refused(TunnelRefused::Status {
                status,
                proxy_status: proxy_status.into_iter().collect(),
                retry_after_s: None,
            }))
        };
        let prohibited = Some(ErrorType::DestinationIpProhibited);
        for (answer, expected) in [
            (Ok(()), true),
            (refused(403, prohibited), true),
            (refused(502, Some(ErrorType::DestinationIpUnroutable)), true),
            (refused(403, Some(ErrorType::HttpRequestDenied)), false),
            (refused(403, None), false),
            (refused(407, prohibited), false),
            (refused(404, None), false),
            (refused(429, None), false),
            (Err(OpenError::NoAnswer), false),
        ] {
            assert_eq!(is_admitted(&answer), expected, "{answer:?}");
        }
    }

    #[test]
    fn only_payloads_that_a_path_may_not_carry_are_a_reason_for_silence() {
        let target = Target { host: Host::Ip([192, 0, 2, 1].into()), port: 7 };
        assert!(!silence(&target, 1_200).contains("--size"));
        assert!(silence(&target, 1_201).contains("1201 bytes of payload? Try a smaller --size"));
    }

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        let of = |values: &[u64]| RoundTrips::of(values.iter().map(|us| Duration::from_micros(*us)).collect());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[7]), Some(RoundTrips { min: 7, p50: 7, p95: 7, max: 7 }));
        assert_eq!(of(&[4, 1, 3, 2]), Some(RoundTrips { min: 1, p50: 2, p95: 4, max: 4 }));
        let hundred: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(of(&hundred), Some(RoundTrips { min: 1, p50: 50, p95: 95, max: 100 }));
    }
}
