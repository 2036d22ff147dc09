//! The door for other machines, and independent clients of both gRPC doors.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
};

use lab::{
    authority::Authority,
    process::{self, KilledOnDrop, wait_for},
    site::{FOLDER, Family, SOON, Site, Terms},
};
use serde_json::Value;

use super::{VOICE, in_force, set};

const PORT: u16 = 9443;
const SERVICE: &str = "paced.v1.ControlService";

/// A relay with a control plane over TCP, and certificates for a writer, a reader and a stranger.
fn site() -> Site {
    site_at(Family::V4)
}

fn site_at(family: Family) -> Site {
    let any = if family == Family::V4 { "0.0.0.0" } else { "[::]" };
    let tcp = format!(
        "[control.tcp]\nlisten = \"{any}:{PORT}\"\ncertificate = \"{FOLDER}/relay.pem\"\n\
         private_key = \"{FOLDER}/relay.key\"\nclient_ca = \"{FOLDER}/authority.pem\"\nwriters = [\"ops.example.org\"]"
    );
    let site = Site::new(Terms { sections: &tcp, ..Terms::default() }).unwrap();
    for (name, subject) in [("writer", "ops.example.org"), ("reader", "desk.example.org")] {
        site.write_identity(name, &site.authority.issue(&[subject]).unwrap()).unwrap();
    }
    let other = Authority::new().unwrap();
    site.write_identity("stranger", &other.issue(&["ops.example.org"]).unwrap()).unwrap();
    site.write("other.pem", &other.pem()).unwrap();
    site
}

/// Runs a command; returns its exit code and output.
fn said(command: Command) -> (Option<i32>, String) {
    process::said(process::run(command, "").unwrap()).unwrap()
}

fn place(site: &Site) -> String {
    format!("{}:{PORT}", site.chain.access.far.v4)
}

/// Runs `pacectl` on the client's machine with the certificate of `name`.
fn pacectl(site: &Site, name: &str, authority: &str, arguments: &[&str]) -> (Option<i32>, String) {
    pacectl_to(&place(site), site, name, authority, arguments)
}

/// The same, for this address and port of the relay.
fn pacectl_to(place: &str, site: &Site, name: &str, authority: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = command_to(place, site, name, authority);
    command.args(arguments);
    said(command)
}

/// A command for `pacectl`, without its arguments.
fn command(site: &Site, name: &str, authority: &str) -> Command {
    command_to(&place(site), site, name, authority)
}

fn command_to(place: &str, site: &Site, name: &str, authority: &str) -> Command {
    let mut command = site.chain.client.command(lab::program("pacectl").unwrap()).unwrap();
    command.args(["--remote", place, "--remote-ca"]).arg(site.path(authority));
    command.arg("--remote-cert").arg(site.path(&format!("{name}.pem")));
    command.arg("--remote-key").arg(site.path(&format!("{name}.key")));
    command
}

#[test]
fn on_another_machine_a_certificate_admits_and_its_name_decides_who_writes() {
    lab::ring!(Netns);
    let site = site();
    let policy = site.write("policy.toml", VOICE).unwrap().display().to_string();
    let (code, words) = pacectl(&site, "reader", "authority.pem", &["status"]);
    assert!(code == Some(0) && words.contains("revision"), "{words}");
    let (code, words) = pacectl(&site, "reader", "authority.pem", &["policy", "set", &policy]);
    assert!(code == Some(4) && words.contains("\"desk.example.org\" may not change anything"), "{code:?} {words}");
    for (name, authority, why) in
        [("stranger", "authority.pem", "the authority"), ("writer", "other.pem", "invalid peer certificate")]
    {
        let (code, words) = pacectl(&site, name, authority, &["status"]);
        assert!(code == Some(5) && words.contains(why), "{name}: {code:?} {words}");
    }
    let (code, words) = pacectl(&site, "writer", "authority.pem", &["trace"]);
    assert!(code == Some(1) && words.contains("run it there"), "{code:?} {words}");
    assert_eq!(in_force(&site).1, 1);
    let (code, words) = pacectl(&site, "writer", "authority.pem", &["policy", "set", &policy]);
    assert_eq!(code, Some(0), "{words}");
    assert_eq!(in_force(&site).0, VOICE);
    // The four options belong together, so none may be missing.
    let mut command = site.chain.client.command(lab::program("pacectl").unwrap()).unwrap();
    command.args(["--remote", &place(&site), "status"]);
    let (code, words) = said(command);
    assert!(code == Some(2) && words.contains("--remote-ca"), "{code:?} {words}");
}

