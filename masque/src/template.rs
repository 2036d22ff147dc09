//! URI templates that name the target of a UDP tunnel (RFC 9298 §2, RFC 6570).
//!
//! A client expands a template for a target; a proxy matches a request against it. Both read it as a sequence of
//! literals and variables:
//!
//! | template | sequence |
//! |---|---|
//! | `/udp/{target_host}/{target_port}/` | `/udp/` host `/` port `/` |
//! | `/udp{?target_host,target_port}` | `/udp` `?target_host=` host `&target_port=` port |
//! | `/udp/{tenant}/{target_host,target_port}` | `/udp//` host `,` port |
//!
//! Other variables are allowed (RFC 9298 §2) and undefined at both ends, so they expand to nothing.

use std::{borrow::Cow, str::FromStr};

use thiserror::Error;

use crate::target::{InvalidTarget, Target};

/// The path of the template for a client that knows only the proxy's host and port (RFC 9298 §2).
pub const DEFAULT_PATH: &str = "/.well-known/masque/udp/{target_host}/{target_port}/";

/// A valid template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    text: String,
    authority: String,
    origin: Target,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Variable(Variable),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variable {
    Host,
    Port,
}

/// Why a text is not a template for UDP proxying. The `Display` text says what to change.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TemplateError {
    /// Not an absolute `https` URI.
    #[error("a template has to start with https://")]
    NotHttps,
    /// No authority, or one without a host.
    #[error("a template needs a host, and a port if that is not 443, after https://: {0}")]
    Authority(InvalidTarget),
    /// A variable before the path.
    #[error("variables may stand in the path and in the query only")]
    VariableInAuthority,
    /// No path.
    #[error("a template needs a path that starts with a slash")]
    NoPath,
    /// A fragment, which is never part of a request.
    #[error("a template must not have a fragment")]
    Fragment,
    /// A character not allowed in URIs, or a percent sign without two hexadecimal digits.
    #[error("a template consists of the characters of a URI; anything else is percent-encoded")]
    Character,
    /// A brace without its counterpart, or an expression without a name.
    #[error("every {{ needs a name and a }}")]
    Expression,
    /// An operator that RFC 9298 §2 excludes, or that RFC 6570 reserves.
    #[error("only the operators ? and & are allowed")]
    Operator,
    /// A modifier (`:3` or `*`), which would require level 4 of RFC 6570.
    #[error("modifiers of variables (a length after a colon, an asterisk) are not allowed")]
    Modifier,
    /// One of the two variables is missing.
    #[error("a template has to contain target_host and target_port")]
    MissingVariable,
    /// The character after a variable could be part of its value.
    #[error("after a variable, put a character that it cannot contain, such as a slash")]
    Ambiguous,
}

/// Why a request's URI gives no target.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Mismatch {
    /// It is not an expansion of the template.
    #[error("the URI does not match the template")]
    Other,
    /// It is an expansion, but its values are not a target.
    #[error(transparent)]
    Target(#[from] InvalidTarget),
}

