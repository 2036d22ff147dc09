//! The class of a request for a model: the policy's rules choose it, at a gateway and at an edge alike.

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use arc_swap::ArcSwapOption;
use config::{
    policy::RequestSubject,
    serve::{Serve, ServeKey},
};
use masque::h3::RequestHead;
use openai::RoutingFields;
use quic::class::Class;
use role::classes::Classes;
use tenants::key_digest;

/// The header field in which a client requests a class. Rules decide which class the client gets.
const ASKED_CLASS: &str = "x-paced-class";

/// Returns the properties of a request that rules can match. `fields` holds the fields of the body, if the caller has parsed it.
pub(crate) fn subject<'a>(
    user: Option<&'a str>,
    listener: SocketAddr,
    head: &'a RequestHead,
    fields: Option<&'a RoutingFields>,
) -> RequestSubject<'a> {
    RequestSubject {
        user,
        listener,
        model: fields.map(|fields| &fields.model[..]),
        service_tier: fields.and_then(|fields| fields.service_tier.as_deref()),
        asked_class: head.field(ASKED_CLASS).and_then(|value| std::str::from_utf8(value).ok()).map(str::trim),
    }
}

/// Gives each request at an edge's local address its class: from the configuration of the address, or else from the policy's rules. Policy
/// changes apply to all clones.
#[derive(Clone, Debug)]
pub struct RequestClasses {
    /// The class that the configuration names.
    class: Option<String>,
    /// The local address, as configured: rules may name it.
    listener: SocketAddr,
    /// The keys whose holders are the users of requests.
    keys: Arc<[ServeKey]>,
    /// The classes of the policy in force; `None` until there is one.
    in_force: Arc<ArcSwapOption<Classes>>,
}

/// The class of a request.
#[derive(Clone, Debug)]
pub struct RequestClass {
    /// The class.
    pub class: Arc<Class>,
    /// Whether the configuration or a rule chose it. Otherwise, the edge tells the gateway nothing about the answer's priority.
    pub is_chosen: bool,
}

impl RequestClasses {
    /// Returns the classes for the local address `listener`, without keys or a policy in force. With `class`, all its requests are of that
    /// class.
    #[must_use]
    pub(crate) fn new(class: Option<String>, listener: SocketAddr) -> Self {
        Self { class, listener, keys: Arc::default(), in_force: Arc::default() }
    }

    /// Returns the classes for a configured local address, with its keys, but without a policy in force.
    #[must_use]
    pub fn at(serve: &Serve) -> Self {
        Self { keys: serve.keys.clone().into(), ..Self::new(serve.class.clone(), serve.listen) }
    }

    /// Returns the holder of the key that a request shows, if the configuration names the key and it has not expired at `now`.
    pub(crate) fn user(&self, head: &RequestHead, now: SystemTime) -> Option<Arc<str>> {
        if self.keys.is_empty() {
            return None;
        }
        let digest = key_digest(head)?;
        let key = self.keys.iter().find(|key| key.sha256 == digest)?;
        let is_valid = key.expires.is_none_or(|expires| SystemTime::from(expires) > now);
        is_valid.then(|| key.name.as_str().into())
    }

    /// Returns the local address, as configured.
    pub(crate) fn listener(&self) -> SocketAddr {
        self.listener
    }

    /// Applies the classes and rules of another policy to later requests.
    pub fn follow(&self, classes: Arc<Classes>) {
        self.in_force.store(Some(classes));
    }

    /// Whether another clone still exists.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.in_force) > 1
    }

    /// Returns the class of a request of this user. Calls `fields`, which reads them of the body, only if a rule needs one of them. If
    /// the body cannot be parsed, rules see none of its fields, and the gateway reports the error to the client.
    pub(crate) fn of<'a>(
        &self,
        user: Option<&str>,
        head: &RequestHead,
        fields: impl FnOnce() -> Option<&'a RoutingFields>,
    ) -> RequestClass {
        let Some(classes) = self.in_force.load_full() else {
            return RequestClass { class: Arc::default(), is_chosen: false };
        };
        if let Some(name) = &self.class {
            return RequestClass { class: classes.named(Some(name)).clone(), is_chosen: true };
        }
        let fields = classes.policy().asks_for_bodies().then(fields).flatten();
        let chosen = classes.request_class(&subject(user, self.listener, head, fields));
        RequestClass { class: chosen.unwrap_or_else(|| classes.named(None)).clone(), is_chosen: chosen.is_some() }
    }
}

#[cfg(test)]
mod tests {
    use config::{Config, hash::hex, moment::Moment, policy::Policy};
    use masque::h3::Field;
    use quic::class::{ClassMetrics, PolicyRole};
    use sha2::{Digest as _, Sha256};

    use super::*;

    const LISTENER: &str = "127.0.0.1:8100";

    fn with(class: Option<&str>, policy: &str) -> RequestClasses {
        follow(RequestClasses::new(class.map(str::to_owned), LISTENER.parse().unwrap()), policy)
    }

    fn follow(classes: RequestClasses, policy: &str) -> RequestClasses {
        let (policy, metrics) = (Policy::from_toml(policy).unwrap(), ClassMetrics::default());
        classes.follow(Arc::new(Classes::new(policy, PolicyRole::Edge, &metrics, |_| Default::default())));
        classes
    }

    fn class(classes: &RequestClasses, fields: &[(&'static str, &'static str)], body: &str) -> (String, bool) {
        class_at(classes, fields, body, SystemTime::UNIX_EPOCH)
    }

