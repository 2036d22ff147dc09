//! Which requests of web pages a listener refuses. A browser sends what any page asks for, also to programs on its own host, so that
//! without keys each page that a person visits could use the models.
//!
//! A browser tells for which page it sends a request: by `sec-fetch-site` (W3C Fetch Metadata) to hosts that it trusts, such as those on
//! loopback, and by `origin` (RFC 6454) if it is old. Other programs send neither. A page could still make the browser take the listener
//! for the page's own server: the page's name is resolved again, to an address of the listener ("DNS rebinding"). The request is then for
//! this name, which the listener does not have.

use std::{net::SocketAddr, sync::Arc};

use config::targets::Pattern;
use hyper::{
    header::{HOST, ORIGIN},
    http::request::Parts,
};
use masque::target::{Host, Target};
use openai::OpenAiError;

/// The requests that a listener refuses because of the page or the host that they name. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct PageRules {
    /// Hosts of the listener, and of pages of other sites that may use it.
    hosts: Arc<[Pattern]>,
    /// Whether requests for names that are not among these hosts are refused.
    checks_names: bool,
}

impl PageRules {
    /// Returns the rules of a listener that is also known by these `hosts`, and whose clients see a certificate if it `is_tls`. A browser
    /// compares the certificate with the name, and on other addresses than loopback the names are not known, so neither checks names.
    #[must_use]
    pub fn new(hosts: &[Pattern], listener: SocketAddr, is_tls: bool) -> Self {
        Self { hosts: hosts.into(), checks_names: !is_tls && listener.ip().to_canonical().is_loopback() }
    }

    /// Checks the head of a request that shows no known key. A page cannot show one: it does not know any.
    ///
    /// # Errors
    /// A browser sends the request for a page of another site, or it is for a name that the listener does not have.
    pub(crate) fn check(&self, parts: &Parts) -> Result<(), OpenAiError> {
        let authorities = || {
            let fields = parts.headers.get_all(HOST).iter().map(|value| value.to_str().unwrap_or_default());
            // With HTTP/2, the URI has the authority.
            fields.chain(parts.uri.authority().map(|authority| authority.as_str()))
        };
        if self.checks_names && authorities().any(|authority| !self.is_own(authority)) {
            return Err(OpenAiError::UnknownHost);
        }
        let origin = parts.headers.get(ORIGIN).map(|origin| origin.to_str().unwrap_or_default());
        // The opaque origin, `null`, has no host.
        let of_page = origin.map(|origin| origin.split_once("://").map_or("", |(_, authority)| authority));
        let is_foreign = match parts.headers.get("sec-fetch-site").map(|site| site.as_bytes()) {
            Some(site) => [&b"cross-site"[..], b"same-site"].contains(&site),
            None => of_page.is_some_and(|page| !authorities().any(|authority| authority.eq_ignore_ascii_case(page))),
        };
        if is_foreign && !of_page.is_some_and(|page| self.is_named(page)) {
            return Err(OpenAiError::ForeignPage);
        }
        Ok(())
    }

    /// Whether a request for this authority is for the listener.
    fn is_own(&self, authority: &str) -> bool {
        let is_literal = match host(authority) {
            Some(Host::Ip(_)) => true,
            Some(Host::Name(name)) => name == "localhost",
            None => false,
        };
        is_literal || self.is_named(authority)
    }

    fn is_named(&self, authority: &str) -> bool {
        host(authority).is_some_and(|host| self.hosts.iter().any(|pattern| pattern.covers_host(&host)))
    }
}