impl Template {
    /// Parses and validates a template.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TemplateError::Character);
        }
        let rest = match text.split_at_checked("https://".len()) {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https://") => rest,
            _ => return Err(TemplateError::NotHttps),
        };
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#', '{']).unwrap_or(rest.len()));
        if path.starts_with('{') {
            return Err(TemplateError::VariableInAuthority);
        }
        if !path.starts_with('/') {
            return Err(TemplateError::NoPath);
        }
        let origin = Target::from_https_authority(authority).map_err(TemplateError::Authority)?;
        Ok(Self { text: text.to_owned(), authority: authority.to_owned(), origin, parts: parts(path)? })
    }

    /// Returns the default template of the proxy at `authority` (a host, and a port if that is not 443).
    ///
    /// # Errors
    /// [`TemplateError::Authority`] and similar errors if `authority` is not valid.
    pub fn default_at(authority: &str) -> Result<Self, TemplateError> {
        Self::parse(&format!("https://{authority}{DEFAULT_PATH}"))
    }

    /// Returns the proxy's authority as written: the value for `:authority`.
    #[must_use]
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Returns the proxy's host and port, to which a client connects.
    #[must_use]
    pub fn origin(&self) -> &Target {
        &self.origin
    }

    /// Returns the path, with the query if there is one, of the URI that requests a tunnel to `target`.
    #[must_use]
    pub fn expand(&self, target: &Target) -> String {
        self.parts.iter().fold(String::new(), |path, part| match part {
            Part::Literal(literal) => path + literal,
            // A valid target has only one kind of reserved character: the colons of an IPv6 address.
            Part::Variable(Variable::Host) => path + &target.host.to_string().replace(':', "%3A"),
            Part::Variable(Variable::Port) => path + &target.port.to_string(),
        })
    }

    /// Returns the target in a request to `authority` and `path` (with query).
    ///
    /// Literals must match exactly. Authorities are compared as host and port.
    ///
    /// # Errors
    /// See [`Mismatch`].
    pub fn matches(&self, authority: &str, path: &str) -> Result<Target, Mismatch> {
        if Target::from_https_authority(authority).as_ref() != Ok(&self.origin) {
            return Err(Mismatch::Other);
        }
        let (mut host, mut port) = (None, None);
        let (mut rest, mut parts) = (path, self.parts.iter().peekable());
        while let Some(part) = parts.next() {
            let variable = match part {
                Part::Literal(literal) => {
                    rest = rest.strip_prefix(literal.as_str()).ok_or(Mismatch::Other)?;
                    continue;
                }
                Part::Variable(Variable::Host) => &mut host,
                Part::Variable(Variable::Port) => &mut port,
            };
            let end = match parts.peek() {
                Some(Part::Literal(literal)) => literal.chars().next().and_then(|delimiter| rest.find(delimiter)),
                _ => Some(rest.len()),
            };
            let (value, behind) = rest.split_at(end.ok_or(Mismatch::Other)?);
            if variable.replace(value).is_some_and(|earlier| earlier != value) {
                return Err(Mismatch::Other);
            }
            rest = behind;
        }
        match (host, port) {
            (Some(host), Some(port)) if rest.is_empty() => {
                Ok(Target::from_variables(&percent_decode(host)?, &percent_decode(port)?)?)
            }
            _ => Err(Mismatch::Other),
        }
    }
}

impl FromStr for Template {
    type Err = TemplateError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl std::fmt::Display for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.text.fmt(f)
    }
}

/// Parses the path and query of a template into the parts of its expansions.
fn parts(path: &str) -> Result<Vec<Part>, TemplateError> {
    let (mut parts, mut rest) = (Vec::new(), path);
    while let Some((literal, from_expression)) = rest.split_once('{') {
        push_literal(&mut parts, check_literal(literal)?);
        let (expression, behind) = from_expression.split_once('}').ok_or(TemplateError::Expression)?;
        push_expression(&mut parts, expression)?;
        rest = behind;
    }
    push_literal(&mut parts, check_literal(rest)?);

    let separated = parts.windows(2).all(|pair| match pair {
        [Part::Variable(_), Part::Literal(literal)] => !literal.starts_with(|c| is_unreserved(c) || c == '%'),
        [Part::Variable(_), Part::Variable(_)] => false,
        _ => true,
    });
    match [Variable::Host, Variable::Port].iter().all(|wanted| parts.contains(&Part::Variable(*wanted))) {
        false => Err(TemplateError::MissingVariable),
        true if !separated => Err(TemplateError::Ambiguous),
        true => Ok(parts),
    }
}

/// Appends the expansion of an expression in which only the two variables are defined (RFC 6570 §3.2).
fn push_expression(parts: &mut Vec<Part>, expression: &str) -> Result<(), TemplateError> {
    let (mut separator, between, names) = match expression.chars().next() {
        Some('?') => ("?", "&", &expression[1..]),
        Some('&') => ("&", "&", &expression[1..]),
        Some('+' | '#' | '.' | '/' | ';' | '=' | ',' | '!' | '@' | '|') => return Err(TemplateError::Operator),
        _ => ("", ",", expression),
    };
    for name in names.split(',') {
        let variable = match name {
            "target_host" => Variable::Host,
            "target_port" => Variable::Port,
            _ if name.contains([':', '*']) => return Err(TemplateError::Modifier),
            _ if is_variable_name(name) => continue,
            _ => return Err(TemplateError::Expression),
        };
        push_literal(parts, separator);
        if between == "&" {
            push_literal(parts, name);
            push_literal(parts, "=");
        }
        parts.push(Part::Variable(variable));
        separator = between;
    }
    Ok(())
}

