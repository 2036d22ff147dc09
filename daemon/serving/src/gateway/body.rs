//! Bodies of requests, with their heads, at a gateway and at an edge, and at a gateway also what is read ahead of slow clients. All share
//! one bound, and each holder gets a limited share of it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use masque::h3::{Field, RequestHead};
use openai::OpenAiError;
use parking_lot::Mutex;
use role::holder::Holder;
use tokio::time::{Instant, timeout_at};

use super::{
    body_source::BodySource,
    end::{Failure, Unread},
};

/// The unit in which bodies count against the bound.
const UNIT_BYTES: usize = 1 << 10;

/// The memory of a field besides its name and value, with the allocator's for each of these.
const FIELD_BYTES: usize = size_of::<Field>() + 32;

/// The size of a usual head. It does not count: any request takes more memory than that in any case.
const USUAL_HEAD_BYTES: usize = 4 << 10;

/// How long a client may take for the next piece of its body.
const PIECE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a client may take for its whole body: this time, plus the received bytes divided by this rate in bytes per second. Without this
/// limit, a few slow clients could use up the bound for hours.
const BODY_TIMEOUT: (Duration, u32) = (Duration::from_secs(30), 64 << 10);

/// The bodies of all requests.
#[derive(Debug)]
pub(crate) struct Bodies {
    /// The name of the bound, for clients.
    bound: &'static str,
    shares: Mutex<Shares>,
}

#[derive(Debug)]
struct Shares {
    free_units: usize,
    held: HashMap<Holder, Held>,
}

/// The bodies of one holder.
#[derive(Debug, Default)]
struct Held {
    bodies: usize,
    units: usize,
}

/// The share of one body. Dropping it returns the share.
#[derive(Debug)]
pub(crate) struct BodyShare {
    of: Arc<Bodies>,
    holder: Holder,
    /// How many bytes of the request's head count besides the body.
    head_bytes: usize,
    units: usize,
}

impl Bodies {
    /// Creates a bound of `most_bytes` for all bodies together, with a name that clients understand.
    pub(crate) fn new(most_bytes: usize, bound: &'static str) -> Arc<Self> {
        let free_units = most_bytes.div_ceil(UNIT_BYTES);
        Arc::new(Self { bound, shares: Mutex::new(Shares { free_units, held: HashMap::new() }) })
    }

    /// Begins a body before its first byte arrives.
    pub(crate) fn begin(self: &Arc<Self>, holder: Holder) -> BodyShare {
        self.shares.lock().held.entry(holder.clone()).or_default().bodies += 1;
        BodyShare { of: self.clone(), holder, head_bytes: 0, units: 0 }
    }

    /// Returns how many bodies there are, and how many bytes count for them.
    #[cfg(test)]
    pub(super) fn counted(&self) -> (usize, usize) {
        let shares = self.shares.lock();
        shares
            .held
            .values()
            .fold((0, 0), |(bodies, bytes), held| (bodies + held.bodies, bytes + held.units * UNIT_BYTES))
    }
}

impl BodyShare {
    /// Counts the head of the request as well, because it takes memory for as long as the body: as far as it is larger than usual.
    pub(crate) fn with_head(mut self, head: &RequestHead) -> Self {
        let fields = head.fields.iter().map(|field| FIELD_BYTES + field.name.len() + field.value.len());
        let bytes = fields.sum::<usize>() + head.path.as_ref().map_or(0, Bytes::len);
        self.head_bytes = bytes.saturating_sub(USUAL_HEAD_BYTES);
        self
    }

