//! Requests by HTTP/3, over loopback.

use std::net::Ipv4Addr;

use admission::connection_id::Issuer;
use masque::h3::{Field, Role};
use quic::{
    datagrams::{Datagrams, QueueLimits, Schedules},
    endpoint::{self, Admission, Transport},
    h3::{HttpConnection, MessageLimits},
    tls::{self, ServerTls, Trust},
};
use role::access::served::UNTAKEN;

use super::*;

/// A client's connection and a gateway's, both driven, and the requests that arrive. The rest has to be kept.
pub(crate) async fn connect(name: &str) -> (quic::h3::Client, mpsc::UnboundedReceiver<quic::h3::Request>, impl Sized) {
    let folder = std::env::temp_dir().join(format!("serving-http3-{}-{name}", std::process::id()));
    let identity = tls::development_identity(&folder).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let trust = Trust::Pinned(tls::fingerprint(&identity.chain[0]));
    let datagrams = || Datagrams {
        limits: QueueLimits { flow_bytes: 1 << 16, connection_bytes: 1 << 16 },
        counters: Arc::default(),
        max_frame_bytes: 65_535,
        schedules: Schedules::default(),
    };
    let (transport, issuer) = (Transport::default(), Issuer::ephemeral().unwrap());
    let sockets = || transport.sockets((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let (ours, theirs) = (tls::client(trust, None).unwrap(), ServerTls::new(identity.prepare().unwrap()));
    let mut listener =
        endpoint::serve(sockets(), &transport, theirs, datagrams(), Admission::default(), &issuer).unwrap();
    let endpoint = endpoint::connect(sockets(), &transport, ours, datagrams()).unwrap();
    let connect = s2n_quic::client::Connect::new(listener.local_addr().unwrap()).with_server_name("localhost");
    let (connected, accepted) = tokio::join!(endpoint.connect(connect), listener.accept());
    let limits = MessageLimits::default();
    let mut client = HttpConnection::start(connected.unwrap(), Role::Client, limits).await.unwrap();
    let mut server = HttpConnection::start(accepted.unwrap(), Role::Server, limits).await.unwrap();
    server.client().standing().admit();
    let requests = client.client();
    tokio::spawn(async move { while client.next().await.is_ok() {} });
    let (arrived, arrives) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok(request) = server.next().await {
            _ = arrived.send(request);
        }
    });
    (requests, arrives, (endpoint, listener))
}

/// The head of a request for the list of models.
fn models() -> RequestHead {
    let field = |text: &'static str| Some(Bytes::from_static(text.as_bytes()));
    RequestHead {
        method: "GET".into(),
        scheme: field("https"),
        authority: field("x"),
        path: field("/v1/models"),
        protocol: None,
        fields: Vec::new(),
    }
}

/// A client whose key has this holder.
fn asker(tenant: Result<Option<Arc<Tenant>>, OpenAiError>) -> Asker {
    let (listener, path) = (([127, 0, 0, 1], 80).into(), PathStats::default());
    Asker { user: None, tenant, listener, client: None, path, refusal: None }
}

#[tokio::test]
async fn a_key_is_looked_up_once() {
    let (client, mut requests, _kept) = connect("looked_up").await;
    let settings = GatewaySettings { keys: vec![key()], ..settings(&["http://127.0.0.1:1/v1"]) };
    let (classes, shared) = (classes(), Default::default());
    let gateway = Gateway::new(&settings, &classes, (shared, &Arc::default()), (&Learned::default(), None)).unwrap();
    let mut keyed = models();
    keyed.fields.push(Field::new("authorization", "Bearer sk-1"));
    let asker = asker(gateway.tenant(&keyed));
    let _asked = client.request(&keyed).await.unwrap();
    let request = requests.recv().await.unwrap();
    // A second look-up would find no key in this head.
    let served = gateway.serve(request.into(), models(), &classes, &asker).await;
    assert_eq!((served.status, served.user.as_deref()), (Some(200), Some("ann")));
}

#[tokio::test]
async fn an_answer_that_its_client_does_not_take_is_untaken_in_the_metrics_as_in_the_log() {
    let (client, mut requests, _kept) = connect("untaken").await;
    // The list of models is longer than what the client may receive without reading.
    let mut settings = settings(&["http://127.0.0.1:1/v1"]);
    settings.models[0].name = "x".repeat(4 << 20);
    settings.stall_timeout = Duration::from_millis(200);
    let classes = classes();
    let metrics = GatewayMetrics::default();
    let shared = (metrics.clone(), Default::default(), Default::default());
    let gateway = Gateway::new(&settings, &classes, (shared, &Arc::default()), (&Learned::default(), None)).unwrap();
    let asked = client.request(&models()).await.unwrap();
    let request = requests.recv().await.unwrap();
    let served = gateway.serve(request.into(), models(), &classes, &asker(Ok(None))).await;
    assert_eq!(served.reason, UNTAKEN);
    let text = shown(&metrics);
    let counted: Vec<_> = text.lines().filter(|line| line.starts_with("gateway_requests_total{")).collect();
    assert!(counted.len() == 1 && counted[0].ends_with(r#"outcome="untaken"} 1"#), "{counted:?}");
    assert!(text.contains("gateway_untaken_answers_total 1\n"), "{text}");
    drop(asked);
}
