//! Disturbs a site, second by second, and asserts that it stays whole.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use api::v1;
use lab::{
    name_server::NameServer,
    process::{CpuTime, Held, Process, child_of, wait_for},
    site::{Counts, SOON, Site, Terms},
};

use super::{
    processes::{Life, kill, monitor_of, start_edge},
    seen::{SETTLING, Seen},
    tcp, udp,
};

const POLICIES: [&str; 3] = [
    "",
    "[class.echo]\nlevel = \"high\"\n[[rule]]\nclass = \"echo\"\nports = 7\n",
    "[schedule]\ndiscipline = \"wfq\"\n[class.echo]\nweight = 7\n[[rule]]\nclass = \"echo\"\nports = 7\n",
];

/// Sets policies over a lasting connection, as an operator's program would: a new process each second would spend most of its CPU
/// time on starting.
struct Operator {
    runtime: tokio::runtime::Runtime,
    client: Option<api::ControlClient>,
}

impl Operator {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { runtime, client: None }
    }

    fn set_policy(&mut self, site: &Site, text: &str) {
        let (socket, client) = (site.path("control.sock"), &mut self.client);
        let request = v1::SetPolicyRequest { text: text.to_owned(), ..v1::SetPolicyRequest::default() };
        self.runtime.block_on(async {
            if client.is_none() {
                *client = Some(api::connect(&socket).await.unwrap());
            }
            client.as_mut().unwrap().set_policy(request).await.unwrap();
        });
    }
}

/// Disturbs the site, second by second.
pub struct Disturber {
    pub site: Site,
    edge: Process,
    operator: Operator,
    names: Option<NameServer>,
    pub seen: Arc<Seen>,
    lives: [Life; 2],
    /// Reloads of the current relay: applied and refused.
    reloads: [i64; 2],
    /// The kills of the relay and of the edge.
    kills: [u64; 2],
    /// The most payloads that these kills can have cut.
    in_flight: u64,
    /// The kills of the edge since the current relay started.
    kills_of_edge: u64,
    seconds: u64,
}

const RELOAD: [Terms<'_>; 3] = [
    Terms { limits: "tunnels_per_user = 1000", ..TERMS },
    Terms { limits: "tunnels_per_user = 1001", ..TERMS },
    Terms { limits: "tunnels_per_uzer = 1002", ..TERMS },
];

pub const TERMS: Terms<'_> = Terms {
    relay: "auth = \"none\"",
    targets: "allow = [{ to = \"10.0.0.0/8\", ports = [\"1-65535\"] }]",
    limits: "",
    control: "",
    // A day's debug log would fill memory.
    sections: "[kernel]\ndevices = [\"client\", \"target\", \"late\"]\n[log]\nlevel = \"info\"",
};

impl Disturber {
    /// Disturbs a site and an edge for `seconds`.
    pub fn new(site: Site, edge: Process, names: NameServer, seen: Arc<Seen>, seconds: u64) -> Self {
        let (operator, names) = (Operator::new(), Some(names));
        Self {
            site,
            edge,
            operator,
            names,
            seen,
            lives: Default::default(),
            reloads: [0; 2],
            kills: [0; 2],
            in_flight: 0,
            kills_of_edge: 0,
            seconds,
        }
    }

    /// Notes the memory and descriptors of relay and edge.
    pub fn note(&mut self) {
        let pids = [self.site.relay.id(), self.edge.id()];
        self.lives.iter_mut().zip(pids).for_each(|(life, pid)| life.note(pid));
    }

    fn reloads(&self) -> [i64; 2] {
        let counts = self.site.counts().unwrap();
        ["applied", "refused"].map(|result| counts.of(&format!("reloads_total{{result=\"{result}\"}}")))
    }

