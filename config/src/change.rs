//! What a change of each key requires while paced runs: a reload or a restart.
//!
//! Every field of a [`Config`] and of its structs has a row here; a field without one does not compile. A reload names
//! and refuses changes that require a restart, and applies the rest.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use crate::{
    Config,
    control::ControlSettings,
    kernel::Kernel,
    policy::Policy,
    relay::{ListenerSettings, RelayLimits, RelaySettings, StrangerLimits},
    transport::TransportSettings,
};

/// What a change of a key requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// A reload.
    Reload,
    /// A restart: a reload refuses it.
    Restart,
}

/// Keys that set the same field, or parts of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeRow {
    /// Their paths; the path of a section with `.*` at the end covers all keys in it and in the sections below.
    pub keys: &'static [&'static str],
    /// What a change of them requires.
    pub takes: Takes,
    /// Whether two configurations differ in it.
    pub has_changed: bool,
}

/// Keys that changed and require a restart. Displays as the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct TakesRestart(pub Vec<&'static str>);

impl fmt::Display for TakesRestart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (require, values) = if self.0.len() == 1 { ("requires", "value") } else { ("require", "values") };
        write!(f, "a change of {} {require} a restart; restart paced, or restore the old {values}", self.0.join(", "))
    }
}

/// Makes the rows of a struct's fields from pairs of such structs, old and new. Fields listed after `within` have their
/// own rows elsewhere.
macro_rules! rows {
    ($pairs:expr, $type:ident within [$($inner:ident),*] {
        $($field:ident: $takes:ident [$($key:expr),+],)*
    }) => {{
        // Does not compile unless all fields are named.
        let _ = |of: &$type| {
            let $type { $($field: _,)* $($inner: _,)* } = of;
        };
        let pairs: &[(&$type, &$type)] = $pairs;
        [$(ChangeRow {
            keys: &[$($key),+],
            takes: Takes::$takes,
            has_changed: pairs.iter().any(|(old, new)| old.$field != new.$field),
        }),*]
    }};
}

impl Config {
    /// Checks that no key that requires a restart differs between this configuration and `new`.
    ///
    /// # Errors
    /// The keys that do.
    pub fn to_reload(&self, new: &Self) -> Result<(), TakesRestart> {
        let rows = rows(self, new).into_iter();
        let refused = rows.filter(|row| row.has_changed && row.takes == Takes::Restart);
        // The first path is the more usual one.
        let refused: Vec<_> = refused.filter_map(|row| row.keys.first().copied()).collect();
        if refused.is_empty() { Ok(()) } else { Err(TakesRestart(refused)) }
    }
}

/// Returns the sections of the policy that differ, each once: the schedule or the class by its name, and all rules as one.
#[must_use]
pub fn policy_sections(old: &Policy, new: &Policy) -> Vec<String> {
    let mut changed = Vec::new();
    if old.schedule != new.schedule {
        changed.push("schedule".to_owned());
    }
    let schedules: BTreeSet<_> = old.schedules.keys().chain(new.schedules.keys()).collect();
    let schedules = schedules.into_iter().filter(|name| old.schedules.get(*name) != new.schedules.get(*name));
    changed.extend(schedules.map(|name| format!("schedule.{name}")));
    let classes = |of: &'_ Policy| of.classes.iter().map(|class| (class.name.clone(), class.clone())).collect();
    let (before, after): (BTreeMap<_, _>, BTreeMap<_, _>) = (classes(old), classes(new));
    let names: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let names = names.into_iter().filter(|name| before.get(*name) != after.get(*name));
    changed.extend(names.map(|name| format!("class.{name}")));
    if old.rules != new.rules {
        changed.push("rule".to_owned());
    }
    changed
}

/// The first key of the row of the policy.
pub const POLICY: &str = "schedule.*";

