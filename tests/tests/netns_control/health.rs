//! The checks of load balancers and orchestrators.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
};

use lab::{
    netns::Namespace,
    process::wait_for,
    site::{Family, SOON, Site, Terms},
};

use super::connect;

/// A page's status and body.
fn get(site: &Site, path: &str) -> Option<(u16, String)> {
    get_from(&site.chain.relay, path)
}

/// A page's status and body, at a daemon in any namespace.
fn get_from(namespace: &Namespace, path: &str) -> Option<(u16, String)> {
    let answer = namespace.run(|| {
        let mut stream = TcpStream::connect("127.0.0.1:9433").ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    });
    let answer = answer.unwrap()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

#[test]
fn an_edge_is_ready_only_with_a_relay() {
    lab::ring!(Netns);
    // The relay serves at its own address; no process serves at the other port.
    for (port, expected) in [(443, (200, "ready\n")), (4, (503, "no connection to 10.0.1.2:4\n"))] {
        let sections = format!(
            r#"
            [[forward]]
            listen = "127.0.0.1:5353"
            relay = "https://10.0.1.2:{port}/.well-known/masque/udp/{{target_host}}/{{target_port}}/"
            target = "10.0.2.2:7"
            ca = "$FOLDER/authority.pem"
            "#
        );
        let site = Site::new(Terms { sections: &sections, ..Terms::default() }).unwrap();
        let found = || get(&site, "/readyz").filter(|(status, body)| (*status, &body[..]) == expected).map(drop);
        wait_for("the page", SOON, found).unwrap_or_else(|error| panic!("{error:#}: {:?}", get(&site, "/readyz")));
    }
}

#[test]
fn a_gateway_without_a_relay_is_ready() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let text = r#"
        state_dir = "$FOLDER/gateway"
        [metrics]
        listen = "127.0.0.1:9433"
        [control]
        enabled = false
        [[gateway.listener]]
        address = "127.0.0.1:8100"
        tls = false
        [[gateway.model]]
        name = "large"
        engines = ["http://127.0.0.1:8001"]
    "#;
    let file = site.write("gateway.toml", &text.replace("$FOLDER", &site.path("").display().to_string())).unwrap();
    let arguments = ["run".into(), "--config".into(), file];
    let gateway = site.chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
    let ready = || (get_from(&site.chain.client, "/readyz") == Some((200, "ready\n".into()))).then_some(());
    wait_for("the gateway to be ready", SOON, ready).unwrap_or_else(|error| {
        panic!("{error:#}: {:?}: {}", get_from(&site.chain.client, "/readyz"), gateway.output())
    });
}

#[test]
fn a_relay_that_drains_is_healthy_and_not_ready() {
    lab::ring!(Netns);
    let site = Site::new(Terms { relay: "auth = \"none\"\ndrain_seconds = 60", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    wait_for("the relay to be ready", SOON, || (get(&site, "/readyz") == Some((200, "ready\n".into()))).then_some(()))
        .unwrap();
    assert_eq!(get(&site, "/healthz"), Some((200, "ok\n".into())));
    site.client(async || {
        let client = connect(&site).await;
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        site.signal(libc::SIGTERM).unwrap();
        wait_for("the relay to report that it drains", SOON, || {
            (get(&site, "/readyz") == Some((503, "draining\n".into()))).then_some(())
        })
        .unwrap();
        assert_eq!(get(&site, "/healthz"), Some((200, "ok\n".into())));
        // The answer to a reload does not wait for the end of the drain.
        let (code, said) = site.pacectl(&["reload"], "").unwrap();
        assert!(code == Some(5) && said.contains("paced is ending"), "{code:?} {said}");
        assert_eq!(get(&site, "/readyz"), Some((503, "draining\n".into())));
        assert_eq!(tunnel.echo(None, b"still there").await, b"still there");
    })
    .unwrap();
}
