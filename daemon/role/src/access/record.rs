//! The content of access log records.

use std::{
    borrow::Cow,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use config::targets::Protocol;
use masque::{
    target::{Host, Target},
    tunnel::Form,
};

use super::{served::Served, way::Way};
use crate::traffic::Moved;

/// The longest value of a key, in bytes; longer ones are truncated.
const VALUE_BYTES: usize = 512;

/// One line or entry of the access log.
#[derive(Clone, Debug)]
pub struct AccessRecord {
    /// When it happened.
    pub time: SystemTime,
    /// What happened.
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum What {
    /// A tunnel ended.
    Tunnel(RecordedRequest, EndedTunnel),
    /// A request was refused.
    Refusal(RecordedRequest, RefusedRequest),
    /// A request for a model ended.
    Model(Box<Served>),
    /// A summary of omitted records.
    Omitted(Omitted),
}

/// A request: the client, and what it requested.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    /// The ID of the connection: at a relay, its client's connection; at an edge, the connection to the relay. `None`
    /// without a connection.
    pub connection: Option<u64>,
    /// The address of the listener, or the local address of an edge, as configured.
    pub listener: SocketAddr,
    /// The client's address at connection time, if known.
    pub client: Option<SocketAddr>,
    /// The user, if one was required and is known.
    pub user: Option<Arc<str>>,
    /// The protocol to the target, once known.
    pub protocol: Option<Protocol>,
    /// The target as requested, once known.
    pub target: Option<Target>,
    /// At an edge, the relay and the path of the tunnel.
    pub way: Option<Way>,
}

/// How a tunnel ended.
#[derive(Clone, Debug)]
pub struct EndedTunnel {
    /// The ID of the tunnel.
    pub tunnel: u64,
    /// At a relay, the ID of the earlier tunnel that its client continued with it, if it did.
    pub continues: Option<u64>,
    /// The address to which the relay was connected; unknown to an edge.
    pub next_hop: Option<SocketAddr>,
    /// Its class at the end.
    pub class: String,
    /// The form of the last payloads to the other end of the tunnel; `None` for a TCP tunnel.
    pub form: Option<Form>,
    /// Traffic to the target.
    pub up: Moved,
    /// Traffic from the target.
    pub down: Moved,
    /// Dropped payloads, by direction and reason, named as in the metrics.
    pub drops: Vec<(&'static str, u64)>,
    /// How long it was open.
    pub duration: Duration,
    /// Why it ended, named as in the metrics.
    pub reason: &'static str,
}

/// How a request was refused.
#[derive(Clone, Copy, Debug)]
pub struct RefusedRequest {
    /// The status of the response, if there was one.
    pub status: Option<u16>,
    /// The error type in its `Proxy-Status` (RFC 9209 §2.3).
    pub error: Option<&'static str>,
    /// The reason, named as in the metrics.
    pub reason: &'static str,
}

/// Counts of records that were omitted.
#[derive(Clone, Debug, Default)]
pub struct Omitted {
    /// Refusals beyond the budget, by reason.
    pub refusals: Vec<(&'static str, u64)>,
    /// Records for which the queue had no room.
    pub lost: u64,
}

/// One value of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// A number or an ID.
    Number(u64),
    /// Every other value.
    Text(Cow<'a, str>),
}

impl From<u64> for Value<'_> {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl<'a> From<&'a str> for Value<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text[..text.floor_char_boundary(VALUE_BYTES)].into())
    }
}

impl From<String> for Value<'_> {
    fn from(mut text: String) -> Self {
        text.truncate(text.floor_char_boundary(VALUE_BYTES));
        Self::Text(text.into())
    }
}

/// The keys of a record with their values, in the order of writing.
pub type Fields<'a> = Vec<(Cow<'static, str>, Value<'a>)>;

