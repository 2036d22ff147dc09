//! Options that name a relay and the client's credentials.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use config::{
    forward::TunnelMode,
    hash,
    uplink::{ClientFiles, TrustSource},
};
use masque::{
    target::Target,
    template::{Template, TemplateError},
};
use quic::{endpoint::Transport, tls};
use relay_client::{
    access::{Access, TokenSource},
    error::ConnectError,
};

use super::piped::tried_file_of;

/// The listener of `paced run` in development mode.
const DEVELOPMENT_AUTHORITY: &str = "localhost:4433";

#[derive(Args)]
pub(crate) struct RelayOptions {
    /// The relay: a URI template, or `HOST[:PORT]` for the default template of RFC 9298 [default: the relay of `paced run`
    /// on this machine]
    #[arg(long, value_name = "TEMPLATE", value_parser = template)]
    relay: Option<Template>,
    /// A file that contains the bearer token to present
    #[arg(long, value_name = "FILE", conflicts_with = "token_env")]
    token_file: Option<PathBuf>,
    /// The environment variable that contains the bearer token to present
    #[arg(long, value_name = "VAR")]
    token_env: Option<String>,
    /// A PEM file of the certificate authorities to trust
    #[arg(long, value_name = "FILE", conflicts_with = "pin")]
    ca: Option<PathBuf>,
    /// The SHA-256 fingerprint of the relay's certificate, to trust in place of authorities
    #[arg(long, value_name = "SHA256", value_parser = fingerprint)]
    pin: Option<[u8; 32]>,
    /// A PEM file of the client certificate to present
    #[arg(long, value_name = "FILE", requires = "client_key")]
    client_cert: Option<PathBuf>,
    /// A PEM file of the client certificate's private key
    #[arg(long, value_name = "FILE", requires = "client_cert")]
    client_key: Option<PathBuf>,
}

impl RelayOptions {
    /// Returns the relay's address and the credentials to present.
    pub(crate) async fn access(&self) -> Result<Access> {
        let token = match (&self.token_file, &self.token_env) {
            (Some(file), _) => Some(TokenSource::File(file.clone())),
            (None, Some(name)) => Some(TokenSource::Environment(name.clone())),
            (None, None) => None,
        };
        let identity = match (&self.client_cert, &self.client_key) {
            (Some(certificate), Some(private_key)) => Some(ClientFiles {
                certificate: tried_file_of(certificate, tls::read_certificates).await?,
                private_key: tried_file_of(private_key, tls::read_key).await?,
            }),
            _ => None,
        };
        let trust = match (&self.ca, self.pin, &self.relay) {
            (Some(file), _, _) => TrustSource::Authority(tried_file_of(file, tls::read_certificates).await?),
            (None, Some(fingerprint), _) => TrustSource::Pinned(fingerprint),
            (None, None, Some(_)) => TrustSource::System,
            (None, None, None) => development_trust()?,
        };
        let template = match &self.relay {
            Some(template) => template.clone(),
            None => Template::default_at(DEVELOPMENT_AUTHORITY)?,
        };
        Ok(Access { template, trust, token, identity })
    }

    /// Adds to an error of connecting what this program knows about its cause.
    pub(crate) fn explain(&self, error: ConnectError) -> anyhow::Error {
        match error {
            ConnectError::Untrusted { fingerprint, .. } if self.is_development() => {
                let digits = hash::hex(&fingerprint);
                anyhow::anyhow!(
                    "the relay at {DEVELOPMENT_AUTHORITY} does not use the certificate in {}: another user runs it, or it \
                     runs with another --state-dir. To use that relay: --relay {DEVELOPMENT_AUTHORITY} --pin {digits}",
                    state::development_dir().display()
                )
            }
            error => error.into(),
        }
    }

    /// Returns whether the relay is that of development mode.
    pub(crate) fn is_development(&self) -> bool {
        self.relay.is_none()
    }
}

/// The transport of a client that waits for answers, whether or not the connection is silent.
pub(crate) fn transport() -> Transport {
    role::transport::transport(&config::transport::TransportSettings::default())
}

pub(crate) fn target(text: &str) -> Result<Target> {
    Target::from_authority(text).context("expected HOST:PORT, with IPv6 addresses in brackets")
}

pub(crate) fn mode(text: &str) -> Result<TunnelMode> {
    let found =
        [TunnelMode::Auto, TunnelMode::Datagram, TunnelMode::Stream].into_iter().find(|mode| mode.as_str() == text);
    found.context("expected auto, datagram or stream")
}

/// Reads a local address to listen on.
pub(crate) fn listen(text: &str) -> Result<SocketAddr> {
    let whole = |port: u16| format!("expected ADDRESS:PORT; for this machine alone, write 127.0.0.1:{port}");
    match (text.parse(), text.trim_start_matches(':').parse()) {
        (Ok(address), _) => Ok(address),
        (Err(_), Ok(port)) => bail!(whole(port)),
        (Err(_), Err(_)) => bail!("expected ADDRESS:PORT, such as 127.0.0.1:5353 or [::1]:5353; no names"),
    }
}

/// Returns the pin of the certificate that the relay of development mode keeps in its state folder.
fn development_trust() -> Result<TrustSource> {
    let file = state::development_dir().join("certificate.pem");
    let certificates = tls::read_certificates(&file)
        .context("there is no relay in development mode: start one with `paced run`, or name another with --relay")?;
    let certificate = certificates.first().context("the certificate's file is empty")?;
    Ok(TrustSource::Pinned(tls::fingerprint(certificate)))
}

fn template(text: &str) -> Result<Template, TemplateError> {
    if text.contains("://") { Template::parse(text) } else { Template::default_at(text) }
}

fn fingerprint(text: &str) -> Result<[u8; 32]> {
    hash::read(text).context("expected 64 hexadecimal digits, with or without colons")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_another_users_relay_shows_is_told_with_the_way_to_trust_it() {
        let refused = || ConnectError::Untrusted {
            name: "localhost".to_owned(),
            fingerprint: [0x0f; 32],
            reason: rustls::Error::DecryptError,
        };
        let options = |relay: Option<&str>| RelayOptions {
            relay: relay.map(|relay| template(relay).unwrap()),
            token_file: None,
            token_env: None,
            ca: None,
            pin: None,
            client_cert: None,
            client_key: None,
        };
        let said = options(None).explain(refused()).to_string();
        let pin = format!("--relay localhost:4433 --pin {}", "0f".repeat(32));
        assert!(said.contains("another user runs it") && said.ends_with(&pin), "{said}");
        let said = options(Some("relay.example")).explain(refused()).to_string();
        assert_eq!(said, refused().to_string(), "of a relay that was named, it is not about other users");
    }

    #[test]
    fn a_port_alone_is_told_what_it_lacks() {
        assert_eq!(listen("[::1]:5353").unwrap(), "[::1]:5353".parse().unwrap());
        for port in ["5558", ":5558"] {
            assert!(listen(port).unwrap_err().to_string().contains("write 127.0.0.1:5558"));
        }
        assert!(listen("localhost:5558").unwrap_err().to_string().contains("no names"));
    }

    #[test]
    fn a_host_and_port_stand_for_the_default_template() {
        assert_eq!(template("relay.example:4433").unwrap(), Template::default_at("relay.example:4433").unwrap());
        assert!(template("http://relay.example/").is_err());
    }
}