/// Appends a literal, joined to a preceding one.
fn push_literal(parts: &mut Vec<Part>, literal: &str) {
    match parts.last_mut() {
        _ if literal.is_empty() => {}
        Some(Part::Literal(earlier)) => earlier.push_str(literal),
        _ => parts.push(Part::Literal(literal.to_owned())),
    }
}

/// Checks that a literal contains only characters allowed in a path or a query (RFC 3986 §3.3 and §3.4).
fn check_literal(literal: &str) -> Result<&str, TemplateError> {
    let allowed = |c| is_unreserved(c) || "!$&'()*+,;=:@/?%".contains(c);
    match literal {
        _ if literal.contains('#') => Err(TemplateError::Fragment),
        _ if literal.contains('}') => Err(TemplateError::Expression),
        _ if literal.chars().all(allowed) && has_whole_triplets(literal) => Ok(literal),
        _ => Err(TemplateError::Character),
    }
}

/// Whether `name` is a valid name of a variable (RFC 6570 §2.3).
fn is_variable_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '%' || c == '.';
    name.chars().all(allowed) && has_whole_triplets(name) && name.split('.').all(|part| !part.is_empty())
}

/// Whether a value may contain `c` unencoded (RFC 6570 §3.2.2).
fn is_unreserved(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-._~".contains(c)
}

/// Whether every percent sign is followed by two hexadecimal digits.
fn has_whole_triplets(text: &str) -> bool {
    text.split('%').skip(1).all(|behind| triplet(behind).is_some())
}

/// Returns the byte given by the two hexadecimal digits at the front of `text`.
fn triplet(text: &str) -> Option<u8> {
    match text.as_bytes() {
        [high, low, ..] => {
            let digit = |byte: &u8| char::from(*byte).to_digit(16);
            Some((digit(high)? << 4 | digit(low)?) as u8)
        }
        _ => None,
    }
}

