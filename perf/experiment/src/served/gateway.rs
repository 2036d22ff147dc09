//! The gateway's configuration: its engine and model, its listener, its key and its classes.

use std::{fmt::Write as _, net::Ipv4Addr};

use anyhow::Result;
use config::hash::hex;
use plan::{Plan, Scheduler};
use sha2::{Digest as _, Sha256};

use crate::masque;

/// The port of the engine.
pub(super) const ENGINE_PORT: u16 = 8_001;

/// The port of the gateway's listener for TLS over TCP.
pub(super) const FRONT_PORT: u16 = 8_443;

/// The model's name.
pub(super) const MODEL: &str = "large";

/// The key that clients send to the gateway. It need not be secret: no other program runs in these namespaces.
pub(super) const KEY: &str = "paced_of-a-client-in-a-namespace";

/// Returns the gateway's sections; its addresses are toward the engine and toward the client.
pub(super) fn sections(plan: &Plan, scheduler: Scheduler, [engine, own]: [Ipv4Addr; 2]) -> Result<String> {
    let discipline = match scheduler {
        Scheduler::Http3Rr => "discipline = \"rr\"",
        _ => "discipline = \"ml\"\nlow = \"edf\"",
    };
    // As recommended for links below 10 Mbit/s.
    let mut text = format!(
        r#"
        [log]
        level = "warn"
        [transport]
        congestion = "{congestion}"
        [schedule]
        {discipline}
        low_mark_packets = 2
        [gateway]
        [[gateway.model]]
        name = "{MODEL}"
        engines = ["http://{engine}:{ENGINE_PORT}"]
        max_in_flight = 4096
        [[gateway.listener]]
        address = "{own}:{FRONT_PORT}"
        [[gateway.key]]
        name = "client"
        sha256 = "{key}"
        "#,
        congestion = plan.congestion,
        key = hex(&Sha256::digest(KEY)),
    );
    for class in &plan.classes {
        text += &masque::class_section(class);
        writeln!(text, "[[rule]]\nclass = \"{0}\"\nasked_class = \"{0}\"", class.name)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use config::policy::Policy;
    use plan::Varied as _;

    use super::*;

    #[test]
    fn the_gateway_of_every_variant_knows_the_classes_with_their_deadlines() {
        let plan = Plan::read("llm-transport").unwrap();
        for variant in plan.variants() {
            let plan = plan.variant(variant).unwrap();
            for scheduler in &plan.schedulers {
                let text = sections(&plan, *scheduler, [Ipv4Addr::LOCALHOST; 2]).unwrap();
                let policy = text.split_once("[class.").map(|(_, classes)| format!("[class.{classes}")).unwrap();
                let policy = Policy::from_toml(&policy).unwrap();
                for class in &plan.classes {
                    let known = policy.classes.iter().find(|known| known.name == class.name).unwrap();
                    let deadline = class.deadline_ms.map(Duration::from_millis);
                    assert_eq!(known.deadline, deadline, "{} of {variant}", class.name);
                }
            }
        }
    }
}
