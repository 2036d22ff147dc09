//! Reasons for refusing a proxy request, and the response for each.

use std::borrow::Cow;

use thiserror::Error;

use crate::{
    h3::{Field, ResponseHead},
    proxy_status::{ErrorType, ProxyName, ProxyStatus},
    target::InvalidTarget,
};

/// An error in a proxy request, beyond the errors that [`crate::h3`] finds in any request.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum MalformedRequest {
    /// The scheme is not that of the template, `https` (RFC 9298 §3.4).
    #[error("the scheme has to be https")]
    Scheme,
    /// `:authority` or `:path` is missing, empty or not text (RFC 9298 §3.4).
    #[error("the authority or the path is missing")]
    Uri,
    /// A field that describes content, on a message that uses the Capsule Protocol (RFC 9297 §3.2).
    #[error("the capsule protocol allows no content-length, content-type or transfer-encoding")]
    ContentField,
}

/// Why a request is refused. Its `Display` text is the remark sent to the client; it reveals nothing that the
/// client did not know, such as the address of a name.
///
/// Refusals that concern the client come first because they have to be checked first: a stranger must not learn
/// about other errors in its request.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// No credentials.
    #[error("this proxy asks for a token in proxy-authorization")]
    CredentialsMissing,
    /// Unknown credentials.
    #[error("the token in proxy-authorization is not valid")]
    CredentialsInvalid,
    /// Credentials that were valid and have expired.
    #[error("the token in proxy-authorization has expired")]
    CredentialsExpired,
    /// No certificate, where a certificate is the only way in.
    #[error("this proxy asks for a client certificate")]
    CertificateMissing,
    /// A certificate of the right authority that belongs to no user.
    #[error("the client certificate is not known to this proxy")]
    CertificateUnknown,
    /// A malformed request. After the response its stream is reset with `H3_MESSAGE_ERROR` (RFC 9114 §4.1.2).
    #[error(transparent)]
    Malformed(#[from] MalformedRequest),
    /// A request without a valid target (RFC 9298 §3, RFC 9110 §9.3.6).
    #[error(transparent)]
    Target(#[from] InvalidTarget),
    /// No template matches, or the request is not for a tunnel.
    #[error("there is nothing here; this relay serves {serves}")]
    NotFound {
        /// A template that is served.
        serves: String,
    },
    /// A template's URI, requested with another method than CONNECT.
    #[error("only CONNECT is served here")]
    MethodNotAllowed,
    /// An unknown `:protocol` (RFC 9220 §3).
    #[error("this protocol is not served")]
    UnknownProtocol,
    /// The rules forbid the target's address.
    #[error("the rules of this proxy forbid the target's address")]
    AddressProhibited,
    /// The rules forbid the target's name.
    #[error("the rules of this proxy forbid the target's name")]
    NameProhibited,
    /// The rules forbid the target's port.
    #[error("the rules of this proxy forbid the target's port")]
    PortProhibited,
    /// The client has as many tunnels as it is allowed.
    #[error("too many tunnels")]
    TunnelLimitReached,
    /// The user has as many connections as it is allowed.
    #[error("too many connections")]
    ConnectionLimitReached,
    /// The client has used up its monthly quota.
    #[error("this month's quota is used up")]
    QuotaUsedUp {
        /// Seconds until the next month begins.
        retry_after_s: u64,
    },
    /// The proxy has reached its limits.
    #[error("this proxy is at its limit")]
    Overloaded {
        /// Seconds to wait before a retry.
        retry_after_s: u32,
    },
    /// The target's name did not resolve.
    #[error("the target's name does not resolve")]
    DnsError {
        /// The DNS response code, such as `NXDOMAIN`, if there was a response.
        rcode: Option<Cow<'static, str>>,
    },
    /// The target's name did not resolve in time.
    #[error("the target's name did not resolve in time")]
    DnsTimeout,
    /// There is no route to the target.
    #[error("there is no route to the target")]
    Unroutable,
    /// The target refused the connection.
    #[error("the target refused the connection")]
    ConnectionRefused,
    /// The target accepted no connection in time.
    #[error("the target did not answer in time")]
    ConnectionTimeout,
    /// The target closed the connection at once.
    #[error("the target closed the connection")]
    ConnectionTerminated,
    /// A failure in the proxy.
    #[error("this proxy failed")]
    Internal,
}

/// Seconds after which a user with too many connections may try again, when one of them may have ended.
const CONNECTION_RETRY_S: u64 = 10;

impl Refusal {
    /// Status code, proxy error type and label of each reason, in a single table.
    ///
    /// The status follows RFC 9209 §2.3, except that a prohibited address is a client error (403), not a network error
    /// (502), because a retry does not help.
    fn row(&self) -> (u16, ErrorType, &'static str) {
        use ErrorType as E;
        match self {
            Self::CredentialsMissing => (407, E::HttpRequestDenied, "credentials_missing"),
            Self::CredentialsInvalid => (407, E::HttpRequestDenied, "credentials_invalid"),
            Self::CredentialsExpired => (407, E::HttpRequestDenied, "credentials_invalid"),
            Self::CertificateMissing => (403, E::HttpRequestDenied, "certificate_missing"),
            Self::CertificateUnknown => (403, E::HttpRequestDenied, "certificate_unknown"),
            Self::Malformed(_) => (400, E::HttpRequestError, "malformed"),
            Self::Target(_) => (400, E::HttpRequestError, "target_invalid"),
            Self::NotFound { .. } => (404, E::ProxyInternalResponse, "not_found"),
            Self::MethodNotAllowed => (405, E::ProxyInternalResponse, "method_not_allowed"),
            Self::UnknownProtocol => (501, E::ProxyInternalResponse, "unknown_protocol"),
            Self::AddressProhibited => (403, E::DestinationIpProhibited, "address_prohibited"),
            Self::NameProhibited => (403, E::HttpRequestDenied, "name_prohibited"),
            Self::PortProhibited => (403, E::HttpRequestDenied, "port_prohibited"),
            Self::TunnelLimitReached => (429, E::HttpRequestDenied, "tunnel_limit_reached"),
            Self::ConnectionLimitReached => (429, E::HttpRequestDenied, "connection_limit_reached"),
            Self::QuotaUsedUp { .. } => (429, E::HttpRequestDenied, "quota_used_up"),
            Self::Overloaded { .. } => (503, E::ConnectionLimitReached, "overloaded"),
            Self::DnsError { .. } => (502, E::DnsError, "dns_error"),
            Self::DnsTimeout => (504, E::DnsTimeout, "dns_timeout"),
            Self::Unroutable => (502, E::DestinationIpUnroutable, "unroutable"),
            Self::ConnectionRefused => (502, E::ConnectionRefused, "connection_refused"),
            Self::ConnectionTimeout => (504, E::ConnectionTimeout, "connection_timeout"),
            Self::ConnectionTerminated => (502, E::ConnectionTerminated, "connection_terminated"),
            Self::Internal => (500, E::ProxyInternalError, "internal"),
        }
    }

    /// Returns the status code of the response.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.row().0
    }

    /// Returns the proxy error type of the response.
    #[must_use]
    pub fn error_type(&self) -> ErrorType {
        self.row().1
    }

    /// Returns the reason as a label for counters.
    #[must_use]
    pub fn label(&self) -> &'static str {
        self.row().2
    }

    /// Returns the response of the proxy named `proxy`.
    #[must_use]
    pub fn response(&self, proxy: &ProxyName) -> ResponseHead {
        let rcode = if let Self::DnsError { rcode } = self { rcode.clone() } else { None };
        let status = ProxyStatus {
            proxy: proxy.clone(),
            error: Some(self.error_type()),
            next_hop: None,
            details: Some(self.to_string().into()),
            rcode,
        };
        let mut fields = vec![status.to_field()];
        fields.extend(self.specific_field());
        ResponseHead { status: self.status(), fields }
    }

    /// Returns the field that the status code requires or permits (RFC 9110 §15.5.6, §15.5.8 and §15.6.4).
    fn specific_field(&self) -> Option<Field> {
        match self {
            Self::CredentialsMissing => Some(Field::new("proxy-authenticate", "Bearer realm=\"proxy\"")),
            // RFC 6750 §3.1: the client did send a token, so the challenge says that the token is the problem.
            Self::CredentialsInvalid => {
                Some(Field::new("proxy-authenticate", "Bearer realm=\"proxy\", error=\"invalid_token\""))
            }
            Self::CredentialsExpired => {
                let challenge =
                    "Bearer realm=\"proxy\", error=\"invalid_token\", error_description=\"the token has expired\"";
                Some(Field::new("proxy-authenticate", challenge))
            }
            Self::MethodNotAllowed => Some(Field::new("allow", "CONNECT")),
            // RFC 6585 §4.
            Self::QuotaUsedUp { retry_after_s } => Some(retry_after(*retry_after_s)),
            // The field distinguishes this 429 from that for too many tunnels, after which the client may try another connection.
            Self::ConnectionLimitReached => Some(retry_after(CONNECTION_RETRY_S)),
            Self::Overloaded { retry_after_s } => Some(retry_after(u64::from(*retry_after_s))),
            _ => None,
        }
    }
}

