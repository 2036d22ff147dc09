//! The outgoing devices of packets: the known features of each, and the device toward a peer.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use parking_lot::RwLock;
use s2n_quic_platform::message::default::Handle;
use tokio::sync::mpsc;

/// A network device, as far as messages are concerned.
#[derive(Debug)]
pub struct Device {
    name: String,
    keeps_departures: AtomicBool,
}

impl Device {
    /// Creates a device. Nothing but its name is known: messages carry departures.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), keeps_departures: AtomicBool::new(true) }
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether its queueing discipline releases packets at their departures, as `fq` does.
    #[must_use]
    pub fn keeps_departures(&self) -> bool {
        self.keeps_departures.load(Relaxed)
    }

    /// Sets whether it keeps departures; returns whether that changed.
    pub fn set_keeps_departures(&self, keeps: bool) -> bool {
        self.keeps_departures.swap(keeps, Relaxed) != keeps
    }
}

/// The remote address of packets, and the local one.
pub type AddressPair = (IpAddr, IpAddr);

/// How many address pairs are remembered; at this number all are forgotten and asked for again.
const MAX_ROUTES: usize = 65_536;

/// How many questions may wait; beyond that, a later packet asks again.
const MAX_QUESTIONS: usize = 1_024;

/// Finds the device of this host that leads to a peer. Clones share one cache.
///
/// Until the first answer arrives, the device is unknown and departures are written. This does no harm where they are
/// ignored, because nothing is handed over more than 2 ms ahead. When routes change, the last answer counts until the next one.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    routes: Arc<RouteCache>,
    /// Without it, all devices stay unknown.
    questions: Option<mpsc::Sender<AddressPair>>,
    /// The device that the socket is bound to, whatever the routes prefer.
    bound: Option<Arc<str>>,
    /// The address that the socket is bound to.
    source: Option<IpAddr>,
}

impl Devices {
    /// Returns devices that are asked for when a packet leaves for a new peer, the cache that takes the answers, and
    /// the questions. The questions end with the last clone of the devices.
    #[must_use]
    pub fn with_questions() -> (Self, Arc<RouteCache>, mpsc::Receiver<AddressPair>) {
        let (questions, asked) = mpsc::channel(MAX_QUESTIONS);
        let routes = Arc::<RouteCache>::default();
        (Self { routes: routes.clone(), questions: Some(questions), bound: None, source: None }, routes, asked)
    }

    /// The same for packets of a socket that is bound to a device, to a local address, or both.
    #[must_use]
    pub fn of_socket(self, device: Option<&str>, address: IpAddr) -> Self {
        Self {
            bound: device.map(Into::into),
            source: Some(address).filter(|address| !address.is_unspecified()),
            ..self
        }
    }

    /// Returns the device that packets on `path` leave by. If it is not known yet, asks for it.
    #[must_use]
    pub fn toward(&self, path: &Handle) -> Arc<Device> {
        self.find(path, true)
    }

    /// The same without asking.
    #[must_use]
    pub fn known_toward(&self, path: &Handle) -> Arc<Device> {
        self.find(path, false)
    }

    fn find(&self, path: &Handle, asks: bool) -> Arc<Device> {
        let Some(questions) = &self.questions else {
            return self.unknown();
        };
        if let Some(bound) = &self.bound {
            return self.routes.named.read().get(&**bound).cloned().unwrap_or_else(|| self.unknown());
        }
        let ip = |address| SocketAddr::from(address).ip();
        let from = ip(path.local_address.0);
        let route = (ip(path.remote_address.0), self.source.filter(|_| from.is_unspecified()).unwrap_or(from));
        let known = self.routes.known.read().get(&route).cloned();
        let (device, is_current) = match known {
            Some(Known { device, is_current }) => (device, is_current),
            None => (self.unknown(), false),
        };
        if asks && !is_current {
            // Stored before the question is sent, so that it never replaces the answer.
            self.routes.answer(route, device.clone());
            if questions.try_send(route).is_err() {
                self.routes.fail(route);
            }
        }
        device
    }

    /// Returns the placeholder for a device that has not been found.
    #[must_use]
    pub fn unknown(&self) -> Arc<Device> {
        self.routes.unknown.clone()
    }
}

/// The device toward a peer.
#[derive(Clone, Debug)]
struct Known {
    device: Arc<Device>,
    /// False if routes have changed since, and the next packet has to ask again.
    is_current: bool,
}

/// The devices found so far, by address pair.
#[derive(Debug)]
pub struct RouteCache {
    unknown: Arc<Device>,
    known: RwLock<HashMap<AddressPair, Known>>,
    /// All devices, by name.
    named: RwLock<HashMap<String, Arc<Device>>>,
}

impl Default for RouteCache {
    fn default() -> Self {
        Self { unknown: Arc::new(Device::new("unknown")), known: RwLock::default(), named: RwLock::default() }
    }
}

impl RouteCache {
    /// Stores the device that packets for `route` leave by.
    pub fn answer(&self, route: AddressPair, device: Arc<Device>) {
        let mut known = self.known.write();
        if known.len() >= MAX_ROUTES {
            known.clear();
        }
        known.insert(route, Known { device, is_current: true });
    }

