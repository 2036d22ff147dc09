//! Name resolution, off the data path.
//!
//! One task on the control runtime owns the cache and the lookups; [`Resolver::resolve`] passes a name to it and waits for
//! the answer without blocking. Names are absolute: search domains do not apply. `localhost` and all names below it are
//! loopback addresses, without a query (RFC 6761 §6.3).
//!
//! The hosts file is not read: it may name machines that are not meant for clients, and a name should lead to the same
//! place through every relay. The system's name servers are those configured when the resolver started.

use std::{
    borrow::Cow,
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, Either, select},
    stream::FuturesUnordered,
};
use hickory_resolver::{
    TokioResolver,
    config::{ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig},
    lookup::Lookup,
    net::{DnsError, NetError, runtime::TokioRuntimeProvider},
    proto::{
        op::ResponseCode,
        rr::{Name, RecordType},
    },
};
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use role::{holder::Holder, labelled};
use socket2::{Domain, Socket, Type};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};

pub use self::answer::ResolveError;
use self::{answer::Answer, cache::Cache};

mod answer;
mod cache;
#[cfg(test)]
mod tests;

/// How many questions may wait for the task; it takes them immediately, so a full queue means that the task is starved.
const QUESTIONS: usize = 4096;

/// How many addresses of each family are used: the owner of a name should not decide how many are tried.
const ADDRESSES_PER_FAMILY: usize = 8;

/// How long one family's addresses wait for the other family's: some name servers never answer queries for one of them
/// (compare the resolution delay of RFC 8305 §3, which assumes that late answers can still be used).
const SECOND_FAMILY_DELAY: Duration = Duration::from_millis(300);

/// The bounds on the lifetime of cached addresses: not so short that every request costs queries, whatever the TTL, nor so
/// long that a change of the name goes unnoticed for days.
const TTL_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));

/// How long errors of name servers, their silence and the absence of addresses are cached (RFC 9520 §3.2 requires 1 s to 5
/// min), and addresses of one family if the query for the other failed.
const NEGATIVE_TTL: Duration = Duration::from_secs(5);

/// The RCODE of an answer without addresses: the name exists, but only with other types.
const NO_ADDRESSES: ResolveError = ResolveError::Rcode(Cow::Borrowed("NOERROR"));

/// The settings of name resolution.
#[derive(Clone, Debug)]
pub struct ResolverSettings {
    /// How many different names may be looked up at once.
    pub lookups_in_flight: usize,
    /// How long a lookup may take, including retries.
    pub timeout: Duration,
    /// How many names the cache holds, each in less than 1 KiB.
    pub cache_entries: usize,
    /// The name servers, or `None` for those of `/etc/resolv.conf`.
    pub name_servers: Option<Vec<SocketAddr>>,
}

impl Default for ResolverSettings {
    fn default() -> Self {
        Self { lookups_in_flight: 256, timeout: Duration::from_secs(5), cache_entries: 4096, name_servers: None }
    }
}

/// Why no resolver could be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the name servers")]
pub struct StartError(#[from] NetError);

/// The results of resolving names.
#[derive(Clone, Debug, Default)]
pub struct DnsCounters {
    /// Names to resolve.
    pub names: Counter,
    /// Of these, names answered from the cache.
    pub cached: Counter,
    /// Of these, names that shared the lookup of an earlier request.
    pub joined: Counter,
    /// Names answered with an error of a name server, or without addresses.
    pub negative: Counter,
    /// Names given up because no name server answered in time.
    pub timeouts: Counter,
    /// Names refused because too many lookups were in flight.
    pub overloaded: Counter,
    /// Names that failed otherwise.
    pub failed: Counter,
}

impl DnsCounters {
    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("dns_names", "Names to resolve", self.names.clone());
        let results = [
            ("cached", &self.cached),
            ("joined", &self.joined),
            ("negative", &self.negative),
            ("timeout", &self.timeouts),
            ("overloaded", &self.overloaded),
            ("failed", &self.failed),
        ];
        let results = results.map(|(result, counter)| ([("result", result)], counter));
        let help = "Names to resolve that needed no lookup of their own, or failed, by result";
        labelled::register(registry, "dns_results", help, &results);
    }
}

/// Resolves names; clones share lookups, cache and counters.
#[derive(Clone, Debug)]
pub struct Resolver {
    questions: mpsc::Sender<Question>,
    counters: Arc<DnsCounters>,
}

#[derive(Debug)]
struct Question {
    name: Name,
    holder: Holder,
    asker: oneshot::Sender<Answer>,
}

/// A lookup in flight. Joined by hand: `moka` (`try_get_with`) would give all askers of a name the refusal for the first
/// asker's lack of places, and panics in an asker after 200 others in a row gave up.
struct Asked {
    /// The holder to which it is charged: that of the first asker.
    holder: Holder,
    askers: Vec<oneshot::Sender<Answer>>,
}

