//! A minimal CONNECT-UDP relay (RFC 9298) on quinn and h3. The benchmarks of paced use it as a peer for comparison. It allows
//! every target and requires no token, so it belongs on loopback, where it listens by default.
//!
//! It prints one line of JSON when it is ready, with the versions of its libraries, and ends on SIGTERM or SIGINT.

mod capsule;
mod client;
mod endpoint;
mod gather;
mod socket;
mod target;
mod tunnel;

use std::{env, io::Write as _, net::SocketAddr, process::ExitCode, thread};

use anyhow::{Context as _, Result, bail};
use tokio::runtime::{self, Runtime};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("quinn-relay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let listen = listen_address(env::args().skip(1))?;
    runtime()?.block_on(async {
        let (endpoint, fingerprint) = endpoint::listen(listen)?;
        let fingerprint: String = fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        println!(
            r#"{{"listen":"{}","pid":{},"certificate_sha256":"{fingerprint}","stack":"{}"}}"#,
            endpoint.local_addr()?,
            std::process::id(),
            stack(include_str!("../Cargo.lock")).context("the lock file names no quinn")?,
        );
        std::io::stdout().flush()?;
        while let Some(incoming) = endpoint.accept().await {
            tokio::spawn(client::serve(incoming));
        }
        Ok(())
    })
}

/// Parses `-listen ADDRESS`, the only flag.
fn listen_address(arguments: impl IntoIterator<Item = String>) -> Result<SocketAddr> {
    let arguments: Vec<_> = arguments.into_iter().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Ok(SocketAddr::from(([127, 0, 0, 1], 4435))),
        ["-listen" | "--listen", address] => address.parse().with_context(|| format!("{address} is no address")),
        _ => bail!("usage: quinn-relay [-listen ADDRESS]"),
    }
}

/// Returns a runtime with a thread for each core that this process may use: on a single core, threads only cost wake-ups.
fn runtime() -> Result<Runtime> {
    let mut builder = match thread::available_parallelism()?.get() {
        1 => runtime::Builder::new_current_thread(),
        _ => runtime::Builder::new_multi_thread(),
    };
    Ok(builder.enable_all().build()?)
}

/// Names the libraries under test with the versions of the lock file that this program was built with.
fn stack(lock: &str) -> Option<String> {
    let version = |name: &str| {
        let package = lock.split("[[package]]").find(|package| package.contains(&format!("name = \"{name}\"\n")))?;
        package.split("version = \"").nth(1)?.split('"').next()
    };
    Some(format!("quinn {}, h3 {}", version("quinn")?, version("h3")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_has_the_versions_of_the_lock_file() {
        let lock = "[[package]]\nname = \"h3\"\nversion = \"0.1.2\"\n\n[[package]]\nname = \"h3-quinn\"\nversion = \"9\"\n\n\
                    [[package]]\nname = \"quinn\"\nversion = \"3.4.5\"\n";
        assert_eq!(stack(lock).unwrap(), "quinn 3.4.5, h3 0.1.2");
        assert_eq!(stack("[[package]]\nname = \"quinn-udp\"\nversion = \"1\"\n"), None);
    }

    #[test]
    fn the_only_flag_is_an_address() {
        let parsed = |text: &str| listen_address(text.split_whitespace().map(str::to_owned));
        assert_eq!(parsed("-listen [::1]:7").unwrap(), "[::1]:7".parse().unwrap());
        assert!(parsed("").unwrap().ip().is_loopback());
        assert!(parsed("-listen").is_err() && parsed("-listen nowhere").is_err() && parsed("-cert x").is_err());
    }
}
