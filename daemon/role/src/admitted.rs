//! The limits of admission that a configuration asks for.

use admission::limits::{AdmissionLimits, FrameRates, StrangerTerms};
use config::relay::{RelayLimits, StrangerLimits};

/// Returns how many clients a relay with these limits lets in, and what each may use while it is a stranger.
#[must_use]
pub fn admission_limits(limits: &RelayLimits) -> AdmissionLimits {
    let StrangerLimits { per_prefix, time, packets, bytes, requests, refusals, percent: _ } = limits.strangers;
    AdmissionLimits {
        connections: limits.connections,
        places_for_strangers: limits.places_for_strangers(),
        strangers_per_prefix: per_prefix,
        stranger: StrangerTerms {
            time,
            packets,
            held_bytes: bytes,
            waiting_requests: requests,
            refused_requests: refusals,
        },
    }
}

/// Returns how many frames and capsules a user may send within a second. Each connection that the user may have gets an equal part.
#[must_use]
pub fn frame_rates(limits: &RelayLimits) -> FrameRates {
    FrameRates {
        user_frames_per_second: limits.frames_per_second,
        connection_frames_per_second: limits.frames_per_second / limits.connections_per_user.max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_without_keys_means_the_defaults_of_the_library() {
        let limits = RelayLimits::default();
        assert_eq!(admission_limits(&limits), AdmissionLimits::default());
        assert_eq!(frame_rates(&limits), FrameRates::default());
    }

    #[test]
    fn strangers_get_their_part_of_the_places_and_each_connection_its_part_of_the_frames() {
        let strangers = StrangerLimits { percent: 70, ..StrangerLimits::default() };
        let limits = RelayLimits {
            connections: 100,
            strangers,
            frames_per_second: 1_000,
            connections_per_user: 100,
            ..RelayLimits::default()
        };
        assert_eq!(admission_limits(&limits).places_for_strangers, 70);
        assert_eq!(frame_rates(&limits).connection_frames_per_second, 10);
        let none = RelayLimits { connections: 1, connections_per_user: 0, ..limits };
        assert_eq!(admission_limits(&none).places_for_strangers, 1, "at least one");
        assert_eq!(frame_rates(&none).connection_frames_per_second, 1_000);
    }
}
