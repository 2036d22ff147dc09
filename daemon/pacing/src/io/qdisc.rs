//! Follows through netlink which devices keep departures, by their queueing disciplines, and which routes lead to them.
//! Only reads; needs no rights.

use std::{collections::HashMap, sync::Arc, time::Duration};

use netlink::{
    Error, Group, Socket,
    core::{Nla as _, NlasIterator},
    message::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkMessage},
        route::RouteAttribute,
        tc::{TcAttribute, TcHandle, TcMessage, TcOption, TcStats2, TcXstats},
    },
    route_request, serves_queue,
};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};
use tokio::{
    runtime,
    sync::mpsc,
    time::{interval, sleep},
};

use super::device::{AddressPair, Device, Devices, RouteCache};
use crate::pacer::HORIZON_NS;

/// How often the counters of `fq` are read.
const COUNTERS_EVERY: Duration = Duration::from_secs(5);

/// How long to wait before a netlink socket that failed is opened again.
const PAUSE: Duration = Duration::from_secs(1);

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabel {
    device: String,
}

/// One counter of `fq` on one device.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FqLabel {
    device: String,
    what: &'static str,
}

/// Gauges of queueing disciplines.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    keeps: Family<DeviceLabel, Gauge>,
    fq: Family<FqLabel, Gauge>,
}

impl Gauges {
    /// Registers the gauges.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Whether a device's qdisc keeps departure times; where it does not, packets wait in this process";
        registry.register("device_keeps_departures", help, self.keeps.clone());
        registry.register("fq", "What fq counts on a device since it was installed", self.fq.clone());
    }
}

/// Receives, at every reading, each device's name and how far ahead the device keeps departures, in nanoseconds: 0 if it
/// keeps none, `u64::MAX` without a limit.
pub type DeviceListener = Box<dyn Fn(&str, u64) + Send + Sync>;

/// Follows the devices of this network namespace in a task of `runtime`, which ends when the last clone of the returned
/// `Devices` is dropped. Calls `listener` for every device after each change, and every five seconds.
#[must_use]
pub fn follow(gauges: Gauges, runtime: &runtime::Handle, listener: DeviceListener) -> Devices {
    let (devices, routes, questions) = Devices::with_questions();
    let follower = Follower { routes, gauges, listener, devices: HashMap::new(), is_first: true };
    runtime.spawn(follower.run(questions));
    devices
}

/// The netlink groups whose messages may change an answer.
const GROUPS: [Group; 4] = [Group::Link, Group::Tc, Group::Ipv4Route, Group::Ipv6Route];

/// How often to request a list that changes while the kernel writes it.
const TRIES: u32 = 5;

struct Follower {
    routes: Arc<RouteCache>,
    gauges: Gauges,
    listener: DeviceListener,
    /// By interface index.
    devices: HashMap<u32, Arc<Device>>,
    /// Whether no reading has been logged yet.
    is_first: bool,
}

impl Follower {
    async fn run(mut self, mut questions: mpsc::Receiver<AddressPair>) {
        loop {
            match Socket::open(&GROUPS) {
                Ok(socket) => match self.serve(socket, &mut questions).await {
                    Ok(()) => return,
                    Err(error) => {
                        tracing::warn!(%error, "messages about qdiscs were lost; reading all qdiscs again")
                    }
                },
                Err(error) => tracing::warn!(%error, "cannot watch changes of qdiscs"),
            }
            sleep(PAUSE).await;
        }
    }

    /// Answers questions and follows changes until all senders of questions are gone.
    async fn serve(&mut self, mut socket: Socket, questions: &mut mpsc::Receiver<AddressPair>) -> Result<(), Error> {
        self.read(&socket).await?;
        self.routes.outdate();
        let mut counters = interval(COUNTERS_EVERY);
        loop {
            tokio::select! {
                _ = counters.tick() => self.read(&socket).await?,
                route = questions.recv() => {
                    let Some(route) = route else { return Ok(()) };
                    self.find(&socket, route).await;
                }
                settled = socket.settled() => {
                    settled.map_err(Error::Socket)?;
                    self.read(&socket).await?;
                    self.routes.outdate();
                }
            }
        }
    }