impl AccessRecord {
    /// Returns the record's size for the queue's limit, in bytes: about its size in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let held = match &self.what {
            What::Tunnel(request, ended) => request.bytes() + ended.class.len() + 24 * ended.drops.len(),
            What::Refusal(request, _) => request.bytes(),
            What::Model(served) => {
                let engine = served.engine.as_ref().map_or(0, String::len);
                let way = served.way.as_ref().map_or(0, Way::bytes);
                let named = served.client_request.as_ref().map_or(0, |id| id.len());
                size_of::<Served>() + named + served.class.len() + served.asked.len() + engine + way
            }
            What::Omitted(omitted) => 24 * omitted.refusals.len(),
        };
        size_of::<Self>() + held
    }

    /// Returns the event: "tunnel", "refusal", "model" or "omitted".
    #[must_use]
    pub fn event(&self) -> &'static str {
        match &self.what {
            What::Tunnel(..) => "tunnel",
            What::Refusal(..) => "refusal",
            What::Model(_) => "model",
            What::Omitted(_) => "omitted",
        }
    }

    /// Returns the record without what reveals the location of a client, a target or an engine.
    #[must_use]
    pub fn without_addresses(&self) -> Self {
        let mut record = self.clone();
        match &mut record.what {
            What::Tunnel(request, ended) => {
                (request.client, request.target) = (None, None);
                ended.next_hop = None;
            }
            What::Refusal(request, _) => (request.client, request.target) = (None, None),
            What::Model(served) => {
                served.client = None;
                // That there was one stays known.
                if let Some(engine) = &mut served.engine {
                    engine.clear();
                }
            }
            What::Omitted(_) => {}
        }
        record
    }

    /// Returns all keys except the time.
    #[must_use]
    pub fn fields(&self) -> Fields<'_> {
        let mut fields = Fields::new();
        let mut add = |key: &'static str, value: Value<'static>| fields.push((key.into(), value));
        match &self.what {
            What::Tunnel(request, ended) => {
                add("tunnel", ended.tunnel.into());
                request.add_to(&mut fields);
                ended.add_to(&mut fields);
            }
            What::Refusal(request, refused) => {
                request.add_to(&mut fields);
                let status = refused.status.map(|status| ("status", u64::from(status).into()));
                let error = refused.error.map(|error| ("error", error.into()));
                let reason = Some(("reason", refused.reason.into()));
                fields.extend([status, error, reason].into_iter().flatten().map(|(key, value)| (key.into(), value)));
            }
            What::Model(served) => add_served(served, &mut fields),
            What::Omitted(omitted) => {
                add("lost", omitted.lost.into());
                let refusals = omitted.refusals.iter();
                fields.extend(refusals.map(|(reason, count)| (format!("refused_{reason}").into(), (*count).into())));
            }
        }
        fields
    }
}

impl RecordedRequest {
    fn bytes(&self) -> usize {
        let name = self.target.as_ref().map_or(0, |target| match &target.host {
            Host::Name(name) => name.len(),
            Host::Ip(_) => 0,
        });
        let way = self.way.as_ref().map_or(0, Way::bytes);
        self.user.as_ref().map_or(0, |user| user.len()) + name + way
    }

    fn add_to<'a>(&'a self, fields: &mut Fields<'a>) {
        let mut add = |key: &'static str, value: Value<'a>| fields.push((key.into(), value));
        if let Some(connection) = self.connection {
            add("connection", connection.into());
        }
        if let Some(user) = &self.user {
            add("user", (&**user).into());
        }
        add("listener", self.listener.to_string().into());
        if let Some(protocol) = self.protocol {
            add("protocol", protocol.as_str().into());
        }
        if let Some(client) = self.client {
            add("client", client.to_string().into());
        }
        if let Some(target) = &self.target {
            add("target", target.to_string().into());
        }
        add_way(self.way.as_ref(), fields);
    }
}

fn add_way<'a>(way: Option<&'a Way>, fields: &mut Fields<'a>) {
    let Some(Way { relay, path }) = way else { return };
    fields.push(("relay".into(), (&**relay).into()));
    if !path.is_empty() {
        fields.push(("path".into(), (&**path).into()));
    }
}

impl EndedTunnel {
    fn add_to<'a>(&'a self, fields: &mut Fields<'a>) {
        let mut add = |key: &'static str, value: Value<'a>| fields.push((key.into(), value));
        if let Some(tunnel) = self.continues {
            add("continues", tunnel.into());
        }
        if let Some(next_hop) = self.next_hop {
            add("next_hop", next_hop.to_string().into());
        }
        add("class", self.class.as_str().into());
        add("form", self.form().into());
        add("up_bytes", self.up.bytes.into());
        add("down_bytes", self.down.bytes.into());
        if self.form.is_some() {
            add("up_packets", self.up.packets.into());
            add("down_packets", self.down.packets.into());
        }
        for (reason, count) in self.drops.iter().filter(|(_, count)| *count > 0) {
            add(reason, (*count).into());
        }
        add("duration_ms", u64::try_from(self.duration.as_millis()).unwrap_or(u64::MAX).into());
        add("reason", self.reason.into());
    }

    /// Returns the form as a word: "datagram", "capsule" or "tcp".
    #[must_use]
    pub fn form(&self) -> &'static str {
        match self.form {
            Some(Form::Datagram) => "datagram",
            Some(Form::Capsule) => "capsule",
            None => "tcp",
        }
    }
}

