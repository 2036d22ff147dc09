//! The round trip of an inner connection, as a relay can estimate it although the payloads are encrypted: from a tunnel's first answer.

/// The times of a tunnel's first payloads. The first payload toward the server and the server's first answer give the round trip
/// behind the relay; the client's next payload gives the one before it. Each end's time to answer counts, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FirstAnswer {
    asked_ns: Option<u64>,
    answered_ns: Option<u64>,
    round_trip_ns: Option<u64>,
}

impl FirstAnswer {
    /// Records that a payload of the client passed at `now_ns`. Returns the estimate, in nanoseconds, if this payload completes it.
    pub fn of_client(&mut self, now_ns: u64) -> Option<u64> {
        let asked_ns = *self.asked_ns.get_or_insert(now_ns);
        if self.answered_ns.is_none() || self.round_trip_ns.is_some() {
            return None;
        }
        self.round_trip_ns = Some(now_ns.saturating_sub(asked_ns));
        self.round_trip_ns
    }

    /// Records that a payload of the server passed at `now_ns`. A server that speaks first is not answering.
    pub fn of_server(&mut self, now_ns: u64) {
        if self.asked_ns.is_some() {
            self.answered_ns.get_or_insert(now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_payload_after_the_first_answer_completes_the_round_trip() {
        let mut answer = FirstAnswer::default();
        answer.of_server(1);
        assert_eq!(answer.of_client(10), None);
        assert_eq!(answer.of_client(12), None, "nothing was answered yet");
        answer.of_server(40);
        answer.of_server(45);
        assert_eq!(answer.of_client(70), Some(60));
        assert_eq!(answer.of_client(90), None, "later payloads may have waited in queues");
    }
}