    /// Reads all devices and their queueing disciplines.
    async fn read(&mut self, socket: &Socket) -> Result<(), Error> {
        let mut links = Vec::new();
        for link in list(socket, RouteNetlinkMessage::GetLink(LinkMessage::default())).await? {
            let RouteNetlinkMessage::NewLink(link) = link else { continue };
            let name = link.attributes.into_iter().find_map(|attribute| match attribute {
                LinkAttribute::IfName(name) => Some(name),
                _ => None,
            });
            links.push((link.header.index, name.unwrap_or_default()));
        }
        let mut qdiscs = HashMap::<u32, Vec<Qdisc>>::new();
        for qdisc in list(socket, RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default())).await? {
            let RouteNetlinkMessage::NewQueueDiscipline(qdisc) = qdisc else { continue };
            qdiscs.entry(qdisc.header.index as u32).or_default().push(Qdisc::from(qdisc));
        }
        self.follow_links(links);
        for (index, device) in &self.devices {
            self.judge(device, qdiscs.get(index).map_or(&[], Vec::as_slice));
        }
        if self.is_first {
            tracing::info!("{}", who_keeps_departures(self.devices.values().map(|device| &**device)));
        }
        self.is_first = false;
        Ok(())
    }

    /// Takes the indices and names of all devices, and forgets the devices that are gone or have another name now.
    fn follow_links(&mut self, links: Vec<(u32, String)>) {
        let mut devices = HashMap::new();
        for (index, name) in links {
            let known = self.devices.get(&index).filter(|known| known.name() == name).cloned();
            devices.insert(index, known.unwrap_or_else(|| Arc::new(Device::new(name))));
        }
        for (index, device) in std::mem::replace(&mut self.devices, devices) {
            if self.devices.get(&index).is_none_or(|now| now.name() != device.name()) {
                self.gauges.forget(device.name());
            }
        }
        self.routes.list(self.devices.values());
    }

    fn judge(&self, device: &Device, qdiscs: &[Qdisc]) {
        let horizon_ns = horizon_ns(qdiscs);
        let keeps = horizon_ns >= HORIZON_NS;
        if device.set_keeps_departures(keeps) && !self.is_first {
            tracing::info!("departures changed: {}", who_keeps_departures([device]));
        }
        let device = device.name();
        (self.listener)(device, horizon_ns);
        let label = DeviceLabel { device: device.to_owned() };
        self.gauges.keeps.get_or_create(&label).set(keeps.into());
        for (what, value) in fq_counters(qdiscs) {
            let label = FqLabel { device: device.to_owned(), what };
            let Some(value) = value else {
                self.gauges.fq.remove(&label);
                continue;
            };
            let more = value as i64 - self.gauges.fq.get_or_create(&label).set(value as i64);
            if what == HORIZON_DROPS && more > 0 && !self.is_first {
                tracing::warn!(device, packets = more, "fq drops packets whose departure is beyond its horizon");
            }
        }
    }

    /// Asks the kernel which device packets for `route` leave by; without an answer, the next packet asks again.
    async fn find(&self, socket: &Socket, route: AddressPair) {
        let answer = socket.ask(RouteNetlinkMessage::GetRoute(route_request(route.0, Some(route.1)))).await;
        let index = match answer {
            Ok(Some(RouteNetlinkMessage::NewRoute(message))) => {
                message.attributes.iter().find_map(|attribute| match attribute {
                    RouteAttribute::Oif(index) => Some(*index),
                    _ => None,
                })
            }
            _ => None,
        };
        match index.and_then(|index| self.devices.get(&index)) {
            Some(device) => self.routes.answer(route, device.clone()),
            None => self.routes.fail(route),
        }
    }
}

/// Reads a list; tries again, up to `TRIES` times in total, if it changes meanwhile.
async fn list(socket: &Socket, asked: RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>, Error> {
    let mut tries = 1;
    loop {
        let mut all = Vec::new();
        match socket.list(asked.clone(), |message| all.push(message)).await {
            Err(Error::Gaps) if tries < TRIES => tries += 1,
            result => return result.map(|()| all),
        }
    }
}

/// Describes on which devices the kernel keeps departures, and on which packets wait in this process.
fn who_keeps_departures<'a>(devices: impl IntoIterator<Item = &'a Device>) -> String {
    let (kernel, paced): (Vec<_>, Vec<_>) = devices.into_iter().partition(|device| device.keeps_departures());
    let by = |who: &str, devices: Vec<&Device>| {
        let mut names: Vec<_> = devices.into_iter().map(Device::name).collect();
        names.sort_unstable();
        (!names.is_empty()).then(|| format!("by {who} on {}", names.join(", ")))
    };
    let parts: Vec<_> = [by("the kernel", kernel), by("paced", paced)].into_iter().flatten().collect();
    match parts.is_empty() {
        true => "there is no device to keep departure times".to_owned(),
        false => format!("departure times are kept {}", parts.join(", ")),
    }
}

