//! TLS 1.3 for both roles: certificates that can be replaced while connections live, client certificates, pinning.

use std::{path::Path, sync::Arc};

use anyhow::{Context as _, Result, bail};
use parking_lot::RwLock;
use rustls::{
    ClientConfig, ServerConfig,
    server::{ClientCertVerifierBuilder, NoServerSessionStorage, WebPkiClientVerifier},
};
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use s2n_quic::provider::tls;
use s2n_quic_core::{application, crypto};

use self::{certificates::roots, cipher_suites::provider, client_certificates::Noting, trust::Verifier};
pub use self::{
    certificates::{fingerprint, read_certificates, read_key, read_revoked},
    configured_file::{MOST_CONFIGURED_BYTES, read_configured, read_configured_text},
    trust::{Refusals, RefusedCertificate, Trust, is_not_pinned, not_pinned},
};

mod certificates;
mod cipher_suites;
pub mod client_certificates;
mod configured_file;
mod trust;

/// HTTP/3, paced's own application protocol over QUIC (RFC 9114 §3.1).
const H3: &[u8] = b"h3";

/// HTTP/2 over TCP (RFC 9113 §3.2), which gRPC uses.
const H2: &[u8] = b"h2";

/// HTTP/1.1 over TCP, for clients without HTTP/2 (RFC 7301 §6).
const HTTP1: &[u8] = b"http/1.1";

/// The certificate that a server presents, and the client certificates that it accepts.
pub struct Identity {
    /// The chain, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// The leaf's private key.
    pub key: PrivateKeyDer<'static>,
    /// Authorities whose client certificates are requested and verified; `None` requests none. A client without a
    /// certificate is admitted, except by [`Identity::prepare_http2`]. Each request then checks its rights, so that a refusal can give the
    /// reason.
    pub client_authorities: Option<Vec<CertificateDer<'static>>>,
    /// The revocation lists of these authorities; without any, revocation is not checked. Otherwise there has to be a list
    /// of every authority that signs, including intermediate ones. A list whose next update is overdue still counts.
    pub revoked: Vec<CertificateRevocationListDer<'static>>,
}

/// The files of an [`Identity`], all PEM.
#[derive(Clone, Copy, Debug)]
pub struct IdentityFiles<'a> {
    /// The chain, leaf first.
    pub certificate: &'a Path,
    /// The leaf's private key.
    pub private_key: &'a Path,
    /// Authorities of client certificates.
    pub client_ca: Option<&'a Path>,
    /// Their revocation lists.
    pub client_crl: Option<&'a Path>,
}

impl Identity {
    /// Reads PEM files.
    ///
    /// # Errors
    /// A file cannot be read, or holds no certificate or key. The error names the file and its expected content.
    pub fn read(files: IdentityFiles<'_>) -> Result<Self> {
        let IdentityFiles { certificate, private_key, client_ca, client_crl } = files;
        Ok(Self {
            chain: read_certificates(certificate)?,
            key: read_key(private_key)?,
            client_authorities: client_ca.map(read_certificates).transpose()?,
            revoked: client_crl.map(read_revoked).transpose()?.unwrap_or_default(),
        })
    }
}

/// The TLS provider of a server. Clones share one configuration; [`ServerTls::replace`] changes it for new handshakes, and
/// live connections keep the old one.
#[derive(Clone)]
pub struct ServerTls(Arc<RwLock<s2n_quic_rustls::Server>>);

/// A configuration that is known to work.
pub struct PreparedTls(s2n_quic_rustls::Server);

impl Identity {
    /// Checks that certificate, key and authorities can be used, and prepares their use.
    ///
    /// # Errors
    /// Key and certificate do not belong together, or an authority is not usable as one.
    pub fn prepare(self) -> Result<PreparedTls> {
        self.prepare_for(H3)
    }

    /// As [`Identity::prepare`], for another protocol than HTTP/3 over QUIC (ALPN, RFC 7301).
    ///
    /// # Errors
    /// As [`Identity::prepare`].
    pub fn prepare_for(self, protocol: &[u8]) -> Result<PreparedTls> {
        Ok(PreparedTls(
            Arc::new(server_config(self, &[protocol], ClientCertVerifierBuilder::allow_unauthenticated)?).into(),
        ))
    }

    /// As [`Identity::prepare`], for HTTP/2 over TCP; refuses clients without a certificate.
    ///
    /// # Errors
    /// As [`Identity::prepare`].
    pub fn prepare_http2(self) -> Result<Arc<ServerConfig>> {
        server_config(self, &[H2], |verifier| verifier).map(Arc::new)
    }

    /// As [`Identity::prepare`], for HTTP/2 and HTTP/1.1 over TCP.
    ///
    /// # Errors
    /// As [`Identity::prepare`].
    pub fn prepare_https(self) -> Result<Arc<ServerConfig>> {
        server_config(self, &[H2, HTTP1], ClientCertVerifierBuilder::allow_unauthenticated).map(Arc::new)
    }
}

impl ServerTls {
    /// Builds the provider.
    #[must_use]
    pub fn new(prepared: PreparedTls) -> Self {
        Self(Arc::new(RwLock::new(prepared.0)))
    }

    /// Replaces the configuration for new connections.
    pub fn replace(&self, prepared: PreparedTls) {
        *self.0.write() = prepared.0;
    }
}

