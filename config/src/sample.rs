//! The sample, which shows and explains every key, in pieces.

/// The configuration as it is shipped: every key, with its default or an example.
pub const SAMPLE: &str = include_str!("../paced.toml");

/// A setting of the sample and what is said about it.
pub(crate) struct Entry {
    /// The words before it, line by line.
    pub(crate) comment: Vec<&'static str>,
    /// A section's head or a key with its value, whether switched on or off; empty behind words about neither.
    pub(crate) setting: &'static str,
}

/// Returns the sample's entries in the order of its lines.
pub(crate) fn entries() -> Vec<Entry> {
    let (mut entries, mut comment) = (Vec::new(), Vec::new());
    for line in SAMPLE.lines() {
        match line.strip_prefix('#') {
            // What editors heed is no setting.
            Some(words) if words.starts_with(':') => {}
            Some(words) if words.is_empty() || words.starts_with(' ') => comment.push(words.trim_start()),
            setting => entries.push(Entry { comment: std::mem::take(&mut comment), setting: setting.unwrap_or(line) }),
        }
    }
    entries.push(Entry { comment, setting: "" });
    entries
}

/// Returns the sample with everything switched on.
pub(crate) fn switched_on() -> String {
    let is_setting = |line: &&str| line.starts_with(|first: char| first.is_ascii_lowercase() || first == '[');
    let on = |line: &'static str| line.strip_prefix('#').filter(is_setting).unwrap_or(line);
    SAMPLE.lines().flat_map(|line| [on(line), "\n"]).collect()
}
