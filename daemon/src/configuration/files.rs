//! The files that a configuration names, and whether they have changed since they were read.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use config::{
    Config,
    control::TcpDoor,
    relay::{ListenerIdentity, ListenerSettings},
    uplink::{TrustSource, UplinkSettings},
};
use tokio::{
    sync::mpsc,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};

/// How often the files are checked.
const LOOK: Duration = Duration::from_secs(3);

/// The metadata that change when a file is written or replaced, also behind a symbolic link: device, inode, size, and
/// the times of the last change of contents and inode. `None` if the file does not exist.
type Stamp = Option<[i64; 5]>;

/// The stamps of files at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenFiles(BTreeMap<PathBuf, Stamp>);

impl SeenFiles {
    /// Takes the stamps of the files that a configuration names.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self(named(config).into_iter().map(|(_, path)| (path.to_owned(), stamp(path))).collect())
    }

    /// The files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.keys().map(PathBuf::as_path)
    }

    /// Takes the stamps of the same files again.
    fn again(&self) -> Self {
        Self(self.0.keys().map(|path| (path.clone(), stamp(path))).collect())
    }
}

fn stamp(path: &Path) -> Stamp {
    let found = fs::metadata(path).ok()?;
    let nanoseconds = |seconds: i64, nanoseconds| seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds);
    Some([
        found.dev() as i64,
        found.ino() as i64,
        found.size() as i64,
        nanoseconds(found.mtime(), found.mtime_nsec()),
        nanoseconds(found.ctime(), found.ctime_nsec()),
    ])
}

