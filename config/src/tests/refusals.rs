//! Refused configurations, and their messages.

use super::*;

#[test]
fn every_refusal_says_where_which_key_what_and_what_instead() {
    let relay = |more: &str| format!("{RELAY}{more}");
    let forward = |more: &str| format!("{FORWARD}{more}");
    let proxy = |more: &str| format!("{PROXY}{more}");
    let gateway = |more: &str| format!("{RELAY}[gateway]\n{more}");
    const MODEL: &str = "[[gateway.model]]\nname = \"a\"\nengines = [\"http://127.0.0.1:8000\"]\n";
    let rows = [
        ("state_dir = ", "line 1, column 1", "not TOML", "see https://toml.io"),
        ("a = 1\na = 2", "line 2, column 1: ", "not TOML", "see"),
        ("state_dir = \"here\"", "line 1, column 13: state_dir: ", "\"here\" does not fit", "write an absolute path"),
        ("log.level = 3", "line 1, column 13: log.level: ", "3 does not fit", "\"warn\""),
        ("log = 3", "line 1, column 7: log: ", "3 does not fit", "write a section"),
        ("forward = {}", "line 1, column 11: forward: ", "this table does not fit", "write a list"),
        ("forward = [1]", "line 1, column 11: forward: ", "1 does not fit", "double brackets"),
        ("colour = 1", "line 1, column 1: colour: ", "unknown key", "known here: state_dir, "),
        ("[[relay]]", "line 1, column 1: relay: ", "this array does not fit", "write a section"),
        ("[relay]\nauth = \"none\"", "line 1, column 1: relay.certificate: ", "missing", "add certificate ="),
        ("[relay]\nauth = \"none\"", "line 1, column 1: relay.templates: ", "missing", "add templates = [...]"),
        (&relay("templates = []"), "line 6, column 1: ", "not TOML", "see"),
        (&RELAY.replace("relay.example", ""), "line 4, column 14: relay.templates: ", "is not a URI template", ";"),
        (
            &RELAY.replace("\"none\"", "\"token\""),
            "line 5, column 8: relay.auth: ",
            "no [[relay.token]]",
            "pacectl token new",
        ),
        (
            &RELAY.replace("none", "certificate"),
            "line 5, column 8: relay.auth: ",
            "names no authority",
            "add client_ca",
        ),
        (
            &RELAY.replace("none", "nobody"),
            "line 5, column 8: relay.auth: ",
            "does not fit",
            "\"token-or-certificate\"",
        ),
        (
            &format!("{}token = []", RELAY.replace("\"none\"", "\"token\"")),
            "line 5, column 8: relay.auth: ",
            "no [[relay.token]]",
            "pacectl token new",
        ),
        (
            &forward("via = \"frist\"\n[hop.first]\nrelay = \"https://a.example/{target_host}/{target_port}/\""),
            "line 5, column 7: forward.via: ",
            "no \"frist\"",
            "did you mean first?",
        ),
        (&forward("via = \"first\""), "line 5, column 7: forward.via: ", "no \"first\"", "none is defined yet"),
        (
            "[hop.first]\nvia = \"first\"",
            "line 2, column 7: hop.first.via: ",
            "forms a cycle: first, then first",
            "remove it",
        ),
        (
            "[hop.a]\nvia = \"b\"\n[hop.b]\nvia = \"c\"\n[hop.c]\nvia = \"a\"",
            "line 2, column 7: hop.a.via: ",
            "forms a cycle: a, then b, then c, then a",
            "remove it",
        ),
        ("[hop.first]", "line 1, column 1: hop.first.relay: ", "missing", "add relay ="),
        ("[hop.First]", "line 1, column 6: hop.First: ", "does not fit", "lower-case"),
        ("[gateway]", "line 1, column 1: gateway: ", "no listener of its own", "add a [[gateway.listener]]"),
        (
            &format!("{MODEL}[[gateway.listener]]\naddress = \"127.0.0.1:8100\""),
            "line 4, column 1: gateway.listener.certificate: ",
            "TLS, but has no certificate",
            "on loopback, tls = false",
        ),
        (&gateway(""), "line 6, column 1: gateway.model: ", "has no models", "add a [[gateway.model]]"),
        (
            &gateway("[[gateway.model]]\nname = \"a\"\nengines = [\"gpu:8000\"]"),
            "line 9, column 12: gateway.model.engines: ",
            "does not fit",
            "http://127.0.0.1:8000",
        ),
        (
            &gateway(&format!("{MODEL}[[gateway.alias]]\nname = \"a\"\nmodels = [\"a\"]")),
            "line 10, column 1: gateway.alias: ",
            "the name of a model",
            "change one",
        ),
        (
            &gateway(&format!("{MODEL}[[gateway.alias]]\nname = \"auto\"\nmodels = [\"b\"]")),
            "line 12, column 10: gateway.alias.models: ",
            "no [[gateway.model]] defines",
            "add the model",
        ),
        (
            &gateway(&format!("max_body_bytes = 4096\nbodies_bytes = 2048\n{MODEL}")),
            "line 7, column 18: gateway.max_body_bytes: ",
            "larger than bodies_bytes",
            "raise bodies_bytes",
        ),
        (
            &PROXY.replace("[[proxy]]", "[[serve]]").replace("127.0.0.1", "192.0.2.1"),
            "line 2, column 10: serve.listen: ",
            "without encryption",
            "allow_remote = true",
        ),
        (
            &format!("{}max_body_bytes = 4096\nbodies_bytes = 2048", PROXY.replace("[[proxy]]", "[[serve]]")),
            "line 4, column 18: serve.max_body_bytes: ",
            "larger than bodies_bytes",
            "raise bodies_bytes",
        ),
        (
            &(PROXY.replace("[[proxy]]", "[[serve]]")
                + &["a", "b"]
                    .map(|name| format!("[[serve.key]]\nname = \"{name}\"\nsha256 = \"{:064}\"\n", 0))
                    .concat()),
            "line 4, column 1: serve.key: ",
            "two entries have the same sha256",
            "change one",
        ),
        (&relay("listen = []"), "line 6, column 10: relay.listen: ", "no listener", "name an address"),
        (&relay("listen = [\"[::1]\"]"), "line 6, column 11: relay.listen: ", "does not fit", "\"[2001:db8::1]:443\""),
        (
            &relay("listen = [\"[::1]:1\", \"[::1]:1\"]"),
            "line 6, column 10: relay.listen: ",
            "same address",
            "change one",
        ),
        (&relay("[[relay.token]]"), "line 6, column 1: relay.token.sha256: ", "missing", "64 hexadecimal"),
        (
            &relay("[[relay.token]]\nname = \"\"\nsha256 = \"0g\""),
            "line 7, column 8: relay.token.name: ",
            "does not",
            "1 to 255",
        ),
        (
            &relay("[relay.limits]\nconnections = -1"),
            "line 7, column 15: relay.limits.connections: ",
            "-1 is out",
            "from 1 to",
        ),
        (
            &relay("[relay.limits]\nconnections = 1.5"),
            "line 7, column 15: relay.limits.connections: ",
            "this float",
            "whole number",
        ),
        (
            &relay("[relay.limits]\nqueue_bytes_per_tunnel = 5000000"),
            "line 7, column 26: relay.limits.queue_bytes",
            "larger than queue_bytes_per_connection",
            "raise",
        ),
        (
            &relay("[relay.limits]\ntunnels_per_conection = 1"),
            "line 7, column 1: relay.limits.tunnels_per_conection: ",
            "unknown",
            "did you mean tunnels_per_connection?",
        ),
        (
            &relay("[relay.targets]\nallow = [\"10.0.0.1/8\"]"),
            "line 7, column 10: relay.targets.allow: ",
            "10.0.0.1/8 has bits set after its prefix",
            "write 10.0.0.0/8 for the network, or 10.0.0.1",
        ),
        (
            &relay("[relay.targets]\nown = [\"192.0.2.7/24\"]"),
            "line 7, column 8: relay.targets.own: ",
            "192.0.2.7/24 has bits set after its prefix",
            "write 192.0.2.0/24 for the network, or 192.0.2.7 for the address",
        ),
        (
            &relay("[relay.limits]\ndns_timeout_ms = \"3s\""),
            "line 7, column 18: relay.limits.dns_timeout_ms: ",
            "\"3s\" is not a number",
            "write a whole number from 1 to 60000, without quotes and without a unit (the unit is in the key's name)",
        ),
        (
            &relay("[relay.targets]\nallow = [\"64:ff9b::/96\"]"),
            "line 7, column 9: relay.targets.allow: ",
            "allows nothing",
            "IPv4 network",
        ),
        (
            &relay("[relay.targets]\ndeny = [{ port = 1 }]"),
            "line 7, column 11: relay.targets.deny.port: ",
            "unknown",
            "ports?",
        ),
        (
            &relay("[relay.targets]\ntcp_ports = [\"9-8\", 0]"),
            "line 7, column 14: relay.targets.tcp_ports: ",
            "does not fit",
            "8000-8099",
        ),
        ("[transport]\ninitial_mtu = 1501", "line 2, column 15: transport.initial_mtu: ", "larger", "raise max_mtu"),
        (
            "[transport]\ncoalesce_us = 1000\nbusy_poll_us = 50",
            "line 3, column 16: transport.busy_poll_us: ",
            "cannot let events gather and poll",
            "coalesce_us",
        ),
        (&forward("client_key = \"/k\""), "line 1, column 1: forward.client_certificate: ", "go together", "give both"),
        (
            &forward("backoff_first_ms = 40000"),
            "line 5, column 20: forward.backoff_first_ms: ",
            "longer than backoff_longest_seconds",
            "raise",
        ),
        (
            &forward("class = \"bulk\"\n[class.bulky]"),
            "line 5, column 9: forward.class: ",
            "there is no \"bulk\"",
            "did you mean bulky?",
        ),
        (
            &forward("schedule = \"shraes\"\n[schedule.shares]"),
            "line 5, column 12: forward.schedule: ",
            "no \"shraes\"",
            "did you mean shares?",
        ),
        (&proxy("schedule = \"shares\""), "line ", "there is no \"shares\"", "define it, or remove this key"),
        (
            &(relay("schedule = \"shraes\"\n[schedule.shares]")),
            "line ",
            "relay.schedule: there is no \"shraes\"",
            "did you mean shares?",
        ),
        ("[[rule]]\nclass = \"bulk\"", "line 2, column 9: rule.class: ", "no \"bulk\"", "known here: default"),
        (&FORWARD.replace(":53\"", "\""), "line 4, column 10: forward.target: ", "does not fit", "a host and a port"),
        (&forward(FORWARD), "line 1, column 1: forward: ", "same address", "change one"),
        (
            &format!("{RELAY}listen = [\"127.0.0.1:5353\"]\n{FORWARD}"),
            "line 7, column 1: forward: ",
            "of a listener of the relay",
            "change one",
        ),
        (
            &proxy(
                "[control.tcp]\nlisten = \"127.0.0.1:1080\"\ncertificate = \"/c\"\nprivate_key = \"/k\"\nclient_ca = \"/a\"",
            ),
            "line 4, column ",
            ": control: the address of [control.tcp] is that of",
            "change one",
        ),
        (
            &forward("protocol = \"tcp\"\n[metrics]\nlisten = \"127.0.0.1:5353\""),
            "line 6, column 1: metrics: ",
            "or a forward, too",
            "change one",
        ),
        (&forward("protocol = \"tcp\"\nmode = \"auto\""), "line 6, column 8: forward.mode: ", "in streams", "remove"),
        (&forward("max_connections = 5"), "line 5, column 19: forward.max_connections: ", "no connections", "protocol"),
        (
            &PROXY.replace("127.0.0.1", "192.0.2.1"),
            "line 2, column 10: proxy.listen: ",
            "other machines",
            "allow_remote = true",
        ),
        (&proxy("protocols = []"), "line 4, column 13: proxy.protocols: ", "is empty", "\"http\" or both"),
        (&proxy("protocols = [\"http\", \"http\"]"), "line 4, column 13: proxy.protocols: ", "twice", "change one"),
        (&proxy("protocols = [\"socks4\"]"), "line 4, column 14: proxy.protocols: ", "does not fit", "\"socks5\""),
        (&proxy(PROXY), "line 1, column 1: proxy: ", "another proxy", "change one"),
        (
            &proxy(&FORWARD.replace("127.0.0.1:5353\"", "127.0.0.1:1080\"\nprotocol = \"tcp\"")),
            "line 1, column 1: proxy: ",
            "or forward",
            "change one",
        ),
    ];
    for (text, position, cause, remedy) in rows {
        assert_refused(text, &refusals(text), [position, cause, remedy]);
    }
}

