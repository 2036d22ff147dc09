//! A real engine: `llama-server` of llama.cpp with one of the random models that `tests/engines/models.py` writes.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{
    netns::Namespace,
    process::{Process, send_signal, wait_for},
};

/// How long an engine may take to load its model.
const LOADING: Duration = Duration::from_secs(60);

/// How long the engine may take to answer a request that costs it nothing.
const SOON: Duration = Duration::from_secs(20);

/// How many tokens the prompt and answer of one request may have together.
const CONTEXT: u32 = 1024;

/// Returns the folder that `tests/engines/build.sh` fills: `engines` beside the folder that this program was built into.
///
/// # Errors
/// When no engine was built there.
pub fn folder() -> Result<PathBuf> {
    let running = std::env::current_exe()?;
    // A test executable lies two folders below the profile's.
    let mut folders = running.ancestors().skip(2).take(2).map(|folder| folder.join("engines"));
    let found = folders.find(|folder| folder.join("llama-server").is_file() && folder.join("models.sha256").is_file());
    found.context("there is no llama-server: run tests/engines/build.sh")
}

/// An engine that runs until it is dropped.
#[derive(Debug)]
pub struct LlamaServer {
    process: Process,
    port: u16,
}

impl LlamaServer {
    /// Starts an engine in a namespace, on a port of all its IPv4 addresses, with one thread and `places` slots for requests.
    /// `model` is `large`, `medium` or `small`, which is also the name under which the engine serves it. Waits until the
    /// model is loaded.
    ///
    /// # Errors
    /// When the engine was not built, or does not come up.
    pub fn start(namespace: &Namespace, port: u16, model: &str, places: u32) -> Result<Self> {
        let folder = folder()?;
        let mut command = namespace.command(folder.join("llama-server"))?;
        let context = (CONTEXT * places).to_string();
        command.arg("--model").arg(folder.join(model).with_extension("gguf"));
        command.args(["--alias", model, "--host", "0.0.0.0", "--port", &port.to_string()]);
        command.args(["--parallel", &places.to_string(), "--ctx-size", &context]);
        command.args(["--threads", "1", "--threads-batch", "1", "--threads-http", "16"]);
        command.args(["--metrics", "--slots", "--no-webui", "--no-warmup", "--offline"]);
        let mut process = Process::start(command)?;
        let is_loaded = || match (namespace.run(|| get(port, "/health")), process.has_ended()) {
            (Ok(Ok(_)), _) => Some(true),
            (_, Ok(false)) => None,
            _ => Some(false),
        };
        let is_loaded = wait_for("the engine to load its model", LOADING, is_loaded);
        ensure!(
            is_loaded.as_ref().is_ok_and(|loaded| *loaded),
            "{is_loaded:?}; the engine said:\n{}",
            process.output()
        );
        Ok(Self { process, port })
    }

    /// Returns how many requests the engine reports that it works on.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn busy_places(&self, namespace: &Namespace) -> Result<usize> {
        let slots: Value = serde_json::from_str(&namespace.run(|| get(self.port, "/slots"))??)?;
        let slots = slots.as_array().context("no list of slots")?;
        Ok(slots.iter().filter(|slot| slot["is_processing"] == true).count())
    }

    /// Returns a sample of its metrics, such as `llamacpp:tokens_predicted_total`.
    ///
    /// # Errors
    /// When it does not answer, or has no such metric.
    pub fn metric(&self, namespace: &Namespace, name: &str) -> Result<f64> {
        let metrics = namespace.run(|| get(self.port, "/metrics"))??;
        let sample = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(sample.with_context(|| format!("no {name} in:\n{metrics}"))?.trim().parse()?)
    }

    /// Returns how many requests the engine's log says that it gave up because their clients had left. A request for this
    /// number would keep the engine from noticing: with each result, of any request, `server_response::recv_with_timeout`
    /// starts its wait of a second again.
    pub fn given_up(&self) -> usize {
        self.process.output().matches("cancel task").count()
    }

    /// Sends the engine a signal: `libc::SIGKILL` ends it at once, `libc::SIGSTOP` makes it hang.
    ///
    /// # Errors
    /// When the engine has ended.
    pub fn signal(&self, signal: i32) -> Result<()> {
        send_signal(self.process.id(), signal)
    }
}

/// Requests a page of an engine, such as `/slots`, in the calling thread's namespace.
fn get(port: u16, page: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), SOON)?;
    stream.set_read_timeout(Some(SOON))?;
    stream.write_all(format!("GET {page} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer without a body")?;
    ensure!(head.split(' ').nth(1) == Some("200"), "{head}");
    Ok(body.to_owned())
}
