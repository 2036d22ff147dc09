//! Requests for models that reach their gateway through another relay.

use super::*;

/// Starts a relay in front of the gateway, on the same host, with the same users.
fn start_hop(desk: &Desk) -> Process {
    desk.site.start_beside("", &desk.relay).unwrap()
}

/// A gateway that its edge reaches through another relay, and that relay.
fn behind_a_hop() -> (Desk, Process) {
    let mut desk = Desk::new(1, "", "");
    let hop = start_hop(&desk);
    desk.edge.signal(libc::SIGTERM).unwrap();
    desk.edge.wait(SOON).unwrap();
    let to = |port: u16| format!("\"https://10.0.1.2:{port}/.well-known/masque/udp/{{target_host}}/{{target_port}}/\"");
    let folder = desk.site.path("").display().to_string();
    // After the list of gateways, the table continues with the keys that both edges share.
    let keys = format!(
        "{}\nvia = \"first\"\nca = \"{folder}/authority.pem\"\ntoken_file = \"{folder}/edge.token\"\n\
         backoff_longest_seconds = 1\n[hop.first]\nbackoff_longest_seconds = 1\nrelay = {}",
        to(443),
        to(444)
    );
    desk.edge = start_edge_to(&desk.site, &keys);
    (desk, hop)
}

#[test]
fn a_request_for_a_model_passes_a_relay_on_the_way_and_is_served_again_when_that_relay_is_back() {
    lab::ring!(Netns);
    let (desk, mut hop) = behind_a_hop();
    for is_stream in [true, false] {
        let (status, head, body) = desk.chat("large", "x", is_stream);
        assert_eq!((status, is_stream == tokens(&body).1), (200, true), "{head}{body}");
    }
    let asked = desk.large[0].counts()[0];
    hop.signal(libc::SIGKILL).unwrap();
    hop.wait(SOON).unwrap();
    // There is no other way to the gateway, so the request waits until the relay is back.
    let mut curl =
        desk.begin(&["--max-time", "2", "-o", "/dev/null", "-w", "%{http_code}", "--json", &chat("large", "x", true)]);
    curl.wait().unwrap();
    assert_eq!(desk.large[0].counts()[0], asked, "no request takes another way");
    let _hop = start_hop(&desk);
    let served = || Some(desk.chat("large", "x", true)).filter(|(status, _, body)| *status == 200 && tokens(body).1);
    wait_for("the gateway to be reached again", SOON, served).unwrap();
}