impl Resolver {
    /// Starts the task on `control`; it ends with the last clone. Without a usable `/etc/resolv.conf` it uses the name
    /// server on this host, as in `resolv.conf(5)`.
    ///
    /// # Errors
    /// The name servers cannot be used.
    pub fn start(settings: ResolverSettings, counters: Arc<DnsCounters>, control: &Handle) -> Result<Self, StartError> {
        let dns = dns_client(&settings)?;
        let (questions, asked) = mpsc::channel(QUESTIONS);
        control.spawn(answer_questions(asked, dns, settings, Arc::clone(&counters)));
        Ok(Self { questions, counters })
    }

    /// Returns the addresses of `name`, at most 8 of each family. The family that the host more likely reaches comes first:
    /// IPv6 if it has a route to the IPv6 internet, otherwise IPv4. A new lookup is charged to `holder`, which may have no
    /// more lookups at a time than are still free.
    ///
    /// # Errors
    /// [`ResolveError`] if there are none; on success there is at least one.
    pub async fn resolve(&self, name: &str, holder: &Holder) -> Result<Vec<IpAddr>, ResolveError> {
        self.counters.names.inc();
        let answer = self.ask(name, holder.clone()).await;
        match &answer {
            Ok(_) => return answer,
            Err(ResolveError::Rcode(_)) => &self.counters.negative,
            Err(ResolveError::Timeout) => &self.counters.timeouts,
            Err(ResolveError::Overloaded) => &self.counters.overloaded,
            Err(ResolveError::Failed) => &self.counters.failed,
        }
        .inc();
        answer
    }

    /// Returns the counters of names so far.
    pub fn counters(&self) -> &DnsCounters {
        &self.counters
    }

    async fn ask(&self, name: &str, holder: Holder) -> Answer {
        let mut name = Name::from_ascii(name).map_err(|_| ResolveError::Failed)?;
        name.set_fqdn(true);
        let (asker, answer) = oneshot::channel();
        self.questions.try_send(Question { name, holder, asker }).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => ResolveError::Overloaded,
            mpsc::error::TrySendError::Closed(_) => ResolveError::Failed,
        })?;
        answer.await.unwrap_or(Err(ResolveError::Failed))
    }
}

fn dns_client(settings: &ResolverSettings) -> Result<TokioResolver, NetError> {
    let of = |name_servers: &[SocketAddr]| {
        let config = ResolverConfig::from_name_servers(name_servers.iter().map(name_server).collect());
        TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
    };
    let mut builder = match &settings.name_servers {
        Some(name_servers) => of(name_servers),
        None => TokioResolver::builder_tokio().unwrap_or_else(|error| {
            tracing::warn!(%error, "no name servers in /etc/resolv.conf, using the one on this host");
            of(&[(Ipv4Addr::LOCALHOST, 53).into()])
        }),
    };
    let options = builder.options_mut();
    options.use_hosts_file = ResolveHosts::Never;
    // Answers are cached as addresses, whose size is bounded, not as messages.
    options.cache_size = 0;
    options.edns0 = true;
    // Leaves time for a second attempt, possibly with other name servers.
    options.timeout = settings.timeout / 2;
    options.attempts = 1;
    options.max_active_requests = settings.lookups_in_flight.saturating_mul(2);
    builder.build()
}

fn name_server(address: &SocketAddr) -> NameServerConfig {
    let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(|mut connection| {
        connection.port = address.port();
        connection
    });
    NameServerConfig::new(address.ip(), true, connections.into())
}

async fn answer_questions(
    mut questions: mpsc::Receiver<Question>,
    dns: TokioResolver,
    settings: ResolverSettings,
    counters: Arc<DnsCounters>,
) {
    let mut cache = Cache::new(settings.cache_entries);
    let mut lookups = FuturesUnordered::<BoxFuture<'static, (Name, (Answer, Duration))>>::new();
    let mut asked: HashMap<Name, Asked> = HashMap::new();
    let mut held: HashMap<Holder, usize> = HashMap::new();
    loop {
        let Question { name, holder, asker } = tokio::select! {
            Some((name, (answer, ttl))) = lookups.next() => {
                if let Some(Asked { holder, askers }) = asked.remove(&name) {
                    give_back(&mut held, &holder);
                    for asker in askers {
                        _ = asker.send(answer.clone());
                    }
                }
                cache.insert(name, answer, ttl, Instant::now());
                continue;
            }
            question = questions.recv() => match question {
                Some(question) => question,
                None => return,
            }
        };
        if let Some(answer) = cache.get(&name, Instant::now()) {
            counters.cached.inc();
            _ = asker.send(answer);
        } else if let Some(Asked { askers, .. }) = asked.get_mut(&name) {
            counters.joined.inc();
            // Askers that gave up are removed before the list grows, so that its size follows the number of waiting askers.
            if askers.len() == askers.capacity() {
                askers.retain(|asker| !asker.is_closed());
            }
            askers.push(asker);
        } else if held.get(&holder).copied().unwrap_or(0) >= settings.lookups_in_flight.saturating_sub(asked.len()) {
            // A holder without lookups gets a place as long as there is one; a holder with as many lookups as are free is
            // refused (dynamic thresholds, Choudhury and Hahne 1998).
            _ = asker.send(Err(ResolveError::Overloaded));
        } else {
            *held.entry(holder.clone()).or_default() += 1;
            asked.insert(name.clone(), Asked { holder, askers: vec![asker] });
            let lookup = tokio::spawn(look_up(dns.clone(), name.clone(), settings.timeout));
            let failed = (Err(ResolveError::Failed), Duration::ZERO);
            lookups.push(lookup.map(|done| (name, done.unwrap_or(failed))).boxed());
        }
    }
}