fn add_served<'a>(served: &'a Served, fields: &mut Fields<'a>) {
    let mut add = |key: &'static str, value: Value<'a>| fields.push((key.into(), value));
    let ms = |time: Duration| Value::from(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    add("request", served.id.into());
    if let Some(id) = &served.client_request {
        add("client_request", (&**id).into());
    }
    if let Some(user) = &served.user {
        add("user", (&**user).into());
    }
    add("listener", served.listener.to_string().into());
    if let Some(client) = served.client {
        add("client", client.to_string().into());
    }
    add("operation", served.operation.into());
    // Values unknown at the end are left out.
    let engine = served.engine.as_deref().unwrap_or_default();
    let texts = [("class", &*served.class), ("asked", &served.asked), ("model", &served.model), ("engine", engine)];
    for (key, text) in texts.into_iter().filter(|(_, text)| !text.is_empty()) {
        add(key, text.into());
    }
    add_way(served.way.as_ref(), fields);
    let mut add = |key: &'static str, value: Value<'a>| fields.push((key.into(), value));
    if let Some((up, down)) = served.moved_bytes {
        add("up_bytes", up.into());
        add("down_bytes", down.into());
    }
    if let Some(usage) = served.usage {
        add("input_tokens", usage.prompt_tokens.into());
    }
    if served.engine.is_some() {
        add("output_tokens", served.output_tokens().into());
    }
    for (key, time) in [("predicted_ms", served.predicted), ("first_token_ms", served.first_token)] {
        if let Some(time) = time {
            add(key, ms(time));
        }
    }
    add("duration_ms", ms(served.duration));
    if let Some(status) = served.status {
        add("status", u64::from(status).into());
    }
    add("reason", served.reason.into());
}

#[cfg(test)]
pub(super) mod tests {
    use openai::TokenUsage;
    use proptest::prelude::*;

    use super::*;

    /// A record of a tunnel of `user` to `name`.
    pub(in crate::access) fn tunnel(user: &str, name: &str) -> AccessRecord {
        let request = RecordedRequest {
            connection: Some(3),
            listener: ([192, 0, 2, 1], 443).into(),
            client: Some(([198, 51, 100, 7], 50_000).into()),
            user: Some(user.into()),
            protocol: Some(Protocol::Udp),
            target: Some(Target { host: Host::Name(name.into()), port: 53 }),
            way: None,
        };
        let ended = EndedTunnel {
            tunnel: 17,
            continues: None,
            next_hop: Some(([203, 0, 113, 5], 53).into()),
            class: "default".into(),
            form: Some(Form::Datagram),
            up: Moved { bytes: 40, packets: 1 },
            down: Moved { bytes: 300, packets: 2 },
            drops: vec![("dropped_up_too_big", 0), ("dropped_down_queue_full", 4)],
            duration: Duration::from_millis(1_234),
            reason: "idle",
        };
        AccessRecord { time: SystemTime::UNIX_EPOCH + Duration::from_millis(1_500), what: What::Tunnel(request, ended) }
    }

    #[test]
    fn a_line_says_who_reached_what_and_what_became_of_it() {
        let record = tunnel("alice", "dns.example");
        assert_eq!(
            record.line(),
            "1970-01-01T00:00:01.500Z tunnel tunnel=17 connection=3 user=alice listener=192.0.2.1:443 protocol=udp \
             client=198.51.100.7:50000 target=dns.example:53 next_hop=203.0.113.5:53 class=default form=datagram \
             up_bytes=40 down_bytes=300 up_packets=1 down_packets=2 dropped_down_queue_full=4 duration_ms=1234 \
             reason=idle"
        );
        let json: serde_json::Value = serde_json::from_str(&record.json().unwrap()).unwrap();
        assert_eq!(
            (&json["event"], &json["up_packets"], &json["user"]),
            (&"tunnel".into(), &1.into(), &"alice".into())
        );
    }

    #[test]
    fn a_line_of_an_edge_says_which_way_a_tunnel_took_but_not_where_it_led() {
        let AccessRecord { time, what: What::Tunnel(request, ended) } = tunnel("alice", "dns.example") else {
            unreachable!()
        };
        let way = Some(Way { relay: "relay.example:443".into(), path: "lte".into() });
        let request = RecordedRequest { connection: None, way, ..request };
        let record = AccessRecord { time, what: What::Tunnel(request, EndedTunnel { next_hop: None, ..ended }) };
        assert_eq!(
            record.without_addresses().text(),
            "tunnel tunnel=17 user=alice listener=192.0.2.1:443 protocol=udp relay=relay.example:443 path=lte \
             class=default form=datagram up_bytes=40 down_bytes=300 up_packets=1 down_packets=2 \
             dropped_down_queue_full=4 duration_ms=1234 reason=idle"
        );
    }