    fn class_at(
        classes: &RequestClasses,
        fields: &[(&'static str, &'static str)],
        body: &str,
        now: SystemTime,
    ) -> (String, bool) {
        let head = head(fields);
        let fields = RoutingFields::read(body.as_bytes()).ok();
        let user = classes.user(&head, now);
        let RequestClass { class, is_chosen } = classes.of(user.as_deref(), &head, || fields.as_ref());
        (class.policy().name.clone(), is_chosen)
    }

    fn head(fields: &[(&'static str, &'static str)]) -> RequestHead {
        let fields = fields.iter().map(|(name, value)| Field::new(*name, *value)).collect();
        let (scheme, authority, path, protocol) = (None, None, None, None);
        RequestHead { method: "POST".into(), scheme, authority, path, protocol, fields }
    }

    const RULES: &str = r#"
        [class.flex]
        [class.small]
        [class.asked]
        [class.here]
        [[rule]]
        class = "flex"
        service_tier = "flex"
        [[rule]]
        class = "small"
        model = ["small", "auto"]
        [[rule]]
        class = "asked"
        asked_class = "batch"
    "#;

    #[test]
    fn rules_give_a_request_at_an_edge_its_class_by_what_its_head_and_body_say() {
        let classes = with(None, RULES);
        for (fields, body, expected) in [
            (&[][..], r#"{"model":"auto","service_tier":"flex"}"#, ("flex", true)),
            (&[], r#"{"model":"auto"}"#, ("small", true)),
            (&[("x-paced-class", " batch ")], r#"{"model":"large"}"#, ("asked", true)),
            (&[("x-paced-class", "flex")], r#"{"model":"large"}"#, ("default", false)),
            (&[("x-paced-class", "batch")], "no JSON", ("asked", true)),
            (&[], "", ("default", false)),
        ] {
            assert_eq!(class(&classes, fields, body), (expected.0.to_owned(), expected.1), "{fields:?} {body}");
        }
        classes.follow(with(None, "[class.all]\n[[rule]]\nclass = \"all\"").in_force.load_full().unwrap());
        assert_eq!(class(&classes, &[], "{}").0, "all", "the next policy counts");
    }

    #[test]
    fn a_body_is_read_only_if_a_rule_may_need_its_fields() {
        let by_head = "[class.asked]\n[[rule]]\nclass = \"asked\"\nasked_class = \"batch\"";
        for (chosen, policy, is_read) in [(None, RULES, true), (None, by_head, false), (Some("here"), RULES, false)] {
            let mut was_read = false;
            let fields = || {
                was_read = true;
                None
            };
            with(chosen, policy).of(None, &head(&[]), fields);
            assert_eq!(was_read, is_read, "{chosen:?} {policy}");
        }
    }

    #[test]
    fn the_class_of_a_local_address_and_its_rules_are_its_own() {
        let by_address = |address: &str| format!("{RULES}[[rule]]\nclass = \"here\"\nlistener = \"{address}\"");
        assert_eq!(class(&with(None, &by_address(LISTENER)), &[], "{}").0, "here");
        assert_eq!(class(&with(None, &by_address("127.0.0.1:8101")), &[], "{}").0, "default");
        let chosen = with(Some("here"), RULES);
        assert_eq!(class(&chosen, &[], r#"{"model":"auto"}"#), ("here".to_owned(), true), "whatever rules say");
    }

    #[test]
    fn a_request_is_of_the_user_whose_key_it_shows_as_long_as_the_edge_knows_the_key() {
        let hash = |key: &str| hex(&Sha256::digest(key));
        let text = format!(
            "[[serve]]\nlisten = \"{LISTENER}\"\nrelay = \"https://gateway.example/{{target_host}}/{{target_port}}/\"\n\
             [[serve.key]]\nname = \"ann\"\nsha256 = \"{}\"\nexpires = \"2027-01-31\"\n\
             [[serve.key]]\nname = \"ann\"\nsha256 = \"{}\"\n\
             [[serve.key]]\nname = \"bob\"\nsha256 = \"{}\"",
            hash("sk-ann"),
            hash("sk-ann-too"),
            hash("sk-bob")
        );
        let config = Config::from_toml(&text).unwrap();
        let classes = follow(
            RequestClasses::at(&config.serves[0]),
            "[class.urgent]\n[[rule]]\nclass = \"urgent\"\nuser = \"ann\"\nmodel = \"large\"",
        );
        let [early, late] = ["2027-01-30", "2027-01-31"].map(|date| SystemTime::from(Moment::parse(date).unwrap()));
        let large = r#"{"model":"large"}"#;
        for (shown, body, now, expected) in [
            (Some("Bearer sk-ann"), large, early, "urgent"),
            (Some("Bearer sk-ann"), large, late, "default"),
            (Some("bearer  sk-ann-too "), large, late, "urgent"),
            (Some("Bearer sk-ann"), r#"{"model":"small"}"#, early, "default"),
            (Some("Bearer sk-bob"), large, early, "default"),
            (Some("Bearer sk-other"), large, early, "default"),
            (Some("Basic sk-ann"), large, early, "default"),
            (None, large, early, "default"),
        ] {
            let fields: Vec<_> = shown.into_iter().map(|shown| ("authorization", shown)).collect();
            let (class, is_chosen) = class_at(&classes, &fields, body, now);
            assert_eq!((&class[..], is_chosen), (expected, expected == "urgent"), "{shown:?} {body} {now:?}");
        }
    }
}
