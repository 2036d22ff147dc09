//! The way to the daemon: its control socket.

use std::path::PathBuf;

use clap::Args;
use paced::{
    control::grpc::{self, Client},
    state,
};
use tonic::{Code, Status};

/// Where a daemon that was installed has its socket.
const INSTALLED: &str = "/run/paced/control.sock";

#[derive(Args)]
pub(crate) struct Door {
    /// The daemon's control socket. Without it, that of the service, or else of `paced run` in development mode
    #[arg(long, value_name = "PATH", env = "PACED_SOCKET")]
    socket: Option<PathBuf>,
}

/// Nobody answers.
#[derive(Debug, thiserror::Error)]
#[error("no daemon answers at {socket}: {error}; is it running, and may this user connect (group paced)?")]
pub(crate) struct Unreachable {
    socket: String,
    error: String,
}

impl Door {
    fn path(&self) -> PathBuf {
        let development = || state::development_dir().join("control.sock");
        let installed = PathBuf::from(INSTALLED);
        self.socket.clone().unwrap_or_else(|| if installed.exists() { installed } else { development() })
    }

    /// Connects to the daemon.
    pub(crate) async fn open(&self) -> Result<Client, Unreachable> {
        let path = self.path();
        grpc::connect(&path).await.map_err(|error| {
            let error: &dyn std::error::Error = &error;
            // The outer ones only say that it failed.
            let cause = std::iter::successors(Some(error), |error| error.source()).last().unwrap_or(error);
            Unreachable { socket: path.display().to_string(), error: cause.to_string() }
        })
    }
}

/// The exit code for a failure: what to do about it differs.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<Unreachable>() {
        return 5;
    }
    match error.downcast_ref::<Status>().map(Status::code) {
        Some(Code::InvalidArgument | Code::Aborted | Code::FailedPrecondition | Code::NotFound | Code::OutOfRange) => 3,
        Some(Code::PermissionDenied | Code::Unauthenticated) => 4,
        Some(Code::Unavailable) => 5,
        _ => 1,
    }
}

/// What to tell people of a failure.
pub(crate) fn message(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Status>() {
        Some(status) => status.message().to_owned(),
        None => format!("{error:#}"),
    }
}
