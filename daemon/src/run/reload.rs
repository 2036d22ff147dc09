//! A reload in two steps: preparing everything that the new configuration needs, which may fail and changes nothing;
//! then putting it in force, which cannot fail.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use config::{Config, change, relay::ListenerSettings, targets::Protocol};
use quic::tls;
use role::bind_error::BindError;
use tokio::{runtime::Handle, sync::Semaphore, time::timeout};

use super::{
    daemon::{Daemon, Open},
    gateway_role::PreparedGateway,
};
use crate::{
    certificates::{self, Certificate},
    configuration::{self, files::SeenFiles, identity},
    control::doors,
    metrics::{MetricsPage, PageSources},
    policy::PolicyReload,
};

/// How long a reload waits for its files, which may be on a network mount that does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many reloads may read files at a time. A read cannot be ended, so it may outlast its reload, and each takes one of the control
/// runtime's threads for blocking work.
const MOST_READS: usize = 4;

/// The reads that may still begin.
static READS: Semaphore = Semaphore::const_new(MOST_READS);

/// Reads files on a thread of its own, because the thread of a reload moves packets.
async fn read_aside<T: Send + 'static>(
    runtime: &Handle,
    reads: &'static Semaphore,
    read: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let free = reads.try_acquire();
    let permit =
        free.with_context(|| format!("{MOST_READS} earlier reloads still wait for the files that they read"))?;
    let task = runtime.spawn_blocking(move || {
        let _held = permit;
        read()
    });
    let seconds = PATIENCE.as_secs();
    let late = || format!("reading the files of the configuration takes longer than {seconds} s");
    timeout(PATIENCE, task).await.with_context(late)??
}

/// The relay's identities and the certificates that status shows, read from the files that a configuration names.
struct ReadFiles {
    /// The files as they were before they were read.
    seen: SeenFiles,
    certificates: Vec<Certificate>,
    /// In the order of the listeners.
    identities: Vec<tls::PreparedTls>,
}

impl ReadFiles {
    fn of(config: &Config, in_force: &[Certificate]) -> Result<Self> {
        let listeners = config.relay.iter().flat_map(|relay| &relay.listeners);
        let prepare = |listener: &ListenerSettings| identity(listener, &config.state_dir, in_force);
        // Before anything is read, so that a change in between shows at the next look.
        let seen = SeenFiles::of(config);
        // `prepare` reads some of them again, where packets are moved: a file that keeps its reader waiting must not get that far.
        seen.paths().for_each(|path| drop(tls::read_configured(path)));
        certificates::warn_of_unfit(config);
        Ok(Self {
            seen,
            certificates: certificates::shown(config)?,
            identities: listeners.map(prepare).collect::<Result<_>>()?,
        })
    }
}

/// Everything that a configuration needs to be put in force, already checked.
struct Prepared {
    files: ReadFiles,
    gateway: PreparedGateway,
    entrances: edge::PreparedAddresses,
    doors: doors::PreparedDoors,
    /// `None` if the page stays as it is; `Some(None)` for no page.
    page: Option<Option<MetricsPage>>,
}

/// Logs which keys of the files a reload changed, and what happened to the policy in force, which callers may have set.
fn tell(author: &str, changed: &[&str], policy: &PolicyReload) {
    let own = changed.iter().filter(|key| **key != change::POLICY).map(|key| (*key).to_owned());
    let keys: Vec<_> = own.chain(policy.changed.iter().cloned()).collect();
    let keys = keys.join(", ");
    match &policy.replaced {
        Some((number, by)) => {
            let place = if policy.is_saved { "saved policy" } else { "files' policy" };
            tracing::info!(
                changed = keys,
                author,
                "configuration reloaded: the {place} has replaced revision {number}, which {by} had set"
            );
        }
        None if policy.is_saved && changed.contains(&change::POLICY) => {
            let why = "the saved policy stays in force, and the files' changed policy has no effect";
            tracing::info!(changed = keys, author, "configuration reloaded: {why}");
        }
        None if keys.is_empty() => tracing::info!(author, "configuration reloaded: no key has changed"),
        None => tracing::info!(changed = keys, author, "configuration reloaded"),
    }
}

