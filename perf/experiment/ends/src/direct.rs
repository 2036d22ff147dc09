//! The endpoints of plans without a relay.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use admission::connection_id::Issuer;
use anyhow::{Context as _, Result, anyhow};
use masque::h3::Role;
use plan::{Plan, Scheduler};
use quic::{
    clock::Clock,
    datagrams::{Datagrams, QueueLimits, Schedule},
    dispatch::Binding,
    endpoint::{self, Admission, Congestion, Io, Pacing, Sockets, Transport},
    events::EndpointSubscriber,
    tls::{self, Identity, ServerTls, Trust},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use s2n_quic::{
    Client, Server,
    client::Connect,
    connection::Handle,
    provider::{
        congestion_controller::{self, Bbr, Cubic},
        event::{Subscriber, disabled::Subscriber as Disabled},
        io,
    },
};

use crate::{Carrier, Departures, MTU, unpaced::Unpaced};

/// The fraction of a full packet's Ethernet frame that is UDP payload.
const PAYLOAD_SHARE: f64 = (1_500.0 - 28.0) / (1_500.0 + 14.0);

/// The name in the server's certificate.
const SERVER_NAME: &str = "server.example";

/// The configuration of the two endpoints of a run.
pub struct Ends {
    scheduler: Scheduler,
    transport: Transport,
    schedule: Schedule,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Ends {
    /// Prepares the endpoints for a scheduler; `seed` is for disciplines that use a lottery.
    ///
    /// # Errors
    /// If the scheduler is not a scheduler of QUIC, or the system gives no randomness.
    pub fn new(plan: &Plan, scheduler: Scheduler, clock: Clock, seed: u64) -> Result<Self> {
        let (discipline, binding) = scheduler.of_streams().context("not a scheduler of QUIC")?;
        let made = rcgen::generate_simple_self_signed([SERVER_NAME.to_owned()])?;
        let congestion = match plan.congestion {
            plan::Congestion::Cubic if scheduler == Scheduler::Plain => Congestion::StockCubic,
            plan::Congestion::Cubic => Congestion::Cubic,
            plan::Congestion::Bbr => Congestion::Bbr,
            plan::Congestion::FixedMbit(mbit) => {
                Congestion::Fixed { bytes_per_sec: (mbit * 1e6 / 8.0 * PAYLOAD_SHARE) as u64 }
            }
        };
        let mut pacing = Pacing::default();
        pacing.quantum = plan.quantum_us.map_or(pacing.quantum, Duration::from_micros);
        pacing.min_rtt = plan.min_paced_rtt_us.map_or(pacing.min_rtt, Duration::from_micros);
        if matches!(scheduler, Scheduler::ActiveWait | Scheduler::PassiveWait) {
            // Unexamined devices count as keeping departures, and then no packet would wait in the process.
            pacing.devices.unknown().set_keeps_departures(false);
        }
        if scheduler == Scheduler::PassiveWait {
            pacing.quantum = Duration::from_millis(1);
        }
        let defaults = Transport::default();
        // One-way transfers should be limited only by the path.
        let ample = |bytes: u64| if plan.workload.one_way { 8 << 20 } else { bytes };
        Ok(Self {
            scheduler,
            transport: Transport {
                stream_window_bytes: ample(defaults.stream_window_bytes),
                stream_buffer_bytes: ample(defaults.stream_buffer_bytes.into()) as u32,
                initial_mtu: MTU,
                max_mtu: MTU,
                congestion,
                // When the kernel loses a packet of a batch, it loses the whole batch.
                gso: plan.workload.one_way && scheduler != Scheduler::ActiveWait,
                stream_batch: if binding == Binding::Early { 1 } else { defaults.stream_batch },
                io: match scheduler {
                    Scheduler::Paced | Scheduler::ActiveWait | Scheduler::PassiveWait => Io::Paced(pacing),
                    _ => Io::Stock,
                },
                ..defaults
            },
            schedule: Schedule { discipline, binding, clock, seed, ..Schedule::default() },
            certificate: made.cert.der().clone(),
            key: PrivateKeyDer::from_pem_slice(made.signing_key.serialize_pem().as_bytes())?,
        })
    }

    /// Starts the server's endpoint.
    ///
    /// # Errors
    /// When the address is taken.
    pub fn server(&self, carrier: Carrier) -> Result<Server> {
        match carrier {
            Carrier::Simulated(io) => self.serve_over(io),
            Carrier::Sockets(io) => self.serve_over(io),
        }
    }

    /// Starts the server's endpoint on the product's sockets, at any port of `host`.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub fn receiver(&self, host: Ipv4Addr) -> Result<Server> {
        self.serve_over(self.sockets(host)?)
    }

    fn serve_over<I: io::Provider>(&self, io: I) -> Result<Server> {
        let identity = Identity {
            chain: vec![self.certificate.clone()],
            key: self.key.clone_key(),
            client_authorities: None,
            revoked: Vec::new(),
        };
        endpoint::serve_over(
            io,
            &self.transport,
            ServerTls::new(identity.prepare()?),
            self.datagrams(),
            Admission::default(),
            &Issuer::ephemeral()?,
        )
    }

    /// Starts the client's endpoint, and tells `observer` when bytes leave.
    ///
    /// # Errors
    /// When QUIC does not allow the settings.
    pub fn client(&self, carrier: Carrier, observer: Departures) -> Result<Client> {
        let congestion = self.transport.controllers();
        match carrier {
            Carrier::Simulated(io) => self.connect_with(io, observer, congestion),
            Carrier::Sockets(io) => self.connect_with(io, observer, congestion),
        }
    }

    /// Starts the client's endpoint on the product's sockets, as the scheduler says: as plain s2n-quic without our providers, without
    /// pacing (packets leave as soon as the congestion window allows), or as in the product.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub fn sender(&self) -> Result<Client> {
        let sockets = self.sockets(Ipv4Addr::UNSPECIFIED)?;
        match self.scheduler {
            Scheduler::Plain => self.connect_plainly(sockets),
            Scheduler::Unpaced => self.connect_with(sockets, Disabled, Unpaced(self.transport.controllers())),
            _ => endpoint::connect(sockets, &self.transport, tls::client(self.trust(), None)?, self.datagrams()),
        }
    }

    fn sockets(&self, host: Ipv4Addr) -> Result<Sockets> {
        self.transport.sockets((host, 0).into())
    }

    fn trust(&self) -> Trust {
        Trust::Pinned(tls::fingerprint(&self.certificate))
    }

    fn connect_plainly<I: io::Provider>(&self, io: I) -> Result<Client> {
        let builder = Client::builder()
            .with_io(io)
            .map_err(|error| anyhow!("{error}"))?
            .with_tls(tls::client(self.trust(), None)?)?
            .with_limits(self.transport.limits(Role::Client)?)?;
        Ok(match self.transport.congestion {
            Congestion::Bbr => builder.with_congestion_controller(Bbr::default())?.start()?,
            _ => builder.with_congestion_controller(Cubic::default())?.start()?,
        })
    }

    fn connect_with<I: io::Provider>(
        &self,
        io: I,
        observer: impl Subscriber,
        congestion: impl congestion_controller::Provider,
    ) -> Result<Client> {
        let builder = Client::builder()
            .with_io(io)
            .map_err(|error| anyhow!("{error}"))?
            .with_tls(tls::client(self.trust(), None)?)?
            .with_datagram(self.datagrams())?
            .with_limits(self.transport.limits(Role::Client)?)?
            .with_event((EndpointSubscriber::default(), observer))?
            .with_congestion_controller(congestion)
            .map_err(|error| anyhow!("{error}"))?;
        Ok(builder.start()?)
    }

    /// The experiment sends no datagrams.
    fn datagrams(&self) -> Datagrams {
        let limits = QueueLimits { flow_bytes: 0, connection_bytes: 0 };
        Datagrams { limits, counters: Arc::default(), max_frame_bytes: 0, schedules: self.schedule.clone().into() }
    }
}

/// Connects to the server.
///
/// # Errors
/// When the handshake fails.
pub async fn connect(client: &Client, server: SocketAddr) -> Result<Handle> {
    let connect = Connect::new(server).with_server_name(SERVER_NAME);
    Ok(client.connect(connect).await.context("no connection to the server")?.handle())
}
