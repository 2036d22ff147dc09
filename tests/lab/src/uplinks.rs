//! Edges with two uplinks, or with two relays among which tunnels move: what the tests of paths share.

#![expect(clippy::unwrap_used, clippy::panic, reason = "called by tests, and fails them")]

use std::{
    fmt::Debug,
    net::UdpSocket,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    application::{application, assert_carries, echoes},
    flow::watch,
    netns::{Chain, End, Link, Namespace},
    process::{Process, wait_for},
    report,
    site::{Counts, Family, SOON, Site, Terms},
    stalls::CpuStalls,
};

/// The address of the forward of an edge that [`edge`] started.
pub const LISTEN: &str = "127.0.0.1:5000";

/// What figures call the traffic of applications at [`LISTEN`].
pub const PAYLOADS: &str = "UDP payloads";

/// A site whose client has a second link to the relay, through a router: the devices "relay" and "router".
pub struct Uplinks {
    /// The chain of client, relay and target, where the relay runs. The link from client to relay is the first uplink.
    pub site: Site,
    /// The second uplink, from the client (near) to the router (far).
    pub second: Link,
    router: Namespace,
    _behind: Link,
    /// The family in which the edge reaches the relay.
    family: Family,
}

impl Uplinks {
    /// Links over which the edge reaches the relay over IPv4; the relay serves all clients.
    #[expect(clippy::new_without_default, reason = "it makes devices and starts a relay")]
    pub fn new() -> Self {
        Self::of(Family::V4)
    }

    /// Links over which the edge reaches the relay in this family; the relay serves all clients.
    pub fn of(family: Family) -> Self {
        Self::with(Terms::default(), family)
    }

    /// Links over which the edge reaches a relay with these terms in this family.
    pub fn with(terms: Terms<'_>, family: Family) -> Self {
        let chain = Chain::new().unwrap();
        let router = Namespace::new("router").unwrap();
        let second = Link::new(&chain.client, &router, 3).unwrap();
        let behind = Link::new(&router, &chain.relay, 4).unwrap();
        router.sysctl("net.ipv4.ip_forward", "1").unwrap();
        router.sysctl("net.ipv6.conf.all.forwarding", "1").unwrap();
        chain.relay.ip("route add 10.0.3.0/24 via 10.0.4.1\nroute add fd00:3::/64 via fd00:4::1").unwrap();
        router.ip("route add 10.0.1.0/24 via 10.0.4.2\nroute add fd00:1::/64 via fd00:4::2").unwrap();
        for namespace in [&chain.client, &chain.relay, &router] {
            for device in ["all", "default"] {
                namespace.sysctl(&format!("net.ipv4.conf.{device}.rp_filter"), "0").unwrap();
            }
        }
        chain.client.sysctl("net.ipv4.conf.router.rp_filter", "0").unwrap();
        chain.client.sysctl("net.ipv4.conf.relay.rp_filter", "0").unwrap();
        let uplinks = Self { site: Site::on(chain, terms).unwrap(), second, router, _behind: behind, family };
        // A less preferred route than the first link's own: only sockets bound to the device use it.
        let first = format!("route add {} dev relay metric 10", uplinks.whole(&uplinks.site.chain.access.far));
        uplinks.site.chain.client.ip(&format!("{}\n{first}", uplinks.second_route())).unwrap();
        uplinks
    }

    /// The address of an end, as a prefix of this address alone.
    fn whole(&self, end: &End) -> String {
        match self.family {
            Family::V4 => format!("{}/32", end.v4),
            Family::V6 => format!("{}/128", end.v6),
        }
    }

    /// The client's route to the relay by the second link.
    fn second_route(&self) -> String {
        let via = &self.second.far;
        let via = if self.family == Family::V4 { via.v4.to_string() } else { via.v6.to_string() };
        format!("route add {} via {via} dev router metric 100", self.whole(&self.site.chain.access.far))
    }