impl Daemon {
    /// Reads the configuration again. If it cannot be used, logs why, and everything stays as it was.
    pub(super) async fn reload(&mut self, author: &str, open: &mut Open) -> Result<(), String> {
        let Some(file) = self.file.clone() else {
            return Err("development mode has no configuration to read".into());
        };
        let outcome = self.try_reload(&file, author, open).await.map_err(|error| format!("{error:#}"));
        self.metrics.reloaded(outcome.is_ok());
        match &outcome {
            Ok((changed, policy)) => {
                tell(author, changed, policy);
                open.control.tell("reload", format!("the configuration was read again, for {author}"));
            }
            Err(error) => {
                tracing::error!("configuration not reloaded; the old one stays in force: {error}");
                // The reason may quote the configuration, which readers of events may not see.
                open.control.tell("reload", format!("the configuration was refused, for {author}: the log says why"));
            }
        }
        outcome.map(drop)
    }

    /// Returns the changed keys, and what happened to the policy.
    async fn try_reload(
        &mut self,
        file: &Path,
        author: &str,
        open: &mut Open,
    ) -> Result<(Vec<&'static str>, PolicyReload)> {
        let (before, file) = (self.config.clone(), file.to_owned());
        let read = move || -> Result<_> {
            let config = Arc::new(configuration::read(&file)?);
            before.to_reload(&config)?;
            let rows = change::rows(&before, &config).into_iter().filter(|row| row.has_changed);
            let changed: Vec<_> = rows.filter_map(|row| row.keys.first().copied()).collect();
            let files = ReadFiles::of(&config, &[])?;
            Ok((config, changed, files))
        };
        // A long policy takes a while to read, too.
        let (config, changed, files) = read_aside(&self.runtime, &READS, read).await?;
        let entrances = self.edge.prepare(&config)?;
        let prepared = self.prepare(&config, (files, entrances), &[], open)?;
        // It waits for other writers of the policy, which may wait for the disk.
        let (policies, wanted, author) = (open.policies.clone(), config.clone(), author.to_owned());
        let policy = self.runtime.spawn_blocking(move || policies.reload(&wanted, &author)).await??;
        self.put_in_force(config, prepared, open);
        Ok((changed, policy))
    }

    /// Reads the files again that the configuration in force names. If one cannot be used, logs why, and everything
    /// stays as it was; if it is a local address's token, only that address.
    pub(super) async fn read_files_again(&mut self, open: &mut Open) {
        let config = self.config.clone();
        let prepared = self.prepare_again(&config, open).await;
        let outcome = prepared.map(|mut prepared| {
            let kept = std::mem::take(&mut prepared.entrances.kept);
            if !kept.is_empty() {
                // Their files are not in force: they are read again in a minute, and their certificates are shown as before.
                prepared.files.seen = SeenFiles::clone(&self.read.load());
                let is_kept = |of: &&Certificate| kept.iter().any(|(listen, _)| *listen == of.address);
                let before: Vec<_> = self.certificates.iter().filter(is_kept).cloned().collect();
                prepared.files.certificates.retain(|of| !is_kept(&of));
                prepared.files.certificates.extend(before);
            }
            self.put_in_force(config, prepared, open);
            kept
        });
        self.metrics.reloaded(outcome.as_ref().is_ok_and(Vec::is_empty));
        match outcome {
            Ok(kept) if !kept.is_empty() => {
                let partly = "files that the configuration names have changed; some cannot be used";
                let why: Vec<_> = kept.into_iter().map(|(_, why)| why).collect();
                tracing::error!("{partly}, and these local addresses stay as they are: {}", why.join("; "));
                open.control.tell("reload", format!("{partly}: the log says why"));
            }
            Ok(_) => {
                let done = "files that the configuration names have changed, and were read again";
                tracing::info!("{done}");
                open.control.tell("reload", done.to_owned());
            }
            Err(error) => {
                let refused = "files that the configuration names have changed but cannot be used";
                tracing::error!("{refused}; their earlier contents stay in force: {error:#}");
                open.control.tell("reload", format!("{refused}: the log says why"));
            }
        }
    }

