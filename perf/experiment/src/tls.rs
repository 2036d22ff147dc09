//! The baseline for QUIC: TLS 1.3 over the kernel's TCP, by rustls. The server echoes everything that it receives.
//!
//! Nagle's algorithm is off, and sessions are not resumed: each handshake is a full one, and takes two round trips with
//! TCP's.

use std::{
    io,
    net::{self, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures::future::{try_join, try_join_all};
use lab::authority::Authority;
use plan::Plan;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
    version::TLS13,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinSet,
    time::{Instant, sleep_until, timeout_at},
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

use super::{
    Request, Run,
    emulated::{Emulated, block_on},
    requests,
};

/// How requests are spread over connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connections {
    /// Each request has its own. Its handshakes are part of the latency, as in the thesis (§5.2.1).
    PerRequest,
    /// All requests share one connection, which is open before the first request. The length of each request precedes it.
    One,
}

/// The port on which the server listens.
const PORT: u16 = 443;

/// The name in the server's certificate.
const NAME: &str = "server.example";

/// Runs one repetition in the lab.
///
/// # Errors
/// When this is not the lab, a connection fails, or an echo differs from what was sent.
pub fn run(plan: &Plan, connections: Connections, seed: u64) -> Result<Run> {
    let network = Emulated::verified(&plan.network, seed)?;
    for host in [&network.chain.client, &network.chain.relay] {
        host.sysctl("net.ipv4.tcp_congestion_control", &plan.congestion.to_string())?;
    }
    let requests = requests(plan, seed);
    let listener = network.chain.relay.run(|| listen((Ipv4Addr::UNSPECIFIED, PORT).into()))??;
    let sockets = network.chain.client.run(|| sockets(requests.len()))??;
    let server = (network.chain.access.far.v4, PORT).into();
    exchange(plan, &requests, connections, (listener, server), sockets)
}

fn listen(address: SocketAddr) -> io::Result<net::TcpListener> {
    let listener = net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn sockets(count: usize) -> io::Result<Vec<TcpSocket>> {
    (0..count).map(|_| TcpSocket::new_v4()).collect()
}

/// Serves and makes all requests; the sockets are in the namespaces of their ends.
fn exchange(
    plan: &Plan,
    requests: &[Request],
    connections: Connections,
    (listener, server): (net::TcpListener, SocketAddr),
    sockets: Vec<TcpSocket>,
) -> Result<Run> {
    block_on(async {
        let (acceptor, connector) = tls()?;
        tokio::spawn(serve(TcpListener::from_std(listener)?, acceptor));
        let client = Client { plan, requests, server, connector };
        match connections {
            Connections::PerRequest => client.connect_each(sockets).await,
            Connections::One => client.share_one(sockets).await,
        }
    })
}

/// Makes the TLS settings of both ends; the client trusts the server's certificate.
fn tls() -> Result<(TlsAcceptor, TlsConnector)> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let authority = Authority::new()?;
    let issued = authority.issue(&[NAME])?;
    let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes())?];
    let key = PrivateKeyDer::from_pem_slice(issued.private_key.as_bytes())?;
    let server = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13])?;
    let server = server.with_no_client_auth().with_single_cert(chain, key)?;
    Ok((Arc::new(server).into(), Arc::new(client(&authority.pem())?).into()))
}

/// Returns the settings of a client that trusts this authority (PEM). Each of its handshakes is a full one.
pub(super) fn client(authority: &str) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes())?)?;
    let provider = Arc::new(aws_lc_rs::default_provider());
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13])?;
    let mut client = client.with_root_certificates(roots).with_no_client_auth();
    client.resumption = Resumption::disabled();
    Ok(client)
}

/// Echoes connections until one cannot be accepted; if one ends early, its client sees that.
async fn serve(listener: TcpListener, acceptor: TlsAcceptor) -> io::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let acceptor = acceptor.clone();
        connections.spawn(async move {
            let (mut received, mut sent) = tokio::io::split(acceptor.accept(stream).await?);
            tokio::io::copy(&mut received, &mut sent).await
        });
    }
}

