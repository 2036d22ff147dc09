//! `pacectl probe` of a relay that another person runs.

use std::{net::UdpSocket, thread, time::Duration};

use api::token::generate_token;
use config::hash::hex;
use lab::{
    authority::Authority,
    process::Process,
    site::{Family, SOON, Site, Terms},
};
use quic::tls;

/// Probes the relay from the client's namespace; returns the exit code and all output.
fn probe(site: &Site, options: &[&str]) -> (Option<i32>, String) {
    let authority = site.path("authority.pem").display().to_string();
    probe_at(site, &site.template(Family::V4), &[&["--ca", &authority], options].concat())
}

/// As [`probe`], of a relay given by name or URL, without options about trust.
fn probe_at(site: &Site, relay: &str, options: &[&str]) -> (Option<i32>, String) {
    let arguments = [&["probe", "--relay", relay], options].concat();
    let mut probe: Process = site.chain.client.start(lab::program("pacectl").unwrap(), arguments).unwrap();
    let ended = probe.wait(SOON).unwrap();
    (ended.code(), probe.output())
}

#[test]
fn without_an_echo_a_probe_tells_whether_the_relay_is_up_and_lets_this_client_in() {
    lab::ring!(Netns);
    let (token, digest) = generate_token().unwrap();
    let sections = format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"", hex(&digest));
    let site = Site::new(Terms { relay: "", targets: "", sections: &sections, ..Terms::default() }).unwrap();
    let file = site.write("token", &token).unwrap().display().to_string();
    let (code, said) = probe(&site, &["--token-file", &file]);
    assert!(code == Some(0) && said.contains(", up") && said.contains("access     granted"), "{code:?} {said}");
    let (code, said) = probe(&site, &[]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains(", up") && said.contains("does not admit this client") && said.contains("407"), "{said}");
    // A target that the rules refuse also counts as a refusal.
    let (code, said) = probe(&site, &["--token-file", &file, "127.0.0.1:443"]);
    assert!(code == Some(3) && said.contains("403"), "{code:?} {said}");
    assert_eq!(site.counts().unwrap().refused("address_prohibited"), 2);
    // Neither output is to a terminal, so both are without colours.
    assert!(!site.relay.output().contains('\u{1b}') && !said.contains('\u{1b}'));
}

#[test]
fn a_relay_that_is_asked_under_another_address_or_path_says_where_it_serves() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    // The relay's other address, which is neither in its template nor in its certificate.
    let other = site.chain.egress.near.v4.to_string();
    site.chain.client.ip(&format!("route add {other} via {}", site.chain.access.far.v4)).unwrap();
    let certificate = tls::read_certificates(&site.path("relay.pem")).unwrap();
    let pin = hex(&tls::fingerprint(&certificate[0]));
    let elsewhere = "https://10.0.1.2/elsewhere/{target_host}/{target_port}/";
    for relay in [&other, elsewhere] {
        for target in [&[][..], &["10.0.2.2:7"]] {
            let (code, said) = probe_at(&site, relay, &[&["--pin", &pin], target].concat());
            let serves = format!("there is nothing here; this relay serves {}", site.template(Family::V4));
            assert!(code == Some(3) && said.contains(&serves), "{relay} {target:?}: {code:?} {said}");
            assert!(said.contains("status 404") && !said.contains("does not admit"), "{relay}: {said}");
        }
    }
    assert_eq!(site.counts().unwrap().refused("not_found"), 4);
}

#[test]
fn a_client_is_told_what_is_wrong_with_its_certificate() {
    lab::ring!(Netns);
    for auth in ["certificate", "token-or-certificate"] {
        let relay = format!("client_ca = \"$FOLDER/authority.pem\"\nauth = \"{auth}\"");
        let (_, digest) = generate_token().unwrap();
        let sections = format!(
            "[[relay.client_certificate]]\nname = \"branch\"\nsan = \"branch.example\"\n\
             [[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"",
            hex(&digest)
        );
        let sections =
            if auth == "certificate" { sections.split("[[relay.token]]").next().unwrap() } else { &sections };
        let site = Site::new(Terms { relay: &relay, sections, ..Terms::default() }).unwrap();
        let identity = |file: &str, name: &str, authority: &Authority| {
            let files = site.write_identity(file, &authority.issue(&[name]).unwrap()).unwrap();
            [files.certificate, files.private_key].map(|file| file.display().to_string())
        };
        let known = identity("branch", "branch.example", &site.authority);
        let unlisted = identity("other", "other.example", &site.authority);
        let foreign = identity("foreign", "branch.example", &Authority::new().unwrap());
        let with =
            |identity: &[String; 2]| probe(&site, &["--client-cert", &identity[0], "--client-key", &identity[1]]);

        let (code, said) = with(&known);
        assert!(code == Some(0) && said.contains("access     granted"), "{auth}: {code:?} {said}");
        let (code, said) = with(&unlisted);
        let words =
            ["the relay is up, but does not admit this client", "the client certificate is not known to this proxy"];
        assert!(code == Some(3) && words.iter().all(|words| said.contains(words)), "{auth}: {code:?} {said}");
        // The client may have sent its certificate and its request before it learns that the handshake failed.
        let (code, said) = with(&foreign);
        let why = "if a certificate was shown, the peer may not know the authority that signed it";
        assert!(code == Some(3) && said.contains(why) && !said.contains("going away"), "{auth}: {code:?} {said}");
        let (code, said) = probe(&site, &[]);
        let asks = if auth == "certificate" { "asks for a client certificate" } else { "asks for a token" };
        assert!(code == Some(3) && said.contains(asks), "{auth}: {code:?} {said}");
    }
}

#[test]
fn a_probe_ends_although_the_far_side_keeps_sending() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let far = site.chain.target.run(|| UdpSocket::bind("10.0.2.2:7")).unwrap().unwrap();
    far.set_read_timeout(Some(SOON)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (_, relay) = far.recv_from(&mut [0; 2_048]).unwrap();
            far.connect(relay).unwrap();
            // Until the relay has closed its socket, which it does when the probe has ended.
            for _ in 0..1_200 {
                if far.send(b"no answer").is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        let (code, said) = probe(&site, &["--count", "3", "10.0.2.2:7"]);
        assert!(code == Some(1) && said.contains("3 sent, 0 came back"), "{code:?} {said}");
    });
}
