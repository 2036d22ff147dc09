//! The lines of a table that is being written.

/// Lines, each with a key and its value.
pub(super) struct Lines {
    lines: Vec<String>,
    is_whole: bool,
    /// Keys that have no meaning here.
    left_out: Vec<&'static str>,
    /// Whether the keys asked for have their default.
    is_tacit: bool,
}

impl Lines {
    /// Begins a table; it includes defaults if `is_whole`.
    pub(super) const fn new(is_whole: bool) -> Self {
        Self { lines: Vec::new(), is_whole, left_out: Vec::new(), is_tacit: false }
    }

    /// Omits `key`.
    pub(super) fn leave_out(&mut self, key: &'static str) {
        self.left_out.push(key);
    }

    /// Sets whether the keys that follow have their default.
    pub(super) const fn set_tacit(&mut self, is_tacit: bool) {
        self.is_tacit = is_tacit;
    }

    /// Writes the value that `held` returns, if the key should be written.
    pub(super) fn say(&mut self, key: &'static str, held: impl FnOnce() -> Option<String>) {
        let is_said = (self.is_whole || !self.is_tacit) && !self.left_out.contains(&key);
        if let Some(value) = is_said.then(held).flatten() {
            self.lines.push(format!("{key} = {value}"));
        }
    }

    /// Returns the lines.
    pub(super) fn into_vec(self) -> Vec<String> {
        self.lines
    }
}
