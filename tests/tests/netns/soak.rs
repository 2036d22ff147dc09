//! A relay that enforces policy in the kernel and an edge that work for long, as processes, through failures: processes
//! are killed, devices come and go, names stop resolving, configurations and policies change.
//!
//! `PACED_SOAK_SECONDS=86400 tests/vm/run --icount --timeout 36000 -- PATH-OF-THE-TEST soak:: --nocapture` runs a day, with
//! idle time skipped. Before each kill and every ten minutes, the test prints the payloads sent and lost, and the memory,
//! descriptors and CPU time of each process.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::collections::VecDeque;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::v1;
use edge::client::access::Access;
use lab::client::{Client, Tunnel};
use lab::name_server::NameServer;
use lab::netns::Chain;
use lab::process::{CpuTime, Process, send_signal, wait_for};
use lab::site::{Counts, Family, SOON, Site, Terms};
use masque::target::{Host, Target};
use masque::tunnel::Form;
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

/// The number of tunnels open at once, the number of the edge's senders, and the interval of each: 25 payloads per second and as
/// many echoes, so the relay forwards 50 packets per second.
const TUNNELS: u64 = 16;
const SENDERS: u64 = 4;
const INTERVAL: Duration = Duration::from_millis(800);

/// The time after a kill for which clients may get no answer.
const GRACE: Duration = Duration::from_secs(20);

/// The most by which a process's memory and descriptors may grow between the first quarter of its life and its death. A
/// short life is mostly start-up.
const GROWTH_KIB: u64 = 2_048;
const GROWTH_OF_SHORT_LIFE_KIB: u64 = 16_384;
const SHORT_LIFE_S: usize = 60;
const GROWTH_DESCRIPTORS: u64 = 48;

const POLICIES: [&str; 3] = [
    "",
    "[class.echo]\nlevel = \"high\"\n[[rule]]\nclass = \"echo\"\nports = 7\n",
    "[schedule]\ndiscipline = \"wfq\"\n[class.echo]\nweight = 7\n[[rule]]\nclass = \"echo\"\nports = 7\n",
];

/// What clients and the edge's senders observe.
#[derive(Default)]
struct Seen {
    opened: AtomicU64,
    sent: AtomicU64,
    back: AtomicU64,
    /// Payloads that did not come back because a process was killed.
    cut: AtomicU64,
    resolved: AtomicU64,
    unresolved: AtomicU64,
    is_over: AtomicBool,
    /// The time at which the last process was killed, and the last time at which the name server came, went or was
    /// away.
    killed: Mutex<Option<Instant>>,
    renamed: Mutex<Option<Instant>>,
}

/// Whether `moment` is later than `within` before `begun`.
fn excuses(moment: &Mutex<Option<Instant>>, within: Duration, begun: Instant) -> bool {
    moment.lock().unwrap().is_some_and(|moment| moment + within > begun)
}

impl Seen {
    /// Counts payloads awaited since `begun` as lost. Only a kill excuses that.
    fn lost(&self, payloads: u64, begun: Instant, how: &str) {
        assert!(excuses(&self.killed, GRACE, begun), "{payloads} payloads lost {how}, although no process was killed");
        self.cut.fetch_add(payloads, Relaxed);
    }
}

fn payload(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(1 + (number.wrapping_mul(0x9e37_79b9) >> 7) as usize % 140)
}

/// Opens one tunnel after another until the soak is over, in its own connections.
async fn go_on(seen: Arc<Seen>, access: Access, place: u64) {
    let (mut number, form) = (place * 1_000_003, [Form::Capsule, Form::Datagram][place as usize % 2]);
    while !seen.is_over.load(Relaxed) {
        let begun = Instant::now();
        let Ok(Ok(client)) = timeout(GRACE, Client::connect(access.clone())).await else {
            seen.lost(0, begun, "because no connection was opened");
            sleep(Duration::from_millis(200)).await;
            continue;
        };
        for _ in 0..5 {
            let (target, begun) = ("10.0.2.2:7".parse().unwrap(), Instant::now());
            let Ok(Ok(tunnel)) = timeout(GRACE, client.open(target)).await else {
                seen.lost(0, begun, "because no tunnel was opened");
                break;
            };
            seen.opened.fetch_add(1, Relaxed);
            if !talk(&seen, tunnel, form, &mut number).await || seen.is_over.load(Relaxed) {
                break;
            }
        }
        client.close().await;
    }
}

