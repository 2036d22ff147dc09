//! Errors of calls over D-Bus, as callers see them.

use zbus::DBusError;

use super::super::{Error, ErrorKind};

/// Why a call failed: the name is for programs, the text for people.
#[derive(Debug, DBusError)]
#[zbus(prefix = "org.paced.Error")]
pub(super) enum Denial {
    #[zbus(error)]
    ZBus(zbus::Error),
    /// The caller has no right to do it.
    AccessDenied(String),
    /// The policy or the configuration is not valid, or an argument is not.
    Invalid(String),
    /// Another revision is in force than the caller expected, or it is on trial.
    Conflict(String),
    /// No such tunnel, class or revision.
    NotFound(String),
    /// The operation failed.
    Failed(String),
}

impl From<Error> for Denial {
    fn from(error: Error) -> Self {
        let message = error.message();
        match error.kind() {
            ErrorKind::Denied => Self::AccessDenied(message),
            ErrorKind::Unknown => Self::NotFound(message),
            ErrorKind::Invalid => Self::Invalid(message),
            ErrorKind::Stale | ErrorKind::Trial => Self::Conflict(message),
            ErrorKind::NotNow | ErrorKind::Busy | ErrorKind::Ending | ErrorKind::Failed => Self::Failed(message),
        }
    }
}
