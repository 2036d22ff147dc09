//! Whether a server accepts the certificate of a client, and why not.

use std::{cell::RefCell, sync::Arc};

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, UnixTime};

use super::{certificates::fingerprint, trust::RefusedCertificate};

thread_local! {
    static LAST_REFUSED: RefCell<Option<RefusedCertificate>> = const { RefCell::new(None) };
}

/// Takes the client certificate that was refused last in this thread.
///
/// rustls reports only an alert to the transport. The transport works on one handshake at a time in a thread and
/// reports its failure before it turns to another, so the certificate noted here belongs to the failure being reported.
#[must_use]
pub fn take_refused() -> Option<RefusedCertificate> {
    LAST_REFUSED.take()
}

/// Returns why a certificate was refused, as a label of a metric.
#[must_use]
pub fn label(reason: &Error) -> &'static str {
    let Error::InvalidCertificate(reason) = reason else { return "other" };
    match reason {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "expired",
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => "not_valid_yet",
        CertificateError::Revoked => "revoked",
        CertificateError::UnknownRevocationStatus => "revocation_unknown",
        CertificateError::UnknownIssuer => "unknown_issuer",
        CertificateError::BadSignature => "bad_signature",
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => "wrong_purpose",
        _ => "other",
    }
}

/// Verifies certificates of clients with another verifier, and notes the certificate that was refused last.
#[derive(Debug)]
pub(super) struct Noting(pub(super) Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for Noting {
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.0.verify_client_cert(end_entity, intermediates, now).inspect_err(|reason| {
            LAST_REFUSED.set(Some(RefusedCertificate { fingerprint: fingerprint(end_entity), reason: reason.clone() }));
        })
    }

    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.0.requires_raw_public_keys()
    }
}
