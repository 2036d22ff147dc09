//! Engines' reports of their load, in the text format of Prometheus. The names of the metrics identify the kind of engine. (Edges read the
//! reports of gateways, in `edge::balance`.)

/// The requests of an engine, by its own count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// The requests that it works on.
    pub running: u32,
    /// The requests that wait in it.
    pub waiting: u32,
}

/// The metrics in which each kind of engine reports how many requests run and how many wait.
const NAMES: [(&str, &str); 4] = [
    // vLLM, docs/usage/metrics.
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    // SGLang, docs/references/production_metrics.
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    // llama.cpp, tools/server.
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    // Text Generation Inference, docs/reference/metrics.
    ("tgi_batch_current_size", "tgi_queue_size"),
];

/// The maximum of requests that an engine is believed to have: predictions multiply with it.
const MOST: f64 = 1e6;

/// Reads an engine's metrics; `None` if they include no metric of a known engine. Series of one metric add up: an engine may
/// run several copies of its model.
#[must_use]
pub fn read(text: &[u8]) -> Option<Reported> {
    let (mut is_known, mut running, mut waiting) = (false, 0.0, 0.0);
    for (name, value) in text.split(|byte| *byte == b'\n').filter_map(sample) {
        if NAMES.iter().any(|(of_running, _)| of_running.as_bytes() == name) {
            (is_known, running) = (true, running + value);
        } else if NAMES.iter().any(|(_, of_waiting)| of_waiting.as_bytes() == name) {
            waiting += value;
        }
    }
    is_known.then_some(Reported { running: running.min(MOST) as u32, waiting: waiting.min(MOST) as u32 })
}

/// Returns the name and the value of a sample; `None` for any other line, and if the value is not a count.
fn sample(line: &[u8]) -> Option<(&[u8], f64)> {
    let end = line.iter().position(|byte| b"{ \t".contains(byte))?;
    let (name, rest) = line.split_at_checked(end)?;
    let rest = if rest.first() == Some(&b'{') { behind_labels(rest)? } else { rest };
    let value = rest.split(u8::is_ascii_whitespace).find(|word| !word.is_empty())?;
    let value: f64 = std::str::from_utf8(value).ok()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some((name, value))
}

/// Returns the text after a list of labels. Quoted values of labels may contain anything.
fn behind_labels(text: &[u8]) -> Option<&[u8]> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    for (at, byte) in text.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_quoted => is_escaped = true,
            b'"' => is_quoted = !is_quoted,
            b'}' if !is_quoted => return text.get(at + 1..),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_load_of_each_known_engine_is_found_by_its_names() {
        let vllm = b"# HELP vllm:num_requests_running Number of requests in model execution batches.\n\
            # TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a } b\\\" {\"} 3.0\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 2.0\n\
            vllm:num_requests_waiting{engine=\"0\"} 7.0 1700000000000\n\
            vllm:num_requests_waiting_by_reason{reason=\"x\"} 100\n";
        assert_eq!(read(vllm), Some(Reported { running: 5, waiting: 7 }));
        let sglang = b"sglang:num_running_reqs{model_name=\"m\"} 12.0\nsglang:num_queue_reqs{model_name=\"m\"} 1.0\n";
        assert_eq!(read(sglang), Some(Reported { running: 12, waiting: 1 }));
        let llamacpp = b"llamacpp:requests_processing 4\r\nllamacpp:requests_deferred 2";
        assert_eq!(read(llamacpp), Some(Reported { running: 4, waiting: 2 }));
    }

    #[test]
    fn invalid_counts_and_unknown_metric_names_report_nothing() {
        for text in [
            &b""[..],
            b"process_open_fds 12\n",
            b"vllm:num_requests_running\n",
            b"vllm:num_requests_running NaN\nvllm:num_requests_running -1\nvllm:num_requests_running +Inf",
            b"vllm:num_requests_running{engine=\"0 3\n",
            b"vllm:num_requests_waiting 9\n",
        ] {
            assert_eq!(read(text), None, "{}", String::from_utf8_lossy(text));
        }
        let huge = b"vllm:num_requests_running 1e300\nvllm:num_requests_running 1e300\nvllm:num_requests_waiting 5e9";
        assert_eq!(read(huge), Some(Reported { running: 1_000_000, waiting: 1_000_000 }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            _ = read(&text);
            _ = read(&[b"vllm:num_requests_running{", &text[..]].concat());
        }
    }
}
