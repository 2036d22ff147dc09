//! What the transport's parts report about a packet while it is written.
//!
//! s2n-quic's queues write packets by calling the transport, which calls the congestion controller within that call.
//! Neither call carries what the other needs. So the queue sets up a label for its thread, the transport's parts write on
//! it, and the queue takes it back: exact for every packet, however many connections share the socket.

use std::cell::RefCell;

use super::{class_key::ClassKey, qlog::Traced};

/// What the queue needs to know about one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// Whether it belongs to a connection; else it answers a packet that belongs to none.
    pub of_connection: bool,
    /// When the packet departs, in nanoseconds of CLOCK_MONOTONIC; `None` if it may simply follow the packets before it.
    pub departure_ns: Option<u64>,
    /// The packet's mark (`SO_MARK`); `None` for the socket's own.
    pub mark: Option<u32>,
    /// The class of the first payload in it that has one.
    pub class: Option<ClassKey>,
    /// The packet's identity in a log, if its connection is traced.
    pub traced: Option<Traced>,
}

thread_local! {
    static LABEL: RefCell<Option<Label>> = const { RefCell::new(None) };
}

/// Sets up a label, calls `write` to write the packet, and returns its result and the label.
pub(super) fn collect<T>(write: impl FnOnce() -> T) -> (T, Label) {
    LABEL.set(Some(Label::default()));
    let written = write();
    (written, LABEL.take().unwrap_or_default())
}

/// Changes the label of the packet that is being written; returns whether there is one. Queues that cannot hold a packet
/// until it departs set up none.
pub fn write(change: impl FnOnce(&mut Label)) -> bool {
    LABEL.with(|label| match label.try_borrow_mut().as_deref_mut() {
        Ok(Some(label)) => {
            change(label);
            true
        }
        // `Err` would be a change within a change, which no caller makes.
        Ok(None) | Err(_) => false,
    })
}

/// Notes that the packet being written carries a payload of a class, with its mark. The first such payload decides.
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
