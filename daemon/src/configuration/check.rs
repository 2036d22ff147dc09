//! Checks of a configuration against this machine; each finding names the place in it to correct.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use admission::connection_id::Secret;
use anyhow::{Result, bail};
use config::{
    Config,
    log::AccessForm,
    relay::ListenerIdentity,
    uplink::{TrustSource, UplinkSettings},
};
use edge::proxy::users::ProxyUsers;
use nix::unistd::{Uid, User};
use quic::{datagrams::Schedules, endpoint::Transport};
use relay::{accounts::Used, ledger};
use relay_client::{access::Access, endpoint::Endpoint};
use role::kept;
use serving::learned::{self, Learned};
use tenants::spending::{self, Spent};
use upstream::Upstream;

use self::place::{Named, placed};
use super::{
    DROP_INS, control_identity, files, from_parts, gateway_identity, identity, parts,
    readable::{self, FileUser},
};
use crate::{certificates, policy};

mod addresses;
mod place;

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
    let own =
        parts.iter().map(|part| PathBuf::from(&part.name)).chain([file.with_file_name(DROP_INS)]).collect::<Vec<_>>();
    let warnings = warnings(&config).into_iter().map(|(named, why)| (vec![named], why));
    let warnings = warnings.chain(unreadable(&config, &own, Uid::effective().is_root()));
    let warnings = warnings.chain(addresses::missing(&config));
    let mut warnings: Vec<_> = warnings.map(|(keys, why)| placed(&parts, &keys, &why)).collect();
    // Forwards for UDP and for TCP may have the same address.
    warnings.dedup();
    Ok((config, warnings))
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
        look(keys, identity(listener, &config.state_dir, &[]).map(drop));
    }
    if let Some(tcp) = &config.control.tcp {
        let keys =
            [("certificate", &tcp.certificate), ("private_key", &tcp.private_key), ("client_ca", &tcp.client_ca)];
        let keys = keys.into_iter().chain(tcp.client_crl.iter().map(|file| ("client_crl", file)));
        look(keys.map(|(key, file)| (key, file.clone())).collect(), control_identity(tcp, &[]).map(drop));
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
        look(keys, gateway_identity(listener, &config.state_dir, &[]).map(drop));
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
        look(vec![(key, file.to_owned())], routes::read_policy(file, alias).map(drop));
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
    warnings.extend(private_files(config).into_iter().filter(|(_, file)| readable::is_public(file)).map(|named| {
        let why = format!("every user of this machine can read {}: chmod o-r", named.1.display());
        (named, why)
    }));
    warnings.extend(damaged_state(config));
    let secret = config.state_dir.join("secret");
    if secret.is_file() && readable::is_public(&secret) {
        let why = format!(
            "every user of this machine can read {}: chmod o-r, or delete it, and paced makes a new one",
            secret.display()
        );
        warnings.push((("state_dir", config.state_dir.clone()), why));
    }
    warnings.extend(mistaken(config, SystemTime::now()));
    for (_, _, uplink) in config.all_uplinks() {
        let Some(file) = &uplink.token_file else { continue };
        if let Some(Err(error)) =
            Access::of(uplink).into_iter().next().and_then(|access| access.token).map(|token| token.check())
        {
            warnings.push((
                ("token_file", file.clone()),
                format!(
                    "{error}; until paced can read the token, it does not connect to the relay, and refuses a reload that changes the \
                     local address or its token"
                ),
            ));
        }
    }
    for device in &config.kernel.devices {
        if matches!(bpf::NetworkDevice::find(device.as_str()), Ok(None)) {
            let why = format!("there is no device {device} now: paced uses it once it appears");
            warnings.push((("devices", device.as_str().into()), why));
        }
        let planned = config.kernel.devices.iter().map(|device| device.as_str());
        if let Some(why) = enforcement::monitor::doubled(device.as_str(), planned) {
            warnings.push((("devices", device.as_str().into()), why));
        }
    }
    if let Some(socket) = &config.control.socket {
        let folder = socket.parent().unwrap_or(socket);
        if !folder.is_dir() {
            let why = format!(
                "the folder {} is missing. If it is still missing when paced starts, there will be no control socket. (RuntimeDirectory= of \
                 paced.service makes /run/paced.)",
                folder.display()
            );
            warnings.push((("socket", socket.clone()), why));
        }
    }
    let has_local_addresses = !(config.forwards.is_empty() && config.proxies.is_empty() && config.serves.is_empty());
    let has_role = config.relay.is_some() || config.gateway.is_some() || has_local_addresses;
    if config.log.access != AccessForm::Off && !has_role {
        let why = "the access log will be empty, because there is no relay, gateway or local address".to_owned();
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
    warnings
}

/// Returns the files that hold secrets.
fn private_files(config: &Config) -> Vec<Named> {
    let is_private = |key: &str| ["private_key", "client_key", "token_file", "key_file", "users_file"].contains(&key);
    let files = files::named(config).into_iter().filter(|(key, _)| is_private(key));
    let mut files: Vec<Named> = files.map(|(key, file)| (key, file.to_owned())).collect();
    files.sort();
    files.dedup();
    files
}

/// Returns a warning for each file or folder that root, who checks the configuration, can read and the service cannot: among the
/// configuration's own `files`, and among the files that it names.
fn unreadable(config: &Config, files: &[PathBuf], is_root: bool) -> Vec<(Vec<Named>, String)> {
    let Some(service) = FileUser::of_service(&config.state_dir).filter(|_| is_root) else { return Vec::new() };
    let why = |file: &Path| {
        let (file, uid) = (file.display(), service.uid);
        format!("the service runs as user ID {uid} and cannot read {file}: see the modes in `namei -l {file}`")
    };
    let named = files::named(config).into_iter().map(|(key, file)| (vec![(key, file.to_owned())], file));
    let all = files.iter().map(|file| (Vec::new(), file.as_path())).chain(named);
    let mut warnings: Vec<_> =
        all.filter(|(_, file)| !service.can_read(file)).map(|(keys, file)| (keys, why(file))).collect();
    warnings.sort();
    warnings.dedup();
    warnings
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
                "no listener has the port {port}, which clients of {template} use: redirect that port to a listener"
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
        Err(error) if policy::is_hidden(&error) => return None,
        Err(error) => {
            format!(
                "paced cannot use the saved policy in {folder}. It starts with the policy of the files instead; if it \
                 runs with the saved policy, it refuses to reload until `pacectl policy forget`: {error:#}"
            )
        }
    };
    Some((("state_dir", config.state_dir.clone()), why))
}

