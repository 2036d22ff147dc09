//! The columns about classes in `classes` and `top`, named like the fields of `--json`, and their meanings.

/// A column, named like the field or fields of `--json` that it comes from, apart from underscores and units.
pub(crate) struct Column {
    /// Its name.
    pub(crate) name: &'static str,
    /// Its meaning, in lines that fit a terminal of 80 columns after an indent and the name.
    meaning: &'static [&'static str],
}

impl Column {
    /// Its header, with one line for each word of its name.
    pub(crate) fn head(&self) -> String {
        self.name.replace(' ', "\n")
    }
}

macro_rules! columns {
    ($($variable:ident = $name:literal: $($meaning:literal),+;)+) => {
        $(pub(crate) const $variable: Column = Column { name: $name, meaning: &[$($meaning),+] };)+
    };
}

columns! {
    CLASS = "class": "as the policy names it";
    ROLE = "role": "relay: toward clients; edge: toward the relay that it uses";
    TUNNELS = "tunnels": "open tunnels";
    RATE = "rate": "bits sent in the last second";
    SENT = "sent": "bytes of payloads, and of HTTP's frames and fields";
    QUEUE = "queue": "how many payloads waited, on average";
    SOJOURN = "sojourn": "how long sent payloads had waited, on average";
    DROPPED = "dropped": "payloads dropped because the queue was full, they were late,", "or they had waited too long";
    LATE_PAYLOADS = "late payloads": "payloads sent after their deadline: give the class more, or", "the others less";
    LATE_PACKETS = "late packets": "packets handed to the kernel more than 0.25 ms after their",
        "departure: the machine is too busy; see `pacectl trace`";
    EXPIRED_STREAMS = "expired streams": "streams reset because their deadline passed";
}

/// The width of names in a legend: the length of the longest.
const NAME: usize = EXPIRED_STREAMS.name.len();

/// Explains columns, each on its own lines.
pub(crate) fn legend<'a>(columns: impl IntoIterator<Item = &'a Column>) -> impl Iterator<Item = String> {
    columns.into_iter().flat_map(|column| {
        let names = std::iter::once(column.name).chain(std::iter::repeat(""));
        names.zip(column.meaning).map(|(name, meaning)| format!("{name:<NAME$}  {meaning}"))
    })
}

#[cfg(test)]
mod tests {
    use api::v1;

    use super::*;

    const ALL: [Column; 11] =
        [CLASS, ROLE, TUNNELS, RATE, SENT, QUEUE, SOJOURN, DROPPED, LATE_PAYLOADS, LATE_PACKETS, EXPIRED_STREAMS];

    #[test]
    fn columns_and_fields_of_json_have_the_same_names() {
        let json = serde_json::to_value(v1::ClassStats::default()).unwrap();
        let fields: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
        let is_of = |column: &Column, field: &str| {
            let name = column.name.replace(' ', "_");
            field == name || field.starts_with(&format!("{name}_"))
        };
        for column in &ALL {
            // These two are computed from several fields: bytes and time, and sojourn and time.
            let is_derived = ["rate", "queue"].contains(&column.name);
            assert_eq!(fields.iter().any(|field| is_of(column, field)), !is_derived, "{}: {fields:?}", column.name);
        }
        for field in &fields {
            assert!(ALL.iter().any(|column| is_of(column, field)), "{field} is in no column");
        }
    }

    #[test]
    fn a_legend_says_each_name_once_and_fits_a_terminal_of_80_columns_with_an_indent() {
        let lines: Vec<_> = legend(&ALL).collect();
        for column in &ALL {
            let explained = lines.iter().filter(|line| line.starts_with(&format!("{:<NAME$}  ", column.name)));
            assert_eq!(explained.count(), 1, "{}: {lines:#?}", column.name);
        }
        assert!(lines.iter().all(|line| line.len() <= 78), "{lines:#?}");
    }
}
