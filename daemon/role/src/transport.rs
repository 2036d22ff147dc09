//! The transport that a configuration asks for.

use std::time::Duration;

use config::transport::{CongestionControl, PacketIo, TransportSettings};
use quic::endpoint::{Congestion, Io, Pacing, Transport};

/// How long the answer to a keep-alive may take.
const KEEP_ALIVE_PATIENCE: Duration = Duration::from_secs(5);

/// Returns the transport of these settings, with the library's defaults for everything that they leave open.
#[must_use]
pub fn transport(settings: &TransportSettings) -> Transport {
    let congestion = match settings.congestion {
        CongestionControl::Cubic => Congestion::Cubic,
        CongestionControl::Bbr => Congestion::Bbr,
    };
    let io = match settings.io {
        PacketIo::Paced => {
            Io::Paced(Pacing { quantum: settings.quantum, min_rtt: settings.min_paced_rtt, ..Pacing::default() })
        }
        PacketIo::Stock => Io::Stock,
    };
    let TransportSettings { initial_mtu, max_mtu, keep_alive, .. } = *settings;
    let defaults = Transport::default();
    // An endpoint that keeps a connection alive notices soon that it is dead: one PING may be lost a few times, no more.
    let idle_timeout = keep_alive.map_or(defaults.idle_timeout, |every| every + KEEP_ALIVE_PATIENCE);
    Transport { initial_mtu, max_mtu, congestion, keep_alive, idle_timeout, io, ..defaults }
}

#[cfg(test)]
mod tests {
    use config::relay::RelayLimits;
    use quic::endpoint::Admission;

    use super::*;

    #[test]
    fn a_configuration_without_keys_means_the_defaults_of_the_library() {
        let plain = TransportSettings { keep_alive: None, ..TransportSettings::default() };
        assert_eq!(format!("{:?}", transport(&plain)), format!("{:?}", Transport::default()));
        assert_eq!(transport(&TransportSettings::default()).idle_timeout, Duration::from_secs(15));
        assert_eq!(RelayLimits::default().handshakes_in_flight, Admission::default().max_handshakes);
    }
}
