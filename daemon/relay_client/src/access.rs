//! The relay of a client, and the credentials for it.

use std::{env, path::PathBuf, sync::Arc};

use config::uplink::{ClientFiles, TrustSource, UplinkSettings};
use masque::template::Template;
use quic::tls;
use sha2::{Digest as _, Sha256};

use crate::{
    error::{ConnectError, TokenError},
    token_file::ReadingTurn,
};

/// What a client has to know to use a relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The template of the relay's URIs; its origin is where the client connects to.
    pub template: Template,
    /// Why the relay's certificate is believed.
    pub trust: TrustSource,
    /// Where the bearer token is kept. It is read again for every connection.
    pub token: Option<TokenSource>,
    /// A certificate to show.
    pub identity: Option<ClientFiles>,
}

/// Where a bearer token is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// A file with nothing else in it.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
}

impl Access {
    /// Returns the access to each relay of an uplink, as the configuration says, in its order.
    #[must_use]
    pub fn of(uplink: &UplinkSettings) -> Vec<Self> {
        let access = |template: &Template| Self {
            template: template.clone(),
            trust: uplink.trust.clone(),
            token: uplink.token_file.clone().map(TokenSource::File),
            identity: uplink.client.clone(),
        };
        uplink.relays.iter().map(access).collect()
    }

    /// Returns what to change once the relay refuses the credentials, as the end of a log entry: the key of the configuration, its value, and
    /// the relay's counterpart.
    #[must_use]
    pub fn remedy(&self) -> String {
        match (&self.token, &self.identity) {
            (Some(TokenSource::File(file)), _) => {
                format!(
                    "replace the token in {} (token_file), or add it to the relay's [[relay.token]]",
                    file.display()
                )
            }
            (Some(TokenSource::Environment(name)), _) => {
                format!("replace the token in ${name}, or add it to the relay's [[relay.token]]")
            }
            (None, Some(ClientFiles { certificate, .. })) => {
                format!("replace the certificate in {}, or let the relay accept it", certificate.display())
            }
            (None, None) => "set token_file to a file with a token of the relay".to_owned(),
        }
    }

    /// Returns the named files, each with a hash of its contents, so that a caller notices changes. An unreadable file has a hash, too.
    #[must_use]
    pub fn contents(&self) -> Vec<(PathBuf, [u8; 32])> {
        let Self { template: _, trust, token, identity } = self;
        let authority = if let TrustSource::Authority(file) = trust { Some(file) } else { None };
        let token = if let Some(TokenSource::File(file)) = token { Some(file) } else { None };
        let identity = identity.iter().flat_map(|identity| [&identity.certificate, &identity.private_key]);
        let hashed = |file: &PathBuf| {
            let contents = tls::read_configured(file);
            let hash =
                Sha256::new().chain_update([u8::from(contents.is_ok())]).chain_update(contents.unwrap_or_default());
            (file.clone(), hash.finalize().into())
        };
        authority.into_iter().chain(token).chain(identity).map(hashed).collect()
    }
}

impl TokenSource {
    /// Reads the token for an attempt to connect.
    ///
    /// # Errors
    /// It cannot be read in time ([`ReadingTurn::read`] says how long it may take), or it is not a valid token.
    pub(crate) async fn read(&self, turn: &ReadingTurn) -> Result<Arc<str>, ConnectError> {
        self.parse(match self {
            Self::File(path) => turn.read(path).await.map_err(TokenError::from),
            Self::Environment(name) => env::var(name).map_err(TokenError::from),
        })
    }

    /// Checks that there is a token, without waiting for a file that is not a regular one.
    ///
    /// # Errors
    /// It cannot be read, or is not a valid token; or its file is not a regular one.
    pub fn check(&self) -> Result<(), ConnectError> {
        self.parse(match self {
            Self::File(path) => tls::read_configured_text(path).map_err(TokenError::from),
            Self::Environment(name) => env::var(name).map_err(TokenError::from),
        })
        .map(drop)
    }

    fn parse(&self, text: Result<String, TokenError>) -> Result<Arc<str>, ConnectError> {
        let token = text.and_then(|text| match text.trim() {
            "" => Err(TokenError::Malformed),
            token if !token.bytes().all(|byte| byte.is_ascii_graphic()) => Err(TokenError::Malformed),
            token => Ok(token.into()),
        });
        let from = || match self {
            Self::File(path) => path.display().to_string(),
            Self::Environment(name) => format!("${name}"),
        };
        token.map_err(|cause| ConnectError::Token { from: from(), cause })
    }
}
