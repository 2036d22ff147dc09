//! The URL of an engine, and the paths at which it reports its state.

use std::{fmt, str::FromStr};

use masque::target::Target;

/// The URL of an engine's API, without the `/v1` in its paths.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineUrl {
    /// Whether the engine uses TLS (`https`).
    pub is_tls: bool,
    /// Its host and port.
    pub authority: String,
    /// The part of its paths before `/v1`; empty, or begins with a slash and ends without one.
    pub prefix: String,
}

/// The text is not the URL of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the URL of an engine, such as \"http://127.0.0.1:8000\" or \"https://gpu.example\"")]
pub struct NotAnEngine;

impl FromStr for EngineUrl {
    type Err = NotAnEngine;

    /// Reads a URL. The default port is 80, or 443 with TLS; a `/v1` at the end, as clients of the API usually write
    /// it, is removed.
    fn from_str(text: &str) -> Result<Self, NotAnEngine> {
        let (scheme, rest) = text.split_once("://").ok_or(NotAnEngine)?;
        let (is_tls, port) = match scheme {
            "http" => (false, 80),
            "https" => (true, 443),
            _ => return Err(NotAnEngine),
        };
        let (host, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let has_port =
            host.rsplit_once(':').is_some_and(|(before, _)| !before.starts_with('[') || before.ends_with(']'));
        let authority = if has_port { host.to_owned() } else { format!("{host}:{port}") };
        Target::from_authority(&authority).map_err(|_| NotAnEngine)?;
        let prefix = path.trim_end_matches('/');
        let prefix = prefix.strip_suffix("/v1").unwrap_or(prefix);
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~%".contains(&byte);
        if !prefix.bytes().all(is_plain) {
            return Err(NotAnEngine);
        }
        Ok(Self { is_tls, authority, prefix: prefix.to_owned() })
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.is_tls { "https" } else { "http" }, self.authority, self.prefix)
    }
}

/// The path of a URL, with or without a query: the place below an engine's URL where it reports its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UrlPath(String);

/// The text is not the path of a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the path of a URL, such as \"/health\"")]
pub struct NotAPath;

impl FromStr for UrlPath {
    type Err = NotAPath;

    fn from_str(text: &str) -> Result<Self, NotAPath> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~%?=&".contains(&byte);
        if text.starts_with('/') && text.bytes().all(is_plain) { Ok(Self(text.to_owned())) } else { Err(NotAPath) }
    }
}

impl fmt::Display for UrlPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_where_its_api_begins() {
        for (text, shown) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
            ("http://gpu.example/v1", "http://gpu.example:80"),
            ("http://[2001:db8::1]/a/b/v1/", "http://[2001:db8::1]:80/a/b"),
            ("http://[2001:db8::1]:9", "http://[2001:db8::1]:9"),
            ("https://gpu.example/v1", "https://gpu.example:443"),
            ("https://192.0.2.7:8443", "https://192.0.2.7:8443"),
        ] {
            assert_eq!(text.parse::<EngineUrl>().map(|engine| engine.to_string()), Ok(shown.to_owned()), "{text}");
        }
        for text in [
            "",
            "127.0.0.1:8000",
            "ftp://a:1",
            "HTTPS//a",
            "https://",
            "http://",
            "http://a:0",
            "http://a:b",
            "http://a/?x",
            "http://a b:1",
        ] {
            assert_eq!(text.parse::<EngineUrl>(), Err(NotAnEngine), "{text}");
        }
    }

    #[test]
    fn a_path_begins_with_a_slash_and_has_no_letter_that_ends_it() {
        for text in ["/health", "/", "/a/b?c=d&e", "/%20"] {
            assert_eq!(text.parse::<UrlPath>().map(|path| path.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "health", "/a b", "/a#b", "/a\r\nb", "http://a/health", "/ä"] {
            assert_eq!(text.parse::<UrlPath>(), Err(NotAPath), "{text}");
        }
    }
}
