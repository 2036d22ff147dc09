//! A request's body on its way to an engine, which knows the model by another name, and may be asked for `usage`.

use std::{
    convert::Infallible,
    ops::Range,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// The largest piece that hyper gets at once, in bytes. With TLS, it copies a piece before it sends it.
const PIECE_BYTES: usize = 64 << 10;

/// How many parts a body with two changes has.
const PARTS: usize = 5;

/// The bytes of a client's body around another model's name and an added field. It shares them with the body, which counts against the bound
/// on bodies.
#[derive(Clone, Debug, Default)]
pub struct RenamedBody([Bytes; PARTS]);

impl RenamedBody {
    /// Returns `body` with texts in place of these ranges, two at most. The ranges are in the order of the body and do not overlap; a
    /// range that does not fit is left as it is.
    pub(super) fn changed(body: &Bytes, changes: impl Iterator<Item = (Range<usize>, Bytes)>) -> Self {
        let (mut parts, mut rest_at) = (<[Bytes; PARTS]>::default(), 0);
        let mut places = parts.iter_mut();
        for (Range { start, end }, text) in changes.take(PARTS / 2) {
            if start < rest_at || start > end || end > body.len() {
                continue;
            }
            // The parts come first: in the other order, `zip` would take a place for which no part is left.
            for (part, place) in [body.slice(rest_at..start), text].into_iter().zip(&mut places) {
                *place = part;
            }
            rest_at = end;
        }
        if let Some(place) = places.next() {
            *place = body.slice(rest_at..);
        }
        Self(parts)
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// Whether no bytes are left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
    }

    /// Returns a copy of its bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.0.concat()
    }
}

impl Body for RenamedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let part = self.0.iter_mut().find(|part| !part.is_empty());
        Poll::Ready(part.map(|part| Ok(Frame::data(part.split_to(part.len().min(PIECE_BYTES))))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::RoutingFields;

    #[tokio::test]
    async fn the_body_for_an_engine_is_the_clients_own_memory_around_the_name() {
        let body = Bytes::from(format!(r#"{{"prompt":"{}","model":"x","n":1}}"#, "y".repeat(3 * PIECE_BYTES)));
        let mut renamed = RoutingFields::read(&body).unwrap().for_engine(&body, "engine's", None);
        let (len, mut sent, mut copied) = (renamed.len(), Vec::new(), Vec::new());
        while let Some(frame) = renamed.frame().await {
            let piece = frame.unwrap().into_data().unwrap();
            assert!(piece.len() <= PIECE_BYTES);
            if !body.as_ptr_range().contains(&piece.as_ptr()) {
                copied.push(piece.clone());
            }
            sent.extend_from_slice(&piece);
        }
        assert_eq!(copied, [&br#""engine's""#[..]]);
        assert_eq!((sent.len(), renamed.is_end_stream()), (len, true));
        assert!(sent.ends_with(br#"y","model":"engine's","n":1}"#));
    }
}
