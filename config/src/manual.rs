//! The configuration's manual page, made from the sample, which shows and explains every key.

use std::fmt::Write as _;

use crate::{
    Config,
    change::{ChangeRow, Takes, rows},
    sample::{Entry, entries, switched_on},
};

/// Returns the manual page paced.toml(5) in man(7) format.
///
/// Settings are shown as they must be written, so that they can be pasted.
#[must_use]
pub fn manual() -> String {
    let (mut page, restarts) = (String::from(HEAD), restarts());
    let mut section = String::new();
    for Entry { comment, setting } in entries() {
        // Writing to a string cannot fail.
        _ = match setting.chars().next() {
            Some('[') => {
                setting.trim_matches(['[', ']']).clone_into(&mut section);
                // An argument of a macro would lose its quotes.
                writeln!(page, ".SH {}", escaped(setting))
            }
            // Without filling, which would break long lines.
            Some(_) => writeln!(page, ".PP\n.nf\n\\fB{}\\fR\n.fi", escaped(setting)),
            None if comment.is_empty() => Ok(()),
            None => writeln!(page, ".PP"),
        };
        let is_key = !setting.is_empty() && !setting.starts_with('[');
        if is_key {
            page.push_str(".RS\n");
        }
        if !comment.is_empty() {
            _ = writeln!(page, "{}", escaped(&comment.join("\n")));
        }
        let key = setting.split(" = ").next().unwrap_or_default();
        let path = if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
        if restarts.contains(&&path[..]) {
            page.push_str("A change requires a restart.\n");
        }
        if is_key {
            page.push_str(".RE\n");
        }
    }
    page.push_str(TAIL);
    page
}

/// Returns the keys whose change requires a restart.
fn restarts() -> Vec<&'static str> {
    let whole = Config::from_toml(&switched_on());
    let rows = whole.map(|config| rows(&config, &config)).unwrap_or_default();
    let restarts = rows.into_iter().filter(|ChangeRow { takes, .. }| *takes == Takes::Restart);
    restarts.flat_map(|row| row.keys).copied().collect()
}

const HEAD: &str = r#".TH paced.toml 5 "" paced "File formats"
.SH NAME
paced.toml \- configuration and policy of paced
.SH SYNOPSIS
.I /etc/paced/paced.toml
.br
.I /etc/paced/conf.d/*.toml
.SH DESCRIPTION
TOML text. Files of conf.d are merged into the main file in the order of their names: sections are merged key by key, sections
in double brackets are appended, and any other value replaces the earlier one. Values shown here are defaults, or examples
where a key has none.
.PP
A reload applies every change. If a key that is marked here has changed, the reload fails, names the key and changes nothing.
"#;

const TAIL: &str = ".SH SEE ALSO\n.BR paced (8),\n.BR pacectl (1)\n";

/// Escapes text so that man(7) shows it unchanged: no line is taken for a request, and quotes, hyphens and the like
/// stay ASCII, so that they can be pasted.
#[must_use]
pub fn escaped(text: &str) -> String {
    let line = |line: &str| {
        let mut escaped = if line.starts_with(['.', '\'']) { "\\&".to_owned() } else { String::new() };
        for character in line.chars() {
            match character {
                '\\' => escaped.push_str("\\e"),
                '-' => escaped.push_str("\\-"),
                '"' => escaped.push_str("\\(dq"),
                '\'' => escaped.push_str("\\(aq"),
                '`' => escaped.push_str("\\(ga"),
                '^' => escaped.push_str("\\(ha"),
                '~' => escaped.push_str("\\(ti"),
                other => escaped.push(other),
            }
        }
        escaped
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        process::{Command, Stdio},
    };

    use toml::Table;

    use super::*;
    use crate::SAMPLE;

    /// The manual page as a terminal shows it.
    fn rendered() -> String {
        let mut groff = Command::new("groff");
        groff.args(["-man", "-Tutf8", "-Kutf8", "-P-cbou"]);
        let child = groff.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("groff is installed (Debian's groff-base; `tests/setup pure` installs it)");
        // The page fits into the pipe's buffer.
        child.stdin.take().unwrap().write_all(manual().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "nothing is wrong with the page");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn settings_pasted_from_the_rendered_page_are_the_sample() {
        let page = rendered();
        let settings: Vec<_> = entries().into_iter().map(|entry| entry.setting).filter(|it| !it.is_empty()).collect();
        let mut pasted = String::new();
        for line in page.lines().map(str::trim).filter(|line| settings.contains(line)) {
            pasted += &format!("{line}\n");
        }
        let expected: Table = switched_on().parse().unwrap();
        assert_eq!(pasted.parse::<Table>().unwrap(), expected, "{pasted}");
        assert!(page.contains("A change requires a restart."));
    }

    #[test]
    fn the_page_has_every_section_and_key_of_the_sample_with_its_words() {
        let page = manual();
        for line in SAMPLE.lines().filter(|line| !["", "#"].contains(line) && !line.starts_with("#:")) {
            let words = escaped(line.strip_prefix('#').unwrap_or(line).trim_start());
            assert!(page.contains(&words), "{words}");
        }
        assert!(page.contains(".SH [relay]") && page.contains(".nf\n\\fBworkers = 1\\fR\n.fi\n.RS\nHow many threads"));
    }

    #[test]
    fn no_line_is_taken_for_a_request_that_is_none() {
        let requests = [".TH", ".SH", ".PP", ".nf", ".fi", ".RS", ".RE", ".BR", ".I ", ".br"];
        let stray = |line: &&str| line.starts_with('.') && !requests.iter().any(|request| line.starts_with(request));
        assert_eq!(manual().lines().find(stray), None);
        assert_eq!(escaped(".x\n'y a-b\\ \"c\""), "\\&.x\n\\&\\(aqy a\\-b\\e \\(dqc\\(dq");
    }
}