/// Returns the files that are read for a configuration, besides its own, each with the key that names it.
pub(super) fn named(config: &Config) -> Vec<(&'static str, &Path)> {
    let mut named: Vec<(&'static str, &Path)> = Vec::new();
    for ListenerSettings { address: _, identity, client_ca, client_crl, auth: _, class: _, schedule: _ } in
        config.relay.iter().flat_map(|relay| &relay.listeners)
    {
        named.extend(of_identity(identity));
        named.extend(client_ca.as_deref().map(|file| ("client_ca", file)));
        named.extend(client_crl.as_deref().map(|file| ("client_crl", file)));
    }
    if let Some(TcpDoor { certificate, private_key, client_ca, client_crl, .. }) = &config.control.tcp {
        named.extend([("certificate", certificate.as_path()), ("private_key", private_key), ("client_ca", client_ca)]);
        named.extend(client_crl.as_deref().map(|file| ("client_crl", file)));
    }
    for (_, _, UplinkSettings { relays: _, token_file, client, trust, via: _, schedule: _, backoff: _ }) in
        config.all_uplinks()
    {
        named.extend(token_file.as_deref().map(|file| ("token_file", file)));
        if let Some(client) = client {
            named.extend([("client_certificate", client.certificate.as_path()), ("client_key", &client.private_key)]);
        }
        if let TrustSource::Authority(file) = trust {
            named.push(("ca", file));
        }
    }
    let users = config.proxies.iter().filter_map(|proxy| proxy.users_file.as_deref());
    named.extend(users.map(|file| ("users_file", file)));
    let listeners = config.gateway.iter().flat_map(|gateway| &gateway.listeners);
    named.extend(listeners.filter_map(|listener| listener.identity.as_ref()).flat_map(of_identity));
    for model in config.gateway.iter().flat_map(|gateway| &gateway.models) {
        named.extend(model.key_file.as_deref().map(|file| ("key_file", file)));
        named.extend(model.ca_file.as_deref().map(|file| ("ca_file", file)));
    }
    let policies = config.gateway.iter().flat_map(|gateway| gateway.policy_files());
    named.extend(policies.map(|(_, key, file)| (key, file)));
    named
}

fn of_identity(identity: &ListenerIdentity) -> impl Iterator<Item = (&'static str, &Path)> {
    let files = match identity {
        ListenerIdentity::Files { certificate, private_key } => Some([certificate, private_key]),
        ListenerIdentity::SelfSigned => None,
    };
    files.into_iter().flat_map(|files| ["certificate", "private_key"].into_iter().zip(files.map(PathBuf::as_path)))
}

/// Decides at each check whether to read changed files: only after two checks in a row found the same files. So a
/// certificate and its key are read together, although they are written one after the other. Files that could not be used
/// are read again after [`AGAIN`] checks, because the cause may not lie in them.
#[derive(Debug, Default)]
struct Looks {
    last: SeenFiles,
    told: SeenFiles,
    /// How many checks there were since files were last reported.
    since: u32,
}

/// The number of checks in a minute.
const AGAIN: u32 = 60 / LOOK.as_secs() as u32;

impl Looks {
    fn is_changed(&mut self, read: &SeenFiles, now: SeenFiles) -> bool {
        let is_settled = now == std::mem::replace(&mut self.last, now.clone());
        self.since = self.since.saturating_add(1);
        let is_news = is_settled && now != *read && (now != self.told || self.since >= AGAIN);
        if is_settled {
            // A state that could not be used is reported again if it returns after a usable one.
            self.told = now;
        }
        if is_news {
            self.since = 0;
        }
        is_news
    }
}

/// Notifies `changed` when files differ from the last ones that were `read`; returns only if the receiver or the
/// runtime is gone. Files that could not be used are reported again once they have changed again, or after a minute.
pub async fn follow(read: Arc<ArcSwap<SeenFiles>>, changed: mpsc::Sender<()>) {
    let (mut looks, mut ticks) = (Looks::default(), interval(LOOK));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let read = read.load_full();
        let known = read.clone();
        // A disk may be slow.
        let Ok(now) = spawn_blocking(move || known.again()).await else { return };
        if looks.is_changed(&read, now) && changed.send(()).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_another_when_it_is_written_replaced_removed_or_its_link_leads_elsewhere() {
        let folder = std::env::temp_dir().join(format!("paced-files-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [one, two, link] = ["one", "two", "link"].map(|name| folder.join(name));
        [&one, &two].into_iter().for_each(|file| fs::write(file, "same").unwrap());
        std::os::unix::fs::symlink(&one, &link).unwrap();
        let mut before = SeenFiles([&one, &link].into_iter().map(|path| (path.clone(), stamp(path))).collect());
        let mut assert_changes = |change: &dyn Fn()| {
            assert_eq!(before.again(), before);
            change();
            assert_ne!(before.again(), before);
            before = before.again();
        };
        assert_changes(&|| fs::write(&one, "longer").unwrap());
        assert_changes(&|| {
            fs::remove_file(&link).unwrap();
            std::os::unix::fs::symlink(&two, &link).unwrap();
        });
        assert_changes(&|| fs::rename(&two, &one).unwrap());
        assert_changes(&|| fs::remove_file(&one).unwrap());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_changed_file_is_reported_once_after_it_has_settled() {
        let files = |number: i64| SeenFiles([("/a".into(), Some([number; 5]))].into());
        let (mut looks, read) = (Looks::default(), files(1));
        let told: Vec<_> = [1, 1, 2, 3, 3, 3, 4, 4, 1, 1].map(|now| looks.is_changed(&read, files(now))).to_vec();
        assert_eq!(told, [false, false, false, false, true, false, false, true, false, false]);
        let read = files(4);
        assert!(![4, 4].iter().any(|now| looks.is_changed(&read, files(*now))), "it was read");
    }

    #[test]
    fn files_that_could_not_be_used_are_told_again_each_minute_until_they_are_read() {
        let files = |number: i64| SeenFiles([("/a".into(), Some([number; 5]))].into());
        let (mut looks, read) = (Looks::default(), files(1));
        let told: Vec<_> = (0..50).filter(|_| looks.is_changed(&read, files(2))).collect();
        assert_eq!(told, [1, 21, 41]);
        assert!(!(0..50).any(|_| looks.is_changed(&files(2), files(2))), "they were read");
    }

    #[test]
    fn every_file_that_the_sample_names_is_looked_at() {
        let is_setting = |line: &&str| line.starts_with(|first: char| first.is_ascii_lowercase() || first == '[');
        let on = |line: &str| line.strip_prefix('#').filter(is_setting).unwrap_or(line).to_owned();
        let text: String = config::SAMPLE.lines().map(|line| on(line) + "\n").collect();
        let named: Vec<_> = text.lines().filter_map(|line| line.split_once(" = \"/etc/paced/")).collect();
        let config = Config::from_toml(&text).unwrap();
        let looked: Vec<_> =
            super::named(&config).iter().map(|(key, path)| (*key, path.display().to_string())).collect();
        assert!(named.len() >= 10);
        for (key, name) in named {
            let file = format!("/etc/paced/{}", name.trim_end_matches('"'));
            assert!(looked.contains(&(key, file.clone())), "{key} = {file}");
        }
    }
}