    /// Makes the changes that are due at `second`.
    pub fn disturb(&mut self, second: u64) {
        let life_seconds = (self.seconds / 4).clamp(5, 3_600);
        // A minute of a day-long run is three seconds of a short one.
        let minute = (self.seconds / 8).clamp(3, 60);
        self.operator.set_policy(&self.site, POLICIES[second as usize % 3]);
        if second.is_multiple_of(minute) {
            self.reload(second / minute);
        }
        if second % (2 * minute) == 1
            && let Some(monitor) = monitor_of(&self.site.relay)
        {
            kill(monitor);
        }
        if second % (2 * minute) == 2 {
            self.site.chain.relay.ip("link add late type veth peer name wire\nlink set late up").unwrap();
        } else if second % (2 * minute) == minute + 2 {
            self.site.chain.relay.ip("link delete late").unwrap();
        }
        if second % (3 * minute) == 2 {
            if self.names.is_some() {
                self.seen.names.begin();
                self.names = None;
            } else {
                self.names = Some(udp::name_server(&self.site));
                self.seen.names.end();
            }
        }
        if second.is_multiple_of(life_seconds.min(600)) {
            self.report(second);
        }
        if second.is_multiple_of(life_seconds) && second + 5 < self.seconds {
            self.kill(second / life_seconds);
        }
    }

    /// Prints the state so far, so that even an interrupted run reports something.
    fn report(&self, second: u64) {
        let of = |count: &AtomicU64| count.load(Relaxed);
        let Seen { opened, sent, back, cut, tcp_back, tcp_cut, resolved, unresolved, .. } = &*self.seen;
        println!(
            "second {second}: {} tunnels opened, {} payloads sent, {} back, {} cut, {} times over TCP back, {} cut, \
             names {} resolved and {} not; {} kills",
            of(opened),
            of(sent),
            of(back),
            of(cut),
            of(tcp_back),
            of(tcp_cut),
            of(resolved),
            of(unresolved),
            self.kills.iter().sum::<u64>()
        );
        let keeper = child_of(self.site.relay.id());
        let processes = [
            ("relay", Some(self.site.relay.id())),
            ("keeper", keeper),
            ("monitor", keeper.and_then(child_of)),
            ("edge", Some(self.edge.id())),
            ("test", Some(std::process::id())),
        ];
        for (name, pid) in processes {
            let Some((pid, Held { kib, descriptors })) = pid.and_then(|pid| Some((pid, Held::by(pid).ok()?))) else {
                continue;
            };
            let CpuTime { own, of_children } = CpuTime::of(pid).unwrap();
            println!(
                "  {name}: {kib} KiB, {descriptors} descriptors, {:.1} s of CPU, {:.1} s by processes that it started",
                own.as_secs_f64(),
                of_children.as_secs_f64()
            );
        }
        let counts = self.site.counts().unwrap();
        let [began, ended] = [counts.sum("tunnels_opened_total"), counts.sum("tunnels_closed_total")];
        let [up, down] = ["up", "down"].map(|direction| counts.packets(direction));
        let [tcp_up, tcp_down] = tcp_bytes(&counts);
        println!(
            "  counters: {began} tunnels began, {ended} ended, {up} packets up, {down} down, {tcp_up} bytes of TCP up, \
             {tcp_down} down"
        );
    }

    fn reload(&mut self, number: u64) {
        let terms = RELOAD[number as usize % RELOAD.len()];
        self.site.configure(terms).unwrap();
        self.site.signal(libc::SIGHUP).unwrap();
        self.reloads[usize::from(terms.limits.contains("uzer"))] += 1;
        let expected = self.reloads;
        wait_for("the end of a reload", SOON, || (self.reloads() == expected).then_some(())).unwrap();
    }