/// Returns the host of an authority, with or without a port.
fn host(authority: &str) -> Option<Host> {
    Some(Target::from_https_authority(authority).ok()?.host)
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    const LOCAL: ([u8; 4], u16) = ([127, 0, 0, 1], 8_100);

    fn rules(hosts: &[&str], listener: impl Into<SocketAddr>, is_tls: bool) -> PageRules {
        let hosts: Vec<_> = hosts.iter().map(|host| host.parse().unwrap()).collect();
        PageRules::new(&hosts, listener.into(), is_tls)
    }

    /// Returns the code of the refusal of a request with these fields.
    fn refusal(rules: &PageRules, fields: &[(&str, &str)]) -> Option<&'static str> {
        let request = fields.iter().fold(Request::post("/v1/completions"), |request, (name, value)| {
            if *name == ":authority" { request.uri(format!("http://{value}/")) } else { request.header(*name, *value) }
        });
        rules.check(&request.body(()).unwrap().into_parts().0).err().map(|refusal| refusal.code())
    }

    #[test]
    fn a_request_that_a_browser_sends_for_a_page_of_another_site_is_refused() {
        let own = ("host", "127.0.0.1:8100");
        for listener in [LOCAL, ([192, 0, 2, 1], 8_100)] {
            let rules = rules(&["chat.example", "localhost"], listener, false);
            for (fields, expected) in [
                (&[][..], None),
                (&[("sec-fetch-site", "cross-site"), ("origin", "http://evil.example")], Some("foreign_page")),
                (&[("sec-fetch-site", "cross-site")], Some("foreign_page")),
                (&[("sec-fetch-site", "same-site"), ("origin", "http://127.0.0.1:9000")], Some("foreign_page")),
                // A reverse proxy has changed the host.
                (&[("sec-fetch-site", "same-origin"), ("origin", "https://other.example")], None),
                // A person has typed the address, or an extension of the browser asks.
                (&[("sec-fetch-site", "none"), ("origin", "chrome-extension://abc")], None),
                (&[("origin", "http://evil.example")], Some("foreign_page")),
                (&[("origin", "null")], Some("foreign_page")),
                (&[("origin", "http://127.0.0.1")], Some("foreign_page")),
                (&[("origin", "http://127.0.0.1:8100")], None),
                (&[("origin", "https://Chat.example")], None),
                (&[("sec-fetch-site", "same-site"), ("origin", "http://localhost:3000")], None),
                (&[("sec-fetch-site", "cross-site"), ("origin", "https://chat.example:8443")], None),
                (
                    &[("sec-fetch-site", "cross-site"), ("origin", "https://chat.example.evil.example")],
                    Some("foreign_page"),
                ),
            ] {
                assert_eq!(refusal(&rules, &[&[own], fields].concat()), expected, "{listener:?} {fields:?}");
            }
        }
    }

    #[test]
    fn on_loopback_without_tls_a_request_for_a_name_that_the_listener_does_not_have_is_refused() {
        let rebound = ("host", "evil.example:8100");
        let foreign = Some("unknown_host");
        let local = rules(&["chat.example", "*.lan"], LOCAL, false);
        for (host, expected) in [
            ("127.0.0.1:8100", None),
            ("[::1]:8100", None),
            ("10.1.2.3", None),
            ("localhost:8100", None),
            ("LOCALHOST", None),
            ("chat.example", None),
            ("models.lan:80", None),
            ("lan", foreign),
            ("localhost.evil.example", foreign),
            ("127.0.0.1.evil.example", foreign),
            ("evil.example", foreign),
            ("", foreign),
        ] {
            for name in ["host", ":authority"] {
                if (name, host) != (":authority", "") {
                    assert_eq!(refusal(&local, &[(name, host)]), expected, "{name}: {host}");
                }
            }
        }
        // HTTP/1.0, as some checks of health use it.
        assert_eq!(refusal(&local, &[]), None);
        assert_eq!(refusal(&local, &[("host", "localhost"), rebound]), foreign);
        assert_eq!(refusal(&local, &[rebound, (":authority", "localhost")]), foreign);
        assert_eq!(refusal(&local, &[rebound, ("origin", "http://evil.example:8100")]), foreign);
        assert_eq!(refusal(&rules(&[], LOCAL, true), &[rebound]), None, "the browser has checked the certificate");
        assert_eq!(refusal(&rules(&[], ([0, 0, 0, 0], 8_100), false), &[rebound]), None);
    }
}
