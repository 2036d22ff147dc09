//! What follows from one mistake is not reported as another.

use super::*;

/// A configuration in which keys depend on others.
const DEPENDENT: &str = r#"[relay]
listen = ["127.0.0.1:4443"]
certificate = "/c.pem"
private_key = "/c.key"
client_ca = "/ca.pem"
client_crl = "/ca.crl"
auth = "token-or-certificate"
class = "bulk"
schedule = "shares"
templates = ["https://relay.example/m/{target_host}/{target_port}/"]
[[relay.token]]
name = "alice"
sha256 = "1111111111111111111111111111111111111111111111111111111111111111"
rate_up = "20 Mbit/s"
[[relay.token]]
name = "alice"
sha256 = "2222222222222222222222222222222222222222222222222222222222222222"
rate_up = "20 Mbit/s"
[[relay.listener]]
address = "127.0.0.1:8443"
[relay.targets]
allow = [{ to = "*.internal.example" }]
[relay.limits]
queue_bytes_per_tunnel = 8388608
queue_bytes_per_connection = 16777216
[gateway]
max_body_bytes = 536870
bodies_bytes = 1073741824
[[gateway.model]]
name = "large"
engines = ["https://127.0.0.1:8001", "https://gpu.example:8443"]
gpus = ["first", "second"]
ca_file = "/ca.pem"
[[gateway.model]]
name = "small"
engines = ["http://127.0.0.1:8002"]
[[gateway.alias]]
name = "auto"
models = ["large", "small"]
[[gateway.listener]]
address = "0.0.0.0:9444"
certificate = "/c.pem"
private_key = "/c.key"
[[gateway.key]]
name = "chat"
sha256 = "0fcb8f0c1c5c5a02a2ea1b95f5a3dd4a6a6d4c8f0f8d7d1a41e8dd0f1e4f3a11"
[transport]
initial_mtu = 4000
max_mtu = 9000
[[path]]
name = "dsl"
interface = "eth0"
[hop.first]
relay = "https://first.example/m/{target_host}/{target_port}/"
[[forward]]
listen = "127.0.0.1:8080"
protocol = "tcp"
relay = "https://relay.example/m/{target_host}/{target_port}/"
target = "web.example:80"
max_connections = 512
client_certificate = "/c.pem"
client_key = "/c.key"
via = "first"
class = "bulk"
[[forward]]
listen = "127.0.0.1:8080"
protocol = "udp"
relay = "https://relay.example/m/{target_host}/{target_port}/"
target = "web.example:80"
[[proxy]]
listen = "192.0.2.1:1080"
allow_remote = true
protocols = ["socks5"]
relay = "https://relay.example/m/{target_host}/{target_port}/"
[schedule]
discipline = "ml"
low = "wfq"
[schedule.shares]
discipline = "edf"
expiry = "hard"
[class.default]
priority = 220
priorities = [200, 255]
[class.bulk]
deadline_ms = 2000
shortest_deadline_ms = 500
drop = "codel"
target_ms = 5
interval_ms = 200
[class.wait]
drop = "sojourn"
sojourn_ms = 50
[class.child]
like = "wait"
sojourn_ms = 30
priorities = [0, 200]
[[rule]]
class = "bulk"
[[rule]]
schedule = "shares"
[control.tcp]
listen = "127.0.0.1:9443"
certificate = "/c.pem"
private_key = "/c.key"
client_ca = "/ca.pem"
"#;