/// Decodes a variable's value once. Values contain only unreserved characters and triplets of ASCII.
fn percent_decode(value: &str) -> Result<Cow<'_, str>, InvalidTarget> {
    let mut pieces = value.split('%');
    let plain = |text: &str| text.chars().all(is_unreserved);
    let first = pieces.next().filter(|text| plain(text)).ok_or(InvalidTarget::Encoding)?;
    let mut decoded = Cow::Borrowed(first);
    for piece in pieces {
        let byte = triplet(piece).filter(u8::is_ascii).ok_or(InvalidTarget::Encoding)?;
        let text = Some(&piece[2..]).filter(|text| plain(text)).ok_or(InvalidTarget::Encoding)?;
        decoded.to_mut().push(char::from(byte));
        decoded.to_mut().push_str(text);
    }
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::target::tests::targets;

    fn template(path: &str) -> Template {
        Template::parse(&format!("https://relay.example{path}")).unwrap()
    }

    fn target(text: &str) -> Target {
        Target::from_authority(text).unwrap()
    }

    #[test]
    fn templates_are_validated_rfc_9298_2() {
        use TemplateError::*;
        for (text, expected) in [
            ("http://relay.example/{target_host}/{target_port}", NotHttps),
            ("/{target_host}/{target_port}", NotHttps),
            ("https:/{target_host}/{target_port}", NotHttps),
            ("https:///{target_host}/{target_port}", Authority(InvalidTarget::EmptyHost)),
            ("https://:443/{target_host}/{target_port}", Authority(InvalidTarget::EmptyHost)),
            ("https://relay.example:0/{target_host}/{target_port}", Authority(InvalidTarget::Port)),
            ("https://me@relay.example/{target_host}/{target_port}", Authority(InvalidTarget::Host)),
            ("https://relay.example{target_host}/{target_port}", VariableInAuthority),
            ("https://{target_host}:{target_port}/", VariableInAuthority),
            ("https://relay.example{?target_host,target_port}", VariableInAuthority),
            ("https://relay.example?h={target_host}&p={target_port}", NoPath),
            ("https://relay.example", NoPath),
            ("https://relay.example/{target_host}/{target_port}#top", Fragment),
            ("https://relay.example/é/{target_host}/{target_port}", Character),
            ("https://relay.example/ /{target_host}/{target_port}", Character),
            ("https://relay.example/<>/{target_host}/{target_port}", Character),
            ("https://relay.example/%4/{target_host}/{target_port}", Character),
            ("https://relay.example/{target_host}/{target_port", Expression),
            ("https://relay.example/{target_host}/target_port}", Expression),
            ("https://relay.example/{}{target_host}/{target_port}", Expression),
            ("https://relay.example/{target_host}/{target_port,}", Expression),
            ("https://relay.example/{{target_host}}/{target_port}", Expression),
            ("https://relay.example/{+target_host}/{target_port}", Operator),
            ("https://relay.example/{target_host}/{#target_port}", Operator),
            ("https://relay.example{/target_host,target_port}", VariableInAuthority),
            ("https://relay.example/a{/target_host,target_port}", Operator),
            ("https://relay.example/a{.target_host}/{target_port}", Operator),
            ("https://relay.example/a{;target_host,target_port}", Operator),
            ("https://relay.example/a{|target_host,target_port}", Operator),
            ("https://relay.example/{target_host:3}/{target_port}", Modifier),
            ("https://relay.example/{target_host}/{target_port*}", Modifier),
            ("https://relay.example/{target_host}/", MissingVariable),
            ("https://relay.example/{target_port}/", MissingVariable),
            ("https://relay.example/{Target_host}/{target_port}", MissingVariable),
            ("https://relay.example/{target_host}{target_port}", Ambiguous),
            ("https://relay.example/{target_host}-{target_port}", Ambiguous),
            ("https://relay.example/{target_host}%2F{target_port}", Ambiguous),
        ] {
            assert_eq!(Template::parse(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn templates_expand_as_rfc_6570_says() {
        let v6 = target("[2001:db8::42]:443");
        for (path, expected) in [
            (DEFAULT_PATH, "/.well-known/masque/udp/2001%3Adb8%3A%3A42/443/"),
            ("/masque?h={target_host}&p={target_port}", "/masque?h=2001%3Adb8%3A%3A42&p=443"),
            ("/masque{?target_host,target_port}", "/masque?target_host=2001%3Adb8%3A%3A42&target_port=443"),
            ("/masque{?target_port}{&target_host}", "/masque?target_port=443&target_host=2001%3Adb8%3A%3A42"),
            ("/masque{?a,target_port,b,target_host}", "/masque?target_port=443&target_host=2001%3Adb8%3A%3A42"),
            ("/{target_host,target_port}", "/2001%3Adb8%3A%3A42,443"),
            ("/{a}/{target_port}/{target_host}{b}", "//443/2001%3Adb8%3A%3A42"),
            ("/{target_host}/{target_port}/{target_host}", "/2001%3Adb8%3A%3A42/443/2001%3Adb8%3A%3A42"),
        ] {
            let template = template(path);
            assert_eq!(template.expand(&v6), expected);
            assert_eq!(template.matches("relay.example", expected), Ok(v6.clone()), "{path}");
        }
    }

    #[test]
    fn only_expansions_match() {
        use InvalidTarget::{Encoding, Host, NumericName, Port};
        let template = template("/udp/{target_host}/{target_port}/");
        for (path, expected) in [
            ("/udp/example.org/443/", Ok("example.org:443")),
            ("/udp/%65xample.org/%34%343/", Ok("example.org:443")),
            ("/udp/2001%3adb8%3A:1/443/", Err(Mismatch::Target(Encoding))),
            ("/udp/2001:db8::1/443/", Err(Mismatch::Target(Encoding))),
            ("/udp/%5B2001%3Adb8%3A%3A1%5D/443/", Err(Mismatch::Target(Host))),
            ("/udp/fe80%3A%3A1%25eth0/443/", Err(Mismatch::Target(Host))),
            ("/udp/%2565xample.org/443/", Err(Mismatch::Target(Host))),
            ("/udp/example%2eorg%2F/443/", Err(Mismatch::Target(Host))),
            ("/udp/127.1/443/", Err(Mismatch::Target(NumericName))),
            ("/udp/example%2/443/", Err(Mismatch::Target(Encoding))),
            ("/udp/example%/443/", Err(Mismatch::Target(Encoding))),
            ("/udp/example%zz/443/", Err(Mismatch::Target(Encoding))),
            ("/udp/example%+1/443/", Err(Mismatch::Target(Encoding))),
            ("/udp/%C3%BC.example/443/", Err(Mismatch::Target(Encoding))),
            ("/udp/ü.example/443/", Err(Mismatch::Target(Encoding))),
            ("/udp/%ü.example/443/", Err(Mismatch::Target(Encoding))),
            ("/udp//443/", Err(Mismatch::Target(InvalidTarget::EmptyHost))),
            ("/udp/example.org//", Err(Mismatch::Target(Port))),
            ("/udp/example.org/0/", Err(Mismatch::Target(Port))),
            ("/udp/example.org/%2B443/", Err(Mismatch::Target(Port))),
            ("/udp/*/*/", Err(Mismatch::Target(Encoding))),
            ("/udp/example.org/443", Err(Mismatch::Other)),
            ("/udp/example.org/443/x", Err(Mismatch::Other)),
            ("/udp/example.org/443/?x", Err(Mismatch::Other)),
            ("/UDP/example.org/443/", Err(Mismatch::Other)),
            ("//udp/example.org/443/", Err(Mismatch::Other)),
            ("/", Err(Mismatch::Other)),
            ("", Err(Mismatch::Other)),
        ] {
            let matched = template.matches("relay.example", path).map(|target| target.to_string());
            assert_eq!(matched, expected.map(str::to_owned), "{path}");
        }
    }

    #[test]
    fn a_repeated_variable_has_one_value() {
        let template = template("/{target_host}/{target_port}/{target_host}");
        assert_eq!(template.matches("relay.example", "/a/1/b"), Err(Mismatch::Other));
    }

    #[test]
    fn the_authority_is_compared_as_host_and_port() {
        let (path, url) =
            ("/a.example/1/", |authority| format!("https://{authority}/{{target_host}}/{{target_port}}/"));
        for (named, asked, matches) in [
            ("relay.example", "relay.example", true),
            ("Relay.Example", "relay.EXAMPLE:443", true),
            ("relay.example:443", "relay.example", true),
            ("[::1]:4433", "[0::1]:4433", true),
            ("relay.example", "relay.example:4433", false),
            ("relay.example", "other.example", false),
            ("relay.example", "me@relay.example", false),
            ("relay.example", "", false),
        ] {
            let template = Template::parse(&url(named)).unwrap();
            assert_eq!(template.matches(asked, path).is_ok(), matches, "{named} asked as {asked}");
        }
    }

    #[test]
    fn the_default_template_is_the_well_known_one_rfc_9298_2() {
        let template = Template::default_at("localhost:4433").unwrap();
        assert_eq!(template.to_string(), "https://localhost:4433/.well-known/masque/udp/{target_host}/{target_port}/");
        assert_eq!((template.authority(), template.origin()), ("localhost:4433", &target("localhost:4433")));
    }

    proptest! {
        #[test]
        fn an_expanded_template_matches_its_target(target in targets(), style in 0..3) {
            let path = [DEFAULT_PATH, "/udp{?target_host,target_port}", "/{target_port,target_host}"][style as usize];
            let template = template(path);
            prop_assert_eq!(template.matches("relay.example", &template.expand(&target)), Ok(target));
        }

        #[test]
        fn any_text_decodes_to_what_was_encoded(text in "[ -~]{0,20}") {
            let encoded: String = text.bytes().map(|byte| format!("%{byte:02x}")).collect();
            prop_assert_eq!(percent_decode(&encoded), Ok(Cow::from(text)));
        }

        #[test]
        fn no_template_panics(text in "(https://a/)?[{}?&,a-z_:%*/é]{0,30}(\\{target_host\\}/\\{target_port\\})?") {
            if let Ok(template) = Template::parse(&text) {
                prop_assert_eq!(template.to_string().parse(), Ok(template));
            }
        }

        #[test]
        fn no_path_panics(path: String, tail in "[a-z0-9%/:.é]{0,20}") {
            let template = template(DEFAULT_PATH);
            let _ = template.matches("relay.example", &path);
            let _ = template.matches("relay.example", &format!("/.well-known/masque/udp/{tail}"));
            let _ = template.matches(&path, "/");
        }
    }
}
