//! The pages for scrapers, orchestrators and people: one request per connection, of bounded length.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | all metrics, as OpenMetrics if requested, else as text 0.0.4 |
//! | `/healthz` | 200 while the daemon answers at all |
//! | `/readyz` | 200 while it is ready for work, else 503 with a line for each missing part |

use std::fmt::{self, Write as _};

use hyper::{
    Method, Request, Response, StatusCode,
    header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, VARY},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::PageSources;

/// The longest request head that is read; hyper takes no smaller bound.
const REQUEST_BYTES: usize = 8192;

/// How many header fields a request may have.
const FIELDS: usize = 32;

/// Reads a request and answers it. The caller must bound the time.
///
/// # Errors
/// The peer is gone, or broke the rules of HTTP and received an error response.
pub async fn answer(stream: impl AsyncRead + AsyncWrite + Unpin, sources: &PageSources) -> hyper::Result<()> {
    http1::Builder::new()
        .keep_alive(false)
        .half_close(true)
        .max_headers(FIELDS)
        .max_buf_size(REQUEST_BYTES)
        .title_case_headers(true)
        .serve_connection(TokioIo::new(stream), service_fn(|request| std::future::ready(page(&request, sources))))
        .await
}

fn page<B>(request: &Request<B>, sources: &PageSources) -> Result<Response<String>, fmt::Error> {
    const PLAIN: &str = "text/plain; charset=utf-8";
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut refusal = response(StatusCode::METHOD_NOT_ALLOWED, PLAIN, "");
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return Ok(refusal);
    }
    Ok(match request.uri().path() {
        "/metrics" => {
            let accepts = request.headers().get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
            let text = sources.metrics.encode()?;
            let (kind, body) = match prefers_open_metrics(accepts) {
                true => ("application/openmetrics-text; version=1.0.0; charset=utf-8", text),
                false => ("text/plain; version=0.0.4; charset=utf-8", to_text(&text)),
            };
            let mut page = response(StatusCode::OK, kind, body);
            page.headers_mut().insert(VARY, HeaderValue::from_static("Accept"));
            page
        }
        "/healthz" => response(StatusCode::OK, PLAIN, "ok\n"),
        "/readyz" => match sources.ready.missing() {
            missing if missing.is_empty() => response(StatusCode::OK, PLAIN, "ready\n"),
            missing => response(StatusCode::SERVICE_UNAVAILABLE, PLAIN, missing.join("\n") + "\n"),
        },
        _ => response(StatusCode::NOT_FOUND, PLAIN, "try /metrics, /healthz or /readyz\n"),
    })
}

fn response(status: StatusCode, kind: &'static str, body: impl Into<String>) -> Response<String> {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns whether `Accept` names OpenMetrics 1.0.0 and prefers it at least as much as any other text (RFC 9110
/// §12.5.1).
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

/// Converts OpenMetrics to the older text format, version 0.0.4: there, the names of counters and infos in comments
/// have the suffix of their samples, and there are neither units nor an end marker.
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
            // The `Accept` of Prometheus 2.
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
