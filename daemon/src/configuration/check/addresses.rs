//! The addresses and devices of a configuration, compared with each other and with this machine.

use std::{
    fs,
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use bpf::NetworkDevice;
use config::{Config, targets::Protocol};

use super::place::Named;

/// An address on which paced will listen.
struct Listening {
    /// The keys that may name it, with their sections.
    keys: &'static [&'static str],
    address: SocketAddr,
    protocol: Protocol,
    /// Whether its socket takes no IPv4.
    only_v6: bool,
}

impl Listening {
    fn named(&self) -> Vec<Named> {
        self.keys.iter().map(|key| (*key, self.address.to_string().into())).collect()
    }

    /// Whether one process cannot listen on both.
    fn overlaps(&self, other: &Self) -> bool {
        let (ip, other_ip) = (self.ip(), other.ip());
        let is_same_socket = self.protocol == other.protocol && self.address.port() == other.address.port();
        let is_same_ip = ip == other_ip && (self.scope() == other.scope() || self.scope() == 0 || other.scope() == 0);
        is_same_socket && (is_same_ip || self.covers(other_ip) || other.covers(ip))
    }

    /// The IP address; of an IPv4-mapped IPv6 address (RFC 4291 §2.5.5.2), the IPv4 address that it stands for.
    fn ip(&self) -> IpAddr {
        self.address.ip().to_canonical()
    }

    /// The index of the device of a link-local address; 0 for other addresses, whose scope the kernel ignores.
    fn scope(&self) -> u32 {
        match self.address {
            SocketAddr::V6(address) if address.ip().is_unicast_link_local() => address.scope_id(),
            _ => 0,
        }
    }

    /// Whether this is the address of all interfaces, for packets to `ip` as well.
    fn covers(&self, ip: IpAddr) -> bool {
        let own = self.ip();
        own.is_unspecified() && (own.is_ipv4() == ip.is_ipv4() || own.is_ipv6() && !self.only_v6)
    }
}

/// Whether IPv6 sockets of this machine take no IPv4 unless they ask for it (`net.ipv6.bindv6only`).
fn is_v6_only() -> bool {
    fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|value| value.trim() == "1")
}

/// Returns the addresses on which paced will listen, in the order of the configuration's sections. `only_v6`: see [`is_v6_only`].
fn listening(config: &Config, only_v6: bool) -> Vec<Listening> {
    let by_tcp = |keys, address| Listening { keys, address, protocol: Protocol::Tcp, only_v6 };
    let relay = config.relay.iter().flat_map(|relay| &relay.listeners).map(|listener| listener.address);
    let of_relay: &[_] = &["relay.listen", "relay.listener.address"];
    let relay = relay.map(|address| Listening { keys: of_relay, address, protocol: Protocol::Udp, only_v6: true });
    let fronts = config.gateway.iter().flat_map(|gateway| &gateway.listeners);
    let forwards = config
        .forwards
        .iter()
        .map(|forward| Listening { protocol: forward.protocol, ..by_tcp(&["forward.listen"], forward.listen) });
    relay
        .chain(fronts.map(|front| by_tcp(&["gateway.listener.address"], front.address)))
        .chain(forwards)
        .chain(config.proxies.iter().map(|proxy| by_tcp(&["proxy.listen"], proxy.listen)))
        .chain(config.serves.iter().map(|serve| by_tcp(&["serve.listen"], serve.listen)))
        .chain(config.control.tcp.iter().map(|tcp| by_tcp(&["control.tcp.listen"], tcp.address)))
        .chain(config.metrics.listen.map(|address| by_tcp(&["metrics.listen"], address)))
        .collect()
}

/// Returns each pair of addresses that overlap, with their keys.
pub(super) fn overlapping(config: &Config) -> Vec<(Vec<Named>, anyhow::Error)> {
    overlapping_if(config, is_v6_only())
}

fn overlapping_if(config: &Config, only_v6: bool) -> Vec<(Vec<Named>, anyhow::Error)> {
    let all = listening(config, only_v6);
    let mut found = Vec::new();
    for (index, one) in all.iter().enumerate() {
        for other in all[index + 1..].iter().filter(|other| one.overlaps(other)) {
            let protocol = one.protocol.as_str().to_uppercase();
            let why = anyhow::anyhow!(
                "{} and {} overlap, and paced cannot listen on both for {protocol}: give one of them another port, or replace the \
                 address of all interfaces by the addresses that you mean",
                one.address,
                other.address
            );
            found.push(([one.named(), other.named()].concat(), why));
        }
    }
    found
}

/// Returns a warning for each address and device that this machine does not have now.
pub(super) fn missing(config: &Config) -> Vec<(Vec<Named>, String)> {
    let mut warnings = Vec::new();
    // Whether sockets take IPv4 as well makes no difference here.
    for listening in listening(config, false).into_iter().filter(|listening| is_missing(listening.address)) {
        let why = format!(
            "this machine has no address {} now, and paced cannot listen on {} without it",
            listening.address.ip(),
            listening.address
        );
        warnings.push((listening.named(), why));
    }
    let sources = config.relay.iter().flat_map(|relay| &relay.source_addresses);
    let sources = sources.map(|address| ("source_addresses", address, "no tunnel leaves from it"));
    let of_paths = config.paths.iter().filter_map(|path| path.address.as_ref());
    let of_paths = of_paths.map(|address| ("address", address, "the path has no connection"));
    for (key, address, what) in sources.chain(of_paths).filter(|(_, address, _)| is_missing((**address, 0).into())) {
        let why = format!("this machine has no address {address} now: {what} until it appears");
        warnings.push((vec![(key, address.to_string().into())], why));
    }
    for interface in config.paths.iter().filter_map(|path| path.interface.as_ref()) {
        if matches!(NetworkDevice::find(interface.as_str()), Ok(None)) {
            let why = format!("there is no device {interface} now: the path has no connection until it appears");
            warnings.push((vec![("interface", interface.as_str().into())], why));
        }
    }
    warnings
}

