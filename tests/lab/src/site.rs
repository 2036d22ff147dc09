//! A running relay: `paced run --config` in the middle of a [`Chain`], with certificates, metrics and clients.

use std::{
    collections::HashMap,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use config::uplink::{ClientFiles, TrustSource};
use masque::template::Template;
use relay_client::access::{Access, TokenSource};

use crate::{
    authority::{Authority, Issued},
    netns::{Chain, Namespace},
    process::{Process, send_signal, wait_for},
};

/// How long something that should happen at once may take on a busy machine.
pub const SOON: Duration = Duration::from_secs(20);

/// How long a relay may take to start: a guest of the vm ring gets only CPU time that no other process wants.
const STARTED: Duration = Duration::from_secs(60);

/// How long the client's side of a test may take.
const WHOLE: Duration = Duration::from_secs(100);

/// Where the relay serves its metrics, inside its namespace.
const METRICS: &str = "127.0.0.1:9433";

/// Placeholder in [`Terms`] for the folder of the site.
pub const FOLDER: &str = "$FOLDER";

/// The lines of TOML that a test adds to the configuration. The rest is the same for all tests.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// Of `[relay]`.
    pub relay: &'a str,
    /// Of `[relay.targets]`.
    pub targets: &'a str,
    /// Of `[relay.limits]`.
    pub limits: &'a str,
    /// Of `[control]`.
    pub control: &'a str,
    /// Sections at the end.
    pub sections: &'a str,
}

impl Default for Terms<'_> {
    /// Every client may use the relay, toward every address of the chain and every port.
    fn default() -> Self {
        let targets = r#"
            allow = [{ to = "10.0.0.0/8", ports = ["1-65535"] }, { to = "fd00::/8", ports = ["1-65535"] }]"#;
        Self { relay: "auth = \"none\"", targets, limits: "", control: "", sections: "" }
    }
}

/// The address family in which a client reaches the relay, or the relay a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// A [`Chain`] whose relay runs.
pub struct Site {
    /// The running daemon.
    pub relay: Process,
    /// The namespaces.
    pub chain: Chain,
    /// The authority that signed the relay's certificate, and that clients trust.
    pub authority: Authority,
    folder: Folder,
}

impl Site {
    /// Makes a chain, and starts a relay with these terms in it.
    ///
    /// # Errors
    /// Without root, or when the relay does not come up.
    pub fn new(terms: Terms<'_>) -> Result<Self> {
        Self::on(Chain::new()?, terms)
    }

    /// Starts a relay with these terms in the middle of a chain.
    ///
    /// # Errors
    /// When the relay does not come up.
    pub fn on(chain: Chain, terms: Terms<'_>) -> Result<Self> {
        let folder = Folder::new(chain.relay.name())?;
        let authority = Authority::new()?;
        folder.write("authority.pem", &authority.pem())?;
        folder.write_identity("relay", &relay_certificate(&authority, &chain)?)?;
        let file = folder.write("paced.toml", &configuration(&folder, &chain, terms))?;
        let relay = chain.relay.start(crate::program("paced")?, ["run".into(), "--config".into(), file])?;
        let site = Self { relay, chain, authority, folder };
        wait_for("metrics of the relay", STARTED, || site.counts().ok())
            .with_context(|| format!("the relay said:\n{}", site.relay.output()))?;
        Ok(site)
    }

    /// Stops the relay, and starts another with these terms in the same folder.
    ///
    /// # Errors
    /// When the relay does not end, or the other does not come up.
    pub fn restart(&mut self, terms: Terms<'_>) -> Result<()> {
        self.signal(libc::SIGTERM)?;
        self.relay.wait(SOON)?;
        self.start_again(terms)
    }

