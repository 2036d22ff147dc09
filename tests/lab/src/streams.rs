//! Two QUIC endpoints with paced's providers over s2n-quic's simulated network, without a protocol above: for tests of
//! how the dispatcher treats streams.

use std::{
    future::Future,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use admission::connection_id::Issuer;
use anyhow::Result;
use futures::future::{AbortHandle, abortable};
use quic::{
    datagrams::{Datagrams, QueueLimits, Schedule},
    dispatch::Dispatcher,
    endpoint::{self, Admission, Transport},
    tls,
};
use s2n_quic::{
    connection::{Handle as Connection, StreamAcceptor},
    provider::io::testing::{Handle, network::Network, primary, spawn},
};

use crate::simulation::{self, CLOCK};

/// One end of a connection.
pub struct End {
    /// The connection.
    pub connection: Connection,
    /// Its streams.
    pub streams: StreamAcceptor,
    /// Takes streams, and hands their bytes to the transport in the schedule's order.
    pub dispatcher: Dispatcher,
    /// Stops the driver, which is already running.
    pub driver: AbortHandle,
}

/// Connects two endpoints, both with `schedule` (except for its clock) and `transport`, and runs `client` until it
/// returns while `server` runs.
///
/// # Errors
/// When an endpoint does not start, or the simulation does not reach the end of `client`.
///
/// # Panics
/// When either scenario panics, or the client cannot connect.
pub fn simulate<N, C, S>(
    network: &N,
    seed: u64,
    (schedule, transport): (Schedule, Transport),
    client: impl FnOnce(End) -> C + Send + 'static,
    server: impl FnOnce(End) -> S + Send + 'static,
) -> Result<()>
where
    N: Network + Clone + Send + 'static,
    C: Future<Output = ()> + Send + 'static,
    S: Future<Output = ()> + Send + 'static,
{
    let schedule = Schedule { clock: CLOCK, ..schedule };
    let simulated = simulation::run(network, seed, |handle, ended| {
        let client = |side| async move {
            client(side).await;
            ended.store(true, Relaxed);
        };
        start(handle, &schedule, &transport, client, server)
    });
    simulated.map(drop)
}

fn start<C, S>(
    handle: &Handle,
    schedule: &Schedule,
    transport: &Transport,
    client: impl FnOnce(End) -> C + Send + 'static,
    server: impl FnOnce(End) -> S + Send + 'static,
) -> Result<()>
where
    C: Future<Output = ()> + Send + 'static,
    S: Future<Output = ()> + Send + 'static,
{
    let (tls, trust) = simulation::identity("server.example")?;
    let io = || simulation::socket(handle, transport);
    let datagrams = || Datagrams {
        limits: QueueLimits { flow_bytes: 1 << 20, connection_bytes: 1 << 20 },
        counters: Arc::default(),
        max_frame_bytes: u64::from(u16::MAX),
        schedules: schedule.clone().into(),
    };
    let mut listener =
        endpoint::serve_over(io()?, transport, tls, datagrams(), Admission::default(), &Issuer::ephemeral()?)?;
    let address = listener.local_addr()?;
    spawn(async move {
        let connection = listener.accept().await.expect("a client connects");
        server(join(connection)).await;
        // The endpoint lives for as long as the client needs it.
        while listener.accept().await.is_some() {}
    });
    let endpoint = endpoint::connect_over(io()?, transport, tls::client(trust, None)?, datagrams())?;
    primary::spawn(async move {
        let connect = s2n_quic::client::Connect::new(address).with_server_name("server.example");
        let connection = endpoint.connect(connect).await.expect("the client connects");
        client(join(connection)).await;
    });
    Ok(())
}

fn join(connection: s2n_quic::Connection) -> End {
    let (mut connection, streams) = connection.split();
    let (dispatcher, driver) = Dispatcher::of(&mut connection).expect("the endpoint is ours");
    let (driven, driver) = abortable(driver.run());
    spawn(async move { _ = driven.await });
    End { connection, streams, dispatcher, driver }
}