/// Sends and receives until the tunnel's end; returns whether its connection still works.
async fn talk(seen: &Seen, mut tunnel: Tunnel, form: Form, number: &mut u64) -> bool {
    let turns = 4 + *number % 20;
    for _ in 0..turns {
        *number += 1;
        let words = payload(*number);
        seen.sent.fetch_add(1, Relaxed);
        let begun = Instant::now();
        let echo = async {
            tunnel.send(form, &words).await?;
            tunnel.recv().await
        };
        let Ok(Ok(Some(received))) = timeout(GRACE, echo).await else {
            seen.lost(1, begun, "in a tunnel");
            return false;
        };
        assert_eq!(received, words, "a payload comes back once, unchanged");
        seen.back.fetch_add(1, Relaxed);
        sleep(INTERVAL).await;
    }
    tunnel.udp.finish();
    true
}

/// An application behind the edge.
async fn send_to_edge(seen: Arc<Seen>, place: u64) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect("127.0.0.1:5001").await.unwrap();
    let (mut number, mut received) = (place * 1_000_003, vec![0; 2_048]);
    while !seen.is_over.load(Relaxed) {
        number += 1;
        let (words, begun) = (payload(number), Instant::now());
        seen.sent.fetch_add(1, Relaxed);
        let answer = async {
            socket.send(&words).await?;
            loop {
                let bytes = socket.recv(&mut received).await?;
                // Echoes of payloads given up earlier may still arrive.
                if received[..bytes] == words {
                    return std::io::Result::Ok(());
                }
            }
        };
        match timeout(Duration::from_secs(5), answer).await {
            Ok(Ok(())) => _ = seen.back.fetch_add(1, Relaxed),
            _ => seen.lost(1, begun, "behind the edge"),
        }
        sleep(INTERVAL).await;
    }
}

/// Opens tunnels by names that have not been resolved recently.
async fn resolve(seen: Arc<Seen>, access: Access) {
    let mut number = 0;
    while !seen.is_over.load(Relaxed) {
        let begun = Instant::now();
        let Ok(Ok(client)) = timeout(GRACE, Client::connect(access.clone())).await else {
            seen.lost(0, begun, "because no connection was opened");
            sleep(Duration::from_millis(200)).await;
            continue;
        };
        loop {
            number = (number + 1) % NAMES;
            let (target, begun) = (Target { host: Host::Name(name(number)), port: 7 }, Instant::now());
            match timeout(GRACE, client.open_target(&target)).await {
                Ok(Ok(tunnel)) => {
                    seen.resolved.fetch_add(1, Relaxed);
                    tunnel.udp.finish();
                }
                _ => {
                    let excused = excuses(&seen.renamed, GRACE, begun) || excuses(&seen.killed, GRACE, begun);
                    assert!(excused, "{target:?} was not reached, although the name server runs");
                    seen.unresolved.fetch_add(1, Relaxed);
                }
            }
            sleep(INTERVAL).await;
            if client.ended.is_finished() || seen.is_over.load(Relaxed) {
                break;
            }
        }
        client.close().await;
    }
}

const NAMES: u64 = 300;

fn name(number: u64) -> String {
    format!("n{number}.example")
}

fn name_server(site: &Site) -> NameServer {
    let names: Vec<_> = (0..NAMES).map(name).collect();
    let table: Vec<_> = names.iter().map(|name| (&name[..], site.chain.egress.far.v4.into())).collect();
    NameServer::start(&site.chain.target, &table).unwrap()
}

fn start_edge(site: &Site) -> Process {
    let folder = site.path("").display().to_string();
    let text = format!(
        "state_dir = \"{folder}\"\n[[forward]]\nlisten = \"127.0.0.1:5001\"\nrelay = \"{}\"\ntarget = \"10.0.2.2:7\"\n\
         ca = \"{folder}/authority.pem\"\n[control]\nsocket = \"{folder}/edge.sock\"\n",
        site.template(Family::V4)
    );
    let file = site.write("edge.toml", &text).unwrap();
    site.chain.client.start(lab::program("paced").unwrap(), ["run".into(), "--config".into(), file]).unwrap()
}

/// The only child of a process, if it has one.
fn child_of(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.trim().parse().ok()
}

