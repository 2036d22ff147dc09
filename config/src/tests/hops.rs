//! Relays that are reached through other relays.

use super::*;

/// A hop called `name`; `more` may contain the hop through which it is reached.
fn hop(name: &str, more: &str) -> String {
    let relay = format!("relay = \"https://{name}.example/{{target_host}}/{{target_port}}/\"");
    format!("[hop.{name}]\n{relay}\ncertificate_sha256 = \"{}\"\n{more}\n", "ab".repeat(32))
}

fn names(hops: Vec<&Hop>) -> Vec<&str> {
    hops.into_iter().map(|hop| hop.name.as_str()).collect()
}

#[test]
fn a_relay_behind_a_hop_has_credentials_of_its_own() {
    let config = valid(&format!("{FORWARD}via = \"first\"\ntoken_file = \"/own\"\n{}", hop("first", "")));
    let [forward, hop] = [&config.forwards[0].uplink, &config.hops[0].uplink];
    assert_eq!((forward.via.as_deref(), hop.via.as_deref()), (Some("first"), None));
    assert_eq!((forward.trust.clone(), hop.trust.clone()), (TrustSource::System, TrustSource::Pinned([0xab; 32])));
    assert!(forward.token_file.is_some() && hop.token_file.is_none(), "neither is shown what the other is");
    assert_eq!(forward.through(), "relay.example:443 via first");
    assert_eq!(config.warnings(), []);
}

#[test]
fn hops_are_chained_in_any_order_of_the_text_and_each_that_leads_somewhere_is_a_relay_of_the_edge() {
    let [first, second] = [hop("first", ""), hop("second", "via = \"first\"")];
    let text = format!("{second}{FORWARD}via = \"second\"\n{first}{}", hop("other", ""));
    let config = valid(&text);
    assert_eq!(names(hop::chain(&config.hops, "second")), ["second", "first"]);
    assert_eq!(names(hop::chain(&config.hops, "none")), Vec::<&str>::new());
    let listen = config.forwards[0].listen;
    let hops: Vec<_> = config.all_uplinks().into_iter().filter(|(section, ..)| *section == "hop").collect();
    assert_eq!(hops.len(), 2);
    assert!(hops.iter().all(|(_, at, _)| *at == listen));
    assert_eq!(config.warnings(), [Warning::UnusedHop("other".into())]);
}

#[test]
fn the_hop_of_a_path_stands_in_place_of_that_of_a_local_address() {
    let path = "[[path]]\nname = \"a\"\nvia = \"second\"\n";
    let text = format!("{FORWARD}via = \"first\"\n{path}{}{}", hop("first", ""), hop("second", ""));
    let config = valid(&text);
    assert_eq!(config.warnings(), [Warning::UnusedHop("first".into())]);
    assert_eq!(valid(&config.to_toml()).to_toml(), config.to_toml());
    let both = format!("{text}[[path]]\nname = \"b\"\ninterface = \"eth0\"\n");
    assert_eq!(valid(&both).warnings(), [], "a path without a hop of its own leads through that of the address");
}

#[test]
fn an_edge_has_at_most_16_hops() {
    let hops = |count: usize| (0..count).map(|number| hop(&format!("h{number}"), "")).collect::<String>();
    assert_eq!(valid(&format!("{FORWARD}{}", hops(16))).hops.len(), 16);
    assert!(refusals(&format!("{FORWARD}{}", hops(17))).contains("more than 16 hops"));
}
