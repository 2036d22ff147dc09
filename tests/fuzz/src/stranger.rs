//! A peer that follows no rule: the bytes of an input are put into its packets, unchanged, before they leave.
//!
//! An ordinary client underneath completes handshakes, acknowledges and recovers from loss. It receives only those parts
//! of the relay's packets that a client without streams can handle, so that frames that it did not ask for do not end
//! the connection at this end.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::Result;
use bytes::BufMut as _;
use lab::simulation::{TEMPLATE, request_head, within};
use masque::{h3, request, target::Target, template::Template, varint};
use parking_lot::{Mutex, MutexGuard};
use quic::endpoint::Transport;
use s2n_codec::{DecoderBufferMut, Encoder as _, EncoderBuffer, encoder::scatter};
use s2n_quic::{
    Client, Connection,
    client::Connect,
    provider::{
        io::testing::{Handle, Socket, time},
        packet_interceptor::PacketInterceptor,
    },
};
use s2n_quic_core::{
    event::api::Subject,
    frame::{Frame, FrameMut},
    inet::ExplicitCongestionNotification,
    packet::interceptor::{Datagram, Packet},
};

use crate::{
    input::choice,
    simulated::{SERVER_NAME, client},
};

/// The most bytes of frames in one packet.
const PACKET_BYTES: usize = 1_100;

/// The most connections that one input may use.
const CONNECTIONS: u32 = 6;

/// Values at the limits of ranges.
const EDGES: [u64; 24] = [
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    1_024,
    4_095,
    4_096,
    4_097,
    16_383,
    16_384,
    65_535,
    65_536,
    1 << 20,
    (1 << 20) + 1,
    4 << 20,
    (1 << 30) - 1,
    1 << 32,
    1 << 60,
    (1 << 62) - 4,
    (1 << 62) - 2,
    (1 << 62) - 1,
];

/// The fields of QUIC's frames (RFC 9000 §19, RFC 9221 §4): `v` is a variable-length integer, `d` bytes preceded by their
/// length, `r` bytes to the end, `8` and `16` that many bytes.
const FRAMES: [(u64, &str); 33] = [
    (0x00, ""),
    (0x01, ""),
    (0x02, "vvcv"),
    (0x02, "vvvvvv"),
    (0x03, "vvcvvvv"),
    (0x04, "vvv"),
    (0x05, "vv"),
    (0x06, "vd"),
    (0x07, "d"),
    (0x08, "vr"),
    (0x09, "vr"),
    (0x0a, "vd"),
    (0x0b, "vd"),
    (0x0c, "vvr"),
    (0x0e, "vvd"),
    (0x0f, "vvd"),
    (0x10, "v"),
    (0x11, "vv"),
    (0x12, "v"),
    (0x13, "v"),
    (0x14, "v"),
    (0x15, "vv"),
    (0x16, "v"),
    (0x17, "v"),
    (0x18, "vvl"),
    (0x19, "v"),
    (0x1a, "8"),
    (0x1b, "8"),
    (0x1c, "vvd"),
    (0x1d, "vd"),
    (0x1e, ""),
    (0x30, "r"),
    (0x31, "d"),
];

/// Changes to the stranger's packets.
#[derive(Default)]
struct Pen {
    /// The payloads of the next packets.
    payloads: VecDeque<Vec<u8>>,
    /// The payload of the next packet of a handshake.
    early: Option<Vec<u8>>,
    /// The position and the mask for a change to the next datagram.
    spoil: Option<(usize, u8)>,
    /// The last datagram.
    last: Vec<u8>,
}

#[derive(Clone, Default)]
struct Rewriter(Arc<Mutex<Pen>>);

impl Rewriter {
    fn pen(&self) -> MutexGuard<'_, Pen> {
        self.0.lock()
    }

    fn add(&self, payload: &[u8]) {
        let mut pen = self.pen();
        if pen.payloads.len() < 64 {
            pen.payloads.push_back(payload.to_vec());
        }
    }
}

