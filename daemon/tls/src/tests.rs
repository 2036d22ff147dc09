//! Handshakes in memory: which clients a server with client authorities lets in.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::{
    ClientConnection, HandshakeKind, RootCertStore, ServerConnection,
    crypto::{
        CryptoProvider, aws_lc_rs,
        aws_lc_rs::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256},
    },
    time_provider::TimeProvider,
};
use rustls_pki_types::UnixTime;

use super::*;

/// An authority for clients, and the certificate of a server.
struct Site {
    authority: CertifiedIssuer<'static, KeyPair>,
    server: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

/// The first of January of 2031, in seconds since 1970, when operators' certificates expire.
const END_OF_2030: u64 = 1_924_992_000;

impl Site {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let own = rcgen::generate_simple_self_signed(["relay.example".into()]).unwrap();
        let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
        Self { authority, server: own.cert.der().clone(), key }
    }

    fn operator(&self, serial: u64) -> ClientIdentity {
        let mut params = CertificateParams::new(vec!["ops.example".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "operator");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.serial_number = Some(SerialNumber::from(serial));
        params.not_after = date_time_ymd(2031, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        (vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }

    /// Returns the authority's revocation list with these certificates.
    fn revoked(&self, serials: &[u64]) -> CertificateRevocationListDer<'static> {
        let entry = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(2020, 2, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.authority).unwrap().der().clone()
    }

    fn identity(&self, revoked: Vec<CertificateRevocationListDer<'static>>) -> Identity {
        Identity {
            chain: vec![self.server.clone()],
            key: self.key.clone_key(),
            client_authorities: Some(vec![self.authority.der().clone()]),
            revoked,
        }
    }

    fn client(&self, identity: ClientIdentity) -> Arc<ClientConfig> {
        client_http2(Trust::Pinned(fingerprint(&self.server)), identity).unwrap()
    }
}

/// Runs a handshake and delivers the server's tickets after it. Returns the kind of handshake, or why the server
/// refused it.
fn shake(server: &Arc<ServerConfig>, client: &Arc<ClientConfig>) -> Result<HandshakeKind, rustls::Error> {
    Ok(shaken(server, client)?.handshake_kind().unwrap())
}

/// Does the same. Returns the server's end.
fn shaken(server: &Arc<ServerConfig>, client: &Arc<ClientConfig>) -> Result<ServerConnection, rustls::Error> {
    let mut client = ClientConnection::new(client.clone(), "relay.example".try_into().unwrap()).unwrap();
    let mut server = ServerConnection::new(server.clone()).unwrap();
    for _ in 0..4 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        server.read_tls(&mut &bytes[..]).unwrap();
        server.process_new_packets()?;
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        client.read_tls(&mut &bytes[..]).unwrap();
        client.process_new_packets()?;
    }
    assert!(!server.is_handshaking() && !client.is_handshaking());
    Ok(server)
}

/// A clock that a test sets.
#[derive(Debug)]
struct Clock(Arc<AtomicU64>);

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(std::time::Duration::from_secs(self.0.load(Relaxed))))
    }
}

#[test]
fn aes_128_protects_connections_and_other_suites_serve_clients_without_it() {
    let site = Site::new();
    let server = server_config(site.identity(Vec::new()), &[H2], ClientCertVerifierBuilder::allow_unauthenticated);
    let (server, client) = (Arc::new(server.unwrap()), site.client(site.operator(1)));
    let suite =
        |client: &Arc<ClientConfig>| shaken(&server, client).unwrap().negotiated_cipher_suite().unwrap().suite();
    assert_eq!(suite(&client), TLS13_AES_128_GCM_SHA256.suite());
    for only in [TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256] {
        let provider = CryptoProvider { cipher_suites: vec![only], ..aws_lc_rs::default_provider() };
        let builder = ClientConfig::builder_with_provider(Arc::new(provider)).with_safe_default_protocol_versions();
        let mut roots = RootCertStore::empty();
        roots.add(site.server.clone()).unwrap();
        let mut client = builder.unwrap().with_root_certificates(roots).with_no_client_auth();
        client.alpn_protocols = vec![H2.to_vec()];
        assert_eq!(suite(&Arc::new(client)), only.suite());
    }
}