#[test]
fn a_certificate_that_is_renewed_is_shown_from_the_next_reload_on() {
    lab::ring!(Netns);
    let site = site();
    let renewed = Authority::new().unwrap();
    site.write_identity("relay", &renewed.issue(&[&site.chain.access.far.v4.to_string()]).unwrap()).unwrap();
    site.write("renewed.pem", &renewed.pem()).unwrap();
    assert_eq!(pacectl(&site, "writer", "renewed.pem", &["status"]).0, Some(5));
    let (code, words) = pacectl(&site, "writer", "authority.pem", &["reload"]);
    assert_eq!(code, Some(0), "{words}");
    let (code, words) = pacectl(&site, "writer", "renewed.pem", &["status"]);
    assert_eq!(code, Some(0), "{words}");
    // An unusable certificate is refused, and the previous one stays.
    site.write("relay.key", "no key").unwrap();
    let (code, words) = pacectl(&site, "writer", "renewed.pem", &["reload"]);
    assert!(code == Some(3) && words.contains("relay.key"), "{code:?} {words}");
    assert_eq!(pacectl(&site, "writer", "renewed.pem", &["status"]).0, Some(0));
}

#[test]
fn a_revoked_certificate_admits_no_caller_after_the_next_reload() {
    lab::ring!(Netns);
    let tcp = format!(
        "[control.tcp]\nlisten = \"0.0.0.0:{PORT}\"\ncertificate = \"{FOLDER}/relay.pem\"\n\
         private_key = \"{FOLDER}/relay.key\"\nclient_ca = \"{FOLDER}/authority.pem\""
    );
    let site = Site::new(Terms { sections: &tcp, ..Terms::default() }).unwrap();
    let issued = ["one", "other"].map(|name| {
        let issued = site.authority.issue(&[&format!("{name}.example.org")]).unwrap();
        site.write_identity(name, &issued).unwrap();
        issued
    });
    let code = |name: &str| pacectl(&site, name, "authority.pem", &["status"]).0;
    assert_eq!([code("one"), code("other")], [Some(0); 2]);
    let mut watch = command(&site, "other", "authority.pem");
    watch.args(["events", "--json"]).stderr(Stdio::piped());
    let mut watching = KilledOnDrop::start(&mut watch).unwrap();
    let completed = "control_handshakes_total{result=\"completed\"}";
    site.wait_for_counts("the caller to connect", |counts| counts.of(completed) == 3).unwrap();
    site.write("revoked.pem", &site.authority.revoke(&[&issued[1]]).unwrap()).unwrap();
    let sections = format!("{tcp}\nclient_crl = \"{FOLDER}/revoked.pem\"");
    site.configure(Terms { sections: &sections, ..Terms::default() }).unwrap();
    assert_eq!(site.pacectl(&["reload"], "").unwrap().0, Some(0));
    let ended = wait_for("the end of a connection whose certificate is revoked", SOON, || watching.try_wait().unwrap());
    assert!(!ended.unwrap().success());
    assert_eq!([code("one"), code("other")], [Some(0), Some(5)]);
}

#[test]
fn callers_with_unfinished_handshakes_keep_no_other_caller_out() {
    lab::ring!(Netns);
    for family in [Family::V4, Family::V6] {
        let site = site_at(family);
        let far = &site.chain.access.far;
        let relay = match family {
            Family::V4 => SocketAddr::from((far.v4, PORT)),
            Family::V6 => SocketAddr::from((far.v6, PORT)),
        };
        let silent = || std::net::TcpStream::connect(relay).unwrap();
        let _silent: Vec<_> = site.chain.client.run(|| (0..400).map(|_| silent()).collect()).unwrap();
        assert_eq!(site.pacectl(&["status"], "").unwrap().0, Some(0));
        // Callers are served, even from the address of the silent ones.
        for _ in 0..3 {
            let (code, words) = pacectl_to(&relay.to_string(), &site, "reader", "authority.pem", &["status"]);
            assert_eq!(code, Some(0), "{family:?}: {words}");
        }
        let ended = |result: &str| format!("control_handshakes_total{{result=\"{result}\"}}");
        let counts = site.wait_for_counts("all silent connections to end", |counts| {
            counts.of(&ended("crowded")) + counts.of(&ended("timeout")) == 400
        });
        assert_eq!(counts.unwrap().of(&ended("completed")), 3, "{family:?}");
    }
}

