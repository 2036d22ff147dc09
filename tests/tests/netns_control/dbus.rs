//! The D-Bus door, through a private bus and with independent clients.

use std::{
    collections::BTreeMap, net::UdpSocket, os::unix::process::CommandExt as _, process::Command, time::Duration,
};

use lab::{
    process::{Process, wait_for},
    site::{Family, Folder, SOON, Site, Terms},
};

use super::{VOICE, in_force};

mod statistics;

const OBJECT: [&str; 3] = ["org.paced.Paced1", "/org/paced/Paced1", "org.paced.Control1"];

/// Rules of a bus that lets every caller send and receive everything.
const OPEN: &str = r#"<policy context="default"><allow user="*"/><allow own="*"/>
    <allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/></policy>"#;

/// Rules as of a system's bus, which admits signals to every caller, with those that the package installs.
const SHIPPED: &str = concat!(
    r#"<policy context="default"><allow user="*"/><deny own="*"/><deny send_type="method_call"/><allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/><allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/><allow receive_type="method_return"/><allow receive_type="error"/>
    <allow receive_type="signal"/><allow send_destination="org.freedesktop.DBus"/></policy><include>"#,
    env!("CARGO_MANIFEST_DIR"),
    "/../systemd/org.paced.Paced1.conf</include>"
);

/// A bus, and a relay on it.
struct Bus {
    site: Site,
    address: String,
    daemon: Process,
    folder: Folder,
}

impl Bus {
    fn new(name: &str) -> Self {
        Self::with(name, "")
    }

    /// The same, with these sections at the end of the configuration.
    fn with(name: &str, sections: &str) -> Self {
        Self::ruled(name, sections, OPEN)
    }

    /// The same, on a bus with these rules.
    fn ruled(name: &str, sections: &str, rules: &str) -> Self {
        let folder = Folder::new(&format!("paced-{}-bus-{name}", std::process::id())).unwrap();
        let address = format!("unix:path={}", folder.path().join("bus").display());
        // Every user may connect, as to the system bus.
        let configuration = format!(
            "<busconfig><type>session</type><listen>{address}</listen><auth>EXTERNAL</auth>{rules}</busconfig>"
        );
        folder.write("bus.conf", &configuration).unwrap();
        let daemon = Self::daemon(&folder);
        let site = Site::new(Terms { control: &Self::control(&address), sections, ..Terms::default() }).unwrap();
        let bus = Self { site, address, daemon, folder };
        wait_for("the name on the bus", SOON, || bus.is_served().then_some(())).unwrap();
        bus
    }

    /// Starts the bus itself, whose configuration is in the folder.
    fn daemon(folder: &Folder) -> Process {
        let mut command = Command::new("dbus-daemon");
        command.args(["--nofork", "--nopidfile", "--config-file"]).arg(folder.path().join("bus.conf"));
        let daemon = Process::start(command).unwrap();
        wait_for("the bus to listen", SOON, || folder.path().join("bus").exists().then_some(())).unwrap();
        daemon
    }

    /// The section `[control]` of a relay on the bus at this address.
    fn control(address: &str) -> String {
        format!("bus = \"{address}\"\nwriters = [\"nobody\"]")
    }

    /// Reloads the configuration, with the bus or without it.
    fn configure(&self, is_on_bus: bool) {
        let control = if is_on_bus { Self::control(&self.address) } else { String::new() };
        self.site.configure(Terms { control: &control, ..Terms::default() }).unwrap();
        self.site.json(&["reload"]).unwrap();
    }

    /// Whether the relay answers under its name.
    fn is_served(&self) -> bool {
        self.busctl(&["introspect", OBJECT[0], OBJECT[1]]).is_ok()
    }

    fn busctl(&self, arguments: &[&str]) -> Result<String, String> {
        self.busctl_as(0, arguments)
    }

    fn busctl_as(&self, uid: u32, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new("busctl");
        let command = command.arg(format!("--address={}", self.address)).arg("--no-pager").args(arguments);
        let output = command.uid(uid).output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        if output.status.success() { Ok(said) } else { Err(said) }
    }

    fn call(&self, method: &str, arguments: &[&str]) -> Result<String, String> {
        self.busctl(&[&["call"], &OBJECT[..], &[method], arguments].concat())
    }

