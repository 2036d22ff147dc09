//! The errors of D-Bus calls, as callers see them.

use zbus::DBusError;

use super::super::{Error, ErrorKind};

/// Why a call failed: the name is for programs, the text for people.
#[derive(Debug, DBusError)]
#[zbus(prefix = "org.paced.Error")]
pub(super) enum Denial {
    #[zbus(error)]
    ZBus(zbus::Error),
    /// The caller may not do this.
    AccessDenied(String),
    /// The policy, the configuration or an argument is not valid.
    Invalid(String),
    /// The revision in force is not the expected one, or it is on trial.
    Conflict(String),
    /// The tunnel, class or revision does not exist.
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
