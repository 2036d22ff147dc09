//! The configuration's manual page, made from the sample, which shows and explains every key.

use std::fmt::Write as _;

use crate::sample::{Entry, entries};

/// Returns the manual page paced.toml(5) as man(7) text.
#[must_use]
pub fn manual() -> String {
    let mut page = String::from(HEAD);
    for Entry { comment, setting } in entries() {
        let setting = escaped(setting);
        // Writing to a string cannot fail.
        _ = match setting.chars().next() {
            Some('[') => writeln!(page, ".SH \"{setting}\""),
            Some(_) => writeln!(page, ".TP\n.B {setting}"),
            None if comment.is_empty() => Ok(()),
            None => writeln!(page, ".PP"),
        };
        if !comment.is_empty() {
            _ = writeln!(page, "{}", escaped(&comment.join("\n")));
        }
    }
    page.push_str(TAIL);
    page
}

const HEAD: &str = r#".TH paced.toml 5 "" paced "File formats"
.SH NAME
paced.toml \- configuration and policy of paced
.SH SYNOPSIS
.I /etc/paced/paced.toml
.br
.I /etc/paced/conf.d/*.toml
.SH DESCRIPTION
TOML text. Files of conf.d are laid over the main one in the order of their names: sections are joined key by key, sections
in double brackets come after those that are there, and what else a file says replaces what was said before. Values shown
here are defaults, or examples where a key has none.
"#;

const TAIL: &str = ".SH SEE ALSO\n.BR paced (8),\n.BR pacectl (1)\n";

/// Keeps man(7) from taking text for its own requests.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    let line = |line: &str| if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.to_owned() };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SAMPLE;

    #[test]
    fn the_page_has_every_section_and_key_of_the_sample_with_its_words() {
        let page = manual();
        for line in SAMPLE.lines().filter(|line| !["", "#"].contains(line) && !line.starts_with("#:")) {
            let words = escaped(line.strip_prefix('#').unwrap_or(line).trim_start());
            assert!(page.contains(&words), "{words}");
        }
        assert!(page.contains(".SH \"[relay]\"") && page.contains(".TP\n.B workers = 1\nHow many threads"));
    }

    #[test]
    fn no_line_is_taken_for_a_request_that_is_none() {
        let requests = [".TH", ".SH", ".PP", ".TP", ".B ", ".BR", ".I ", ".br"];
        let stray = |line: &&str| line.starts_with('.') && !requests.iter().any(|request| line.starts_with(request));
        assert_eq!(manual().lines().find(stray), None);
        assert_eq!(escaped(".x\n'y a-b\\"), "\\&.x\n\\&'y a\\-b\\e");
    }
}
