//! The state of the daemon: `pacectl status`, `classes`, `tunnels`, `connections`, `close`, `class`, `events`,
//! `reload`.

use std::time::Duration;

use anyhow::{Result, bail};
use api::{ControlClient, say, v1};
use clap::{Args, ValueEnum};
use tonic::Status;

use super::{
    columns::{
        CLASS, Column, DROPPED, EXPIRED_STREAMS, LATE_PACKETS, LATE_PAYLOADS, RATE, ROLE, SENT, TUNNELS, legend,
    },
    door::pages,
    models::policy,
    table::{age, bytes, lines, or_dash, rate, sender, show, span, table, time},
};

#[derive(Args)]
pub(crate) struct Tunnels {
    /// Only tunnels of this class
    #[arg(long, value_name = "NAME")]
    class: Option<String>,
    /// Only tunnels of this user
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Only tunnels over this connection
    #[arg(long, value_name = "ID")]
    connection: Option<u64>,
}

#[derive(Args)]
pub(crate) struct Events {
    /// Only events of this kind; may be given several times
    #[arg(long, value_name = "KIND", value_enum)]
    kind: Vec<Kind>,
}

/// What events are about.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// Changes of the policy
    Policy,
    /// Reloads of the configuration
    Reload,
    /// Tunnels that an operator changed
    Tunnel,
    /// Tunnels that end, and requests that are refused
    Access,
    /// Paths and relays of the edge that fall silent, become slow, go away or are good again
    Path,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Reload => "reload",
            Self::Tunnel => "tunnel",
            Self::Access => "access",
            Self::Path => "path",
        }
    }
}

pub(crate) async fn status(client: &mut ControlClient, as_json: bool) -> Result<()> {
    let status = client.get_status(v1::GetStatusRequest {}).await?.into_inner();
    show(as_json, status, people)
}

fn people(status: v1::GetStatusResponse) {
    say!("paced {}, up for {}", status.version, age(status.started.as_ref()));
    if status.draining {
        say!(
            "ends          draining: no new work is accepted, and the daemon ends after open tunnels and requests have ended"
        );
    }
    policy_in_force(&status).for_each(|line| say!("{line}"));
    for listener in &status.listeners {
        say!("listens on    {listener}");
    }
    for listener in &status.gateway_listeners {
        say!("serves models {listener}");
    }
    for forward in &status.forwards {
        say!("forwards      {forward}");
    }
    status.uplinks.iter().for_each(|of| say!("relay         {}", uplink(of)));
    for of in &status.aliases {
        say!("model         {}: one of {} by {}", of.alias, of.models.join(", "), policy(&of.policy, &of.kind));
        if !of.shadow_kind.is_empty() {
            say!("              shadow policy {}", policy(&of.shadow, &of.shadow_kind));
        }
    }
    say!("workers       {}", status.workers);
    say!("open          {} connections, {} tunnels", status.connections, status.tunnels);
    say!("you           may {}", if status.writable { "read and write" } else { "read" });
    if !status.certificates.is_empty() {
        say!("");
        let row = |of: v1::Certificate| {
            let expires = of.expires.map(time).unwrap_or_default();
            [of.used_by, of.address, of.days_left.to_string(), expires, of.file]
        };
        table(["certificate of", "address", "days left", "expires", "file"], status.certificates.into_iter().map(row));
    }
    if !status.entrances.is_empty() {
        say!("");
        let row = |of: v1::Entrance| {
            let number = |number: u64| number.to_string();
            let (up, down) = (bytes(of.up_bytes), bytes(of.down_bytes));
            [of.listen, of.protocol, number(of.tunnels), number(of.opened), number(of.refused), up, down]
        };
        let heads = ["entrance", "proto", "tunnels", "opened", "refused", "up", "down"];
        table(heads, status.entrances.into_iter().map(row));
    }
    if !status.enforcement.is_empty() {
        say!("");
        let row =
            |of: v1::Enforcement| [of.device, of.part, if of.enforced { "yes" } else { "no" }.to_owned(), of.detail];
        table(["device", "part", "enforced", "how, or why not"], status.enforcement.into_iter().map(row));
    }
    say!("");
    let row = |of: v1::Feature| [of.name, of.state, of.detail];
    table(["feature", "state", "why, or what to do"], status.features.into_iter().map(row));
}

