use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;
use crate::{
    forward::TunnelMode,
    sample::{entries, switched_on},
    schema::tests::CONFIG,
    uplink::TrustSource,
};

mod consequences;
mod hops;
mod parts;
mod refusals;
mod written;

/// The smallest relay, on lines 1 to 5; text that follows is still in its section.
const RELAY: &str = r#"[relay]
certificate = "/c.pem"
private_key = "/k.pem"
templates = ["https://relay.example/m/{target_host}/{target_port}/"]
auth = "none"
"#;

const PROXY: &str = r#"[[proxy]]
listen = "127.0.0.1:1080"
relay = "https://relay.example/m/{target_host}/{target_port}/"
"#;

const FORWARD: &str = r#"[[forward]]
listen = "127.0.0.1:5353"
relay = "https://relay.example/m/{target_host}/{target_port}/"
target = "dns.example:53"
"#;

/// Reads a text, and asserts that the schema accepts it as well.
pub(crate) fn valid(text: &str) -> Config {
    let config = Config::from_toml(text).unwrap_or_else(|errors| panic!("{text}\nis refused:\n{errors}"));
    CONFIG.assert_takes(text);
    config
}

fn refusals(text: &str) -> String {
    Config::from_toml(text).expect_err(text).to_string()
}

/// Asserts that one line of `refusals` has the position, the cause and the remedy.
pub(crate) fn assert_refused(text: &str, refusals: &str, [position, cause, remedy]: [&str; 3]) {
    let fits = |line: &str| line.starts_with(position) && line.contains(cause) && line.contains(remedy);
    let found = refusals.lines().any(fits);
    assert!(found, "{text}\nshould be refused with {position}…{cause}…{remedy}, not with\n{refusals}");
}

#[test]
fn the_sample_is_valid_as_shipped_and_with_everything_switched_on() {
    let shipped = valid(SAMPLE);
    assert_eq!(shipped.warnings(), []);
    assert!(shipped.forwards.is_empty() && shipped.proxies.is_empty() && shipped.metrics.listen.is_none());
    let whole = valid(&switched_on());
    assert_eq!(whole.warnings(), []);
    assert_eq!((whole.forwards.len(), whole.proxies.len()), (2, 1));
    let relay = whole.relay.unwrap();
    assert_eq!(relay.listeners.len(), 3);
    assert_eq!(relay.targets.allow.len(), 2);
    assert_eq!(shipped.policy, Policy::default());
    let classes: Vec<_> = whole.policy.classes.iter().map(|class| (&class.name[..], class.deadline)).collect();
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    let expected = [("realtime-short", seconds(1)), ("freetier-short", seconds(2)), ("long-output", seconds(7))];
    assert_eq!((classes[0], &classes[1..]), (("default", None), &expected[..]));
    assert_eq!((whole.policy.rules.len(), whole.policy.schedules.len()), (5, 2));
}

#[test]
fn two_uplinks_take_fewer_than_ten_lines_as_the_manual_says() {
    let page = include_str!("../../docs/paths.md");
    let block = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let config = valid(block);
    assert!(block.lines().count() < 10, "{block}");
    assert_eq!(config.warnings(), []);
    assert_eq!((config.paths.len(), config.forwards.len()), (2, 1));
}

#[test]
fn the_sample_states_the_real_defaults() {
    let (shipped, whole) = (valid(SAMPLE), valid(&switched_on()));
    assert_eq!(whole.state_dir, shipped.state_dir);
    assert_eq!(whole.transport, TransportSettings::default());
    assert_eq!((whole.log, whole.metrics.users), (shipped.log, shipped.metrics.users));
    assert_eq!(whole.policy.schedule, shipped.policy.schedule);
    assert_eq!(whole.policy.classes[0], shipped.policy.classes[0]);
    let (shipped, whole) = (shipped.relay.unwrap(), whole.relay.unwrap());
    assert_eq!(whole.limits, RelayLimits::default());
    // The limits of users, and expiry dates, are examples.
    let plain = |token: &relay::Token| relay::Token { quota: Default::default(), expires: None, ..token.clone() };
    assert_eq!(whole.tokens.iter().map(plain).collect::<Vec<_>>(), shipped.tokens);
    assert_eq!((whole.drain, whole.workers), (shipped.drain, shipped.workers));
    assert_eq!(whole.proxy_status_name, shipped.proxy_status_name);
    assert_eq!(
        (&whole.targets.udp_ports, &whole.targets.tcp_ports),
        (&shipped.targets.udp_ports, &shipped.targets.tcp_ports)
    );
    assert_eq!(whole.targets.unlisted, shipped.targets.unlisted);
    let addresses = |relay: &RelaySettings| relay.listeners.iter().map(|listener| listener.address).collect::<Vec<_>>();
    assert!(addresses(&shipped).iter().all(|address| addresses(&whole).contains(address)));
}

