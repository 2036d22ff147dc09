//! A relay's verdict on the client's credentials.

use std::{fmt, sync::Arc};

use masque::{
    h3::ResponseHead,
    proxy_status::{ErrorType, ProxyStatus},
    request::TunnelRefused,
};
use parking_lot::Mutex;

/// What a relay's last answer about the credentials says. Clones share it: all connections to a relay show the same credentials.
#[derive(Clone, Debug, Default)]
pub struct CredentialsStanding(Arc<Mutex<Option<CredentialsRefused>>>);

impl CredentialsStanding {
    /// Returns the refusal, if the relay has accepted no request since.
    #[must_use]
    pub fn refused(&self) -> Option<CredentialsRefused> {
        self.0.lock().clone()
    }

    /// Notes an answer: the refusal of the credentials, or `None` if the relay has accepted a request. Returns whether it is a refusal that
    /// differs from the last answer, so that a caller logs each refusal once.
    pub fn note(&self, refused: Option<CredentialsRefused>) -> bool {
        let mut last = self.0.lock();
        let is_news = refused.is_some() && *last != refused;
        *last = refused;
        is_news
    }
}

/// A relay's refusal of the client's credentials, or of another connection with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialsRefused {
    /// The status code.
    pub status: u16,
    /// The relay's words for it (RFC 9209 §2.1.5); empty without any.
    pub details: String,
}

impl CredentialsRefused {
    /// Returns the refusal that a response to a request for nothing means: 401 or 407 (RFC 9110 §15.5.2, §15.5.8), 403 with the proxy
    /// error type `http_request_denied`, as a certificate gets it, or 429 with that type: the user has too many connections. Other
    /// responses say nothing about credentials.
    #[must_use]
    pub fn of(head: &ResponseHead) -> Option<Self> {
        let reports = ProxyStatus::from_fields(&head.fields);
        let is_denied = || reports.iter().any(|report| report.error == Some(ErrorType::HttpRequestDenied));
        let is_refused = matches!(head.status, 401 | 407) || matches!(head.status, 403 | 429) && is_denied();
        is_refused.then(|| Self::new(head.status, &reports))
    }

    /// Returns the refusal that a response to a request for a tunnel means: 401 or 407. A relay answers 403 about targets, too.
    #[must_use]
    pub fn of_tunnel(refused: &TunnelRefused) -> Option<Self> {
        match refused {
            TunnelRefused::Status { status: status @ (401 | 407), proxy_status, .. } => {
                Some(Self::new(*status, proxy_status))
            }
            _ => None,
        }
    }

    /// Whether the relay knows the client, which has too many connections (429). Its other connections still work.
    #[must_use]
    pub fn is_of_one_connection(&self) -> bool {
        self.status == 429
    }

    fn new(status: u16, reports: &[ProxyStatus]) -> Self {
        let details = reports.iter().find_map(|report| report.details.as_deref()).unwrap_or_default().to_owned();
        Self { status, details }
    }
}

impl fmt::Display for CredentialsRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_of_one_connection() { "another connection" } else { "the credentials" };
        write!(f, "the relay refuses {what} ({})", self.status)?;
        if self.details.is_empty() { Ok(()) } else { write!(f, ": {}", self.details) }
    }
}

#[cfg(test)]
mod tests {
    use masque::{proxy_status::ProxyName, request::Refusal};

    use super::*;

    #[test]
    fn a_refusal_is_news_once_until_the_relay_accepts_a_request_or_says_something_else() {
        let standing = CredentialsStanding::default();
        let refused = |details: &str| Some(CredentialsRefused { status: 407, details: details.to_owned() });
        let answers = [None, refused(""), refused(""), None, refused(""), refused("expired"), refused("expired")];
        let news = answers.map(|answer| standing.note(answer));
        assert_eq!(news, [false, true, false, false, true, true, false]);
    }

    #[test]
    fn refusals_of_tokens_and_certificates_are_told_from_answers_of_relays_that_do_not_know_the_method() {
        let seen = |head: &ResponseHead| CredentialsRefused::of(head).map(|refused| refused.to_string());
        let of = |refusal: Refusal| seen(&refusal.response(&ProxyName::default()));
        let said = of(Refusal::CredentialsInvalid).expect("the token is refused");
        assert!(said.starts_with("the relay refuses the credentials (407): the token"), "{said}");
        let said = of(Refusal::CertificateMissing).expect("the certificate is refused");
        assert!(said.starts_with("the relay refuses the credentials (403): "), "{said}");
        let said = of(Refusal::ConnectionLimitReached).expect("the connection is refused");
        assert_eq!(said, "the relay refuses another connection (429): too many connections");
        assert_eq!(of(Refusal::MethodNotAllowed), None);
        for (status, expected) in [(401, Some("the relay refuses the credentials (401)")), (403, None), (204, None)] {
            assert_eq!(seen(&ResponseHead { status, fields: Vec::new() }).as_deref(), expected, "{status}");
        }
    }
}
