//! The heads of a server's answers, as far as fetching in ranges needs them (RFC 9110, RFC 9112). No IO.

use std::ops::Range;

use super::super::http::{FIELDS, HEAD_BYTES, number, tokens, values};

/// The head of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    status: u16,
    /// How many bytes of content follow, if the answer has content, one field says so, and no transfer coding changes that.
    pub content_bytes: Option<u64>,
    /// The strong validator of the content (RFC 9110 §8.8.3).
    etag: Option<Vec<u8>>,
    accepts_ranges: bool,
    /// The range that it contains, and the length of the whole (RFC 9110 §14.4).
    content_range: Option<(Range<u64>, u64)>,
    /// Whether the server takes another request on the connection (RFC 9112 §9.3).
    pub persists: bool,
}

/// What identifies an answer that can be fetched in ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeAnswer {
    /// The length of its content.
    pub bytes: u64,
    /// The strong validator, which all ranges must have.
    etag: Vec<u8>,
}

/// Bytes that are not the head of an answer, or a head of more than [`HEAD_BYTES`] or [`FIELDS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedAnswer;

/// Reads the head of an answer, and returns it with its length. Returns `None` while it is incomplete.
///
/// # Errors
/// [`MalformedAnswer`].
pub fn head(bytes: &[u8]) -> Result<Option<(AnswerHead, usize)>, MalformedAnswer> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut parsed = httparse::Response::new(&mut fields);
    let len = match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_BYTES => return Ok(None),
        Ok(httparse::Status::Partial) | Err(_) => return Err(MalformedAnswer),
    };
    let (fields, status) = (&*parsed.headers, parsed.code.unwrap_or_default());
    let only = |name| {
        let mut values = values(fields, name);
        values.next().filter(|_| values.next().is_none()).map(<[u8]>::trim_ascii)
    };
    let lists = |name, token: &str| values(fields, name).flat_map(tokens).any(|found| found == token);
    // Whatever their fields say, some answers have no content, and a transfer coding changes its length (RFC 9112 §6.3).
    let has_content = !matches!(status, 100..=199 | 204 | 304);
    let is_plain = values(fields, "transfer-encoding").next().is_none();
    let is_strong = |tag: &&[u8]| tag.len() > 2 && tag.starts_with(b"\"") && tag.ends_with(b"\"");
    let read = AnswerHead {
        status,
        content_bytes: only("content-length").and_then(number).filter(|_| has_content && is_plain),
        etag: only("etag").filter(is_strong).map(<[u8]>::to_vec),
        accepts_ranges: lists("accept-ranges", "bytes"),
        content_range: only("content-range").and_then(content_range),
        persists: parsed.version == Some(1) && !lists("connection", "close"),
    };
    Ok(Some((read, len)))
}

impl AnswerHead {
    /// Returns what identifies the answer, if the rest of it may be fetched in ranges: the server says that it accepts these, the length is
    /// known, and a strong validator tells whether two ranges belong together (RFC 9110 §15.3.7.3).
    #[must_use]
    pub fn whole(&self) -> Option<WholeAnswer> {
        let is_divisible = self.status == 200 && self.accepts_ranges;
        is_divisible.then(|| Some(WholeAnswer { bytes: self.content_bytes?, etag: self.etag.clone()? }))?
    }

    /// Whether the server may serve the same request later (RFC 9110 §15.5.9 and §15.6, RFC 6585 §4, RFC 8470 §5.2).
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self.status, 408 | 425 | 429 | 500..=599)
    }

    /// Whether the content is exactly this range of that answer.
    #[must_use]
    pub fn is_range(&self, range: &Range<u64>, of: &WholeAnswer) -> bool {
        self.status == 206
            && self.content_range.as_ref() == Some(&(range.clone(), of.bytes))
            && self.content_bytes == Some(range.end - range.start)
            && self.etag.as_ref() == Some(&of.etag)
    }
}

impl WholeAnswer {
    /// Returns the request for a range: that for the whole answer, whose head is `asked`, with two fields more. If the answer has changed,
    /// the server sends all of it (`If-Range`, RFC 9110 §13.1.5). `None` if `asked` was not made by this proxy.
    #[must_use]
    pub fn request(&self, asked: &[u8], range: &Range<u64>) -> Option<Vec<u8>> {
        let head = asked.strip_suffix(b"Connection: close\r\n\r\n")?;
        let last = range.end.checked_sub(1)?;
        let range = format!("Range: bytes={}-{last}\r\nIf-Range: ", range.start);
        Some([head, range.as_bytes(), &self.etag, b"\r\n\r\n"].concat())
    }
}

