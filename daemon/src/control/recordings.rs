//! Records of packets and connections, and the names of what they call by numbers.

use std::{collections::HashMap, time::Duration};

use pacing::{
    class_key::ClassKey,
    io::recorder::Recording,
    qlog::{
        Tap,
        sequence::{Names, Sequence, VantagePoint},
    },
};

use super::{Caller, Control, Error, Filter, PAGE};

/// How long a caller can record departures, or events of a connection, at most.
const LONGEST_RECORDING: Duration = Duration::from_secs(60);

impl Control {
    /// Records departures of packets for `span`, or a minute if that is less.
    ///
    /// # Errors
    /// The caller may not, or they are being recorded for somebody else.
    pub fn record_departures(&self, caller: &Caller, span: Duration) -> Result<Recording, Error> {
        let author = caller.to_write()?;
        let recording = self.parts.io.recorder.record(span.min(LONGEST_RECORDING)).ok_or(Error::Recorded)?;
        tracing::info!(author, "recording departures");
        Ok(recording)
    }

    /// Records what happens on a connection for `span`, or a minute if that is less.
    ///
    /// # Errors
    /// The caller may not, there is no such connection, or it is recorded for somebody else, or too many others are.
    pub fn record_qlog(&self, caller: &Caller, connection: u64, span: Duration) -> Result<Sequence, Error> {
        let author = caller.to_write()?;
        let found = self.tap(connection);
        let (tap, side) = found.ok_or_else(|| Error::Unknown { what: "connection", name: connection.to_string() })?;
        let tracing = self.parts.io.traces.begin(&tap, span.min(LONGEST_RECORDING)).ok_or(Error::Recorded)?;
        tracing::info!(connection, author, "recording a connection");
        Ok(Sequence::new(tracing, connection, side))
    }

    /// Finds a connection of the relay or of the edge, whose IDs come from the same count.
    fn tap(&self, connection: u64) -> Option<(Tap, VantagePoint)> {
        let accepted = self.relay.as_ref().and_then(|relay| relay.connections.get(connection));
        let accepted = accepted.map(|found| (found.tap.clone(), VantagePoint::Server));
        accepted.or_else(|| {
            let opened = self.edge().connections(connection.saturating_sub(1)).into_iter().next();
            let (_, line) = opened.filter(|(_, line)| line.id == connection)?;
            Some((line.tap.clone(), VantagePoint::Client))
        })
    }

    /// What the records of a connection call by numbers.
    #[must_use]
    pub fn qlog_names(&self, connection: u64) -> Names {
        let of = Filter { connection: Some(connection), ..Filter::default() };
        let (accepted, opened) = self.found_tunnels(&of, 0, PAGE);
        let accepted = accepted.iter().map(|tunnel| (tunnel.stream_id, tunnel.id));
        let opened = opened.iter().map(|tunnel| (tunnel.stream_id, tunnel.id));
        Names { classes: self.class_names(), tunnels: accepted.chain(opened).collect() }
    }

    /// The names of all classes, by what records call them.
    #[must_use]
    pub fn class_names(&self) -> HashMap<ClassKey, String> {
        let policy = self.policies.current();
        policy.policy.classes.iter().map(|class| (ClassKey::of(&class.name), class.name.clone())).collect()
    }
}
