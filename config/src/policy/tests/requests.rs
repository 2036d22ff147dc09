//! The classes of requests for models.

use super::*;

const RULES: &str = r#"
[class.interactive]
late = "refuse"
[class.batch]
[class.plain]
[[rule]]
class = "plain"
ports = 443
[[rule]]
class = "batch"
service_tier = ["flex", "batch"]
[[rule]]
class = "batch"
asked_class = "slow"
[[rule]]
class = "interactive"
model = ["auto", "large"]
user = "ann"
[[rule]]
class = "plain"
user = "ann"
listener = "192.0.2.1:443"
"#;

fn asked() -> RequestSubject<'static> {
    let listener = "192.0.2.1:443".parse().unwrap();
    RequestSubject { user: None, listener, model: None, service_tier: None, asked_class: None }
}

#[test]
fn a_request_is_of_the_first_class_whose_conditions_hold() {
    let policy = valid(RULES);
    let ann = RequestSubject { user: Some("ann"), ..asked() };
    let rows = [
        (asked(), DEFAULT),
        (ann, "plain"),
        (RequestSubject { listener: "192.0.2.1:444".parse().unwrap(), ..ann }, DEFAULT),
        (RequestSubject { model: Some("auto"), ..ann }, "interactive"),
        (RequestSubject { model: Some("auto"), ..asked() }, DEFAULT),
        (RequestSubject { model: Some("Auto"), ..ann }, "plain"),
        (RequestSubject { model: Some("auto"), service_tier: Some("flex"), ..ann }, "batch"),
        (RequestSubject { service_tier: Some("default"), ..asked() }, DEFAULT),
        (RequestSubject { asked_class: Some("slow"), ..asked() }, "batch"),
        (RequestSubject { asked_class: Some("interactive"), ..asked() }, DEFAULT),
    ];
    for (subject, class) in rows {
        assert_eq!(policy.class(policy.request_class(&subject).unwrap_or_default()).name, class, "{subject:?}");
    }
    assert_eq!(policy.class(policy.id_of("interactive").unwrap()).late, Late::Refuse);
    assert_eq!(Policy::from_toml(&policy.to_toml()), Ok(policy));
}

#[test]
fn a_rule_about_requests_gives_no_tunnel_its_class() {
    let policy = valid("[class.a]\n[[rule]]\nclass = \"a\"\nmodel = \"large\"\n");
    let (address, listener) = ("10.0.0.1:443".parse().unwrap(), asked().listener);
    let subject = Subject { user: None, name: None, address, translated: None, protocol: Protocol::Tcp, listener };
    assert_eq!(policy.class(policy.classify(&subject)).name, DEFAULT);
}

#[test]
fn a_rule_is_about_tunnels_or_about_requests() {
    for condition in ["model = \"large\"", "service_tier = \"flex\"", "asked_class = [\"slow\"]"] {
        let key = condition.split(' ').next().unwrap();
        let refused = |text: &str, cause: &str| {
            let errors = Policy::from_toml(text).unwrap_err().to_string();
            assert!(errors.contains(&format!("rule.{key}: ")) && errors.contains(cause), "{errors}");
        };
        refused(&format!("[[rule]]\nclass = \"default\"\nto = \"10.0.0.0/8\"\n{condition}"), "which have no target");
        let schedule = "[schedule.x]\n[[rule]]\nschedule = \"x\"\n";
        refused(&format!("{schedule}{condition}"), "a schedule applies to whole connections");
    }
}