/// Says which policy is in force.
fn policy_in_force(status: &v1::GetStatusResponse) -> impl Iterator<Item = String> {
    let until =
        status.confirm_by.map(|by| format!("until {}, unless it is confirmed: pacectl policy confirm", time(by)));
    // The revision in force may be another policy: on trial, set later without --save, or in force again after a trial.
    let saved =
        status.saved.then(|| "a saved policy takes precedence over the files at the next reload or restart".to_owned());
    let below = [until, saved].into_iter().flatten().map(|line| format!("              {line}"));
    std::iter::once(format!("policy        revision {}", status.revision)).chain(below)
}

/// Says how a relay is reached: over which path, if the edge has paths.
fn uplink(of: &v1::Uplink) -> String {
    let v1::Uplink { relay, via, path, exit, connections, connects, failures, failure } = of;
    let relay = over(&through(relay, via), (path, exit));
    let open = match connections.len() {
        0 => format!("not connected{}{failure}", if failure.is_empty() { "" } else { ": " }),
        // A failure despite a connection: the relay refuses the credentials.
        1 if !failure.is_empty() => format!("connected, but {failure}"),
        1 => "connected".to_owned(),
        many if !failure.is_empty() => format!("{many} connections, but {failure}"),
        many => format!("{many} connections"),
    };
    format!("{relay}: {open}; connected {}, failed {}", times(*connects), times(*failures))
}

/// The span over which the rates of classes are measured.
const WHILE: Duration = Duration::from_secs(1);

/// The columns about classes.
const CLASSES: [Column; 9] = [CLASS, ROLE, TUNNELS, RATE, SENT, DROPPED, LATE_PAYLOADS, LATE_PACKETS, EXPIRED_STREAMS];

/// Shows each class's traffic over a second.
pub(crate) async fn classes(client: &mut ControlClient, as_json: bool) -> Result<()> {
    let request = v1::WatchStatsRequest { interval: Some(WHILE.try_into()?) };
    let mut stats = client.watch_stats(request).await?.into_inner();
    let Some(before) = stats.message().await? else { bail!("the daemon ended") };
    if as_json {
        return show(as_json, before, |_| {});
    }
    let Some(after) = stats.message().await? else { bail!("the daemon ended") };
    // The daemon shares statistics among callers, so they may be a little older than the interval says.
    let span = span(&before, &after).unwrap_or(WHILE);
    class_lines(&before.classes, after.classes, span).for_each(|line| say!("{line}"));
    Ok(())
}

fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

/// Returns the table of classes, and the meaning of its columns.
fn class_lines(before: &[v1::ClassStats], after: Vec<v1::ClassStats>, span: Duration) -> impl Iterator<Item = String> {
    let row = |of: v1::ClassStats| {
        let was = before.iter().find(|was| was.class == of.class && was.role == of.role);
        let sent_bytes = of.sent_bytes.saturating_sub(was.map_or(0, |was| was.sent_bytes));
        let dropped = of.dropped_full + of.dropped_late + of.dropped_sojourn;
        [
            of.class,
            of.role,
            of.tunnels.to_string(),
            rate(sent_bytes as f64 * 8.0 / span.as_secs_f64()),
            bytes(of.sent_bytes),
            dropped.to_string(),
            of.late_payloads.to_string(),
            of.late_packets.to_string(),
            of.expired_streams.to_string(),
        ]
    };
    let rows: Vec<_> = after.into_iter().map(row).collect();
    let meaning = legend(&CLASSES[2..]);
    lines(CLASSES.map(|column| column.name), rows)
        .chain([String::new()])
        .chain(meaning)
        .chain(["Rates are for the last second; all other figures are since the start.".to_owned()])
}

pub(crate) async fn tunnels(client: &mut ControlClient, arguments: Tunnels, as_json: bool) -> Result<()> {
    let Tunnels { class, user, connection } = arguments;
    let mut request = v1::ListTunnelsRequest {
        class: class.unwrap_or_default(),
        user: user.unwrap_or_default(),
        connection: connection.unwrap_or(0),
        ..v1::ListTunnelsRequest::default()
    };
    let tunnels = pages(async |token| {
        request.page_token = token;
        let page = client.list_tunnels(request.clone()).await?.into_inner();
        Ok((page.tunnels, page.next_page_token))
    });
    let tunnels = tunnels.await?;
    if tunnels.is_empty() && !request.class.is_empty() {
        ensure_class(client, &request.class).await?;
    }
    show(as_json, tunnels, |tunnels| table(TUNNEL, tunnels.into_iter().map(tunnel)))
}

/// Refuses the name of a class that the policy lacks.
async fn ensure_class(client: &mut ControlClient, name: &str) -> Result<()> {
    let request = v1::WatchStatsRequest { interval: Some(WHILE.try_into()?) };
    let mut stats = client.watch_stats(request).await?.into_inner();
    let Some(known) = stats.message().await? else { bail!("the daemon ended") };
    if known.classes.iter().any(|of| of.class == name) {
        return Ok(());
    }
    Err(Status::not_found(format!("there is no class {name}; `pacectl classes` lists them")).into())
}