    /// Grows to the head and `bytes` of the body. A holder's only body may take all free room. Several bodies of one holder together may
    /// take at most as much as stays free (dynamic thresholds, Choudhury and Hahne 1998), so half of the bound stays for other holders.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), OpenAiError> {
        let more = (self.head_bytes + bytes).div_ceil(UNIT_BYTES).saturating_sub(self.units);
        let full = OpenAiError::BodiesFull { bound: self.of.bound };
        let mut shares = self.of.shares.lock();
        let Shares { free_units, held } = &mut *shares;
        let (Some(left), Some(held)) = (free_units.checked_sub(more), held.get_mut(&self.holder)) else {
            return Err(full);
        };
        if more > 0 && held.bodies > 1 && held.units + more > left {
            return Err(full);
        }
        held.units += more;
        self.units += more;
        *free_units = left;
        Ok(())
    }

    /// Shrinks to the head and `bytes` of the body, unless the share is that small already.
    pub(super) fn shrink(&mut self, bytes: usize) {
        let fewer = self.units.saturating_sub((self.head_bytes + bytes).div_ceil(UNIT_BYTES));
        let mut shares = self.of.shares.lock();
        shares.free_units += fewer;
        if let Some(held) = shares.held.get_mut(&self.holder) {
            held.units -= fewer;
        }
        self.units -= fewer;
    }
}

impl Drop for BodyShare {
    fn drop(&mut self) {
        let mut shares = self.of.shares.lock();
        shares.free_units += self.units;
        if let Some(held) = shares.held.get_mut(&self.holder) {
            held.bodies -= 1;
            held.units -= self.units;
            if held.bodies == 0 {
                shares.held.remove(&self.holder);
            }
        }
    }
}

/// A complete body. It counts against the bound until dropped.
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    _share: BodyShare,
}

/// Reads a body of up to `max_bytes`, if there is room for it.
pub(crate) async fn read(
    source: &mut impl BodySource,
    max_bytes: usize,
    mut share: BodyShare,
) -> Result<Body, Failure> {
    if source.least_bytes() > max_bytes as u64 {
        return Err(OpenAiError::TooLarge { max_bytes }.into());
    }
    let (began, mut body) = (Instant::now(), BytesMut::new());
    share.grow(0)?;
    loop {
        let (longest, bytes_per_sec) = BODY_TIMEOUT;
        let all_until = began + longest + Duration::from_secs_f64(body.len() as f64 / f64::from(bytes_per_sec));
        let until = all_until.min(Instant::now() + PIECE_TIMEOUT);
        match timeout_at(until, source.piece()).await.map_err(|_| OpenAiError::BodyTimeout)? {
            Ok(Some(piece)) => {
                let len = body.len() + piece.len();
                if len > max_bytes {
                    return Err(OpenAiError::TooLarge { max_bytes }.into());
                }
                share.grow(len)?;
                body.extend_from_slice(&piece);
            }
            Ok(None) => return Ok(Body { bytes: body.freeze(), _share: share }),
            Err(Unread::Malformed) => {
                return Err(OpenAiError::Json("its content is not what its head says".into()).into());
            }
            Err(Unread::Gone) => return Err(Failure::Gone),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(name: &str) -> Holder {
        Holder::User(name.into())
    }

    #[test]
    fn many_bodies_of_one_holder_leave_room_for_those_of_another() {
        let bodies = Bodies::new(64 * UNIT_BYTES, "bodies_bytes");
        let full = OpenAiError::BodiesFull { bound: "bodies_bytes" };
        let mut greedy: Vec<_> = (0..64).map(|_| bodies.begin(holder("greedy"))).collect();
        let granted = greedy.iter_mut().filter_map(|share| share.grow(UNIT_BYTES).ok()).count();
        assert_eq!(granted, 32, "half of it");
        let mut other = [bodies.begin(holder("other")), bodies.begin(holder("other"))];
        assert_eq!(other.each_mut().map(|share| share.grow(8 * UNIT_BYTES)), [Ok(()), Ok(())]);
        assert_eq!(greedy[0].grow(2 * UNIT_BYTES), Err(full.clone()), "others have less room than it has");
        drop((greedy, other));
        let mut only = bodies.begin(holder("greedy"));
        assert_eq!(only.grow(64 * UNIT_BYTES), Ok(()), "a single body may be as large as all together");
        assert_eq!(bodies.begin(holder("other")).grow(1), Err(full));
        only.shrink(63 * UNIT_BYTES);
        assert_eq!(bodies.begin(holder("other")).grow(1), Ok(()), "room that is given back is free");
        drop(only);
        assert!(bodies.shares.lock().held.is_empty());
    }
}