/// Reads a range of bytes and the length of the whole.
fn content_range(value: &[u8]) -> Option<(Range<u64>, u64)> {
    let (unit, rest) = std::str::from_utf8(value).ok()?.split_once(' ')?;
    let (range, length) = rest.trim().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let [first, last, length] = [first, last, length].map(|text| number(text.as_bytes()));
    let (first, last, length) = (first?, last?, length?);
    let is_valid = unit.eq_ignore_ascii_case("bytes") && first <= last && last < length;
    is_valid.then(|| (first..last + 1, length))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(fields: &str) -> AnswerHead {
        let text = format!("HTTP/1.1 {fields}\r\n\r\n");
        let (head, len) = head(text.as_bytes()).unwrap().unwrap();
        assert_eq!(len, text.len());
        head
    }

    const WHOLE: &str = "200 OK\r\nContent-Length: 100\r\nAccept-Ranges: bytes\r\nETag: \"v1\"";

    #[test]
    fn only_an_answer_whose_ranges_can_be_told_apart_from_those_of_another_is_divided() {
        let whole = read(WHOLE).whole().unwrap();
        assert_eq!(whole, WholeAnswer { bytes: 100, etag: b"\"v1\"".to_vec() });
        for (from, to) in [
            ("200 OK", "203 Non-Authoritative Information"),
            ("bytes", "none"),
            ("\"v1\"", "W/\"v1\""),
            ("\"v1\"", "v1"),
            ("Length: 100", "Length: 100\r\nContent-Length: 100"),
            ("Length: 100", "Length: +100"),
            ("Length: 100", "Length: 100\r\nTransfer-Encoding: chunked"),
            ("Content-Length: 100", "X: y"),
        ] {
            assert!(WHOLE.contains(from), "{from}");
            assert_eq!(read(&WHOLE.replace(from, to)).whole(), None, "{to}");
        }
    }

    #[test]
    fn a_range_is_accepted_only_if_it_is_the_requested_one_of_the_same_answer() {
        let whole = read(WHOLE).whole().unwrap();
        let part = "206 Partial Content\r\nContent-Range: bytes 10-19/100\r\nContent-Length: 10\r\netag: \"v1\"";
        assert!(read(part).is_range(&(10..20), &whole));
        assert!(!read(part).is_range(&(10..21), &whole) && !read(part).is_range(&(11..20), &whole));
        for (from, to) in [
            ("206 Partial Content", "200 OK"),
            ("\"v1\"", "\"v2\""),
            ("\"v1\"", "W/\"v1\""),
            ("/100", "/101"),
            ("/100", "/*"),
            ("10-19", "10-20"),
            ("10-19", "19-10"),
            ("10-19", "18446744073709551615-18446744073709551615"),
            ("bytes 10", "items 10"),
            ("Length: 10", "Length: 11"),
            ("Length: 10", "Length: 10\r\nTransfer-Encoding: gzip"),
        ] {
            assert!(part.contains(from), "{from}");
            assert!(!read(&part.replace(from, to)).is_range(&(10..20), &whole), "{to}");
        }
    }

    #[test]
    fn the_length_of_an_answer_is_known_if_it_has_content() {
        let length = |status| read(&format!("{status} x\r\nContent-Length: 7")).content_bytes;
        assert_eq!([200, 206, 404, 503].map(length), [Some(7); 4]);
        assert_eq!([100, 103, 204, 304].map(length), [None; 4]);
    }

    #[test]
    fn a_server_takes_another_request_unless_it_says_otherwise() {
        assert!(read("206 Partial Content\r\nConnection: keep-alive").persists);
        assert!(!read("206 Partial Content\r\nConnection: x, Close").persists);
        let (old, _) = head(b"HTTP/1.0 200 OK\r\n\r\n").unwrap().unwrap();
        assert!(!old.persists);
    }

    #[test]
    fn the_request_for_a_range_is_the_first_one_with_the_range_and_the_validator() {
        let whole = read(WHOLE).whole().unwrap();
        let asked = b"GET /a HTTP/1.1\r\nHost: a.example\r\nVia: 1.1 paced\r\nConnection: close\r\n\r\n";
        let expected =
            "GET /a HTTP/1.1\r\nHost: a.example\r\nVia: 1.1 paced\r\nRange: bytes=10-19\r\nIf-Range: \"v1\"\r\n\r\n";
        assert_eq!(whole.request(asked, &(10..20)).unwrap(), expected.as_bytes());
        assert_eq!(whole.request(b"GET / HTTP/1.1\r\n\r\n", &(10..20)), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>, value in "\\PC{0,30}") {
            _ = head(&bytes);
            _ = head(format!("HTTP/1.1 206 x\r\nContent-Range: {value}\r\nContent-Length: {value}\r\n\r\n").as_bytes());
        }
    }
}