#[test]
fn one_mistake_is_one_error_with_the_key_that_was_mistaken() {
    valid(DEPENDENT);
    let rows = [
        ("[relay]\n", "[relya]\n", "relya"),
        ("client_ca = \"/ca.pem\"\nclient_crl", "client_ca = 3\nclient_crl", "relay.client_ca"),
        ("client_ca = \"/ca.pem\"\nclient_crl", "client_caa = \"/ca.pem\"\nclient_crl", "relay.client_caa"),
        (
            "certificate = \"/c.pem\"\nprivate_key = \"/c.key\"\nclient_ca",
            "certificate = \"c.pem\"\nprivate_key = \"/c.key\"\nclient_ca",
            "relay.certificate",
        ),
        ("private_key = \"/c.key\"\nclient_ca", "private_keys = \"/c.key\"\nclient_ca", "relay.private_keys"),
        ("auth = \"token-or-certificate\"", "auth = \"nobody\"", "relay.auth"),
        ("[[relay.token]]\n", "[[relay.tokens]]\n", "relay.tokens"),
        ("rate_up = \"20 Mbit/s\"\n[[relay.token]]", "rate_up = \"20 Mbps\"\n[[relay.token]]", "relay.token.rate_up"),
        ("templates = [", "template = [", "relay.template"),
        ("{ to = ", "{ too = ", "relay.targets.allow.too"),
        (
            "queue_bytes_per_connection = 16777216",
            "queue_bytes_per_connection = \"16 MB\"",
            "relay.limits.queue_bytes_per_connection",
        ),
        ("bodies_bytes = 1073741824", "bodies_bytes = \"1 GB\"", "gateway.bodies_bytes"),
        ("\"https://gpu.example:8443\"]", "\"gpu.example:8443\"]", "gateway.model.engines"),
        ("engines = [\"https://", "engine = [\"https://", "gateway.model.engine"),
        ("name = \"small\"", "nam = \"small\"", "gateway.model.nam"),
        ("name = \"small\"", "name = 3", "gateway.model.name"),
        ("[[gateway.model]]\nname = \"small\"", "[[gateway.modle]]\nname = \"small\"", "gateway.modle"),
        ("[[gateway.key]]", "[[gateway.keys]]", "gateway.keys"),
        ("sha256 = \"0fcb", "sha256 = \"fcb", "gateway.key.sha256"),
        (
            "certificate = \"/c.pem\"\nprivate_key = \"/c.key\"\n[[gateway.key]]",
            "certificate = 1\nprivate_key = \"/c.key\"\n[[gateway.key]]",
            "gateway.listener.certificate",
        ),
        (
            "certificate = \"/c.pem\"\nprivate_key = \"/c.key\"\n[[gateway.key]]",
            "certificat = \"/c.pem\"\nprivate_key = \"/c.key\"\n[[gateway.key]]",
            "gateway.listener.certificat",
        ),
        ("max_mtu = 9000", "max_mtu = \"9000\"", "transport.max_mtu"),
        ("interface = \"eth0\"", "interfaces = \"eth0\"", "path.interfaces"),
        ("[hop.first]", "[hop.First]", "hop.First"),
        ("[hop.first]", "[hops.first]", "hops"),
        ("protocol = \"tcp\"\n", "protocol = \"TCP\"\n", "forward.protocol"),
        ("protocol = \"tcp\"\n", "protcol = \"tcp\"\n", "forward.protcol"),
        ("client_key = \"/c.key\"", "client_key = 3", "forward.client_key"),
        ("allow_remote = true", "allow_remot = true", "proxy.allow_remot"),
        ("protocols = [\"socks5\"]", "protocols = [\"socks4\"]", "proxy.protocols"),
        ("discipline = \"edf\"", "discipline = \"EDF\"", "schedule.shares.discipline"),
        ("[schedule.shares]", "[schedules.shares]", "schedules"),
        ("priority = 220", "priority = \"220\"", "class.default.priority"),
        ("[class.bulk]", "[clas.bulk]", "clas"),
        ("[class.bulk]", "[[class.bulk]]", "class.bulk"),
        ("drop = \"codel\"", "drop = \"codle\"", "class.bulk.drop"),
        ("drop = \"sojourn\"\nsojourn_ms", "drop = \"sojourn\"\nsojorn_ms", "class.wait.sojorn_ms"),
        ("drop = \"sojourn\"\nsojourn_ms", "drop = \"sojurn\"\nsojourn_ms", "class.wait.drop"),
        ("like = \"wait\"", "like = \"wiat\"", "class.child.like"),
        ("like = \"wait\"", "lik = \"wait\"", "class.child.lik"),
        ("[[rule]]\nclass", "[[rule]]\nclas", "rule.clas"),
        ("[[rule]]\nschedule", "[[rule]]\nschedul", "rule.schedul"),
        ("[control.tcp]\nlisten", "[control.tcp]\nlissten", "control.tcp.lissten"),
    ];
    for (right, wrong, key) in rows {
        let text = DEPENDENT.replacen(right, wrong, 1);
        assert_ne!(text, DEPENDENT, "{right}");
        let errors = Config::from_toml(&text).unwrap_err();
        let keys: Vec<_> = errors.iter().map(|error| error.key.as_str()).collect();
        assert_eq!(keys, [key], "{wrong}:\n{errors}");
    }
}

