//! Reads the output of `perf script` as events: one line each, and below it the stack, if there is one.

use std::io::{self, BufRead};

/// A recorded event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event<'a> {
    /// The name of the thread that ran.
    pub command: &'a str,
    /// The thread's ID.
    pub thread: u32,
    /// The CPU that it ran on.
    pub cpu: u32,
    /// The time, by CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// The kind of event: a tracepoint's name with its system, or the name of a clock.
    pub name: &'a str,
    /// The fields of a tracepoint, as text.
    pub text: &'a str,
    /// The stack's functions, the innermost first.
    pub stack: &'a [String],
}

impl<'a> Event<'a> {
    /// Reads a line such as `worker-1  812 [003] 73408.610716704:  net:net_dev_queue: dev=eth0 len=1242`.
    fn parse(line: &'a str) -> Option<Self> {
        // Names of threads may contain anything, so the line is split where a CPU's number and the fields after it
        // parse.
        let mut begins = line.match_indices(" [").map(|(at, _)| at);
        begins.find_map(|at| {
            let (command, thread) = line[..at].trim().rsplit_once(' ')?;
            let (cpu, rest) = line[at + 2..].split_once("] ")?;
            let (time, rest) = rest.trim_start().split_once(": ")?;
            let (seconds, fraction) = time.split_once('.')?;
            let time_ns = seconds.parse::<u64>().ok()? * 1_000_000_000 + fraction.parse::<u64>().ok()?;
            let rest = rest.trim();
            let (name, text) = rest.split_once(": ").unwrap_or((rest.trim_end_matches(':'), ""));
            let (thread, cpu) = (thread.parse().ok()?, cpu.parse().ok()?);
            let (command, text) = (command.trim(), text.trim_start());
            (fraction.len() == 9).then_some(Self { command, thread, cpu, time_ns, name, text, stack: &[] })
        })
    }

    /// Returns the value of a tracepoint's field.
    pub(crate) fn field(&self, key: &str) -> Option<&'a str> {
        let mut words = self.text.split_ascii_whitespace();
        words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }

    /// Returns the value of a field as a number: decimal, or hexadecimal after `0x`.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        let value = self.field(key)?;
        match value.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => value.parse().ok(),
        }
    }
}

/// The output of `perf script`.
pub(crate) struct Lines<R>(R);

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(lines: R) -> Self {
        Self(lines)
    }

    /// Gives every event to `each`; returns how many events `perf` lost.
    pub(crate) fn read(self, mut each: impl FnMut(&Event<'_>)) -> io::Result<u64> {
        let (mut head, mut stack, mut lost) = (String::new(), Vec::new(), 0);
        for line in self.0.split(b'\n').chain([Ok(Vec::new())]) {
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            if let Some((_, count)) = line.split_once("PERF_RECORD_LOST") {
                // Either " lost N" or "_SAMPLES lost N".
                lost += count.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok()).unwrap_or(0);
                continue;
            }
            // Below its event, each line of a stack is an address and a function.
            if line.starts_with(char::is_whitespace) && !head.is_empty() && Event::parse(&line).is_none() {
                stack.extend(line.trim().split_once(' ').map(|(_, function)| function.trim().to_owned()));
                continue;
            }
            if let Some(event) = Event::parse(&head) {
                each(&Event { stack: &stack, ..event });
            }
            stack.clear();
            head = line.into_owned();
        }
        Ok(lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Found = (String, u32, u64, String, Vec<String>);

    fn read(text: &str) -> (Vec<Found>, u64) {
        let mut found = Vec::new();
        let lost = Lines::new(text.as_bytes()).read(|event| {
            let (name, stack) = (event.name.to_owned(), event.stack.to_vec());
            found.push((event.command.to_owned(), event.thread, event.time_ns, name, stack));
        });
        (found, lost.unwrap())
    }

    #[test]
    fn a_line_is_an_event_even_if_the_thread_has_an_odd_name() {
        let text =
            "  a [1] b: c   812 [003] 73408.610716704:   net:net_dev_queue: dev=v0 skbaddr=0xffff88821ef1ee00 len=1242";
        let event = Event::parse(text).unwrap();
        assert_eq!((event.command, event.thread, event.cpu), ("a [1] b: c", 812, 3));
        assert_eq!((event.time_ns, event.name), (73_408_610_716_704, "net:net_dev_queue"));
        assert_eq!((event.field("dev"), event.number("len")), (Some("v0"), Some(1242)));
        assert_eq!(event.number("skbaddr"), Some(0xffff_8882_1ef1_ee00));
        assert_eq!((event.field("de"), event.number("dev")), (None, None));
        for wrong in ["", "a 1 [x] 1.000000000: b: c", "a 1 [001] 1.5: b: c", "a b [001] 1.000000000: c: d"] {
            assert_eq!(Event::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn stacks_belong_to_the_event_above_and_losses_are_counted() {
        let text = "\
paced 7 [000] 1.000000001: cpu-clock:ppp: 
\tffffffff81 do_syscall_64
\t    55d0 <relay as core::future::Future>::poll
\t    55d1 [unknown]

 swapper 0 [001] 2.000000000: PERF_RECORD_LOST lost 5
paced 7 [001] 2.000000002: cpu-clock:ppp:
\t    55d2 main

paced 7 [001] 2.000000003: PERF_RECORD_LOST_SAMPLES lost 4
";
        let (found, lost) = read(text);
        let stack = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let of = |time_ns, names: &[&str]| ("paced".to_owned(), 7, time_ns, "cpu-clock:ppp".to_owned(), stack(names));
        assert_eq!(
            found,
            [
                of(1_000_000_001, &["do_syscall_64", "<relay as core::future::Future>::poll", "[unknown]"]),
                of(2_000_000_002, &["main"]),
            ]
        );
        assert_eq!(lost, 9);
    }
}
