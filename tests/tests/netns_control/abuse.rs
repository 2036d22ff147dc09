//! Callers that send too much.

use std::{io::Write as _, net::TcpStream, os::unix::net::UnixStream, time::Duration};

use api::v1;
use lab::{
    process::{limit_descriptors, wait_for},
    site::{Family, SOON, Site, Terms},
};
use tonic::Code;

use super::{connect, in_force};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn request(text: String) -> v1::SetPolicyRequest {
    v1::SetPolicyRequest { text, ..v1::SetPolicyRequest::default() }
}

#[test]
fn too_long_a_policy_is_refused_before_it_is_read_and_a_malformed_one_briefly() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let socket = site.path("control.sock");
    runtime().block_on(async {
        let mut client = api::connect(&socket).await.unwrap();
        let refused = client.set_policy(request("#".repeat(10 << 20))).await.unwrap_err();
        assert!(matches!(refused.code(), Code::OutOfRange | Code::ResourceExhausted), "{refused:?}");
        let mut client = api::connect(&socket).await.unwrap();
        let longest = config::policy::MAX_TEXT_BYTES;
        let refused = client.set_policy(request("#".repeat(longest + 1))).await.unwrap_err();
        assert!(refused.code() == Code::InvalidArgument && refused.message().contains("at most"), "{refused:?}");
        // As many errors as the text can have lines.
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
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let socket = site.path("control.sock");
    runtime().block_on(async {
        let writers = (0..100).map(async |number| {
            let mut client = api::connect(&socket).await.unwrap();
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
        let mut client = api::connect(&socket).await.unwrap();
        let found = client.get_policy(v1::GetPolicyRequest::default()).await.unwrap().into_inner();
        assert_eq!(found.revision.unwrap().number, 1 + accepted);
    });
}

#[test]
fn a_client_that_stops_reading_delays_no_other_and_learns_of_the_last_change() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let socket = site.path("control.sock");
    runtime().block_on(async {
        let mut client = api::connect(&socket).await.unwrap();
        let mut events = client.watch_events(v1::WatchEventsRequest::default()).await.unwrap().into_inner();
        let interval = Some(Duration::from_millis(1).try_into().unwrap());
        let _stats = client.watch_stats(v1::WatchStatsRequest { interval }).await.unwrap().into_inner();
        let mut other = api::connect(&socket).await.unwrap();
        // More events than the relay keeps for a reader.
        for number in 0..500 {
            other.set_policy(request(format!("[class.w{number}]\n"))).await.unwrap();
        }
        // Some events may be missing, but not the last.
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
    assert_eq!(site.json(&["policy", "list"]).unwrap()["revisions"].as_array().unwrap().len(), 64);
}

#[test]
fn doors_that_lack_descriptors_come_back_by_themselves_and_say_so_once() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let before = limit_descriptors(site.relay.id(), 3).unwrap();
    let socket = site.path("control.sock");
    // The kernel has accepted both, and the relay has not.
    let _waiting = site.chain.relay.run(|| {
        let mut scraper = TcpStream::connect("127.0.0.1:9433").unwrap();
        scraper.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        (scraper, UnixStream::connect(&socket).unwrap())
    });
    for door in ["metrics", "control socket"] {
        let said = || {
            let output = site.relay.output();
            let mut lines =
                output.lines().filter(|line| line.contains("cannot accept connections for now: Too many open files"));
            lines.any(|line| line.contains(&format!("\"{door}\""))).then_some(())
        };
        wait_for("the log to mention the lack of descriptors", SOON, said).unwrap();
    }
    limit_descriptors(site.relay.id(), before).unwrap();
    let failures = |door: &str| format!("accept_failures_total{{door=\"{door}\"}}");
    let counts = site.wait_for_counts("both doors to count failures", |counts| {
        ["metrics", "control socket"].iter().all(|door| counts.of(&failures(door)) > 0)
    });
    counts.unwrap();
    assert_eq!(site.pacectl(&["status"], "").unwrap().0, Some(0));
    site.relay.wait_for_line("accepting connections again", SOON).unwrap();
    let said = site.relay.output();
    assert_eq!(said.matches("cannot accept connections for now").count(), 2, "{said}");
}
