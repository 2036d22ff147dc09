//! Targets in paths of requests.

use http::StatusCode;

/// The fixed part of the default template (RFC 9298 §2); `{target_host}/{target_port}/` follows.
const PREFIX: &str = "/.well-known/masque/udp/";

/// Extracts host and port from the path of a request, or returns the status that refuses it.
pub fn parse(path: &str) -> Result<(String, u16), StatusCode> {
    let rest = path.strip_prefix(PREFIX).ok_or(StatusCode::NOT_FOUND)?;
    let [host, port, ""] = rest.split('/').collect::<Vec<_>>()[..] else { return Err(StatusCode::NOT_FOUND) };
    let host = unescaped(host).ok_or(StatusCode::BAD_REQUEST)?;
    // A zone ID has no meaning to another host (RFC 9298 §2).
    if host.is_empty() || host.contains(['%', '/', ' ']) {
        return Err(StatusCode::BAD_REQUEST);
    }
    match port.parse() {
        Ok(port) if port != 0 => Ok((host, port)),
        _ => Err(StatusCode::BAD_REQUEST),
    }
}

/// Decodes percent-encoding (RFC 3986 §2.1), or returns `None` if it is malformed.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut parts = text.split('%');
    bytes.extend_from_slice(parts.next()?.as_bytes());
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_taken_out_of_the_path() {
        for (path, host, port) in [
            ("192.0.2.6/443/", "192.0.2.6", 443),
            ("2001%3Adb8%3a%3A6/53/", "2001:db8::6", 53),
            ("target.example/65535/", "target.example", 65535),
        ] {
            assert_eq!(parse(&format!("{PREFIX}{path}")), Ok((host.to_owned(), port)));
        }
    }

    #[test]
    fn paths_without_a_target_are_refused() {
        for path in ["/elsewhere", &format!("{PREFIX}host/1"), &format!("{PREFIX}host/1/more/")] {
            assert_eq!(parse(path), Err(StatusCode::NOT_FOUND), "{path}");
        }
        for path in ["/1/", "host/0/", "host/65536/", "host/http/", "fe80%3A%3A1%25e/1/", "host%+f/1/", "host%4/1/"] {
            assert_eq!(parse(&format!("{PREFIX}{path}")), Err(StatusCode::BAD_REQUEST), "{path}");
        }
    }
}
