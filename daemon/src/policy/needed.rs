//! The classes and schedules that every policy must contain, because the configuration names them.

use config::policy::Policy;

/// A class or schedule of the policy that the configuration names. Displays as its kind, its name and its user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} \"{name}\", which the {namer} uses", kind.as_str())]
pub struct Needed {
    /// Whether it is a class or a schedule.
    pub kind: NeededKind,
    /// Its name.
    pub name: String,
    /// The forward, proxy or listener that names it.
    pub namer: String,
}

/// The kind of a named section of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeededKind {
    /// A class.
    Class,
    /// A schedule.
    Schedule,
}

impl NeededKind {
    /// The first word of the header of such a section.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Class => "class",
            Self::Schedule => "schedule",
        }
    }
}

impl Needed {
    pub(super) fn is_in(&self, policy: &Policy) -> bool {
        match self.kind {
            NeededKind::Class => policy.id_of(&self.name).is_some(),
            NeededKind::Schedule => policy.schedules.contains_key(&self.name),
        }
    }
}

/// Returns the classes and schedules that a configuration names, each with the forward, proxy or listener that does.
#[must_use]
pub fn needed(config: &config::Config) -> Vec<Needed> {
    let forwards = config.forwards.iter();
    let forwards = forwards.map(|of| (&of.class, &of.uplink.schedule, format!("forward on {}", of.listen)));
    let proxies = config.proxies.iter();
    let proxies = proxies.map(|of| (&of.class, &of.uplink.schedule, format!("proxy on {}", of.listen)));
    let serves = config.serves.iter();
    let serves = serves.map(|of| (&of.class, &of.uplink.schedule, format!("serve on {}", of.listen)));
    let listeners = config.relay.iter().flat_map(|relay| &relay.listeners);
    let listeners = listeners.map(|of| (&of.class, &of.schedule, format!("listener on {}", of.address)));
    let named = |(class, schedule, namer): (&Option<String>, &Option<String>, String)| {
        let of = |kind: NeededKind, name: &Option<String>| {
            name.clone().map(|name| Needed { kind, name, namer: namer.clone() })
        };
        [of(NeededKind::Class, class), of(NeededKind::Schedule, schedule)].into_iter().flatten()
    };
    forwards.chain(proxies).chain(serves).chain(listeners).flat_map(named).collect()
}
