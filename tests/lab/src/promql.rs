//! A reader of PromQL queries and of the YAML of alert rules, as far as `perf/` uses both. It finds misspelt names, labels, functions and
//! lines, brackets that do not match, and operands without an operator between them; it does not check types.

use anyhow::{Context as _, Result, bail, ensure};

/// What a query asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// The metrics.
    pub selectors: Vec<Selector>,
    /// The labels by which it groups or joins.
    pub labels: Vec<String>,
}

/// A metric in a query.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// The name of the metric.
    pub metric: String,
    /// The label, the operator and the value of each condition.
    pub conditions: Vec<[String; 3]>,
}

const FUNCTIONS: &[&str] =
    &["sum", "min", "max", "topk", "rate", "increase", "changes", "max_over_time", "histogram_quantile", "time"];
const GROUPINGS: &[&str] = &["by", "on", "group_left"];

/// Takes a token from the front of a query: a word, a string, a duration in brackets or an operator.
fn token(rest: &mut &str) -> Result<Option<String>> {
    *rest = rest.trim_start();
    let Some(first) = rest.chars().next() else { return Ok(None) };
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || "_.$".contains(letter);
    let len = match first {
        '"' => rest[1..].find('"').context("a string without an end")? + 2,
        '[' => rest.find(']').context("a range without an end")? + 1,
        first if is_word(first) => rest.find(|letter| !is_word(letter)).unwrap_or(rest.len()),
        _ if ["=~", "!=", "!~", "==", ">=", "<="].iter().any(|operator| rest.starts_with(operator)) => 2,
        '(' | ')' | '{' | '}' | ',' | '=' | '>' | '<' | '+' | '-' | '*' | '/' => 1,
        other => bail!("{other} in a query"),
    };
    let (token, after) = rest.split_at(len);
    *rest = after;
    Ok(Some(token.to_owned()))
}

fn is_name(word: &str) -> bool {
    word.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_') && !word.contains(['.', '$'])
}

impl Query {
    /// Reads a query.
    ///
    /// # Errors
    /// It is not PromQL, or uses more of it than `perf/` does.
    pub fn parse(query: &str) -> Result<Self> {
        let mut rest = query;
        let tokens: Vec<_> = std::iter::from_fn(|| token(&mut rest).transpose()).collect::<Result<_>>()?;
        let mut tokens = tokens.iter().map(String::as_str).peekable();
        let (mut read, mut open) = (Self::default(), 0);
        // Whether an operand comes next, and not an operator.
        let mut is_due = true;
        while let Some(word) = tokens.next() {
            match word {
                "and" | "or" | "unless" => {
                    ensure!(!is_due, "{word} without a left side");
                    is_due = true;
                }
                grouping if GROUPINGS.contains(&grouping) => {
                    ensure!(tokens.next() == Some("("), "{grouping} without labels");
                    loop {
                        let label = tokens.next().filter(|label| is_name(label)).context("no label")?;
                        read.labels.push(label.to_owned());
                        match tokens.next() {
                            Some(",") => {}
                            Some(")") => break,
                            other => bail!("{other:?} among labels"),
                        }
                    }
                }
                name if is_name(name) => {
                    if FUNCTIONS.contains(&name) {
                        let follows = tokens.peek();
                        ensure!(follows.is_some_and(|next| *next == "(" || *next == "by"), "{name} without arguments");
                        ensure!(is_due, "{name} after another operand");
                        continue;
                    }
                    ensure!(is_due, "{name} after another operand");
                    ensure!(tokens.peek() != Some(&"("), "the function {name} does not exist");
                    let mut selector = Selector { metric: name.to_owned(), ..Selector::default() };
                    if tokens.next_if_eq(&"{").is_some() {
                        loop {
                            let mut part = || tokens.next().context("conditions without an end").map(str::to_owned);
                            let [label, operator, value] = [part()?, part()?, part()?];
                            ensure!(is_name(&label), "{label} is no label");
                            ensure!(matches!(&operator[..], "=" | "=~" | "!=" | "!~"), "{operator} in a condition");
                            ensure!(value.starts_with('"'), "{value} is no string");
                            selector.conditions.push([label, operator, value.trim_matches('"').to_owned()]);
                            match tokens.next() {
                                Some(",") => {}
                                Some("}") => break,
                                other => bail!("{other:?} among conditions"),
                            }
                        }
                    }
                    read.selectors.push(selector);
                    is_due = false;
                }
                "(" => {
                    ensure!(is_due, "a bracket after an operand");
                    open += 1;
                    // `time()` has no argument.
                    is_due = tokens.peek() != Some(&")");
                }
                ")" => {
                    ensure!(!is_due && open > 0, "a bracket closes too early");
                    open -= 1;
                }
                range if range.starts_with('[') => {
                    ensure!(!is_due && is_duration(range.trim_matches(['[', ']'])), "{range} is no range");
                }
                number if number.parse::<f64>().is_ok() => {
                    ensure!(is_due, "{number} after another operand");
                    is_due = false;
                }
                "+" | "-" | "*" | "/" | "==" | "!=" | ">" | "<" | ">=" | "<=" | "," => {
                    ensure!(!is_due, "{word} without a left side");
                    is_due = true;
                }
                other => bail!("{other} in a query"),
            }
        }
        ensure!(open == 0 && !is_due, "the query ends too early");
        Ok(read)
    }
}

