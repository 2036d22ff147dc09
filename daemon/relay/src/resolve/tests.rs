use std::sync::Mutex;

use futures::future::join_all;
use tokio::{net::UdpSocket, task::JoinHandle};

use super::*;

/// Type codes of RFC 1035 §3.2.2 and RFC 3596 §2.1.
const A: u16 = 1;
const AAAA: u16 = 28;

/// The reply of the test server for one type: addresses, an RCODE, or silence.
enum Reply {
    Addresses(Vec<IpAddr>),
    Rcode(u8),
    Silence,
}

/// A query: its ID, the name, and the type.
type Query = (u16, String, u16);

/// A name server on the loopback interface that records the queries that reached it, each once however often it is
/// repeated.
struct Server {
    address: SocketAddr,
    queries: Arc<Mutex<Vec<Query>>>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    async fn start(reply: impl Fn(&str, u16) -> Reply + Send + 'static) -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = socket.local_addr().unwrap();
        let queries = Arc::<Mutex<Vec<Query>>>::default();
        let noted = Arc::clone(&queries);
        let task = tokio::spawn(async move {
            let mut buffer = [0; 1500];
            loop {
                let (len, client) = socket.recv_from(&mut buffer).await.unwrap();
                let (query, question) = parse(&buffer[..len]);
                let message = message(query.0, question, reply(&query.1, query.2));
                {
                    let mut noted = noted.lock().unwrap();
                    if !noted.contains(&query) {
                        noted.push(query);
                    }
                }
                if let Some(message) = message {
                    socket.send_to(&message, client).await.unwrap();
                }
            }
        });
        Self { address, queries, task }
    }

    /// Returns how many queries there were for `record_type`.
    fn queries(&self, record_type: u16) -> usize {
        self.queries.lock().unwrap().iter().filter(|query| query.2 == record_type).count()
    }

    fn resolver(&self, change: impl FnOnce(&mut ResolverSettings)) -> Resolver {
        let mut settings = ResolverSettings {
            timeout: Duration::from_secs(20),
            name_servers: Some(vec![self.address]),
            ..ResolverSettings::default()
        };
        change(&mut settings);
        Resolver::start(settings, Arc::default(), &Handle::current()).unwrap()
    }
}

/// Parses a query with one question, and returns the bytes of the question too (RFC 1035 §4.1).
fn parse(query: &[u8]) -> (Query, &[u8]) {
    let mut at = 12;
    let mut labels = Vec::new();
    while query[at] != 0 {
        let label = &query[at + 1..][..usize::from(query[at])];
        labels.push(String::from_utf8(label.to_vec()).unwrap());
        at += 1 + label.len();
    }
    let number = |at| u16::from_be_bytes([query[at], query[at + 1]]);
    ((number(0), labels.join("."), number(at + 1)), &query[12..at + 5])
}

