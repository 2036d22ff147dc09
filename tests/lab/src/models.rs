//! A gateway for models in the middle of a [`Chain`], and an edge in front of it, on the client's side.

use std::path::PathBuf;

use anyhow::Result;
use config::hash::hex;
use sha2::{Digest as _, Sha256};

use crate::{
    netns::Chain,
    process::Process,
    site::{Family, SOON, Site, Terms},
};

/// Where the edge serves its clients, inside the client's namespace.
pub const SERVE: &str = "127.0.0.1:8100";

/// Placeholder in an edge's sections for the keys that lead to the gateway, as in `[[forward]]`.
pub const RELAY: &str = "$RELAY";

/// The token that the edge sends to the gateway. It need not be secret: no other program runs in these namespaces.
const TOKEN: &str = "paced_of-an-edge-in-a-namespace";

/// A running gateway and edge. The edge has a token of the gateway's.
pub struct Models {
    /// The gateway: a relay with a `[gateway]`.
    pub site: Site,
    /// The edge.
    pub edge: Process,
    relay: String,
    sections: String,
}

impl Models {
    /// Starts both. `sections` form the end of the gateway's configuration and include `[gateway]`; `edge_sections` form the
    /// end of the edge's, with [`RELAY`] where they lead to the gateway.
    ///
    /// # Errors
    /// When one of them does not come up.
    pub fn on(chain: Chain, sections: &str, edge_sections: &str) -> Result<Self> {
        let relay = format!("[[relay.token]]\nname = \"edge\"\nsha256 = \"{}\"", hex(&Sha256::digest(TOKEN)));
        let site = Site::on(chain, Terms { relay: &relay, sections, ..Terms::default() })?;
        site.write("edge.token", TOKEN)?;
        let edge = start_edge(&site, edge_sections)?;
        Ok(Self { site, edge, relay, sections: sections.to_owned() })
    }

    /// Stops the gateway as a service manager does, and starts it again with the same configuration.
    ///
    /// # Errors
    /// When it does not end, or does not come up again.
    pub fn restart(&mut self) -> Result<()> {
        self.site.restart(Terms { relay: &self.relay, sections: &self.sections, ..Terms::default() })
    }
}

/// Starts an edge in the namespace of a site's client. It serves models at [`SERVE`] and sends the gateway the token in the
/// site's file `edge.token`; `sections` form the end of its configuration.
///
/// # Errors
/// When it does not come up.
pub fn start_edge(site: &Site, sections: &str) -> Result<Process> {
    let file = configuration(site, sections)?.display().to_string();
    let edge = site.chain.client.start(crate::program("paced")?, ["run", "--config", &file])?;
    edge.wait_for_line("serving models", SOON)?;
    Ok(edge)
}

fn configuration(site: &Site, sections: &str) -> Result<PathBuf> {
    let folder = site.path("");
    let folder = folder.display();
    let relay = format!(
        "relay = \"{template}\"\nca = \"{folder}/authority.pem\"\ntoken_file = \"{folder}/edge.token\"",
        template = site.template(Family::V4),
    );
    let text = format!(
        r#"
        state_dir = "{folder}/edge"
        [[serve]]
        listen = "{SERVE}"
        {RELAY}
        [control]
        enabled = false
        {sections}
        "#,
    );
    site.write("edge.toml", &text.replace(RELAY, &relay))
}
