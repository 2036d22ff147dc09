//! The conventional process metrics: the process's own use of the machine, read at each scrape.
//!
//! They cover the process that moves packets, not the monitor. Names and meanings follow Prometheus's client libraries
//! ("Standard and runtime collectors").

use std::{
    fs,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

/// Reads the process's metrics from `/proc/self`. Values that cannot be read are left out.
#[derive(Debug)]
pub struct ProcessMetrics {
    started: SystemTime,
}

impl ProcessMetrics {
    /// Takes the current time as the start of the process.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "the time of the call matters")]
    pub fn new() -> Self {
        Self { started: SystemTime::now() }
    }
}

/// Clock ticks per second in values that the kernel reports to programs (`USER_HZ`), on all architectures of today.
const TICKS_PER_SECOND: f64 = 100.0;

/// Returns the CPU time in a line of `/proc/PID/stat`, in seconds (proc_pid_stat(5)).
fn cpu_seconds(stat: &str) -> Option<f64> {
    // The second field is a name in parentheses, which may contain any character.
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks = |number: usize| rest.split_whitespace().nth(number - 3)?.parse::<u64>().ok();
    Some((ticks(14)? + ticks(15)?) as f64 / TICKS_PER_SECOND)
}

/// Returns the number after a name at the beginning of a line, as in `/proc/PID/status` and `/proc/PID/limits`.
pub(crate) fn number(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse::<u64>().ok().map(|number| number as f64)
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut gauge = |name: &str, help: &str, unit: Option<&Unit>, value: Option<f64>| {
            let Some(value) = value else { return Ok(()) };
            let descriptor = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
            ConstGauge::new(value).encode(descriptor)
        };
        let read = |file: &str| fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
        let (status, limits) = (read("status"), read("limits"));
        // One of them is the descriptor of the folder itself.
        let open = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count().saturating_sub(1) as f64);
        let bytes = |name| number(&status, name).map(|kib| kib * 1024.0);
        let started = self.started.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64());
        gauge("process_open_fds", "Open file descriptors", None, open)?;
        gauge("process_max_fds", "Most file descriptors that may be open", None, number(&limits, "Max open files"))?;
        gauge("process_threads", "Threads", None, number(&status, "Threads:"))?;
        gauge("process_virtual_memory", "Virtual memory", Some(&Unit::Bytes), bytes("VmSize:"))?;
        gauge("process_resident_memory", "Resident memory", Some(&Unit::Bytes), bytes("VmRSS:"))?;
        gauge("process_start_time", "When the process started, since 1970", Some(&Unit::Seconds), started)?;
        if let Some(seconds) = cpu_seconds(&read("stat")) {
            let help = "CPU time, of the user and of the kernel";
            let descriptor =
                encoder.encode_descriptor("process_cpu", help, Some(&Unit::Seconds), MetricType::Counter)?;
            ConstCounter::new(seconds).encode(descriptor)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_be_called_anything() {
        let line = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 3 0 99 4096000 200 18446744073709551615 1";
        assert_eq!(cpu_seconds(line), Some(2.0));
        assert_eq!((cpu_seconds(""), cpu_seconds("7 (a) S 1")), (None, None));
    }

    #[test]
    fn numbers_are_found_by_their_names() {
        let limits =
            "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 524288  files\n";
        assert_eq!((number(limits, "Max open files"), number(limits, "Max")), (Some(1024.0), None));
        assert_eq!(number("Max open files   unlimited  unlimited  files", "Max open files"), None);
    }
}