fn monitor_of(relay: &Process) -> Option<u32> {
    child_of(child_of(relay.id())?)
}

fn kill(pid: u32) {
    send_signal(pid, libc::SIGKILL).unwrap();
}

/// A process's memory in KiB, and its number of descriptors.
fn held_by(pid: u32) -> Option<(u64, u64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
    Some((memory.trim().trim_end_matches(" kB").parse().ok()?, descriptors))
}

/// One process from its start to its end: its memory and descriptors, each second.
#[derive(Default)]
struct Life {
    held: VecDeque<(u64, u64)>,
}

impl Life {
    fn note(&mut self, pid: u32) {
        self.held.extend(held_by(pid));
    }

    /// Asserts that the process holds no more at the end than after its first quarter, and begins another life.
    fn end(&mut self, of: &str) {
        let held = std::mem::take(&mut self.held);
        let (Some(early), Some(late)) = (held.get(held.len() / 4), held.back()) else { return };
        println!("{of}: {early:?} (KiB, descriptors) grew to {late:?} in {} s", held.len());
        let growth_kib = if held.len() < SHORT_LIFE_S { GROWTH_OF_SHORT_LIFE_KIB } else { GROWTH_KIB };
        assert!(late.0 < early.0 + growth_kib && late.1 < early.1 + GROWTH_DESCRIPTORS, "{of} grows: {held:?}");
    }
}

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
struct Disturber {
    site: Site,
    edge: Process,
    operator: Operator,
    names: Option<NameServer>,
    seen: Arc<Seen>,
    lives: [Life; 2],
    /// Reloads of the present relay: applied and refused.
    reloads: [i64; 2],
    kills: u64,
    seconds: u64,
}

const RELOAD: [Terms<'_>; 3] = [
    Terms { limits: "tunnels_per_user = 1000", ..TERMS },
    Terms { limits: "tunnels_per_user = 1001", ..TERMS },
    Terms { limits: "tunnels_per_uzer = 1002", ..TERMS },
];

const TERMS: Terms<'_> = Terms {
    relay: "auth = \"none\"",
    targets: "allow = [{ to = \"10.0.0.0/8\", ports = [\"1-65535\"] }]",
    limits: "",
    control: "",
    // A day's debug log would fill memory.
    sections: "[kernel]\ndevices = [\"client\", \"target\", \"late\"]\n[log]\nlevel = \"info\"",
};

impl Disturber {
    fn reloads(&self) -> [i64; 2] {
        let counts = self.site.counts().unwrap();
        ["applied", "refused"].map(|result| counts.of(&format!("reloads_total{{result=\"{result}\"}}")))
    }

