//! Changes that a reload applies or refuses.

use std::{
    net::{SocketAddr, TcpStream, UdpSocket},
    os::unix::net::UnixStream,
    process::Command,
    time::Duration,
};

use lab::{
    application::{application, assert_carries, echoes},
    process::{Process, wait_for},
    site::{Counts, Family, SOON, Site, Terms},
};

/// A daemon at the client that has only the edge role.
struct Edge<'a> {
    site: &'a Site,
    daemon: Process,
}

impl<'a> Edge<'a> {
    fn new(site: &'a Site, sections: &str) -> Self {
        let file = Self::configure(site, sections);
        let daemon = site.chain.client.start(lab::program("paced").unwrap(), ["run", "--config", &file]).unwrap();
        let socket = site.path("edge.sock");
        wait_for("the edge's control socket to open", SOON, || UnixStream::connect(&socket).ok()).unwrap();
        Self { site, daemon }
    }

    fn configure(site: &Site, sections: &str) -> String {
        let folder = site.path("").display().to_string();
        let folder = folder.trim_end_matches('/');
        let text = format!("state_dir = \"{folder}/edge\"\n{}", sections.replace("$FOLDER", folder));
        site.write("edge.toml", &text).unwrap().display().to_string()
    }

    /// Reloads with another configuration; returns whether `pacectl` succeeded, and its output.
    fn reload(&self, sections: &str) -> (bool, String) {
        Self::configure(self.site, sections);
        let (code, said) = self.pacectl(&["reload"]);
        (code == Some(0), said)
    }

    fn pacectl(&self, arguments: &[&str]) -> (Option<i32>, String) {
        self.site.pacectl_at("edge.sock", arguments).unwrap()
    }
}

const CONTROL: &str = "[control]\nsocket = \"$FOLDER/edge.sock\"\n";

fn forward(site: &Site, port: u16, more: &str) -> String {
    let (relay, target) = (site.template(Family::V4), site.target(Family::V4, 7));
    format!(
        "[[forward]]\nlisten = \"127.0.0.1:{port}\"\nrelay = \"{relay}\"\ntarget = \"{target}\"\nca = \"$FOLDER/authority.pem\"\n{more}\n"
    )
}

#[test]
fn forwards_come_go_and_change_while_senders_of_the_others_keep_their_tunnels() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let (stays, changes, comes) = (forward(&site, 5001, ""), forward(&site, 5002, ""), forward(&site, 5003, ""));
    let edge = Edge::new(&site, &format!("{CONTROL}{stays}{changes}"));
    let [one, two] = [5001, 5002].map(|port| application(&site, &format!("127.0.0.1:{port}")));
    [&one, &two].into_iter().for_each(|sender| assert_carries(&site, sender, 100));
    let opened =
        |count: i64| site.wait_for_counts("the tunnels to open", |counts| counts.sum("tunnels_opened_total") == count);
    opened(2).unwrap();

    let changed = format!("{changes}mode = \"stream\"\n");
    let (is_done, said) = edge.reload(&format!("{CONTROL}{comes}{changed}{stays}"));
    assert!(is_done, "{said}");
    assert_carries(&site, &one, 100);
    assert_eq!(site.counts().unwrap().sum("tunnels_opened_total"), 2, "the tunnel stays the same");
    assert_carries(&site, &two, 100);
    let three = application(&site, "127.0.0.1:5003");
    assert_carries(&site, &three, 100);
    opened(4).unwrap();
    let status = edge.pacectl(&["status"]).1;
    assert!(status.contains("127.0.0.1:5003") && status.contains("127.0.0.1:5002"), "{status}");

    assert!(edge.reload(CONTROL).0);
    site.wait_for_counts("all tunnels to end", |counts| counts.udp_tunnels() == 0).unwrap();
    assert!(!edge.pacectl(&["status"]).1.contains("127.0.0.1:5001"));
    site.chain.client.run(|| UdpSocket::bind("127.0.0.1:5001").map(drop)).unwrap().unwrap();
    drop(edge.daemon);
}

#[test]
fn an_edge_without_other_roles_saves_a_policy() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let edge = Edge::new(&site, &format!("{CONTROL}{}", forward(&site, 5001, "")));
    let policy = "[class.voice]\nlevel = \"high\"\n";
    let file = site.write("voice.toml", policy).unwrap().display().to_string();
    let (code, said) = edge.pacectl(&["policy", "set", &file, "--save"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(std::fs::read_to_string(site.path("edge/policy.toml")).unwrap(), policy);
}

#[test]
fn a_configuration_that_is_a_pipe_refuses_a_reload_and_keeps_nobody_waiting() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let mut edge = Edge::new(&site, &format!("{CONTROL}{}", forward(&site, 5001, "")));
    let file = site.path("edge.toml");
    std::fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    edge.daemon.signal(libc::SIGHUP).unwrap();
    edge.daemon.wait_for_line("it is a FIFO", SOON).unwrap();
    assert_carries(&site, &application(&site, "127.0.0.1:5001"), 10);
    edge.daemon.signal(libc::SIGTERM).unwrap();
    assert!(edge.daemon.wait(SOON).unwrap().success());
}

