//! How a client proves to a relay that it is a user, before it needs a tunnel.
//!
//! A relay treats a client as a stranger until it has accepted a request, and closes a stranger's connection after a while
//! (`stranger_seconds`). The edge connects before applications need tunnels, so it sends a request that asks for nothing.

use masque::{h3::Part, request};
use quic::h3;

use crate::{RelayConnection, credentials::CredentialsRefused};

impl RelayConnection {
    /// Sends `OPTIONS *` (RFC 9110 §9.3.7) with the credentials, and waits for the answer. Returns the refusal of the credentials, if
    /// the relay refuses them. Another refusal means nothing: not every relay answers this method.
    ///
    /// # Errors
    /// The connection or the request's stream ended before there was an answer.
    pub async fn introduce(&self) -> Result<Option<CredentialsRefused>, h3::Error> {
        let (mut request, _waiting) = self.ask_itself(request::ping_request).await?;
        request.send.finish();
        loop {
            match request.recv.part().await? {
                // Interim responses mean nothing here (RFC 9110 §15.2).
                Some(Part::Response(head)) if (100..200).contains(&head.status) => {}
                Some(Part::Response(head)) => {
                    if (200..300).contains(&head.status) {
                        self.let_in();
                    }
                    let refused = CredentialsRefused::of(&head);
                    if refused.is_some() {
                        self.credentials.note(refused.clone());
                    }
                    return Ok(refused);
                }
                Some(_) => {}
                None => return Err(h3::Error::Closed),
            }
        }
    }
}