#[test]
fn the_sample_shows_every_key() {
    let whole = switched_on();
    let with_strays: String = std::iter::once("zzz = 0\n".to_owned())
        .chain(whole.lines().map(|line| match line.starts_with('[') {
            true => format!("{line}\nzzz = 0\n"),
            false => line.replace("{ to", "{ zzz = 0, to") + "\n",
        }))
        .collect();
    let errors = Config::from_toml(&with_strays).unwrap_err();
    let sections: Vec<_> = errors
        .iter()
        .map(|error| match &error.problem {
            Problem::UnknownKey { known, .. } => known,
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(sections.len(), 2 + whole.lines().filter(|line| line.starts_with('[')).count());
    let words: BTreeSet<_> = whole.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    let missing: Vec<_> = sections.into_iter().flatten().filter(|key| !words.contains(**key)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn a_key_that_the_sample_shows_switched_off_in_a_section_that_is_on_has_its_default() {
    let schema: Json = serde_json::from_str(&Config::schema()).unwrap();
    let (mut path, mut shown) = (None, 0);
    for entry in entries() {
        let is_on = SAMPLE.lines().any(|line| line == entry.setting);
        if let Some(head) = entry.setting.strip_prefix('[') {
            path = is_on.then(|| head.trim_matches(['[', ']']).replace("class.default", "class.NAME"));
        } else if let (Some(path), Some((key, value)), false) = (&path, entry.setting.split_once(" = "), is_on) {
            let described = &schema["$defs"][path]["properties"][key];
            assert!(described.is_object(), "{path} has no {key}");
            let default = &described["default"];
            // If there is no default, or an empty one, the sample shows an example.
            if !default.is_null() && *default != json!([]) {
                let value: toml::Table = format!("_ = {value}").parse().unwrap();
                assert_eq!(json!(value["_"]), *default, "{path}: {}", entry.setting);
                shown += 1;
            }
        }
    }
    assert!(shown > 50, "{shown}");
}

#[test]
fn a_listener_takes_what_it_leaves_out_from_the_relay() {
    let text = RELAY.to_owned()
        + "client_ca = \"/ca.pem\"\n[[relay.listener]]\naddress = \"127.0.0.1:1\"\nauth = \"certificate\"\n"
        + "[[relay.listener]]\naddress = \"127.0.0.1:2\"\ncertificate = \"/own.pem\"\nprivate_key = \"/own.key\"\n";
    let identity = |certificate: &str, private_key: &str| ListenerIdentity::Files {
        certificate: certificate.into(),
        private_key: private_key.into(),
    };
    let listener = |port, identity, auth| ListenerSettings {
        address: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
        identity,
        client_ca: Some("/ca.pem".into()),
        client_crl: None,
        auth,
        class: None,
        schedule: None,
    };
    let expected = [
        listener(1, identity("/c.pem", "/k.pem"), Auth::Certificate),
        listener(2, identity("/own.pem", "/own.key"), Auth::None),
    ];
    assert_eq!(valid(&text).relay.unwrap().listeners, expected);
    // A revocation list comes with its authority.
    let revoked = |text: &str| valid(text).relay.unwrap().listeners.into_iter().map(|of| of.client_crl);
    let listed = text.replacen("client_ca = \"/ca.pem\"", "client_ca = \"/ca.pem\"\nclient_crl = \"/crl.pem\"", 1);
    assert!(revoked(&listed).all(|file| file == Some("/crl.pem".into())));
    let other = listed.replace("127.0.0.1:1\"", "127.0.0.1:1\"\nclient_ca = \"/other.pem\"");
    assert!(revoked(&other).eq([None, Some("/crl.pem".into())]));
    assert!(refusals(&(RELAY.to_owned() + "client_crl = \"/crl.pem\"")).contains("add client_ca"));
    let half = text.replace("private_key = \"/own.key\"\n", "");
    assert!(refusals(&half).contains("relay.listener.private_key: missing"));
}

#[test]
fn a_listener_is_of_its_own_class_or_the_relays_and_of_none_that_the_policy_lacks() {
    let text = RELAY.to_owned()
        + "class = \"bulk\"\n[[relay.listener]]\naddress = \"127.0.0.1:1\"\nclass = \"voice\"\n"
        + "[[relay.listener]]\naddress = \"127.0.0.1:2\"\n[class.voice]\n[class.bulk]\n";
    let config = valid(&text);
    let classes: Vec<_> =
        config.relay.iter().flat_map(|relay| &relay.listeners).map(|of| of.class.as_deref()).collect();
    assert_eq!(classes, [Some("voice"), Some("bulk")]);
    assert!(
        explain(&config, std::time::UNIX_EPOCH)
            .contains("127.0.0.1:1 (UDP) with certificate /c.pem, open to all clients, class voice\n")
    );
    let wrong = text.replace("class = \"voice\"", "class = \"vioce\"");
    let refusals = refusals(&wrong);
    assert!(refusals.contains("relay.listener.class: there is no \"vioce\"; did you mean voice?"), "{refusals}");
}

#[test]
fn ports_are_numbers_in_any_radix_or_ranges_in_quotes() {
    let text = RELAY.to_owned() + "[relay.targets]\nudp_ports = [0x35, 443, \"8000-8099\"]\ntcp_ports = []\n";
    let targets = valid(&text).relay.unwrap().targets;
    assert_eq!(targets.udp_ports, Ports(vec![53..=53, 443..=443, 8000..=8099]));
    assert_eq!((targets.tcp_ports.contains(443), targets.tcp_ports.to_string().as_str()), (false, "none"));
}

#[test]
fn a_forward_is_read_as_written() {
    let text = FORWARD.to_owned()
        + "class = \"default\"\nmode = \"stream\"\ncertificate_sha256 = \""
        + &"Ab:".repeat(31)
        + "01\"\n";
    let forward = &valid(&text).forwards[0];
    let mut hash = [0xab; 32];
    hash[31] = 1;
    assert_eq!((&forward.uplink.trust, forward.mode), (&TrustSource::Pinned(hash), TunnelMode::Stream));
    assert_eq!((forward.target.to_string().as_str(), forward.class.as_deref()), ("dns.example:53", Some("default")));
    assert!(refusals(&(text + "ca = \"/ca.pem\"")).contains("keep one of them"));
    let both = valid(&(FORWARD.to_owned() + FORWARD + "protocol = \"tcp\"\n")).forwards;
    let idle: Vec<_> = both.iter().map(|forward| forward.idle.as_secs()).collect();
    assert_eq!(idle, [120, 7_440], "the same address serves both protocols, each in its own way");
}

#[test]
fn a_forward_may_have_several_relays_in_the_order_of_preference() {
    let relay = |name: &str| format!("\"https://{name}/m/{{target_host}}/{{target_port}}/\"");
    let with = |relays: &str| FORWARD.replace(&relay("relay.example"), relays);
    let two = format!("[{}, {}]", relay("one.example"), relay("two.example:8443"));
    assert_eq!(valid(&with(&two)).forwards[0].uplink.through(), "one.example:443, or else two.example:8443");
    let serve =
        |rest: &str| valid(&format!("[[serve]]\nlisten = \"127.0.0.1:1\"\nrelay = {two}\n{rest}")).serves[0].through();
    assert_eq!(serve("balance = true"), "one.example:443 and two.example:8443");
    assert_eq!(serve("balance = false"), "one.example:443, or else two.example:8443");
    let many = vec![relay("one.example"); 9].join(", ");
    assert!(refusals(&with(&format!("[{many}]"))).contains("more than 8 relays"));
    assert!(refusals(&with("[]")).contains("relay"));
    assert!(refusals(&FORWARD.replace("relay = ", "#")).contains("relay"));
}

#[test]
fn an_edge_has_at_most_8_paths() {
    let paths = |count: usize| {
        let path = |number| format!("[[path]]\nname = \"p{number}\"\ninterface = \"eth{number}\"\n");
        format!("{FORWARD}{}", (0..count).map(path).collect::<String>())
    };
    assert_eq!(valid(&paths(8)).paths.len(), 8);
    assert!(refusals(&paths(9)).contains("more than 8 paths"));
}

#[test]
fn senders_that_got_their_answers_leave_sooner_toward_well_known_ports() {
    let answered = |text: &str| valid(text).forwards[0].idle_answered.as_secs();
    assert_eq!(answered(FORWARD), 10);
    assert_eq!(answered(&FORWARD.replace(":53\"", ":5683\"")), 120);
    assert_eq!(answered(&format!("{FORWARD}idle_seconds = 4")), 4);
    assert_eq!(answered(&format!("{FORWARD}idle_answered_seconds = 3")), 3);
    let shown = |text: &str| explain(&valid(text), std::time::SystemTime::UNIX_EPOCH);
    assert!(shown(FORWARD).contains("silent for 120s at most, 10s once answered\n"), "{}", shown(FORWARD));
    let tcp = shown(&format!("{FORWARD}protocol = \"tcp\""));
    assert!(tcp.contains("silent for 7440s at most\n"), "{tcp}");
}

#[test]
fn settings_that_may_be_unintended_cause_warnings() {
    let warnings = |text: &str| valid(text).warnings();
    assert_eq!(warnings(""), [Warning::NothingToDo]);
    let address = "192.0.2.1:443".parse().unwrap();
    let relay = RELAY.to_owned() + "listen = [\"192.0.2.1:443\", \"127.0.0.1:443\"]\n";
    assert_eq!(warnings(&relay), [Warning::OpenRelay(address)]);
    let with_ca = relay + "client_ca = \"/ca.pem\"\n";
    assert!(warnings(&with_ca).contains(&Warning::UnusedClientCa));
    let rules = FORWARD.to_owned() + &"[[rule]]\nclass = \"default\"\n".repeat(2);
    assert_eq!(warnings(&rules), [Warning::UnreachedRule { rule: 2, behind: 1 }]);
    let users = RELAY.to_owned()
        + "listen = [\"127.0.0.1:443\"]\n[[relay.token]]\nname = \"alice\"\nsha256 = \""
        + &"0".repeat(64)
        + "\"\n[[rule]]\nclass = \"default\"\nuser = [\"alice\", \"alcie\"]";
    let unknown = Warning::UnknownUser { rule: 1, user: "alcie".into() };
    assert_eq!(warnings(&users), [Warning::UnusedTokens, unknown.clone()]);
    let accepted = users.replace("auth = \"none\"", "auth = \"token\"");
    assert_eq!(warnings(&accepted), [unknown]);
    let public = FORWARD.replace("127.0.0.1:5353", "192.0.2.1:443") + "[metrics]\nlisten = \"192.0.2.1:443\"";
    assert_eq!(warnings(&public), [Warning::PublicForward(address), Warning::PublicMetrics(address)]);
    let public = PROXY.replace("127.0.0.1:1080", "192.0.2.1:443") + "allow_remote = true\n";
    assert_eq!(warnings(&public), [Warning::OpenProxy(address)]);
    assert_eq!(warnings(&(public + "users_file = \"/users\"")), [Warning::PlainProxy(address)]);
}

#[test]
fn paths_that_are_the_same_way_cause_a_warning() {
    let paths = |other: &str| {
        let path = |name: &str, keys: &str| format!("[[path]]\nname = \"{name}\"\ninterface = \"eth0\"\n{keys}\n");
        valid(&format!("{FORWARD}{}{}", path("dsl", ""), path("lte", other))).warnings()
    };
    let same = [Warning::SameWay { one: "dsl".into(), other: "lte".into() }];
    assert_eq!([paths(""), paths("cost_ms = 9\nrate = \"1 Mbit/s\"")], [same.clone(), same]);
    assert_eq!(paths("address = \"192.0.2.1\""), []);
    assert_eq!(paths("relay = \"https://other.example/{target_host}/{target_port}/\""), []);
}

#[test]
fn development_needs_no_file_and_no_warning() {
    let config = Config::development("/tmp/state".into());
    assert_eq!(config.warnings(), []);
    let relay = config.relay.as_ref().unwrap();
    assert_eq!(
        relay.templates[0].to_string(),
        "https://localhost:4433/.well-known/masque/udp/{target_host}/{target_port}/"
    );
    for (ip, port) in [("127.0.0.1", 7), ("127.9.9.9", 40_000), ("::1", 1), ("::ffff:127.0.0.1", 7)] {
        assert_eq!(relay.targets.check(crate::targets::Protocol::Udp, None, ip.parse().unwrap(), port, true), Ok(()));
    }
}

#[test]
fn the_explanation_names_what_is_served_to_whom_and_every_warning() {
    let text = switched_on() + &FORWARD.replace("127.0.0.1:5353", "192.0.2.7:53");
    let config = Config::from_toml(&text.replace("level = \"info\"", "")).unwrap();
    let explained = explain(&config, std::time::SystemTime::UNIX_EPOCH);
    for part in [
        "listens on 192.0.2.1:8443 (UDP) with certificate /etc/paced/internal.pem, clients show a certificate",
        "serves https://relay.example/",
        "admits example by token, with up to 4096 tunnels, 500 GB a month, up at most 20 Mbit/s, \
         down at most 100 Mbit/s, up at most 20000 packets a second, down at most 20000 packets a second, \
         100 requests a second, until 2027-01-31T00:00:00Z (20849 days left)\n",
        "admits branch-office by certificate for branch.example.org",
        "in messages of up to 125µs (1ms on a device without fq)",
        "targets allowed: 10.1.0.0/16; *.internal.example udp port 53, 8000-8099",
        "limits: 10000 connections",
        "forward 127.0.0.1:5353 (UDP) to dns.example:53 through relay.example:443 via first, mode auto, class",
        "hop first by first.example:443 via entry, trusts the authorities in /etc/paced/relay-ca.pem, shows a token",
        "forward 127.0.0.1:8080 (TCP) to web.example:80 through relay.example:443, up to 512 connections at once",
        "proxy 127.0.0.1:1080 (socks5, http, in ranges from 8388608 bytes) through relay.example:443 via first, users in /etc/paced/proxy.users, up to 512",
        "  key of chat-frontend, for rules, until 2027-01-31T00:00:00Z (20849 days left)\n",
        "policy: the high level by deadline, then the low one each in turn; packets committed ahead: adapted",
        "class default: level low, priority 159 (by signal 0 to 159), weight 1, drops the oldest when full\n",
        "class realtime-short: level high, priority 255 (by signal 0 to 255), weight 1, deadline 1s, \
         by signal 500ms or longer, drops after 200ms, DSCP 46\n",
        "class long-output: level low, priority 159 (by signal 0 to 159), weight 1, deadline 7s, \
         by signal 7s or longer, drops by CoDel (target 5ms, interval 100ms), up at most 20 Mbit/s, \
         down at most 200 Mbit/s, up at most 20000 packets a second, down at most 200000 packets a second\n",
        "rule 1: realtime-short for user example or branch-office, targets 10.1.2.0/24; *.chat.example, \
         port 443, 8000-8099, udp, listener 192.0.2.1:8443\n",
        "rule 3: long-output for targets *.batch.example\n",
        "metrics: http://127.0.0.1:9433/metrics",
        "warning: anyone who can reach 192.0.2.7:53 can use this forward",
    ] {
        assert!(explained.contains(part), "{part:?} is not in\n{explained}");
    }
    // Only payloads of UDP have answers.
    for forward in explained.lines().filter(|line| line.starts_with("forward ")) {
        assert_eq!(forward.contains(" once answered"), forward.contains(" (UDP) "), "{forward}");
    }
}

proptest! {
    #[test]
    fn random_text_is_answered_without_a_panic(text in "\\PC*") {
        let _ = Config::from_toml(&text);
    }

    #[test]
    fn a_sample_cut_and_scrambled_is_answered_without_a_panic(
        cuts in prop::collection::vec((0..200usize, prop::sample::select(vec!["", "=", "[", "\"", "{ ü = 1 }", "-1", "\n"])), 1..6),
    ) {
        let whole = switched_on();
        let mut lines: Vec<_> = whole.lines().map(str::to_owned).collect();
        for (at, with) in cuts {
            let at = at % lines.len();
            let half = lines[at].len() / 2;
            lines[at].replace_range(half.., with);
        }
        let text = lines.join("\n");
        let lines = text.split('\n').count();
        if let Err(errors) = Config::from_toml(&text).inspect(|_| CONFIG.assert_takes(&text)) {
            let positions: Vec<_> = errors.iter().map(|error| (error.line, error.column)).collect();
            prop_assert!(!positions.is_empty() && positions.is_sorted());
            prop_assert!(positions.iter().all(|(line, column)| (1..=lines).contains(line) && *column >= 1));
        }
    }
}

#[test]
fn a_configuration_that_is_written_out_reads_back_as_the_same_and_names_every_key_that_has_a_value() {
    for config in [valid(&switched_on()), valid(SAMPLE), valid("")] {
        let text = config.to_toml();
        assert_eq!(format!("{:?}", valid(&text)), format!("{config:?}"), "{text}");
    }
    let text = valid(&switched_on()).to_toml();
    let words: BTreeSet<_> = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    let sample = switched_on();
    let keys = sample.lines().filter_map(|line| line.split_once(" = ")).map(|(key, _)| key);
    // Keys that listeners and classes took from elsewhere are written as their own.
    let elsewhere = ["listen", "like", "target_ms", "interval_ms"];
    let missing: Vec<_> =
        keys.filter(|key| !key.starts_with('#') && !words.contains(key) && !elsewhere.contains(key)).collect();
    assert!(missing.is_empty(), "{missing:?} in\n{text}");
}

#[test]
fn a_user_has_one_quota_whose_volumes_and_dates_read_back_as_they_are_written() {
    let token = |name: &str, digit: char, more: &str| {
        let hash: String = std::iter::repeat_n(digit, 64).collect();
        format!("[[relay.token]]\nname = \"{name}\"\nsha256 = \"{hash}\"\n{more}\n")
    };
    let rich = "monthly_quota = \"1500 GB\"\nrate_up = \"1 Mbit/s\"\npackets_down = 7\nrequests_per_second = 9\nexpires = \"2027-01-31T12:00:00+02:00\"";
    let text = RELAY.to_owned()
        + &token("a", '1', rich)
        + &token("a", '2', &rich.replace("2027", "2028"))
        + &token("b", '3', "");
    let config = valid(&text);
    let relay = config.relay.as_ref().unwrap();
    assert_eq!(relay.quotas()["a"].monthly_bytes, Some(1_500_000_000_000));
    assert_eq!(relay.quotas()["a"].requests_per_second, Some(9));
    assert_eq!(relay.quotas()["b"], quota::Quota::default());
    let shown = explain(&config, std::time::SystemTime::UNIX_EPOCH);
    assert!(shown.contains("7 packets a second, 9 requests a second"), "{shown}");
    let again = valid(&config.to_toml()).relay.unwrap();
    assert_eq!(again.tokens, relay.tokens);

    let wrong = RELAY.to_owned() + &token("a", '1', rich) + &token("a", '2', "");
    assert_refused(&wrong, &refusals(&wrong), ["line ", "different quotas", "the same in both"]);
    for (value, remedy) in
        [("\"1 KB\"", "500 GB"), ("\"0 GB\"", "1 MB"), ("\"1.5 TB\"", "whole number"), ("5", "500 GB")]
    {
        let wrong = RELAY.to_owned() + &token("a", '1', &format!("monthly_quota = {value}"));
        assert_refused(&wrong, &refusals(&wrong), ["line 9", "does not fit", remedy]);
    }
    let wrong = RELAY.to_owned() + &token("a", '1', "expires = 2027-01-31");
    assert_refused(&wrong, &refusals(&wrong), ["line 9", "", "in quotes"]);
}

#[test]
fn the_explanation_names_paths_placements_and_writers() {
    let forward = "[[forward]]\nlisten = \"127.0.0.1:1\"\ntarget = \"a.example:2\"\n\
                   relay = \"https://relay.example/{target_host}/{target_port}/\"\n";
    let paths = "[[path]]\nname = \"wan\"\ninterface = \"eth0\"\n\
                 [[path]]\nname = \"lte\"\naddress = \"192.0.2.1\"\ncost_ms = 50\nrate = \"20 Mbit/s\"\n\
                 relay = \"https://other.example/{target_host}/{target_port}/\"\n\
                 [class.voice]\nplacement = \"lowest-rtt\"\n[class.bulk]\n\
                 [control]\nbus = \"system\"\nwriters = [\"ops\"]\n";
    let shown = explain(&valid(&(forward.to_owned() + paths)), std::time::SystemTime::UNIX_EPOCH);
    for line in [
        "path wan: over eth0\n",
        "path lte: from 192.0.2.1, to other.example:443, only if it ends a transfer at least 50ms earlier, with 20 Mbit/s\n",
        ", placement lowest-rtt\n",
        "; policy is written by root, the daemon's user, ops, users that polkit allows (D-Bus)\n",
    ] {
        assert!(shown.contains(line), "{line}: {shown}");
    }
    assert_eq!(shown.matches("placement").count(), 1, "{shown}");
}

#[test]
fn a_gateway_with_a_listener_of_its_own_needs_no_relay() {
    let own = "[[gateway.listener]]\naddress = \"127.0.0.1:8100\"\ntls = false\n\
               [[gateway.model]]\nname = \"a\"\nengines = [\"http://127.0.0.1:8000\"]\n";
    let config = valid(own);
    assert_eq!(config.warnings(), []);
    assert_eq!(valid(&config.to_toml()).gateway, config.gateway);
    let key = format!("[[gateway.key]]\nname = \"ann\"\nsha256 = \"{}\"\n", "0".repeat(64));
    let rule = |user: &str| format!("{own}{key}[[rule]]\nclass = \"default\"\nuser = \"{user}\"");
    assert_eq!(valid(&rule("ann")).warnings(), []);
    assert_eq!(valid(&rule("bob")).warnings(), [Warning::UnknownUser { rule: 1, user: "bob".into() }]);
    let files = "certificate = \"/a.pem\"\nprivate_key = \"/a.key\"\n[[gateway.key]]\n";
    let remote = own.replace("tls = false", files).replace("127.0.0.1:8100", "192.0.2.1:8443");
    let remote = remote.replace("[[gateway.key]]\n", &key);
    assert!(valid(&remote).gateway.unwrap().listeners[0].identity.is_some());
}

#[test]
fn rules_of_an_edge_may_name_the_keys_of_its_clients() {
    let serve = PROXY.replace("[[proxy]]", "[[serve]]");
    let key = format!("[[serve.key]]\nname = \"ann\"\nsha256 = \"{}\"\nexpires = \"2027-01-31\"\n", "0".repeat(64));
    let rule = |user: &str| format!("[[rule]]\nclass = \"default\"\nuser = \"{user}\"\n");
    let config = valid(&format!("{serve}{key}{}", rule("ann")));
    assert_eq!((config.serves[0].keys.len(), &config.serves[0].keys[0].name[..]), (1, "ann"));
    assert_eq!(valid(&config.to_toml()).serves, config.serves);
    assert_eq!(config.warnings(), []);
    let unknown = [Warning::UnknownUser { rule: 1, user: "bob".into() }];
    assert_eq!(valid(&format!("{serve}{key}{}", rule("bob"))).warnings(), unknown);
    assert_eq!(valid(&format!("{serve}{}", rule("bob"))).warnings(), [], "users of an edge without keys are unknown");
}
