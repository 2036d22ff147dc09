//! The ring of real engines: `llama-server` with models of random weights, through an edge and a gateway, as root.
//!
//! `tests/engines/build.sh` builds what it needs.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a panic in a shared helper fails the test, as one in the test does"
)]

use std::process::{Child, Command, Output, Stdio};

use lab::engine::{Engine, Speed};
use lab::llama::LlamaServer;
use lab::models::{Models, SERVE};
use lab::netns::Chain;
use lab::site::Counts;
use serde_json::{Value, json};

mod answers;
mod clients;
mod failures;

/// Requests that each engine works on at once.
const PLACES: u32 = 4;

/// Where each model's engines listen. The emulated one is there for what real engines do not do when they are told to.
const PORTS: [(&str, u16); 4] = [("small", 8001), ("small", 8002), ("large", 8003), ("emulated", 8010)];

/// A gateway and an edge; a small model that two engines run, a large one, and an emulated one.
struct Desk {
    models: Models,
    small: Vec<LlamaServer>,
    large: LlamaServer,
    emulated: Engine,
}

impl Desk {
    /// `gateway` is added to the gateway's keys.
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

    /// Has curl ask the edge.
    fn curl(&self, path: &str, body: &Value) -> Command {
        let curl = self.chain().client.command("curl").unwrap();
        with_arguments(curl, SERVE, path, body)
    }

    /// Asks through edge and gateway; returns the status and the body of the answer.
    fn ask(&self, path: &str, body: &Value) -> (u16, String) {
        answer(self.curl(path, body).output().unwrap())
    }

    /// Asks an engine itself.
    fn ask_engine(&self, port: u16, path: &str, body: &Value) -> (u16, String) {
        let curl = self.chain().target.command("curl").unwrap();
        answer(with_arguments(curl, &format!("127.0.0.1:{port}"), path, body).output().unwrap())
    }

    /// Asks without waiting for the answer.
    fn begin(&self, path: &str, body: &Value) -> Child {
        self.curl(path, body).stdout(Stdio::piped()).spawn().unwrap()
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

/// A chat whose answer is the same each time: nothing is random, and nothing that the engine still knows of a prompt is used.
fn chat(model: &str, tokens: u32, is_stream: bool) -> Value {
    json!({
        "model": model, "messages": [{ "role": "user", "content": "ba de fi go" }], "stream": is_stream,
        "max_tokens": tokens, "temperature": 0, "cache_prompt": false,
    })
}

/// A body that was whole.
fn object(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_else(|_| panic!("{body} is no JSON"))
}

/// The text in an answer's events, what they bill, and whether the answer says that it is whole.
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

/// The code of an error of the API.
fn error(body: &str) -> String {
    object(body)["error"]["code"].as_str().unwrap_or_else(|| panic!("{body}")).to_owned()
}