fn server_config(
    identity: Identity,
    protocols: &[&[u8]],
    demand: fn(ClientCertVerifierBuilder) -> ClientCertVerifierBuilder,
) -> Result<ServerConfig> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .context("TLS 1.3 is not available")?;
    let decides_by_certificates = identity.client_authorities.is_some();
    let builder = match identity.client_authorities {
        None => builder.with_no_client_auth(),
        Some(authorities) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(authorities)?), provider());
            let verifier = demand(verifier.with_crls(identity.revoked)).build();
            let verifier =
                verifier.context("failed to use the client certificate authorities, or their revocation lists")?;
            builder.with_client_cert_verifier(Arc::new(Noting(verifier)))
        }
    };
    let mut config = builder.with_single_cert(identity.chain, identity.key).map_err(unfit)?;
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.ignore_client_order = true;
    if decides_by_certificates {
        // A resumed handshake presents no certificate: one that was valid when the ticket was issued would be valid for the
        // ticket's life.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
    }
    Ok(config)
}

/// Describes why a certificate and a key cannot be used together.
fn unfit(error: rustls::Error) -> anyhow::Error {
    match error {
        rustls::Error::InconsistentKeys(rustls::InconsistentKeys::KeyMismatch) => {
            anyhow::anyhow!("the private key does not belong to the certificate")
        }
        other => anyhow::Error::new(other).context("the certificate and the private key cannot be used together"),
    }
}

impl crypto::tls::Endpoint for ServerTls {
    type Session = <s2n_quic_rustls::Server as crypto::tls::Endpoint>::Session;

    fn new_server_session<Params: s2n_codec::EncoderValue>(
        &mut self,
        transport_parameters: &Params,
        info: crypto::tls::ConnectionInfo,
    ) -> Self::Session {
        let mut server = self.0.read().clone();
        server.new_server_session(transport_parameters, info)
    }

    fn new_client_session<Params: s2n_codec::EncoderValue>(
        &mut self,
        transport_parameters: &Params,
        name: application::ServerName,
    ) -> Self::Session {
        // Only a client endpoint asks for this, and this provider starts none.
        let mut server = self.0.read().clone();
        server.new_client_session(transport_parameters, name)
    }

    fn max_tag_length(&self) -> usize {
        self.0.read().max_tag_length()
    }
}

impl tls::Provider for ServerTls {
    type Server = Self;
    type Client = s2n_quic_rustls::Client;
    type Error = anyhow::Error;

    fn start_server(self) -> Result<Self> {
        Ok(self)
    }

    fn start_client(self) -> Result<Self::Client> {
        bail!("a client was started with the TLS configuration of a server")
    }
}

/// Builds the TLS configuration of a client, with a certificate of its own if the relay asks for one.
///
/// # Errors
/// There is no usable authority, or a client certificate does not fit its key.
pub fn client(trust: Trust, identity: Option<ClientIdentity>) -> Result<s2n_quic_rustls::Client> {
    client_reporting(trust, identity, Refusals::default())
}

/// As [`client`], for another protocol than HTTP/3 over QUIC (ALPN, RFC 7301).
///
/// # Errors
/// As [`client`].
pub fn client_for(protocol: &[u8], trust: Trust, identity: Option<ClientIdentity>) -> Result<s2n_quic_rustls::Client> {
    Ok(Arc::new(client_config(Verifier::new(trust)?, identity, protocol)?).into())
}

/// As [`client`]; `refusals` receives the certificate that was not trusted and the reason, which the transport does not
/// report.
///
/// # Errors
/// As [`client`].
pub fn client_reporting(
    trust: Trust,
    identity: Option<ClientIdentity>,
    refusals: Refusals,
) -> Result<s2n_quic_rustls::Client> {
    Ok(Arc::new(client_config(Verifier::new(trust)?.reporting(refusals), identity, H3)?).into())
}

/// Builds the TLS configuration of a client of HTTP/2 over TCP.
///
/// # Errors
/// As [`client`].
pub fn client_http2(trust: Trust, identity: ClientIdentity) -> Result<Arc<ClientConfig>> {
    client_config(Verifier::new(trust)?, Some(identity), H2).map(Arc::new)
}

/// Builds the TLS configuration of a client over TCP that sets the protocols itself (ALPN, RFC 7301): the result has none.
///
/// # Errors
/// As [`client`].
pub fn client_over_tcp(trust: Trust) -> Result<ClientConfig> {
    let mut config = client_config(Verifier::new(trust)?, None, H2)?;
    config.alpn_protocols.clear();
    Ok(config)
}

fn client_config(verifier: Verifier, identity: Option<ClientIdentity>, protocol: &[u8]) -> Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .context("TLS 1.3 is not available")?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).map_err(unfit)?,
    };
    config.alpn_protocols = vec![protocol.to_vec()];
    Ok(config)
}

/// A client's certificate chain, leaf first, and the leaf's private key.
pub type ClientIdentity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Returns a self-signed certificate for development, kept in a folder so that its fingerprint stays the same. Only this user may read
/// its files. If one of them is missing, makes both again.
///
/// # Errors
/// The folder cannot be created or written, or its files were damaged.
pub fn development_identity(folder: &Path) -> Result<Identity> {
    let (certificate, key) = (folder.join("certificate.pem"), folder.join("private-key.pem"));
    if !certificate.exists() || !key.exists() {
        std::fs::create_dir_all(folder).with_context(|| format!("failed to create {}", folder.display()))?;
        let names = ["localhost", "127.0.0.1", "::1"].map(String::from);
        let made = rcgen::generate_simple_self_signed(names).context("failed to make a self-signed certificate")?;
        // Each is written as a whole, and the certificate last: whenever both are there, they belong together.
        _ = std::fs::remove_file(&certificate);
        for (file, text) in [(&key, made.signing_key.serialize_pem()), (&certificate, made.cert.pem())] {
            state::replace(file, text.as_bytes()).with_context(|| format!("failed to write {}", file.display()))?;
        }
    }
    Identity::read(IdentityFiles { certificate: &certificate, private_key: &key, client_ca: None, client_crl: None })
}

#[cfg(test)]
mod tests;