#[test]
fn one_run_finds_all_errors_in_the_order_of_lines() {
    let text = "state_dri = \"/x\"\n[transport]\nmax_mtu = 1\n[log]\nlevel = \"loud\"\n[[forward]]\n";
    let lines: Vec<_> = Config::from_toml(text).unwrap_err().iter().map(|error| error.line).collect();
    assert_eq!(lines, [1, 3, 5, 6, 6, 6]);
}

#[test]
fn columns_count_characters() {
    assert!(refusals("\"größe\" = 1\nlog = { \"ü\" = 1 }").contains("line 2, column 9: log.ü: "));
}

#[test]
fn deep_nesting_is_refused_before_it_costs_the_stack() {
    for deep in [
        "a = ".to_owned() + &"[".repeat(100_000),
        "a = ".to_owned() + &"{ a = ".repeat(100_000),
        "a.".repeat(100_000) + "a = 1",
    ] {
        assert!(Config::from_toml(&deep).is_err());
    }
}

#[test]
fn a_refused_token_is_not_also_reported_as_absent() {
    let text = RELAY.replace("none", "token") + "[[relay.token]]\nname = \"a\"\nsha256 = \"b\"";
    assert_eq!(refusals(&text).lines().count(), 1);
}

#[test]
fn a_key_that_was_misspelt_is_not_also_reported_as_missing() {
    let text = RELAY.replace("private_key", "private_keys");
    let errors = Config::from_toml(&text).unwrap_err();
    let keys: Vec<_> = errors.iter().map(|error| error.key.as_str()).collect();
    assert_eq!(keys, ["relay.private_keys"]);
}

#[test]
fn a_list_of_which_no_element_fits_is_not_told_to_be_empty() {
    let errors = Config::from_toml(&format!("{RELAY}listen = [\"0.0.0.0\"]\n")).unwrap_err();
    let problems: Vec<_> = errors.iter().map(|error| &error.problem).collect();
    assert!(matches!(problems[..], [Problem::Unfit { .. }]), "{errors}");
    let errors = Config::from_toml(&format!("{RELAY}listen = []\n")).unwrap_err();
    assert!(errors.to_string().contains("has no listener"), "{errors}");
}
