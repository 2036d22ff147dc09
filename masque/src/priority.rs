//! A client's signals for the order of responses: the `priority` field and the value of PRIORITY_UPDATE (RFC 9218 §4,
//! §5, §7).
//!
//! | member | type | meaning | source |
//! |---|---|---|---|
//! | `u` | integer, 0 to 7 | urgency, 0 first | RFC 9218 §4.1 |
//! | `i` | boolean | may alternate with its equals instead of being served to its end | RFC 9218 §4.2 |
//! | `dl` | integer, 0 or more | milliseconds within which the rest is useful | paced's own |
//!
//! A signal is advice: nothing in it is an error, and the receiver's policy decides its effect.

use sfv::{BareItem, DictSerializer, Dictionary, Integer, KeyRef, ListEntry, Parser};

use crate::h3::Field;

/// The field's name.
pub const FIELD_NAME: &str = "priority";

/// The least urgent `u` (RFC 9218 §4.1).
pub const LEAST_URGENT: u8 = 7;

/// The `u` of a response without a signal (RFC 9218 §4.1).
pub const DEFAULT_URGENCY: u8 = 3;

/// Longer values are ignored. The three members need about 30 bytes.
pub const MAX_VALUE_BYTES: usize = 512;

/// The largest integer that a structured field can carry (RFC 9651 §3.3.1).
const MAX_INTEGER: u64 = 999_999_999_999_999;

const URGENCY: &KeyRef = KeyRef::constant("u");
const INCREMENTAL: &KeyRef = KeyRef::constant("i");
const DEADLINE: &KeyRef = KeyRef::constant("dl");

/// A signal; absent members are `None`. A later signal replaces an earlier one as a whole (RFC 9218 §7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Priority {
    /// `u`: 0 is the most urgent, 7 the least.
    pub urgency: Option<u8>,
    /// `i`.
    pub incremental: Option<bool>,
    /// `dl`: the time from now within which the rest of the response is useful, in milliseconds.
    pub deadline_ms: Option<u64>,
}

impl Priority {
    /// Parses the value of the field or of a PRIORITY_UPDATE. Members that are unknown, of another type or out of range
    /// are ignored, and so are parameters (RFC 9218 §4).
    ///
    /// Returns `None`, no signal, for a value that is not a dictionary or is longer than [`MAX_VALUE_BYTES`].
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Self> {
        if value.len() > MAX_VALUE_BYTES {
            return None;
        }
        let members: Dictionary = Parser::new(value).parse().ok()?;
        let item = |key| match members.get(key) {
            Some(ListEntry::Item(item)) => Some(&item.bare_item),
            _ => None,
        };
        let integer = |key| item(key).and_then(BareItem::as_integer).map(i64::from);
        Some(Self {
            urgency: integer(URGENCY).and_then(|u| u8::try_from(u).ok()).filter(|u| *u <= LEAST_URGENT),
            incremental: item(INCREMENTAL).and_then(BareItem::as_boolean),
            deadline_ms: integer(DEADLINE).and_then(|ms| u64::try_from(ms).ok()),
        })
    }

    /// Returns the signal in the `priority` fields of a message; several fields form one dictionary (RFC 9651 §4.2).
    #[must_use]
    pub fn from_fields(fields: &[Field]) -> Option<Self> {
        let mut values = fields.iter().filter(|field| field.name == FIELD_NAME).map(|field| &field.value[..]);
        let mut value = values.next()?.to_vec();
        for more in values {
            if value.len() > MAX_VALUE_BYTES {
                break;
            }
            value.extend_from_slice(b", ");
            value.extend_from_slice(more);
        }
        Self::parse(&value)
    }

    /// Returns the value of the field or of a PRIORITY_UPDATE: empty if no member is set. An urgency above 7 is sent as
    /// 7, and a deadline above the largest integer of structured fields as that integer.
    #[must_use]
    pub fn to_field_value(&self) -> String {
        let mut members = DictSerializer::new();
        if let Some(urgency) = self.urgency {
            let _ = members.bare_item(URGENCY, Integer::from(urgency.min(LEAST_URGENT)));
        }
        if let Some(incremental) = self.incremental {
            let _ = members.bare_item(INCREMENTAL, incremental);
        }
        if let Some(Ok(deadline_ms)) = self.deadline_ms.map(|ms| Integer::try_from(ms.min(MAX_INTEGER))) {
            let _ = members.bare_item(DEADLINE, deadline_ms);
        }
        members.finish().unwrap_or_default()
    }

    /// Returns the field with the signal, or `None` if no member is set: an empty dictionary is not sent (RFC 9651
    /// §4.1).
    #[must_use]
    pub fn to_field(&self) -> Option<Field> {
        (*self != Self::default()).then(|| Field::new(FIELD_NAME, self.to_field_value()))
    }
}

/// Returns the priority for an urgency, 0 to 255 and higher first: 255 for 0, 31 for 7 and above.
#[must_use]
pub const fn of_urgency(urgency: u8) -> u8 {
    255 - 32 * if urgency < LEAST_URGENT { urgency } else { LEAST_URGENT }
}