    /// Links to a relay that serves one model. Its engine has port 8001 of the target.
    pub fn to_models() -> Self {
        let gateway = "[gateway]\n[[gateway.model]]\nname = \"large\"\nengines = [\"http://10.0.2.2:8001\"]\n";
        Self::with(Terms { sections: gateway, ..Terms::default() }, Family::V4)
    }

    /// Returns the sections of an edge that serves the relay's models at port 8100. `class` describes the models' class, `spread`.
    pub fn serve(&self, class: &str) -> String {
        let (relay, folder) = (self.site.template(Family::V4), self.site.path("").display().to_string());
        format!(
            "[[serve]]\nlisten = \"127.0.0.1:8100\"\nrelay = \"{relay}\"\nca = \"{}/authority.pem\"\nclass = \"spread\"\n\
             backoff_longest_seconds = 1\n{class}",
            folder.trim_end_matches('/')
        )
    }

    /// Starts an edge that spreads UDP for port 7 of the target over both links; `sections` are added.
    pub fn edge(&self, sections: &str) -> Process {
        self.edge_with(SOON_AGAIN, sections)
    }

    /// Like [`edge`](Self::edge), with these lines about waits in the forward.
    pub fn edge_with(&self, waits: &str, sections: &str) -> Process {
        let relay = format!("\"{}\"", self.site.template(self.family));
        edge_with(&self.site, &relay, waits, &format!("{BOTH_DEVICES}{sections}"))
    }

    /// Starts an edge with three tunnels on each link; returns it with the applications that use them.
    pub fn spread(&self) -> (Process, Vec<UdpSocket>) {
        spread(&self.site, || self.edge(ROUND_ROBIN))
    }

    /// Takes the second link's device down.
    pub fn take_down(&self) {
        self.site.chain.client.ip(&format!("link set {} down", self.second.near.device)).unwrap();
    }

    /// Takes the second link's device up again.
    pub fn take_up(&self) {
        let up = format!("link set {} up\n{}", self.second.near.device, self.second_route());
        self.site.chain.client.ip(&up).unwrap();
    }

    /// Deletes the client's route to the relay by the second link, or adds it again.
    pub fn route_second(&self, is_there: bool) {
        let route = self.second_route();
        let change = if is_there { route } else { route.replacen("add", "del", 1) };
        self.site.chain.client.ip(&change).unwrap();
    }

    /// Deletes the client's IPv4 address on the second link, or adds it again with its route.
    pub fn address_second(&self, is_there: bool) {
        let (End { device, v4, .. }, client) = (&self.second.near, &self.site.chain.client);
        let change = if is_there { "add" } else { "del" };
        client.ip(&format!("address {change} {v4}/24 dev {device}")).unwrap();
        if is_there {
            self.route_second(true);
        }
    }

    /// Pulls the second link's cable, or plugs it in again.
    pub fn plug(&self, is_in: bool) {
        let change = if is_in { "up" } else { "down" };
        self.router.ip(&format!("link set {} {change}", self.second.far.device)).unwrap();
    }

    /// Silently drops packets toward the client on the first link, or stops doing so.
    pub fn cut_first(&self, is_cut: bool) {
        let (back, change) = (&self.site.chain.access, if is_cut { "replace" } else { "del" });
        self.site.chain.relay.ip(&format!("route {change} blackhole {}", self.whole(&back.near))).unwrap();
    }

    /// Silently drops packets toward the client on the second link, or stops doing so.
    pub fn cut(&self, is_cut: bool) {
        let change = if is_cut { "add" } else { "del" };
        self.router.ip(&format!("route {change} blackhole {}", self.whole(&self.second.near))).unwrap();
    }
}

/// The shortest wait for a CPU that can make a relay look silent: after this time and three round trips, a path is silent.
const SILENT_AFTER: Duration = Duration::from_millis(75);

/// The time within which such waits, first of the edge and then of the relay, count as one.
const TOGETHER: Duration = Duration::from_millis(100);

/// Returns for how long at once the edge and its relays waited for a CPU, and whether that can make a path look silent.
fn stalled(stalls: &CpuStalls) -> (bool, Duration) {
    let stalled = stalls.most_within(TOGETHER);
    (stalled >= SILENT_AFTER, stalled)
}