#[test]
fn an_operator_whose_certificate_has_expired_is_refused_also_after_an_earlier_handshake() {
    let site = Site::new();
    for demand in [|verifier| verifier, ClientCertVerifierBuilder::allow_unauthenticated] {
        let mut server = server_config(site.identity(Vec::new()), &[H2], demand).unwrap();
        let seconds = Arc::new(AtomicU64::new(END_OF_2030 - 60));
        server.time_provider = Arc::new(Clock(seconds.clone()));
        let (server, client) = (Arc::new(server), site.client(site.operator(1)));
        for _ in 0..2 {
            assert_eq!(shake(&server, &client).unwrap(), HandshakeKind::Full, "the certificate is looked at again");
        }
        seconds.store(END_OF_2030 + 60, Relaxed);
        let refusal = shake(&server, &client).unwrap_err().to_string();
        assert!(refusal.contains("certificate expired"), "{refusal}");
    }
}

#[test]
fn a_revoked_certificate_is_refused_and_so_is_one_of_which_no_list_tells() {
    let site = Site::new();
    let admits = |serial, revoked| {
        let server = site.identity(revoked).prepare_http2().unwrap();
        shake(&server, &site.client(site.operator(serial)))
    };
    let list = || vec![site.revoked(&[7, 9])];
    assert!(admits(8, list()).is_ok(), "the list is out of date, and counts");
    for serial in [7, 9] {
        let refusal = admits(serial, list()).unwrap_err().to_string();
        assert!(refusal.contains("Revoked"), "{refusal}");
    }
    assert!(admits(7, Vec::new()).is_ok());
    let other = vec![Site::new().revoked(&[])];
    assert!(admits(8, other).is_err());
}

#[test]
fn an_interrupted_development_certificate_is_made_again_and_no_key_stays_with_another() {
    let folder = std::env::temp_dir().join(format!("paced-development-{}", std::process::id()));
    let file = |name: &str| folder.join(name);
    let first = development_identity(&folder).unwrap().chain;
    assert_eq!(development_identity(&folder).unwrap().chain, first, "it stays");
    // A folder in the place of the certificate's next content: it cannot be written, although the key can.
    std::fs::remove_file(file("private-key.pem")).unwrap();
    std::fs::create_dir(file("certificate.pem.new")).unwrap();
    development_identity(&folder).err().unwrap();
    assert!(file("private-key.pem").exists() && !file("certificate.pem").exists());
    std::fs::remove_dir(file("certificate.pem.new")).unwrap();
    let anew = development_identity(&folder).unwrap();
    assert_ne!(anew.chain, first);
    anew.prepare().unwrap();
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_configured_file_that_would_not_end_or_not_begin_is_refused_at_once_and_by_its_name() {
    let folder = std::env::temp_dir().join(format!("paced-configured-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [fifo, long, text] = ["fifo", "long", "text"].map(|name| folder.join(name));
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    std::fs::File::create(&long).unwrap().set_len((16 << 20) + 1).unwrap();
    std::fs::write(&text, b"caf\xe9").unwrap();
    let zero = Path::new("/dev/zero");
    for (path, why) in
        [(fifo.as_path(), "it is a FIFO"), (zero, "it is a device"), (&folder, "it is a folder"), (&long, "16 MiB")]
    {
        let refusals = [read_certificates(path).err(), read_revoked(path).err(), read_key(path).err()];
        for refusal in refusals.map(|refusal| format!("{:#}", refusal.unwrap())) {
            assert!(refusal.contains(&path.display().to_string()) && refusal.contains(why), "{refusal}");
        }
        assert!(read_configured_text(path).unwrap_err().to_string().contains(why));
    }
    assert_eq!(read_configured(&text).unwrap(), b"caf\xe9");
    assert!(read_configured_text(&text).unwrap_err().to_string().contains("UTF-8"));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_truncated_file_is_called_incomplete_and_a_whole_one_is_read() {
    let folder = std::env::temp_dir().join(format!("paced-truncated-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("relay.pem");
    let made = rcgen::generate_simple_self_signed(["relay.example".into()]).unwrap();
    let (certificate, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    std::fs::write(&file, format!("{certificate}{key}")).unwrap();
    assert_eq!(read_certificates(&file).unwrap(), [made.cert.der().clone()]);
    assert_eq!(read_key(&file).unwrap().secret_der(), made.signing_key.serialize_der());
    std::fs::write(&file, &certificate[..certificate.len() / 2]).unwrap();
    let refusal = format!("{:#}", read_certificates(&file).unwrap_err());
    assert!(refusal.ends_with("relay.pem: the file ends before END CERTIFICATE: it is not complete"), "{refusal}");
    std::fs::write(&file, &key[..key.len() / 2]).unwrap();
    let refusal = format!("{:#}", read_key(&file).unwrap_err());
    assert!(refusal.ends_with("the file ends before END PRIVATE KEY: it is not complete"), "{refusal}");
    std::fs::remove_dir_all(folder).unwrap();
}
