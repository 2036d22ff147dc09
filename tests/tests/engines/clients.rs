//! Real client libraries, unchanged for paced.

use std::path::PathBuf;

use lab::{
    process::{Process, wait_for},
    site::SOON,
};

use super::*;

/// Runs a Python program of this repository in the clients' namespace, and returns the JSON that it printed.
fn run(desk: &Desk, python: PathBuf, program: &str) -> Value {
    let mut command = desk.chain().client.command(python).unwrap();
    command.arg(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("engines").join(program));
    // LiteLLM then uses the price list in its package instead of downloading one.
    command.env("LITELLM_LOCAL_MODEL_COST_MAP", "True");
    let mut client = Process::start(command).unwrap();
    let status = client.wait(std::time::Duration::from_secs(100)).unwrap();
    let said = client.output();
    assert!(status.success(), "{said}");
    object(said.lines().last().unwrap_or_default())
}

#[test]
fn litellm_works_unmodified_through_an_edge() {
    lab::ring!(Engines);
    let desk = Desk::new("");
    let python = lab::llama::folder().unwrap().join("litellm/bin/python");
    let seen = run(&desk, python, "litellm_client.py");
    let (_, direct) = desk.ask_engine(8001, "/v1/chat/completions", &chat("small", 6, false));
    let said = &object(&direct)["choices"][0]["message"]["content"];
    let expected = json!({
        "models": ["auto", "emulated", "large", "small"],
        "chat": [said, 6, "length"],
        "stream": [said, 6],
        "async_stream": said,
        "completion": 3,
        "served_by": "small",
        "unknown_model": ["NotFoundError", 404],
        "engine_refuses": ["BadRequestError", 400],
        "engine_fails": ["BadGatewayError", 502],
        "broken_stream": "error",
        "timeout": "Timeout",
    });
    assert_eq!(seen, expected);
    let gone = || (desk.emulated.counts()[2] >= 2).then_some(());
    wait_for("the engine to drop the requests of clients that left", SOON, gone).unwrap();
    desk.models.site.wait_for_counts("all requests to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();
}
