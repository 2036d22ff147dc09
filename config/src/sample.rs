//! The sample, which shows and explains every key, split into entries.

/// The configuration as it is shipped: every key, with its default or an example.
pub const SAMPLE: &str = include_str!("../paced.toml");

/// A setting of the sample and its comment.
pub(crate) struct Entry {
    /// The comment before it, line by line.
    pub(crate) comment: Vec<&'static str>,
    /// A section's header or a key with its value, whether commented out or not; empty after a comment without a
    /// setting.
    pub(crate) setting: &'static str,
}

/// Returns the sample's entries in the order of its lines.
pub(crate) fn entries() -> Vec<Entry> {
    let (mut entries, mut comment) = (Vec::new(), Vec::new());
    for line in SAMPLE.lines() {
        match line.strip_prefix('#') {
            // A directive for editors is not a setting.
            Some(words) if words.starts_with(':') => {}
            Some(words) if words.is_empty() || words.starts_with(' ') => comment.push(words.trim_start()),
            setting => entries.push(Entry { comment: std::mem::take(&mut comment), setting: setting.unwrap_or(line) }),
        }
    }
    entries.push(Entry { comment, setting: "" });
    entries
}

/// Returns the sample with all settings uncommented.
pub(crate) fn switched_on() -> String {
    let is_setting = |line: &&str| line.starts_with(|first: char| first.is_ascii_lowercase() || first == '[');
    let on = |line: &'static str| line.strip_prefix('#').filter(is_setting).unwrap_or(line);
    SAMPLE.lines().flat_map(|line| [on(line), "\n"]).collect()
}