impl Gauges {
    fn forget(&self, device: &str) {
        self.keeps.remove(&DeviceLabel { device: device.to_owned() });
        for (what, _) in fq_counters(&[]) {
            self.fq.remove(&FqLabel { device: device.to_owned(), what });
        }
    }
}

/// A queueing discipline of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Qdisc {
    kind: String,
    handle: TcHandle,
    parent: TcHandle,
    /// How far ahead departures may be.
    horizon_ns: Option<u64>,
    /// Its counters, in the format of its kind.
    counters: Vec<u8>,
}

impl From<TcMessage> for Qdisc {
    fn from(message: TcMessage) -> Self {
        let (mut kind, mut horizon_ns, mut counters) = (String::new(), None, Vec::new());
        for attribute in message.attributes {
            match attribute {
                TcAttribute::Kind(name) => kind = name,
                TcAttribute::Options(options) => horizon_ns = fq_horizon_ns(&options),
                TcAttribute::Stats2(parts) => {
                    for part in parts {
                        if let TcStats2::App(TcXstats::Other(bytes)) = part {
                            counters = bytes;
                        }
                    }
                }
                _ => {}
            }
        }
        Self { kind, handle: message.header.handle, parent: message.header.parent, horizon_ns, counters }
    }
}

impl Qdisc {
    /// How far ahead it releases packets at departure times of CLOCK_MONOTONIC: `fq` drops packets beyond its horizon or
    /// releases them early. (`etf` uses CLOCK_TAI.)
    fn horizon_ns(&self) -> u64 {
        if self.kind == "fq" { self.horizon_ns.unwrap_or(u64::MAX) } else { 0 }
    }
}

/// Attribute of `fq` (include/uapi/linux/pkt_sched.h): its horizon in microseconds, since Linux 5.8.
const TCA_FQ_HORIZON: u16 = 14;

/// Reads the horizon from the options of an `fq`. The library does not parse these nested attributes.
fn fq_horizon_ns(options: &[TcOption]) -> Option<u64> {
    let [TcOption::Other(options)] = options else { return None };
    let mut bytes = vec![0; options.value_len()];
    options.emit_value(&mut bytes);
    let mut options = NlasIterator::new(&bytes[..]).filter_map(Result::ok);
    let horizon = options.find(|option| option.kind() == TCA_FQ_HORIZON)?;
    Some(u64::from(u32::from_ne_bytes(horizon.value().try_into().ok()?)) * 1_000)
}

/// Returns how far ahead a device's root qdisc keeps departures or, where it has a child for each hardware queue, how far
/// ahead all children do.
fn horizon_ns(qdiscs: &[Qdisc]) -> u64 {
    let Some(root) = qdiscs.iter().find(|qdisc| qdisc.parent == TcHandle::ROOT) else { return 0 };
    let children = qdiscs.iter().filter(|qdisc| serves_queue(qdisc.parent, (&root.kind, root.handle)));
    children.map(Qdisc::horizon_ns).min().unwrap_or_else(|| root.horizon_ns())
}

/// The 64-bit counters read from `struct tc_fq_qd_stats` (include/uapi/linux/pkt_sched.h), each with its byte offset.
const FQ_COUNTERS: [(&str, usize); 3] = [("throttled", 24), ("flows_plimit", 32), (HORIZON_DROPS, 88)];
const HORIZON_DROPS: &str = "horizon_drops";

/// How late packets are released on average, in ns: 32 bits in the same structure.
const FQ_LATENCY: &str = "latency_ns";
const FQ_LATENCY_AT: usize = 76;

/// Returns the counters of all `fq` of a device: their sum, and the worst latency; `None` where no `fq` counts that.
fn fq_counters(qdiscs: &[Qdisc]) -> Vec<(&'static str, Option<u64>)> {
    let all: Vec<_> = qdiscs.iter().filter(|qdisc| qdisc.kind == "fq").map(|qdisc| &qdisc.counters).collect();
    let latency = |bytes: &Vec<u8>| read(bytes, FQ_LATENCY_AT).map(|bytes| u64::from(u32::from_ne_bytes(bytes)));
    let counters = FQ_COUNTERS.iter().map(|(what, at)| {
        let values = all.iter().filter_map(|bytes| read(bytes, *at)).map(u64::from_ne_bytes);
        (*what, values.reduce(u64::saturating_add))
    });
    counters.chain([(FQ_LATENCY, all.iter().filter_map(|bytes| latency(bytes)).max())]).collect()
}

