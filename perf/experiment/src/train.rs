//! How evenly packets leave: trains, gaps, and bytes within a millisecond.

use instruments::load::Figure;
use lab::capture::Packet;

/// Packets that follow the previous one after less than this belong to its train (Kempf and others: QUIC Steps, CoNEXT
/// 2025).
const TRAIN_GAP_NS: u64 = 100_000;

const WINDOW_NS: u64 = 1_000_000;

/// Computes the metrics of results from packets. Shares are of packets, not of trains. Acknowledgements and other
/// packets of at most half the largest size are left out. Metrics that begin with `late_` are of the second half of the
/// packets, and so exclude slow start.
#[must_use]
pub fn figures(packets: &[Packet]) -> Vec<Figure> {
    let largest = packets.iter().map(|packet| packet.frame_bytes).max().unwrap_or(0);
    let mut packets: Vec<_> = packets.iter().filter(|packet| packet.frame_bytes > largest / 2).collect();
    // Stamps are of the wall clock, which may be set back during a capture.
    packets.sort_by_key(|packet| packet.at_ns);
    let gaps_ns: Vec<_> = packets.windows(2).map(|pair| pair[1].at_ns.saturating_sub(pair[0].at_ns)).collect();
    let all = shares(&gaps_ns);
    let late_gaps_ns = gaps_ns.get(packets.len() / 2..).unwrap_or_default();
    let late = shares(late_gaps_ns);
    let shares = [
        ("train_le_1_pct", all[0]),
        ("train_le_2_pct", all[1]),
        ("train_le_5_pct", all[2]),
        ("late_train_le_1_pct", late[0]),
        ("late_train_le_2_pct", late[1]),
        ("late_train_le_5_pct", late[2]),
    ];
    let (all, late) = (gap_quantiles_us(&gaps_ns), gap_quantiles_us(late_gaps_ns));
    let gaps = [
        ("gap_p10_us", all[0]),
        ("gap_p50_us", all[1]),
        ("gap_p90_us", all[2]),
        ("late_gap_p10_us", late[0]),
        ("late_gap_p50_us", late[1]),
        ("late_gap_p90_us", late[2]),
    ];
    let mut windows = bytes_from_each(&packets);
    windows.sort_unstable();
    let figure = |unit| move |(metric, value)| Figure { metric, value, unit };
    let mut figures: Vec<_> = shares.map(figure("%")).into();
    figures.extend(gaps.map(figure("µs")));
    figures.push(Figure { metric: "bytes_in_1ms_p99", value: quantile(&windows, 0.99) as f64, unit: "bytes" });
    figures
}

/// Returns the percentages of packets in trains of at most one, two and five; zeros if there is no gap.
fn shares(gaps_ns: &[u64]) -> [f64; 3] {
    let trains = if gaps_ns.is_empty() { Vec::new() } else { trains(gaps_ns) };
    [1, 2, 5].map(|most| {
        let within: usize = trains.iter().filter(|len| **len <= most).sum();
        100.0 * within as f64 / (gaps_ns.len() + 1) as f64
    })
}

/// Returns the gaps below which 10, 50 and 90 % of gaps lie, in microseconds; zeros if there is no gap.
fn gap_quantiles_us(gaps_ns: &[u64]) -> [f64; 3] {
    let mut sorted = gaps_ns.to_vec();
    sorted.sort_unstable();
    [0.1, 0.5, 0.9].map(|share| quantile(&sorted, share) as f64 / 1e3)
}

/// Returns the lengths of trains.
fn trains(gaps_ns: &[u64]) -> Vec<usize> {
    gaps_ns.split(|gap| *gap >= TRAIN_GAP_NS).map(|within| within.len() + 1).collect()
}

/// Returns for each packet the bytes of the millisecond that it begins.
fn bytes_from_each(packets: &[&Packet]) -> Vec<u64> {
    let (mut end, mut bytes) = (0, 0_u64);
    let mut windows = Vec::with_capacity(packets.len());
    for first in packets {
        while let Some(packet) = packets.get(end)
            && packet.at_ns < first.at_ns + WINDOW_NS
        {
            bytes += u64::from(packet.frame_bytes);
            end += 1;
        }
        windows.push(bytes);
        bytes -= u64::from(first.frame_bytes);
    }
    windows
}

fn quantile(sorted: &[u64], share: f64) -> u64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use instruments::load::value;

    use super::*;

    fn packets(at_us: &[u64]) -> Vec<Packet> {
        at_us.iter().map(|us| Packet { at_ns: us * 1_000, frame_bytes: 1_000, destination_port: 1 }).collect()
    }

    fn of(at_us: &[u64], metric: &str) -> f64 {
        value(&figures(&packets(at_us)), metric).unwrap()
    }

    #[test]
    fn a_stamp_ahead_of_later_packets_takes_no_packets_into_its_millisecond() {
        let at_us: Vec<u64> = [1_000_000].into_iter().chain((0..100).map(|packet| packet * 500)).collect();
        assert_eq!(of(&at_us, "bytes_in_1ms_p99"), 2_000.0);
    }

    #[test]
    fn a_train_is_what_follows_within_a_tenth_of_a_millisecond() {
        let at_us = [0, 500, 510, 700, 710, 720, 820];
        assert_eq!(trains(&[500_000, 10_000, 190_000, 10_000, 10_000, 100_000]), [1, 2, 3, 1]);
        assert!((of(&at_us, "train_le_1_pct") - 200.0 / 7.0).abs() < 1e-9);
        assert!((of(&at_us, "train_le_2_pct") - 400.0 / 7.0).abs() < 1e-9);
        assert_eq!(of(&at_us, "train_le_5_pct"), 100.0);
        assert_eq!(of(&[0, 300, 600, 900], "gap_p50_us"), 300.0);
    }

    #[test]
    fn late_trains_and_gaps_are_those_of_the_second_half() {
        let at_us = [0, 10, 20, 30, 1_000, 2_000, 3_000, 3_010];
        assert_eq!(of(&at_us, "train_le_1_pct"), 25.0);
        assert_eq!(of(&at_us, "late_train_le_1_pct"), 50.0);
        assert_eq!(of(&at_us, "late_train_le_2_pct"), 100.0);
        assert_eq!([of(&at_us, "gap_p10_us"), of(&at_us, "late_gap_p10_us")], [10.0, 10.0]);
        assert_eq!([of(&at_us, "gap_p50_us"), of(&at_us, "late_gap_p50_us")], [10.0, 1_000.0]);
        assert_eq!([of(&[0], "late_train_le_1_pct"), of(&[0], "late_gap_p50_us")], [0.0, 0.0]);
    }

    #[test]
    fn bytes_are_counted_in_the_millisecond_from_each_packet_on() {
        let all = packets(&[0, 400, 999, 1_000, 5_000]);
        assert_eq!(bytes_from_each(&all.iter().collect::<Vec<_>>()), [3_000, 3_000, 2_000, 1_000, 1_000]);
        assert_eq!(of(&[0, 400, 999, 1_000, 5_000], "bytes_in_1ms_p99"), 3_000.0);
    }

    #[test]
    fn acknowledgements_do_not_count() {
        let mut all = packets(&[0, 1_000, 2_000]);
        all.insert(1, Packet { at_ns: 10_000, frame_bytes: 80, destination_port: 1 });
        assert_eq!(value(&figures(&all), "train_le_1_pct"), Some(100.0));
        assert!(figures(&[]).iter().all(|figure| figure.value == 0.0));
    }
}