/// Returns the most urgent `u` that does not exceed `priority`; 7 if every one does.
#[must_use]
pub const fn urgency_of(priority: u8) -> u8 {
    let urgency = (255 - priority).div_ceil(32);
    if urgency < LEAST_URGENT { urgency } else { LEAST_URGENT }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn signal(urgency: Option<u8>, incremental: Option<bool>, deadline_ms: Option<u64>) -> Option<Priority> {
        Some(Priority { urgency, incremental, deadline_ms })
    }

    #[test]
    fn each_member_is_read_as_far_as_it_is_given() {
        let rows = [
            ("", signal(None, None, None)),
            ("u=0", signal(Some(0), None, None)),
            ("u=7, i", signal(Some(7), Some(true), None)),
            ("i=?0,dl=250", signal(None, Some(false), Some(250))),
            ("dl=0;x=1, u=5;y", signal(Some(5), None, Some(0))),
            ("dl=999999999999999", signal(None, None, Some(MAX_INTEGER))),
        ];
        for (value, expected) in rows {
            assert_eq!(Priority::parse(value.as_bytes()), expected, "{value}");
        }
    }

    #[test]
    fn unknown_members_and_those_of_another_type_or_out_of_range_are_ignored_rfc_9218_4() {
        let rows = [
            ("u=8, i", signal(None, Some(true), None)),
            ("u=-1, dl=-5, i", signal(None, Some(true), None)),
            ("u=1.0, i=1, dl=\"5\"", signal(None, None, None)),
            ("u=(1 2), i=(?1), dl=5", signal(None, None, Some(5))),
            ("u=264, dl=7", signal(None, None, Some(7))),
            ("paint=red, u=2", signal(Some(2), None, None)),
        ];
        for (value, expected) in rows {
            assert_eq!(Priority::parse(value.as_bytes()), expected, "{value}");
        }
    }

    #[test]
    fn the_last_of_equal_members_counts_rfc_9651_4_2_2() {
        assert_eq!(Priority::parse(b"u=1, u=6"), signal(Some(6), None, None));
        assert_eq!(Priority::parse(b"u=1, u=ten"), signal(None, None, None));
    }

    #[test]
    fn a_value_that_is_no_dictionary_or_too_long_is_no_signal() {
        for value in ["u=", "u=1,", "U=1", "u=1 i", "\u{e9}", "dl=1000000000000000"] {
            assert_eq!(Priority::parse(value.as_bytes()), None, "{value}");
        }
        let padded = |len: usize| format!("u=1{}", " ".repeat(len - 3));
        assert_eq!(Priority::parse(padded(MAX_VALUE_BYTES).as_bytes()), signal(Some(1), None, None));
        assert_eq!(Priority::parse(padded(MAX_VALUE_BYTES + 1).as_bytes()), None);
    }

    #[test]
    fn several_fields_are_one_dictionary_and_none_is_no_signal() {
        let fields = ["u=1, dl=9", "u=4"].map(|value| Field::new(FIELD_NAME, value.to_owned()));
        assert_eq!(Priority::from_fields(&fields), signal(Some(4), None, Some(9)));
        assert_eq!(Priority::from_fields(&[Field::new("prio", "u=1")]), None);
        let flood = vec![Field::new(FIELD_NAME, "u=1"); MAX_VALUE_BYTES];
        assert_eq!(Priority::from_fields(&flood), None);
    }

    #[test]
    fn a_signal_is_written_as_one_dictionary() {
        let whole = Priority { urgency: Some(2), incremental: Some(true), deadline_ms: Some(1_000) };
        assert_eq!(whole.to_field(), Some(Field::new(FIELD_NAME, "u=2, i, dl=1000")));
        let beyond = Priority { urgency: Some(9), incremental: Some(false), deadline_ms: Some(u64::MAX) };
        assert_eq!(beyond.to_field_value(), "u=7, i=?0, dl=999999999999999");
        assert_eq!(Priority::default().to_field(), None);
    }

    #[test]
    fn urgencies_stand_for_priorities_32_apart() {
        let priorities = [0, 1, 2, 3, 4, 5, 6, 7, 8, 255].map(of_urgency);
        assert_eq!(priorities, [255, 223, 191, 159, 127, 95, 63, 31, 31, 31]);
    }

    proptest! {
        #[test]
        fn an_urgency_claims_no_more_than_its_priority_and_no_less_than_it_must(priority: u8) {
            let urgency = urgency_of(priority);
            prop_assert!(of_urgency(urgency) <= priority || urgency == LEAST_URGENT);
            prop_assert!(urgency == 0 || of_urgency(urgency - 1) > priority);
        }

        #[test]
        fn a_written_signal_reads_back(
            urgency in prop::option::of(0..=LEAST_URGENT),
            incremental: Option<bool>,
            deadline_ms in prop::option::of(0..=MAX_INTEGER),
        ) {
            let signal = Priority { urgency, incremental, deadline_ms };
            prop_assert_eq!(Priority::parse(signal.to_field_value().as_bytes()), Some(signal));
        }

        #[test]
        fn no_value_panics_and_every_urgency_is_in_range(
            value in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..600),
                "[ui]=[-0-9?.\"();a-z ]{0,8}(, dl=-?[0-9.]{1,17})?".prop_map(String::into_bytes),
            ],
        ) {
            let read = Priority::parse(&value).unwrap_or_default();
            prop_assert!(read.urgency.is_none_or(|urgency| urgency <= LEAST_URGENT));
            prop_assert_eq!(Priority::from_fields(&[Field::new(FIELD_NAME, value)]).unwrap_or_default(), read);
        }
    }
}
