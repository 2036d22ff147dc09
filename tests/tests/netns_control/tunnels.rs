//! Lists of open tunnels and connections, and an operator's actions on them.

use std::process::Command;

use lab::{
    process::wait_for,
    site::{Family, SOON, Site, Terms},
};
use masque::tunnel::Form;

use super::{VOICE, connect, set};

#[test]
fn tunnels_are_listed_with_what_they_moved_by_class_user_and_connection() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    let _echoes = (site.chain.target.echo(7).unwrap(), site.chain.target.echo(9).unwrap());
    site.client(async || {
        let client = connect(&site).await;
        let mut voice = client.open(site.target(Family::V4, 7)).await.unwrap();
        let _other = client.open(site.target(Family::V6, 9)).await.unwrap();
        voice.send(Form::Datagram, b"eight by").await.unwrap();
        voice.recv().await.unwrap();
        let all = site.json(&["tunnels"]).unwrap();
        let of = |index: usize, key: &str| all[index][key].clone();
        assert_eq!(all.as_array().unwrap().len(), 2);
        assert_eq!((of(0, "class"), of(0, "up_bytes"), of(0, "down_bytes")), ("voice".into(), 8.into(), 8.into()));
        assert_eq!(
            (of(0, "target"), of(1, "class")),
            (site.target(Family::V4, 7).to_string().into(), "default".into())
        );
        let ids = |arguments: &[&str]| {
            let listed = site.json(&[&["tunnels"], arguments].concat()).unwrap();
            listed.as_array().unwrap().iter().map(|of| of["id"].as_u64().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!((ids(&["--class", "voice"]), ids(&["--connection", "1"])), (vec![1], vec![1, 2]));
        assert_eq!((ids(&["--user", "alice"]), ids(&["--connection", "2"])), (vec![], vec![]));
        let connections = site.json(&["connections"]).unwrap();
        assert_eq!((connections[0]["tunnels"].clone(), connections.as_array().unwrap().len()), (2.into(), 1));
        assert!(connections[0]["client"].as_str().unwrap().starts_with("10."));
        let count = |key: &str| connections[0][key].as_u64().unwrap();
        assert!(
            count("sent_bytes") > 1_200 && count("received_bytes") > 1_200,
            "both ends sent full packets: {connections}"
        );
        assert!(count("sent_packets") > count("lost_packets"), "{connections}");
        let rtt = connections[0]["smoothed_rtt"].as_str().unwrap();
        assert!(rtt.ends_with('s') && rtt != "0s", "{connections}");
        client.close().await;
    })
    .unwrap();
    wait_for("the connection to end", SOON, || {
        site.json(&["connections"]).unwrap().as_array().unwrap().is_empty().then_some(())
    })
    .unwrap();
    assert_eq!(site.json(&["tunnels"]).unwrap().as_array().unwrap().len(), 0);
}

#[test]
fn a_tunnel_has_the_class_that_an_operator_gave_it_over_policies_until_the_class_is_gone() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(9).unwrap();
    let class = || site.json(&["tunnels"]).unwrap()[0]["class"].clone();
    site.client(async || {
        let client = connect(&site).await;
        let mut tunnel = client.open(site.target(Family::V4, 9)).await.unwrap();
        assert_eq!(class(), "default");
        site.json(&["class", "1", "voice"]).unwrap();
        set(&site, &format!("{VOICE}[class.more]\n"), &[]);
        assert_eq!(class(), "voice");
        tunnel.send(Form::Datagram, b"x").await.unwrap();
        tunnel.recv().await.unwrap();
        let sent = site.counts().unwrap().of("class_payloads_total{class=\"voice\",role=\"relay\"}");
        assert_eq!(sent, 1);
        site.json(&["class", "1"]).unwrap();
        assert_eq!(class(), "default", "the rules apply again");
        site.json(&["class", "1", "voice"]).unwrap();
        set(&site, "", &[]);
        assert_eq!(class(), "default");
        for (arguments, why) in
            [(["class", "1", "voice"], "no class voice"), (["class", "7", "default"], "no tunnel 7")]
        {
            let (code, said) = site.pacectl(&arguments, "").unwrap();
            assert!(code == Some(3) && said.contains(why), "{said}");
        }
    })
    .unwrap();
}

#[test]
fn a_tunnel_that_an_operator_closes_ends_alone() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = connect(&site).await;
        let mut first = client.open(site.target(Family::V4, 7)).await.unwrap();
        let mut second = client.open(site.target(Family::V4, 7)).await.unwrap();
        site.json(&["close", "1"]).unwrap();
        assert!(first.recv().await.map(|payload| payload.is_none()).unwrap_or(true), "the first tunnel has ended");
        second.send(Form::Datagram, b"x").await.unwrap();
        assert_eq!(second.recv().await.unwrap().unwrap(), b"x");
        assert_eq!(site.json(&["tunnels"]).unwrap()[0]["id"], 2);
        assert_eq!(site.counts().unwrap().closed("operator"), 1);
        assert_eq!(site.pacectl(&["close", "1"], "").unwrap().0, Some(3));
    })
    .unwrap();
}

#[test]
fn a_reader_that_has_gone_ends_every_command_in_peace() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    for arguments in [
        &["status"][..],
        &["--json", "status"],
        &["classes"],
        &["tunnels"],
        &["connections"],
        &["policy", "get"],
        &["policy", "list"],
        // Would run for ever if there were a reader.
        &["--json", "top"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(lab::program("pacectl").unwrap());
        command.arg("--socket").arg(site.path("control.sock")).args(arguments);
        let output = command.stdout(writer).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{arguments:?}: {}: {said}", output.status);
    }
}
