//! Bodies of requests, with a common bound.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{
    Failure,
    exchange::{Exchange, Unread},
};
use crate::openai::OpenAiError;

/// How many bytes a permit of the bound covers.
pub(super) const UNIT_BYTES: usize = 1 << 10;

/// How long a client may take for the next piece of its body.
const PIECE_TIMEOUT: Duration = Duration::from_secs(10);

/// A complete body, which counts against the bound while it lives.
pub(super) struct Body {
    pub(super) bytes: Bytes,
    _held: OwnedSemaphorePermit,
}

/// Reads a body of up to `max_bytes`, if `bound` has permits for it.
pub(super) async fn read(exchange: &mut Exchange, max_bytes: usize, bound: &Arc<Semaphore>) -> Result<Body, Failure> {
    let (mut body, mut held) = (BytesMut::new(), take(bound, 0)?);
    loop {
        let part = timeout(PIECE_TIMEOUT, exchange.piece()).await.map_err(|_| OpenAiError::BodyTimeout)?;
        match part {
            Ok(Some(piece)) => {
                if body.len() + piece.len() > max_bytes {
                    return Err(OpenAiError::TooLarge { max_bytes }.into());
                }
                let units = (body.len() + piece.len()).div_ceil(UNIT_BYTES) - body.len().div_ceil(UNIT_BYTES);
                held.merge(take(bound, units)?);
                body.extend_from_slice(&piece);
            }
            Ok(None) => return Ok(Body { bytes: body.freeze(), _held: held }),
            Err(Unread::Malformed) => {
                return Err(OpenAiError::Json("its content is not what its head says".into()).into());
            }
            Err(Unread::Gone) => return Err(Failure::Gone),
        }
    }
}

fn take(bound: &Arc<Semaphore>, units: usize) -> Result<OwnedSemaphorePermit, OpenAiError> {
    bound.clone().try_acquire_many_owned(units as u32).map_err(|_| OpenAiError::Crowded)
}
