//! Checks of a configuration against this machine; each finding names the place in it to correct.

use std::{
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use anyhow::{Result, bail};
use config::{
    Config, FilePart,
    log::AccessForm,
    relay::ListenerIdentity,
    uplink::{TrustSource, UplinkSettings},
};
use edge::{
    client::{access::Access, endpoint::Endpoint},
    proxy::users::ProxyUsers,
};
use nix::unistd::{Uid, User};
use quic::{datagrams::Schedules, endpoint::Transport};
use serving::upstream::Upstream;

use super::{
    control_identity, from_parts, gateway_identity, identity, parts,
    readable::{self, FileUser},
};
use crate::{certificates, policy};

mod addresses;

/// A key, with or without its sections (see [`config::place`]), and the file or name that is its value.
type Named = (&'static str, PathBuf);

/// Reads a configuration and everything that it names on this machine; returns it with warnings about settings that may
/// be mistakes.
///
/// # Errors
/// All faults that would keep paced from starting, each with its place.
pub fn check(file: &Path) -> Result<(Config, Vec<String>)> {
    let parts = parts(file)?;
    let config = from_parts(file, &parts)?;
    let faults = faults(&config);
    if !faults.is_empty() {
        let mut lines = vec![format!("{} cannot be used", file.display())];
        for (keys, error) in faults {
            let line = placed(&parts, &keys, &format!("{error:#}"));
            // Listeners may share a certificate.
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        bail!(lines.join("\n"));
    }
    let warnings = warnings(&config).into_iter().map(|(named, why)| (vec![named], why));
    let warnings = warnings.chain(addresses::missing(&config));
    let warnings = warnings.map(|(keys, why)| placed(&parts, &keys, &why)).collect();
    Ok((config, warnings))
}

/// Puts the positions of keys before a message. Takes the keys whose value is in the message, or else all keys.
fn placed(parts: &[FilePart], keys: &[Named], message: &str) -> String {
    let is_named = |(_, value): &&Named| message.contains(&value.display().to_string());
    let mut named: Vec<_> = keys.iter().filter(is_named).collect();
    if named.is_empty() {
        named = keys.iter().collect();
    }
    let place = |(key, value): &Named| config::place(parts, key, &value.display().to_string());
    let places: Vec<_> = named.into_iter().filter_map(place).map(|place| place.to_string()).collect();
    if places.is_empty() { message.to_owned() } else { format!("{}: {message}", places.join(" and ")) }
}

/// Returns the faults that keep paced from starting, each with the keys that may cause it.
fn faults(config: &Config) -> Vec<(Vec<Named>, anyhow::Error)> {
    let mut faults = addresses::overlapping(config);
    let mut look = |keys: Vec<Named>, outcome: Result<()>| faults.extend(outcome.err().map(|error| (keys, error)));
    for listener in config.relay.iter().flat_map(|relay| &relay.listeners) {
        // The self-signed certificate of development mode comes from no key of the configuration.
        let ListenerIdentity::Files { certificate, private_key } = &listener.identity else { continue };
        let mut keys = vec![("certificate", certificate.clone()), ("private_key", private_key.clone())];
        keys.extend(listener.client_ca.clone().map(|file| ("client_ca", file)));
        keys.extend(listener.client_crl.clone().map(|file| ("client_crl", file)));
        look(keys, identity(listener, &config.state_dir).map(drop));
    }
    if let Some(tcp) = &config.control.tcp {
        let keys =
            [("certificate", &tcp.certificate), ("private_key", &tcp.private_key), ("client_ca", &tcp.client_ca)];
        let keys = keys.into_iter().chain(tcp.client_crl.iter().map(|file| ("client_crl", file)));
        look(keys.map(|(key, file)| (key, file.clone())).collect(), control_identity(tcp).map(drop));
    }
    for (_, _, uplink) in config.all_uplinks() {
        look(uplink_files(uplink), connectable(uplink));
    }
    for file in config.proxies.iter().filter_map(|proxy| proxy.users_file.as_ref()) {
        look(vec![("users_file", file.clone())], ProxyUsers::read(file).map(drop));
    }
    for listener in config.gateway.iter().flat_map(|gateway| &gateway.listeners) {
        let Some(ListenerIdentity::Files { certificate, private_key }) = &listener.identity else { continue };
        let keys = vec![("certificate", certificate.clone()), ("private_key", private_key.clone())];
        look(keys, gateway_identity(listener, &config.state_dir).map(drop));
    }
    let models = config.gateway.iter().flat_map(|gateway| &gateway.models);
    for model in models {
        if let Some(file) = &model.key_file {
            look(vec![("key_file", file.clone())], serving::gateway::read_key(file).map(drop));
        }
        let keys = model.ca_file.iter().map(|file| ("ca_file", file.clone())).collect();
        look(keys, Upstream::new(model).map(drop));
    }
    let policies = config.gateway.iter().flat_map(|gateway| gateway.policy_files());
    for (alias, key, file) in policies {
        look(vec![(key, file.to_owned())], serving::routes::read_policy(file, alias).map(drop));
    }
    faults
}

fn uplink_files(uplink: &UplinkSettings) -> Vec<Named> {
    let mut keys = Vec::new();
    if let TrustSource::Authority(file) = &uplink.trust {
        keys.push(("ca", file.clone()));
    }
    if let Some(client) = &uplink.client {
        keys.extend([("client_certificate", client.certificate.clone()), ("client_key", client.private_key.clone())]);
    }
    keys
}

/// Checks whether an endpoint to a relay can be made.
fn connectable(uplink: &UplinkSettings) -> Result<()> {
    let schedules = Schedules::default();
    // The accesses differ only in their addresses.
    let Some(access) = Access::of(uplink).into_iter().next() else { return Ok(()) };
    Endpoint::new(access, Transport::default(), Arc::default(), schedules).map(drop)
}

/// Returns settings that paced can start with but that may be mistakes, each with its key.
fn warnings(config: &Config) -> Vec<(Named, String)> {
    let mut warnings: Vec<_> = saved_policy(config).into_iter().collect();
    warnings.extend(unreadable(config, Uid::effective().is_root()));
    warnings.extend(private_files(config).into_iter().filter(|(_, file)| readable::is_public(file)).map(|named| {
        let why = format!("every user of this machine can read {}: chmod o-r", named.1.display());
        (named, why)
    }));
    warnings.extend(mistaken(config, SystemTime::now()));
    for (_, _, uplink) in config.all_uplinks() {
        let Some(file) = &uplink.token_file else { continue };
        if let Some(Err(error)) =
            Access::of(uplink).into_iter().next().and_then(|access| access.token).map(|token| token.read())
        {
            warnings.push((("token_file", file.clone()), format!("{error}; until then, the relay is not asked")));
        }
    }
    for device in &config.kernel.devices {
        if matches!(bpf::NetworkDevice::find(device.as_str()), Ok(None)) {
            let why = format!("there is no device {device}; what is wanted of it is done when it comes");
            warnings.push((("devices", device.as_str().into()), why));
        }
    }
    if let Some(socket) = &config.control.socket {
        let folder = socket.parent().unwrap_or(socket);
        if !folder.is_dir() {
            let why = format!(
                "the folder {} is missing, so that there will be no control socket, unless it is made before paced starts, as \
                 RuntimeDirectory= of paced.service does with /run/paced",
                folder.display()
            );
            warnings.push((("socket", socket.clone()), why));
        }
    }
    let has_local_addresses = !(config.forwards.is_empty() && config.proxies.is_empty() && config.serves.is_empty());
    let has_role = config.relay.is_some() || config.gateway.is_some() || has_local_addresses;
    if config.log.access != AccessForm::Off && !has_role {
        let why = "nothing will be in the access log, because there is no relay, gateway or local address".to_owned();
        warnings.push((("access", config.log.access.as_str().into()), why));
    }
    let now = SystemTime::now();
    for certificate in certificates::shown(config).unwrap_or_default() {
        if certificate.nearness(now).is_some() {
            let is_own = ["relay", "gateway", "control.tcp"].contains(&certificate.used_by);
            let key = if is_own { "certificate" } else { "client_certificate" };
            warnings.push(((key, certificate.file.clone()), certificate.outlook(now)));
        }
    }
    warnings.extend(certificates::unfit(config, now).into_iter().map(|(file, why)| (("certificate", file), why)));
    warnings.dedup();
    warnings
}

/// Returns the files that hold secrets.
fn private_files(config: &Config) -> Vec<Named> {
    let key = |identity: &ListenerIdentity| match identity {
        ListenerIdentity::Files { private_key, .. } => Some(private_key.clone()),
        ListenerIdentity::SelfSigned => None,
    };
    let listeners =
        config.relay.iter().flat_map(|relay| &relay.listeners).filter_map(|listener| key(&listener.identity));
    let gateway = config.gateway.iter().flat_map(|gateway| &gateway.listeners);
    let gateway = gateway.filter_map(|listener| key(listener.identity.as_ref()?));
    let control = config.control.tcp.iter().map(|tcp| tcp.private_key.clone());
    let mut files: Vec<Named> = listeners.chain(gateway).chain(control).map(|file| ("private_key", file)).collect();
    for (_, _, uplink) in config.all_uplinks() {
        files.extend(uplink.client.iter().map(|client| ("client_key", client.private_key.clone())));
        files.extend(uplink.token_file.iter().map(|file| ("token_file", file.clone())));
    }
    let models = config.gateway.iter().flat_map(|gateway| &gateway.models);
    files.extend(models.filter_map(|model| model.key_file.clone()).map(|file| ("key_file", file)));
    files.extend(config.proxies.iter().filter_map(|proxy| proxy.users_file.clone()).map(|file| ("users_file", file)));
    files.sort();
    files.dedup();
    files
}

/// Returns a warning for each file that root, who checks the configuration, can read and the service cannot.
fn unreadable(config: &Config, is_root: bool) -> Vec<(Named, String)> {
    let Some(service) = FileUser::of_service(&config.state_dir).filter(|_| is_root) else { return Vec::new() };
    let why = |file: &Path| {
        let (file, uid) = (file.display(), service.uid);
        format!(
            "the service, which runs as the user with the number {uid}, cannot read {file}: see the modes in `namei -l {file}`"
        )
    };
    let files = private_files(config).into_iter().filter(|(_, file)| !service.can_read(file));
    files.map(|named| (named.clone(), why(&named.1))).collect()
}

/// Returns warnings about users that do not exist, tokens that have expired, and ports without a listener.
fn mistaken(config: &Config, now: SystemTime) -> Vec<(Named, String)> {
    let mut warnings = Vec::new();
    for name in &config.control.writers {
        // An error means that the user database does not answer.
        if let Ok(None) = User::from_name(name) {
            warnings.push((("writers", name.into()), format!("this machine has no user {name}")));
        }
    }
    let Some(relay) = &config.relay else { return warnings };
    for token in &relay.tokens {
        if token.expires.is_some_and(|expires| expires.days_left(now).is_none()) {
            warnings.push((("name", (&token.name).into()), format!("the token of {} has expired", token.name)));
        }
    }
    for template in &relay.templates {
        let port = template.origin().port;
        if !relay.listeners.iter().any(|listener| listener.address.port() == port) {
            let why = format!(
                "no listener has the port {port}, which clients of {template} use: it has to be redirected to one"
            );
            warnings.push((("templates", template.to_string().into()), why));
        }
    }
    warnings
}

/// Returns a warning if a saved policy makes the policy of the files ineffective, or would but cannot be used.
fn saved_policy(config: &Config) -> Option<(Named, String)> {
    let folder = config.state_dir.display();
    let why = match policy::prefer_saved(&mut config.clone()) {
        Ok(None) => return None,
        Ok(Some(_)) => format!(
            "the saved policy in {folder} takes precedence over [schedule], [class] and [[rule]] in the files \
             (`pacectl policy forget` and `pacectl reload` end that)"
        ),
        // The folder belongs to the service; other users may not look into it.
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(|it| it.kind() == ErrorKind::PermissionDenied) => {
            return None;
        }
        Err(error) => {
            format!("the saved policy in {folder} cannot be used, so the one in the files will be in force: {error:#}")
        }
    };
    Some((("state_dir", config.state_dir.clone()), why))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, PermissionsExt},
        time::Duration,
    };

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

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
            (
                "relay.key",
                "other.key",
                ["line 5: relay.private_key", "the private key does not belong to the certificate"],
            ),
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
            (
                listener + &forward("127.0.0.1:443", "udp"),
                "line 7: relay.listener.address and line 9: forward.listen: ",
            ),
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
        let model =
            |name: &str| format!("[[gateway.model]]\nname = \"{name}\"\nengines = [\"http://127.0.0.1:8001\"]\n");
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
    fn what_is_missing_and_keeps_nobody_from_starting_is_warned_of_with_its_line() {
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
        assert!(alone.len() == 1 && alone[0].contains("nothing will be in the access log"), "{alone:?}");
    }

    #[test]
    fn a_saved_policy_is_warned_of_because_it_takes_precedence_over_the_files() {
        let folder = Folder::new("saved");
        let text = format!("state_dir = \"$\"\ncontrol.enabled = false\n{RELAY}");
        let warned = || folder.check(&text).unwrap();
        assert_eq!(warned(), Vec::<String>::new());
        for (saved, told) in [("[class.voice]\n", "takes precedence over [schedule]"), ("[clas]\n", "cannot be used")] {
            folder.write("policy.toml", saved);
            let warnings = warned();
            assert!(warnings.len() == 1 && warnings[0].contains(told), "{saved}: {warnings:?}");
            assert!(warnings[0].contains("line 1: state_dir: "), "{warnings:?}");
        }
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
        let text = format!("state_dir = \"$\"\n{RELAY}").replace('$', &folder.0.display().to_string());
        let config = Config::from_parts(&[FilePart { name: "paced.toml".into(), text }]).unwrap();
        let owner = fs::metadata(&folder.0).unwrap();
        if owner.uid() == 0 {
            assert_eq!(unreadable(&config, true), [], "the state folder does not say who runs the service");
            std::os::unix::fs::chown(&folder.0, Some(900), Some(900)).unwrap();
        }
        fs::set_permissions(folder.0.join("relay.key"), PermissionsExt::from_mode(0o040)).unwrap();
        let warnings = unreadable(&config, true);
        assert!(warnings.len() == 1 && warnings[0].1.contains("cannot read"), "{warnings:?}");
        assert_eq!(unreadable(&config, false), []);
    }
}
