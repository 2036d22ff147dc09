//! Certificates, revocation lists and keys: how they are read from files, known by a fingerprint, and trusted as authorities.

use std::path::Path;

use anyhow::{Context as _, Error, Result, anyhow, bail};
use rustls::RootCertStore;
use rustls_pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer,
    pem::{self, PemObject},
};
use sha2::{Digest, Sha256};

use crate::configured_file::read_configured;

/// Reads all certificates of a PEM file.
///
/// # Errors
/// The file cannot be read, is not PEM, or holds none.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let chain = sections(path).with_context(|| format!("failed to read certificates from {}", path.display()))?;
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
    let lists = sections(path).with_context(|| format!("failed to read revocation lists from {}", path.display()))?;
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
    let read = || PrivateKeyDer::from_pem_slice(&read_configured(path)?).map_err(told);
    read().with_context(|| format!("failed to read a private key from {}", path.display()))
}

/// Reads all sections of one kind of a PEM file.
fn sections<T: PemObject>(path: &Path) -> Result<Vec<T>> {
    T::pem_slice_iter(&read_configured(path)?).collect::<Result<_, _>>().map_err(told)
}

/// Says in words what is wrong with a PEM file, where the reader's error lists bytes.
fn told(error: pem::Error) -> Error {
    match error {
        pem::Error::MissingSectionEnd { end_marker } => {
            anyhow!("the file ends before END {}: it is not complete", String::from_utf8_lossy(&end_marker))
        }
        error => error.into(),
    }
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
