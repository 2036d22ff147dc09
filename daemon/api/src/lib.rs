//! The common parts of `paced` and its callers: the protocol of the control plane with its client, and the output and
//! token formats of both programs.

use std::{path::Path, sync::Arc, time::Duration};

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::{
    io,
    net::{TcpStream, UnixStream},
};
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};

pub mod print;
pub mod token;

/// The protocol, generated from its definition.
pub mod v1 {
    #![allow(
        missing_docs,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated; the definition has the documentation"
    )]
    tonic::include_proto!("paced.v1");
}

/// Serialises a time or a duration as text.
#[expect(clippy::ref_option, reason = "serde requires this signature")]
fn shown<T: std::fmt::Display, S: serde::Serializer>(time: &Option<T>, to: S) -> std::result::Result<S::Ok, S::Error> {
    match time {
        Some(time) => to.collect_str(time),
        None => to.serialize_none(),
    }
}

/// The definition of the protocol, for reflection.
pub const DEFINITION: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/paced.bin"));

/// The longest request in bytes: a policy and its parameters.
pub const REQUEST_BYTES: usize = config::policy::MAX_TEXT_BYTES + 4096;

/// The longest request in bytes that sets no policy.
pub const SHORT_REQUEST_BYTES: usize = 16 << 10;

/// The time limit for connecting.
const CONNECTING: Duration = Duration::from_secs(10);

/// How long a daemon may be silent before a ping checks that it is still there, and how long it may take to answer.
const SILENCE: Duration = Duration::from_secs(10);

/// A client of the control plane.
pub type ControlClient = v1::control_service_client::ControlServiceClient<Channel>;

/// Connects to the control plane of a daemon on this machine.
///
/// # Errors
/// No daemon serves at `path`, or this user may not connect.
pub async fn connect(path: &Path) -> std::result::Result<ControlClient, tonic::transport::Error> {
    let path = path.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The authority has no meaning on a Unix socket.
    checked(Endpoint::from_static("http://paced")).connect_with_connector(connector).await.map(client)
}

/// Connects to the control plane of a daemon on any machine, at `https://HOST:PORT`.
///
/// # Errors
/// No daemon serves there, or one side does not trust the other's certificate.
pub async fn connect_tcp(
    place: Uri,
    tls: Arc<ClientConfig>,
) -> std::result::Result<ControlClient, tonic::transport::Error> {
    let connector = tower::service_fn(move |place: Uri| {
        let tls = TlsConnector::from(tls.clone());
        async move {
            let unfit = || io::Error::new(io::ErrorKind::InvalidInput, "no host and port");
            let (host, port) = place.host().zip(place.port_u16()).ok_or_else(unfit)?;
            let host = host.trim_matches(['[', ']']).to_owned();
            let name = ServerName::try_from(host.clone()).map_err(|_| unfit())?;
            let stream = TcpStream::connect((host, port)).await?;
            tls.connect(name, stream).await.map(TokioIo::new)
        }
    });
    let endpoint = checked(Endpoint::from(place)).connect_timeout(CONNECTING);
    endpoint.connect_with_connector(connector).await.map(client)
}

/// Makes calls fail if the daemon has vanished, although none of its packets says so.
fn checked(endpoint: Endpoint) -> Endpoint {
    endpoint.http2_keep_alive_interval(SILENCE).keep_alive_timeout(SILENCE).keep_alive_while_idle(true)
}

fn client(channel: Channel) -> ControlClient {
    // A list of revisions includes the diffs of all of them.
    ControlClient::new(channel).max_decoding_message_size(16 * REQUEST_BYTES)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use prost::Message as _;
    use prost_types::{DescriptorProto, FileDescriptorProto, FileDescriptorSet};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixListener,
        time::timeout,
    };

    use super::*;

    /// A frame of HTTP/2 with no settings (RFC 9113 §6.5).
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

    #[tokio::test(start_paused = true)]
    async fn a_call_to_a_daemon_that_has_vanished_fails() {
        let path = std::env::temp_dir().join(format!("paced-api-{}.sock", std::process::id()));
        _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&SETTINGS).await.unwrap();
            // It reads, but answers nothing, as if its packets were lost.
            _ = stream.read_to_end(&mut Vec::new()).await;
        });
        let mut client = connect(&path).await.unwrap();
        let call = timeout(100 * SILENCE, client.get_status(v1::GetStatusRequest {}));
        assert!(call.await.expect("the call ends").is_err());
        std::fs::remove_file(path).unwrap();
    }

    fn definition() -> FileDescriptorProto {
        let files = FileDescriptorSet::decode(DEFINITION).unwrap().file;
        files.into_iter().find(|file| file.package() == "paced.v1").unwrap()
    }

    fn is_pascal(name: &str) -> bool {
        name.starts_with(|first: char| first.is_ascii_uppercase())
            && name.chars().all(|char| char.is_ascii_alphanumeric())
    }

    fn is_snake(name: &str) -> bool {
        name.starts_with(|first: char| first.is_ascii_lowercase())
            && name.chars().all(|char| char.is_ascii_lowercase() || char.is_ascii_digit() || char == '_')
            && !name.contains("__")
            && !name.ends_with('_')
    }

    /// The rules of buf's category STANDARD that apply to a definition without enums, oneofs and extensions.
    #[test]
    fn the_definition_keeps_to_the_rules_of_the_trade() {
        let file = definition();
        assert_eq!((file.syntax(), file.name()), ("proto3", "paced/v1/control.proto"), "its folder is its package");
        assert!(file.enum_type.is_empty() && file.extension.is_empty() && file.public_dependency.is_empty());
        let mut used = HashSet::new();
        for service in &file.service {
            assert!(is_pascal(service.name()) && service.name().ends_with("Service"), "{}", service.name());
            for method in &service.method {
                assert!(is_pascal(method.name()), "{}", method.name());
                for (kind, found) in [("Request", method.input_type()), ("Response", method.output_type())] {
                    assert_eq!(found, format!(".paced.v1.{}{kind}", method.name()));
                    assert!(used.insert(found.to_owned()), "{found} belongs to one method");
                }
            }
        }
        let check = |message: &DescriptorProto| {
            assert!(is_pascal(message.name()), "{}", message.name());
            for field in &message.field {
                assert!(is_snake(field.name()), "{}.{}", message.name(), field.name());
            }
        };
        file.message_type.iter().for_each(check);
        let text =
            file.message_type.iter().flat_map(|message| &message.field).map(|field| field.type_name().to_owned());
        let text: HashSet<_> = text.chain(used).collect();
        for import in ["duration", "timestamp"] {
            assert!(file.dependency.contains(&format!("google/protobuf/{import}.proto")));
            assert!(
                text.iter().any(|name| name.to_lowercase() == format!(".google.protobuf.{import}")),
                "{import} is used"
            );
        }
        assert_eq!(file.dependency.len(), 2);
    }
}
