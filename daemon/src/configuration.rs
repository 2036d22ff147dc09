//! The configuration's files: the main one, its drop-ins, and the certificates and keys that they name.
//!
//! | module | contents |
//! |---|---|
//! | [`check`] | checks of a configuration against this machine |
//! | [`files`] | the files that a configuration names, and whether they have changed |
//! | [`readable`] | which users can read such a file |

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use anyhow::{Context as _, Result};
use config::{
    Config, FilePart,
    control::TcpDoor,
    gateway,
    relay::{ListenerIdentity, ListenerSettings},
};
use quic::tls;
use rustls::ServerConfig;

use crate::{
    certificates::{self, Certificate},
    policy,
};

pub mod check;
pub mod files;
pub mod readable;

/// The folder of drop-ins, beside the main file.
const DROP_INS: &str = "conf.d";

/// Reads a configuration: `file`, overlaid with `conf.d/*.toml` beside it, in the order of their names.
///
/// # Errors
/// A file cannot be read, is not a regular file, or has more than 16 MiB, or their combination is not valid.
pub fn read(file: &Path) -> Result<Config> {
    from_parts(file, &parts(file)?)
}

fn parts(file: &Path) -> Result<Vec<FilePart>> {
    let mut parts = vec![part(file.to_owned())?];
    for drop_in in drop_ins(&file.with_file_name(DROP_INS))? {
        parts.push(part(drop_in)?);
    }
    Ok(parts)
}

fn from_parts(file: &Path, parts: &[FilePart]) -> Result<Config> {
    let why = || format!("{} is not valid", file.display());
    let config = Config::from_parts(parts).with_context(why)?;
    // Callers cannot set a longer policy either, and a reload checks the policy of the files as it checks theirs.
    policy::check_length(&config.policy.to_toml()).with_context(why)?;
    Ok(config)
}

fn part(file: PathBuf) -> Result<FilePart> {
    let text = tls::read_configured_text(&file).with_context(|| format!("failed to read {}", file.display()))?;
    Ok(FilePart { name: file.display().to_string(), text })
}

fn drop_ins(folder: &Path) -> Result<Vec<PathBuf>> {
    let why = || format!("failed to read the folder {}", folder.display());
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(why)?,
    };
    let files: std::io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut files = files.with_context(why)?;
    // Editors leave files with other names.
    files.retain(|file| file.extension().is_some_and(|extension| extension == "toml") && !is_hidden(file));
    files.sort();
    Ok(files)
}