    #[test]
    fn a_line_says_which_tunnel_a_tunnel_continued() {
        let AccessRecord { time, what: What::Tunnel(request, ended) } = tunnel("alice", "dns.example") else {
            unreachable!()
        };
        let record = AccessRecord { time, what: What::Tunnel(request, EndedTunnel { continues: Some(12), ..ended }) };
        let line = record.without_addresses().line();
        assert!(line.contains(" tunnel tunnel=17 ") && line.contains(" protocol=udp continues=12 class="), "{line}");
    }

    #[test]
    fn without_addresses_no_form_says_where_a_client_or_a_target_is() {
        let record = tunnel("alice", "dns.example").without_addresses();
        for shown in [record.line(), record.json().unwrap()] {
            for hidden in ["198.51.100.7", "dns.example", "203.0.113.5"] {
                assert!(!shown.contains(hidden), "{shown}");
            }
        }
    }

    fn model(user: &str, asked: &str) -> AccessRecord {
        let mut served = Served::begin(7, "chat", Some(user.into()), (([192, 0, 2, 1], 443).into(), None));
        served.client = Some(([198, 51, 100, 7], 50_000).into());
        (served.class, served.asked, served.model) = ("interactive".into(), asked.into(), "large".into());
        served.engine = Some("http://203.0.113.5:8001".into());
        served.usage = Some(TokenUsage { prompt_tokens: 12, completion_tokens: 40 });
        (served.predicted, served.duration) = (Some(Duration::from_millis(900)), Duration::from_millis(1_100));
        (served.status, served.reason) = (Some(200), "answered");
        AccessRecord { time: SystemTime::UNIX_EPOCH, what: What::Model(Box::new(served)) }
    }

    #[test]
    fn a_line_says_which_model_answered_whom_for_how_many_tokens_and_where_only_if_it_may() {
        let record = model("ann", "auto");
        assert_eq!(
            record.text(),
            "model request=7 user=ann listener=192.0.2.1:443 client=198.51.100.7:50000 operation=chat class=interactive \
             asked=auto model=large engine=http://203.0.113.5:8001 input_tokens=12 output_tokens=40 predicted_ms=900 \
             duration_ms=1100 status=200 reason=answered"
        );
        let hidden = record.without_addresses().text();
        assert!(!hidden.contains("198.51.100.7") && !hidden.contains("203.0.113.5"), "{hidden}");
        assert!(hidden.contains("model=large input_tokens=12 output_tokens=40 "), "{hidden}");
    }

    #[test]
    fn a_line_of_an_edge_says_how_the_client_calls_a_request_which_gateway_got_it_and_how_much_it_moved() {
        let mut served = Served::begin(7, "chat", None, (([127, 0, 0, 1], 8100).into(), None));
        served.client_request = Some("r=1".into());
        served.way = Some(Way { relay: "gateway.example:443".into(), path: "".into() });
        (served.moved_bytes, served.status) = (Some((300, 4_000)), Some(200));
        let record = AccessRecord { time: SystemTime::UNIX_EPOCH, what: What::Model(Box::new(served)) };
        assert_eq!(
            record.without_addresses().text(),
            "model request=7 client_request=\"r=1\" listener=127.0.0.1:8100 operation=chat relay=gateway.example:443 \
             up_bytes=300 down_bytes=4000 duration_ms=0 status=200 reason=cancelled"
        );
    }

    proptest! {
        #[test]
        fn no_model_that_a_client_names_makes_a_line_or_a_key_of_its_own(asked: String) {
            let record = model("ann", &asked);
            let line = record.line();
            prop_assert!(line.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{line}");
            let json: serde_json::Value = serde_json::from_str(&record.json().unwrap()).unwrap();
            prop_assert_eq!(json["reason"].as_str(), Some("answered"));
        }

        #[test]
        fn nothing_that_a_peer_chooses_makes_a_line_or_a_key_of_its_own(user: String, name in "[ -~\\n\\r\u{202e}é]*") {
            let record = tunnel(&user, &name);
            let line = record.line();
            prop_assert!(line.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{line}");
            // Outside quotes, the number of keys never changes.
            let (mut quoted, mut escaped, mut keys) = (false, false, 0);
            for byte in line.bytes() {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' => escaped = true,
                    b'"' => quoted = !quoted,
                    b'=' if !quoted => keys += 1,
                    _ => {}
                }
            }
            prop_assert_eq!((quoted, keys), (false, record.fields().len()));
            let json = record.json().unwrap();
            prop_assert!(!json.contains('\n'));
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(json["reason"].as_str(), Some("idle"));
            prop_assert_eq!(json.as_object().map(serde_json::Map::len), Some(record.fields().len() + 2));
        }
    }
}
