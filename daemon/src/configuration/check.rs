//! Checks of a configuration against this machine; each finding names the place in it to correct.

use std::{
    fmt::Write as _,
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
use quic::{datagrams::Schedules, endpoint::Transport};
use serving::upstream::Upstream;

use super::{control_identity, from_parts, gateway_identity, identity, parts};
use crate::certificates;

/// A key, and the file or name that is its value.
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
        let mut text = format!("{} cannot be used", file.display());
        for (keys, error) in faults {
            // Writing to a string cannot fail.
            _ = write!(text, "\n{}", placed(&parts, &keys, &format!("{error:#}")));
        }
        bail!(text);
    }
    let warnings = warnings(&config).into_iter();
    Ok((config, warnings.map(|(named, why)| placed(&parts, &[named], &why)).collect()))
}

/// Puts places before a message: those of the keys whose value the message contains, or else those of all keys.
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

/// Returns the faults that keep paced from starting, each with the keys that may cause it; once for listeners that
/// share a certificate.
fn faults(config: &Config) -> Vec<(Vec<Named>, anyhow::Error)> {
    let (mut faults, mut looked) = (Vec::new(), Vec::new());
    let mut look = |keys: Vec<Named>, outcome: Result<()>| {
        if let (false, Err(error)) = (looked.contains(&keys), outcome) {
            faults.push((keys.clone(), error));
        }
        looked.push(keys);
    };
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
        look(keys.map(|(key, file)| (key, file.clone())).to_vec(), control_identity(tcp).map(drop));
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
    let mut warnings = Vec::new();
    for (_, _, uplink) in config.all_uplinks() {
        let Some(file) = &uplink.token_file else { continue };
        if let Some(Err(error)) =
            Access::of(uplink).into_iter().next().and_then(|access| access.token).map(|token| token.read())
        {
            warnings.push((("token_file", file.clone()), format!("{error}; until then, the relay is not asked")));
        }
    }
    for device in &config.kernel.devices {
        if bpf::NetworkDevice::find(device.as_str()).is_err() {
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
    if config.log.access != AccessForm::Off && config.relay.is_none() && config.gateway.is_none() {
        let why = "nothing will be in the access log, which only relays and gateways write".to_owned();
        warnings.push((("access", config.log.access.as_str().into()), why));
    }
    let now = SystemTime::now();
    for certificate in certificates::shown(config).unwrap_or_default() {
        if certificate.nearness(now).is_some() {
            let is_own = ["relay", "control.tcp"].contains(&certificate.used_by);
            let key = if is_own { "certificate" } else { "client_certificate" };
            warnings.push(((key, certificate.file.clone()), certificate.outlook(now)));
        }
    }
    warnings.dedup();
    warnings
}

#[cfg(test)]
mod tests {
    use std::fs;

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
            fs::write(self.0.join(name), text).unwrap();
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
            ["line 12: log.access", "only relays and gateways"],
        ] {
            assert!(
                warnings.iter().any(|warning| told.iter().all(|part| warning.contains(part))),
                "{told:?}: {warnings:?}"
            );
        }
        assert_eq!(warnings.len(), 4, "{warnings:?}");
    }
}