    /// Starts another relay with these terms in the same folder, after the first has ended.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_again(&mut self, terms: Terms<'_>) -> Result<()> {
        self.configure(terms)?;
        let arguments = ["run".into(), "--config".into(), self.path("paced.toml")];
        self.relay = self.chain.relay.start(crate::program("paced")?, arguments)?;
        wait_for("metrics of the relay", STARTED, || self.counts().ok())
            .with_context(|| format!("the relay said:\n{}", self.relay.output()))?;
        Ok(())
    }

    /// Writes the relay's configuration with another state folder, for a second daemon beside it; returns its file.
    ///
    /// # Errors
    /// The configuration cannot be read or written.
    pub fn write_second(&self) -> Result<PathBuf> {
        let text = fs::read_to_string(self.path("paced.toml"))?;
        let state_dir =
            |folder: PathBuf| format!("state_dir = \"{}\"", folder.display().to_string().trim_end_matches('/'));
        self.write("second.toml", &text.replace(&state_dir(self.path("")), &state_dir(self.path("second"))))
    }

    /// Returns the template of the relay that [`Site::start_beside`] starts.
    pub fn template_beside(&self) -> String {
        let own = self.chain.access.far.v4.to_string();
        self.template(Family::V4).replacen(&own, &format!("{own}:444"), 1)
    }

    /// Starts another relay beside the first, at port 444 of its IPv4 address and with its certificate, and waits until it listens.
    /// `keys` are added to its `[relay]`, and `sections` to the end of its configuration.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_beside(&self, keys: &str, sections: &str) -> Result<Process> {
        // A relay has to list an address of its own host, or the first relay would not be a permitted target.
        let own = self.chain.access.far.v4;
        let (at, template) = (format!("{own}:444"), self.template_beside());
        let folder = self.path("").display().to_string();
        let folder = folder.trim_end_matches('/');
        let text = format!(
            r#"
            state_dir = "{folder}/beside"
            [control]
            socket = "{folder}/beside.sock"
            [relay]
            listen = ["{at}"]
            certificate = "{folder}/relay.pem"
            private_key = "{folder}/relay.key"
            templates = ["{template}"]
            {keys}
            [relay.targets]
            allow = [{{ to = "10.0.0.0/8", ports = ["1-65535"] }}, {{ to = "{own}/32", ports = ["443"] }}]
            {sections}"#
        );
        let file = self.write("beside.toml", &text)?;
        let relay = self.chain.relay.start(crate::program("paced")?, ["run".into(), "--config".into(), file])?;
        // A refusal to listen names the address, too.
        relay.wait_for_line("ready", SOON)?;
        Ok(relay)
    }

    /// Issues another certificate for the relay's addresses.
    ///
    /// # Errors
    /// As [`Authority::issue`].
    pub fn relay_certificate(&self) -> Result<Issued> {
        relay_certificate(&self.authority, &self.chain)
    }

    /// Rewrites the configuration; the relay reads it on SIGHUP.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn configure(&self, terms: Terms<'_>) -> Result<()> {
        self.write("paced.toml", &configuration(&self.folder, &self.chain, terms)).map(drop)
    }

    /// Writes a file into the folder of this site and returns its path.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        self.folder.write(name, text)
    }

    /// Writes `NAME.pem` and `NAME.key`, and returns their paths.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn write_identity(&self, name: &str, issued: &Issued) -> Result<ClientFiles> {
        self.folder.write_identity(name, issued)
    }

    /// Returns the path of a file in the folder of this site.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }

    /// Returns the relay's template, as a client in this family knows it.
    pub fn template(&self, family: Family) -> String {
        template(&self.chain, family)
    }

    /// Returns the access data of a client that presents no credentials.
    ///
    /// # Errors
    /// When the template is invalid.
    pub fn access(&self, family: Family) -> Result<Access> {
        let template = Template::parse(&self.template(family))?;
        Ok(Access { template, trust: TrustSource::Authority(self.path("authority.pem")), token: None, identity: None })
    }

    /// Returns the access data of a client that presents a token.
    ///
    /// # Errors
    /// When the token's file cannot be written.
    pub fn access_with_token(&self, token: &str) -> Result<Access> {
        let file = self.write(&format!("{token}.token"), token)?;
        Ok(Access { token: Some(TokenSource::File(file)), ..self.access(Family::V4)? })
    }

    /// Returns an address of the target's host.
    pub fn target(&self, family: Family, port: u16) -> SocketAddr {
        match family {
            Family::V4 => (self.chain.egress.far.v4, port).into(),
            Family::V6 => (self.chain.egress.far.v6, port).into(),
        }
    }

    /// Runs a client to completion, on its own thread and in its own runtime inside the client's namespace.
    ///
    /// # Errors
    /// Without root, or when the client takes too long.
    pub fn client<T: Send, F: Future<Output = T>>(&self, client: impl FnOnce() -> F + Send) -> Result<T> {
        self.chain.client.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime
                .block_on(async { tokio::time::timeout(WHOLE, client()).await })
                .with_context(|| format!("the client did not end within {WHOLE:?}"))
        })?
    }

    /// Sends the relay a signal, such as `libc::SIGTERM`.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: i32) -> Result<()> {
        // Only `Process::wait` reaps the child, and it needs the site exclusively.
        send_signal(self.relay.id(), signal)
    }

    /// Requests the relay's metrics.
    ///
    /// # Errors
    /// When the relay does not answer, or not as expected.
    pub fn counts(&self) -> Result<Counts> {
        Counts::read(&self.chain.relay, METRICS)
    }

    /// Waits until the metrics satisfy `done`, and returns them. Not for use inside a client, whose thread it blocks.
    ///
    /// # Errors
    /// When the metrics do not satisfy `done` in time; the error contains them.
    pub fn wait_for_counts(&self, what: &str, done: impl Fn(&Counts) -> bool) -> Result<Counts> {
        let found = wait_for(what, SOON, || self.counts().ok().filter(&done));
        found.with_context(|| format!("the last metrics: {:#?}", self.counts()))
    }

    /// As [`Site::wait_for_counts`], without blocking the client.
    ///
    /// # Errors
    /// As [`Site::wait_for_counts`].
    pub async fn counted(&self, what: &str, done: impl Fn(&Counts) -> bool) -> Result<Counts> {
        let polled = async {
            loop {
                if let Some(counts) = self.counts().ok().filter(&done) {
                    return counts;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let found = tokio::time::timeout(SOON, polled).await;
        found.with_context(|| format!("timed out waiting for {what}; the last metrics: {:#?}", self.counts()))
    }
}

/// A folder among the temporary files; removed when dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Makes a folder. If its name begins with the name of a namespace, and this process is killed, the next run removes the
    /// folder (see [`remove_leftovers`](crate::netns::remove_leftovers)).
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(name: &str) -> Result<Self> {
        let folder = Self(std::env::temp_dir().join(name));
        fs::create_dir_all(&folder.0)?;
        Ok(folder)
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file into the folder and returns its path.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.0.join(name);
        fs::write(&path, text)?;
        Ok(path)
    }

    fn write_identity(&self, name: &str, issued: &Issued) -> Result<ClientFiles> {
        Ok(ClientFiles {
            certificate: self.write(&format!("{name}.pem"), &issued.certificate)?,
            private_key: self.write(&format!("{name}.key"), &issued.private_key)?,
        })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that stays among the temporary files does no harm.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn relay_certificate(authority: &Authority, chain: &Chain) -> Result<Issued> {
    authority.issue(&[&chain.access.far.v4.to_string(), &chain.access.far.v6.to_string()])
}

fn template(chain: &Chain, family: Family) -> String {
    let authority = match family {
        Family::V4 => chain.access.far.v4.to_string(),
        Family::V6 => format!("[{}]", chain.access.far.v6),
    };
    format!("https://{authority}/.well-known/masque/udp/{{target_host}}/{{target_port}}/")
}

fn configuration(folder: &Folder, chain: &Chain, terms: Terms<'_>) -> String {
    let Terms { relay, targets, limits, control, sections } = terms;
    let (v4, v6) = (template(chain, Family::V4), template(chain, Family::V6));
    let folder = folder.0.display();
    // On a busy machine, a test's clients may take long until their first request.
    let patience = if limits.contains("stranger_seconds") { "" } else { "stranger_seconds = 600" };
    let log = if sections.contains("[log]") { "" } else { "[log]\nlevel = \"debug\"" };
    format!(
        r#"
        state_dir = "{folder}"
        [relay]
        certificate = "{folder}/relay.pem"
        private_key = "{folder}/relay.key"
        templates = ["{v4}", "{v6}"]
        {relay}
        [relay.targets]
        {targets}
        [relay.limits]
        {limits}
        {patience}
        [control]
        socket = "{folder}/control.sock"
        {control}
        [metrics]
        listen = "{METRICS}"
        {log}
        {sections}
        "#
    )
    .replace(FOLDER, &folder.to_string())
}

/// The metrics of a relay at one point in time.
#[derive(Clone, Debug)]
pub struct Counts(HashMap<String, i64>);

impl Counts {
    /// Requests the metrics of a daemon in a namespace.
    ///
    /// # Errors
    /// When the daemon does not answer, or not as expected.
    pub fn read(daemon: &Namespace, address: &str) -> Result<Self> {
        let answer = daemon.run(|| -> Result<String> {
            let mut stream = TcpStream::connect_timeout(&address.parse()?, SOON)?;
            stream.set_read_timeout(Some(SOON))?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        })??;
        let (head, body) = answer.split_once("\r\n\r\n").context("an answer without a body")?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "no metrics, but {head}");
        let samples = body.lines().filter(|line| !line.starts_with('#'));
        let counts = samples.filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            // Sums of times have a fraction, which no test uses.
            let name = name.strip_prefix("paced_").unwrap_or(name);
            Some((name.to_owned(), value.parse::<f64>().ok()? as i64))
        });
        Ok(Self(counts.collect()))
    }

    /// Returns the sum of all samples whose names begin with `prefix`.
    pub fn sum(&self, prefix: &str) -> i64 {
        self.0.iter().filter(|(sample, _)| sample.starts_with(prefix)).map(|(_, count)| count).sum()
    }

    /// Returns the value of a sample, such as `packets_total{direction="up"}`; 0 if it has not been counted yet.
    pub fn of(&self, sample: &str) -> i64 {
        self.0.get(sample).copied().unwrap_or(0)
    }

    /// Returns whether there is a sample of this name, whatever its labels.
    pub fn has(&self, name: &str) -> bool {
        self.0.keys().any(|sample| sample.split('{').next() == Some(name))
    }

    /// Returns the labels of each sample of this name. Values have neither commas nor quotes.
    pub fn labels(&self, name: &str) -> Vec<Vec<(String, String)>> {
        let of = |sample: &String| {
            let labels = match sample.split_once('{') {
                Some((of, labels)) if of == name => labels.trim_end_matches('}'),
                None if sample == name => "",
                _ => return None,
            };
            let labels = labels.split(',').filter_map(|label| label.split_once('='));
            Some(labels.map(|(name, value)| (name.to_owned(), value.trim_matches('"').to_owned())).collect())
        };
        self.0.keys().filter_map(of).collect()
    }

    /// Returns how many requests were refused for a reason.
    pub fn refused(&self, reason: &str) -> i64 {
        self.of(&format!("refused_requests_total{{reason=\"{reason}\"}}"))
    }

    /// Returns how many tunnels were closed for a reason.
    pub fn closed(&self, reason: &str) -> i64 {
        self.of(&format!("tunnels_closed_total{{reason=\"{reason}\"}}"))
    }

    /// Returns how many UDP payloads were relayed in a direction, `up` or `down`.
    pub fn packets(&self, direction: &str) -> i64 {
        self.of(&format!("packets_total{{direction=\"{direction}\"}}"))
    }

    /// Returns how many UDP payloads were dropped in a direction for a reason.
    pub fn dropped(&self, direction: &str, reason: &str) -> i64 {
        self.of(&format!("dropped_packets_total{{direction=\"{direction}\",reason=\"{reason}\"}}"))
    }

    /// Returns how many UDP tunnels are open.
    pub fn udp_tunnels(&self) -> i64 {
        self.of("tunnels{protocol=\"udp\"}")
    }
}
