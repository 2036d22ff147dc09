//! The bytes that local programs send to a proxy of the edge: SOCKS and HTTP/1.1.

use edge::proxy::{
    http::{self, ProxyOperation},
    socks,
};

/// A message is read completely or not at all, and bytes after it are ignored.
fn whole_or_nothing<T: PartialEq + std::fmt::Debug, E: PartialEq + std::fmt::Debug>(
    input: &[u8],
    read: impl Fn(&[u8]) -> Result<Option<(T, usize)>, E>,
) {
    let Ok(Some((message, len))) = read(input) else { return };
    assert_eq!(read(&input[..len]), Ok(Some((message, len))), "bytes after a message change it");
    for cut in [0, len / 2, len - 1] {
        assert_eq!(read(&input[..cut]), Ok(None), "a part is mistaken for the whole");
    }
}

/// SOCKS 5: each message is read completely or not at all, and a datagram's header can be written and read again.
pub fn socks(input: &[u8]) {
    whole_or_nothing(input, |bytes| socks::greeting(bytes, true));
    whole_or_nothing(input, socks::password);
    whole_or_nothing(input, socks::request);
    if let Ok((target, payload)) = socks::datagram(input) {
        assert!(input.ends_with(payload));
        let again = [socks::datagram_header(&target), payload.to_vec()].concat();
        assert_eq!(socks::datagram(&again), Ok((target, payload)));
    }
}

/// HTTP/1.1: a head is read completely or not at all. One head is forwarded to a server, and a refused request gets one
/// answer.
pub fn proxy_request(input: &[u8]) {
    whole_or_nothing(input, http::request);
    let answer = match http::request(input) {
        Ok(Some((http::HttpProxyRequest { ask: Ok(ProxyOperation::Forward { head, .. }), .. }, _))) => {
            let ends = head.windows(4).filter(|window| window == b"\r\n\r\n").count();
            let old = head.split(|byte| *byte == b'\n').next().is_some_and(|line| line.ends_with(b"HTTP/1.0\r"));
            let end = format!("Via: 1.{} paced\r\nConnection: close\r\n\r\n", u8::from(!old));
            assert!(ends == 1 && head.ends_with(end.as_bytes()));
            let lines = head.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r"));
            assert_eq!(lines.filter(Option::is_none).count(), 1, "a line ends without CRLF");
            let text = head.to_ascii_lowercase();
            let names = text.split(|byte| *byte == b'\n').filter_map(|line| line.split(|byte| *byte == b':').next());
            let own: [&[u8]; 2] = [b"proxy-authorization", b"transfer-encoding"];
            assert!(names.into_iter().all(|name| !own.contains(&name)), "a field for the proxy is forwarded");
            return;
        }
        Ok(Some((http::HttpProxyRequest { ask: Err((_, answer)), .. }, _))) | Err(answer) => answer,
        Ok(_) => return,
    };
    let bytes = answer.to_bytes();
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text} has no end"));
    assert!(head.starts_with("HTTP/1.1 4") && head.contains(&format!("Content-Length: {}\r\n", body.len())), "{text}");
}