fn is_hidden(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Reads and prepares a listener's certificate and key. In development mode, creates them if they do not
/// exist. An expired certificate is accepted if it is one of those `in_force`.
///
/// # Errors
/// A file cannot be read or is of another kind, the key does not match the certificate, or the certificate has expired.
pub fn identity(listener: &ListenerSettings, state_dir: &Path, in_force: &[Certificate]) -> Result<tls::PreparedTls> {
    match &listener.identity {
        ListenerIdentity::SelfSigned => tls::development_identity(state_dir)?.prepare(),
        ListenerIdentity::Files { certificate, private_key } => {
            let (client_ca, client_crl) = (listener.client_ca.as_deref(), listener.client_crl.as_deref());
            read_identity(
                tls::IdentityFiles { certificate, private_key, client_ca, client_crl },
                tls::Identity::prepare,
                in_force,
            )
        }
    }
}

/// Reads the identity of a gateway's listener, as [`identity`]; `None` if it serves without TLS.
///
/// # Errors
/// As [`identity`].
pub fn gateway_identity(
    listener: &gateway::GatewayListener,
    state_dir: &Path,
    in_force: &[Certificate],
) -> Result<Option<Arc<ServerConfig>>> {
    let prepared = listener.identity.as_ref().map(|identity| match identity {
        ListenerIdentity::SelfSigned => tls::development_identity(state_dir)?.prepare_https(),
        ListenerIdentity::Files { certificate, private_key } => {
            let files = tls::IdentityFiles { certificate, private_key, client_ca: None, client_crl: None };
            read_identity(files, tls::Identity::prepare_https, in_force)
        }
    });
    prepared.transpose()
}

/// Reads the control plane's identity over TCP, as [`identity`], and the authorities that it trusts.
///
/// # Errors
/// As [`identity`].
pub fn control_identity(tcp: &TcpDoor, in_force: &[Certificate]) -> Result<Arc<ServerConfig>> {
    let TcpDoor { certificate, private_key, client_ca, client_crl, .. } = tcp;
    let files =
        tls::IdentityFiles { certificate, private_key, client_ca: Some(client_ca), client_crl: client_crl.as_deref() };
    read_identity(files, tls::Identity::prepare_http2, in_force)
}

fn read_identity<T>(
    files: tls::IdentityFiles<'_>,
    prepare: fn(tls::Identity) -> Result<T>,
    in_force: &[Certificate],
) -> Result<T> {
    let (certificate, private_key) = (files.certificate, files.private_key);
    let identity = tls::Identity::read(files)?;
    if let Some(first) = identity.chain.first() {
        certificates::refuse_expired(first, certificate, in_force, SystemTime::now())
            .with_context(|| certificate.display().to_string())?;
    }
    prepare(identity).with_context(|| format!("{} and {}", certificate.display(), private_key.display()))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("paced-configuration-{}-{name}", std::process::id()));
            fs::create_dir_all(folder.join(DROP_INS)).unwrap();
            Self(folder)
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.0.join(name), text).unwrap();
        }

        fn read(&self) -> Result<Config> {
            read(&self.0.join("paced.toml"))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn drop_ins_are_laid_over_the_file_in_the_order_of_their_names_and_other_files_are_none() {
        let folder = Folder::new("order");
        folder.write("paced.toml", "state_dir = \"/0\"\n[log]\nlevel = \"error\"");
        for (name, text) in [
            ("20-last.toml", "state_dir = \"/20\""),
            ("10-first.toml", "state_dir = \"/10\"\n[log]\nlevel = \"debug\""),
            ("30-old.toml~", "state_dir = \"/30\""),
            (".40-hidden.toml", "state_dir = \"/40\""),
        ] {
            folder.write(&format!("{DROP_INS}/{name}"), text);
        }
        let config = folder.read().unwrap();
        assert_eq!((config.state_dir.to_str().unwrap(), config.log.level), ("/20", config::log::LogLevel::Debug));
        fs::remove_dir_all(folder.0.join(DROP_INS)).unwrap();
        assert_eq!(folder.read().unwrap().state_dir.to_str(), Some("/0"));
    }

    #[test]
    fn mistakes_are_reported_with_their_file_and_a_file_that_is_not_utf_8_is_refused() {
        let folder = Folder::new("wrong");
        folder.write("paced.toml", "");
        folder.write("conf.d/a.toml", "\nlogg = 1");
        let refusal = format!("{:#}", folder.read().unwrap_err());
        assert!(refusal.contains("conf.d/a.toml: line 2, column 1: logg: unknown key; did you mean log?"), "{refusal}");
        fs::write(folder.0.join("conf.d/a.toml"), b"state_dir = \"/\xff\"").unwrap();
        let refusal = format!("{:#}", folder.read().unwrap_err());
        assert!(refusal.contains("a.toml") && refusal.contains("UTF-8"), "{refusal}");
    }

    #[test]
    fn a_configuration_is_not_waited_for_and_has_an_end() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let folder = Folder::new("endless");
        let refusal = format!("{:#}", read(Path::new("/dev/zero")).unwrap_err());
        assert!(refusal.contains("/dev/zero: it is a device"), "{refusal}");
        folder.write("paced.toml", "");
        mknodat(CWD, folder.0.join("conf.d/a.toml"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let refusal = format!("{:#}", folder.read().unwrap_err());
        assert!(refusal.contains("conf.d/a.toml: it is a FIFO"), "{refusal}");
    }

    #[test]
    fn a_certificate_that_expired_in_force_is_read_again_and_another_expired_one_is_not() {
        let folder = Folder::new("expired");
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["relay.example".into()]).unwrap();
        let mut renew = |year| {
            params.not_after = date_time_ymd(year, 1, 1);
            folder.write("paced.pem", &params.self_signed(&key).unwrap().pem());
        };
        renew(2020);
        folder.write("paced.key", &key.serialize_pem());
        let identity_files = "certificate = \"$/paced.pem\"\nprivate_key = \"$/paced.key\"\n";
        let text = format!(
            "[relay]\ntemplates = [\"https://relay.example/{{target_host}}/{{target_port}}/\"]\nauth = \"none\"\n{identity_files}\
             [[gateway.listener]]\naddress = \"127.0.0.1:1\"\n{identity_files}\
             [[gateway.model]]\nname = \"large\"\nengines = [\"http://127.0.0.1:8001\"]\n\
             [control.tcp]\nlisten = \"127.0.0.1:2\"\nclient_ca = \"$/paced.pem\"\n{identity_files}"
        );
        let config = Config::from_toml(&text.replace('$', &folder.0.display().to_string())).unwrap();
        let (relay, front) =
            (&config.relay.as_ref().unwrap().listeners[0], &config.gateway.as_ref().unwrap().listeners[0]);
        let tcp = config.control.tcp.as_ref().unwrap();
        let readable = |in_force: &[Certificate]| {
            let relay = identity(relay, &config.state_dir, in_force).is_ok();
            let front = gateway_identity(front, &config.state_dir, in_force).is_ok();
            [relay, front, control_identity(tcp, in_force).is_ok()]
        };
        let in_force = certificates::shown(&config).unwrap();
        assert_eq!((readable(&in_force), readable(&[])), ([true; 3], [false; 3]));
        renew(2021);
        assert_eq!(readable(&in_force), [false; 3], "it is another one");
        renew(4096);
        assert_eq!(readable(&in_force), [true; 3]);
    }
}
