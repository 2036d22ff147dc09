//! Names to addresses, off the data path.

use std::{borrow::Cow, net::IpAddr, sync::Arc, time::Duration};

use tokio::{runtime::Handle, sync::Semaphore, time::timeout};

/// Why a name has no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// No answer came in time.
    #[error("the name servers did not answer in time")]
    Timeout,
    /// Too many lookups are in flight.
    #[error("too many lookups are in flight")]
    Overloaded,
    /// The name servers say no, with this response code.
    #[error("the name servers answered {0}")]
    Rcode(Cow<'static, str>),
    /// The lookup failed without an answer.
    #[error("the lookup failed")]
    Failed,
}

/// Bounds of a resolver.
#[derive(Clone, Debug)]
pub struct ResolverSettings {
    /// How many lookups may be in flight.
    pub lookups_in_flight: usize,
    /// How long one may take.
    pub timeout: Duration,
}

impl Default for ResolverSettings {
    fn default() -> Self {
        Self { lookups_in_flight: 256, timeout: Duration::from_secs(5) }
    }
}

/// Resolves names on the control runtime. Clones share their limits.
#[derive(Clone)]
pub struct Resolver {
    control: Handle,
    places: Arc<Semaphore>,
    timeout: Duration,
}

impl Resolver {
    /// Starts resolving on the runtime `control`.
    ///
    /// # Errors
    /// The system's resolver cannot be used.
    pub fn start(settings: ResolverSettings, control: &Handle) -> Result<Self, ResolveError> {
        let places = Arc::new(Semaphore::new(settings.lookups_in_flight));
        Ok(Self { control: control.clone(), places, timeout: settings.timeout })
    }

    /// Returns the addresses of `name`, which is absolute.
    ///
    /// # Errors
    /// See [`ResolveError`].
    pub async fn resolve(&self, name: &str) -> Result<Vec<IpAddr>, ResolveError> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| ResolveError::Overloaded)?;
        let (name, limit) = (name.to_owned(), self.timeout);
        let lookup = self.control.spawn(async move {
            let found = timeout(limit, tokio::net::lookup_host((name, 0))).await.map_err(|_| ResolveError::Timeout)?;
            drop(place);
            let addresses: Vec<IpAddr> = found.map_err(|_| ResolveError::Failed)?.map(|found| found.ip()).collect();
            if addresses.is_empty() { Err(ResolveError::Failed) } else { Ok(addresses) }
        });
        lookup.await.map_err(|_| ResolveError::Failed)?
    }
}
