//! The local addresses that a configuration needs, and their connections to relays.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use config::{
    Config, forward::Forward, path::PathSettings, proxy::Proxy, serve::Serve, targets::Protocol, uplink::UplinkSettings,
};
use masque::template::Template;
use relay_client::access::Access;
use sha2::{Digest as _, Sha256};

/// What a configuration wants at a local address.
#[derive(Clone, PartialEq)]
pub(super) enum Wanted {
    Forward(Forward),
    Proxy(Proxy),
    Serve(Serve),
}

impl Wanted {
    pub(super) fn all(config: &Config) -> impl Iterator<Item = Self> {
        let forwards = config.forwards.iter().cloned().map(Self::Forward);
        let proxies = config.proxies.iter().cloned().map(Self::Proxy);
        forwards.chain(proxies).chain(config.serves.iter().cloned().map(Self::Serve))
    }

    pub(super) fn listen(&self) -> SocketAddr {
        match self {
            Self::Forward(forward) => forward.listen,
            Self::Proxy(proxy) => proxy.listen,
            Self::Serve(serve) => serve.listen,
        }
    }

    pub(super) fn protocol(&self) -> Protocol {
        match self {
            Self::Forward(forward) => forward.protocol,
            Self::Proxy(_) | Self::Serve(_) => Protocol::Tcp,
        }
    }

    /// The name in metrics and messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Forward(forward) => forward.protocol.as_str(),
            Self::Proxy(_) => "proxy",
            Self::Serve(_) => "serve",
        }
    }

    pub(super) fn uplink(&self) -> &UplinkSettings {
        match self {
            Self::Forward(forward) => &forward.uplink,
            Self::Proxy(proxy) => &proxy.uplink,
            Self::Serve(serve) => &serve.uplink,
        }
    }

    /// The hosts and ports of its relays, for people.
    pub(super) fn through(&self) -> String {
        match self {
            Self::Serve(serve) => serve.through(),
            Self::Forward(_) | Self::Proxy(_) => self.uplink().through(),
        }
    }

    pub(super) fn class(&self) -> Option<&str> {
        match self {
            Self::Forward(forward) => forward.class.as_deref(),
            Self::Proxy(proxy) => proxy.class.as_deref(),
            Self::Serve(serve) => serve.class.as_deref(),
        }
    }

    /// Its own file, if it has one.
    pub(super) fn file(&self) -> Option<&Path> {
        match self {
            Self::Forward(_) | Self::Serve(_) => None,
            Self::Proxy(proxy) => proxy.users_file.as_deref(),
        }
    }

    /// The SHA-256 of the contents of its own file.
    pub(super) fn contents(&self) -> [u8; 32] {
        Sha256::digest(self.file().and_then(|file| quic::tls::read_configured(file).ok()).unwrap_or_default()).into()
    }

    /// The connections that traffic from here takes: one to each gateway if requests are spread over several.
    pub(super) fn sharing_keys(&self, config: &Config) -> Vec<SharingKey> {
        let uplink = self.uplink();
        match self {
            Self::Serve(serve) if serve.balance && uplink.relays.len() > 1 => {
                let to = |relay: &Template| UplinkSettings { relays: vec![relay.clone()], ..uplink.clone() };
                uplink.relays.iter().map(|relay| SharingKey::of(&to(relay), config)).collect()
            }
            _ => vec![SharingKey::of(uplink, config)],
        }
    }

    pub(super) fn is_at(&self, other: &Self) -> bool {
        (self.listen(), self.protocol()) == (other.listen(), other.protocol())
    }
}

/// The settings that two local addresses must have in common to share a connection.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct SharingKey {
    pub(super) uplink: UplinkSettings,
    /// The paths, if there are any, without their terms: connections stay if only the terms change.
    pub(super) paths: Vec<PathSettings>,
    /// The hops that it leads through.
    pub(super) hops: Vec<config::hop::Hop>,
    /// The files that all of these name, with hashes of their contents.
    contents: Vec<(PathBuf, [u8; 32])>,
}

impl SharingKey {
    fn of(uplink: &UplinkSettings, config: &Config) -> Self {
        Self::over(uplink, &config.paths, &config.hops)
    }

    fn over(uplink: &UplinkSettings, paths: &[PathSettings], all: &[config::hop::Hop]) -> Self {
        let hops: Vec<_> = config::hop::passed(all, uplink, paths).into_iter().cloned().collect();
        let uplinks = std::iter::once(uplink).chain(hops.iter().map(|hop| &hop.uplink));
        let contents = uplinks.filter_map(|uplink| Access::of(uplink).first().map(Access::contents));
        let contents = contents.flatten().collect();
        let without_terms = |path: &PathSettings| PathSettings { cost: Duration::ZERO, rate: None, ..path.clone() };
        let paths = paths.iter().map(without_terms).collect();
        Self { uplink: uplink.clone(), paths, hops, contents }
    }

    /// Returns the files whose contents are not as they were for `before`, if nothing else has changed.
    pub(super) fn changed_files(&self, before: &Self) -> Vec<&Path> {
        let is_new = |file: &&(PathBuf, [u8; 32])| !before.contents.contains(file);
        self.contents.iter().filter(is_new).map(|(file, _)| file.as_path()).collect()
    }

    /// Returns the hop that a path (or the whole way, if it has no paths) leads through, and the key of the connection to that
    /// hop. Packets to the hop leave as packets of the path do.
    pub(super) fn before<'a>(&'a self, path: Option<&'a PathSettings>) -> Option<(&'a str, Self)> {
        let name = path.and_then(|path| path.via.as_deref()).or(self.uplink.via.as_deref())?;
        let hop = self.hops.iter().find(|hop| hop.name == name)?;
        let exit = path.filter(|path| path.interface.is_some() || path.address.is_some());
        let exit = exit.map(|path| PathSettings { name: String::new(), relay: None, via: None, ..path.clone() });
        Some((name, Self::over(&hop.uplink, exit.as_slice(), &self.hops)))
    }

    /// Returns the keys of the connections to all hops on the way.
    pub(super) fn all_before(&self) -> Vec<Self> {
        let paths = self.paths.iter().map(Some).chain(self.paths.is_empty().then_some(None));
        let mut all = Vec::new();
        for (_, key) in paths.filter_map(|path| self.before(path)) {
            all.extend(key.all_before());
            all.push(key);
        }
        all
    }

    /// Returns the relays of a path, with the credentials and settings to use them.
    pub(super) fn accesses(&self, path: &PathSettings) -> Vec<Access> {
        let mut accesses = Access::of(&self.uplink);
        if let Some(relay) = &path.relay {
            accesses.truncate(1);
            accesses.iter_mut().for_each(|access| access.template = relay.clone());
        }
        accesses
    }
}
