//! Recordings of packets and connections, and the names for the numbers in their records.

use std::{collections::HashMap, sync::Arc, time::Duration};

use pacing::{
    class_key::ClassKey,
    io::recorder::Recording,
    qlog::{
        TRACES, Tap, Traces, Tracing,
        sequence::{Names, Sequence, VantagePoint},
    },
};

use super::{Caller, Control, Error, Filter, PAGE, error::OtherRecordings};

/// The longest time that a caller can record departures, or events of a connection.
const LONGEST_RECORDING: Duration = Duration::from_secs(60);

/// Begins to trace a connection for `span`, but at most a minute.
fn begin(traces: &Arc<Traces>, (connection, tap): (u64, &Tap), span: Duration) -> Result<Tracing, Error> {
    let tracing = traces.begin(tap, span.min(LONGEST_RECORDING));
    tracing.ok_or_else(|| {
        let is_traced = tap.log().is_some();
        let others = OtherRecordings::Connections(TRACES);
        Error::Recorded(if is_traced { OtherRecordings::SameConnection(connection) } else { others })
    })
}

impl Control {
    /// Records departures of packets for `span`, but at most a minute.
    ///
    /// # Errors
    /// The caller may not write, or another caller is recording.
    pub fn record_departures(&self, caller: &Caller, span: Duration) -> Result<Recording, Error> {
        let author = caller.to_write()?;
        let recording = self.parts.packets.recorder.record(span.min(LONGEST_RECORDING));
        let recording = recording.ok_or(Error::Recorded(OtherRecordings::Departures))?;
        tracing::info!(author, "recording departures");
        Ok(recording)
    }

    /// Records the events of a connection for `span`, but at most a minute.
    ///
    /// # Errors
    /// The caller may not write, there is no such connection, another caller records it, or too many others are recorded.
    pub fn record_qlog(&self, caller: &Caller, connection: u64, span: Duration) -> Result<Sequence, Error> {
        let author = caller.to_write()?;
        let found = self.tap(connection);
        let (tap, side, path) =
            found.ok_or_else(|| Error::Unknown { what: "connection", name: connection.to_string() })?;
        let tracing = begin(&self.parts.packets.traces, (connection, &tap), span)?;
        tracing::info!(connection, author, "recording a connection");
        Ok(Sequence::new(tracing, (connection, &path), side))
    }

    /// Finds a connection of the relay or of the edge, whose IDs come from the same count, and the name of its path at the edge.
    fn tap(&self, connection: u64) -> Option<(Tap, VantagePoint, String)> {
        let accepted = self.relay.as_ref().and_then(|relay| relay.connections.get(connection));
        let accepted = accepted.map(|found| (found.tap.clone(), VantagePoint::Server, String::new()));
        accepted.or_else(|| {
            let opened = self.edge().connections(connection.saturating_sub(1)).into_iter().next();
            let (uplink, line) = opened.filter(|(_, line)| line.id == connection)?;
            Some((line.tap.clone(), VantagePoint::Client, uplink.path_name(&line).to_owned()))
        })
    }

    /// Returns the names of the classes and tunnels in the records of a connection.
    #[must_use]
    pub fn qlog_names(&self, connection: u64) -> Names {
        let of = Filter { connection: Some(connection), ..Filter::default() };
        let (accepted, opened) = self.found_tunnels(&of, 0, PAGE);
        let accepted = accepted.iter().map(|tunnel| (tunnel.stream_id, tunnel.id));
        let opened = opened.iter().map(|tunnel| (tunnel.stream_id, tunnel.id));
        Names { classes: self.class_names(), tunnels: accepted.chain(opened).collect() }
    }

    /// Returns the names of all classes, by their keys in records.
    #[must_use]
    pub fn class_names(&self) -> HashMap<ClassKey, String> {
        let policy = self.policies.current();
        policy.policy.classes.iter().map(|class| (ClassKey::of(&class.name), class.name.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_who_cannot_record_a_connection_learns_whether_others_record_this_one_or_too_many() {
        let (traces, taps) =
            (Arc::<Traces>::default(), std::array::from_fn::<_, { TRACES + 1 }, _>(|_| Tap::default()));
        let record = |connection: usize| begin(&traces, (connection as u64, &taps[connection]), LONGEST_RECORDING);
        let refused = |connection| record(connection).err().unwrap().to_string();
        let mut running = vec![record(0).unwrap()];
        let again = "try again when a recording has ended, within a minute at most";
        assert_eq!(refused(0), format!("the recording limit is reached: another caller records connection 0; {again}"));
        running.extend((1..TRACES).map(|connection| record(connection).unwrap()));
        let others =
            format!("the recording limit is reached: {TRACES} other connections are recorded already; {again}");
        assert_eq!(refused(TRACES), others);
        assert_eq!(refused(0), format!("the recording limit is reached: another caller records connection 0; {again}"));
        drop(running);
        assert!(record(TRACES).is_ok());
    }
}