const TUNNEL: [&str; 9] = ["id", "conn", "user or sender", "class", "proto", "target", "open for", "up", "down"];

fn tunnel(of: v1::Tunnel) -> [String; 9] {
    [
        of.id.to_string(),
        if of.path.is_empty() { of.connection.to_string() } else { format!("{} over {}", of.connection, of.path) },
        sender(&of),
        if of.pinned { format!("{} (set)", of.class) } else { or_dash(&of.class) },
        of.protocol,
        or_dash(&of.target),
        age(of.since.as_ref()),
        bytes(of.up_bytes),
        bytes(of.down_bytes),
    ]
}

/// Names a relay, and the hop to it if there is one.
pub(crate) fn through(relay: &str, via: &str) -> String {
    if via.is_empty() || relay.is_empty() { relay.to_owned() } else { format!("{relay} via {via}") }
}

/// Adds the path to a relay, if it has a name, or else how packets to the relay leave, if not as the routes say.
fn over(relay: &str, (path, exit): (&str, &str)) -> String {
    match (path, exit) {
        ("", "") => relay.to_owned(),
        ("", exit) => format!("{relay} {exit}"),
        (path, _) => format!("{relay} over {path}"),
    }
}

/// Names the relay of a connection, with its hop and its path if it has them.
fn destination(of: &v1::Connection) -> String {
    format!("to {}", over(&through(&of.relay, &of.via), (&of.path, &of.exit)))
}

pub(crate) async fn connections(client: &mut ControlClient, as_json: bool) -> Result<()> {
    let connections = pages(async |page_token| {
        let request = v1::ListConnectionsRequest { page_token, ..v1::ListConnectionsRequest::default() };
        let page = client.list_connections(request).await?.into_inner();
        Ok((page.connections, page.next_page_token))
    });
    let row = |of: v1::Connection| {
        let rtt = of.smoothed_rtt.and_then(|rtt| Duration::try_from(rtt).ok());
        let loss = (of.sent_packets > 0).then(|| 100.0 * of.lost_packets as f64 / of.sent_packets as f64);
        [
            of.id.to_string(),
            or_dash(&of.user),
            if of.role == "edge" { destination(&of) } else { or_dash(&of.client) },
            if of.role == "edge" { or_dash(&of.relay_address) } else { of.listener },
            or_dash(&of.schedule),
            age(of.since.as_ref()),
            of.tunnels.to_string(),
            rtt.map_or_else(|| "-".into(), |rtt| format!("{:.1} ms", rtt.as_secs_f64() * 1e3)),
            loss.map_or_else(|| "-".into(), |loss| format!("{loss:.1} %")),
            bytes(of.received_bytes),
            bytes(of.sent_bytes),
        ]
    };
    let heads = [
        "id",
        "user",
        "client or relay",
        "listener or address",
        "schedule",
        "open for",
        "tunnels",
        "RTT",
        "lost",
        "received",
        "sent",
    ];
    show(as_json, connections.await?, |connections| table(heads, connections.into_iter().map(row)))
}

/// Moves tunnels to a relay or a path; at most one of the two is given. Without either, the order of preference and the placement of
/// classes hold again.
pub(crate) async fn move_edge(
    client: &mut ControlClient,
    relay: Option<String>,
    path: Option<String>,
    as_json: bool,
) -> Result<()> {
    let to = path.as_ref().map(|path| format!("the path {path}")).or_else(|| relay.clone());
    let request = v1::MoveEdgeRequest { relay: relay.unwrap_or_default(), path: path.unwrap_or_default() };
    let answer = client.move_edge(request).await?.into_inner();
    show(as_json, answer, |answer| match to {
        Some(to) => say!("new tunnels go to {to}; {} UDP tunnels move there", answer.tunnels),
        None => say!("the order of preference and the placement of classes hold again"),
    })
}

pub(crate) async fn close(client: &mut ControlClient, tunnel: u64, as_json: bool) -> Result<()> {
    let answer = client.close_tunnel(v1::CloseTunnelRequest { tunnel }).await?.into_inner();
    show(as_json, answer, |_| say!("tunnel {tunnel} is closed"))
}

/// Gives a tunnel a class; without one, the rules decide again.
pub(crate) async fn class(client: &mut ControlClient, tunnel: u64, class: Option<String>, as_json: bool) -> Result<()> {
    let request = v1::SetTunnelClassRequest { tunnel, class: class.unwrap_or_default() };
    let answer = client.set_tunnel_class(request).await?.into_inner();
    show(as_json, answer, |answer| table(TUNNEL, answer.tunnel.into_iter().map(self::tunnel)))
}