    fn property(&self, name: &str) -> String {
        self.busctl(&[&["get-property"], &OBJECT[..], &[name]].concat()).unwrap().trim().to_owned()
    }
}

/// A caller that stays on the bus.
async fn caller(bus: &Bus) -> zbus::Proxy<'static> {
    let connection = zbus::connection::Builder::address(&bus.address[..]).build().await.unwrap();
    zbus::Proxy::new(&connection, OBJECT[0], OBJECT[1], OBJECT[2]).await.unwrap()
}

#[test]
fn policy_is_set_and_gone_back_to_over_the_bus_and_seen_at_the_other_door() {
    lab::ring!(Netns);
    let bus = Bus::new("policy");
    let introspected = bus.busctl(&["introspect", OBJECT[0], OBJECT[1], OBJECT[2]]).unwrap();
    for member in [".GetPolicy", ".SetPolicy", ".Reload", ".CloseTunnel", ".Revision", ".Event", ".Access", ".Stats"] {
        assert!(introspected.contains(member), "{member} in\n{introspected}");
    }
    assert_eq!(bus.property("Revision"), "t 1");
    let said = bus.call("SetPolicy", &["sa{sv}", VOICE, "1", "expected_revision", "t", "1"]).unwrap();
    assert!(said.starts_with("ts 2 ") && said.contains("+[class.voice]"), "{said}");
    assert_eq!((in_force(&bus.site).0, &bus.property("Revision")[..]), (VOICE.into(), "t 2"));
    assert!(bus.property("Policy").contains("class.voice"));
    assert_eq!(bus.call("RollbackPolicy", &["tb", "1", "false"]).unwrap().trim(), "t 3");
    assert_eq!(in_force(&bus.site).2, "rollback to 1");
    assert_eq!(bus.site.json(&["policy", "list"]).unwrap()["revisions"][1]["author"], "root");
    let listed = bus.call("ListRevisions", &[]).unwrap();
    assert!(listed.starts_with("a(tssts) 3 1 ") && listed.contains(" 3 \"root\" \"rollback to 1\" "), "{listed}");
    assert!(listed.contains("+[class.voice]"), "{listed}");
}

#[test]
fn an_edge_is_moved_over_the_bus_and_its_classes_are_listed() {
    lab::ring!(Netns);
    // The edge's first relay is the same daemon.
    let sections = r#"
        [class.voice]
        level = "high"
        [[forward]]
        listen = "127.0.0.1:5353"
        relay = [
            "https://10.0.1.2/.well-known/masque/udp/{target_host}/{target_port}/",
            "https://10.0.1.2:444/.well-known/masque/udp/{target_host}/{target_port}/",
        ]
        target = "10.0.2.2:7"
        ca = "$FOLDER/authority.pem"
        class = "voice"
    "#;
    let bus = Bus::with("edge", sections);
    let _echo = bus.site.chain.target.echo(7).unwrap();
    let _beside = bus.site.start_beside("auth = \"none\"", "").unwrap();
    let socket = bus.site.chain.relay.run(|| UdpSocket::bind("127.0.0.1:5000")).unwrap().unwrap();
    socket.connect("127.0.0.1:5353").unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let echoes = || socket.send(b"hello").is_ok() && socket.recv(&mut [0; 9]).is_ok();
    wait_for("an echo", SOON, || echoes().then_some(())).unwrap();
    let relayed = || bus.site.counts().unwrap().udp_tunnels();
    assert_eq!(relayed(), 1);

    let said = bus.call("MoveEdge", &["s", "10.0.1.9:443"]).unwrap_err();
    assert!(said.contains("there are 10.0.1.2:443, 10.0.1.2:444"), "{said}");
    assert_eq!(bus.call("MoveEdge", &["s", "10.0.1.2:444"]).unwrap().trim(), "t 1");
    bus.site.wait_for_counts("the tunnel to be elsewhere", |counts| counts.udp_tunnels() == 0).unwrap();
    wait_for("an echo by the other relay", SOON, || echoes().then_some(())).unwrap();
    // Open tunnels stay where they are.
    assert_eq!(bus.call("MoveEdge", &["s", ""]).unwrap().trim(), "t 0");
    assert_eq!(relayed(), 0);
    let said = bus.call("MoveEdgeToPath", &["s", "dsl"]).unwrap_err();
    assert!(said.contains("no path is configured"), "{said}");

    let listed = bus.call("ListClasses", &[]).unwrap();
    assert!(listed.starts_with("a(ssttttttttt") && listed.contains(" \"voice\" \"edge\" 1 "), "{listed}");
}

