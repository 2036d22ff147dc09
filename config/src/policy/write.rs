//! Writes a policy as text that [`Policy::from_toml`] reads back as the same policy.

use sched::class::{ClassSettings, DEFAULT};

use super::{
    Policy,
    read::{class, rule, schedule},
};
use crate::document::Text;

impl Policy {
    /// Writes the policy as TOML without keys that have their default. Keys that a class took from another with `like`
    /// are written as its own.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = Text::brief();
        self.write(&mut text);
        text.into_string()
    }

    pub(crate) fn write(&self, text: &mut Text) {
        text.section("[schedule]", |section| schedule(section, &self.schedule));
        for (name, of) in &self.schedules {
            text.section(&format!("[schedule.{name}]"), |section| schedule(section, of));
        }
        for of in &self.classes {
            if of.name != DEFAULT || *of != ClassSettings::named(DEFAULT) || text.is_whole() {
                text.section(&format!("[class.{}]", of.name), |section| class(section, of));
            }
        }
        let names = self.names();
        for of in &self.rules {
            text.section("[[rule]]", |section| rule(section, Some(of), &names, &self.schedules));
        }
    }
}
