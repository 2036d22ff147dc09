//! The pages that scrapers, orchestrators and people ask for, one request a connection, of bounded length.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | all metrics, as OpenMetrics where that is asked for, else as text 0.0.4 |
//! | `/healthz` | 200 while the daemon answers at all |
//! | `/readyz` | 200 while it should be sent work, else 503 with a line for each thing that is missing |

use std::{fmt::Write as _, io};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::Metrics;

/// Longest request head that is read.
const REQUEST_BYTES: usize = 4096;

/// How many header fields a request may have.
const FIELDS: usize = 32;

/// A response without the fields that all have.
struct Answer {
    status: &'static str,
    kind: &'static str,
    fields: &'static str,
    body: String,
}

impl Answer {
    fn plain(status: &'static str, body: impl Into<String>) -> Self {
        Self { status, kind: "text/plain; charset=utf-8", fields: "", body: body.into() }
    }
}

/// Reads a request and answers it.
///
/// # Errors
/// The other end is gone.
pub async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin, metrics: &Metrics) -> io::Result<()> {
    let mut request = Vec::with_capacity(512);
    let (page, is_head) = loop {
        let mut chunk = [0; 512];
        let read = stream.read(&mut chunk).await?;
        if read == 0 {
            return Ok(());
        }
        request.extend_from_slice(&chunk[..read]);
        let mut fields = [httparse::EMPTY_HEADER; FIELDS];
        let mut parsed = httparse::Request::new(&mut fields);
        match parsed.parse(&request) {
            Ok(httparse::Status::Complete(_)) => {
                break (page(&parsed, metrics).map_err(io::Error::other)?, parsed.method == Some("HEAD"));
            }
            Ok(httparse::Status::Partial) if request.len() < REQUEST_BYTES => {}
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                break (Answer::plain("431 Request Header Fields Too Large", ""), false);
            }
            Err(_) => break (Answer::plain("400 Bad Request", ""), false),
        }
    };
    let Answer { status, kind, fields, body } = page;
    let mut response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{fields}Content-Length: {}\r\nCache-Control: no-store\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    if !is_head {
        response.push_str(&body);
    }
    stream.write_all(response.as_bytes()).await?;
    stream.shutdown().await
}

fn page(request: &httparse::Request<'_, '_>, metrics: &Metrics) -> Result<Answer, std::fmt::Error> {
    if !matches!(request.method, Some("GET" | "HEAD")) {
        return Ok(Answer { fields: "Allow: GET, HEAD\r\n", ..Answer::plain("405 Method Not Allowed", "") });
    }
    let path = request.path.unwrap_or_default();
    Ok(match path.split('?').next().unwrap_or_default() {
        "/metrics" => {
            let accepts = request.headers.iter().filter(|field| field.name.eq_ignore_ascii_case("accept"));
            let accepts = accepts.filter_map(|field| std::str::from_utf8(field.value).ok());
            let text = metrics.encode()?;
            let (kind, body) = match prefers_open_metrics(accepts) {
                true => ("application/openmetrics-text; version=1.0.0; charset=utf-8", text),
                false => ("text/plain; version=0.0.4; charset=utf-8", to_text(&text)),
            };
            Answer { status: "200 OK", kind, fields: "Vary: Accept\r\n", body }
        }
        "/healthz" => Answer::plain("200 OK", "ok\n"),
        "/readyz" => match metrics.ready.missing() {
            missing if missing.is_empty() => Answer::plain("200 OK", "ready\n"),
            missing => Answer::plain("503 Service Unavailable", missing.join("\n") + "\n"),
        },
        _ => Answer::plain("404 Not Found", "try /metrics, /healthz or /readyz\n"),
    })
}

/// Whether OpenMetrics 1.0.0 is named in `Accept`, and liked at least as much as any other text (RFC 9110 §12.5.1).
fn prefers_open_metrics<'a>(accepts: impl Iterator<Item = &'a str>) -> bool {
    let (mut open, mut text) = (0.0_f32, 0.0_f32);
    for range in accepts.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let (mut quality, mut is_known) = (1.0, true);
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match (name.trim().to_ascii_lowercase().as_str(), value.trim().trim_matches('"')) {
                ("q", value) => quality = value.parse().unwrap_or(0.0),
                ("version", value) => is_known = matches!(value, "1.0.0" | "0.0.4"),
                _ => {}
            }
        }
        match kind.as_str() {
            "application/openmetrics-text" if is_known => open = open.max(quality),
            "text/plain" | "text/*" | "*/*" if is_known => text = text.max(quality),
            _ => {}
        }
    }
    open > 0.0 && open >= text
}

/// Writes OpenMetrics as the older text format, version 0.0.4: there, the names of counters and infos in comments have the
/// ending that their samples have, and there are neither units nor an end.
fn to_text(open_metrics: &str) -> String {
    let (mut text, mut help) = (String::with_capacity(open_metrics.len()), None);
    for line in open_metrics.lines() {
        let mut words = line.splitn(4, ' ');
        // Writing to a string cannot fail.
        _ = match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), words) => {
                help = Some((name, words.unwrap_or_default()));
                Ok(())
            }
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let (ending, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                match help.take().filter(|(helped, _)| *helped == name) {
                    Some((_, words)) => writeln!(text, "# HELP {name}{ending} {words}\n# TYPE {name}{ending} {kind}"),
                    None => writeln!(text, "# TYPE {name}{ending} {kind}"),
                }
            }
            (Some("#"), ..) => Ok(()),
            _ => writeln!(text, "{line}"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_for_those_who_name_it_and_like_nothing_better() {
        for (accept, expected) in [
            ("", false),
            ("*/*", false),
            ("text/html,application/xhtml+xml,*/*;q=0.8", false),
            ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", false),
            ("application/openmetrics-text", true),
            ("application/openmetrics-text;version=0.0.1", false),
            // What Prometheus 2 asks with.
            (
                "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                 text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                true,
            ),
            ("application/openmetrics-text; version=\"1.0.0\"; q=0.2, text/plain; q=0.9", false),
            ("application/openmetrics-text;q=0", false),
            ("APPLICATION/OpenMetrics-Text;Version=1.0.0", true),
            (",;=,q=1;;", false),
        ] {
            assert_eq!(prefers_open_metrics([accept].into_iter()), expected, "{accept}");
        }
        assert!(prefers_open_metrics(["text/plain;q=0.1", "application/openmetrics-text"].into_iter()));
    }

    #[test]
    fn the_older_format_names_counters_as_their_samples_are_named() {
        let open = "# HELP a_bytes Bytes of \\\\ things.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\n\
                    a_bytes_total{x=\"1 # HELP\"} 1\n# HELP b B.\n# TYPE b gauge\nb 2\n# HELP c C.\n# TYPE c info\n\
                    c_info{v=\"1\"} 1\n# HELP d D.\n# TYPE d histogram\nd_sum 1.0\nd_count 1\nd_bucket{le=\"+Inf\"} 1\n# EOF\n";
        assert_eq!(
            to_text(open),
            "# HELP a_bytes_total Bytes of \\\\ things.\n# TYPE a_bytes_total counter\n\
             a_bytes_total{x=\"1 # HELP\"} 1\n# HELP b B.\n# TYPE b gauge\nb 2\n# HELP c_info C.\n# TYPE c_info gauge\n\
             c_info{v=\"1\"} 1\n# HELP d D.\n# TYPE d histogram\nd_sum 1.0\nd_count 1\nd_bucket{le=\"+Inf\"} 1\n"
        );
    }
}