impl PacketInterceptor for Rewriter {
    fn intercept_rx_payload<'a>(
        &mut self,
        _: &Subject,
        packet: &Packet,
        payload: DecoderBufferMut<'a>,
    ) -> DecoderBufferMut<'a> {
        let bytes = payload.into_less_safe_slice();
        if packet.number.space().is_application_data() {
            let mut at = 0;
            while at < bytes.len() {
                let whole = bytes.len();
                let Ok((frame, rest)) = DecoderBufferMut::new(&mut bytes[at..]).decode::<FrameMut<'_>>() else { break };
                let end = whole - rest.len();
                let is_heard = matches!(
                    frame,
                    Frame::Padding(_)
                        | Frame::Ping(_)
                        | Frame::Ack(_)
                        | Frame::Crypto(_)
                        | Frame::HandshakeDone(_)
                        | Frame::PathChallenge(_)
                        | Frame::ConnectionClose(_)
                );
                if !is_heard {
                    bytes[at..end].fill(0);
                }
                at = end;
            }
        }
        DecoderBufferMut::new(bytes)
    }

    fn intercept_tx_payload(&mut self, _: &Subject, packet: &Packet, payload: &mut scatter::Buffer<'_>) {
        let (mut pen, buffer) = (self.pen(), payload.flatten());
        if !packet.number.space().is_application_data() {
            if let Some(early) = pen.early.take_if(|early| early.len() <= buffer.remaining_capacity()) {
                buffer.write_slice(&early);
            }
            return;
        }
        while let Some(next) = pen.payloads.pop_front_if(|next| next.len() <= buffer.remaining_capacity()) {
            buffer.write_slice(&next);
        }
    }

    fn intercept_tx_datagram(&mut self, _: &Subject, _: &Datagram<'_>, payload: &mut EncoderBuffer<'_>) {
        let mut pen = self.pen();
        let bytes = payload.as_mut_slice();
        if let Some((at, mask)) = pen.spoil.take() {
            let at = at % bytes.len().max(1);
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= mask;
            }
        }
        pen.last = bytes.to_vec();
    }
}

/// The stranger.
pub struct Stranger {
    relay: SocketAddr,
    client: Client,
    socket: Socket,
    /// A second address of the stranger.
    other: Socket,
    rewriter: Rewriter,
    connection: Option<Connection>,
    connections: u32,
    /// The frames of the next packet.
    packet: Vec<u8>,
    /// The frames of the previous packet.
    before: Vec<u8>,
    /// The offset up to which each stream was written.
    written: HashMap<u64, u64>,
}

/// Takes a byte as a small number or as one at the limit of a range.
fn value(input: &mut &[u8]) -> u64 {
    let byte = u64::from(choice(input, u8::MAX));
    if byte < 160 { byte.min(63) } else { EDGES[byte as usize % EDGES.len()] }
}

/// Takes up to `most` bytes.
fn bytes<'a>(input: &mut &'a [u8], most: usize) -> &'a [u8] {
    let len = usize::from(choice(input, u8::MAX)).min(most).min(input.len());
    let (taken, rest) = input.split_at(len);
    *input = rest;
    taken
}

fn http3_frame(kind: u64, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    varint::write(kind, &mut frame);
    varint::write(payload.len() as u64, &mut frame);
    frame.extend_from_slice(payload);
    frame
}

impl Stranger {
    /// Prepares a stranger for talking to `relay`.
    pub fn new(handle: &Handle, relay: SocketAddr) -> Result<Self> {
        let (transport, rewriter) = (Transport::default(), Rewriter::default());
        let found = Arc::<Mutex<Option<Socket>>>::default();
        let place = found.clone();
        let io = handle
            .builder()
            .with_initial_mtu(transport.initial_mtu)
            .with_max_mtu(transport.max_mtu)
            .on_socket(move |socket| *place.lock() = Some(socket));
        let client = client(io.build()?, &transport, 0x57_4a, rewriter.clone())?;
        let socket = found.lock().take();
        let socket = socket.ok_or_else(|| anyhow::anyhow!("an endpoint has a socket"))?;
        Ok(Self {
            relay,
            client,
            socket,
            other: handle.builder().build()?.socket(),
            rewriter,
            connection: None,
            connections: 0,
            packet: Vec::new(),
            before: Vec::new(),
            written: HashMap::new(),
        })
    }

