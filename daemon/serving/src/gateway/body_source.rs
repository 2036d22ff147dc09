//! Where the pieces of a request's body come from.

use std::{error::Error as _, io};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};

use super::end::Unread;

/// A request whose body can be read.
pub(crate) trait BodySource {
    /// Returns how many bytes the body has at least, as the head says.
    fn least_bytes(&self) -> u64;

    /// Returns the next piece; `None` at the end.
    fn piece(&mut self) -> impl Future<Output = Result<Option<Bytes>, Unread>> + Send;
}

impl BodySource for Incoming {
    fn least_bytes(&self) -> u64 {
        self.size_hint().lower()
    }

    async fn piece(&mut self) -> Result<Option<Bytes>, Unread> {
        loop {
            return match self.frame().await {
                None => Ok(None),
                Some(Err(error)) if is_malformed(&error) => Err(Unread::Malformed),
                Some(Err(_)) => Err(Unread::Gone),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(piece) => {
                        turns::arrived(piece.len());
                        Ok(Some(piece))
                    }
                    Err(_) => continue,
                },
            };
        }
    }
}

/// Whether a body that cannot be read breaks the rules of HTTP/1.1, so that the client may still wait for an answer. Otherwise, the client's
/// bytes ended, or the client reset the stream.
fn is_malformed(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| matches!(cause.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData))
}