    /// Makes the changes that are due at `second`.
    fn disturb(&mut self, second: u64) {
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
            *self.seen.renamed.lock().unwrap() = Some(Instant::now());
            self.names = if self.names.is_some() { None } else { Some(name_server(&self.site)) };
        } else if self.names.is_none() {
            *self.seen.renamed.lock().unwrap() = Some(Instant::now());
        }
        if second.is_multiple_of(life_seconds.min(600)) {
            self.report(second);
        }
        if second.is_multiple_of(life_seconds) && second + GRACE.as_secs() / 4 < self.seconds {
            self.kill(second / life_seconds);
        }
    }

    /// Prints the state so far, so that even an interrupted run reports something.
    fn report(&self, second: u64) {
        let of = |count: &AtomicU64| count.load(Relaxed);
        let Seen { opened, sent, back, cut, resolved, unresolved, .. } = &*self.seen;
        println!(
            "second {second}: {} tunnels opened, {} payloads sent, {} back, {} cut, names {} resolved and {} not; {} kills",
            of(opened),
            of(sent),
            of(back),
            of(cut),
            of(resolved),
            of(unresolved),
            self.kills
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
            let Some((pid, (memory, descriptors))) = pid.and_then(|pid| Some((pid, held_by(pid)?))) else { continue };
            let CpuTime { own, of_children } = CpuTime::of(pid).unwrap();
            println!(
                "  {name}: {memory} KiB, {descriptors} descriptors, {:.1} s of CPU, {:.1} s by processes that it started",
                own.as_secs_f64(),
                of_children.as_secs_f64()
            );
        }
        let counts = self.site.counts().unwrap();
        let [began, ended] = [counts.sum("tunnels_opened_total"), counts.sum("tunnels_closed_total")];
        let [up, down] = ["up", "down"].map(|direction| counts.packets(direction));
        println!("  counters: {began} tunnels began, {ended} ended, {up} packets up, {down} down");
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
        self.kills += 1;
        *self.seen.killed.lock().unwrap() = Some(Instant::now());
        if number.is_multiple_of(2) {
            self.lives[1].end("the edge");
            self.edge.signal(libc::SIGKILL).unwrap();
            self.edge.wait(SOON).unwrap();
            self.edge = start_edge(&self.site);
            return;
        }
        self.lives[0].end("the relay");
        // The edge may have been killed once since this relay started.
        self.wait_until_counters_add_up(4 * SENDERS);
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
        self.reloads = [0; 2];
        *self.seen.killed.lock().unwrap() = Some(Instant::now());
    }

    /// Waits until each tunnel that began has ended or is open, and at most `cut` payloads have no echo.
    fn wait_until_counters_add_up(&self, cut: u64) {
        let settled = |counts: &Counts| {
            let [began, ended] = [counts.sum("tunnels_opened_total"), counts.sum("tunnels_closed_total")];
            let without_echo = counts.packets("up") - counts.packets("down");
            began == ended + counts.udp_tunnels() && (0..=cut as i64).contains(&without_echo)
        };
        self.site.wait_for_counts("the counters to add up", settled).unwrap();
    }

    /// The assertions once all clients are gone.
    fn check(mut self) {
        let [relay, edge] = &mut self.lives;
        relay.end("the relay");
        edge.end("the edge");
        let of = |count: &AtomicU64| count.load(Relaxed);
        let Seen { opened, sent, back, cut, resolved, unresolved, .. } = &*self.seen;
        let [opened, sent, back, cut] = [opened, sent, back, cut].map(of);
        let [resolved, unresolved] = [resolved, unresolved].map(of);
        println!("{opened} tunnels, {back} of {sent} payloads back, {cut} cut by {} kills", self.kills);
        println!("{resolved} names resolved, {unresolved} not");
        assert_eq!(sent, back + cut);
        assert!(cut <= self.kills * (2 * TUNNELS + 4 * SENDERS), "{cut} payloads cut by {} kills", self.kills);
        assert!(back > self.seconds * 10 && resolved > 0 && unresolved > 0);
        self.wait_until_counters_add_up(0);
        let [applied, refused] = self.reloads();
        assert_eq!([applied, refused], self.reloads, "reloads since the last kill of the relay");
    }
}

/// Runs the clients in their namespace until the soak is over; fails if any of them fails.
fn play_clients(seen: Arc<Seen>, access: Access) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        (0..TUNNELS).for_each(|place| _ = tasks.spawn(go_on(seen.clone(), access.clone(), place)));
        (0..SENDERS).for_each(|place| _ = tasks.spawn(send_to_edge(seen.clone(), 100 + place)));
        tasks.spawn(resolve(seen, access));
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
    });
}

#[test]
fn processes_that_are_killed_and_devices_names_and_terms_that_change_cost_nothing_but_what_was_on_its_way() {
    lab::ring!(Netns);
    let seconds = std::env::var("PACED_SOAK_SECONDS").map_or(24, |seconds| seconds.parse().unwrap());
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    let site = Site::on(chain, TERMS).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let seen = Arc::<Seen>::default();
    let (names, edge) = (Some(name_server(&site)), start_edge(&site));
    edge.wait_for_line("forwarding", SOON).unwrap();
    let (playing, access) = (seen.clone(), site.access(Family::V4).unwrap());
    let clients = site.chain.client.spawn(move || play_clients(playing, access)).unwrap();
    let mut disturber = Disturber {
        site,
        edge,
        operator: Operator::new(),
        names,
        seen,
        lives: Default::default(),
        reloads: [0; 2],
        kills: 0,
        seconds,
    };
    let begun = Instant::now();
    for second in 1..=seconds {
        let due = Duration::from_secs(second);
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        if clients.is_finished() {
            break;
        }
        disturber.disturb(second);
        let pids = [disturber.site.relay.id(), disturber.edge.id()];
        disturber.lives.iter_mut().zip(pids).for_each(|(life, pid)| life.note(pid));
    }
    disturber.seen.is_over.store(true, Relaxed);
    clients.join().unwrap().unwrap();
    disturber.check();
}
