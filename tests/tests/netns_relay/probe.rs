//! `pacectl probe` of a relay that is not this user's own.

use api::token::generate_token;
use config::hash::hex;
use lab::process::Process;
use lab::site::{Family, SOON, Site, Terms};

/// Probes the relay from the client's namespace; returns the exit code and all that was said.
fn probe(site: &Site, options: &[&str]) -> (Option<i32>, String) {
    let (template, authority) = (site.template(Family::V4), site.path("authority.pem").display().to_string());
    let arguments = [&["probe", "--relay", &template, "--ca", &authority], options].concat();
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
    // A target that the rules refuse is a refusal, too.
    let (code, said) = probe(&site, &["--token-file", &file, "127.0.0.1:443"]);
    assert!(code == Some(3) && said.contains("403"), "{code:?} {said}");
    assert_eq!(site.counts().unwrap().refused("address_prohibited"), 2);
    // None of the logs is on a terminal.
    assert!(!site.relay.output().contains('\u{1b}') && !said.contains('\u{1b}'));
}