    /// Adds a frame to the next packet, as the input says.
    pub fn add_frame(&mut self, input: &mut &[u8]) {
        let number = usize::from(choice(input, 40));
        let Some(&(kind, fields)) = FRAMES.get(number) else {
            // A frame of an unknown type, or no frame at all.
            if number == 39 {
                let kind = value(input);
                varint::write(kind, &mut self.packet);
            }
            self.packet.extend_from_slice(bytes(input, 64));
            return;
        };
        varint::write(kind, &mut self.packet);
        for field in fields.chars() {
            match field {
                'v' => varint::write(value(input), &mut self.packet),
                // A low number, so that a frame is often complete.
                'c' => varint::write(u64::from(choice(input, 3)), &mut self.packet),
                'd' => {
                    let data = bytes(input, 200);
                    // The length is sometimes wrong.
                    let len = if choice(input, 16) == 15 { value(input) } else { data.len() as u64 };
                    varint::write(len, &mut self.packet);
                    self.packet.extend_from_slice(data);
                }
                'l' => {
                    let len = choice(input, 24);
                    self.packet.put_u8(len);
                    self.packet.put_bytes(len ^ 0x5a, usize::from(len) + 16);
                }
                '8' => self.packet.put_bytes(choice(input, u8::MAX), 8),
                _ => self.packet.extend_from_slice(bytes(input, 200)),
            }
        }
    }

    /// Adds the next bytes of a stream, as the input says.
    pub fn add_words(&mut self, input: &mut &[u8]) {
        const STREAMS: [u64; 12] = [0, 4, 8, 12, 16, 20, 2, 6, 10, 14, 1, 3];
        let stream_id = STREAMS[usize::from(choice(input, 12))];
        let how = choice(input, 32);
        let words = self.words(input);
        let words = &words[..words.len().min(PACKET_BYTES)];
        let next = self.written.entry(stream_id).or_default();
        // Usually continues where the last frame ended.
        let offset = if how & 0x1e == 0x1e { value(input) } else { *next };
        varint::write(0x0e | u64::from(how & 1 == 1 && how & 2 == 2), &mut self.packet);
        for field in [stream_id, offset, words.len() as u64] {
            varint::write(field, &mut self.packet);
        }
        self.packet.extend_from_slice(words);
        *next = (offset + words.len() as u64).min(1 << 61);
    }

    fn words(&self, input: &mut &[u8]) -> Vec<u8> {
        match choice(input, 16) {
            0 => h3::encode_request(&request_head(), None).map(Vec::from).unwrap_or_default(),
            1 => {
                let (Ok(template), Ok(target)) = (Template::parse(TEMPLATE), Target::from_authority("192.0.2.9:53"))
                else {
                    return Vec::new();
                };
                let head = request::udp_request(&template, &target, None);
                h3::encode_request(&head, None).map(Vec::from).unwrap_or_default()
            }
            2 => bytes(input, 255).to_vec(),
            3 => http3_frame(1, bytes(input, 255)),
            4 => {
                let payload = [&[0], bytes(input, 255)].concat();
                http3_frame(0, &http3_frame(0, &payload))
            }
            5 => {
                let kind = value(input);
                http3_frame(0, &http3_frame(kind, bytes(input, 255)))
            }
            6 => http3_frame(0, bytes(input, 255)),
            // A control stream with settings that allow datagrams, or with any settings.
            7 => vec![0, 4, 2, 0x33, 1],
            8 => [&[0], &http3_frame(4, bytes(input, 64))[..]].concat(),
            9 => {
                let kind = value(input);
                http3_frame(kind, bytes(input, 255))
            }
            10 => {
                let (kind, len) = (value(input), value(input));
                let mut frame = Vec::new();
                varint::write(kind, &mut frame);
                varint::write(len, &mut frame);
                frame.extend_from_slice(bytes(input, 255));
                frame
            }
            11 => {
                // PRIORITY_UPDATE (RFC 9218 §7.2).
                let mut update = Vec::new();
                varint::write(value(input), &mut update);
                update.extend_from_slice(bytes(input, 32));
                http3_frame(0x0f_0700, &update)
            }
            12 => {
                let mut goaway = Vec::new();
                varint::write(value(input), &mut goaway);
                http3_frame(7, &goaway)
            }
            13 => [&[2 + choice(input, 2)], bytes(input, 64)].concat(),
            14 => vec![0; 1_000],
            _ => Vec::new(),
        }
    }

