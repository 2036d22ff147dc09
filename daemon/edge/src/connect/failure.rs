//! Why there is no tunnel.

use std::{sync::Arc, time::Duration};

use masque::{
    proxy_status::{ErrorType, ProxyStatus},
    request::TunnelRefused,
};
use quic::h3;
use relay_client::{OpenError, error::ConnectError};
use role::access::record::RefusedRequest;
use uplink::NoDatagrams;

/// Why there is no tunnel for a sender or for an application's connection.
#[derive(Debug, thiserror::Error)]
pub enum NoConnection {
    /// There is no connection to the relay.
    #[error("{0}")]
    NoLink(Arc<ConnectError>),
    /// The connection to the relay, or the request, was lost before there was an answer.
    #[error("the relay was lost: {0}")]
    Lost(h3::Error),
    /// The relay refused.
    #[error(transparent)]
    Refused(#[from] TunnelRefused),
    /// The relay did not answer.
    #[error("the relay does not answer")]
    NoAnswer,
    /// The peer is no relay.
    #[error("the peer does not support extended CONNECT: it is not a UDP proxy")]
    NoExtendedConnect,
    /// There are as many tunnels as the relay allows.
    #[error("the relay allows no more tunnels")]
    Crowded,
    /// The configuration asks for a mode that the relay does not offer.
    #[error(transparent)]
    NoDatagrams(#[from] NoDatagrams),
}

impl NoConnection {
    /// Returns the reason as a label of metrics: for a refusal of the relay, its proxy error type (RFC 9209 §2.3).
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoLink(_) => "no_relay",
            Self::Lost(_) => "relay_lost",
            Self::Refused(TunnelRefused::Status { status: 401 | 407, .. }) => "credentials",
            Self::Refused(refused) => error_type(refused).map_or("refused", ErrorType::name),
            Self::NoAnswer => "no_answer",
            Self::NoExtendedConnect => "no_extended_connect",
            Self::Crowded => "crowded",
            Self::NoDatagrams(_) => "no_datagrams",
        }
    }

    /// Whether the relay refuses, so that the next attempt would fail as well. If a connection is lost or full, the uplink handles that.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::NoLink(_) | Self::Lost(_) | Self::Crowded)
    }

    /// Returns the time that the relay asks clients to wait before the next request (`Retry-After`).
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let Self::Refused(TunnelRefused::Status { retry_after_s, .. }) = self else { return None };
        retry_after_s.map(Duration::from_secs)
    }

    /// Returns the `Proxy-Status` of the relay, and of any proxy behind it.
    #[must_use]
    pub fn proxy_status(&self) -> &[ProxyStatus] {
        match self {
            Self::Refused(TunnelRefused::Status { proxy_status, .. }) => proxy_status,
            _ => &[],
        }
    }

    /// Returns the refusal for the access log.
    #[must_use]
    pub(crate) fn as_refusal(&self) -> RefusedRequest {
        let status = match self {
            Self::Refused(TunnelRefused::Status { status, .. }) => Some(*status),
            _ => None,
        };
        RefusedRequest { status, error: self.error_type().map(ErrorType::name), reason: self.reason() }
    }

    /// Returns the proxy error type that the relay reports.
    #[must_use]
    pub fn error_type(&self) -> Option<ErrorType> {
        if let Self::Refused(refused) = self { error_type(refused) } else { None }
    }
}

fn error_type(refused: &TunnelRefused) -> Option<ErrorType> {
    let TunnelRefused::Status { proxy_status, .. } = refused else { return None };
    proxy_status.iter().find_map(|status| status.error)
}

impl From<OpenError> for NoConnection {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Http(error) => Self::Lost(error),
            OpenError::Refused(refused) => Self::Refused(refused),
            OpenError::NoExtendedConnect => Self::NoExtendedConnect,
            OpenError::NoAnswer => Self::NoAnswer,
        }
    }
}

/// Why [`RelayAccess::open_on`](super::RelayAccess::open_on) opened nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotOpenedOn {
    /// The path takes no tunnels, or its connection was lost or fell silent.
    Path,
    /// The path works, but the relay refused the request or did not answer it.
    Target,
}
