//! Answers on the terminal: tables for people, JSON for programs.

use std::time::Duration;

use anyhow::Result;
use api::{say, v1};
use serde::Serialize;

/// Prints an answer: as JSON, or by `people`.
pub(crate) fn show<T: Serialize>(as_json: bool, answer: T, people: impl FnOnce(T)) -> Result<()> {
    if as_json {
        say!("{}", serde_json::to_string(&answer)?);
    } else {
        people(answer);
    }
    Ok(())
}

/// Prints rows under their headers.
pub(crate) fn table<const N: usize>(heads: [&str; N], rows: impl IntoIterator<Item = [String; N]>) {
    lines(heads, rows).for_each(|line| say!("{line}"));
}

/// Returns rows under their headers as lines; each column is as wide as its longest cell.
pub(crate) fn lines<const N: usize>(
    heads: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> impl Iterator<Item = String> {
    let rows: Vec<_> = std::iter::once(heads.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    rows.into_iter().map(move |row| {
        let line: String = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}  ")).collect();
        line.trim_end().to_owned()
    })
}

/// Replaces characters that would move a terminal's cursor or change its state.
pub(crate) fn printable(text: &str) -> String {
    let harmless = |letter: char| if letter.is_control() && !"\n\t".contains(letter) { '\u{fffd}' } else { letter };
    text.chars().map(harmless).collect()
}

/// Shows a number of bytes.
pub(crate) fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, ["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Shows a rate.
pub(crate) fn rate(bits_per_sec: f64) -> String {
    scaled(bits_per_sec, 1000.0, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"])
}

fn scaled(mut number: f64, step: f64, units: [&str; 5]) -> String {
    let mut unit = 0;
    while number >= step && unit + 1 < units.len() {
        number /= step;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && number < 100.0);
    format!("{number:.digits$} {}", units[unit])
}

/// Shows how long ago `since` was.
pub(crate) fn age(since: Option<&prost_types::Timestamp>) -> String {
    let since = since.and_then(|since| std::time::SystemTime::try_from(*since).ok());
    let age = since.map(|since| since.elapsed().unwrap_or_default());
    age.map_or_else(|| "-".into(), duration)
}

/// Shows a point in time, to the second.
pub(crate) fn time(at: prost_types::Timestamp) -> String {
    prost_types::Timestamp { nanos: 0, ..at }.to_string()
}

/// Returns the time between two answers with statistics, unless it is zero.
pub(crate) fn span(before: &v1::WatchStatsResponse, now: &v1::WatchStatsResponse) -> Option<Duration> {
    let at = |stats: &v1::WatchStatsResponse| std::time::SystemTime::try_from(stats.time?).ok();
    at(now)?.duration_since(at(before)?).ok().filter(|span| !span.is_zero())
}

/// Shows a duration in its two largest units.
pub(crate) fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {} min", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// Shows a text, or a dash if it is empty.
pub(crate) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".into() } else { text.to_owned() }
}

/// Shows the sender of a tunnel: the user at a relay, the application's address at an edge.
pub(crate) fn sender(tunnel: &v1::Tunnel) -> String {
    if !tunnel.hop.is_empty() {
        return format!("[hop.{}]", tunnel.hop);
    }
    or_dash(if tunnel.role == "edge" { &tunnel.sender } else { &tunnel.user })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_in_the_unit_that_fits() {
        assert_eq!((bytes(0), bytes(1023), bytes(1536)), ("0 B".into(), "1023 B".into(), "1.5 KiB".into()));
        assert_eq!(
            (rate(999.0), rate(4_960_000.0), rate(2e15)),
            ("999 bit/s".into(), "5.0 Mbit/s".into(), "2000 Tbit/s".into())
        );
        let of = |seconds| duration(Duration::from_secs(seconds));
        assert_eq!(
            (of(59), of(61), of(7_260), of(90_000)),
            ("59 s".into(), "1 min 1 s".into(), "2 h 1 min".into(), "1 d 1 h".into())
        );
    }

    #[test]
    fn a_text_of_another_program_does_not_reach_the_terminal_as_commands() {
        assert_eq!(printable("a\u{1b}[2J\tb\r\n\u{9b}c"), "a\u{fffd}[2J\tb\u{fffd}\n\u{fffd}c");
    }

    #[test]
    fn moments_are_shown_to_the_second() {
        let at = prost_types::Timestamp { seconds: 1_800_000_000, nanos: 123_456_789 };
        assert_eq!(time(at), "2027-01-15T08:00:00Z");
    }
}