/// Compares two configurations, key by key.
#[must_use]
pub fn rows(old: &Config, new: &Config) -> Vec<ChangeRow> {
    let mut rows = rows!(&[(old, new)], Config within [relay, transport, kernel, control] {
        state_dir: Restart ["state_dir"],
        forwards: Reload ["forward.*"],
        proxies: Reload ["proxy.*"],
        serves: Reload ["serve.*"],
        paths: Reload ["path.*"],
        hops: Reload ["hop.*"],
        gateway: Reload ["gateway.*"],
        policy: Reload [POLICY, "class.*", "rule.*"],
        metrics: Reload ["metrics.*"],
        log: Reload ["log.*"],
    })
    .to_vec();
    rows.extend(rows!(&[(&old.transport, &new.transport)], TransportSettings within [] {
        initial_mtu: Restart ["transport.initial_mtu"],
        max_mtu: Restart ["transport.max_mtu"],
        congestion: Restart ["transport.congestion"],
        keep_alive: Restart ["transport.keep_alive_seconds"],
        io: Restart ["transport.io"],
        quantum: Restart ["transport.quantum_us"],
        min_paced_rtt: Restart ["transport.min_paced_rtt_us"],
        coalesce: Restart ["transport.coalesce_us"],
        busy_poll: Restart ["transport.busy_poll_us"],
    }));
    rows.extend(rows!(&[(&old.kernel, &new.kernel)], Kernel within [] {
        devices: Restart ["kernel.devices"],
        egress: Restart ["kernel.egress"],
        ingress: Restart ["kernel.ingress"],
        manage_qdisc: Restart ["kernel.manage_qdisc"],
        mark_tag: Restart ["kernel.mark_tag"],
        initials_per_second_from_prefix: Reload ["kernel.initials_per_second_from_prefix"],
        initials_per_second: Reload ["kernel.initials_per_second"],
        fragments_per_second: Reload ["kernel.fragments_per_second"],
        arrivals_per_second: Reload ["kernel.arrivals_per_second"],
    }));
    rows.extend(rows!(&[(&old.control, &new.control)], ControlSettings within [] {
        socket: Reload ["control.enabled", "control.socket"],
        tcp: Reload ["control.tcp.*"],
        bus: Reload ["control.bus"],
        writers: Reload ["control.writers"],
    }));
    rows.extend(relay(old.relay.as_ref(), new.relay.as_ref()));
    rows
}

