//! What is said of a packet while it is written.
//!
//! s2n-quic's queues write packets by calling the transport, which calls the congestion controller in the same breath.
//! Neither call carries what the other needs. So the queue lays out a label for its thread, the transport's parts write
//! on it, and the queue picks it up: exact for every packet, however many connections share the socket.

use std::cell::RefCell;

use super::{class_key::ClassKey, qlog::Traced};

/// What the queue needs to know about one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// When the packet departs, in nanoseconds of CLOCK_MONOTONIC; `None` if it may go behind those before it.
    pub departure_ns: Option<u64>,
    /// The packet's mark (`SO_MARK`); `None` for the socket's own.
    pub mark: Option<u32>,
    /// The class of the first thing in it that has one.
    pub class: Option<ClassKey>,
    /// The packet itself, if somebody wants to know when it leaves.
    pub traced: Option<Traced>,
}

thread_local! {
    static LABEL: RefCell<Option<Label>> = const { RefCell::new(None) };
}

/// Lays out a label, has `write` write the packet, and returns what was written on it.
pub(super) fn collect<T>(write: impl FnOnce() -> T) -> (T, Label) {
    LABEL.set(Some(Label::default()));
    let written = write();
    (written, LABEL.take().unwrap_or_default())
}

/// Writes on the label of the packet that is being written; tells whether there is one. There is none under queues that
/// cannot hold a packet until it departs.
pub fn write(change: impl FnOnce(&mut Label)) -> bool {
    LABEL.with(|label| match label.try_borrow_mut().as_deref_mut() {
        Ok(Some(label)) => {
            change(label);
            true
        }
        // Nobody writes on a label while it is being written on.
        Ok(None) | Err(_) => false,
    })
}

/// Notes that the packet that is being written carries something of a class, with its mark. The first such thing decides.
pub fn carry(class: Option<ClassKey>, mark: Option<u32>) {
    if class.is_some() {
        write(|label| {
            if label.class.is_none() {
                (label.class, label.mark) = (class, mark);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_belongs_to_the_packet_being_written_and_to_no_other() {
        assert!(!write(|label| label.mark = Some(1)), "nothing is being written");
        let (written, label) = collect(|| write(|label| label.departure_ns = Some(7)));
        assert!(written);
        assert_eq!(label, Label { departure_ns: Some(7), ..Label::default() });
        assert_eq!(collect(|| ()).1, Label::default());
        let [voice, bulk] = ["voice", "bulk"].map(|name| Some(ClassKey::of(name)));
        let (_, label) =
            collect(|| [(None, None), (voice, Some(3)), (bulk, Some(4))].map(|(class, mark)| carry(class, mark)));
        assert_eq!((label.class, label.mark), (voice, Some(3)), "the first that has one");
        assert!(!write(|_| {}));
    }
}