    /// Adds a DATAGRAM frame.
    pub fn add_datagram(&mut self, input: &mut &[u8]) {
        varint::write(0x31, &mut self.packet);
        let mut datagram = Vec::new();
        varint::write(u64::from(choice(input, 6)), &mut datagram);
        varint::write(u64::from(choice(input, 4) / 3), &mut datagram);
        datagram.extend_from_slice(bytes(input, 255));
        varint::write(datagram.len() as u64, &mut self.packet);
        self.packet.extend_from_slice(&datagram);
    }

    /// Sends the added frames, if there are enough of them or `is_time` is set.
    pub async fn send(&mut self, is_time: bool) {
        if self.packet.is_empty() || (!is_time && self.packet.len() < PACKET_BYTES / 2) {
            return;
        }
        self.packet.truncate(PACKET_BYTES);
        self.before = std::mem::take(&mut self.packet);
        self.repeat(1).await;
    }

    /// Begins a handshake with the added frames.
    pub async fn send_early(&mut self) {
        self.hang_up();
        self.rewriter.pen().early = Some(std::mem::take(&mut self.packet));
        self.connect().await;
    }

    /// Sends the frames of the previous packet `times` more times.
    pub async fn repeat(&mut self, times: u32) {
        for _ in 0..times {
            if !self.connect().await {
                return;
            }
            self.rewriter.add(&self.before);
            self.ping();
            time::delay(Duration::from_micros(200)).await;
        }
    }

    fn ping(&mut self) {
        // A ping fails only if the connection is gone.
        if let Some(connection) = &self.connection
            && connection.handle().ping().is_err()
        {
            self.hang_up();
        }
    }

    /// Connects unless already connected; returns whether there is a connection.
    pub async fn connect(&mut self) -> bool {
        if let Some(connection) = &self.connection
            && connection.handle().ping().is_err()
        {
            self.hang_up();
        }
        if self.connection.is_none() && self.connections < CONNECTIONS {
            self.connections += 1;
            let connect = Connect::new(self.relay).with_server_name(SERVER_NAME);
            if let Some(Ok(connection)) = within(Duration::from_secs(2), self.client.connect(connect)).await {
                self.connection = Some(connection);
            }
        }
        self.connection.is_some()
    }

    /// Closes the connection and forgets it.
    pub fn hang_up(&mut self) {
        self.connection = None;
        self.written.clear();
        self.rewriter.pen().payloads.clear();
    }

    /// Changes a byte of the next datagram.
    pub fn spoil(&mut self, at: usize, mask: u8) {
        self.rewriter.pen().spoil = Some((at, mask));
        self.ping();
    }

    /// Continues from another port.
    pub fn rebind(&self, port: u16) {
        if let Ok(mut address) = self.socket.local_addr() {
            address.set_port(20_000 + port);
            self.socket.rebind(address);
        }
    }

    /// Sends any bytes, or the last datagram again, from another address.
    pub fn send_aside(&self, bytes: &[u8]) {
        let bytes = if bytes.is_empty() { self.rewriter.pen().last.clone() } else { bytes.to_vec() };
        _ = self.other.send_to(self.relay, ExplicitCongestionNotification::default(), bytes);
    }
}