/// Whether this is a duration of Prometheus, such as `5m`, or Grafana's variable for one.
fn is_duration(text: &str) -> bool {
    let unit = text.strip_suffix(['s', 'm', 'h', 'd']);
    text == "$__rate_interval" || unit.is_some_and(|number| number.parse::<u32>().is_ok_and(|number| number > 0))
}

/// An alert rule.
#[derive(Debug)]
pub struct Alert {
    /// Its name.
    pub name: String,
    /// Its query.
    pub query: String,
    /// The labels that its texts mention.
    pub mentioned: Vec<String>,
}

/// Reads a file of one group of alert rules, written as `perf/alerts.yml` is: every line has one of a few forms.
///
/// # Errors
/// A line has none of these forms, a rule lacks a part, or two rules have the same name.
pub fn alerts(text: &str) -> Result<Vec<Alert>> {
    let lines = text.lines().enumerate().skip_while(|(_, line)| line.starts_with('#'));
    let mut lines = lines.map(|(number, line)| (number + 1, line)).peekable();
    for expected in ["groups:", "  - name: paced", "    rules:"] {
        let found = lines.next();
        ensure!(found.is_some_and(|(_, line)| line == expected), "{found:?} in place of {expected}");
    }
    let mut alerts = Vec::<Alert>::new();
    while let Some((number, line)) = lines.next() {
        let name = line.strip_prefix("      - alert: ").with_context(|| format!("line {number} begins no rule"))?;
        let is_new = alerts.iter().all(|alert| alert.name != name);
        ensure!(is_new && name.chars().all(|letter| letter.is_ascii_alphanumeric()), "line {number}: the name {name}");
        let mut part = |key: &str| {
            let line = lines.next_if(|(_, line)| line.trim_start().starts_with(&format!("{key}:")));
            let Some((number, line)) = line else {
                ensure!(key == "for", "{name} has no {key} where it belongs");
                return Ok(None);
            };
            let indent = if matches!(key, "summary" | "description") { 10 } else { 8 };
            ensure!(line.len() - line.trim_start().len() == indent, "line {number}: its indentation");
            let value = line.trim_start()[key.len() + 1..].trim_start().to_owned();
            let mut folded = String::new();
            while key == "expr"
                && let Some((_, more)) = lines.next_if(|(_, line)| line.starts_with("          "))
            {
                folded += more;
            }
            match value == ">" {
                true => Ok(Some(folded)),
                // A plain scalar ends at a comment, and may be no key.
                false if !folded.is_empty() || (key == "expr" && (value.contains(": ") || value.contains(" #"))) => {
                    bail!("line {number} is no text of one line")
                }
                false => Ok(Some(value)),
            }
        };
        let query = part("expr")?.unwrap_or_default();
        ensure!(!query.trim().is_empty(), "{name} has no query");
        if let Some(duration) = part("for")? {
            ensure!(is_duration(&duration), "{name} is pending for {duration}");
        }
        let labels = part("labels")?.unwrap_or_default();
        ensure!(["{ severity: warning }", "{ severity: critical }"].contains(&&labels[..]), "{name} has {labels}");
        ensure!(part("annotations")?.is_some_and(|rest| rest.is_empty()), "the annotations of {name}");
        let mut mentioned = Vec::new();
        for key in ["summary", "description"] {
            let text = part(key)?.unwrap_or_default();
            let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
            let inner = inner.filter(|inner| !inner.contains(['"', '\\']));
            let inner = inner.with_context(|| format!("the {key} of {name} is no text in quotes"))?;
            for template in inner.split("{{ ").skip(1) {
                let (template, _) = template.split_once(" }}").context("a template without an end")?;
                match template.strip_prefix("$labels.") {
                    Some(label) => mentioned.push(label.to_owned()),
                    None => ensure!(template.starts_with("$value"), "{name} mentions {template}"),
                }
            }
        }
        alerts.push(Alert { name: name.to_owned(), query, mentioned });
    }
    Ok(alerts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_read_with_its_metrics_conditions_and_groups() {
        let query =
            r#"topk(10, 8 * sum by (user, le) (rate(a{b="c",d=~"$e"}[5m]))) / max(f) > 0.5 and on (g) time() - h < 7"#;
        let read = Query::parse(query).unwrap();
        let names: Vec<_> = read.selectors.iter().map(|selector| &selector.metric[..]).collect();
        assert_eq!(names, ["a", "f", "h"]);
        assert_eq!(read.selectors[0].conditions, [["b", "=", "c"], ["d", "=~", "$e"]].map(|of| of.map(str::to_owned)));
        assert_eq!(read.labels, ["user", "le", "g"]);
    }

    #[test]
    fn an_invalid_query_is_refused() {
        for query in [
            "",
            "sum(",
            "sum(a))",
            "a b",
            "a >",
            "> a",
            "rat(a[5m])",
            "rate(a[5])",
            "rate(a[])",
            "a{b}",
            "a{b=c}",
            "a{b=\"c}",
            "a{b==\"c\"}",
            "sum by (a (b)",
            "sum by a",
            "a; b",
            "sum(a,)",
            "and a",
            "sum(a) sum(b)",
            "5 (a)",
            "a{b=\"c\"",
        ] {
            assert!(Query::parse(query).is_err(), "{query}");
        }
    }

    const ALERTS: &str = r#"# A comment.
groups:
  - name: paced
    rules:
      - alert: One
        expr: a{b="c"} > 0
        for: 5m
        labels: { severity: warning }
        annotations:
          summary: "{{ $labels.b }} of {{ $value | humanize }}"
          description: "More."
      - alert: Two
        expr: >
          a
          > 0
        labels: { severity: critical }
        annotations:
          summary: "b"
          description: "c: {{ $labels.d }}"
"#;

    #[test]
    fn alert_rules_are_read_and_other_forms_are_refused() {
        let read = alerts(ALERTS).unwrap();
        let queries: Vec<_> = read.iter().map(|alert| alert.query.split_whitespace().collect::<String>()).collect();
        assert_eq!(queries, ["a{b=\"c\"}>0", "a>0"]);
        assert_eq!([&read[0].mentioned, &read[1].mentioned], [&["b"], &["d"]]);
        for (from, to) in [
            ("    rules:", "   rules:"),
            ("alert: Two", "alert: One"),
            ("alert: Two", "alert: Two: x"),
            ("        for: 5m", "        for: 5 minutes"),
            ("        for: 5m", "       for: 5m"),
            ("        for: 5m\n", "        for: 5m\n\n"),
            ("> 0\n        for", "> 0 # more\n        for"),
            ("severity: warning", "severity: odd"),
            ("\"More.\"", "\"More."),
            ("\"More.\"", "More: than that"),
            ("\"More.\"", "\"a \"word\" in it\""),
            ("{{ $labels.d }}", "{{ $labels.d }"),
            ("{{ $labels.d }}", "{{ $label.d }}"),
            ("          summary: \"b\"\n", ""),
            ("        expr: >\n          a\n          > 0\n", ""),
            ("          > 0\n", "         > 0\n"),
        ] {
            assert!(ALERTS.contains(from), "{from}");
            assert!(alerts(&ALERTS.replacen(from, to, 1)).is_err(), "{from} -> {to}");
        }
    }
}