    /// Notes that there is no answer for a route: the next packet asks again.
    pub fn fail(&self, route: AddressPair) {
        if let Some(known) = self.known.write().get_mut(&route) {
            known.is_current = false;
        }
    }

    /// Notes which devices there are.
    pub fn list<'a>(&self, devices: impl Iterator<Item = &'a Arc<Device>>) {
        *self.named.write() = devices.map(|device| (device.name().to_owned(), device.clone())).collect();
    }

    /// Notes that routes have changed: the next packet of each asks again.
    pub fn outdate(&self) {
        self.known.write().values_mut().for_each(|known| known.is_current = false);
    }
}

#[cfg(test)]
mod tests {
    use s2n_quic_core::path::{Handle as _, RemoteAddress};

    use super::*;

    fn path(to: &str) -> Handle {
        Handle::from_remote_address(RemoteAddress(to.parse::<SocketAddr>().unwrap().into()))
    }

    #[test]
    fn a_new_peer_is_asked_for_once_and_unknown_until_the_answer() {
        let (devices, routes, mut asked) = Devices::with_questions();
        let (peer, other) = (path("192.0.2.1:443"), path("[2001:db8::1]:443"));
        for path in [peer, peer, other] {
            assert_eq!(devices.toward(&path).name(), "unknown");
        }
        let (route, _) = (asked.try_recv().unwrap(), asked.try_recv().unwrap());
        assert_eq!(route.0, IpAddr::from([192, 0, 2, 1]));
        assert!(asked.try_recv().is_err());
        routes.answer(route, Arc::new(Device::new("eth0")));
        assert_eq!(devices.toward(&peer).name(), "eth0");
        assert_eq!(devices.toward(&other).name(), "unknown");
    }

    #[test]
    fn a_peer_keeps_its_device_after_a_change_of_routes_until_the_kernel_answers_again() {
        let (devices, routes, mut asked) = Devices::with_questions();
        let peer = path("192.0.2.1:443");
        _ = devices.toward(&peer);
        let route = asked.try_recv().unwrap();
        routes.answer(route, Arc::new(Device::new("eth0")));
        routes.outdate();
        assert_eq!(devices.known_toward(&peer).name(), "eth0");
        for _ in 0..2 {
            assert_eq!(devices.toward(&peer).name(), "eth0");
            assert_eq!(devices.toward(&peer).name(), "eth0");
            assert_eq!(asked.try_recv().unwrap(), route);
            assert!(asked.try_recv().is_err());
            // Without an answer, the next packet asks again.
            routes.fail(route);
        }
        _ = devices.toward(&peer);
        routes.answer(asked.try_recv().unwrap(), Arc::new(Device::new("wwan0")));
        assert_eq!(devices.toward(&peer).name(), "wwan0");
        assert!(asked.try_recv().is_err());
    }

    #[test]
    fn packets_of_no_connection_ask_for_nothing_and_leave_nothing_behind() {
        let (devices, routes, mut asked) = Devices::with_questions();
        let peer = path("192.0.2.1:443");
        assert_eq!(devices.known_toward(&peer).name(), "unknown");
        assert!(asked.try_recv().is_err() && routes.known.read().is_empty());
        _ = devices.toward(&peer);
        routes.answer(asked.try_recv().unwrap(), Arc::new(Device::new("eth0")));
        assert_eq!(devices.known_toward(&peer).name(), "eth0");
    }

    #[test]
    fn a_socket_that_is_bound_leaves_by_its_device_or_is_asked_for_with_its_address() {
        let (devices, routes, mut asked) = Devices::with_questions();
        let (peer, any) = (path("192.0.2.1:443"), IpAddr::from([0; 4]));
        let bound = devices.clone().of_socket(Some("wwan0"), any);
        assert_eq!(bound.toward(&peer).name(), "unknown", "nobody has listed devices yet");
        routes.list([Arc::new(Device::new("eth0")), Arc::new(Device::new("wwan0"))].iter());
        assert_eq!(bound.toward(&peer).name(), "wwan0");
        assert!(asked.try_recv().is_err(), "the routes have no say");
        let ours = IpAddr::from([192, 0, 2, 10]);
        _ = devices.clone().of_socket(None, ours).toward(&peer);
        assert_eq!(asked.try_recv().unwrap(), (IpAddr::from([192, 0, 2, 1]), ours));
        _ = devices.of_socket(None, any).toward(&peer);
        assert_eq!(asked.try_recv().unwrap().1, any);
    }

    #[test]
    fn remembered_routes_and_open_questions_are_bounded() {
        let (devices, routes, mut asked) = Devices::with_questions();
        for number in 0..MAX_ROUTES as u32 + 10 {
            _ = devices.toward(&path(&format!("[2001:db8::{:x}:{:x}]:1", number >> 16, number & 0xffff)));
            let route = (IpAddr::from(number.to_be_bytes()), IpAddr::from([0; 4]));
            routes.answer(route, devices.unknown());
        }
        assert!(routes.known.read().len() <= MAX_ROUTES);
        assert_eq!(std::iter::from_fn(|| asked.try_recv().ok()).count(), MAX_QUESTIONS);
    }
}
