//! Text formats: fields, targets, templates, policies, configurations.

use std::str;

use config::{Config, policy::Policy};
use masque::{h3::Field, priority::Priority, proxy_status::ProxyStatus, target::Target, template::Template};

/// A priority that was read is the same after it is written and read again.
pub fn priority(input: &[u8]) {
    let Some(priority) = Priority::parse(input) else { return };
    let again = Priority::parse(priority.to_field_value().as_bytes());
    assert_eq!(again.as_ref(), Some(&priority), "{priority:?}");
}

/// A Proxy-Status that was read is the same after it is written and read again.
pub fn proxy_status(input: &[u8]) {
    let fields = [Field::new("proxy-status", input.to_vec())];
    for status in ProxyStatus::from_fields(&fields) {
        let again = ProxyStatus::from_fields(&[status.to_field()]);
        assert_eq!(again, [status]);
    }
}

/// A target that was read is the same after it is written and read again.
pub fn target(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    for target in [Target::from_authority(text), Target::from_https_authority(text)].into_iter().flatten() {
        assert_eq!(Target::from_authority(&target.to_string()).as_ref(), Ok(&target), "{target}");
    }
    if let Some((host, port)) = text.split_once('/')
        && let Ok(target) = Target::from_variables(host, port)
    {
        assert_eq!(Target::from_authority(&target.to_string()).as_ref(), Ok(&target), "{target}");
    }
}

/// A template matches its expansion of a target as that target. The rest of the input is a path from a stranger.
pub fn template(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let (text, path) = text.split_once('\n').unwrap_or((text, "/"));
    let Ok(template) = Template::parse(text) else { return };
    _ = template.matches(template.authority(), path);
    for target in ["192.0.2.6:443", "[2001:db8::6]:1", "name.example:65535"] {
        let Ok(target) = Target::from_authority(target) else { panic!("{target} is not accepted as a target") };
        let expanded = template.expand(&target);
        let matched = template.matches(template.authority(), &expanded);
        assert_eq!(matched.as_ref(), Ok(&target), "{text} makes {expanded}");
    }
}

/// A policy that was read is the same after it is written and read again.
pub fn policy(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    match Policy::from_toml(text) {
        Ok(policy) => {
            let written = policy.to_toml();
            let again = Policy::from_toml(&written).unwrap_or_else(|errors| panic!("{errors}\n{written}"));
            assert_eq!(again.to_toml(), written);
        }
        Err(errors) => assert!(!errors.to_string().is_empty()),
    }
}

/// A configuration that was read is the same after it is written and read again.
pub fn configuration(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    match Config::from_toml(text) {
        Ok(config) => {
            let written = config.to_toml();
            let again = Config::from_toml(&written).unwrap_or_else(|errors| panic!("{errors}\n{written}"));
            assert_eq!(again.to_toml(), written);
            assert!(!config::explain(&config, std::time::UNIX_EPOCH).is_empty());
        }
        Err(errors) => assert!(!errors.to_string().is_empty()),
    }
}
