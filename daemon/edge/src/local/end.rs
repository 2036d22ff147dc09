//! The end of a sender's tunnel, with its reason.

use role::tunnel::TunnelEnd;

use crate::connect::{NoConnection, word_of_udp};

/// Why a sender's tunnel no longer exists.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    /// It was never opened.
    #[error(transparent)]
    Unopened(#[from] NoConnection),
    /// The relay ended it gracefully.
    #[error("the relay closed the tunnel")]
    Finished,
    /// It failed.
    #[error(transparent)]
    Failed(#[from] TunnelEnd),
    /// It ended soon after it was opened, which counts as a refusal: the target does not exist, for example.
    #[error("the tunnel ended as soon as it was open: {0}")]
    AtOnce(Box<End>),
}

impl End {
    /// Returns the access log's word for a tunnel that was open.
    pub(super) fn word(&self) -> &'static str {
        if let Self::Failed(error) = self { word_of_udp(error) } else { "finished" }
    }

    /// Whether the next attempt would fail as well.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Unopened(error) => error.is_refusal(),
            Self::AtOnce(_) => true,
            Self::Finished | Self::Failed(_) => false,
        }
    }
}
