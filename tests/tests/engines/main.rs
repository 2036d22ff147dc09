//! The ring of real engines: `llama-server` with random-weight models, through an edge and a gateway, as root.
//!
//! `tests/engines/build.sh` builds the engine and the models.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

use std::process::{Command, Output, Stdio};

use lab::{
    engine::{Engine, Speed},
    llama::LlamaServer,
    models::{Models, SERVE},
    netns::Chain,
    process::KilledOnDrop,
    site::Counts,
};
use serde_json::{Value, json};

mod answers;
mod clients;
mod failures;

/// The number of requests that each engine works on at once.
const PLACES: u32 = 4;

/// The ports of each model's engines. The emulated engine does on request what real ones cannot be made to do.
const PORTS: [(&str, u16); 4] = [("small", 8001), ("small", 8002), ("large", 8003), ("emulated", 8010)];

/// A gateway, an edge, and engines: two for a small model, one for a large one, and an emulated one.
struct Desk {
    models: Models,
    small: Vec<LlamaServer>,
    large: LlamaServer,
    emulated: Engine,
}

impl Desk {
    /// Starts all of them. `gateway` is added to the gateway's keys.
    fn new(gateway: &str) -> Self {
        let chain = Chain::new().unwrap();
        let start = |model, port| LlamaServer::start(&chain.target, port, model, PLACES).unwrap();
        let small = vec![start("small", 8001), start("small", 8002)];
        let large = start("large", 8003);
        let emulated = Engine::start(&chain.target, 8010, "emulated", Speed::default()).unwrap();
        let at = chain.egress.far.v4;
        let model = |name: &str| {
            let engines = PORTS.iter().filter(|(model, _)| *model == name);
            let engines: Vec<_> = engines.map(|(_, port)| format!("http://{at}:{port}")).collect();
            format!("[[gateway.model]]\nname = \"{name}\"\nengines = {engines:?}\nmax_in_flight = {PLACES}\n")
        };
        let models: String = ["small", "large", "emulated"].map(model).concat();
        let alias = "[[gateway.alias]]\nname = \"auto\"\nmodels = [\"large\", \"small\"]";
        let models = Models::on(chain, &format!("[gateway]\n{gateway}\n{models}{alias}"), "").unwrap();
        Self { models, small, large, emulated }
    }

    fn chain(&self) -> &Chain {
        &self.models.site.chain
    }

    fn counts(&self) -> Counts {
        self.models.site.counts().unwrap()
    }

    /// Returns the metrics once no request is open: a client has its answer before the gateway knows that.
    fn settled(&self) -> Counts {
        self.models.site.wait_for_counts("requests to end", |counts| counts.of("gateway_in_flight") == 0).unwrap()
    }

    /// A curl command that asks the edge.
    fn curl(&self, path: &str, body: &Value) -> Command {
        let curl = self.chain().client.command("curl").unwrap();
        with_arguments(curl, SERVE, path, body)
    }

    /// Asks through edge and gateway; returns the answer's status and body.
    fn ask(&self, path: &str, body: &Value) -> (u16, String) {
        answer(self.curl(path, body).output().unwrap())
    }

    /// Asks an engine directly.
    fn ask_engine(&self, port: u16, path: &str, body: &Value) -> (u16, String) {
        let curl = self.chain().target.command("curl").unwrap();
        answer(with_arguments(curl, &format!("127.0.0.1:{port}"), path, body).output().unwrap())
    }

    /// Asks without waiting for the answer.
    fn begin(&self, path: &str, body: &Value) -> KilledOnDrop {
        KilledOnDrop::start(self.curl(path, body).stdout(Stdio::piped())).unwrap()
    }
}

fn with_arguments(mut curl: Command, at: &str, path: &str, body: &Value) -> Command {
    curl.args(["-sS", "-N", "--max-time", "60", "-w", "\n%{http_code}", &format!("http://{at}{path}")]);
    curl.args(["--json", &body.to_string()]);
    curl
}

fn answer(output: Output) -> (u16, String) {
    let said = String::from_utf8(output.stdout).unwrap();
    let (body, status) = said.rsplit_once('\n').unwrap();
    (status.parse().unwrap(), body.to_owned())
}

/// A chat that always gets the same answer: sampling is not random, and the engine's prompt cache is not used.
fn chat(model: &str, tokens: u32, is_stream: bool) -> Value {
    json!({
        "model": model, "messages": [{ "role": "user", "content": "ba de fi go" }], "stream": is_stream,
        "max_tokens": tokens, "temperature": 0, "cache_prompt": false,
    })
}

/// Parses a complete JSON body.
fn object(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_else(|_| panic!("not JSON: {body}"))
}

/// The text in an answer's events, its usage if reported, and whether the answer ends with `[DONE]`.
fn events(body: &str) -> (String, Option<Value>, bool) {
    let data: Vec<_> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let objects: Vec<Value> = data.iter().filter_map(|data| serde_json::from_str(data).ok()).collect();
    let text = |event: &Value| {
        let choice = &event["choices"][0];
        choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default().to_owned()
    };
    let usage = objects.iter().filter_map(|event| event.get("usage")).rfind(|usage| !usage.is_null());
    (objects.iter().map(text).collect(), usage.cloned(), data.contains(&"[DONE]"))
}

/// The code of an API error.
fn error(body: &str) -> String {
    object(body)["error"]["code"].as_str().unwrap_or_else(|| panic!("{body}")).to_owned()
}