/// Returns the field that says after how many seconds a retry may succeed (RFC 9110 §10.2.3).
fn retry_after(seconds: u64) -> Field {
    Field::new("retry-after", seconds.to_string())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn fields(refusal: &Refusal) -> Vec<(String, String)> {
        let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        let response = refusal.response(&ProxyName::default());
        response.fields.into_iter().map(|field| (text(field.name), text(field.value))).collect()
    }

    #[test]
    fn a_response_says_why_and_what_its_status_demands() {
        for (refusal, status, proxy_status, specific) in [
            (
                Refusal::CredentialsMissing,
                407,
                r#"paced;error=http_request_denied;details="this proxy asks for a token in proxy-authorization""#,
                Some(("proxy-authenticate", r#"Bearer realm="proxy""#)),
            ),
            (
                Refusal::CredentialsInvalid,
                407,
                r#"paced;error=http_request_denied;details="the token in proxy-authorization is not valid""#,
                Some(("proxy-authenticate", r#"Bearer realm="proxy", error="invalid_token""#)),
            ),
            (
                Refusal::CredentialsExpired,
                407,
                r#"paced;error=http_request_denied;details="the token in proxy-authorization has expired""#,
                Some((
                    "proxy-authenticate",
                    r#"Bearer realm="proxy", error="invalid_token", error_description="the token has expired""#,
                )),
            ),
            (
                Refusal::QuotaUsedUp { retry_after_s: 86_400 },
                429,
                r#"paced;error=http_request_denied;details="this month's quota is used up""#,
                Some(("retry-after", "86400")),
            ),
            (
                Refusal::ConnectionLimitReached,
                429,
                r#"paced;error=http_request_denied;details="too many connections""#,
                Some(("retry-after", "10")),
            ),
            (
                Refusal::MethodNotAllowed,
                405,
                r#"paced;error=proxy_internal_response;details="only CONNECT is served here""#,
                Some(("allow", "CONNECT")),
            ),
            (
                Refusal::Overloaded { retry_after_s: 30 },
                503,
                r#"paced;error=connection_limit_reached;details="this proxy is at its limit""#,
                Some(("retry-after", "30")),
            ),
            (
                Refusal::DnsError { rcode: Some("NXDOMAIN".into()) },
                502,
                r#"paced;error=dns_error;details="the target's name does not resolve";rcode="NXDOMAIN""#,
                None,
            ),
            (
                Refusal::Target(InvalidTarget::NumericName),
                400,
                r#"paced;error=http_request_error;details="the target host ends in a number but is no IPv4 address""#,
                None,
            ),
        ] {
            let expected: Vec<_> = std::iter::once(("proxy-status", proxy_status)).chain(specific).collect();
            let fields = fields(&refusal);
            assert_eq!(refusal.status(), status, "{refusal:?}");
            assert_eq!(fields.iter().map(|(n, v)| (&n[..], &v[..])).collect::<Vec<_>>(), expected, "{refusal:?}");
        }
    }

    #[test]
    fn statuses_are_the_recommended_ones_but_for_what_is_the_clients_own_doing() {
        // RFC 9209 §2.3 recommends these statuses for their error types.
        for (refusal, status) in [
            (Refusal::CertificateMissing, 403),
            (Refusal::CertificateUnknown, 403),
            (Refusal::NameProhibited, 403),
            (Refusal::PortProhibited, 403),
            (Refusal::Overloaded { retry_after_s: 1 }, 503),
            (Refusal::DnsError { rcode: None }, 502),
            (Refusal::DnsTimeout, 504),
            (Refusal::Unroutable, 502),
            (Refusal::ConnectionRefused, 502),
            (Refusal::ConnectionTimeout, 504),
            (Refusal::ConnectionTerminated, 502),
            (Refusal::Internal, 500),
        ] {
            assert_eq!(refusal.status(), status, "{refusal:?}");
        }
        for (refusal, status) in [
            (Refusal::AddressProhibited, 403),
            (Refusal::TunnelLimitReached, 429),
            (Refusal::ConnectionLimitReached, 429),
        ] {
            assert_eq!(refusal.status(), status);
        }
    }
}
