//! The package and its units under systemd: installed, started, reloaded, killed, stuck, and removed. The tests run one
//! after another, in a guest whose first process is systemd.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use config::uplink::TrustSource;
use lab::{authority::Authority, client::Client, process::wait_for};
use masque::{template::Template, tunnel::Form};
use relay_client::access::Access;
use tokio::time::timeout;

/// The longest that any action of systemd may take on an emulated machine.
const SOON: Duration = Duration::from_secs(60);

/// The directory of the administrator's changes to units.
const UNITS: &str = "/etc/systemd/system";

/// A package database for the tests: an emulated machine takes minutes to read the system's.
const DPKG: &str = "dpkg --admindir=/tmp/dpkg";

/// Runs a command; returns whether it succeeded, and its output.
fn try_run(command: &str) -> (bool, String) {
    let output = Command::new("bash").args(["-c", &format!("{command} 2>&1")]).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command, which must succeed, and returns its output.
fn run(command: &str) -> String {
    let (succeeded, said) = try_run(command);
    assert!(succeeded, "{command}: {said}\n{}", try_run("journalctl -b --no-pager -n 60 -u paced -u paced.socket").1);
    said
}

fn write(path: &str, text: &str) {
    fs::create_dir_all(Path::new(path).parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A property of the service, as systemd reports it.
fn property(name: &str) -> String {
    let output = Command::new("systemctl").args(["show", "paced.service", "--value", "-p", name]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn main_pid() -> i32 {
    property("MainPID").parse().unwrap()
}

/// The service, installed from the package. Dropping it stops the service and removes the administrator's changes.
struct Service {
    authority: Authority,
}

impl Service {
    /// Installs the package if it is missing, and a certificate that only root and the group paced can read.
    fn install() -> Self {
        if !Path::new("/usr/bin/paced").exists() {
            let package = lab::program("paced").unwrap().with_file_name("paced.deb");
            run("mkdir -p /tmp/dpkg/info /tmp/dpkg/updates && touch /tmp/dpkg/status");
            run(&format!("{DPKG} --force-depends -i {}", package.display()));
            // The bus's package reloads the bus whenever a policy is installed, but the tests' database does not
            // contain that package.
            let bus = "org.freedesktop.DBus /org/freedesktop/DBus org.freedesktop.DBus";
            run(&format!("busctl call {bus} ReloadConfig"));
        }
        let authority = Authority::new().unwrap();
        let issued = authority.issue(&["127.0.0.1"]).unwrap();
        write("/etc/paced/tls/relay.pem", &issued.certificate);
        write("/etc/paced/tls/relay.key", &issued.private_key);
        run("chmod 640 /etc/paced/tls/*");
        write("/tmp/authority.pem", &authority.pem());
        Self { authority }
    }

    /// Configures a relay on 127.0.0.1:443 that serves all clients, toward this machine.
    fn configure(&self, relay: &str, sections: &str) {
        let text = format!(
            r#"
            [relay]
            listen = ["127.0.0.1:443"]
            certificate = "/etc/paced/tls/relay.pem"
            private_key = "/etc/paced/tls/relay.key"
            templates = ["https://127.0.0.1/.well-known/masque/udp/{{target_host}}/{{target_port}}/"]
            auth = "none"
            drain_seconds = 0
            {relay}
            [relay.targets]
            allow = [{{ to = "127.0.0.0/8", ports = ["1-65535"] }}]
            {sections}
            "#
        );
        write("/etc/paced/paced.toml", &text);
    }

    /// Makes systemd open the sockets: `workers` of them at the listener.
    fn open_sockets(&self, workers: usize) {
        let lines = "ListenDatagram=127.0.0.1:443\n".repeat(workers);
        let lists = "[Socket]\nListenDatagram=\n";
        write(&format!("{UNITS}/paced.socket.d/listeners.conf"), &format!("{lists}{lines}ReusePort={}\n", workers > 1));
        // An empty assignment also clears the list of streams.
        write(&format!("{UNITS}/paced.socket.d/control.conf"), "[Socket]\nListenStream=/run/paced/control.sock\n");
        run("systemctl daemon-reload && systemctl start paced.socket");
    }

    /// Gives the unit the capabilities that enforcement in the kernel needs.
    fn grant_rights(&self) {
        run(&format!(
            "install -D -m 644 -t {UNITS}/paced.service.d /usr/share/paced/kernel.conf && systemctl daemon-reload"
        ));
    }

    /// Sends a payload through the relay and back.
    fn relay(&self) {
        let echo = UdpSocket::bind("127.0.0.1:0").unwrap();
        let target = echo.local_addr().unwrap();
        echo.set_read_timeout(Some(SOON)).unwrap();
        let echoing = std::thread::spawn(move || {
            let mut payload = [0; 64];
            let (len, from) = echo.recv_from(&mut payload).unwrap();
            echo.send_to(&payload[..len], from).unwrap();
        });
        let template = "https://127.0.0.1/.well-known/masque/udp/{target_host}/{target_port}/";
        let trust = TrustSource::Authority("/tmp/authority.pem".into());
        let access = Access { template: Template::parse(template).unwrap(), trust, token: None, identity: None };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let relayed = async {
            let client = Client::connect(access).await.unwrap();
            let mut tunnel = client.open(target).await.unwrap();
            tunnel.send(Form::Datagram, b"there and back").await.unwrap();
            tunnel.recv().await.unwrap().unwrap()
        };
        let relayed = runtime.block_on(async { timeout(SOON, relayed).await });
        assert_eq!(relayed.expect("the payload comes back"), b"there and back");
        echoing.join().unwrap();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        try_run("systemctl disable --now paced.socket paced.service; systemctl reset-failed paced.service");
        try_run(&format!("rm -rf {UNITS}/paced.*.d /var/lib/paced/policy.toml; systemctl daemon-reload"));
        _ = &self.authority;
    }
}

/// The effective capabilities of a process, as a mask.
fn capabilities(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

const BIND_AND_RAW: u64 = 1 << 10 | 1 << 13;

#[test]
fn a_relay_starts_from_the_package_with_a_key_that_its_group_can_read_and_no_right_but_one() {
    lab::ring!(Vm);
    let service = Service::install();
    assert_eq!(run("systemctl is-enabled paced.service paced.socket || true"), "disabled\ndisabled\n");
    service.configure("", "");
    run("systemctl enable --now paced.service");
    service.relay();
    let pid = main_pid();
    assert_eq!(capabilities(pid), 1 << 10, "CAP_NET_BIND_SERVICE");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
    let said = run("journalctl -b --no-pager -u paced");
    assert!(!said.contains("could not drop"), "{said}");
    assert_eq!(run(&format!("ps -o user= -p {pid}")).trim(), "paced");
    // Members of the group may read, but not write.
    assert_eq!(run("stat -c '%a %U:%G' /run/paced /run/paced/control.sock"), "750 paced:paced\n660 paced:paced\n");
    run("setpriv --reuid=nobody --regid=paced --clear-groups pacectl status");
    let (allowed, said) = try_run("setpriv --reuid=nobody --regid=paced --clear-groups pacectl policy rollback 1");
    assert!(!allowed && said.contains("may not change anything"), "{said}");
    assert!(!try_run("setpriv --reuid=nobody --regid=nogroup --clear-groups pacectl status").0);
}

#[test]
fn the_unit_is_exposed_as_little_as_is_said() {
    lab::ring!(Vm);
    let service = Service::install();
    run("systemd-analyze security --offline=true --threshold=15 paced.service");
    service.grant_rights();
    run("systemd-analyze security --offline=true --threshold=20 paced.service");
    service.configure("", "");
    run("systemctl start paced.service");
    let limits = fs::read_to_string(format!("/proc/{}/limits", main_pid())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
    for limit in ["MemoryHigh", "MemoryMax"] {
        assert!(property(limit).parse::<u64>().is_ok(), "{limit} is {}", property(limit));
    }
    assert!(property("After").contains("time-sync.target"));
    // The daemon's own filter of system calls works beside systemd's.
    let said = run("journalctl -b --no-pager -u paced");
    assert!(!said.contains("no seccomp filter"), "{said}");
    assert_eq!(run("stat -c '%a %U:%G' /etc/paced/paced.toml"), "640 root:paced\n");
}

#[test]
fn kernel_programs_are_in_force_and_the_packet_process_keeps_none_of_their_rights() {
    lab::ring!(Vm);
    let service = Service::install();
    run("modprobe -a veth sch_fq sch_ingress cls_bpf");
    run("ip link add outside type veth peer name inside && ip link set outside up && ip link set inside up");
    service.grant_rights();
    service.configure("", "[kernel]\ndevices = [\"outside\"]\nmanage_qdisc = true");
    run("systemctl start paced.service");
    let status = run("pacectl status");
    let enforced = |part: &str| status.lines().any(|line| line.contains("outside") && line.contains(part));
    assert!(["egress", "ingress", "fq", "rates"].iter().all(|part| enforced(part)), "{status}");
    assert!(!status.contains("not enforced"), "{status}");
    assert_eq!(capabilities(main_pid()), BIND_AND_RAW);
    service.relay();
    run("systemctl stop paced.service");
    assert!(!run("tc qdisc show dev outside").contains(" fq "));
    assert!(!run("ip -d link show dev outside").contains("xdp"));
    run("ip link del outside");
}

#[test]
fn a_reload_waits_for_its_outcome_and_one_that_is_refused_fails_and_changes_nothing() {
    lab::ring!(Vm);
    let service = Service::install();
    service.configure("", "");
    run("systemctl start paced.service");
    let pid = main_pid();
    service.configure("", "[class.voice]\nlevel = \"high\"");
    run("systemctl reload paced.service");
    assert!(run("pacectl classes").contains("voice"));
    service.configure("", "[class.voice]\nlevle = \"high\"");
    let (reloaded, _) = try_run("systemctl reload paced.service");
    assert!(!reloaded, "a refused reload must fail");
    let said = run("journalctl -b --no-pager -u paced");
    assert!(said.contains("did you mean level?"), "{said}");
    assert!(run("pacectl policy get").contains("level = \"high\""));
    assert_eq!((main_pid(), property("ActiveState")), (pid, "active".into()));
    service.relay();
}

#[test]
fn a_reload_without_a_control_socket_is_a_signal_and_the_log_says_so() {
    lab::ring!(Vm);
    let service = Service::install();
    service.configure("", "[control]\nenabled = false");
    run("systemctl start paced.service");
    service.configure("", "");
    run("systemctl reload paced.service");
    wait_for("the control socket", SOON, || try_run("pacectl status").0.then_some(())).unwrap();
    assert!(run("journalctl -b --no-pager -u paced").contains("reloading by SIGHUP"));
}

#[test]
fn a_start_that_fails_is_tried_again_for_as_long_as_it_takes() {
    lab::ring!(Vm);
    let service = Service::install();
    service.configure("", "");
    let taken = UdpSocket::bind("127.0.0.1:443").unwrap();
    run("systemctl start --no-block paced.service");
    // More often than systemd tries by default.
    let is_retried = || property("NRestarts").parse::<u32>().is_ok_and(|tries| tries > 5).then_some(());
    wait_for("further starts", 4 * SOON, is_retried).unwrap();
    drop(taken);
    let is_active = || (property("ActiveState") == "active").then_some(());
    wait_for("the relay", SOON, is_active).unwrap();
    service.relay();
    service.configure("", "[class.voice]\nlevle = \"high\"");
    assert!(!try_run("systemctl restart paced.service").0);
    wait_for("a refusal", SOON, || (property("ExecMainStatus") == "78").then_some(())).unwrap();
    service.configure("", "");
    wait_for("the relay with its files corrected", SOON, is_active).unwrap();
    service.relay();
}

/// Sends to the listener until `done`, which must be soon; returns whether the port was ever closed. The error for a
/// packet to a closed port is returned by the next call.
fn is_ever_closed(mut done: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.connect(SocketAddr::from(([127, 0, 0, 1], 443))).unwrap();
    let mut closed = false;
    while !done() {
        assert!(begin.elapsed() < SOON, "{}", try_run("systemctl status paced.service paced.socket").1);
        for _ in 0..50 {
            closed |= socket.send(b"?").is_err();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    closed
}

#[test]
fn a_killed_relay_is_restarted_and_with_the_socket_unit_no_packet_meets_a_closed_port() {
    lab::ring!(Vm);
    let service = Service::install();
    service.configure("", "");
    let kill = || {
        let old = main_pid();
        run(&format!("kill -9 {old}"));
        let is_back = || property("ActiveState") == "active" && ![0, old].contains(&main_pid());
        let closed = is_ever_closed(is_back);
        assert_eq!(property("NRestarts"), "1");
        service.relay();
        closed
    };
    run("systemctl start paced.service");
    assert!(kill(), "without the socket unit, some packets meet a closed port");
    run("systemctl stop paced.service; systemctl reset-failed paced.service || true");
    service.open_sockets(1);
    run("systemctl start paced.service");
    assert!(!kill());
    // No packet does during a restart, and a client that connects meanwhile waits.
    let restarting = std::thread::spawn(|| run("systemctl restart paced.service && pacectl status"));
    assert!(!is_ever_closed(|| restarting.is_finished()));
    restarting.join().unwrap();
    service.relay();
}

#[test]
fn the_socket_unit_keeps_its_sockets_while_the_configuration_is_at_fault() {
    lab::ring!(Vm);
    let service = Service::install();
    service.configure("", "");
    service.open_sockets(1);
    run("systemctl start paced.service");
    service.configure("", "[class.voice]\nlevle = \"high\"");
    assert!(!try_run("systemctl restart paced.service").0);
    // Packets wait in the sockets, and must not start the service more often than its own tries do.
    assert!(!is_ever_closed(|| property("NRestarts").parse::<u32>().is_ok_and(|tries| tries > 2)));
    assert_eq!(run("systemctl is-active paced.socket"), "active\n");
    service.configure("", "");
    assert!(!is_ever_closed(|| property("ActiveState") == "active"));
    service.relay();
}

#[test]
fn sockets_that_are_not_those_of_the_configuration_are_refused_at_start_with_what_to_change() {
    lab::ring!(Vm);
    let service = Service::install();
    for (relay, sockets, remedy) in [
        ("workers = 2", 1, "write ListenDatagram=127.0.0.1:443 2 times"),
        ("workers = 1", 2, "write ListenDatagram=127.0.0.1:443 1 times"),
        ("workers = 2", 2, "paced cannot spread packets"),
    ] {
        service.configure(relay, "");
        run("systemctl stop paced.socket");
        service.open_sockets(sockets);
        // The start must fail once, not be retried four times.
        write(&format!("{UNITS}/paced.service.d/once.conf"), "[Service]\nRestart=no\n");
        run("systemctl daemon-reload");
        assert!(!try_run("systemctl start paced.service").0, "{relay}, {sockets} sockets");
        let invocation = property("InvocationID");
        let said = run(&format!("journalctl --no-pager _SYSTEMD_INVOCATION_ID={invocation}"));
        assert!(said.contains(remedy), "{said}");
        run("systemctl reset-failed paced.service paced.socket || true");
    }
}

#[test]
fn a_relay_with_a_worker_that_is_stuck_is_restarted() {
    lab::ring!(Vm);
    let service = Service::install();
    service.grant_rights();
    service.configure("workers = 2", "");
    service.open_sockets(2);
    write(&format!("{UNITS}/paced.service.d/watchdog.conf"), "[Service]\nWatchdogSec=4\n");
    run("systemctl daemon-reload && systemctl start paced.service");
    service.relay();
    let pid = main_pid();
    assert_eq!(capabilities(pid), BIND_AND_RAW, "no right that only the program for the workers needed");
    // A healthy relay keeps the watchdog quiet.
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!((main_pid(), property("NRestarts")), (pid, "0".into()));
    let named = |thread: &fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap() == "worker-1\n";
    let mut threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(Result::unwrap);
    let worker: i32 = threads.find(named).unwrap().file_name().to_str().unwrap().parse().unwrap();
    // SAFETY: these calls stop one thread of the other process, as a debugger does; they touch no memory.
    let stopped = unsafe {
        let none = std::ptr::null_mut::<libc::c_void>();
        libc::ptrace(libc::PTRACE_SEIZE, worker, none, none) + libc::ptrace(libc::PTRACE_INTERRUPT, worker, none, none)
    };
    assert_eq!(stopped, 0);
    let is_back = || {
        // The exit of a traced thread must be reaped by its tracer, which is this thread.
        // SAFETY: the call takes a thread's ID and a null pointer for the status.
        unsafe { libc::waitpid(worker, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) };
        (![0, pid].contains(&main_pid()) && property("ActiveState") == "active").then_some(())
    };
    wait_for("the restart of a stuck relay", SOON, is_back).unwrap();
    assert_eq!(property("NRestarts"), "1");
    let said = run("journalctl -b --no-pager -u paced");
    assert!(said.contains("no packets move") && said.contains("worker-1"), "{said}");
    assert!(said.contains("Watchdog timeout"), "{said}");
    service.relay();
}

#[test]
fn a_call_over_the_bus_starts_the_service_and_is_answered_as_the_bus_policy_allows() {
    lab::ring!(Vm);
    let service = Service::install();
    service.configure("", "[control]\nbus = \"system\"");
    run("systemctl enable paced.service");
    assert_eq!(property("ActiveState"), "inactive");
    let asked = "busctl get-property org.paced.Paced1 /org/paced/Paced1 org.paced.Control1 Revision";
    assert_eq!(run(asked), "t 1\n");
    assert_eq!(property("ActiveState"), "active");
    let introspection = run("busctl introspect org.paced.Paced1 /org/paced/Paced1");
    assert!(
        ["SetPolicy", "Revision", "emits-change"].iter().all(|part| introspection.contains(part)),
        "{introspection}"
    );
    let of_group = format!("setpriv --reuid=nobody --regid=paced --clear-groups {asked}");
    assert_eq!(run(&of_group), "t 1\n");
    let (answered, said) = try_run(&of_group.replace("regid=paced", "regid=nogroup"));
    assert!(!answered && said.contains("denied"), "{said}");
    // Polkit may also permit writing to some callers that may read.
    let call = |method: &str| {
        try_run(&format!(
            "setpriv --reuid=nobody --regid=paced --clear-groups busctl call org.paced.Paced1 /org/paced/Paced1 \
             org.paced.Control1 {method}"
        ))
    };
    for method in ["ForgetSavedPolicy", "MoveEdge s ''", "MoveEdgeToPath s ''"] {
        let (allowed, said) = call(method);
        assert!(!allowed && said.contains("\"nobody\" may not change anything"), "{method}: {said}");
    }
    let rule = "polkit.addRule(function(action, subject) { \
                if (action.id == 'org.paced.Paced1.write' && subject.user == 'nobody') return polkit.Result.YES; });";
    write("/etc/polkit-1/rules.d/10-paced.rules", rule);
    wait_for("polkit to apply the rule", SOON, || call("ForgetSavedPolicy").0.then_some(())).unwrap();
    // The user may move the edge now, but there is no edge.
    let (moved, said) = call("MoveEdge s ''");
    assert!(!moved && said.contains("this paced has no edge"), "{said}");
    let author =
        run("journalctl -b --no-pager -u paced -o json PACED_NAME=org.paced.Paced1 --output-fields=PACED_BUS,MESSAGE");
    assert!(author.contains("\"PACED_BUS\":\"system\""), "each field of a log line is a journal field: {author}");
}

#[test]
fn a_purge_ends_the_service_and_leaves_nothing_but_the_user() {
    lab::ring!(Vm);
    let service = Service::install();
    service.configure("", "");
    run("systemctl enable --now paced.service");
    service.relay();
    let pid = main_pid();
    let files = run(&format!("{DPKG} -L paced"));
    run(&format!("{DPKG} --purge paced"));
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the relay has ended");
    assert_nothing_is_left(&files);
    // Debian keeps system users, so that no other user gets their IDs.
    assert!(try_run("getent passwd paced").0);
    assert!(!try_run("systemctl cat paced.service").0);
}

#[test]
fn a_purge_succeeds_where_scripts_of_packages_may_not_stop_services() {
    lab::ring!(Vm);
    let service = Service::install();
    service.configure("", "");
    run("systemctl enable --now paced.service");
    let pid = main_pid();
    let files = run(&format!("{DPKG} -L paced"));
    // As in containers (invoke-rc.d(8)).
    write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n");
    run("chmod +x /usr/sbin/policy-rc.d");
    let (purged, said) = try_run(&format!("{DPKG} --purge paced"));
    run("rm /usr/sbin/policy-rc.d");
    assert!(purged, "{said}");
    try_run(&format!("kill {pid}"));
    wait_for("the end of the relay", SOON, || (!Path::new(&format!("/proc/{pid}")).exists()).then_some(())).unwrap();
    assert_nothing_is_left(&files);
}

/// Asserts that no file of the package is left, and no file that it created while in use.
fn assert_nothing_is_left(files: &str) {
    let left =
        files.lines().filter(|file| Path::new(file).is_file() || file.contains("paced") && Path::new(file).exists());
    assert_eq!(left.collect::<Vec<_>>(), [""; 0]);
    assert_eq!(
        try_run("ls -d /etc/paced /var/lib/paced /run/paced /var/lib/private/paced /etc/systemd/system/*/*paced*")
            .1
            .lines()
            .filter(|line| !line.contains("No such file"))
            .collect::<Vec<_>>(),
        [""; 0]
    );
}
