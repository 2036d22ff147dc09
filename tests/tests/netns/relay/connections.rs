//! The connections of one user: how many there may be at once, and what those beyond are told.

use std::pin::pin;

use api::token::generate_token;
use bytes::Bytes;
use config::hash::hex;
use lab::{
    client::{Client, refusal},
    site::{Family, SOON, Site, Terms},
};
use masque::{
    h3::{Code, Part, RequestHead},
    proxy_status::ErrorType,
    request::ping_request,
};
use quic::h3::Error;
use tokio::time::timeout;

use super::limits::limit_hits;

const TOO_MANY: (u16, ErrorType) = (429, ErrorType::HttpRequestDenied);

/// Waits until the relay has closed the connection for too many of them.
async fn excluded(client: Client) {
    match timeout(SOON, client.ended).await.expect("the connection ends").unwrap() {
        Error::Connection(s2n_quic::connection::Error::Application { error, .. }) => {
            assert_eq!(u64::from(error), Code::ExcessiveLoad.value());
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_connection_beyond_the_limit_of_its_user_is_refused_and_ends() {
    lab::ring!(Netns);
    let users = ["alice", "bob"].map(|name| (name, generate_token().unwrap()));
    let entry = |(name, (_, digest)): &(&str, (String, [u8; 32]))| {
        format!("[[relay.token]]\nname = \"{name}\"\nsha256 = \"{}\"\n", hex(digest))
    };
    let sections = users.iter().map(entry).collect::<String>();
    let terms = |limits| Terms { relay: "", limits, sections: &sections, ..Terms::default() };
    let site = Site::new(terms("connections_per_user = 2")).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let [alice, bob] = users.each_ref().map(|(_, (token, _))| token);
    let target = site.target(Family::V4, 7);
    site.client(async || {
        let connect = async |token: &str| Client::connect(site.access_with_token(token).unwrap()).await.unwrap();
        let (first, second) = (connect(alice).await, connect(alice).await);
        let mut tunnels = [first.open(target).await.unwrap(), second.open(target).await.unwrap()];
        // A further request on a connection that has its place takes no other.
        drop(first.open(target).await.unwrap());
        let third = connect(alice).await;
        assert_eq!(refusal(third.open(target).await), TOO_MANY);
        excluded(third).await;
        let others = [connect(bob).await, connect(bob).await];
        for other in &others {
            other.open(target).await.unwrap();
        }

        // The end of a connection makes room for another.
        second.close().await;
        site.counted("the connection to end", |counts| counts.of("connections") == 3).await.unwrap();
        let second = connect(alice).await;
        tunnels[1] = second.open(target).await.unwrap();

        site.configure(terms("connections_per_user = 3")).unwrap();
        site.signal(libc::SIGHUP).unwrap();
        let is_applied =
            |applied| move |counts: &lab::site::Counts| counts.of("reloads_total{result=\"applied\"}") == applied;
        site.counted("the reload", is_applied(1)).await.unwrap();
        let third = connect(alice).await;
        third.open(target).await.expect("there is room for one more");

        site.configure(terms("connections_per_user = 1")).unwrap();
        site.signal(libc::SIGHUP).unwrap();
        site.counted("the second reload", is_applied(2)).await.unwrap();
        let fourth = connect(alice).await;
        assert_eq!(refusal(fourth.open(target).await), TOO_MANY);
        excluded(fourth).await;
        for tunnel in &mut tunnels {
            assert_eq!(tunnel.echo(None, b"goes on").await, b"goes on");
        }
        drop(others);
    })
    .unwrap();
    let counts = site.counts().unwrap();
    let refused = counts.refused("connection_limit_reached");
    assert_eq!((limit_hits(&counts, "connections_per_user"), refused), (2, 2));
}

/// Returns the status of the answer to a request without content.
async fn status(client: &Client, head: &RequestHead) -> u16 {
    client.relay.http().wait_for_settings().await.unwrap();
    let mut request = client.relay.http().request(head).await.unwrap();
    request.send.finish();
    let mut answer = pin!(request.recv.part());
    match timeout(SOON, &mut answer).await.expect("an answer arrives") {
        Ok(Some(Part::Response(head))) => head.status,
        other => panic!("{other:?} in place of a response"),
    }
}

#[test]
fn the_limit_without_credentials_holds_for_a_network_and_every_kind_of_request() {
    lab::ring!(Netns);
    let sections = "[[gateway.model]]\nname = \"large\"\nengines = [\"http://10.0.2.2:8001\"]";
    let limits = "connections_per_user = 2";
    let ping = RequestHead { authority: Some(Bytes::from_static(b"relay.example")), ..ping_request() };
    let models = RequestHead {
        method: Bytes::from_static(b"GET"),
        path: Some(Bytes::from_static(b"/v1/models")),
        ..ping.clone()
    };
    for (kind, head) in [("tunnel", None), ("ping", Some(ping)), ("models", Some(models))] {
        let site = Site::new(Terms { limits, sections, ..Terms::default() }).unwrap();
        site.client(async || {
            let target = site.target(Family::V4, 7);
            let connect = async |family| Client::connect(site.access(family).unwrap()).await.unwrap();
            let ask = async |client: &Client| match &head {
                Some(head) => status(client, head).await,
                None => match client.open(target).await {
                    Ok(_) => 200,
                    refused => refusal(refused).0,
                },
            };
            let first = [connect(Family::V4).await, connect(Family::V4).await];
            for client in &first {
                assert!((200..300).contains(&ask(client).await), "{kind}");
            }
            let third = connect(Family::V4).await;
            assert_eq!(ask(&third).await, 429, "{kind}");
            excluded(third).await;
            // The other family is another network.
            let other = connect(Family::V6).await;
            assert!((200..300).contains(&ask(&other).await), "{kind}");
            drop(first);
        })
        .unwrap();
        assert_eq!(limit_hits(&site.counts().unwrap(), "connections_per_user"), 1, "{kind}");
    }
}
