//! Callers that are too much.

use std::time::Duration;

use paced::control::grpc::{self, v1};
use tests::site::{Family, Site, Terms};
use tonic::Code;

use super::{connect, in_force, json};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn request(text: String) -> v1::SetPolicyRequest {
    v1::SetPolicyRequest { text, ..v1::SetPolicyRequest::default() }
}

#[test]
fn too_long_a_policy_is_refused_before_it_is_read_and_a_malformed_one_briefly() {
    tests::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let socket = site.path("control.sock");
    runtime().block_on(async {
        let mut client = grpc::connect(&socket).await.unwrap();
        let refused = client.set_policy(request("#".repeat(10 << 20))).await.unwrap_err();
        assert!(matches!(refused.code(), Code::OutOfRange | Code::ResourceExhausted), "{refused:?}");
        let mut client = grpc::connect(&socket).await.unwrap();
        let longest = paced::policy::MAX_TEXT_BYTES;
        let refused = client.set_policy(request("#".repeat(longest + 1))).await.unwrap_err();
        assert!(refused.code() == Code::InvalidArgument && refused.message().contains("at most"), "{refused:?}");
        // As many errors as there is room for lines.
        let refused = client.set_policy(request("a\n".repeat(longest / 2))).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        let refused =
            client.set_policy(request((0..60_000).map(|n| format!("k{n} = 1\n")).collect())).await.unwrap_err();
        assert!(
            refused.code() == Code::InvalidArgument && refused.message().len() < 5_000,
            "{}",
            refused.message().len()
        );
        let accepted = client.set_policy(request("#".repeat(longest))).await.unwrap().into_inner();
        assert_eq!(accepted.revision.unwrap().number, 2);
    });
}

#[test]
fn a_hundred_writers_at_once_are_served_one_after_the_other() {
    tests::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let socket = site.path("control.sock");
    runtime().block_on(async {
        let writers = (0..100).map(async |number| {
            let mut client = grpc::connect(&socket).await.unwrap();
            let request = v1::SetPolicyRequest {
                expected_revision: u64::from(number % 2 == 0),
                ..request(format!("[class.w{number}]\n"))
            };
            match client.set_policy(request).await {
                Ok(_) => 1,
                Err(refused) => {
                    assert_eq!(refused.code(), Code::Aborted, "{refused:?}");
                    0
                }
            }
        });
        let accepted: u64 = futures::future::join_all(writers).await.into_iter().sum();
        assert!((50..=51).contains(&accepted), "{accepted}");
        let mut client = grpc::connect(&socket).await.unwrap();
        let found = client.get_policy(v1::GetPolicyRequest::default()).await.unwrap().into_inner();
        assert_eq!(found.revision.unwrap().number, 1 + accepted);
    });
}

#[test]
fn a_client_that_stops_reading_costs_nobody_anything_and_hears_of_the_last_change() {
    tests::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let socket = site.path("control.sock");
    runtime().block_on(async {
        let mut client = grpc::connect(&socket).await.unwrap();
        let mut events = client.watch_events(v1::WatchEventsRequest::default()).await.unwrap().into_inner();
        let interval = Some(Duration::from_millis(1).try_into().unwrap());
        let _stats = client.watch_stats(v1::WatchStatsRequest { interval }).await.unwrap().into_inner();
        let mut other = grpc::connect(&socket).await.unwrap();
        // More than events are kept.
        for number in 0..500 {
            other.set_policy(request(format!("[class.w{number}]\n"))).await.unwrap();
        }
        // Some may be missing, but not the last.
        let mut last = String::new();
        while !last.starts_with("revision 501 is in force") {
            last = events.message().await.unwrap().unwrap().message;
        }
    });
    assert_eq!(in_force(&site).1, 501);
    site.client(async || {
        let mut tunnel = connect(&site).await.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.send(masque::tunnel::Form::Datagram, b"x").await.unwrap();
        assert_eq!(tunnel.recv().await.unwrap().unwrap(), b"x");
    })
    .unwrap();
    assert_eq!(json(&site, &["policy", "list"])["revisions"].as_array().unwrap().len(), 64);
}