fn read<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use netlink::core::{DefaultNla, Emitable as _};

    use super::*;

    fn qdisc(kind: &str, handle: (u16, u16), parent: TcHandle) -> Qdisc {
        let handle = TcHandle { major: handle.0, minor: handle.1 };
        Qdisc { kind: kind.to_owned(), handle, parent, horizon_ns: None, counters: Vec::new() }
    }

    fn child(kind: &str, major: u16, minor: u16) -> Qdisc {
        qdisc(kind, (minor + 10, 0), TcHandle { major, minor })
    }

    #[test]
    fn departures_are_kept_by_fq_at_the_root_or_below_every_hardware_queue() {
        let root = |kind| qdisc(kind, (1, 0), TcHandle::ROOT);
        let ingress = || qdisc("clsact", (0xffff, 0), TcHandle::INGRESS);
        let until = |horizon_ns, fq| Qdisc { horizon_ns: Some(horizon_ns), ..fq };
        for (ahead_ns, qdiscs) in [
            (u64::MAX, vec![ingress(), root("fq")]),
            (7, vec![until(7, root("fq"))]),
            (8, vec![root("mq"), child("fq", 1, 1), until(8, child("fq", 1, 2)), until(9, child("fq", 1, 3))]),
            (0, vec![root("fq_codel")]),
            (0, vec![root("etf")]),
            (0, vec![root("noqueue"), ingress()]),
            (0, vec![]),
            (u64::MAX, vec![root("mq"), child("fq", 1, 1), child("fq", 1, 2)]),
            (0, vec![root("mq"), child("fq", 1, 1), child("pfifo_fast", 1, 2)]),
            (0, vec![root("mq")]),
            // By default, all qdiscs have the handle 0:.
            (u64::MAX, vec![qdisc("mq", (0, 0), TcHandle::ROOT), child("fq", 0, 1)]),
            // A shaper in front of fq decides.
            (0, vec![root("htb"), child("fq", 1, 1)]),
        ] {
            assert_eq!(horizon_ns(&qdiscs), ahead_ns, "{qdiscs:?}");
        }
    }

    #[test]
    fn the_horizon_of_fq_is_found_among_its_options() {
        let options = |options: &[DefaultNla]| {
            let mut bytes = vec![0; options.buffer_len()];
            options.emit(&mut bytes);
            [TcOption::Other(DefaultNla::new(2, bytes))]
        };
        let word = |kind, value: u32| DefaultNla::new(kind, value.to_ne_bytes().to_vec());
        assert_eq!(fq_horizon_ns(&options(&[word(13, 7), word(TCA_FQ_HORIZON, 500), word(15, 1)])), Some(500_000));
        assert_eq!(fq_horizon_ns(&options(&[word(13, 7)])), None, "as before Linux 5.8");
        assert_eq!(fq_horizon_ns(&options(&[DefaultNla::new(TCA_FQ_HORIZON, vec![1])])), None);
        assert_eq!(fq_horizon_ns(&[]), None);
    }

    #[test]
    fn counters_of_fq_are_summed_over_hardware_queues() {
        let fq = |throttled: u64, drops: u64, latency_ns: u32| {
            let mut counters = vec![0; 112];
            counters[24..32].copy_from_slice(&throttled.to_ne_bytes());
            counters[88..96].copy_from_slice(&drops.to_ne_bytes());
            counters[76..80].copy_from_slice(&latency_ns.to_ne_bytes());
            Qdisc { counters, ..child("fq", 1, 1) }
        };
        let short = Qdisc { counters: vec![7; 30], ..child("fq", 1, 2) };
        let found = fq_counters(&[fq(5, 1, 900), fq(7, 0, 300), short, child("pfifo", 1, 3)]);
        let sums = [("throttled", 12), ("flows_plimit", 0), ("horizon_drops", 1), ("latency_ns", 900)];
        assert_eq!(found, sums.map(|(what, value)| (what, Some(value))));
        assert_eq!(fq_counters(&[child("noqueue", 1, 1)]), sums.map(|(what, _)| (what, None)));
    }

    #[tokio::test]
    async fn the_way_to_loopback_is_found_and_keeps_no_departures() {
        use s2n_quic_core::path::{Handle as _, RemoteAddress};
        let peer: std::net::SocketAddr = "127.0.0.1:443".parse().unwrap();
        let path = s2n_quic_platform::message::default::Handle::from_remote_address(RemoteAddress(peer.into()));
        let devices = follow(Gauges::default(), &runtime::Handle::current(), Box::new(|_, _| {}));
        let found = async {
            while devices.toward(&path).name() != "lo" {
                sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), found).await.unwrap();
        assert!(!devices.toward(&path).keeps_departures());
    }

    fn follower(routes: Arc<RouteCache>, listener: DeviceListener) -> Follower {
        Follower { routes, gauges: Gauges::default(), listener, devices: HashMap::new(), is_first: true }
    }

    #[test]
    fn a_device_that_is_gone_or_has_another_name_or_no_fq_leaves_no_gauges() {
        let mut follower = follower(Arc::default(), Box::new(|_, _| {}));
        let mut registry = Registry::default();
        follower.gauges.register(&mut registry);
        let mut shown = |links: &[(u32, &str)], kind| {
            follower.follow_links(links.iter().map(|(index, name)| (*index, (*name).to_owned())).collect());
            let root = Qdisc { counters: vec![1; 112], ..qdisc(kind, (1, 0), TcHandle::ROOT) };
            follower.devices.values().for_each(|device| follower.judge(device, std::slice::from_ref(&root)));
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            ["eth0", "eth1", "wan0"].map(|name| text.matches(&format!("device=\"{name}\"")).count())
        };
        let all = 1 + FQ_COUNTERS.len() + 1;
        assert_eq!(shown(&[(1, "eth0"), (2, "eth1")], "fq"), [all, all, 0]);
        assert_eq!(shown(&[(1, "wan0"), (2, "eth1")], "fq"), [0, all, all]);
        assert_eq!(shown(&[(1, "eth1"), (2, "wan0")], "fq"), [0, all, all], "two that exchange their names");
        assert_eq!(shown(&[(2, "wan0")], "fq"), [0, 0, all]);
        assert_eq!(shown(&[(2, "wan0")], "pfifo"), [0, 0, 1], "its fq is gone");
    }

    #[test]
    fn at_every_reading_the_listener_hears_how_far_ahead_a_device_keeps_departures() {
        let (tell, told) = std::sync::mpsc::channel();
        let listener = move |device: &str, ahead_ns| tell.send((device.to_owned(), ahead_ns)).unwrap();
        let follower = follower(Arc::default(), Box::new(listener));
        let device = Device::new("eth0");
        let horizons = [("pfifo_fast", None), ("fq", None), ("fq", Some(HORIZON_NS)), ("fq", Some(HORIZON_NS - 1))];
        for ((kind, horizon_ns), keeps) in horizons.into_iter().zip([false, true, true, false]) {
            follower.judge(&device, &[Qdisc { horizon_ns, ..qdisc(kind, (1, 0), TcHandle::ROOT) }]);
            assert_eq!(device.keeps_departures(), keeps, "{kind} {horizon_ns:?}");
        }
        let expected = [0, u64::MAX, HORIZON_NS, HORIZON_NS - 1].map(|ahead_ns| ("eth0".to_owned(), ahead_ns));
        assert_eq!(told.try_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_text_about_departures_names_devices_and_omits_a_keeper_without_devices() {
        let device = |(name, keeps)| {
            let device = Device::new(name);
            device.set_keeps_departures(keeps);
            device
        };
        for (devices, words) in [
            (&[("lo", false)][..], "departure times are kept by paced on lo"),
            (&[("eth0", true)], "departure times are kept by the kernel on eth0"),
            (
                &[("lo", false), ("eth1", true), ("eth0", true)],
                "departure times are kept by the kernel on eth0, eth1, by paced on lo",
            ),
            (&[], "there is no device to keep departure times"),
        ] {
            let devices: Vec<_> = devices.iter().copied().map(device).collect();
            assert_eq!(who_keeps_departures(&devices), words);
        }
    }

    #[tokio::test]
    async fn the_follower_ends_with_the_last_who_may_ask() {
        let (devices, routes, mut questions) = Devices::with_questions();
        drop(devices);
        let follower = follower(routes, Box::new(|_, _| {}));
        let run = async {
            let socket = Socket::open(&GROUPS).unwrap();
            let mut follower = follower;
            follower.serve(socket, &mut questions).await
        };
        tokio::time::timeout(Duration::from_secs(10), run).await.unwrap().unwrap();
    }
}
