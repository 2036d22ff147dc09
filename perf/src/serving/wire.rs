//! The messages between engine and client: events whose tokens contain the time when they were made, and answers of
//! HTTP/1.1.

use std::io::Write as _;

/// The text in front of a token's stamp, also after a proxy has rewritten the event.
const BEFORE: &[u8] = b"\"content\":\"";

/// Digits of the stamp's three numbers: the token's number, when it was written, and how long the engine made it wait.
const DIGITS: [usize; 3] = [6, 20, 13];

/// A token, as an event of the OpenAI API.
const EVENT: &str = concat!(
    r#"data: {"id":"chatcmpl-3b1c60e82f0a4f9d8d0c6c4de2a1","object":"chat.completion.chunk","created":1767225600,"#,
    r#""model":"large","choices":[{"index":0,"delta":{"content":"000000 00000000000000000000 0000000000000"},"#,
    r#""logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
    "\n\n"
);

/// The events after the last token: the reason for the end, and the end of the events.
const ENDS: [&str; 2] = [
    concat!(
        r#"data: {"id":"1","object":"chat.completion.chunk","created":0,"model":"large","#,
        r#""choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"length"}]}"#,
        "\n\n"
    ),
    "data: [DONE]\n\n",
];

/// The head of an answer that is a stream of events.
pub const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n\
    content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

/// When a token was made, in nanoseconds of [`now_ns`](instruments::payload::now_ns).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Counts from 0 in each answer.
    pub number: u64,
    /// When the engine wrote it.
    pub written_ns: u64,
    /// How long before that the whole request had arrived at the engine.
    pub waited_ns: u64,
}

impl Stamp {
    /// Returns the token's event in its chunk.
    #[must_use]
    pub fn event(self) -> Vec<u8> {
        let mut event = chunk(EVENT.as_bytes());
        let mut at = position(&event, BEFORE).map_or(0, |at| at + BEFORE.len());
        for (value, digits) in [self.number, self.written_ns, self.waited_ns].into_iter().zip(DIGITS) {
            let mut rest = value;
            for digit in event[at..at + digits].iter_mut().rev() {
                *digit = b'0' + (rest % 10) as u8;
                rest /= 10;
            }
            at += digits + 1;
        }
        event
    }