/// Asserts a consequence of which paths are silent. It may be otherwise if a path may have looked silent, and its tunnels have moved, because the
/// edge or a relay stalled.
pub fn assert_unless_stalled(is: bool, what: &dyn Debug, stalls: &CpuStalls, edge: &Process) {
    let (is_excused, stalled) = stalled(stalls);
    assert!(is || is_excused, "{what:?}; a stall of {stalled:?}; the edge said:\n{}", edge.output());
}

/// Whether a path has looked silent to the edge with these metrics, although nothing was cut. That may only happen if a relay or the edge
/// stalled for as long.
pub fn has_looked_silent(site: &Site, stalls: &CpuStalls) -> bool {
    let counts = Counts::read(&site.chain.client, METRICS).unwrap();
    let is_so = counts.of("edge_paths_silent_total") > 0;
    let (is_excused, stalled) = stalled(stalls);
    assert!(!is_so || is_excused, "a path looked silent, and the longest stall took only {stalled:?}: {counts:?}");
    is_so
}

/// Starts an edge with three tunnels on each of its two paths; returns it with the applications that use them.
pub fn spread(site: &Site, start: impl Fn() -> Process) -> (Process, Vec<UdpSocket>) {
    for _ in 0..5 {
        let edge = start();
        let stalls = CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap();
        wait_until_up(site);
        let sockets: Vec<_> = (0..6).map(|_| application(site, LISTEN)).collect();
        sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
        let tunnels: Vec<_> = paths(site).into_iter().map(|(_, tunnels)| tunnels).collect();
        if !has_looked_silent(site, &stalls) {
            assert_eq!(tunnels, [3, 3], "the paths take turns; the edge said:\n{}", edge.output());
            return (edge, sockets);
        }
    }
    panic!("a path looks silent in each of five attempts, although nothing was cut");
}

/// The address of the metrics of an edge that [`edge`] started.
pub const METRICS: &str = "127.0.0.1:9100";

/// The paths of an edge that chooses the links by their devices.
const BOTH_DEVICES: &str =
    "[[path]]\nname = \"first\"\ninterface = \"relay\"\n[[path]]\nname = \"second\"\ninterface = \"router\"\n";

/// The lines about waits of an edge that tries a lost relay again within a second.
const SOON_AGAIN: &str = "backoff_longest_seconds = 1\n";

/// The lines about waits of an edge that waits for at least fifteen seconds before it tries a relay again.
pub const LATE_AGAIN: &str = "backoff_first_ms = 30000\nbackoff_longest_seconds = 30\n";

/// Starts an edge at the client with a forward through these relays, and waits until it listens.
pub fn edge(site: &Site, relays: &str, sections: &str) -> Process {
    edge_with(site, relays, SOON_AGAIN, sections)
}

/// Reloads an edge that [`edge`] started, with other sections.
pub fn reload(site: &Site, relays: &str, sections: &str) {
    configure(site, relays, SOON_AGAIN, sections);
    let (code, said) = pacectl(site, &["reload"]);
    assert_eq!(code, Some(0), "{said}");
}

/// Writes an edge's configuration, and returns its file.
fn configure(site: &Site, relays: &str, waits: &str, sections: &str) -> PathBuf {
    let folder = site.path("").display().to_string();
    let folder = folder.trim_end_matches('/');
    let text = format!(
        "state_dir = \"{folder}/edge\"\n[control]\nsocket = \"{folder}/edge.sock\"\n[metrics]\nlisten = \"{METRICS}\"\n\
         [[forward]]\nlisten = \"{LISTEN}\"\nrelay = {relays}\ntarget = \"10.0.2.2:7\"\nca = \"{folder}/authority.pem\"\n\
         class = \"spread\"\n{waits}{sections}"
    );
    site.write("edge.toml", &text).unwrap()
}

