//! From a request to a connected target, or to the refusal that explains why not.

use std::{
    mem,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use config::targets::{Denied, Protocol};
use masque::{
    continuation::TunnelKey,
    h3::RequestHead,
    priority::Priority,
    request::{self, Host, Refusal, TunnelRequest},
};
use pacing::descriptor::for_tunnels;
use quic::{
    class::{Class, Terms},
    clock::Clock,
};
use role::{admitted::frame_rates, holder::Holder, limits::GaugePlace};
use socket2::{Domain, SockRef};

use super::{
    Relay, RelayClient, RelayMetrics, Rules,
    accounts::{Full, KeyedPlace, UserPlace},
    connect::{self, ConnectedTarget},
    continuable::KeyedTunnel,
    limit_hits::DESCRIPTORS_PER_USER,
    tunnels::TunnelOrigin,
};
use crate::{
    auth::{AuthError, User},
    resolve::ResolveError,
};

/// How long a request may wait for its turn within its user's rate.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Waiting requests continue together, at multiples of this interval: waking a task and the packets that this causes cost
/// more than the request itself.
const WAIT_NS: u64 = 20_000_000;

/// A request that was admitted.
pub struct Admitted {
    /// The connected target.
    pub target: ConnectedTarget,
    /// The key by which the client may continue the tunnel elsewhere.
    pub key: Option<TunnelKey>,
    /// The earlier tunnel that it continues, if any.
    pub continued: Option<KeyedTunnel>,
    /// The properties of the request, and the address to which the target is connected.
    pub asked: TunnelOrigin,
    /// The places that the tunnel takes on its connection and on its user's account.
    pub places: HeldPlaces,
    /// The terms of service for payloads from the target.
    pub terms: Terms,
    /// When the tunnel ends because its user's credentials expire.
    pub expires: Option<SystemTime>,
}

/// What is known of a request before the decision.
#[derive(Debug, Default)]
pub struct Attempt {
    /// Whether it has had its turn within its user's rate.
    pub has_turn: bool,
    /// The user, once known.
    pub user: Option<Arc<str>>,
    /// The protocol to the target, and the target, once known.
    pub target: Option<(Protocol, masque::target::Target)>,
}

/// Why a request gets nothing.
#[derive(Debug)]
pub enum NotAdmitted {
    /// It is refused, which the client is told.
    Refused(Refusal),
    /// Its turn within its user's rate would be too far away.
    TooMany,
}

impl From<Refusal> for NotAdmitted {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The places of a tunnel, released when it ends.
pub struct HeldPlaces {
    _connection: GaugePlace,
    /// On the account of the user, or of the client's network.
    pub user: UserPlace,
}

/// Identifies the client, before anything else, so that a stranger learns nothing from how a request is refused. The user
/// is noted in `attempt`. Returns `None` if the listener requires no credentials.
///
/// # Errors
/// The refusal for the response.
pub fn identify(
    relay: &Relay,
    rules: &Rules,
    client: &RelayClient,
    head: &RequestHead,
    attempt: &mut Attempt,
) -> Result<Option<User>, Refusal> {
    let user = authenticate(rules, client, head, SystemTime::now())?;
    attempt.user = user.as_ref().map(|user| user.name.clone());
    if let Some(user) = &user {
        admit_client(relay, rules, client, &Holder::User(user.name.clone()))?;
        if client.user.set(user.name.clone()).is_ok() {
            relay.schedule(client);
        }
    }
    Ok(user)
}

/// Waits until the user of a known client may make another request, unless this one has had its turn. A stranger has its own budget: its
/// request has its turn when it has made the client known.
///
/// # Errors
/// The turn would be too far away; the error comes only after the longest wait, so that the client gains nothing from it.
pub async fn await_turn(relay: &Relay, client: &RelayClient, attempt: &mut Attempt) -> Result<(), NotAdmitted> {
    if !client.standing.is_known() || mem::replace(&mut attempt.has_turn, true) {
        return Ok(());
    }
    let (clock, account) = (Clock::system(), relay.accounts.of(&Holder::of(client.user(), client.address)));
    let (now_ns, longest_ns) = ((clock.now_ns)(), LONGEST_WAIT.as_nanos() as u64);
    let turn_ns = account.take_turn(now_ns, relay.rules().limits.requests_per_second, longest_ns);
    let until_ns = turn_ns.unwrap_or(now_ns + longest_ns);
    if until_ns > now_ns {
        relay.limit_hits.note("requests_per_second");
        (clock.sleep_until)(until_ns.next_multiple_of(WAIT_NS)).await;
    }
    turn_ns.map(|_| ()).ok_or(NotAdmitted::TooMany)
}

/// Takes a place for the connection among those of `holder`, unless it has one; from then on, the client is no stranger.
///
/// # Errors
/// The refusal for the response, after which the connection has to end: the holder has no more places.
pub fn admit_client(relay: &Relay, rules: &Rules, client: &RelayClient, holder: &Holder) -> Result<(), Refusal> {
    let mut place = client.place.lock();
    if place.is_none() {
        let limits = &rules.limits;
        let Some(taken) = relay.accounts.connect(holder, limits.connections_per_user as usize) else {
            relay.limit_hits.note("connections_per_user");
            return Err(Refusal::ConnectionLimitReached);
        };
        client.standing.admit_as(taken.account.frames.clone(), frame_rates(limits));
        *place = Some(taken);
    }
    Ok(())
}

/// Takes the places for a request for a model, as for a tunnel of the same user.
///
/// # Errors
/// The refusal for the response.
pub fn admit_model(
    relay: &Relay,
    rules: &Rules,
    client: &RelayClient,
    user: Option<&User>,
) -> Result<HeldPlaces, Refusal> {
    let holder = Holder::of(user.map(|user| &user.name), client.address);
    let most = most_tunnels(rules, user);
    let places = take_places(relay, rules, client, (&holder, most), None, SystemTime::now())?;
    // Where no credentials are required, every client with a permitted request counts as a user.
    admit_client(relay, rules, client, &holder)?;
    Ok(places)
}

/// Returns how many tunnels the holder may have at once: as many as configured, but not for more than half of the descriptors.
fn most_tunnels(rules: &Rules, user: Option<&User>) -> usize {
    let configured = user.map_or(rules.limits.tunnels_per_user as usize, |user| user.max_tunnels);
    configured.min(half_of_descriptors())
}

/// Returns how many tunnels take half of the descriptors that all tunnels may take: each has a socket.
fn half_of_descriptors() -> usize {
    usize::try_from(for_tunnels() / 2).unwrap_or(usize::MAX)
}

/// Decides about a request for a tunnel and connects to its target.
///
/// `signal` is the priority that the client has set since it sent the request; the target is noted in `attempt`.
///
/// # Errors
/// See [`NotAdmitted`].
pub async fn admit(
    relay: &Relay,
    rules: &Rules,
    client: &RelayClient,
    (head, user): (&RequestHead, Option<User>),
    signal: Option<Priority>,
    attempt: &mut Attempt,
) -> Result<Admitted, NotAdmitted> {
    let now = SystemTime::now();
    let holder = Holder::of(user.as_ref().map(|user| &user.name), client.address);
    let request = request::parse(head, &rules.templates)?;
    let target = request.target();
    let protocol = match request {
        TunnelRequest::ConnectUdp(_) => Protocol::Udp,
        TunnelRequest::ConnectTcp(_) => Protocol::Tcp,
    };
    attempt.target = Some((protocol, target.clone()));
    let key = TunnelKey::from_fields(&head.fields).filter(|_| protocol == Protocol::Udp);
    let user_name = user.as_ref().map(|user| &*user.name);
    let found = key.map(|key| relay.continuable.find(key, user_name, target));
    let earlier = found.as_ref().and_then(|found| found.as_ref().ok()).map(|earlier| &earlier.place);
    let most = most_tunnels(rules, user.as_ref());
    let mut places = take_places(relay, rules, client, (&holder, most), earlier, now)?;
    let (name, addresses) = match &target.host {
        Host::Ip(ip) => (None, vec![*ip]),
        Host::Name(name) => {
            rules.targets.check_name(protocol, name, target.port).map_err(refuse_name)?;
            let addresses = match &found {
                Some(Ok(earlier)) => vec![earlier.next_hop.ip()],
                _ => relay.resources.resolver.resolve(name, &holder).await.map_err(refuse_unresolved)?,
            };
            (Some(&name[..]), addresses)
        }
    };
    let mut refusal = Refusal::Unroutable;
    let mut permitted = Vec::new();
    for ip in addresses {
        let own = rules.targets.judged_by(ip).chain([ip]).any(|ip| relay.resources.host_addresses.contains(ip));
        match rules.targets.check(protocol, name, ip, target.port, own) {
            Ok(()) => permitted.push(SocketAddr::new(ip, target.port)),
            Err(denied) => refusal = refuse_address(denied),
        }
    }
    if permitted.is_empty() {
        return Err(refusal.into());
    }
    // Where no credentials are required, every client with a permitted request counts as a user.
    admit_client(relay, rules, client, &holder)?;
    await_turn(relay, client, attempt).await?;
    let joined = found.map(|found| found.and_then(KeyedTunnel::join));
    joined.iter().for_each(|joined| relay.resources.metrics.continuations.note(joined));
    let expires = user.as_ref().and_then(|user| user.expires);
    let (user, name) = (user.map(|user| user.name), name.map(Box::<str>::from));
    let origin = |next_hop: SocketAddr| TunnelOrigin {
        user: user.clone(),
        name: name.clone(),
        next_hop,
        translated: rules.targets.translated(next_hop.ip()),
        protocol,
        listener: client.listener,
    };
    // A TCP socket has the marks of its class from its first packet on.
    let prepare = |socket: &SockRef<'_>, address| {
        let class = relay.classes().classify(&origin(address).subject()).clone();
        mark(socket, None, &class, &relay.resources.metrics);
        class
    };
    // The connection goes to an address that was checked.
    let (next_hop, target, continued, marked) = match joined {
        Some(Ok((earlier, target))) => (earlier.next_hop, ConnectedTarget::Udp(target), Some(earlier), None),
        _ => {
            if places.user.is_shared() {
                // It does not continue the tunnel whose place it has.
                places.user = take_user_place(relay, (&holder, most), None, now)?;
            }
            let (next_hop, target, marked) = connect::first(relay, rules, protocol, permitted, prepare).await?;
            (next_hop, target, None, marked)
        }
    };
    let asked = origin(next_hop);
    let signal = signal.or_else(|| Priority::from_fields(&head.fields));
    let user = Some(places.user.account.rate_down().clone());
    let terms = Terms { user, ..relay.classes().classify(&asked.subject()).terms(signal.as_ref()) };
    // The pump of a continued tunnel marks the socket when it receives.
    if continued.is_none() {
        mark(&target.socket(), marked.as_deref(), &terms.class, &relay.resources.metrics);
    }
    Ok(Admitted { target, key, continued, asked, places, terms, expires })
}

fn authenticate(
    rules: &Rules,
    client: &RelayClient,
    head: &RequestHead,
    now: SystemTime,
) -> Result<Option<User>, Refusal> {
    let refuse = |error| match error {
        AuthError::Missing => Refusal::CredentialsMissing,
        AuthError::Invalid => Refusal::CredentialsInvalid,
        AuthError::Expired => Refusal::CredentialsExpired,
    };
    let auth = rules.auth(client.listener);
    let (tokens, certificates) = (auth.accepts_tokens(), auth.accepts_certificates());
    if !tokens && !certificates {
        return Ok(None);
    }
    let by_certificate = match certificates {
        true => rules.users.by_certificate(client.certificate.as_deref(), now),
        false => Err(AuthError::Missing),
    };
    match by_certificate {
        Ok(user) => Ok(Some(user)),
        // A client with an unknown certificate receives that error rather than a request for a token.
        Err(unknown) if tokens => rules.users.by_token(&head.fields, now).map(Some).map_err(|error| match unknown {
            AuthError::Invalid | AuthError::Expired if error == AuthError::Missing => Refusal::CertificateUnknown,
            _ => refuse(error),
        }),
        Err(AuthError::Missing) => Err(Refusal::CertificateMissing),
        Err(_) => Err(Refusal::CertificateUnknown),
    }
}

fn take_places(
    relay: &Relay,
    rules: &Rules,
    client: &RelayClient,
    of_holder: (&Holder, usize),
    earlier: Option<&KeyedPlace>,
    now: SystemTime,
) -> Result<HeldPlaces, Refusal> {
    let connection = client.tunnels.take(rules.limits.tunnels_per_connection as usize);
    let Some(connection) = connection else {
        relay.limit_hits.note("tunnels_per_connection");
        return Err(Refusal::TunnelLimitReached);
    };
    let user = take_user_place(relay, of_holder, earlier, now)?;
    Ok(HeldPlaces { _connection: connection, user })
}

/// Takes a place among the tunnels of a user, who may have so many of them; a tunnel may share the place of an
/// `earlier` one that it continues, as far as the descriptors suffice.
fn take_user_place(
    relay: &Relay,
    of_holder: (&Holder, usize),
    earlier: Option<&KeyedPlace>,
    now: SystemTime,
) -> Result<UserPlace, Refusal> {
    let earlier = earlier.filter(|_| may_share_places(of_holder.1));
    relay.accounts.open_after(earlier, of_holder, now).map_err(|full| match full {
        Full::Tunnels => {
            let is_configured = of_holder.1 < half_of_descriptors();
            relay.limit_hits.note(if is_configured { "tunnels_per_user" } else { DESCRIPTORS_PER_USER });
            Refusal::TunnelLimitReached
        }
        Full::Quota { seconds_left } => {
            relay.limit_hits.note("monthly_quota");
            Refusal::QuotaUsedUp { retry_after_s: seconds_left }
        }
    })
}

/// Whether two tunnels may share each of the places of a user with `most` of them: each tunnel has a descriptor, and all of them together
/// get half.
fn may_share_places(most: usize) -> bool {
    most <= half_of_descriptors() / 2
}

fn refuse_name(denied: Denied) -> Refusal {
    match denied {
        Denied::Port => Refusal::PortProhibited,
        _ => Refusal::NameProhibited,
    }
}

fn refuse_address(denied: Denied) -> Refusal {
    match denied {
        Denied::Port => Refusal::PortProhibited,
        _ => Refusal::AddressProhibited,
    }
}

fn refuse_unresolved(error: ResolveError) -> Refusal {
    match error {
        ResolveError::Timeout => Refusal::DnsTimeout,
        ResolveError::Overloaded => Refusal::Overloaded { retry_after_s: 1 },
        ResolveError::Rcode(rcode) => Refusal::DnsError { rcode: Some(rcode) },
        ResolveError::Failed => Refusal::DnsError { rcode: None },
    }
}

/// Gives all packets to a target the DSCP and the mark of their class; `before` is the previous class, if any.
pub fn mark(socket: &SockRef<'_>, before: Option<&Class>, class: &Class, metrics: &RelayMetrics) {
    let [dscp_before, dscp] = [before, Some(class)].map(|class| class.and_then(|class| class.policy().dscp));
    if dscp != dscp_before {
        set_dscp(socket, dscp.unwrap_or_default());
    }
    if let Some(mark) = class.marks.to_targets
        && before.and_then(|before| before.marks.to_targets) != Some(mark)
        && socket.set_mark(mark).is_err()
    {
        metrics.unmarked_sockets.inc();
    }
}

/// Like [`mark`], for a socket that another tunnel may have marked.
pub fn mark_anew(socket: &SockRef<'_>, class: &Class, metrics: &RelayMetrics) {
    mark(socket, None, class, metrics);
    if class.policy().dscp.is_none() {
        set_dscp(socket, 0);
    }
}

/// Gives all packets to a target a DSCP (RFC 2474 §3).
fn set_dscp(socket: &SockRef<'_>, dscp: u8) {
    // The kernel preserves the ECN bits that TCP needs (`ip_sock_set_tos`).
    let traffic_class = u32::from(dscp) << 2;
    // IPv4-mapped addresses of targets are used as IPv4, so the socket's family is that of its packets.
    let marked = socket.domain().and_then(|domain| match domain {
        Domain::IPV4 => socket.set_tos_v4(traffic_class),
        _ => socket.set_tclass_v6(traffic_class),
    });
    if let Err(error) = marked {
        tracing::warn!(%error, dscp, "failed to set the DSCP of packets to a target");
    }
}

#[cfg(test)]
mod tests {
    use config::policy::Policy;
    use quic::class::{ClassMetrics, PolicyRole};
    use role::classes::Classes;
    use socket2::{Socket, Type};

    use super::*;

    #[test]
    fn no_user_has_tunnels_for_more_than_half_of_the_descriptors() {
        let text = "[relay]\ntemplates = [\"https://relay.example/{target_host}/{target_port}/\"]\nauth = \"none\"\n\
                    certificate = \"/c\"\nprivate_key = \"/k\"\nlimits.tunnels_per_user = 5";
        let rules = Rules::new(config::Config::from_toml(text).unwrap().relay.as_ref().unwrap());
        let user = |max_tunnels| User { name: "alice".into(), max_tunnels, expires: None };
        assert_eq!(most_tunnels(&rules, None), 5);
        assert_eq!(most_tunnels(&rules, Some(&user(3))), 3);
        let most = most_tunnels(&rules, Some(&user(usize::MAX)));
        assert!(2 * most as u64 <= for_tunnels() && most > 0, "{most}");
        assert!(!may_share_places(most), "these tunnels already take half");
        let shared = most / 2;
        assert!(may_share_places(shared) && !may_share_places(shared + 1));
    }

    #[test]
    fn a_socket_has_the_dscp_of_its_class_before_it_is_connected() {
        let policy = Policy::from_toml("[class.default]\ndscp = 46").unwrap();
        let classes = Classes::new(policy, PolicyRole::Relay, &ClassMetrics::default(), |_| Default::default());
        let metrics = RelayMetrics::default();
        let of = |domain| {
            // A host may lack IPv6.
            let socket = Socket::new(domain, Type::STREAM, None).ok()?;
            mark(&SockRef::from(&socket), None, classes.named(None), &metrics);
            Some(socket)
        };
        assert_eq!(of(Domain::IPV4).unwrap().tos_v4().unwrap(), 46 << 2);
        assert!(of(Domain::IPV6).is_none_or(|socket| socket.tclass_v6().unwrap() == 46 << 2));
    }
}
