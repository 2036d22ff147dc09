//! Which rings were requested, how a test reports that it did not run, and how it reports figures.
//!
//! The runner (`tests/run`) names the rings in `PACED_RINGS`. A test of a ring that was not requested prints one line,
//! `skipped: NAME: REASON`, which the runner counts; in a requested ring, a missing requirement fails the test.

use std::{fmt, io::Write as _, time::Duration};

/// A test's requirements on the machine, besides a compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Root in its own network namespace, on the running kernel.
    Netns,
    /// The Debian kernel of the lab (`tests/vm`), which has `fq`, `netem` and `etf`.
    Vm,
    /// What `Netns` needs, and the real engine that `tests/engines/build.sh` builds.
    Engines,
}

impl Ring {
    /// Returns the name by which `RINGS` and `PACED_RINGS` select the ring.
    pub fn name(self) -> &'static str {
        match self {
            Ring::Netns => "netns",
            Ring::Vm => "vm",
            Ring::Engines => "engines",
        }
    }

    /// Returns whether this run requested the ring.
    pub fn asked(self) -> bool {
        std::env::var("PACED_RINGS").is_ok_and(|rings| rings.split(' ').any(|ring| ring == self.name()))
    }
}

/// Prints the line that the runner counts as one skipped test, bypassing the test harness's capture of output.
///
/// Called by [`ring!`](crate::ring); `inside` is the type name of something defined in the test's body.
pub fn skipped(inside: &str, reason: &str) {
    let name = inside.trim_end_matches("::here").trim_end_matches("::{{closure}}");
    write(&format!("skipped: {name}: {reason}"));
}

/// Prints a line of its own, bypassing the test harness's capture of output.
fn write(line: &str) {
    // One write, so that lines of parallel tests stay whole. If stderr is closed, the test can only continue.
    let _ = std::io::stderr().write_all(format!("\n{line}\n").as_bytes());
}

/// The cost of an event, such as the cut of a link, for one kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// The longest time in which nothing arrived.
    pub gap: Duration,
    /// How many payloads were lost, and how many were sent; `None` if the traffic has no payloads to count.
    pub lost_of: Option<(u64, u64)>,
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gap {} ms", self.gap.as_millis())?;
        self.lost_of.map_or(Ok(()), |(lost, sent)| write!(f, ", {lost} of {sent} payloads lost"))
    }
}

/// Prints what an event cost as one line, `figure: EVENT: TRAFFIC: gap 312 ms, 14 of 2000 payloads lost`, bypassing the test harness's capture of
/// output: the log of `tests/run` keeps the figures of tests that pass, too.
pub fn figure(event: &str, traffic: &str, figure: Figure) {
    write(&format!("figure: {event}: {traffic}: {figure}"));
}

/// Opens a test that belongs to a ring: `lab::ring!(Netns);` as the first statement of the body.
///
/// If the ring was not requested, returns from the test and reports it as skipped.
#[macro_export]
macro_rules! ring {
    ($ring:ident) => {
        if !$crate::report::Ring::$ring.asked() {
            fn here() {}
            let ring = $crate::report::Ring::$ring.name();
            $crate::report::skipped(std::any::type_name_of_val(&here), &format!("the {ring} ring was not requested"));
            return Default::default();
        }
    };
}