/// Like [`edge`], with these lines about waits in the forward.
pub fn edge_with(site: &Site, relays: &str, waits: &str, sections: &str) -> Process {
    let file = configure(site, relays, waits, sections);
    let arguments = ["run".into(), "--config".into(), file];
    let edge = site.chain.client.start(crate::program("paced").unwrap(), arguments).unwrap();
    edge.wait_for_line("forwarding", SOON).unwrap();
    wait_for("the edge's control socket to answer", SOON, || (pacectl(site, &["status"]).0 == Some(0)).then_some(()))
        .unwrap();
    edge
}

/// Runs `pacectl` at the edge, and returns its exit code and what it printed.
pub fn pacectl(site: &Site, arguments: &[&str]) -> (Option<i32>, String) {
    site.pacectl_at("edge.sock", arguments).unwrap()
}

/// The rows of `pacectl paths`.
pub fn rows(site: &Site) -> Vec<Value> {
    site.json_at("edge.sock", &["paths"]).unwrap()["paths"].as_array().unwrap().clone()
}

/// The state of each path that `pacectl paths` lists, and its number of tunnels.
pub fn paths(site: &Site) -> Vec<(String, u64)> {
    let row = |path: &Value| (path["state"].as_str().unwrap().to_owned(), path["tunnels"].as_u64().unwrap_or(0));
    rows(site).iter().map(row).collect()
}

/// The state of each path that `pacectl paths` lists.
pub fn states(site: &Site) -> Vec<String> {
    paths(site).into_iter().map(|(state, _)| state).collect()
}

/// Waits until both paths of the edge are up.
pub fn wait_until_up(site: &Site) {
    wait_for("both paths to be up", SOON, || (states(site) == ["up", "up"]).then_some(())).unwrap();
}

/// Calls `change` while the sockets' payloads go to an echo and back, prints what that cost as the figure of `event`
/// and `traffic`, and asserts that no socket is without an echo for a second and a half and the time for which the edge and its relays stall.
pub fn assert_short_gap(
    event: &str,
    traffic: &str,
    sockets: &[UdpSocket],
    (edge, stalls): (&Process, &CpuStalls),
    change: impl FnOnce(),
) {
    let begun = Instant::now();
    let figure = watch(sockets, WATCHED, change).unwrap();
    report::figure(event, traffic, figure);
    let stalled = stalls.most_since(begun, figure.gap);
    let said = || format!("{event}: {traffic}: {figure}, {stalled:?} of stalls; the edge said:\n{}", edge.output());
    assert!(figure.gap < GAP + stalled, "{}", said());
}

/// Asserts that each socket's tunnel carries, that the edge with these metrics moved tunnels this number of times, and that no tunnel was
/// lost: the edge opens a lost tunnel again, but not a moved tunnel. This holds on a busy machine, where limits on time do not.
pub fn assert_carry_unbroken(site: &Site, metrics: &str, sockets: &[UdpSocket], moves: i64, edge: &Process) {
    for socket in sockets {
        // Late echoes may still arrive.
        wait_for("an echo", SOON, || echoes(socket, b"still there").then_some(())).unwrap();
    }
    let counts = Counts::read(&site.chain.client, metrics).unwrap();
    let [opened, moved] = ["opened", "moved"].map(|what| counts.sum(&format!("edge_tunnels_{what}_total")));
    assert_eq!((opened, moved), (sockets.len() as i64, moves), "the edge said:\n{}", edge.output());
}

/// The longest time without an echo when something falls silent or ends. A path or a relay is silent after three round trips and
/// 75 ms. A tunnel lost for good would cause a gap of many seconds: an idle connection ends after 15.
const GAP: Duration = Duration::from_millis(1_500);

/// The time for which [`assert_short_gap`] sends. It calls `change` after a fifth, and sees gaps of several times [`GAP`].
const WATCHED: Duration = Duration::from_secs(6);
const _: () = assert!(WATCHED.as_millis() * 4 / 5 > 3 * GAP.as_millis());

/// The section of the class of all tunnels, under which paths take turns.
pub const ROUND_ROBIN: &str = "[class.spread]\nplacement = \"round-robin\"\n";
