//! Writes a configuration as text that reads back as the same configuration.

use crate::{
    Config, control, document::Text, forward, gateway, kernel, log, metrics, path, proxy, relay, serve, state_dir,
    transport, uplink, uplink::Nameable,
};

impl Config {
    /// Writes the whole configuration as TOML: every key that has a value, including defaults, and listeners and
    /// classes with all keys that they take from elsewhere. A self-signed certificate of paced has no path, and is left
    /// out.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = Text::whole();
        text.keys(|section| state_dir(section, self.state_dir.clone()));
        if let Some(of) = &self.relay {
            self.write_relay(of, &mut text);
        }
        if let Some(of) = &self.gateway {
            text.section("[gateway]", |section| gateway::own(section, of.clone()));
            for of in &of.models {
                text.section("[[gateway.model]]", |section| gateway::model(section, Some(of)));
            }
            let named = of.models.iter().map(|model| model.name.clone()).collect();
            for alias in &of.aliases {
                text.section("[[gateway.alias]]", |section| gateway::alias(section, Some(alias), (&named, &[])));
            }
            let relay = gateway::RelayOfGateway { is_there: true, key: &[], identity: None };
            for listener in &of.listeners {
                text.section("[[gateway.listener]]", |section| gateway::listener(section, Some(listener), relay));
            }
            for key in &of.keys {
                text.section("[[gateway.key]]", |section| gateway::key(section, Some(key)));
            }
        }
        text.section("[transport]", |section| transport::walk(section, &self.transport));
        text.section("[kernel]", |section| kernel::walk(section, &self.kernel));
        let hops: Vec<_> = self.hops.iter().map(|hop| hop.name.as_str()).collect();
        let names = Nameable { policy: &self.policy, hops: &hops };
        for of in &self.hops {
            let header = format!("[hop.{}]", of.name);
            text.section(&header, |section| uplink::walk(section, Some(&of.uplink), names));
        }
        for of in &self.paths {
            text.section("[[path]]", |section| path::walk(section, Some(of), names));
        }
        for of in &self.forwards {
            text.section("[[forward]]", |section| forward::walk(section, Some(of), names));
        }
        for of in &self.proxies {
            text.section("[[proxy]]", |section| proxy::walk(section, Some(of), names));
        }
        for of in &self.serves {
            text.section("[[serve]]", |section| serve::walk(section, Some(of), names));
            for key in &of.keys {
                text.section("[[serve.key]]", |section| serve::key(section, Some(key)));
            }
        }
        self.policy.write(&mut text);
        text.section("[control]", |section| control::walk(section, &self.control));
        if let Some(of) = &self.control.tcp {
            text.section("[control.tcp]", |section| control::tcp(section, Some(of)));
        }
        text.section("[metrics]", |section| metrics::walk(section, &self.metrics));
        text.section("[log]", |section| log::walk(section, &self.log));
        text.into_string()
    }

    fn write_relay(&self, relay: &relay::RelaySettings, text: &mut Text) {
        text.section("[relay]", |section| relay::own(section, relay.clone()));
        for of in &relay.listeners {
            text.section("[[relay.listener]]", |section| relay::write_listener(of, section, &self.policy));
        }
        for of in &relay.tokens {
            text.section("[[relay.token]]", |section| relay::token(section, Some(of), &relay.limits));
        }
        for of in &relay.certificates {
            text.section("[[relay.client_certificate]]", |section| {
                relay::client_certificate(section, Some(of), &relay.limits)
            });
        }
        text.section("[relay.targets]", |section| relay::targets(section, &relay.targets));
        text.section("[relay.limits]", |section| relay::limits(section, &relay.limits));
    }
}