#[test]
fn a_section_in_place_of_which_the_text_has_another_value_lacks_nothing() {
    for text in ["relay = 3", "[[relay]]", "[hop]\nfirst = 3", "[control]\ntcp = true"] {
        assert_eq!(refusals(text).lines().count(), 1, "{text}");
    }
}

#[test]
fn independent_mistakes_in_one_section_are_all_reported() {
    let text = DEPENDENT.replace("bodies_bytes = 1073741824", "bodies_bytes = \"1 GB\"");
    let text = text.replace("models = [\"large\", \"small\"]", "models = [\"large\", \"smaller\"]");
    let text = text.replace("engines = [\"http://127.0.0.1:8002\"]", "engines = [\"127.0.0.1:8002\"]");
    let text = text.replace("shortest_deadline_ms = 500", "shortest_deadline_ms = 5000");
    let text = text.replace("drop = \"codel\"", "drop = \"codle\"");
    let errors = Config::from_toml(&text).unwrap_err();
    let keys: Vec<_> = errors.iter().map(|error| error.key.as_str()).collect();
    let expected = [
        "gateway.bodies_bytes",
        "gateway.model.engines",
        "gateway.alias.models",
        "class.bulk.shortest_deadline_ms",
        "class.bulk.drop",
    ];
    assert_eq!(keys, expected, "{errors}");
}

#[test]
fn a_limit_on_sections_is_reported_beside_other_mistakes_and_names_beyond_it_are_not() {
    let hops = (0..17).map(|name| {
        format!("[hop.h{name:02}]\nrelay = \"https://relay.example/m/{{target_host}}/{{target_port}}/\"\n")
    });
    let text = hops.collect::<String>() + "[log]\nlevel = \"loud\"\n" + FORWARD + "via = \"h16\"\n";
    let errors = Config::from_toml(&text).unwrap_err();
    let keys: Vec<_> = errors.iter().map(|error| error.key.as_str()).collect();
    assert_eq!(keys, ["hop", "log.level"], "{errors}");
}

#[test]
fn a_list_that_is_not_closed_is_one_mistake_where_it_begins_and_later_mistakes_are_reported_as_well() {
    let open = format!("{FORWARD}[[proxy]]\nlisten = \"127.0.0.1:1080\"\nprotocols = [\"socks5\"\nrelay = \"x\"\n");
    let refused = |text: &str| {
        let errors = Config::from_toml(text).unwrap_err();
        errors.iter().map(|error| (error.line, error.column, error.to_string())).collect::<Vec<_>>()
    };
    let found = refused(&format!("{open}[log]\nlevel = \"info\"\n"));
    assert!(matches!(&found[..], [(7, 13, words)] if words.contains("unclosed array")), "{found:?}");
    let found = refused(&format!("{open}[log]\nlevel = info\n"));
    assert!(matches!(&found[..], [(7, 13, _), (10, 9, _)]), "{found:?}");
    // Of a table, the parser does not keep where it begins.
    let found = refused(&format!("[relay.targets]\nallow = [{{ to = \"a.example\" ]\n{PROXY}[log]\nlevel = info\n"));
    assert!(matches!(&found[..], [(2 | 3, _, _), (7, 9, _)]), "{found:?}");
    // The lines of a list are no mistakes for want of their beginning.
    let found = refused("[relay]\nlisten = [\"127.0.0.1:1\" \"127.0.0.1:2\",\n    \"127.0.0.1:3\",\n]\nworkers 3\n");
    assert!(matches!(&found[..], [(2, 25, _), (5, _, _)]), "{found:?}");
}
