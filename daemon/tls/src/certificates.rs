//! Certificates, revocation lists and keys: how they are read from files, known by a fingerprint, and trusted as authorities.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use rustls::RootCertStore;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, pem::PemObject};
use sha2::{Digest, Sha256};

/// Reads all certificates of a PEM file.
///
/// # Errors
/// The file cannot be read, is not PEM, or holds none.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let chain = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("failed to read certificates from {}", path.display()))?;
    if chain.is_empty() {
        bail!("{} holds no certificate: expected PEM with BEGIN CERTIFICATE", path.display());
    }
    Ok(chain)
}

/// Reads all certificate revocation lists of a PEM file.
///
/// # Errors
/// The file cannot be read, is not PEM, or holds none.
pub fn read_revoked(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>> {
    let lists = CertificateRevocationListDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("failed to read revocation lists from {}", path.display()))?;
    if lists.is_empty() {
        bail!("{} holds no revocation list: expected PEM with BEGIN X509 CRL", path.display());
    }
    Ok(lists)
}

/// Reads the first private key of a PEM file.
///
/// # Errors
/// The file cannot be read, is not PEM, or holds none.
pub fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_file(path).with_context(|| format!("failed to read a private key from {}", path.display()))
}

/// Returns the SHA-256 fingerprint of a certificate.
#[must_use]
pub fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    Sha256::digest(certificate).into()
}

/// Returns the store of these authorities.
///
/// # Errors
/// One is not usable as an authority.
pub(super) fn roots(authorities: Vec<CertificateDer<'static>>) -> Result<RootCertStore> {
    let mut store = RootCertStore::empty();
    for authority in authorities {
        store.add(authority).context("a certificate is not usable as an authority")?;
    }
    Ok(store)
}
