//! Why the kernel refused a program or a table.

use std::{error::Error as StdError, fmt, fs};

use crate::probe::missing_rights;

/// The error of the kernel, or of the library.
pub type Cause = Box<dyn StdError + Send + Sync>;

/// An error of a program or its tables: names program, device and hook, the kernel, and missing rights.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused the program or one of its maps.
    #[error("failed to load the {program} program on {circumstances}: {}", chain(cause.as_ref()))]
    Load {
        /// The program.
        program: &'static str,
        /// Kernel and rights.
        circumstances: Circumstances,
        /// Why.
        cause: Cause,
    },
    /// The program was loaded but could not be attached.
    #[error("failed to attach the {program} program to {device} ({hook}) on {circumstances}: {}", chain(cause.as_ref()))]
    Attach {
        /// The program.
        program: &'static str,
        /// The device's name.
        device: String,
        /// The hook.
        hook: &'static str,
        /// Kernel and rights.
        circumstances: Circumstances,
        /// Why.
        cause: Cause,
    },
    /// A table could not be read or written.
    #[error("failed to use the map {map} of the {program} program: {}", chain(cause.as_ref()))]
    Map {
        /// The program.
        program: &'static str,
        /// The map's name.
        map: &'static str,
        /// Why.
        cause: Cause,
    },
    /// A trial run failed.
    #[error("failed to run the {program} program on a packet: {}", chain(cause.as_ref()))]
    Trial {
        /// The program.
        program: &'static str,
        /// Why.
        cause: Cause,
    },
}

/// Kernel and rights at the time of an error.
#[derive(Debug)]
pub struct Circumstances {
    kernel: String,
    missing: Vec<&'static str>,
}

impl Circumstances {
    /// Returns the circumstances of the calling thread, now.
    pub(crate) fn now() -> Self {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self { kernel: kernel.trim().to_owned(), missing: missing_rights() }
    }
}

impl fmt::Display for Circumstances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Linux {}", self.kernel)?;
        if !self.missing.is_empty() {
            write!(f, " without {}", self.missing.join(" and "))?;
        }
        Ok(())
    }
}

/// Joins an error and its causes, leaving out causes that add nothing.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}