    async fn prepare_again(&self, config: &Arc<Config>, open: &Open) -> Result<Prepared> {
        let (read, in_force) = (config.clone(), self.certificates.clone());
        let files = read_aside(&self.runtime, &READS, move || ReadFiles::of(&read, &in_force)).await?;
        // A certificate that expired while it was in force must not keep others from being renewed.
        self.prepare(config, (files, self.edge.prepare_again(config)?), &self.certificates, open)
    }

    /// Expired certificates are accepted if they are among those `in_force`.
    fn prepare(
        &self,
        config: &Config,
        (files, entrances): (ReadFiles, edge::PreparedAddresses),
        in_force: &[Certificate],
        open: &Open,
    ) -> Result<Prepared> {
        Ok(Prepared {
            files,
            gateway: self.gateway.prepare(config, in_force, &self.parts)?,
            entrances,
            doors: open.doors.prepare(&self.config.control, &config.control, in_force)?,
            page: self.prepare_page(config.metrics.listen)?,
        })
    }

    /// Opens the page of metrics at `address`. Returns `None` if it is already served there; `Some(None)` if there is
    /// to be none.
    pub(super) fn prepare_page(&self, address: Option<SocketAddr>) -> Result<Option<Option<MetricsPage>>> {
        if self.page.as_ref().map(MetricsPage::address) == address {
            return Ok(None);
        }
        let Some(address) = address else { return Ok(Some(None)) };
        let _within = self.runtime.enter();
        let sources = PageSources { metrics: self.metrics.clone(), ready: self.parts.ready.clone() };
        let page = MetricsPage::open(address, sources, &self.parts.doors);
        let page =
            page.map_err(|error| BindError::new(Protocol::Tcp, address, error)).context("failed to serve metrics")?;
        Ok(Some(Some(page)))
    }

