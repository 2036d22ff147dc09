//! The doors of the control plane, and the users that may change the policy through them.

use std::{fmt, net::SocketAddr, path::PathBuf};

use serde_json::Value as Json;
use toml::de::DeValue;

use crate::{
    section::{Section, Value, text},
    text::quoted,
};

/// The doors of the control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlSettings {
    /// The Unix socket of the gRPC door, if it is open. Every user that may connect, by the socket's mode, may read.
    pub socket: Option<PathBuf>,
    /// The TCP address of the gRPC door, if it is open there, too.
    pub tcp: Option<TcpDoor>,
    /// The bus of the D-Bus door, if it is open.
    pub bus: Option<Bus>,
    /// The users of this machine that may write, besides root and the user that paced runs as. None occurs twice.
    pub writers: Vec<String>,
}

/// A gRPC door for other machines: TLS in which both sides present a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpDoor {
    /// The address to bind.
    pub address: SocketAddr,
    /// PEM file with the certificate chain, the daemon's own first.
    pub certificate: PathBuf,
    /// PEM file with the private key of the first certificate.
    pub private_key: PathBuf,
    /// PEM file with the authorities that sign the certificates of callers. A caller with such a certificate may read.
    pub client_ca: PathBuf,
    /// PEM file with a revocation list of each of those authorities; without one, no certificate counts as revoked.
    pub client_crl: Option<PathBuf>,
    /// The subject alternative names whose bearers may also write. None occurs twice.
    pub writers: Vec<String>,
}

/// A D-Bus message bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bus {
    /// The machine's own bus.
    System,
    /// The bus at an address in the format of the D-Bus specification, such as `unix:path=/run/bus`.
    Address(String),
}

impl fmt::Display for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::System => "system",
            Self::Address(address) => address,
        })
    }
}

impl Value for Bus {
    const EXPECTED: &'static str = "\"system\", or the address of another bus, such as \"unix:path=/run/bus\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        match value.as_str()? {
            "system" => Some(Self::System),
            address => {
                address.split_once(':').filter(|(_, rest)| rest.contains('=')).map(|_| Self::Address(address.into()))
            }
        }
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text(r"^system$|:[\s\S]*=")
    }
}

impl Default for ControlSettings {
    /// gRPC at `/run/paced/control.sock`, no D-Bus; root and paced's own user may write.
    fn default() -> Self {
        Self { socket: Some(PathBuf::from("/run/paced/control.sock")), tcp: None, bus: None, writers: Vec::new() }
    }
}

/// Walks through the keys of the control plane. A writer walks through the section `tcp` separately, after all keys.
pub(crate) fn walk(section: &mut Section<'_>, of: &ControlSettings) -> ControlSettings {
    let enabled = section.value("enabled", of.socket.is_some());
    let socket = section.optional("socket", of.socket.clone()).filter(|_| enabled);
    let writers = writers(section, of.writers.clone());
    let tcp = section.optional_section("tcp", |section| tcp(section, None)).filter(|_| enabled);
    let bus = section.optional("bus", of.bus.clone()).filter(|_| enabled);
    ControlSettings { socket, tcp, bus, writers }
}

fn writers(section: &mut Section<'_>, of: Vec<String>) -> Vec<String> {
    let writers = section.list("writers", of);
    section.refuse_shared("writers", &writers, String::clone, "a writer is named twice");
    writers
}

/// Walks through the door over TCP.
pub(crate) fn tcp(section: &mut Section<'_>, of: Option<&TcpDoor>) -> Option<TcpDoor> {
    let address = section.require("listen", of.map(|of| of.address));
    let client_ca = section.require("client_ca", of.map(|of| of.client_ca.clone()));
    let certificate = section.require("certificate", of.map(|of| of.certificate.clone()));
    let private_key = section.require("private_key", of.map(|of| of.private_key.clone()));
    let client_crl = section.optional("client_crl", of.and_then(|of| of.client_crl.clone()));
    let writers = writers(section, of.map(|of| of.writers.clone()).unwrap_or_default());
    Some(TcpDoor {
        address: address?,
        certificate: certificate?,
        private_key: private_key?,
        client_ca: client_ca?,
        client_crl,
        writers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Config,
        tests::{assert_refused, valid},
    };

    fn control(text: &str) -> ControlSettings {
        valid(&format!("[control]\n{text}")).control
    }

    #[test]
    fn the_door_is_where_it_is_put_or_shut() {
        assert_eq!(control(""), ControlSettings::default());
        assert_eq!(control("enabled = false").socket, None);
        let writers = vec!["alice".into(), "bob".into()];
        let expected = ControlSettings {
            socket: Some("/a/b".into()),
            bus: Some(Bus::System),
            writers,
            ..ControlSettings::default()
        };
        assert_eq!(control("socket = \"/a/b\"\nbus = \"system\"\nwriters = [\"alice\", \"bob\"]"), expected);
        let own = Bus::Address("unix:path=/a".into());
        assert_eq!(control("bus = \"unix:path=/a\"").bus, Some(own));
    }

    #[test]
    fn a_door_for_other_machines_has_all_it_takes_to_know_them() {
        let lines = ["listen = \"[::1]:9443\"", "certificate = \"/c\"", "private_key = \"/k\"", "client_ca = \"/a\""];
        let whole = format!("[control.tcp]\n{}\nwriters = [\"ops.example.org\"]", lines.join("\n"));
        let found = control(&whole).tcp.expect("a door");
        let files = [found.certificate, found.private_key, found.client_ca].map(|file| file.display().to_string());
        assert_eq!((found.address.port(), files), (9443, ["/c", "/k", "/a"].map(String::from)));
        assert_eq!((found.writers, found.client_crl), (vec!["ops.example.org".to_owned()], None));
        let revoked = control(&format!("{whole}\nclient_crl = \"/r\"")).tcp.expect("a door").client_crl;
        assert_eq!(revoked, Some("/r".into()));
        assert_eq!(control(&format!("enabled = false\n{whole}")).tcp, None);
        for line in lines {
            let without = lines.iter().filter(|other| **other != line).copied().collect::<Vec<_>>().join("\n");
            let text = format!("[control.tcp]\n{without}");
            let refusals = Config::from_toml(&text).expect_err(&text).to_string();
            let (key, _) = line.split_once(' ').expect("a key");
            assert_refused(&text, &refusals, ["line 1", "control.tcp", key]);
        }
    }

    #[test]
    fn a_control_section_with_an_invalid_place_or_writer_is_refused() {
        for (line, why) in [
            ("socket = \"control.sock\"", ["line 2", "control.sock", "/"]),
            ("writers = [\"\"]", ["line 2", "does not fit", "text"]),
            ("writers = [\"a\", \"a\"]", ["line 2", "twice", ""]),
            ("bus = \"session\"", ["line 2", "session", "\"system\""]),
            ("writer = [\"a\"]", ["line 2", "did you mean writers", ""]),
        ] {
            let text = format!("[control]\n{line}");
            let refusals = Config::from_toml(&text).expect_err(&text).to_string();
            assert_refused(&text, &refusals, why);
        }
    }
}
