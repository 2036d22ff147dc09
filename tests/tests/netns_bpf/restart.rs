//! What a restarted relay says to peers of before.

use paced::quic::h3;
use s2n_quic::connection;
use tests::client::Client;
use tests::process::wait_for;
use tests::site::{Family, SOON, Site, Terms};

#[test]
fn a_restarted_relay_answers_old_connection_ids_with_stateless_resets() {
    tests::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        assert_eq!(tunnel.echo(None, b"before").await, b"before");
        let _restarted = restart(&site);
        // A connection that nobody answers would end with another error.
        tunnel.send(None, b"to a relay that knows nothing of this").await.unwrap();
        let ended = client.ended.await.unwrap();
        assert!(matches!(ended, h3::Error::Connection(connection::Error::StatelessReset { .. })), "{ended:?}");
    })
    .unwrap();
}

/// Kills the relay and starts it again, in the same place and with the same state folder.
fn restart(site: &Site) -> tests::process::Process {
    site.signal(libc::SIGKILL).unwrap();
    let status = format!("/proc/{}/stat", site.relay.id());
    let is_dead = || std::fs::read_to_string(&status).unwrap().contains(") Z ").then_some(());
    wait_for("the end of the relay", SOON, is_dead).unwrap();
    let file = site.path("paced.toml");
    let arguments = ["run".into(), "--config".into(), file];
    let relay = site.chain.relay.start(tests::program("paced").unwrap(), arguments).unwrap();
    relay.wait_for_line("ready", SOON).unwrap();
    relay
}