#[test]
fn settings_that_cannot_be_put_in_force_are_refused_by_name_and_change_nothing() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let stays = forward(&site, 5001, "");
    let edge = Edge::new(&site, &format!("{CONTROL}{stays}"));
    let one = application(&site, "127.0.0.1:5001");
    assert_carries(&site, &one, 100);
    let taken = site.chain.client.run(|| UdpSocket::bind("127.0.0.1:5009").unwrap()).unwrap();
    let nowhere = forward(&site, 5004, "").replace("authority.pem", "nowhere.pem");
    for (sections, why) in [
        (format!("[transport]\nmax_mtu = 1490\n{stays}"), "transport.max_mtu"),
        (format!("[kernel]\ndevices = [\"lo\"]\n{stays}"), "kernel.devices"),
        (format!("{}{}", forward(&site, 5009, ""), forward(&site, 5003, "")), "127.0.0.1:5009"),
        (format!("{nowhere}{stays}"), "nowhere.pem"),
        (format!("[metrics]\nlisten = \"192.0.2.1:9\"\n{stays}"), "192.0.2.1:9"),
    ] {
        let (is_done, said) = edge.reload(&format!("{CONTROL}{sections}"));
        assert!(!is_done && said.contains(why), "{said}");
        assert!(echoes(&one, b"still here"), "{why}");
    }
    assert_eq!(site.counts().unwrap().sum("tunnels_opened_total"), 1);
    drop(taken);
    assert!(edge.reload(&format!("{CONTROL}{stays}{}", forward(&site, 5009, ""))).0, "the address is free now");
}

#[test]
fn logs_metrics_and_doors_follow_a_reload() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let quiet = format!("{CONTROL}[metrics]\nlisten = \"127.0.0.1:9001\"\n[log]\nlevel = \"warn\"");
    let edge = Edge::new(&site, &quiet);
    let answers = |port: u16| Counts::read(&site.chain.client, &format!("127.0.0.1:{port}")).is_ok();
    wait_for("the page", SOON, || answers(9001).then_some(())).unwrap();
    let (is_done, why) = edge.reload(&quiet);
    assert!(is_done, "{why}");
    let metrics = "[metrics]\nlisten = \"127.0.0.1:9002\"\n";
    let (is_done, why) = edge.reload(&format!("{CONTROL}{metrics}[log]\nlevel = \"info\""));
    assert!(is_done, "{why}");
    assert!(answers(9002));
    let ends = |port: u16| wait_for("the page to disappear", SOON, || (!answers(port)).then_some(())).unwrap();
    ends(9001);
    edge.daemon.wait_for_line("configuration reloaded", SOON).unwrap();
    let said = edge.daemon.output();
    assert_eq!(said.matches("configuration reloaded").count(), 1, "not of the first reload:\n{said}");

    let moved = CONTROL.replace("edge.sock", "moved.sock");
    let (is_done, why) = edge.reload(&format!("{moved}[metrics]\nlisten = \"192.0.2.1:9\"\n"));
    assert!(!is_done && !site.path("moved.sock").exists(), "{why}");
    assert!(edge.reload(&format!("{moved}{metrics}")).0);
    assert!(UnixStream::connect(site.path("moved.sock")).is_ok());
    assert!(UnixStream::connect(site.path("edge.sock")).is_err());
    let listens = |address: &str| {
        let address: SocketAddr = address.parse().unwrap();
        site.chain.client.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok()).unwrap()
    };
    let tcp = "[control.tcp]\nlisten = \"127.0.0.1:9443\"\ncertificate = \"$FOLDER/relay.pem\"\n\
               private_key = \"$FOLDER/relay.key\"\nclient_ca = \"$FOLDER/authority.pem\"\n";
    assert!(!listens("127.0.0.1:9443"));
    Edge::configure(&site, &format!("{moved}{tcp}"));
    let reload = || site.pacectl_at("moved.sock", &["reload"]).unwrap().0 == Some(0);
    assert!(reload() && listens("127.0.0.1:9443"));
    ends(9002);
    Edge::configure(&site, &moved);
    assert!(reload());
    wait_for("the door to close", SOON, || (!listens("127.0.0.1:9443")).then_some(())).unwrap();
}
