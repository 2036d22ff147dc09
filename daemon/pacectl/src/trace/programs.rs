//! paced's programs and tables in the kernel, as `bpftool` shows them.

use std::{io, process::Command};

use serde_json::Value;

/// Lists the objects of a kind, `prog` or `map`, and returns those of paced; notes in `left_out` if `bpftool` cannot
/// list them.
pub(crate) fn shown(kind: &str, left_out: &mut Vec<String>) -> Vec<Value> {
    let why = match Command::new("bpftool").args(["--json", kind, "show"]).output() {
        Ok(output) if output.status.success() => return ours(&output.stdout),
        Ok(output) => complaint(&output.stdout, &output.stderr),
        Err(error) if error.kind() == io::ErrorKind::NotFound => "it is not installed: `apt install bpftool`".into(),
        Err(error) => error.to_string(),
    };
    left_out.push(format!("bpftool {kind} show: {why}"));
    Vec::new()
}

/// Returns the objects with names of paced; the kernel keeps 15 bytes of a name.
fn ours(json: &[u8]) -> Vec<Value> {
    let objects: Vec<Value> = serde_json::from_slice(json).unwrap_or_default();
    let is_ours = |object: &Value| object["name"].as_str().is_some_and(|name| name.starts_with("paced"));
    objects.into_iter().filter(is_ours).collect()
}

/// Returns an error message of `bpftool`, which with `--json` prints it on either output.
fn complaint(output: &[u8], errors: &[u8]) -> String {
    let said = serde_json::from_slice::<Value>(output).ok();
    let error = said.as_ref().and_then(|said| said["error"].as_str()).map(str::to_owned);
    error.unwrap_or_else(|| String::from_utf8_lossy(errors).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_those_with_our_name() {
        let json =
            br#"[{"id":1,"name":"paced_egress"},{"id":2,"name":"other"},{"id":3},{"id":4,"name":"paced_terms"}]"#;
        let ids: Vec<_> = ours(json).iter().map(|object| object["id"].as_u64()).collect();
        assert_eq!(ids, [Some(1), Some(4)]);
        assert!(ours(b"nonsense").is_empty());
        assert_eq!(complaint(br#"{"error":"Operation not permitted"}"#, b""), "Operation not permitted");
        assert_eq!(complaint(b"", b"Error: x\n"), "Error: x");
    }
}
