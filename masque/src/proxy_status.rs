//! The `Proxy-Status` field (RFC 9209): a proxy's report about its handling of a request.
//!
//! A list with one member per proxy, the one nearest to the origin first:
//! `paced;error=dns_error;details="…";rcode="NXDOMAIN"`.

use std::borrow::Cow;

use sfv::{BareItem, Item, ItemSerializer, KeyRef, List, ListEntry, Parser, StringRef, TokenRef};
use thiserror::Error;

use crate::h3::Field;

/// The field's name.
pub const FIELD_NAME: &str = "proxy-status";

const ERROR: &KeyRef = KeyRef::constant("error");
const NEXT_HOP: &KeyRef = KeyRef::constant("next-hop");
const DETAILS: &KeyRef = KeyRef::constant("details");
const RCODE: &KeyRef = KeyRef::constant("rcode");

/// Defines [`ErrorType`] from one table: variant and registered name.
macro_rules! error_types {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// The registered proxy error types (RFC 9209 §2.3).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorType {
            $($(#[$doc])* $variant,)*
        }

        impl ErrorType {
            /// Every type, in the order of the RFC.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the registered name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

error_types! {
    /// The DNS lookup of the next hop took too long.
    DnsTimeout = "dns_timeout";
    /// The DNS lookup of the next hop failed; the parameter `rcode` may say how.
    DnsError = "dns_error";
    /// A gateway knows no next hop for the request.
    DestinationNotFound = "destination_not_found";
    /// The next hop is believed to be down.
    DestinationUnavailable = "destination_unavailable";
    /// The proxy must not connect to the next hop's address.
    DestinationIpProhibited = "destination_ip_prohibited";
    /// There is no route to the next hop's address.
    DestinationIpUnroutable = "destination_ip_unroutable";
    /// The next hop refused the connection.
    ConnectionRefused = "connection_refused";
    /// The connection to the next hop ended early.
    ConnectionTerminated = "connection_terminated";
    /// Connecting to the next hop took too long.
    ConnectionTimeout = "connection_timeout";
    /// The next hop was silent for too long.
    ConnectionReadTimeout = "connection_read_timeout";
    /// The next hop accepted no data for too long.
    ConnectionWriteTimeout = "connection_write_timeout";
    /// The proxy has reached its limit of connections.
    ConnectionLimitReached = "connection_limit_reached";
    /// TLS with the next hop failed.
    TlsProtocolError = "tls_protocol_error";
    /// The next hop's certificate did not verify.
    TlsCertificateError = "tls_certificate_error";
    /// The next hop sent a TLS alert.
    TlsAlertReceived = "tls_alert_received";
    /// The proxy itself answers with a client error.
    HttpRequestError = "http_request_error";
    /// The proxy's rules forbid the request.
    HttpRequestDenied = "http_request_denied";
    /// The response broke off.
    HttpResponseIncomplete = "http_response_incomplete";
    /// The response's header section is too large.
    HttpResponseHeaderSectionSize = "http_response_header_section_size";
    /// One of the response's header field lines is too large.
    HttpResponseHeaderSize = "http_response_header_size";
    /// The response's content is too large.
    HttpResponseBodySize = "http_response_body_size";
    /// The response's trailer section is too large.
    HttpResponseTrailerSectionSize = "http_response_trailer_section_size";
    /// One of the response's trailer field lines is too large.
    HttpResponseTrailerSize = "http_response_trailer_size";
    /// The response's transfer coding could not be decoded.
    HttpResponseTransferCoding = "http_response_transfer_coding";
    /// The response's content coding could not be decoded.
    HttpResponseContentCoding = "http_response_content_coding";
    /// The whole response took too long.
    HttpResponseTimeout = "http_response_timeout";
    /// The next hop did not agree to an upgrade.
    HttpUpgradeFailed = "http_upgrade_failed";
    /// The next hop broke the rules of HTTP in another way.
    HttpProtocolError = "http_protocol_error";
    /// The proxy generated the response itself, without a next hop.
    ProxyInternalResponse = "proxy_internal_response";
    /// Something in the proxy failed.
    ProxyInternalError = "proxy_internal_error";
    /// The proxy's configuration is wrong.
    ProxyConfigurationError = "proxy_configuration_error";
    /// The request came back to the proxy.
    ProxyLoopDetected = "proxy_loop_detected";
}

impl ErrorType {
    /// Returns the type registered as `name`, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|error| error.name() == name)
    }
}

/// The name of a proxy: printable ASCII, not empty. `paced` by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyName(sfv::String);

/// The text cannot be the name of a proxy.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a proxy's name consists of printable ASCII characters, at least one")]
pub struct ProxyNameError;

impl ProxyName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`ProxyNameError`] if the name is empty or a structured field cannot carry it (RFC 9651 §3.3.3).
    pub fn new(name: &str) -> Result<Self, ProxyNameError> {
        match StringRef::from_str(name) {
            Ok(string) if !name.is_empty() => Ok(Self(string.to_owned())),
            _ => Err(ProxyNameError),
        }
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl Default for ProxyName {
    fn default() -> Self {
        Self(StringRef::constant("paced").to_owned())
    }
}

/// The report of one proxy about a response (RFC 9209 §2.1).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyStatus {
    /// The reporting proxy.
    pub proxy: ProxyName,
    /// The error, if there was one. Unregistered types are parsed as `None`.
    pub error: Option<ErrorType>,
    /// The next hop of the request: here, the address of the tunnel's target.
    pub next_hop: Option<Cow<'static, str>>,
    /// A remark for humans.
    pub details: Option<Cow<'static, str>>,
    /// The DNS response code behind [`ErrorType::DnsError`], such as `NXDOMAIN`.
    pub rcode: Option<Cow<'static, str>>,
}

impl ProxyStatus {
    /// Returns the field with this report alone. Texts that are not printable ASCII are left out.
    #[must_use]
    pub fn to_field(&self) -> Field {
        let value = ItemSerializer::new();
        let mut value = match TokenRef::from_str(self.proxy.as_str()) {
            Ok(token) => value.bare_item(token),
            Err(_) => value.bare_item(&self.proxy.0),
        };
        if let Some(error) = self.error {
            value = value.parameter(ERROR, TokenRef::constant(error.name()));
        }
        for (key, text) in [(NEXT_HOP, &self.next_hop), (DETAILS, &self.details), (RCODE, &self.rcode)] {
            if let Some(Ok(text)) = text.as_deref().map(StringRef::from_str) {
                value = value.parameter(key, text);
            }
        }
        Field::new(FIELD_NAME, value.finish())
    }

    /// Returns the reports in `fields` of the proxies on the way, the one nearest to the origin first.
    ///
    /// Unknown parameters are ignored, and so is a field that is not a list (RFC 9209 §2.1, RFC 9651 §4.2).
    #[must_use]
    pub fn from_fields(fields: &[Field]) -> Vec<Self> {
        let lines: Vec<&[u8]> =
            fields.iter().filter(|field| field.name == FIELD_NAME).map(|field| &field.value[..]).collect();
        let members = Parser::new(&lines.join(&b", "[..])).parse::<List>().unwrap_or_default();
        members.iter().filter_map(Self::from_member).collect()
    }

    fn from_member(member: &ListEntry) -> Option<Self> {
        let ListEntry::Item(item) = member else { return None };
        Some(Self {
            proxy: ProxyName::new(text(&item.bare_item)?).ok()?,
            error: parameter(item, ERROR).and_then(|name| ErrorType::from_name(&name)),
            next_hop: parameter(item, NEXT_HOP),
            details: parameter(item, DETAILS),
            rcode: parameter(item, RCODE),
        })
    }
}

/// Returns the text of the parameter `key`, whether it is a token or a string.
fn parameter(item: &Item, key: &KeyRef) -> Option<Cow<'static, str>> {
    item.params.get(key).and_then(text).map(|text| text.to_owned().into())
}