fn message(id: u16, question: &[u8], reply: Reply) -> Option<Vec<u8>> {
    let (rcode, addresses) = match reply {
        Reply::Addresses(addresses) => (0, addresses),
        Reply::Rcode(rcode) => (rcode, Vec::new()),
        Reply::Silence => return None,
    };
    let mut message = id.to_be_bytes().to_vec();
    // A response to a query with recursion desired and available.
    message.extend([0x81, 0x80 | rcode, 0, 1, 0, u8::try_from(addresses.len()).unwrap(), 0, 0, 0, 0]);
    message.extend(question);
    for address in addresses {
        let (record_type, octets) = match address {
            IpAddr::V4(ip) => (A, ip.octets().to_vec()),
            IpAddr::V6(ip) => (AAAA, ip.octets().to_vec()),
        };
        // The name of the question, class IN, one minute.
        message.extend([0xc0, 12]);
        message.extend(record_type.to_be_bytes());
        message.extend([0, 1, 0, 0, 0, 60, 0, u8::try_from(octets.len()).unwrap()]);
        message.extend(octets);
    }
    Some(message)
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn addresses(record_type: u16) -> Reply {
    Reply::Addresses(vec![if record_type == A { ip("192.0.2.1") } else { ip("2001:db8::1") }])
}

fn failure(rcode: &'static str) -> Answer {
    Err(ResolveError::Rcode(rcode.into()))
}

#[tokio::test]
async fn names_have_the_addresses_of_both_families() {
    let server = Server::start(|_, record_type| addresses(record_type)).await;
    let mut found = server.resolver(|_| ()).resolve("both.example", &Holder::Unknown).await.unwrap();
    found.sort();
    assert_eq!(found, [ip("192.0.2.1"), ip("2001:db8::1")]);
}

#[tokio::test]
async fn names_are_absolute_with_or_without_a_final_dot() {
    let server = Server::start(|_, _| Reply::Rcode(3)).await;
    let resolver = server.resolver(|_| ());
    for name in ["single", "two.labels."] {
        assert_eq!(resolver.resolve(name, &Holder::Unknown).await, failure("NXDOMAIN"));
    }
    let queries = server.queries.lock().unwrap().clone();
    assert_eq!(queries.len(), 4, "{queries:?}");
    assert!(queries.iter().all(|query| ["single", "two.labels"].contains(&&query.1[..])), "{queries:?}");
}

#[tokio::test]
async fn one_address_family_suffices_if_the_other_fails_or_is_silent() {
    let server = Server::start(|name, record_type| match (name, record_type) {
        ("four.example", A) | ("six.example", AAAA) => addresses(record_type),
        ("four.example", _) => Reply::Rcode(2),
        _ => Reply::Silence,
    })
    .await;
    let resolver = server.resolver(|_| ());
    let (four, six) = tokio::join!(
        resolver.resolve("four.example", &Holder::Unknown),
        resolver.resolve("six.example", &Holder::Unknown)
    );
    assert_eq!((four, six), (Ok(vec![ip("192.0.2.1")]), Ok(vec![ip("2001:db8::1")])));
}

#[tokio::test]
async fn errors_of_name_servers_are_named_and_kept_briefly() {
    let cases = [
        ("nodata.example", "NOERROR"),
        ("formerr.example", "FORMERR"),
        ("servfail.example", "SERVFAIL"),
        ("nxdomain.example", "NXDOMAIN"),
        ("notimp.example", "NOTIMP"),
        ("refused.example", "REFUSED"),
        ("yxdomain.example", "RCODE6"),
    ];
    let server = Server::start(move |name, _| {
        let rcode = cases.iter().position(|case| case.0 == name).unwrap();
        Reply::Rcode(u8::try_from(rcode).unwrap())
    })
    .await;
    let resolver = server.resolver(|_| ());
    for (name, rcode) in cases {
        assert_eq!(resolver.resolve(name, &Holder::Unknown).await, failure(rcode));
    }
    let queries = server.queries(A);
    for (name, rcode) in cases {
        assert_eq!(resolver.resolve(name, &Holder::Unknown).await, failure(rcode));
    }
    assert_eq!(server.queries(A), queries);
    let counters = resolver.counters();
    assert_eq!((counters.names.get(), counters.cached.get(), counters.negative.get()), (14, 7, 14));
}

#[tokio::test]
async fn silence_ends_in_a_timeout_that_is_kept_for_a_while() {
    let server = Server::start(|_, _| Reply::Silence).await;
    let resolver = server.resolver(|settings| settings.timeout = Duration::from_millis(200));
    for _ in 0..2 {
        assert_eq!(resolver.resolve("silent.example", &Holder::Unknown).await, Err(ResolveError::Timeout));
    }
    let counters = resolver.counters();
    assert_eq!((counters.timeouts.get(), counters.cached.get()), (2, 1));
}

#[tokio::test]
async fn one_user_leaves_places_for_the_look_ups_of_others() {
    let server = Server::start(|name, record_type| match name.starts_with("silent") {
        true => Reply::Silence,
        false => addresses(record_type),
    })
    .await;
    let resolver = server.resolver(|settings| settings.lookups_in_flight = 256);
    let [alice, bob, carol] = ["alice", "bob", "carol"].map(|name| Holder::User(name.into()));
    let names: Vec<_> = (0..260).map(|number| format!("silent{number}.example")).collect();
    let mut asked: Vec<_> = names.iter().map(|name| Box::pin(resolver.resolve(name, &alice))).collect();
    for answer in &mut asked {
        assert!(futures::poll!(answer).is_pending());
    }
    for (user, name) in [(&bob, "one.example"), (&carol, "two.example"), (&bob, "three.example")] {
        assert!(resolver.resolve(name, user).await.is_ok(), "{name}");
    }
    // A task yields after 128 answers, the limit of its budget.
    let refused = asked.iter_mut().filter_map(|answer| tokio::task::unconstrained(answer).now_or_never());
    assert_eq!(refused.filter(|answer| *answer == Err(ResolveError::Overloaded)).count(), 260 - 128);
    assert_eq!(resolver.counters().overloaded.get(), 132);
}

#[tokio::test]
async fn identical_lookups_are_one_query_per_type() {
    let server = Server::start(|_, record_type| addresses(record_type)).await;
    let resolver = server.resolver(|settings| settings.lookups_in_flight = 1);
    let answers = join_all((0..100).map(|_| resolver.resolve("Same.Example", &Holder::Unknown))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    resolver.resolve("same.example.", &Holder::Unknown).await.unwrap();
    assert_eq!((server.queries(A), server.queries(AAAA)), (1, 1));
    let counters = resolver.counters();
    assert_eq!(counters.names.get(), 101);
    assert_eq!(counters.joined.get() + counters.cached.get(), 100);
}

#[tokio::test]
async fn names_beyond_the_limit_are_refused_at_once_until_there_is_room() {
    let server = Server::start(|name, record_type| match name {
        "silent.example" => Reply::Silence,
        _ => addresses(record_type),
    })
    .await;
    let resolver = server.resolver(|settings| {
        settings.lookups_in_flight = 1;
        settings.timeout = Duration::from_millis(200);
    });
    let mut silent = pin!(resolver.resolve("silent.example", &Holder::Unknown));
    assert!(futures::poll!(&mut silent).is_pending());
    assert_eq!(resolver.resolve("other.example", &Holder::Unknown).await, Err(ResolveError::Overloaded));
    // A name whose lookup is in flight needs no place of its own.
    let joined = resolver.resolve("silent.example", &Holder::Unknown).await;
    assert_eq!((silent.await, joined), (Err(ResolveError::Timeout), Err(ResolveError::Timeout)));
    assert!(resolver.resolve("other.example", &Holder::Unknown).await.is_ok());
    let counters = resolver.counters();
    assert_eq!((counters.overloaded.get(), counters.joined.get()), (1, 1));
}

#[tokio::test]
async fn a_lookup_serves_those_who_still_wait_after_others_gave_up() {
    // Silence for one family keeps the lookup in flight until all have asked.
    let server = Server::start(|_, record_type| match record_type {
        A => addresses(A),
        _ => Reply::Silence,
    })
    .await;
    let resolver = server.resolver(|_| ());
    let mut given_up: Vec<_> = (0..100).map(|_| Box::pin(resolver.resolve("slow.example", &Holder::Unknown))).collect();
    for asker in &mut given_up {
        assert!(futures::poll!(asker).is_pending());
    }
    drop(given_up);
    assert_eq!(resolver.resolve("slow.example", &Holder::Unknown).await, Ok(vec![ip("192.0.2.1")]));
    assert_eq!((server.queries(A), resolver.counters().joined.get()), (1, 100));
}

#[tokio::test]
async fn localhost_and_the_names_below_it_are_loopback_without_a_query() {
    let server = Server::start(|_, _| Reply::Rcode(3)).await;
    let resolver = server.resolver(|_| ());
    for name in ["localhost", "LOCALHOST.", "any.localhost"] {
        let mut found = resolver.resolve(name, &Holder::Unknown).await.unwrap();
        found.sort();
        assert_eq!(found, [ip("127.0.0.1"), ip("::1")]);
    }
    assert!(server.queries.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_answer_has_at_most_eight_addresses_of_a_family() {
    let server = Server::start(|_, record_type| match record_type {
        A => Reply::Addresses((1..=20).map(|last| Ipv4Addr::new(192, 0, 2, last).into()).collect()),
        _ => Reply::Rcode(0),
    })
    .await;
    assert_eq!(server.resolver(|_| ()).resolve("many.example", &Holder::Unknown).await.unwrap().len(), 8);
}

#[tokio::test]
async fn an_invalid_name_fails_without_a_query() {
    let server = Server::start(|_, _| Reply::Rcode(3)).await;
    let resolver = server.resolver(|_| ());
    for name in ["a..example".to_owned(), "a".repeat(64), ["a"; 200].join(".")] {
        assert_eq!(resolver.resolve(&name, &Holder::Unknown).await, Err(ResolveError::Failed), "{name}");
    }
    assert!(server.queries.lock().unwrap().is_empty());
    assert_eq!(resolver.counters().failed.get(), 3);
}

#[test]
fn the_family_with_a_route_comes_first() {
    let family = |address, seconds| Ok((vec![ip(address)], Duration::from_secs(seconds)));
    let both = |ipv6_first| merge(family("192.0.2.1", 9), family("2001:db8::1", 7), move || ipv6_first);
    assert_eq!(both(true), (Ok(vec![ip("2001:db8::1"), ip("192.0.2.1")]), Duration::from_secs(7)));
    assert_eq!(both(false), (Ok(vec![ip("192.0.2.1"), ip("2001:db8::1")]), Duration::from_secs(7)));
}

#[test]
fn addresses_are_kept_briefly_while_the_other_family_fails() {
    let kept = |ipv6| merge(Ok((vec![ip("192.0.2.1")], Duration::from_secs(600))), Err(ipv6), || true).1;
    assert_eq!(kept(NO_ADDRESSES), Duration::from_secs(600));
    assert_eq!(kept(ResolveError::Timeout), NEGATIVE_TTL);
    assert_eq!(kept(ResolveError::Rcode("SERVFAIL".into())), NEGATIVE_TTL);
}

#[test]
fn an_error_says_more_than_the_absence_of_addresses() {
    let merged = |ipv4, ipv6| merge(Err(ipv4), Err(ipv6), || true);
    let servfail = || ResolveError::Rcode("SERVFAIL".into());
    assert_eq!(merged(NO_ADDRESSES, servfail()), (Err(servfail()), NEGATIVE_TTL));
    assert_eq!(merged(servfail(), NO_ADDRESSES), (Err(servfail()), NEGATIVE_TTL));
    assert_eq!(merged(NO_ADDRESSES, ResolveError::Timeout), (Err(ResolveError::Timeout), NEGATIVE_TTL));
}
