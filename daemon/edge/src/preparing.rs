//! Makes local addresses ready to be served, without changing what is served now.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result};
use config::{Config, path::PathSettings};
use quic::class::Membership;
use relay_client::{
    access::Access,
    endpoint::{Endpoint, Via},
    error::ConnectError,
    exit::Exit,
};
use role::bind_error::BindError;
use serving::classes::RequestClasses;
use uplink::{Path, PathTerms, Uplink};

use super::{
    Edge, EdgeResources,
    hop::HopTunnels,
    local::Local,
    prepared::{Member, Other, Place, PreparedAddresses, Served, Serving},
    proxy::Entrance,
    serve,
    socket::LocalSocket,
    tcp::Connections,
    wanted::{SharingKey, Wanted},
};

impl Edge {
    /// Prepares to serve exactly the local addresses of a configuration, without changing what is served now.
    ///
    /// # Errors
    /// A local address is taken or not ours, or a file that the configuration names is not usable. An unreachable relay is not
    /// an error: the edge tries again. Nor is a token that cannot be read before the first addresses are served: it may come later.
    pub fn prepare(&self, config: &Config) -> Result<PreparedAddresses> {
        self.prepare_or(config, |_, error| Err(error))
    }

    /// Like [`prepare`](Self::prepare), for the configuration in force and files that it names, which have changed. A local address whose
    /// token cannot be read stays as it is, so that the files of others take effect.
    ///
    /// # Errors
    /// A file other than that of a token is not usable.
    pub fn prepare_again(&self, config: &Config) -> Result<PreparedAddresses> {
        let mut kept = Vec::new();
        let prepared = self.prepare_or(config, |wanted, error| {
            let place = self.served.iter().position(|of| of.wanted == *wanted);
            let (Some(place), Some(ConnectError::Token { .. })) = (place, error.downcast_ref()) else {
                return Err(error);
            };
            let listen = wanted.listen();
            kept.push((listen, format!("{} at {listen}: {error:#}", wanted.name())));
            Ok(Place::Same(place))
        })?;
        Ok(PreparedAddresses { kept, ..prepared })
    }

    /// Prepares to serve the local addresses of a configuration; `fall_back` decides about one that cannot be prepared.
    fn prepare_or(
        &self,
        config: &Config,
        mut fall_back: impl FnMut(&Wanted, anyhow::Error) -> Result<Place>,
    ) -> Result<PreparedAddresses> {
        let mut made: Vec<(SharingKey, Arc<Uplink>)> = Vec::new();
        let place = |wanted: Wanted| -> Result<Place> {
            let (keys, contents) = (wanted.sharing_keys(config), wanted.contents());
            let is_same = |of: &Served| of.wanted == wanted && of.keys == keys && of.contents == contents;
            Ok(match self.served.iter().position(is_same) {
                Some(place) => Place::Same(place),
                None => match self.prepare_one(wanted.clone(), contents, keys, &mut made) {
                    Ok(other) => Place::Other(Box::new(other)),
                    Err(error) => fall_back(&wanted, error)?,
                },
            })
        };
        let places = Wanted::all(config).map(place).collect::<Result<_>>()?;
        let terms = config.paths.iter().map(|path| {
            let PathSettings { name, cost, rate, .. } = path;
            (name.clone(), PathTerms { cost: *cost, rate: *rate })
        });
        Ok(PreparedAddresses { places, kept: Vec::new(), terms: terms.collect() })
    }

    fn prepare_one(
        &self,
        wanted: Wanted,
        contents: [u8; 32],
        keys: Vec<SharingKey>,
        made: &mut Vec<(SharingKey, Arc<Uplink>)>,
    ) -> Result<Other> {
        let (listen, name) = (wanted.listen(), wanted.name());
        let keys = keys.into_iter().map(|key| Ok((key.clone(), self.uplink(key, listen, made)?)));
        let keys: Vec<_> = keys.collect::<Result<_>>()?;
        let before = keys.iter().flat_map(|(key, _)| key.all_before());
        let before = before.map(|key| Ok((key.clone(), self.uplink(key, listen, made)?)));
        let before: Vec<_> = before.collect::<Result<_>>()?;
        let socket = match self.served.iter().find(|served| served.wanted.is_at(&wanted)) {
            // Payloads that wait in the socket go where the new address says.
            Some(served) => served.socket.try_clone().map_err(anyhow::Error::from),
            None => {
                let protocol = wanted.protocol();
                LocalSocket::bind(listen, protocol).map_err(|error| BindError::new(protocol, listen, error).into())
            }
        };
        let bind_failed = || format!("failed to serve {listen} ({name})");
        let socket = socket.with_context(bind_failed)?;
        let member = match &wanted {
            Wanted::Serve(serve) => Member::Requests(RequestClasses::at(serve)),
            _ => Member::Traffic(Membership::default()),
        };
        let own = socket.try_clone().with_context(bind_failed)?;
        let uplinks = keys.iter().map(|(_, uplink)| uplink.clone()).collect();
        let serving = self.serving(own, &wanted, member.clone(), uplinks).with_context(bind_failed)?;
        Ok(Other { wanted, contents, keys, before, socket, member, serving })
    }