struct Client<'a> {
    plan: &'a Plan,
    requests: &'a [Request],
    server: SocketAddr,
    connector: TlsConnector,
}

impl Client<'_> {
    fn limit(&self, began: Instant) -> Instant {
        began + Duration::from_secs(self.plan.workload.limit_s)
    }

    fn bytes(&self, request: &Request) -> usize {
        self.plan.classes[request.class].bytes
    }

    async fn connect(&self, socket: TcpSocket) -> Result<TlsStream<TcpStream>> {
        let stream = socket.connect(self.server).await?;
        stream.set_nodelay(true)?;
        Ok(self.connector.connect(ServerName::try_from(NAME)?, stream).await?)
    }

    /// Makes each request over a new connection.
    async fn connect_each(&self, sockets: Vec<TcpSocket>) -> Result<Run> {
        let began = Instant::now();
        let each = self.requests.iter().zip(sockets).map(|(request, socket)| async move {
            let start = began + Duration::from_nanos(request.start_ns);
            sleep_until(start).await;
            let echo = timeout_at(self.limit(began), self.echo(socket, self.bytes(request))).await;
            Ok::<_, anyhow::Error>(echo.ok().transpose()?.map(|()| start.elapsed()))
        });
        let latencies = try_join_all(each).await?;
        Ok(Run::new(self.plan, self.requests, &latencies, began.elapsed()))
    }

    async fn echo(&self, socket: TcpSocket, bytes: usize) -> Result<()> {
        let (mut receive, mut send) = tokio::io::split(self.connect(socket).await?);
        let (body, mut echo) = (vec![1; bytes], vec![0; bytes]);
        let sending = async {
            send.write_all(&body).await?;
            send.flush().await
        };
        try_join(sending, receive.read_exact(&mut echo)).await?;
        ensure!(echo == body, "the echo of a request differs from it");
        Ok(())
    }

    /// Makes all requests over one connection, in order.
    async fn share_one(&self, mut sockets: Vec<TcpSocket>) -> Result<Run> {
        let stream = self.connect(sockets.pop().context("a plan without requests")?).await?;
        let (mut receive, mut send) = tokio::io::split(stream);
        let began = Instant::now();
        let start = |request: &Request| began + Duration::from_nanos(request.start_ns);
        let mut latencies = vec![None; self.requests.len()];
        let sending = async {
            for request in self.requests {
                sleep_until(start(request)).await;
                let bytes = self.bytes(request);
                let mut framed = u32::try_from(bytes)?.to_be_bytes().to_vec();
                framed.resize(framed.len() + bytes, 1);
                send.write_all(&framed).await?;
                send.flush().await?;
            }
            Ok(())
        };
        let receiving = async {
            for (request, latency) in self.requests.iter().zip(&mut latencies) {
                let bytes = receive.read_u32().await? as usize;
                ensure!(bytes == self.bytes(request), "the echo of another request");
                receive.read_exact(&mut vec![0; bytes]).await?;
                *latency = Some(start(request).elapsed());
            }
            Ok(())
        };
        timeout_at(self.limit(began), try_join(sending, receiving)).await.ok().transpose()?;
        Ok(Run::new(self.plan, self.requests, &latencies, began.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_requests_come_back_over_a_connection_each_and_over_one() {
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let requests = requests(&plan, 1);
        for connections in [Connections::PerRequest, Connections::One] {
            let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
            let server = listener.local_addr().unwrap();
            let sockets = sockets(requests.len()).unwrap();
            let run = exchange(&plan, &requests, connections, (listener, server), sockets).unwrap();
            assert_eq!(run.samples.len(), requests.len());
            assert!(run.samples.iter().all(|sample| sample.latency_ns.is_some()), "{connections:?}");
        }
    }
}