/// Returns a warning for each file of the state folder that a start would have to do without.
fn damaged_state(config: &Config) -> Vec<(Named, String)> {
    let damaged = damaged_files(&config.state_dir).into_iter().map(|(file, error)| {
        let file = file.display();
        format!("paced cannot use {file}: it starts without it, and keeps it as {file}.damaged once it saves a new one: {error}")
    });
    // Only a relay has the secret.
    let secret = config.relay.as_ref().and_then(|_| Secret::of(&config.state_dir).err());
    let secret = secret.filter(|error| !policy::is_hidden(error)).map(|error| {
        format!("after a restart, peers will have to wait for their timeout (no stateless resets): {error:#}")
    });
    damaged.chain(secret).map(|why| (("state_dir", config.state_dir.clone()), why)).collect()
}

/// Returns the files of the state folder that a start would have to do without, each with the reason. Another user's files are hidden
/// from this user, and are left out.
fn damaged_files(state_dir: &Path) -> Vec<(PathBuf, io::Error)> {
    type Check = fn(&Path) -> io::Result<()>;
    let checks: [(&str, Check); 3] = [
        (ledger::FILE, kept::check::<Used>),
        (spending::FILE, kept::check::<Spent>),
        (learned::FILE, kept::check::<Learned>),
    ];
    let files = checks.map(|(name, check)| (state_dir.join(name), check));
    let faults = files.into_iter().filter_map(|(file, check)| Some((check(&file).err()?, file)));
    let faults = faults.filter(|(error, _)| error.kind() != io::ErrorKind::PermissionDenied);
    faults.map(|(error, file)| (file, error)).collect()
}

#[cfg(test)]
mod tests;
