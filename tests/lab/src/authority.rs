//! A certificate authority that belongs to one test run.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber, date_time_ymd,
};

/// Signs certificates for servers and clients; only this run's endpoints trust it.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its private key, both in PEM.
#[derive(Clone, Debug)]
pub struct Issued {
    /// The certificate alone, without the authority's.
    pub certificate: String,
    /// The key that belongs to it.
    pub private_key: String,
    serial: u64,
}

/// The next serial number. No two certificates of one process share one.
static SERIAL: AtomicU64 = AtomicU64::new(1);

impl Authority {
    /// Makes a new key and a certificate for it, signed with the same key.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn new() -> Result<Self> {
        let mut params = named("authority of one test run");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Returns the authority's own certificate in PEM.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Signs a certificate for names and IP addresses, good for a server and for a client.
    ///
    /// # Errors
    /// When a name is invalid.
    pub fn issue(&self, names: &[&str]) -> Result<Issued> {
        self.issue_until(names, 4096)
    }

    /// As [`Authority::issue`], valid until the start of `year`.
    ///
    /// # Errors
    /// When a name is invalid.
    pub fn issue_until(&self, names: &[&str], year: i32) -> Result<Issued> {
        let mut params = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?;
        params.not_after = date_time_ymd(year, 1, 1);
        // With the authority's own name, some verifiers would take the certificate for a self-signed one.
        params.distinguished_name = named(names.first().copied().unwrap_or_default()).distinguished_name;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let serial = SERIAL.fetch_add(1, Relaxed);
        params.serial_number = Some(SerialNumber::from(serial));
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.0)?.pem();
        Ok(Issued { certificate, private_key: key.serialize_pem(), serial })
    }

    /// Signs a revocation list of certificates, in PEM.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn revoke(&self, revoked: &[&Issued]) -> Result<String> {
        let entry = |issued: &&Issued| RevokedCertParams {
            serial_number: SerialNumber::from(issued.serial),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(2120, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        Ok(list.signed_by(&self.0)?.pem()?)
    }
}

fn named(name: &str) -> CertificateParams {
    let mut distinguished_name = DistinguishedName::new();
    distinguished_name.push(DnType::CommonName, name);
    let mut params = CertificateParams::default();
    params.distinguished_name = distinguished_name;
    params
}