fn give_back(held: &mut HashMap<Holder, usize>, holder: &Holder) {
    if let Some(count) = held.get_mut(holder) {
        *count -= 1;
        if *count == 0 {
            held.remove(holder);
        }
    }
}

/// Queries both families and returns the answer with the time for which it may be cached.
async fn look_up(dns: TokioResolver, name: Name, limit: Duration) -> (Answer, Duration) {
    let ask = async |record_type| {
        let lookup = timeout(limit, dns.lookup(name.clone(), record_type));
        read(lookup.await.unwrap_or(Err(NetError::Timeout)))
    };
    let (ipv4, ipv6) = match select(pin!(ask(RecordType::A)), pin!(ask(RecordType::AAAA))).await {
        Either::Left((ipv4, ipv6)) => {
            let ipv6 = second(&ipv4, ipv6).await;
            (ipv4, ipv6)
        }
        Either::Right((ipv6, ipv4)) => (second(&ipv6, ipv4).await, ipv6),
    };
    merge(ipv4, ipv6, routes_ipv6)
}

/// The addresses of one family and their lifetime.
type FamilyAnswer = Result<(Vec<IpAddr>, Duration), ResolveError>;

async fn second(first: &FamilyAnswer, other: impl Future<Output = FamilyAnswer>) -> FamilyAnswer {
    match first {
        Ok(_) => timeout(SECOND_FAMILY_DELAY, other).await.unwrap_or(Err(ResolveError::Timeout)),
        Err(_) => other.await,
    }
}

fn read(answer: Result<Lookup, NetError>) -> FamilyAnswer {
    let lookup = answer.map_err(|error| match error {
        NetError::Timeout => ResolveError::Timeout,
        NetError::Dns(DnsError::NoRecordsFound(no_records)) => ResolveError::Rcode(rcode(no_records.response_code)),
        NetError::Dns(DnsError::ResponseCode(code)) => ResolveError::Rcode(rcode(code)),
        _ => ResolveError::Failed,
    })?;
    let addresses = lookup.answers().iter().filter_map(|record| record.data.ip_addr());
    let addresses: Vec<IpAddr> = addresses.take(ADDRESSES_PER_FAMILY).collect();
    let ttl = lookup.valid_until().saturating_duration_since(std::time::Instant::now());
    if addresses.is_empty() { Err(NO_ADDRESSES) } else { Ok((addresses, ttl.clamp(TTL_BOUNDS.0, TTL_BOUNDS.1))) }
}

/// Returns the codes of RFC 1035 §4.1.1 under the names of RFC 8499 §3, and the others by number.
fn rcode(code: ResponseCode) -> Cow<'static, str> {
    Cow::Borrowed(match code {
        ResponseCode::NoError => "NOERROR",
        ResponseCode::FormErr => "FORMERR",
        ResponseCode::ServFail => "SERVFAIL",
        ResponseCode::NXDomain => "NXDOMAIN",
        ResponseCode::NotImp => "NOTIMP",
        ResponseCode::Refused => "REFUSED",
        other => return Cow::Owned(format!("RCODE{}", u16::from(other))),
    })
}

/// Addresses of one family suffice. If both failed, an error says more than the absence of addresses.
fn merge(ipv4: FamilyAnswer, ipv6: FamilyAnswer, ipv6_first: impl FnOnce() -> bool) -> (Answer, Duration) {
    match (ipv4, ipv6) {
        (Ok((ipv4, ttl4)), Ok((ipv6, ttl6))) => {
            let addresses = if ipv6_first() { [ipv6, ipv4] } else { [ipv4, ipv6] }.concat();
            (Ok(addresses), ttl4.min(ttl6))
        }
        (Ok((addresses, ttl)), Err(error)) | (Err(error), Ok((addresses, ttl))) => {
            (Ok(addresses), if error == NO_ADDRESSES { ttl } else { ttl.min(NEGATIVE_TTL) })
        }
        (Err(ipv4), Err(ipv6)) => {
            let error = if ipv4 == NO_ADDRESSES { ipv6 } else { ipv4 };
            let ttl = match error {
                ResolveError::Rcode(_) | ResolveError::Timeout => NEGATIVE_TTL,
                // Possibly caused by this host, and over soon.
                ResolveError::Failed => TTL_BOUNDS.0,
                ResolveError::Overloaded => Duration::ZERO,
            };
            (Err(error), ttl)
        }
    }
}

/// Whether the host has a route to global unicast IPv6 addresses. Connecting a UDP socket looks up the route and sends
/// nothing.
fn routes_ipv6() -> bool {
    let somewhere = SocketAddr::from((Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 1), 443));
    Socket::new(Domain::IPV6, Type::DGRAM, None).and_then(|socket| socket.connect(&somewhere.into())).is_ok()
}