pub(crate) async fn events(client: &mut ControlClient, arguments: Events, as_json: bool) -> Result<()> {
    let kinds = arguments.kind.into_iter().map(|kind| kind.as_str().to_owned()).collect();
    let mut events = client.watch_events(v1::WatchEventsRequest { kinds }).await?.into_inner();
    while let Some(event) = events.message().await? {
        show(as_json, event, |event| {
            let time = event.time.map(time).unwrap_or_default();
            say!("{time}  {}: {}", event.kind, event.message);
        })?;
    }
    bail!("the daemon ended")
}

pub(crate) async fn reload(client: &mut ControlClient, as_json: bool) -> Result<()> {
    let answer = client.reload(v1::ReloadRequest {}).await?.into_inner();
    show(as_json, answer, |answer| {
        say!("reloaded; revision {} is in force", answer.revision);
        if answer.saved {
            say!(
                "the saved policy takes precedence over [schedule], [class] and [[rule]] in the files: pacectl policy forget"
            );
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(role: &str, sent_bytes: u64) -> v1::ClassStats {
        v1::ClassStats {
            class: "voice".into(),
            role: role.into(),
            sent_bytes,
            dropped_full: 1,
            dropped_late: 2,
            dropped_sojourn: 4,
            late_payloads: 8,
            late_packets: 16,
            expired_streams: 32,
            tunnels: 64,
            ..v1::ClassStats::default()
        }
    }

    #[test]
    fn a_saved_policy_is_not_said_to_be_the_revision_in_force() {
        let confirm_by = Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: 0 });
        let status = v1::GetStatusResponse { revision: 3, saved: true, confirm_by, ..v1::GetStatusResponse::default() };
        let shown: Vec<_> = policy_in_force(&status).collect();
        assert_eq!(shown[0], "policy        revision 3");
        assert!(shown[1].contains("until 2027-01-15T08:00:00Z, unless"), "{shown:?}");
        assert!(shown[2].trim_start().starts_with("a saved policy takes precedence"), "{shown:?}");
    }

    #[test]
    fn relays_are_told_apart_by_their_paths_and_hops() {
        let of = |path: &str, via: &str, connections: &[u64]| v1::Uplink {
            relay: "relay.example:443".into(),
            path: path.into(),
            via: via.into(),
            connections: connections.into(),
            connects: 1,
            failure: if connections.is_empty() { "no answer".into() } else { String::new() },
            ..v1::Uplink::default()
        };
        assert_eq!(uplink(&of("", "", &[7])), "relay.example:443: connected; connected once, failed 0 times");
        let said = uplink(&of("lte", "first", &[]));
        assert_eq!(
            said,
            "relay.example:443 via first over lte: not connected: no answer; connected once, failed 0 times"
        );
    }

    #[test]
    fn connections_to_the_relay_of_a_hop_are_told_apart_by_how_their_packets_leave() {
        let (relay, exit) = ("relay.example:443".to_owned(), "by eth0".to_owned());
        let of = v1::Uplink { relay: relay.clone(), exit: exit.clone(), connects: 1, ..v1::Uplink::default() };
        assert!(uplink(&of).starts_with("relay.example:443 by eth0: "), "{}", uplink(&of));
        let of = v1::Connection { relay, exit, ..v1::Connection::default() };
        assert_eq!(destination(&of), "to relay.example:443 by eth0");
        assert_eq!(destination(&v1::Connection { path: "lte".into(), ..of }), "to relay.example:443 over lte");
    }

    #[test]
    fn classes_are_listed_by_role_and_each_column_is_explained_below_them() {
        let (before, after) =
            ([class("relay", 0), class("edge", 0)], vec![class("relay", 125_000), class("edge", 500)]);
        let shown: Vec<_> = class_lines(&before, after, WHILE).collect();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        let heads = "class role tunnels rate sent dropped late payloads late packets expired streams";
        assert_eq!(words(&shown[0]), heads);
        assert_eq!(words(&shown[1]), "voice relay 64 1.0 Mbit/s 122 KiB 7 8 16 32");
        assert_eq!(words(&shown[2]), "voice edge 64 4.0 kbit/s 500 B 7 8 16 32");
        for column in &CLASSES[2..] {
            let explained = shown[3..].iter().any(|line| line.starts_with(&format!("{}  ", column.name)));
            assert!(explained, "{}: {shown:#?}", column.name);
        }
    }
}
