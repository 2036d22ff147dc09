//! The form that tunnels of `mode = "auto"` take, chosen from what connections to the relay have seen of their path.

use std::sync::Arc;

use masque::{
    choice::{FormChoice, PathSample},
    tunnel::Form,
};
use pacing::path::{PacketSize, PathState, PathStats};
use parking_lot::Mutex;

/// What the connections to one relay have learned of the path to it. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Experience(Arc<Mutex<FormChoice>>);

/// For `mode = "auto"` to use datagrams, a path has to carry UDP payloads of this size in a DATAGRAM frame: QUIC needs packets of this
/// size (RFC 9000 §14).
pub const USABLE_PAYLOAD_BYTES: u16 = 1_200;

/// Returns the form for payloads of a tunnel of `mode = "auto"`, or `None` if the tunnel itself chooses. `chosen` is the form that was
/// better when the tunnel was opened. `packets` is the current size of the connection's packets: if packets are small, only the stream
/// remains.
#[must_use]
pub fn of_auto(packets: &PacketSize, chosen: Form) -> Option<Form> {
    (chosen == Form::Capsule || !packets.carries(USABLE_PAYLOAD_BYTES)).then_some(Form::Capsule)
}

/// A connection that adds to the experience.
#[derive(Debug)]
pub struct Witness {
    experience: Experience,
    path: PathStats,
    /// The measurements that it has already reported.
    told: Mutex<PathState>,
}

impl Witness {
    /// Returns the witness of a new connection, whose measurements are in `path`.
    #[must_use]
    pub fn new(experience: Experience, path: PathStats) -> Self {
        Self { experience, path, told: Mutex::default() }
    }

    /// Reports what the connection has seen since the last report, and returns the form for a new tunnel. All of it counts as seen now, so
    /// call this every few seconds, and when tunnels begin and end; `now_ns` is of a clock that all connections share.
    pub fn tell(&self, now_ns: u64) -> Form {
        let mut told = self.told.lock();
        let (before, now) = (*told, self.path.get());
        *told = now;
        let lost = |path: &PathState| path.missing_packets.saturating_sub(path.skipped_packets);
        let new = |count: fn(&PathState) -> u64| count(&now).wrapping_sub(count(&before));
        let sample = PathSample {
            sent: new(|path| path.sent_packets),
            episodes: new(|path| path.loss_episodes),
            unqueued: new(|path| path.unqueued_episodes),
            arrived: new(|path| path.arrived_packets),
            // Late packets have arrived by now.
            gaps: new(|path| path.unqueued_gaps).min(lost(&now).saturating_sub(lost(&before))),
        };
        self.experience.0.lock().note(now_ns, sample)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn narrow_packets_force_capsules_even_if_datagrams_were_chosen() {
        let packets = PacketSize::default();
        for (bytes, chosen, expected) in [
            (1_472, Form::Datagram, None),
            (1_472, Form::Capsule, Some(Form::Capsule)),
            (1_200, Form::Datagram, Some(Form::Capsule)),
        ] {
            packets.set(bytes);
            assert_eq!(of_auto(&packets, chosen), expected, "{bytes}, {chosen:?}");
        }
    }

    #[test]
    fn connections_to_a_relay_tell_what_is_new_and_learn_what_others_saw() {
        let experience = Experience::default();
        let [first, second] = [(); 2].map(|()| PathStats::default());
        let [one, other] = [&first, &second].map(|path| Witness::new(experience.clone(), path.clone()));
        assert_eq!([one.tell(1), other.tell(1)], [Form::Datagram; 2]);
        let ms = Duration::from_millis;
        first.measured(ms(10), ms(10));
        for packet in 0..1_000 {
            first.sent_packet();
            if packet % 100 == 50 {
                first.lost_packet(ms(20 * packet));
            }
        }
        assert_eq!(other.tell(2), Form::Datagram, "it has learned nothing yet");
        assert_eq!([one.tell(3), other.tell(3)], [Form::Capsule; 2]);
        (0..30_000).for_each(|_| second.sent_packet());
        assert_eq!(
            [other.tell(4), one.tell(4)],
            [Form::Datagram; 2],
            "10 of 31,000 is less than what it takes to stay"
        );
    }

    /// Returns the form that a witness chooses for a path with round trips of 10 ms, over which packets with these numbers arrive, `per_rtt` in each.
    fn form_after(per_rtt: u32, numbers: impl Iterator<Item = u64>) -> Form {
        let path = PathStats::default();
        let witness = Witness::new(Experience::default(), path.clone());
        path.measured(Duration::from_millis(10), Duration::from_millis(10));
        for (packet, number) in (1..).zip(numbers) {
            path.arrived_packet(number, Duration::from_millis(10) * packet / per_rtt);
        }
        witness.tell(1)
    }

    #[test]
    fn a_relay_that_leaves_out_numbers_is_no_reason_for_the_stream() {
        // As seen on a path without losses: s2n-quic left out every third number.
        assert_eq!(form_after(2, (0..878).filter(|number| *number < 54 || number % 3 > 0)), Form::Datagram);
        assert_eq!(form_after(10, (0..10_000).filter(|number| number % 12 > 0)), Form::Datagram);
        assert_eq!(form_after(10, (0..10_000).filter(|number| number % 500 > 1)), Form::Capsule, "bursts are losses");
    }

    #[test]
    fn packets_that_are_late_are_no_reason_for_the_stream() {
        // Groups of three arrive in reverse order.
        assert_eq!(form_after(10, (0..3_000).map(|at| at / 3 * 3 + 2 - at % 3)), Form::Datagram);
    }
}