/// Whether no socket can have this address. Its port may be in use, by the paced that runs now.
fn is_missing(mut address: SocketAddr) -> bool {
    address.set_port(0);
    let is_missing = |kind| matches!(kind, ErrorKind::AddrNotAvailable | ErrorKind::Unsupported);
    // ENODEV: no device has the number after the address's `%`.
    let is_missing_code = |code| matches!(code, Some(libc::EAFNOSUPPORT | libc::ENODEV));
    UdpSocket::bind(address).is_err_and(|error| is_missing(error.kind()) || is_missing_code(error.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UPLINK: &str = "relay = \"https://r.example/{target_host}/{target_port}/\"\ntarget = \"a.example:53\"\n";

    fn config(text: &str) -> Config {
        Config::from_toml(text).unwrap_or_else(|errors| panic!("{errors}"))
    }

    fn relay(listen: &str) -> String {
        format!(
            "[relay]\nlisten = [{listen}]\ntemplates = [\"https://relay.example/{{target_host}}/{{target_port}}/\"]\nauth = \"none\"\n\
             certificate = \"/c\"\nprivate_key = \"/k\"\n"
        )
    }

    fn forward(listen: &str, protocol: &str) -> String {
        format!("[[forward]]\nlisten = \"{listen}\"\nprotocol = \"{protocol}\"\n{UPLINK}")
    }

    #[test]
    fn addresses_overlap_exactly_if_the_kernel_refuses_the_second() {
        let udp = |listen: &str| forward(listen, "udp");
        let tcp = |listen: &str| forward(listen, "tcp");
        for (text, pairs) in [
            (relay("\"0.0.0.0:443\", \"[::]:443\""), 0),
            (relay("\"0.0.0.0:443\", \"127.0.0.1:443\""), 1),
            (relay("\"0.0.0.0:443\", \"127.0.0.1:444\""), 0),
            (relay("\"[::]:443\", \"[::1]:443\""), 1),
            (relay("\"[::]:443\"") + &udp("127.0.0.1:443"), 0),
            (relay("\"127.0.0.1:443\"") + &udp("[::]:443"), 1),
            (relay("\"0.0.0.0:443\"") + &tcp("0.0.0.0:443"), 0),
            (udp("0.0.0.0:53") + &udp("127.0.0.1:53"), 1),
            (udp("[fe80::1%2]:53") + &udp("[fe80::1%3]:53"), 0),
            (udp("[fe80::1%2]:53") + &udp("[fe80::1]:53"), 1),
            (udp("[fe80::1%2]:53") + &udp("[::]:53"), 1),
            (udp("[::1%2]:53") + &udp("[::1%3]:53"), 1),
            (udp("[::ffff:127.0.0.1]:53") + &udp("127.0.0.1:53"), 1),
            (udp("[::ffff:0.0.0.0]:53") + &udp("127.0.0.1:53"), 1),
            (udp("[::ffff:0.0.0.0]:53") + &udp("[::1]:53"), 0),
            (udp("[::1]:53") + &udp("127.0.0.1:53") + &udp("0.0.0.0:53"), 1),
            (tcp("0.0.0.0:9433") + "[metrics]\nlisten = \"127.0.0.1:9433\"\n", 1),
        ] {
            assert_eq!(overlapping_if(&config(&text), false).len(), pairs, "{text}");
        }
        let both = udp("[::]:53") + &udp("0.0.0.0:53");
        assert_eq!([false, true].map(|only_v6| overlapping_if(&config(&both), only_v6).len()), [1, 0], "{both}");
    }

    #[test]
    fn addresses_and_devices_that_this_machine_lacks_cause_warnings_and_others_do_not() {
        let paths = "[[path]]\nname = \"here\"\ninterface = \"lo\"\naddress = \"127.0.0.1\"\n\
                     [[path]]\nname = \"gone\"\ninterface = \"none0\"\naddress = \"198.51.100.7\"\n";
        let relay = relay("\"127.0.0.1:443\", \"198.51.100.1:443\", \"[fe80::1%2147483647]:443\"")
            .replace("auth", "source_addresses = [\"198.51.100.9\"]\nauth");
        let warnings = missing(&config(&format!("{relay}{}{paths}", forward("198.51.100.2:53", "tcp"))));
        let named: Vec<_> = warnings.iter().map(|(named, _)| (named[0].0, named[0].1.to_str().unwrap())).collect();
        let wanted = [
            ("relay.listen", "198.51.100.1:443"),
            ("relay.listen", "[fe80::1%2147483647]:443"),
            ("forward.listen", "198.51.100.2:53"),
            ("source_addresses", "198.51.100.9"),
            ("address", "198.51.100.7"),
            ("interface", "none0"),
        ];
        assert_eq!(named, wanted, "{warnings:?}");
    }
}