    /// Puts prepared settings in force. Nothing here fails. The compiler refuses a field of the configuration that is
    /// not named here: each is either applied here, or its change requires a restart (`config::change`).
    fn put_in_force(&mut self, config: Arc<Config>, prepared: Prepared, open: &mut Open) {
        let Config {
            state_dir: _,
            relay,
            // Applied by `GatewayRole::serve`, below.
            gateway: _,
            // Applied by `edge`, below.
            forwards: _,
            proxies: _,
            serves: _,
            paths: _,
            hops: _,
            // Applied by `Policies`, before.
            policy: _,
            transport: _,
            kernel,
            // Applied by `doors`, below.
            control: _,
            metrics,
            log,
        } = &*config;
        let Prepared { files, gateway, entrances, doors, page } = prepared;
        let ReadFiles { seen, certificates, identities } = files;
        self.log.set_level(log.level);
        self.parts.access.set(log);
        self.parts.users.limit(metrics.users);
        self.parts.kernel.limit(kernel);
        self.edge.serve(entrances, &self.entrance_classes);
        if let (Some(role), Some(settings)) = (&mut self.relay, relay) {
            role.replace(settings, identities, &self.parts);
        }
        let drain = self.relay.as_ref().map(|role| role.drain);
        self.gateway.serve(gateway, &self.parts, &self.runtime, drain);
        self.refresh_guard();
        open.doors.open(doors);
        if let Some(page) = page {
            self.page = page;
        }
        open.control.reloaded(&config, &certificates);
        self.metrics.set_certificates(&certificates);
        self.certificates = certificates;
        self.read.store(Arc::new(seen));
        self.config = config;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;
    use crate::{
        log,
        parts::Parts,
        run::{daemon::Wishes, start::Launch},
    };

    async fn start(config: Config, file: &Path) -> (Daemon, Open, Wishes) {
        let (log, parts, file) = (log::start(&config), Arc::<Parts>::default(), Some(file.to_owned()));
        let runtime = Handle::current();
        let folder = state::StateFolder::unclaimed(&config.state_dir);
        Daemon::start(Launch { config, file, folder, log, parts, places: None, door: None, runtime }).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_keeps_its_reader_waiting_ends_only_its_reload_and_only_so_many_readers_wait() {
        static HERE: Semaphore = Semaphore::const_new(MOST_READS);
        let runtime = Handle::current();
        let mut mounts = Vec::new();
        for _ in 0..MOST_READS {
            let (back, wait) = std::sync::mpsc::channel::<()>();
            mounts.push(back);
            let hung = read_aside(&runtime, &HERE, move || Ok(wait.recv()?));
            let (refused, ()) = tokio::join!(hung, tokio::time::advance(PATIENCE + Duration::from_millis(1)));
            let why = refused.unwrap_err().to_string();
            assert_eq!(why, "reading the files of the configuration takes longer than 10 s");
        }
        let why = read_aside(&runtime, &HERE, || Ok(())).await.unwrap_err().to_string();
        assert!(why.starts_with("4 earlier reloads still wait"), "{why}");
        drop(mounts);
        drop(HERE.acquire_many(MOST_READS as u32).await.unwrap());
        assert_eq!(read_aside(&runtime, &HERE, || Ok(7)).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_fifo_in_place_of_a_named_file_refuses_the_reload_by_its_name() {
        let folder = std::env::temp_dir().join(format!("paced-fifo-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name).display().to_string();
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let made = rcgen::generate_simple_self_signed(["relay.example".into()]).unwrap();
        fs::write(at("paced.pem"), made.cert.pem()).unwrap();
        fs::write(at("paced.key"), made.signing_key.serialize_pem()).unwrap();
        let own = format!("state_dir = \"{}\"\n[control]\nsocket = \"{}\"\n", at(""), at("control.sock"));
        let file = folder.join("paced.toml");
        let (mut daemon, mut open, _wishes) = start(Config::from_toml(&own).unwrap(), &file).await;
        let relay = format!(
            "relay = \"https://relay.example/{{target_host}}/{{target_port}}/\"\nca = \"{}\"\n",
            at("paced.pem")
        );
        // The address is for documentation, so that no test listens there (RFC 5737).
        let tcp = format!(
            "[control.tcp]\nlisten = \"192.0.2.1:1\"\ncertificate = \"{}\"\nprivate_key = \"{}\"\n",
            at("paced.pem"),
            at("paced.key")
        );
        let forward = format!("[[forward]]\nlisten = \"127.0.0.1:1\"\ntarget = \"a.example:2\"\n{relay}");
        for (section, key) in [(forward, "token_file"), (tcp, "client_ca")] {
            fs::write(&file, format!("{own}{section}{key} = \"{}\"\n", at("fifo"))).unwrap();
            let why = daemon.reload("test", &mut open).await.unwrap_err();
            assert!(why.contains(&at("fifo")) && why.contains("it is a FIFO"), "{key}: {why}");
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn a_certificate_that_expired_in_use_does_not_keep_other_files_from_being_read_again() {
        let folder = std::env::temp_dir().join(format!("paced-reread-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name).display().to_string();
        let key = KeyPair::generate().unwrap();
        let issue = |name: &str, year| {
            let mut params = CertificateParams::new(vec!["relay.example".into()]).unwrap();
            params.not_after = date_time_ymd(year, 1, 1);
            fs::write(at(name), params.self_signed(&key).unwrap().pem()).unwrap();
        };
        fs::write(at("paced.key"), key.serialize_pem()).unwrap();
        issue("paced.pem", 2020);
        issue("clients.pem", 4096);
        // The address is for documentation, so that no test listens there (RFC 5737).
        let tcp = format!(
            "listen = \"192.0.2.1:1\"\ncertificate = \"{}\"\nprivate_key = \"{}\"\nclient_ca = \"{}\"\n",
            at("paced.pem"),
            at("paced.key"),
            at("clients.pem")
        );
        let own = format!("state_dir = \"{}\"\n[control]\nsocket = \"{}\"\n", at(""), at("control.sock"));
        let [before, config] =
            [own.clone(), format!("{own}[control.tcp]\n{tcp}")].map(|text| Config::from_toml(&text).unwrap());
        let (mut daemon, mut open, _wishes) = start(before, &folder.join("paced.toml")).await;
        // As if it had expired since the start.
        (daemon.certificates, daemon.config) = (certificates::shown(&config).unwrap(), Arc::new(config));
        let is_read = |daemon: &Daemon| **daemon.read.load() == SeenFiles::of(&daemon.config);
        issue("clients.pem", 4095);
        daemon.read_files_again(&mut open).await;
        assert!(is_read(&daemon));
        issue("paced.pem", 2021);
        daemon.read_files_again(&mut open).await;
        assert!(!is_read(&daemon), "another expired certificate is refused");
        fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn an_address_whose_token_cannot_be_read_keeps_its_certificate_and_others_get_theirs() {
        let folder = std::env::temp_dir().join(format!("paced-kept-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name).display().to_string();
        let key = KeyPair::generate().unwrap();
        let issue = |name: &str, year| {
            let mut params = CertificateParams::new(vec!["edge.example".into()]).unwrap();
            params.not_after = date_time_ymd(year, 1, 1);
            fs::write(at(name), params.self_signed(&key).unwrap().pem()).unwrap();
        };
        fs::write(at("client.key"), key.serialize_pem()).unwrap();
        let mut text = format!("state_dir = \"{}\"\n[control]\nsocket = \"{}\"\n", at(""), at("control.sock"));
        for (host, name) in [(2, "broken"), (3, "other")] {
            issue(&format!("{name}.pem"), 4000);
            fs::write(at(name), "token").unwrap();
            // A port that is free: the configuration takes no 0.
            let listen =
                std::net::UdpSocket::bind(SocketAddr::from(([127, 0, 0, host], 0))).unwrap().local_addr().unwrap();
            // Nothing answers at the relay's address, which is for documentation (RFC 5737).
            text += &format!(
                "[[forward]]\nlisten = \"{listen}\"\ntarget = \"a.example:2\"\n\
                 relay = \"https://192.0.2.1/{{target_host}}/{{target_port}}/\"\ntoken_file = \"{}\"\n\
                 client_certificate = \"{}\"\nclient_key = \"{}\"\n",
                at(name),
                at(&format!("{name}.pem")),
                at("client.key")
            );
        }
        let config = Config::from_toml(&text).unwrap();
        let (mut daemon, mut open, _wishes) = start(config, &folder.join("paced.toml")).await;
        let expiries = |daemon: &Daemon| {
            let mut all: Vec<_> = daemon.certificates.iter().map(|of| (of.address, of.expires)).collect();
            all.sort_unstable();
            all.into_iter().map(|(_, expires)| expires).collect::<Vec<_>>()
        };
        let before = expiries(&daemon);
        fs::write(at("broken"), "two words").unwrap();
        ["broken.pem", "other.pem"].into_iter().for_each(|file| issue(file, 4001));
        let is_read = |daemon: &Daemon| **daemon.read.load() == SeenFiles::of(&daemon.config);
        daemon.read_files_again(&mut open).await;
        let now = expiries(&daemon);
        assert!((now[0], now[1] > before[1]) == (before[0], true), "{before:?} {now:?}");
        assert!(!is_read(&daemon), "it is tried again");
        fs::write(at("broken"), "token").unwrap();
        daemon.read_files_again(&mut open).await;
        assert!(expiries(&daemon)[0] > before[0] && is_read(&daemon));
        fs::remove_dir_all(folder).unwrap();
    }
}
