//! Whether a client trusts a server.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use parking_lot::Mutex;
use rustls::{
    CertificateError, DigitallySignedStruct, Error, OtherError, PeerIncompatible, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls13_signature},
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use subtle::ConstantTimeEq;

use super::{
    certificates::{fingerprint, roots},
    cipher_suites::provider,
};

/// How a client decides whether to trust a relay.
#[derive(Clone, Debug)]
pub enum Trust {
    /// The system's certificate authorities.
    System,
    /// These authorities only.
    Authorities(Vec<CertificateDer<'static>>),
    /// Exactly the certificate with this SHA-256 fingerprint, whatever its name or dates say.
    Pinned([u8; 32]),
}

/// The last server certificate that was refused. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Refusals(Arc<Mutex<Option<RefusedCertificate>>>);

/// A certificate that was not accepted.
#[derive(Clone, Debug)]
pub struct RefusedCertificate {
    /// Its SHA-256 fingerprint.
    pub fingerprint: [u8; 32],
    /// What is wrong with it.
    pub reason: Error,
}

impl Refusals {
    /// Takes the certificate that was refused last.
    #[must_use]
    pub fn take(&self) -> Option<RefusedCertificate> {
        self.0.lock().take()
    }
}

/// Verifies the certificates of servers, and keeps the last one that was refused. Supports TLS 1.3 only.
#[derive(Debug)]
pub(super) struct Verifier {
    judge: Judge,
    provider: Arc<CryptoProvider>,
    refusals: Refusals,
}

#[derive(Debug)]
enum Judge {
    Authorities(Arc<WebPkiServerVerifier>),
    /// The handshake still proves that the server holds the certificate's key.
    Pinned([u8; 32]),
}

/// The certificate is not the pinned one.
#[derive(Debug, thiserror::Error)]
#[error("it is not the pinned certificate")]
struct NotPinned;

/// Returns the error of a certificate that is not the pinned one.
#[must_use]
pub fn not_pinned() -> CertificateError {
    CertificateError::Other(OtherError(Arc::new(NotPinned)))
}

/// Returns whether a certificate was refused because it is not the pinned one.
#[must_use]
pub fn is_not_pinned(error: &Error) -> bool {
    matches!(error, Error::InvalidCertificate(CertificateError::Other(OtherError(cause))) if cause.is::<NotPinned>())
}

impl Verifier {
    /// Returns a verifier that trusts servers as `trust` says.
    ///
    /// # Errors
    /// There is no usable authority.
    pub(super) fn new(trust: Trust) -> Result<Self> {
        let provider = provider();
        let judge = match trust {
            Trust::Pinned(fingerprint) => Judge::Pinned(fingerprint),
            Trust::System => Judge::authorities(system()?, &provider)?,
            Trust::Authorities(authorities) => Judge::authorities(roots(authorities)?, &provider)?,
        };
        Ok(Self { judge, provider, refusals: Refusals::default() })
    }

    /// Stores the last refused certificate in `refusals`.
    pub(super) fn reporting(self, refusals: Refusals) -> Self {
        Self { refusals, ..self }
    }
}

impl Judge {
    fn authorities(store: RootCertStore, provider: &Arc<CryptoProvider>) -> Result<Self> {
        let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider.clone());
        Ok(Self::Authorities(builder.build().context("failed to use the certificate authorities")?))
    }
}

fn system() -> Result<RootCertStore> {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if store.is_empty() {
        bail!(
            "the system has no certificate authorities: install ca-certificates, or name a `ca` file or a fingerprint"
        );
    }
    Ok(store)
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verdict = match &self.judge {
            Judge::Authorities(judge) => judge.verify_server_cert(end_entity, intermediates, name, ocsp_response, now),
            Judge::Pinned(pinned) if bool::from(fingerprint(end_entity).ct_eq(pinned)) => {
                Ok(ServerCertVerified::assertion())
            }
            Judge::Pinned(_) => Err(Error::InvalidCertificate(not_pinned())),
        };
        verdict.inspect_err(|reason| {
            *self.refusals.0.lock() =
                Some(RefusedCertificate { fingerprint: fingerprint(end_entity), reason: reason.clone() });
        })
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