fn text(item: &BareItem) -> Option<&str> {
    item.as_string().map(StringRef::as_str).or_else(|| item.as_token().map(TokenRef::as_str))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn field(value: &str) -> Field {
        Field::new(FIELD_NAME, value.to_owned())
    }

    #[test]
    fn every_registered_type_is_there_once_rfc_9209_2_3() {
        assert_eq!(ErrorType::ALL.len(), 32);
        for error in ErrorType::ALL {
            assert_eq!(ErrorType::from_name(error.name()), Some(*error));
        }
        assert_eq!(ErrorType::from_name("read_timeout"), None);
    }

    #[test]
    fn a_report_is_one_item_with_parameters() {
        let status = ProxyStatus {
            error: Some(ErrorType::DnsError),
            details: Some("no \"such\" name".into()),
            rcode: Some("NXDOMAIN".into()),
            ..ProxyStatus::default()
        };
        assert_eq!(status.to_field(), field(r#"paced;error=dns_error;details="no \"such\" name";rcode="NXDOMAIN""#));
        let status = ProxyStatus {
            proxy: ProxyName::new("relay 1").unwrap(),
            next_hop: Some("[2001:db8::1]:443".into()),
            details: Some("not ascii: é".into()),
            ..ProxyStatus::default()
        };
        assert_eq!(status.to_field(), field(r#""relay 1";next-hop="[2001:db8::1]:443""#));
    }

    #[test]
    fn names_that_no_field_can_carry_are_refused() {
        assert_eq!(ProxyName::new(""), Err(ProxyNameError));
        assert_eq!(ProxyName::new("é"), Err(ProxyNameError));
        assert_eq!(ProxyName::new("a\nb"), Err(ProxyNameError));
    }

    #[test]
    fn reports_of_several_proxies_are_read_and_the_unknown_is_ignored() {
        let fields =
            [field("FarAway; error=proxy_made_this_up; x=1; next-hop=origin:80, (a b)"), field("\"near\";next-hop=7")];
        let read = ProxyStatus::from_fields(&fields);
        let read: Vec<_> =
            read.iter().map(|status| (status.proxy.as_str(), status.error, status.next_hop.as_deref())).collect();
        assert_eq!(read, [("FarAway", None, Some("origin:80")), ("near", None, None)]);
        assert_eq!(ProxyStatus::from_fields(&[field("a;;b")]), []);
        assert_eq!(ProxyStatus::from_fields(&[]), []);
    }

    proptest! {
        #[test]
        fn a_reported_status_reads_back(
            name in "[ -~]{1,12}",
            error in prop::option::of(prop::sample::select(ErrorType::ALL)),
            texts in prop::array::uniform3(prop::option::of("[ -~]{0,20}")),
        ) {
            let [next_hop, details, rcode] = texts.map(|text| text.map(Cow::Owned));
            let status = ProxyStatus { proxy: ProxyName::new(&name).unwrap(), error, next_hop, details, rcode };
            prop_assert_eq!(ProxyStatus::from_fields(&[status.to_field()]), vec![status]);
        }

        #[test]
        fn no_value_panics(value: Vec<u8>) {
            let _ = ProxyStatus::from_fields(&[Field::new(FIELD_NAME, value)]);
        }
    }
}