    /// Returns the connections with this key, which local addresses share.
    fn uplink(
        &self,
        key: SharingKey,
        listen: SocketAddr,
        made: &mut Vec<(SharingKey, Arc<Uplink>)>,
    ) -> Result<Arc<Uplink>> {
        let known = self.uplinks.iter().map(|shared| (&shared.key, &shared.uplink));
        let mut known = known.chain(made.iter().map(|(key, uplink)| (key, uplink)));
        if let Some((_, uplink)) = known.find(|(known, _)| **known == key) {
            return Ok(uplink.clone());
        }
        let schedule = key.uplink.schedule.as_deref();
        let endpoint = |access: Access| {
            // After the start, a token may come later; but a reload must not replace what works by what cannot.
            if let Some(token) = access.token.as_ref().filter(|_| self.has_begun) {
                token.check()?;
            }
            let (counters, schedules) = (self.resources.metrics.datagrams.clone(), self.schedules.get(schedule));
            Endpoint::new(access, self.transport.clone(), counters, schedules)
        };
        let endpoints = |accesses: Vec<Access>| {
            let relays = accesses.into_iter().map(endpoint).collect::<Result<Vec<_>>>();
            relays.with_context(|| format!("failed to set up the connection from {listen} to the relay"))
        };
        let mut paths = Vec::new();
        for path in key.paths.iter().map(Some).chain(key.paths.is_empty().then_some(None)) {
            let name = path.map_or("", |path| path.name.as_str());
            let exit =
                path.map(|path| Exit::new(path.interface.clone(), path.address)).unwrap_or_default().of_path(name);
            let (exit, accesses) =
                (Arc::new(exit), path.map_or_else(|| Access::of(&key.uplink), |path| key.accesses(path)));
            let via = match key.before(path) {
                None => None,
                Some((name, before)) => {
                    let uplink = self.uplink(before, listen, made)?;
                    let EdgeResources { metrics, roster, .. } = &self.resources;
                    let tunnels = HopTunnels::new(name, uplink, roster.clone(), metrics.hop_withheld.clone());
                    Some(Arc::new(tunnels) as Arc<dyn Via>)
                }
            };
            let leaving = |relay: Endpoint| match &via {
                Some(via) => relay.through(via.clone(), &exit),
                None => relay.leaving_by(exit.clone()),
            };
            let relays = endpoints(accesses)?.into_iter().map(leaving).collect();
            paths.push(Path::new(name, relays).leaving(&exit));
        }
        let (schedule, backoff) = (key.uplink.schedule.clone(), key.uplink.backoff);
        let uplink = Uplink::over(paths, schedule, backoff, self.resources.uplinks.clone());
        made.push((key, uplink.clone()));
        Ok(uplink)
    }

    fn serving(&self, own: LocalSocket, wanted: &Wanted, member: Member, uplinks: Vec<Arc<Uplink>>) -> Result<Serving> {
        let first = uplinks.first().cloned().context("no relay is configured")?;
        let entrance = self.resources.entrance(wanted.listen(), wanted.name());
        Ok(match (own, wanted, member) {
            (LocalSocket::Udp(socket), Wanted::Forward(forward), Member::Traffic(member)) => {
                Box::pin(Local::new(socket, forward, member, first, entrance)?.run())
            }
            (LocalSocket::Tcp(socket), Wanted::Forward(forward), Member::Traffic(member)) => {
                let connections = Connections::new(socket, forward, member, first, entrance)?;
                Box::pin(async move {
                    connections.run().await;
                    Ok(())
                })
            }
            (LocalSocket::Tcp(socket), Wanted::Proxy(proxy), Member::Traffic(member)) => {
                let clients = Entrance::new(socket, proxy, member, first, entrance)?;
                Box::pin(async move {
                    clients.run().await;
                    Ok(())
                })
            }
            (LocalSocket::Tcp(socket), Wanted::Serve(serve), Member::Requests(classes)) => {
                let kept = (entrance, self.last_answers.clone());
                let clients = serve::Clients::new(socket, serve, classes, uplinks, kept)?;
                Box::pin(async move {
                    clients.run().await;
                    Ok(())
                })
            }
            _ => anyhow::bail!("it listens to TCP"),
        })
    }
}
