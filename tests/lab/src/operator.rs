//! What an operator asks the daemons of a [`Site`] by `pacectl`.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{
    process::{run, said},
    site::Site,
};

/// The relay's control socket, in the folder of its site.
const RELAY: &str = "control.sock";

impl Site {
    /// Runs `pacectl` against the relay's control socket, with `input` as its standard input. Returns its exit code and what it
    /// printed to standard output and standard error.
    ///
    /// # Errors
    /// When it cannot be run, or as [`run`].
    pub fn pacectl(&self, arguments: &[&str], input: &str) -> Result<(Option<i32>, String)> {
        said(run(self.pacectl_command(RELAY, arguments)?, input)?)
    }

    /// As [`Site::pacectl`], against another control socket in the folder of this site, without input.
    ///
    /// # Errors
    /// As [`Site::pacectl`].
    pub fn pacectl_at(&self, socket: &str, arguments: &[&str]) -> Result<(Option<i32>, String)> {
        said(run(self.pacectl_command(socket, arguments)?, "")?)
    }

    /// Returns what `pacectl --json` prints about the relay.
    ///
    /// # Errors
    /// As [`Site::pacectl`], or the command failed.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        self.json_at(RELAY, arguments)
    }

    /// As [`Site::json`], from another control socket in the folder of this site.
    ///
    /// # Errors
    /// As [`Site::json`].
    pub fn json_at(&self, socket: &str, arguments: &[&str]) -> Result<Value> {
        let (code, said) = self.pacectl_at(socket, &[&["--json"], arguments].concat())?;
        ensure!(code == Some(0), "{arguments:?} at {socket} failed: {said}");
        serde_json::from_str(&said).with_context(|| format!("{arguments:?} at {socket}: {said}"))
    }

    fn pacectl_command(&self, socket: &str, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(crate::program("pacectl")?);
        command.arg("--socket").arg(self.path(socket)).args(arguments);
        Ok(command)
    }
}