    /// Reads the stamp of an event. Returns `None` if it has none.
    #[must_use]
    pub fn read(event: &[u8]) -> Option<Self> {
        let text = &event[position(event, BEFORE)? + BEFORE.len()..];
        let text = text.get(..DIGITS.iter().sum::<usize>() + 2)?;
        let mut numbers = std::str::from_utf8(text).ok()?.split(' ').map(|digits| digits.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(Self { number: next()?, written_ns: next()?, waited_ns: next()? })
    }
}

/// Returns content as a chunk of HTTP/1.1 (RFC 9112 §7.1).
fn chunk(content: &[u8]) -> Vec<u8> {
    let mut chunk = Vec::with_capacity(content.len() + 16);
    // Writing to memory does not fail.
    _ = write!(chunk, "{:x}\r\n", content.len());
    chunk.extend_from_slice(content);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

/// Returns the bytes after the last token of an answer, to its end.
#[must_use]
pub fn end() -> Vec<u8> {
    [ENDS.map(|event| chunk(event.as_bytes())).concat(), b"0\r\n\r\n".to_vec()].concat()
}

/// Returns the position at which `wanted` begins in `bytes`.
pub fn position(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// Returns the length of a message's head, and the length of its content, if the head gives one (RFC 9112 §6.3).
#[must_use]
pub fn head(bytes: &[u8]) -> Option<(usize, Option<usize>)> {
    let end = position(bytes, b"\r\n\r\n")? + 4;
    let fields = bytes[..end].split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let mut lengths = fields.filter_map(|field| {
        let (name, value) = field.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    Some((end, lengths.next()))
}

/// Reads one answer after another from a connection, as their bytes arrive.
#[derive(Debug, Default)]
pub struct Answers {
    input: Vec<u8>,
    part: Part,
    /// Content that the caller has not taken yet.
    content: Vec<u8>,
}

/// The next part of an answer.
#[derive(Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Head,
    ChunkSize,
    /// This many bytes of a chunk, including its line end.
    Chunk(usize),
    /// The line end after the last chunk, which has no content.
    Last,
    Content(usize),
    End,
}

/// Why a client of the API would not accept an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// The status is not 200.
    Status(u16),
    /// It is no HTTP/1.1.
    Syntax,
}

impl Answers {
    /// Takes bytes as they arrive.
    ///
    /// # Errors
    /// When the answer is not acceptable, with the reason.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Wrong> {
        self.input.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(used) = self.step(at)? {
            at += used;
        }
        self.input.drain(..at);
        Ok(())
    }

    /// Reads one part at `at`. Returns its length, or `None` if more bytes have to arrive.
    fn step(&mut self, at: usize) -> Result<Option<usize>, Wrong> {
        let input = &self.input[at..];
        match self.part {
            Part::End => Ok(None),
            Part::Head => {
                let Some((end, length)) = head(input) else { return Ok(None) };
                let status = input.get(9..12).and_then(|status| std::str::from_utf8(status).ok());
                match status.and_then(|status| status.parse().ok()).ok_or(Wrong::Syntax)? {
                    200 => {}
                    status => return Err(Wrong::Status(status)),
                }
                self.part = match length {
                    Some(0) => Part::End,
                    Some(length) => Part::Content(length),
                    None => Part::ChunkSize,
                };
                Ok(Some(end))
            }
            Part::ChunkSize => {
                let Some(end) = position(input, b"\r\n") else { return Ok(None) };
                let digits = std::str::from_utf8(&input[..end]).map_err(|_| Wrong::Syntax)?;
                let size = usize::from_str_radix(digits, 16).map_err(|_| Wrong::Syntax)?;
                // The line end after a chunk belongs to it.
                self.part = if size == 0 { Part::Last } else { Part::Chunk(size + 2) };
                Ok(Some(end + 2))
            }
            Part::Last if input.len() < 2 => Ok(None),
            Part::Last => {
                self.part = Part::End;
                Ok(Some(2))
            }
            Part::Chunk(0) => {
                self.part = Part::ChunkSize;
                Ok(Some(0))
            }
            Part::Chunk(left) => {
                let used = left.min(input.len());
                self.content.extend_from_slice(&input[..used.min(left.saturating_sub(2))]);
                self.part = Part::Chunk(left - used);
                Ok((used > 0).then_some(used))
            }
            Part::Content(left) => {
                let used = left.min(input.len());
                self.content.extend_from_slice(&input[..used]);
                self.part = if used == left { Part::End } else { Part::Content(left - used) };
                Ok((used > 0).then_some(used))
            }
        }
    }

    /// Passes each whole event to `take` and removes it.
    pub fn events(&mut self, mut take: impl FnMut(&[u8])) {
        let mut at = 0;
        while let Some(end) = position(&self.content[at..], b"\n\n") {
            take(&self.content[at..at + end]);
            at += end + 2;
        }
        self.content.drain(..at);
    }

    /// Returns the content that was not taken if the answer is whole, and then begins to read the next one.
    pub fn end(&mut self) -> Option<Vec<u8>> {
        (self.part == Part::End).then(|| {
            self.part = Part::Head;
            std::mem::take(&mut self.content)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { number: 7, written_ns: 123_456_789_012, waited_ns: 98_765 };

    #[test]
    fn a_stamp_is_read_from_its_event_and_the_event_is_a_chunk_of_json() {
        let event = STAMP.event();
        assert_eq!(Stamp::read(&event), Some(STAMP));
        let text = std::str::from_utf8(&event).unwrap();
        let (size, rest) = text.split_once("\r\n").unwrap();
        assert_eq!(usize::from_str_radix(size, 16).unwrap() + 2, rest.len());
        let data = rest.strip_prefix("data: ").unwrap();
        let json: serde_json::Value = serde_json::from_str(data.trim_end()).unwrap();
        assert!(json["choices"][0]["delta"]["content"].as_str().unwrap().starts_with("000007 "));
        assert_eq!(Stamp::read(&end()), None);
    }

    #[test]
    fn answers_are_read_however_they_are_cut_and_one_after_the_other() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab0\r\n";
        let all = [HEAD, &STAMP.event(), &STAMP.event(), &end(), whole].concat();
        for size in 1..=all.len() {
            let (mut answers, mut stamps, mut events, mut ends) = (Answers::default(), 0, 0, Vec::new());
            for piece in all.chunks(size) {
                let mut piece = piece;
                loop {
                    answers.push(piece).unwrap();
                    answers.events(|event| {
                        events += 1;
                        stamps += u32::from(Stamp::read(event) == Some(STAMP));
                    });
                    let Some(rest) = answers.end() else { break };
                    ends.push(rest);
                    piece = b"";
                }
            }
            assert_eq!((stamps, events), (2, 4), "in pieces of {size}");
            assert_eq!(ends, [&b""[..], b"ab0\r\n"], "in pieces of {size}");
        }
    }

    #[test]
    fn another_status_and_what_is_no_http_are_told() {
        let pushed = |text: &[u8]| Answers::default().push(text);
        assert_eq!(pushed(b"HTTP/1.1 503 No\r\n\r\n"), Err(Wrong::Status(503)));
        assert_eq!(pushed(b"HTTP\r\n\r\n"), Err(Wrong::Syntax));
        assert_eq!(pushed(b"HTTP/1.1 200 OK\r\n\r\nzz\r\n"), Err(Wrong::Syntax));
    }
}
