//! Takes events of `usage` out of a stream, line by line.

use bytes::BytesMut;

use super::malformed::{MAX_EVENT_BYTES, MalformedEvent};

/// A line of a stream of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventLine {
    /// The data of an event that has `usage` and no choices.
    Usage,
    /// Other data.
    Data,
    /// The empty line that ends an event.
    End,
    /// A comment, or another field of an event.
    Other,
}

/// Whether the current event passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Verdict {
    /// Its data has not come.
    #[default]
    Open,
    Passes,
    Dropped,
}

/// Passes lines, except those of events that contain nothing but `usage`.
#[derive(Debug, Default)]
pub(super) struct UsageFilter {
    verdict: Verdict,
    /// The lines of the current event before its data.
    held: BytesMut,
}

impl UsageFilter {
    /// Takes the next line, with its end, and appends to `passed` all lines that may pass now. Other data within a dropped event passes:
    /// without it, the client might miss the end of the stream.
    ///
    /// # Errors
    /// The lines before the data of an event are longer than an event may be.
    pub(super) fn take(&mut self, kind: EventLine, line: &[u8], passed: &mut BytesMut) -> Result<(), MalformedEvent> {
        self.verdict = match (self.verdict, kind) {
            (_, EventLine::Data) => Verdict::Passes,
            (Verdict::Open, EventLine::Usage) => Verdict::Dropped,
            // A comment alone ends here, too.
            (Verdict::Open, EventLine::End) => Verdict::Passes,
            (verdict, _) => verdict,
        };
        match self.verdict {
            Verdict::Open if self.held.len() + line.len() > MAX_EVENT_BYTES => return Err(MalformedEvent::TooLong),
            Verdict::Open => self.held.extend_from_slice(line),
            Verdict::Passes => {
                passed.extend_from_slice(&self.held);
                passed.extend_from_slice(line);
                self.held.clear();
            }
            Verdict::Dropped => self.held.clear(),
        }
        if kind == EventLine::End {
            self.verdict = Verdict::Open;
        }
        Ok(())
    }
}
