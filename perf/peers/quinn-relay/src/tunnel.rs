//! One request and its tunnel.

use std::{io, sync::Arc};

use bytes::{BufMut as _, Bytes, BytesMut};
use h3::{
    ConnectionState as _,
    error::Code,
    ext::Protocol,
    proto::varint::VarInt,
    server::{RequestResolver, RequestStream},
};
use http::{Method, Request, Response, StatusCode};
use quinn::SendDatagramError;

use crate::{
    capsule::{self, Capsules},
    client::{self, Client},
    socket::TargetSocket,
    target,
};

type Sender = RequestStream<h3_quinn::SendStream<Bytes>, Bytes>;
type Receiver = RequestStream<h3_quinn::RecvStream, Bytes>;

/// Why a tunnel ends.
enum End {
    /// The client closed or reset its request, or lost its connection.
    Client,
    /// The stream is not a sequence of whole, acceptable capsules.
    Malformed,
    /// The target's socket failed.
    Target,
}

/// Serves one request: refuses it with a status, or carries its tunnel until either side ends.
pub async fn serve(client: Arc<Client>, request: RequestResolver<h3_quinn::Connection, Bytes>) {
    let Ok((request, mut stream)) = request.resolve_request().await else { return };
    let socket = match connect(&request).await {
        Ok(socket) => Arc::new(socket),
        Err(status) => {
            let mut response = Response::new(());
            *response.status_mut() = status;
            if stream.send_response(response).await.is_ok() {
                _ = stream.finish().await;
            }
            return;
        }
    };
    let quarter = stream.id().into_inner() / 4;
    // Before the response, because the client sends as soon as it has the response.
    let _registered = client.register(quarter, socket.clone());
    let mut response = Response::new(());
    response.headers_mut().insert("capsule-protocol", http::HeaderValue::from_static("?1"));
    if stream.send_response(response).await.is_err() {
        return;
    }
    let (mut sender, mut receiver) = stream.split();
    let end = tokio::select! {
        end = capsules_to_target(&mut receiver, &socket) => end,
        end = target_to_client(&client, quarter, &mut sender, &socket) => end,
    };
    // The receiving half is stopped when it is dropped: h3-quinn panics if it is stopped during a read.
    match end {
        End::Client => _ = sender.finish().await,
        End::Malformed => sender.stop_stream(Code::H3_MESSAGE_ERROR),
        End::Target => sender.stop_stream(Code::H3_CONNECT_ERROR),
    }
}

/// Opens the socket toward the target that a request names, or returns the status that refuses the request.
async fn connect(request: &Request<()>) -> Result<TargetSocket, StatusCode> {
    if request.method() != Method::CONNECT {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    if request.extensions().get::<Protocol>() != Some(&Protocol::CONNECT_UDP) {
        return Err(StatusCode::NOT_IMPLEMENTED);
    }
    let target = target::parse(request.uri().path())?;
    let connected = async {
        let address = tokio::net::lookup_host(target).await?.next().ok_or(io::ErrorKind::NotFound)?;
        TargetSocket::connect(address).await
    };
    connected.await.map_err(|_| StatusCode::BAD_GATEWAY)
}

/// Forwards payloads that arrive in DATAGRAM capsules.
async fn capsules_to_target(receiver: &mut Receiver, socket: &TargetSocket) -> End {
    let mut capsules = Capsules::default();
    loop {
        match receiver.recv_data().await {
            Ok(Some(bytes)) => capsules.receive(bytes),
            Ok(None) if capsules.is_between() => return End::Client,
            Ok(None) => return End::Malformed,
            Err(_) => return End::Client,
        }
        loop {
            match capsules.next_datagram() {
                Ok(Some(datagram)) => client::payload(datagram).iter().for_each(|payload| socket.send(payload)),
                Ok(None) => break,
                Err(capsule::Malformed) => return End::Malformed,
            }
        }
    }
}

/// Forwards the target's payloads. A payload that does not fit into a QUIC datagram is dropped.
///
/// h3-datagram 0.0.2 cannot send them: it writes 0 in place of each quarter stream ID (hyperium/h3 issue 345).
async fn target_to_client(client: &Client, quarter: u64, sender: &mut Sender, socket: &TargetSocket) -> End {
    let mut head = BytesMut::with_capacity(VarInt::MAX_SIZE + 1);
    // Stream IDs have at most 62 bits, so the default is never taken.
    VarInt::from_u64(quarter).unwrap_or(VarInt::MAX).encode(&mut head);
    let id_bytes = head.len();
    head.put_u8(0);
    let (mut datagrams, mut in_frames) = (Vec::new(), false);
    loop {
        if socket.receive(&head, &mut datagrams).await.is_err() {
            return End::Target;
        }
        // Only the client's SETTINGS allow HTTP datagrams in frames (RFC 9297 §2.1.1); they may come after the request.
        in_frames =
            in_frames || sender.settings().enable_datagram() && client.connection().max_datagram_size().is_some();
        for datagram in datagrams.drain(..) {
            if !in_frames {
                if sender.send_data(capsule::of_datagram(&datagram[id_bytes..])).await.is_err() {
                    return End::Client;
                }
            } else if let Err(SendDatagramError::ConnectionLost(_)) = client.connection().send_datagram(datagram) {
                return End::Client;
            }
        }
    }
}