    fn kill(&mut self, number: u64) {
        if number.is_multiple_of(2) {
            self.lives[1].end("the edge");
            self.seen.edge.begin();
            self.edge.signal(libc::SIGKILL).unwrap();
            self.edge.wait(SOON).unwrap();
            self.edge = start_edge(&self.site);
            self.edge.wait_for_line("forwarding", SOON).unwrap();
            let away = self.seen.edge.end();
            self.kills_of_edge += 1;
            self.kills[1] += 1;
            // The host refuses an application's payloads while the edge is away.
            self.in_flight += udp::SENDERS * (2 + away.div_duration_f64(udp::interval()) as u64);
            return;
        }
        self.lives[0].end("the relay");
        // The edge may have been killed once since this relay started.
        self.wait_until_counters_add_up(4 * udp::SENDERS);
        self.seen.relay.begin();
        // Sometimes the keeper is killed first, so that no process starts the monitor again.
        if let Some(keeper) = child_of(self.site.relay.id()).filter(|_| number % 4 == 3) {
            kill(keeper);
        }
        self.site.signal(libc::SIGKILL).unwrap();
        self.site.relay.wait(SOON).unwrap();
        self.site.configure(RELOAD[0]).unwrap();
        let arguments = ["run".into(), "--config".into(), self.site.path("paced.toml")];
        self.site.relay = self.site.chain.relay.start(lab::program("paced").unwrap(), arguments).unwrap();
        wait_for("metrics of the relay", SOON, || self.site.counts().ok()).unwrap();
        self.operator.client = None;
        (self.reloads, self.kills_of_edge) = ([0; 2], 0);
        let away = self.seen.relay.end();
        self.kills[0] += 1;
        // A tunnel ends with its first loss. An application behind the edge goes on: it awaits one echo after the other.
        self.in_flight += udp::TUNNELS + udp::SENDERS * udp::lost_by_sender(away + SETTLING);
    }

    /// Waits until each tunnel that began has ended or is open, at most `cut` payloads have no echo, and all bytes of ended TCP
    /// tunnels have their echo, except for bytes that a killed edge did not take.
    fn wait_until_counters_add_up(&self, cut: u64) {
        let tcp_cut = self.kills_of_edge * tcp::CALLERS * tcp::MOST_BYTES as u64;
        let settled = |counts: &Counts| {
            let [began, ended] = [counts.sum("tunnels_opened_total"), counts.sum("tunnels_closed_total")];
            let without_echo = counts.packets("up") - counts.packets("down");
            let open = counts.udp_tunnels() + counts.of("tunnels{protocol=\"tcp\"}");
            let [up, down] = tcp_bytes(counts);
            began == ended + open
                && (0..=cut as i64).contains(&without_echo)
                && (0..=tcp_cut as i64).contains(&(up - down))
        };
        self.site.wait_for_counts("the counters to add up", settled).unwrap();
    }

    /// The assertions once all clients are gone.
    pub fn check(mut self) {
        let [relay, edge] = &mut self.lives;
        relay.end("the relay");
        edge.end("the edge");
        let of = |count: &AtomicU64| count.load(Relaxed);
        let Seen { opened, sent, back, cut, tcp_back, tcp_cut, resolved, unresolved, latest_ms, .. } = &*self.seen;
        let [opened, sent, back, cut] = [opened, sent, back, cut].map(of);
        let [tcp_back, tcp_cut, resolved, unresolved] = [tcp_back, tcp_cut, resolved, unresolved].map(of);
        let [of_relay, of_edge] = self.kills;
        println!(
            "{opened} tunnels, {back} of {sent} payloads back, {cut} cut by {of_relay} kills of the relay, {of_edge} of the edge"
        );
        println!("over TCP, bytes came back {tcp_back} times and were cut {tcp_cut} times");
        println!("{resolved} names resolved, {unresolved} not");
        println!("the latest loss began {} ms after the end of an outage", of(latest_ms));
        assert_eq!(sent, back + cut);
        assert!(cut <= self.in_flight, "{cut} payloads cut of at most {}", self.in_flight);
        let most = of_relay * tcp::TUNNELS + (of_relay + of_edge) * tcp::CALLERS;
        assert!(tcp_cut <= most, "{tcp_cut} TCP tunnels cut of at most {most}");
        assert!(back > self.seconds * 10 && tcp_back > self.seconds && resolved > 0 && unresolved > 0);
        self.wait_until_counters_add_up(0);
        let [up, _] = tcp_bytes(&self.site.counts().unwrap());
        assert!(up > 0, "TCP tunnels are counted");
        let [applied, refused] = self.reloads();
        assert_eq!([applied, refused], self.reloads, "reloads since the last kill of the relay");
    }
}

/// Returns the bytes of ended TCP tunnels, up and down.
fn tcp_bytes(counts: &Counts) -> [i64; 2] {
    ["up", "down"].map(|direction| counts.of(&format!("bytes_total{{protocol=\"tcp\",direction=\"{direction}\"}}")))
}
