use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt},
    path::PathBuf,
    time::Duration,
};

use config::FilePart;
use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;

/// A folder with a certificate and its key, another key, and an expired certificate.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = Self(std::env::temp_dir().join(format!("paced-check-{}-{name}", std::process::id())));
        fs::create_dir_all(&folder.0).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["relay.example".into()]).unwrap();
        folder.write("relay.pem", &params.self_signed(&key).unwrap().pem());
        params.not_after = date_time_ymd(2026, 1, 1);
        folder.write("old.pem", &params.self_signed(&key).unwrap().pem());
        folder.write("relay.key", &key.serialize_pem());
        folder.write("other.key", &KeyPair::generate().unwrap().serialize_pem());
        folder
    }

    fn write(&self, name: &str, text: &str) {
        let file = self.0.join(name);
        fs::write(&file, text).unwrap();
        fs::set_permissions(file, PermissionsExt::from_mode(0o640)).unwrap();
    }

    /// Returns the warnings or the error for a configuration in which `$` stands for the folder.
    fn check(&self, text: &str) -> Result<Vec<String>, String> {
        self.write("paced.toml", &text.replace('$', &self.0.display().to_string()));
        check(&self.0.join("paced.toml")).map(|(_, warnings)| warnings).map_err(|error| format!("{error:#}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

const RELAY: &str = r#"[relay]
templates = ["https://relay.example/{target_host}/{target_port}/"]
auth = "none"
certificate = "$/relay.pem"
private_key = "$/relay.key"
"#;

#[test]
fn a_file_that_cannot_be_used_is_told_with_its_key_and_line() {
    let folder = Folder::new("faults");
    assert_eq!(folder.check(&RELAY.replace("[relay]", "control.enabled = false\n[relay]")), Ok(Vec::new()));
    for (from, to, told) in [
        ("relay.key", "other.key", ["line 5: relay.private_key", "the private key does not belong to the certificate"]),
        ("relay.key", "none.key", ["line 5: relay.private_key", "none.key"]),
        ("relay.pem", "none.pem", ["line 4: relay.certificate", "none.pem"]),
        ("relay.pem", "relay.key", ["line 4: relay.certificate", "holds no certificate"]),
        ("relay.pem", "old.pem", ["line 4: relay.certificate", "the certificate expired"]),
    ] {
        let text = RELAY.replace(from, to);
        let refusal = folder.check(&text).unwrap_err();
        assert!(told.iter().all(|part| refusal.contains(part)), "{to}: {refusal}");
        assert_eq!(refusal.lines().count(), 2, "two listeners have it in common: {refusal}");
        assert!(!refusal.contains("KeyMismatch"), "{refusal}");
    }
    let forward = "[[forward]]\nlisten = \"127.0.0.1:1\"\nrelay = \"https://r.example/{target_host}/{target_port}/\"\n\
                   target = \"a.example:53\"\nca = \"$/none.pem\"";
    let both = folder.check(&format!("{}{forward}", RELAY.replace("relay.key", "other.key"))).unwrap_err();
    assert!(both.contains("relay.private_key") && both.contains("line 10: forward.ca"), "{both}");
}

#[test]
fn addresses_that_overlap_are_told_with_the_lines_that_certainly_name_them() {
    let folder = Folder::new("overlapping");
    let forward = |listen: &str, protocol: &str| {
        format!(
            "[[forward]]\nlisten = \"{listen}\"\nprotocol = \"{protocol}\"\ntarget = \"a.example:53\"\n\
             relay = \"https://r.example/{{target_host}}/{{target_port}}/\"\n"
        )
    };
    let listener = format!("{RELAY}[[relay.listener]]\naddress = \"0.0.0.0:443\"\n");
    for (text, told) in [
        (listener + &forward("127.0.0.1:443", "udp"), "line 7: relay.listener.address and line 9: forward.listen: "),
        (
            forward("127.0.0.1:53", "udp") + &forward("0.0.0.0:53", "udp"),
            "line 2: forward.listen and line 7: forward.listen: ",
        ),
        (
            // The first line is for UDP, and does not overlap.
            forward("127.0.0.1:53", "udp") + &forward("127.0.0.1:53", "tcp") + &forward("0.0.0.0:53", "tcp"),
            "\nline 12: forward.listen: ",
        ),
    ] {
        let refusal = folder.check(&text).unwrap_err();
        assert!(
            refusal.replace(&format!("{}: ", folder.0.join("paced.toml").display()), "").contains(told),
            "{refusal}"
        );
    }
}

#[test]
fn files_of_the_control_plane_and_of_a_gateway_are_told_with_their_keys() {
    let folder = Folder::new("places");
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let mut params = CertificateParams::new(vec!["relay.example".into()]).unwrap();
    params.not_after = date_time_ymd(1970, 1, 1) + since_1970 + Duration::from_secs(3 * 86_400);
    let key = KeyPair::generate().unwrap();
    folder.write("soon.pem", &params.self_signed(&key).unwrap().pem());
    folder.write("soon.key", &key.serialize_pem());
    let gateway = "[[gateway.listener]]\naddress = \"127.0.0.1:8100\"\ncertificate = \"$/soon.pem\"\n\
                   private_key = \"$/soon.key\"\n\
                   [[gateway.model]]\nname = \"large\"\nengines = [\"http://127.0.0.1:8001\"]\n";
    let warnings = folder.check(&format!("control.enabled = false\n{gateway}")).unwrap();
    let is_placed = |warning: &String| warning.contains("line 4: gateway.listener.certificate: ");
    assert!(warnings.iter().any(is_placed), "{warnings:?}");
    let tcp = "[control.tcp]\nlisten = \"127.0.0.1:9443\"\ncertificate = \"$/relay.pem\"\n\
               private_key = \"$/relay.key\"\nclient_ca = \"$/relay.pem\"\nclient_crl = \"$/none.crl\"\n";
    let refusal = folder.check(&format!("{RELAY}{tcp}")).unwrap_err();
    assert!(refusal.contains("line 11: control.tcp.client_crl: "), "{refusal}");
}

#[test]
fn a_policy_that_cannot_be_used_is_told_with_its_key_and_line() {
    let folder = Folder::new("policies");
    folder.write("auto.toml", "kind = \"thresholds\"");
    let gateway = "[gateway]\n[[gateway.model]]\nname = \"large\"\nengines = [\"http://127.0.0.1:8001\"]\n\
                   [[gateway.alias]]\nname = \"auto\"\nmodels = [\"large\"]\npolicy = \"$/auto.toml\"\n";
    let refusal = folder.check(&format!("{RELAY}{gateway}[control]\nenabled = false")).unwrap_err();
    assert!(refusal.contains("line 13: gateway.alias.policy: failed to use "), "{refusal}");
    assert!(refusal.contains("missing field `measure`"), "{refusal}");
}

#[test]
fn a_policy_of_two_aliases_is_checked_for_each() {
    let folder = Folder::new("aliases");
    folder.write(
        "auto.toml",
        "kind = \"thresholds\"\nmeasure = \"predicted\"\noverload = 1.0\nclasses = [\"default\"]\n\
         [[model]]\nname = \"large\"\nlimits = [1.0]\nslope = 0.0\n",
    );
    let model = |name: &str| format!("[[gateway.model]]\nname = \"{name}\"\nengines = [\"http://127.0.0.1:8001\"]\n");
    let alias = |name: &str, models: &str| {
        format!("[[gateway.alias]]\nname = \"{name}\"\nmodels = [{models}]\npolicy = \"$/auto.toml\"\n")
    };
    let (models, fitting) = (model("large") + &model("small"), alias("fitting", "\"large\""));
    let text = format!("control.enabled = false\n{RELAY}[gateway]\n{models}{fitting}");
    folder.check(&text).unwrap();
    let refusal = folder.check(&(text + &alias("other", "\"large\", \"small\""))).unwrap_err();
    assert!(refusal.contains("as a policy of other: it does not know the model small"), "{refusal}");
}

#[test]
fn a_policy_that_a_reload_would_refuse_as_too_long_is_refused_before_the_start() {
    let folder = Folder::new("long");
    let text = format!("control.enabled = false\n{RELAY}{}", "[[rule]]\nclass = \"default\"\n".repeat(60_000));
    let refusal = folder.check(&text).unwrap_err();
    assert!(refusal.contains("the policy has ") && refusal.contains("write at most 1048576"), "{refusal}");
}

#[test]
fn missing_things_that_do_not_prevent_a_start_cause_warnings_with_their_line() {
    let folder = Folder::new("warnings");
    let forward = r#"[[forward]]
listen = "127.0.0.1:1"
relay = "https://r.example/{target_host}/{target_port}/"
target = "a.example:53"
ca = "$/relay.pem"
token_file = "$/none.token"
[kernel]
devices = ["lo", "none0"]
[control]
socket = "$/none/control.sock"
[log]
access = "journal"
"#;
    let warnings = folder.check(forward).unwrap();
    for told in [
        ["line 6: forward.token_file", "none.token"],
        ["line 8: kernel.devices", "there is no device none0"],
        ["line 10: control.socket", "is missing"],
    ] {
        assert!(
            warnings.iter().any(|warning| told.iter().all(|part| warning.contains(part))),
            "{told:?}: {warnings:?}"
        );
    }
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    let alone = folder.check("control.enabled = false\n[log]\naccess = \"journal\"\n").unwrap();
    assert!(alone.len() == 1 && alone[0].contains("the access log will be empty"), "{alone:?}");
}

#[test]
fn a_saved_policy_is_warned_of_because_it_takes_precedence_over_the_files() {
    let folder = Folder::new("saved");
    let text = format!("state_dir = \"$\"\ncontrol.enabled = false\n{RELAY}");
    let warned = || folder.check(&text).unwrap();
    assert_eq!(warned(), Vec::<String>::new());
    for (saved, told) in [
        ("[class.voice]\n", "takes precedence over [schedule]"),
        ("[clas]\n", "refuses to reload until `pacectl policy forget`"),
        ("", "it is empty"),
    ] {
        folder.write("policy.toml", saved);
        let warnings = warned();
        assert!(warnings.len() == 1 && warnings[0].contains(told), "{saved}: {warnings:?}");
        assert!(warnings[0].contains("line 1: state_dir: "), "{warnings:?}");
    }
    let file = folder.0.join("policy.toml");
    fs::remove_file(&file).unwrap();
    mknodat(CWD, file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let warnings = warned();
    assert!(warnings.len() == 1 && warnings[0].contains("it is a FIFO"), "{warnings:?}");
}

#[test]
fn damaged_files_of_state_are_warned_of_and_so_is_a_secret_for_every_user() {
    let folder = Folder::new("damaged");
    let text = format!("state_dir = \"$\"\ncontrol.enabled = false\n{RELAY}");
    let warned = || folder.check(&text).unwrap();
    folder.write("quotas.json", r#"{"month":"2026-11","bytes":{}}"#);
    folder.write("tokens.json", r#"{"month":"2026-11","tokens":{}}"#);
    folder.write("engines.json", r#"{"engines":[]}"#);
    folder.write("secret", &"s".repeat(32));
    assert_eq!(warned(), Vec::<String>::new());
    for name in ["quotas.json", "tokens.json", "engines.json"] {
        folder.write(name, "{");
        let (warnings, told) = (warned(), format!("{name}.damaged"));
        assert!(warnings.len() == 1 && warnings[0].contains(&told), "{warnings:?}");
        fs::remove_file(folder.0.join(name)).unwrap();
    }
    let secret = folder.0.join("secret");
    fs::set_permissions(&secret, PermissionsExt::from_mode(0o644)).unwrap();
    assert!(matches!(&warned()[..], [warning] if warning.contains("chmod o-r")), "{:?}", warned());
    folder.write("secret", "short");
    assert!(matches!(&warned()[..], [warning] if warning.contains("does not hold 32 bytes")), "{:?}", warned());
    fs::remove_file(&secret).unwrap();
    fs::create_dir(&secret).unwrap();
    assert!(matches!(&warned()[..], [warning] if warning.contains("it is a folder")), "{:?}", warned());
}

#[test]
fn mistakes_that_keep_nothing_from_starting_are_warned_of() {
    let folder = Folder::new("mistakes");
    let text = format!(
        "control.enabled = false\n{}[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"\nexpires = \"2020-01-31\"\n",
        RELAY.replace("auth = \"none\"", "listen = [\"127.0.0.1:4433\"]"),
        "ab".repeat(32),
    );
    fs::set_permissions(folder.0.join("relay.key"), PermissionsExt::from_mode(0o644)).unwrap();
    let writers = "control.enabled = false\ncontrol.writers = [\"root\", \"no-such-user\"]\n";
    let warnings = folder.check(&text.replace("control.enabled = false\n", writers)).unwrap();
    for told in [
        ["line 7: relay.private_key: ", "every user of this machine can read"],
        ["line 2: control.writers: ", "no user no-such-user"],
        ["line 9: relay.token.name: ", "the token of alice has expired"],
        ["line 4: relay.templates: ", "no listener has the port 443"],
    ] {
        let is_told = |warning: &&String| told.iter().all(|part| warning.contains(part));
        assert!(warnings.iter().any(|warning| is_told(&warning)), "{told:?}: {warnings:?}");
    }
    assert_eq!(warnings.len(), 4, "{warnings:?}");
}

#[test]
fn a_file_that_root_can_read_and_the_service_cannot_is_warned_of() {
    let folder = Folder::new("service");
    let text = format!("state_dir = \"$\"\n{RELAY}client_ca = \"$/clients.pem\"\n");
    let text = text.replace("\"none\"", "\"certificate\"").replace('$', &folder.0.display().to_string());
    let config = Config::from_parts(&[FilePart { name: "paced.toml".into(), text }]).unwrap();
    fs::create_dir(folder.0.join(DROP_INS)).unwrap();
    let names = ["paced.toml", "conf.d/clients.toml", "relay.key", "clients.pem"];
    for name in names {
        folder.write(name, "");
        fs::set_permissions(folder.0.join(name), PermissionsExt::from_mode(0o444)).unwrap();
    }
    let [own, drop_in, private_key, client_ca] = names.map(|name| folder.0.join(name));
    let files = [own.clone(), drop_in.clone(), drop_in.with_file_name("")];
    let owner = fs::metadata(&folder.0).unwrap();
    if owner.uid() == 0 {
        assert_eq!(unreadable(&config, &files, true), [], "the state folder does not say who runs the service");
        std::os::unix::fs::chown(&folder.0, Some(900), Some(900)).unwrap();
        std::os::unix::fs::chown(folder.0.join("relay.pem"), Some(900), Some(900)).unwrap();
    }
    assert_eq!(unreadable(&config, &files, true), []);
    for file in [own, drop_in, private_key, client_ca] {
        fs::set_permissions(&file, PermissionsExt::from_mode(0o040)).unwrap();
        let warnings = unreadable(&config, &files, true);
        let told = format!("cannot read {}: ", file.display());
        assert!(warnings.len() == 1 && warnings[0].1.contains(&told), "{told}: {warnings:?}");
        assert_eq!(unreadable(&config, &files, false), []);
        fs::set_permissions(&file, PermissionsExt::from_mode(0o444)).unwrap();
    }
}

#[test]
fn an_address_that_two_forwards_lack_is_warned_of_once() {
    let folder = Folder::new("lacking");
    let forward = |protocol: &str| {
        format!(
            "[[forward]]\nlisten = \"198.51.100.2:53\"\nprotocol = \"{protocol}\"\ntarget = \"a.example:53\"\nca = \"$/relay.pem\"\n\
             relay = \"https://r.example/{{target_host}}/{{target_port}}/\"\n"
        )
    };
    let warnings = folder.check(&format!("control.enabled = false\n{}{}", forward("udp"), forward("tcp"))).unwrap();
    assert!(warnings.len() == 1 && warnings[0].contains("no address 198.51.100.2"), "{warnings:?}");
}