/// A call by a Python client that learns the methods by reflection.
fn call(site: &Site, target: &str, options: &[&str], call: &[&str]) -> (Option<i32>, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/control.py");
    let mut command = site.chain.client.command("/usr/bin/python3").unwrap();
    command.arg(script).args(options).arg(target).args(call);
    said(command)
}

fn answer((code, words): (Option<i32>, String)) -> Value {
    assert_eq!(code, Some(0), "{words}");
    serde_json::from_str(words.lines().next().unwrap()).unwrap_or_else(|error| panic!("{error}: {words}"))
}

#[test]
fn a_client_that_is_none_of_ours_learns_the_protocol_from_the_daemon_and_uses_it() {
    lab::ring!(Netns);
    let site = site();
    let socket = format!("unix:{}", site.path("control.sock").display());
    let method = |name: &str| format!("{SERVICE}/{name}");
    let (code, words) = call(&site, &socket, &[], &[]);
    let listed: Vec<_> = words.lines().map(str::to_owned).collect();
    assert!(code == Some(0) && listed.contains(&method("WatchStats")), "{words}");
    assert!(listed.contains(&"grpc.health.v1.Health/Check".to_owned()), "{words}");

    let health = answer(call(&site, &socket, &[], &["grpc.health.v1.Health/Check"]));
    assert_eq!(health["status"], "SERVING");
    assert_eq!(answer(call(&site, &socket, &[], &[&method("GetStatus")]))["revision"], "1");
    let text = serde_json::json!({ "text": VOICE, "expectedRevision": "1" }).to_string();
    let set_policy = answer(call(&site, &socket, &[], &[&method("SetPolicy"), &text]));
    assert_eq!(set_policy["revision"]["number"], "2");
    assert_eq!(in_force(&site).0, VOICE);
    let stats = answer(call(&site, &socket, &["--answers", "2"], &[&method("WatchStats"), r#"{"interval": "0.1s"}"#]));
    assert_eq!(stats["classes"][1]["class"], "voice");

    // Refusals have the standard codes, and details that tell a program where the error is.
    let wrong = serde_json::json!({ "text": "[class.voice]\nlevle = \"high\"" }).to_string();
    let (code, words) = call(&site, &socket, &[], &[&method("SetPolicy"), &wrong]);
    assert!(code == Some(3) && words.starts_with("INVALID_ARGUMENT"), "{words}");
    assert!(words.contains("did you mean level?") && words.contains("google.rpc.BadRequest"), "{words}");
    let (_, words) = call(&site, &socket, &[], &[&method("SetPolicy"), &text]);
    assert!(words.starts_with("ABORTED"), "{words}");
    let (_, words) = call(&site, &socket, &[], &[&method("CloseTunnel"), r#"{"tunnel": "7"}"#]);
    assert!(words.starts_with("NOT_FOUND"), "{words}");
}

#[test]
fn a_client_that_is_none_of_ours_is_known_by_its_certificate() {
    lab::ring!(Netns);
    let site = site();
    let of = |name: &str| {
        let files = ["authority.pem".into(), format!("{name}.pem"), format!("{name}.key")];
        files.map(|file| site.path(&file).display().to_string())
    };
    let call = |name: &str, arguments: &[&str]| {
        let [ca, certificate, key] = of(name);
        call(&site, &place(&site), &["--ca", &ca, "--certificate", &certificate, "--key", &key], arguments)
    };
    let (get_status, reload) = (format!("{SERVICE}/GetStatus"), format!("{SERVICE}/Reload"));
    assert_eq!(answer(call("reader", &[&get_status])).get("writable"), None);
    assert_eq!(answer(call("writer", &[&get_status]))["writable"], true);
    let (code, words) = call("reader", &[&reload]);
    assert!(code == Some(3) && words.starts_with("PERMISSION_DENIED"), "{words}");
    let (code, words) = call("stranger", &[&get_status]);
    assert!(code == Some(3) && words.starts_with("UNAVAILABLE"), "{words}");
    set(&site, VOICE, &[]);
    assert_eq!(answer(call("writer", &[&reload]))["revision"], "3");
}