fn relay(old: Option<&RelaySettings>, new: Option<&RelaySettings>) -> Vec<ChangeRow> {
    let pair: Vec<_> = old.zip(new).into_iter().collect();
    let addresses = |relay: Option<&RelaySettings>| -> Option<Vec<_>> {
        relay.map(|relay| relay.listeners.iter().map(|listener| listener.address).collect())
    };
    let row = |keys, has_changed| ChangeRow { keys, takes: Takes::Restart, has_changed };
    let mut rows = vec![
        row(&["[relay]"], old.is_some() != new.is_some()),
        row(&["relay.listen", "relay.listener.address"], !pair.is_empty() && addresses(old) != addresses(new)),
    ];
    rows.extend(rows!(&pair, RelaySettings within [listeners, limits] {
        templates: Reload ["relay.templates"],
        proxy_status_name: Reload ["relay.proxy_status_name"],
        drain: Reload ["relay.drain_seconds"],
        workers: Restart ["relay.workers"],
        source_addresses: Reload ["relay.source_addresses"],
        tokens: Reload ["relay.token.*"],
        certificates: Reload ["relay.client_certificate.*"],
        targets: Reload ["relay.targets.*"],
    }));
    let limits: Vec<_> = pair.iter().map(|(old, new)| (&old.limits, &new.limits)).collect();
    rows.extend(rows!(&limits, RelayLimits within [strangers] {
        connections: Restart ["relay.limits.connections"],
        connections_per_user: Reload ["relay.limits.connections_per_user"],
        handshakes_in_flight: Restart ["relay.limits.handshakes_in_flight"],
        tunnels_per_connection: Restart ["relay.limits.tunnels_per_connection"],
        tunnels_per_user: Reload ["relay.limits.tunnels_per_user"],
        requests_per_second: Reload ["relay.limits.requests_per_second"],
        frames_per_second: Reload ["relay.limits.frames_per_second"],
        queue_bytes_per_tunnel: Restart ["relay.limits.queue_bytes_per_tunnel"],
        queue_bytes_per_connection: Restart ["relay.limits.queue_bytes_per_connection"],
        tunnel_idle: Reload ["relay.limits.tunnel_idle_seconds"],
        connection_idle: Restart ["relay.limits.connection_idle_seconds"],
        dns_lookups_in_flight: Restart ["relay.limits.dns_lookups_in_flight"],
        dns_timeout: Restart ["relay.limits.dns_timeout_ms"],
        connect_timeout: Reload ["relay.limits.connect_timeout_ms"],
        field_section_bytes: Reload ["relay.limits.field_section_bytes"],
        udp_buffer_bytes: Reload ["relay.limits.udp_buffer_bytes"],
    }));
    let strangers: Vec<_> = limits.iter().map(|(old, new)| (&old.strangers, &new.strangers)).collect();
    rows.extend(rows!(&strangers, StrangerLimits within [] {
        percent: Restart ["relay.limits.strangers_percent"],
        per_prefix: Restart ["relay.limits.strangers_per_prefix"],
        time: Restart ["relay.limits.stranger_seconds"],
        packets: Restart ["relay.limits.stranger_packets"],
        bytes: Restart ["relay.limits.stranger_bytes"],
        requests: Restart ["relay.limits.stranger_requests"],
        refusals: Restart ["relay.limits.stranger_refusals"],
    }));
    let of_same_address =
        |(old, new): &(&'_ RelaySettings, &'_ RelaySettings)| -> Vec<(ListenerSettings, ListenerSettings)> {
            let same =
                |listener: &ListenerSettings| new.listeners.iter().find(|new| new.address == listener.address).cloned();
            old.listeners.iter().filter_map(|listener| Some((listener.clone(), same(listener)?))).collect()
        };
    let listeners: Vec<_> = pair.iter().flat_map(of_same_address).collect();
    let listeners: Vec<_> = listeners.iter().map(|(old, new)| (old, new)).collect();
    rows.extend(rows!(&listeners, ListenerSettings within [address] {
        identity: Reload [
            "relay.certificate", "relay.private_key", "relay.listener.certificate", "relay.listener.private_key"
        ],
        client_ca: Reload ["relay.client_ca", "relay.listener.client_ca"],
        client_crl: Reload ["relay.client_crl", "relay.listener.client_crl"],
        auth: Reload ["relay.auth", "relay.listener.auth"],
        class: Reload ["relay.class", "relay.listener.class"],
        schedule: Reload ["relay.schedule", "relay.listener.schedule"],
    }));
    rows
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;
    use toml::{Table, Value};

    use super::*;
    use crate::{
        sample::switched_on,
        schema::tests::{CONFIG, Step, borders, changed, probes, subjects},
    };

    /// A document in which every table occurs, its configuration, and the rows of that.
    fn whole() -> (Table, Config, Vec<ChangeRow>) {
        let [(_, document), _] = subjects();
        let config = Config::from_toml(&document.to_string()).unwrap();
        let rows = rows(&config, &config);
        (document, config, rows)
    }

    fn covers(row: &ChangeRow, path: &str) -> bool {
        row.keys.iter().any(|key| match key.strip_suffix(".*") {
            Some(section) => path.strip_prefix(section).is_some_and(|rest| rest.starts_with('.')),
            None => *key == path,
        })
    }

    /// Returns the path of each key that is not a section, and whether its row changes with some other valid value of it, if necessary
    /// together with other keys.
    fn changes() -> BTreeMap<String, bool> {
        let (document, _, same) = whole();
        let template = "https://a.example/{target_host}/{target_port}/";
        let more = [
            false.into(),
            "default".into(),
            "shares".into(),
            "low".into(),
            "127.0.0.1:9".into(),
            vec![template].into(),
            vec!["small"].into(),
            vec!["https://127.0.0.1:9"].into(),
            // As many as there are GPUs.
            vec!["https://127.0.0.1:9", "http://127.0.0.1:10"].into(),
        ];
        let mut found = BTreeMap::new();
        CONFIG.each_table(&document, &mut |steps, table| {
            let document = CONFIG.section(&document, steps);
            let before = Config::from_toml(&document.to_string()).unwrap();
            let name = |step: &Step| if let Step::Key(key) = step { Some(key.clone()) } else { None };
            let section: Vec<_> = steps.iter().filter_map(name).collect();
            let properties = table["properties"].as_object().unwrap();
            for (key, schema) in properties {
                let is_section = [schema, &schema["items"]].iter().any(|schema| schema.get("$ref").is_some());
                if is_section || schema.get("patternProperties").is_some() {
                    continue;
                }
                let path = section.iter().chain([key]).cloned().collect::<Vec<_>>().join(".");
                let of_path = same.iter().find(|row| covers(row, &path)).map(|row| row.keys[0]);
                let values = probes().into_iter().chain(borders(schema)).chain(more.clone());
                let values: Vec<_> = values.map(Some).chain([None]).collect();
                let shows = |prepare: &dyn Fn(&mut Table)| {
                    let other = |value: &Option<Value>| {
                        let text = changed(&document, steps, |table| {
                            prepare(table);
                            table.remove(key);
                            table.extend(value.clone().map(|value| (key.clone(), value)));
                        });
                        Config::from_toml(&text.to_string()).ok()
                    };
                    let differing = values.iter().filter_map(other).flat_map(|after| rows(&before, &after));
                    differing.filter(|row| row.has_changed).any(|row| of_path == Some(row.keys[0]))
                };
                let mut neighbours = properties.iter().flat_map(|(neighbour, schema)| {
                    let words = schema["enum"].as_array().into_iter().flatten().filter_map(Json::as_str);
                    words.map(move |word| (neighbour, word))
                });
                // Some values are invalid beside another key in the document, and some keys need another value of a neighbouring key.
                let is_seen = shows(&|_| {})
                    || shows(&Table::clear)
                    || neighbours
                        .any(|(neighbour, word)| shows(&|table| _ = table.insert(neighbour.clone(), word.into())));
                found.insert(path, is_seen);
            }
        });
        found
    }

    #[test]
    fn sections_of_a_policy_that_differ_are_named_and_no_others() {
        let policy = |text: &str| Policy::from_toml(text).unwrap();
        let before = policy("[schedule.a]\ndiscipline = \"wfq\"\n[class.one]\n[class.two]\nweight = 2\n");
        for (text, changed) in [
            ("[schedule.a]\ndiscipline = \"wfq\"\n[class.two]\nweight = 2\n[class.one]\n", &[][..]),
            (
                "[schedule.b]\ndiscipline = \"wfq\"\n[class.one]\n[class.two]\nweight = 3\n",
                &["schedule.a", "schedule.b", "class.two"],
            ),
            (
                "[schedule.a]\ndiscipline = \"wfq\"\n[class.one]\n[class.three]\n[[rule]]\nclass = \"one\"\n",
                &["class.three", "class.two", "rule"],
            ),
        ] {
            assert_eq!(policy_sections(&before, &policy(text)), changed, "{text}");
        }
    }

    #[test]
    fn every_key_has_one_row_and_a_change_of_its_value_is_a_change_of_that() {
        let (_, _, table) = whole();
        let changes = changes();
        assert!(changes.len() > 80, "{}", changes.len());
        let mut unseen = Vec::new();
        for (path, is_seen) in changes {
            let rows: Vec<_> = table.iter().filter(|row| covers(row, &path)).collect();
            assert_eq!(rows.len(), 1, "{path} has the rows {rows:?}");
            // The exceptions: `certificate_sha256` stands in for `ca`, which is in the document; `allow_remote` permits
            // another key's value; the name of a model is used elsewhere; and `tls` is refused beside a certificate.
            let is_tied = [".certificate_sha256", ".allow_remote", "gateway.model.name", "gateway.listener.tls"];
            if !is_tied.iter().any(|tied| path.ends_with(tied)) && !is_seen {
                unseen.push(path);
            }
        }
        assert!(unseen.is_empty(), "{unseen:?}");
    }

    #[test]
    fn a_change_that_requires_a_restart_is_refused_by_its_key_and_no_other_change_is() {
        let (_, before, _) = whole();
        let after = |from: &str, to: &str| {
            let text = switched_on();
            assert!(text.contains(from), "{from}");
            Config::from_toml(&text.replace(from, to)).unwrap()
        };
        for (from, to, keys) in [
            ("\"127.0.0.1:5353\"", "\"127.0.0.1:5354\"", &[][..]),
            ("level = \"info\"", "level = \"debug\"", &[]),
            ("auth = \"certificate\"", "auth = \"token\"", &[]),
            ("workers = 1", "workers = 2", &["relay.workers"]),
            ("192.0.2.1:8443", "192.0.2.1:8444", &["relay.listen"]),
            ("_mtu = 1", "_mtu = 2", &["transport.initial_mtu", "transport.max_mtu"]),
        ] {
            let refused = before.to_reload(&after(from, to)).err().map_or_else(Vec::new, |TakesRestart(keys)| keys);
            assert_eq!(refused, keys, "{from} -> {to}");
        }
        let without_relay = Config::from_toml("").unwrap();
        let refused = before.to_reload(&without_relay).unwrap_err();
        assert!(refused.0.contains(&"[relay]"), "{refused}");
        assert!(without_relay.to_reload(&before).unwrap_err().to_string().contains("[relay]"));
    }

    #[test]
    fn the_readers_table_says_of_each_key_what_its_change_takes() {
        let (_, _, table) = whole();
        let expected: BTreeMap<_, _> =
            table.iter().flat_map(|row| row.keys.iter().map(|key| ((*key).to_owned(), row.takes))).collect();
        let page = include_str!("../../docs/running-a-relay.md");
        let (_, after) = page.split_once("| keys | take |").expect("there is a table of keys");
        let (lines, _) = after.split_once("\n\n").expect("the table ends");
        let mut told = BTreeMap::new();
        for line in lines.lines().skip(2) {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            let takes = match cells[2] {
                "reload" => Takes::Reload,
                "restart" => Takes::Restart,
                other => panic!("{other}"),
            };
            let keys = cells[1].split(", ").map(|key| key.trim_matches('`').to_owned());
            keys.for_each(|key| assert_eq!(told.insert(key.clone(), takes), None, "{key} is told twice"));
        }
        assert_eq!(told, expected);
    }
}