/// A row of `ListPaths`.
type PathRow = (
    String,
    String,
    String,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    bool,
    u64,
    Vec<String>,
    Vec<u64>,
    u64,
    BTreeMap<String, u64>,
);

#[test]
fn the_paths_of_an_edge_are_listed_over_the_bus_with_what_is_on_them() {
    lab::ring!(Netns);
    // The edge's relay is the same daemon, which has both addresses.
    let sections = r#"
        [class.spread]
        placement = "round-robin"
        [[path]]
        name = "first"
        address = "10.0.1.2"
        [[path]]
        name = "second"
        address = "10.0.2.1"
        [[forward]]
        listen = "127.0.0.1:5353"
        relay = "https://10.0.1.2/.well-known/masque/udp/{target_host}/{target_port}/"
        target = "10.0.2.2:7"
        ca = "$FOLDER/authority.pem"
        class = "spread"
    "#;
    let bus = Bus::with("paths", sections);
    let _echo = bus.site.chain.target.echo(7).unwrap();
    bus.site
        .client(async || {
            let caller = caller(&bus).await;
            let list = async || caller.call::<_, _, Vec<PathRow>>("ListPaths", &()).await.unwrap();
            let up = async {
                while list().await.iter().any(|row| row.2 != "up") {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            };
            tokio::time::timeout(SOON, up).await.expect("a path is not up");
            let sockets =
                [(); 2].map(|()| bus.site.chain.relay.run(|| UdpSocket::bind("127.0.0.1:0")).unwrap().unwrap());
            for socket in &sockets {
                socket.set_read_timeout(Some(SOON)).unwrap();
                socket.send_to(b"hello", "127.0.0.1:5353").unwrap();
                socket.recv(&mut [0; 9]).unwrap();
            }
            let rows = list().await;
            for (row, expected) in rows.iter().zip(["first", "second"]) {
                let (name, via, state, rtt_us, rate, _, sent, lost, tunnels, moved, chosen, ..) = row;
                let (.., shortest_us, relays, connections, requests, classes) = row;
                assert_eq!((&name[..], &via[..], &state[..]), (expected, "", "up"), "{name}");
                assert!(*rtt_us > 0 && *rate > 0 && *sent > 0 && lost <= sent, "{name}");
                assert!(shortest_us <= rtt_us && connections.len() == 1, "{name}");
                assert_eq!((*tunnels, *requests, *moved, *chosen), (1, 0, 0, false), "{name}");
                assert_eq!((&relays[..], classes["spread"]), (&["10.0.1.2:443".to_owned()][..], 1), "{name}");
            }
            assert_eq!(rows.len(), 2);
            let moved = caller.call::<_, _, u64>("MoveEdgeToPath", &("second",)).await.unwrap();
            let rows = list().await;
            assert_eq!((moved, rows[0].10, rows[1].10), (1, false, true));
        })
        .unwrap();
}

/// The lines of the interface in its description, without indentation and blank lines.
fn interface(description: &str) -> Vec<&str> {
    let (_, rest) = description.split_once("<interface name=\"org.paced.Control1\">").unwrap();
    let (interface, _) = rest.split_once("</interface>").unwrap();
    interface.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

#[test]
fn the_interface_is_the_one_whose_description_is_installed() {
    lab::ring!(Netns);
    let bus = Bus::new("interface");
    let found = bus.busctl(&["introspect", "--xml-interface", OBJECT[0], OBJECT[1]]).unwrap();
    let installed = include_str!("../../../systemd/org.paced.Control1.xml");
    assert_eq!(interface(&found), interface(installed), "{found}");
}

#[test]
fn both_doors_report_what_the_kernel_enforces() {
    lab::ring!(Netns);
    let bus = Bus::with("kernel", "[kernel]\ndevices = [\"client\", \"target\"]");
    bus.site.relay.wait_for_line("ready", SOON).unwrap();
    let status = bus.site.json(&["status"]).unwrap();
    let parts = status["enforcement"].as_array().unwrap();
    let row = |part: &serde_json::Value| {
        let [device, name, enforced, detail] = ["device", "part", "enforced", "detail"].map(|key| &part[key]);
        format!(" {device} {name} {enforced} {detail}")
    };
    assert!(parts.len() >= 4, "{status:#}");
    let rows = parts.iter().map(row).collect::<String>();
    assert_eq!(bus.property("Kernel"), format!("a(ssbs) {}{rows}", parts.len()));
}

#[test]
fn refusals_have_names_for_programs_and_the_words_of_the_other_door() {
    lab::ring!(Netns);
    let bus = Bus::new("refusals");
    let wrong = "[class.voice]\nlevle = \"high\"\n";
    let (_, words) = bus.site.pacectl(&["policy", "set", "-"], wrong).unwrap();
    let words = words.lines().last().unwrap().to_owned();
    assert!(words.contains("line 2") && words.contains("did you mean level?"), "{words}");
    for (method, arguments, why) in [
        ("SetPolicy", &["sa{sv}", wrong, "0"][..], &words[..]),
        ("SetPolicy", &["sa{sv}", "", "1", "expected_revision", "t", "7"], "revision 1 is in force"),
        ("SetPolicy", &["sa{sv}", "", "1", "expect", "t", "7"], "known: expected_revision"),
        ("SetPolicy", &["sa{sv}", "", "1", "save", "s", "yes"], "has the wrong type"),
        ("RollbackPolicy", &["tb", "9", "false"], "there is no revision 9"),
        ("CloseTunnel", &["t", "3"], "there is no tunnel 3"),
    ] {
        let said = bus.call(method, arguments).unwrap_err();
        assert!(said.contains(why), "{method} {arguments:?}: {said}");
    }
    assert_eq!(bus.property("Revision"), "t 1");
}

#[test]
fn over_the_bus_too_only_writers_write() {
    lab::ring!(Netns);
    let bus = Bus::new("writers");
    // Every Debian system has both users; the configuration names the second.
    let (daemon, nobody) = (1, 65_534);
    let call =
        |uid, method, arguments: &[&str]| bus.busctl_as(uid, &[&["call"], &OBJECT[..], &[method], arguments].concat());
    assert!(call(daemon, "GetPolicy", &["t", "0"]).unwrap().contains("discipline"));
    for (method, arguments) in [
        ("SetPolicy", &["sa{sv}", VOICE, "0"][..]),
        ("RollbackPolicy", &["tb", "1", "false"]),
        ("ConfirmPolicy", &["tb", "1", "false"]),
        ("ForgetSavedPolicy", &[]),
        ("Reload", &[]),
        ("CloseTunnel", &["t", "1"]),
        ("SetTunnelClass", &["ts", "1", ""]),
        ("MoveEdge", &["s", ""]),
        ("MoveEdgeToPath", &["s", ""]),
    ] {
        let said = call(daemon, method, arguments).unwrap_err();
        assert!(said.contains("\"daemon\" may not change anything"), "{method}: {said}");
    }
    assert_eq!(bus.property("Revision"), "t 1");
    call(nobody, "SetPolicy", &["sa{sv}", VOICE, "0"]).unwrap();
    assert_eq!(bus.site.json(&["policy", "list"]).unwrap()["revisions"][1]["author"], "nobody");
}

#[test]
fn a_listener_learns_of_changes_made_at_either_door() {
    lab::ring!(Netns);
    let bus = Bus::new("signals");
    let mut command = Command::new("gdbus");
    command.args(["monitor", "--address", &bus.address, "--dest", OBJECT[0], "--object-path", OBJECT[1]]);
    let monitor = Process::start(command).unwrap();
    monitor.wait_for_line("is owned by", SOON).unwrap();
    // gdbus says this a moment before it listens: on a busy machine, it missed signals that another listener had from the bus.
    let reload = "Control1.Event ('reload', 'the configuration was read again, for SIGHUP')";
    let hears = || {
        bus.site.signal(libc::SIGHUP).unwrap();
        monitor.wait_for_line(reload, Duration::from_millis(500)).ok()
    };
    wait_for("gdbus to listen", SOON, hears).unwrap();
    super::set(&bus.site, VOICE, &[]);
    monitor
        .wait_for_line("org.paced.Control1.Event ('policy', 'revision 2 is in force (set, by root)')", SOON)
        .unwrap();
    monitor.wait_for_line("'Revision': <uint64 2>", SOON).unwrap();
    super::set(&bus.site, VOICE, &["--save"]);
    monitor.wait_for_line("'Saved': <true>", SOON).unwrap();
    assert_eq!(bus.site.pacectl(&["policy", "forget"], "").unwrap().0, Some(0));
    monitor.wait_for_line("'Saved': <false>", SOON).unwrap();
    bus.site
        .client(async || {
            let client = super::connect(&bus.site).await;
            let tunnel = client.open(bus.site.target(Family::V4, 7)).await.unwrap();
            let listed = bus.call("ListConnections", &["t", "0"]).unwrap();
            assert!(listed.starts_with("a(tsssuttttt) 1 1 \"\" \"10."), "{listed}");
            tunnel.udp.finish();
            bus.site.counted("the end of the tunnel", |counts| counts.closed("finished") == 1).await.unwrap();
        })
        .unwrap();
    let signal = monitor.wait_for_line("org.paced.Control1.Access ('tunnel', {", SOON).unwrap();
    assert!(signal.contains("'reason': <'finished'>") && !signal.contains("10.0."), "{signal}");
    let said = monitor.output();
    assert_eq!(said.matches("['Policy']").count(), 1, "the text has changed once:\n{said}");
    assert!(!said.contains("'Policy': <") && !said.contains("class.voice"), "{said}");
}

#[test]
fn by_the_installed_rules_of_the_bus_only_readers_hear_of_changed_properties_and_of_users() {
    lab::ring!(Netns);
    let bus = Bus::ruled("rules", "", SHIPPED);
    let monitors = [0, 65_534].map(|uid| {
        let mut command = Command::new("gdbus");
        command.args(["monitor", "--address", &bus.address, "--dest", OBJECT[0], "--object-path", OBJECT[1]]);
        command.uid(uid);
        Process::start(command).unwrap()
    });
    for monitor in &monitors {
        let hears = || {
            bus.site.signal(libc::SIGHUP).unwrap();
            monitor.wait_for_line("read again, for SIGHUP", Duration::from_millis(500)).ok()
        };
        wait_for("gdbus to listen", SOON, hears).unwrap();
    }
    super::set(&bus.site, VOICE, &[]);
    bus.site.json(&["reload"]).unwrap();
    // The bus keeps the order, so whatever was signalled before has arrived.
    let [reader, stranger] = monitors.map(|monitor| {
        monitor.wait_for_line("read again, for root", SOON).unwrap();
        monitor.output()
    });
    assert!(reader.contains("PropertiesChanged") && !stranger.contains("PropertiesChanged"), "{stranger}");
}

#[test]
fn a_name_that_is_taken_is_reported_and_the_relay_serves() {
    lab::ring!(Netns);
    let bus = Bus::new("taken");
    let control = format!("bus = \"{}\"", bus.address);
    let second = Site::new(Terms { control: &control, ..Terms::default() }).unwrap();
    second.relay.wait_for_line("failed to become org.paced.Paced1 on the bus", SOON).unwrap();
    assert_eq!(second.json(&["status"]).unwrap()["revision"], 1);
}

#[test]
fn a_bus_that_is_missing_at_a_reload_is_reported_and_has_the_name_once_it_runs() {
    lab::ring!(Netns);
    let mut bus = Bus::new("late");
    bus.configure(false);
    bus.daemon.signal(libc::SIGTERM).unwrap();
    bus.daemon.wait(SOON).unwrap();
    // The bus may have removed its socket.
    _ = std::fs::remove_file(bus.folder.path().join("bus"));
    bus.configure(true);
    bus.site.relay.wait_for_line("cannot serve D-Bus: failed to become org.paced.Paced1", SOON).unwrap();
    bus.daemon = Bus::daemon(&bus.folder);
    // The relay tries again every ten seconds.
    wait_for("the name on the bus", 2 * SOON, || bus.is_served().then_some(())).unwrap();
    assert_eq!(bus.property("Revision"), "t 1");
}
