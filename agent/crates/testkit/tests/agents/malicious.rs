//! A peer that says what it likes: a QUIC connection and lanes driven by the test, under the key of an allowed peer.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use base::{
    clock::{Clock, ManualClock},
    ids::PeerId,
};
use bytes::{Bytes, BytesMut};
use engine::control::transport::{self, PacketSizes};
use gate::{
    Own, OwnKey,
    client::{self, Knock},
    identity::{Identity, PublicKey},
    knock::ServerKey,
    preshared::{PresharedKey, Prover},
    suite, tls,
};
use quic_core::{AckProfile, ConnectionId, Lane, LaneConfig, OVERHEAD, TRANSMIT_CAPACITY};
use quinn_proto::{
    ClientConfig, Connection, ConnectionError, ConnectionHandle, DatagramEvent, Dir, Endpoint, Event,
    ReadError, Side, StreamEvent, StreamId, TransportConfig, VarInt, congestion::NewRenoConfig,
};
use ring::hmac;
use wire::{
    cid::ConnectionIds,
    context::FlowNumber,
    messages::{CloseReason, Features, Framer, Hello, Join, KeyProof, LaneOffer, MAX_MESSAGE_BYTES, Message},
};

use crate::harness::{Host, Udp};

/// DATAGRAM without a length: it fills the rest of the packet (RFC 9221 §4).
const DATAGRAM: u8 = 0x30;

/// One connection to an agent, with its lanes on the same socket.
pub(super) struct MaliciousPeer {
    socket: Udp,
    remote: SocketAddr,
    endpoint: Endpoint,
    handle: ConnectionHandle,
    quinn: Connection,
    ids: ConnectionIds,
    own: tls::TlsIdentity,
    control: Option<StreamId>,
    /// To be said first, once the handshake is complete.
    waiting: Option<Hello>,
    outgoing: Vec<u8>,
    framer: Framer,
    asked: Vec<LaneOffer>,
    lanes: Vec<(ConnectionId, Lane)>,
    /// Its preshared keys, whose proofs its hello has; the first one is that of its lanes.
    pub(super) preshared: Vec<PresharedKey>,
    /// Whether it mixes that key into the secrets of its lanes.
    pub(super) mixes: bool,
    /// The low bit of the numbers of flows that this end opens.
    parity: u64,
    /// The handshake is complete.
    pub(super) connected: bool,
    /// How the connection ended.
    pub(super) lost: Option<ConnectionError>,
    /// Control messages that came.
    pub(super) messages: Vec<Message>,
    /// The data of DATAGRAM frames that came.
    pub(super) data: Vec<Vec<u8>>,
}

impl MaliciousPeer {
    /// Dials the agent at `remote`, whose public key is `expected`. `window` is how many bytes of the control stream it
    /// lets the agent send without reading them.
    pub(super) fn dial(
        host: &mut Host,
        local: SocketAddr,
        remote: SocketAddr,
        (identity, expected): (&Identity, [u8; 32]),
        window: Option<u32>,
        clock: &ManualClock,
    ) -> Self {
        Self::start(host, (local, remote), (identity, expected), (window, true), |_| (), clock)
    }

    /// Dials as a peer that puts all it has on the wire at once, and sends nothing again before seconds have passed.
    pub(super) fn dial_greedily(
        host: &mut Host,
        addresses: (SocketAddr, SocketAddr),
        keys: (&Identity, [u8; 32]),
        clock: &ManualClock,
    ) -> Self {
        let greed = |transport: &mut TransportConfig| {
            let mut window = NewRenoConfig::default();
            window.initial_window(64 << 20);
            transport.congestion_controller_factory(Arc::new(window));
            transport.packet_threshold(1 << 30).time_threshold(20.0);
        };
        Self::start(host, addresses, keys, (None, true), greed, clock)
    }

    /// Dials as a client of another make does, which does not knock.
    pub(super) fn dial_unannounced(
        host: &mut Host,
        addresses: (SocketAddr, SocketAddr),
        keys: (&Identity, [u8; 32]),
        clock: &ManualClock,
    ) -> Self {
        Self::start(host, addresses, keys, (None, false), |_| (), clock)
    }

    fn start(
        host: &mut Host,
        (local, remote): (SocketAddr, SocketAddr),
        (identity, expected): (&Identity, [u8; 32]),
        (window, knocks): (Option<u32>, bool),
        tune: impl FnOnce(&mut TransportConfig),
        clock: &ManualClock,
    ) -> Self {
        let (now, unix_seconds) = (clock.now(), clock.unix_seconds());
        let own = tls::TlsIdentity::from_pkcs8(&identity.pkcs8_der()).unwrap();
        let seed = [u8::try_from(local.port() & 0xff).unwrap(); 32];
        let keys = Own::new(identity);
        let ids = ConnectionIds::new(keys.issued.clone(), seed, 0, 1);
        let generator = ids.clone();
        let reset_key = Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &seed));
        let config = tls::endpoint_config(move || Box::new(generator.clone()), reset_key, Some(seed));
        let mut endpoint = Endpoint::new(Arc::new(config), None, true, None);
        let crypto = tls::client_crypto(&own, tls::KeyExchange::X25519, &[expected]).unwrap();
        let mut client = if knocks {
            let knock = Knock {
                own: Arc::clone(keys.agreement_of(OwnKey::Current)),
                server: Arc::new(ServerKey::new(&PublicKey(expected)).unwrap()),
                unix_seconds,
                ephemeral: zeroize::Zeroizing::new(rand::random()),
                fallback: false,
            };
            client::arm(crypto, knock, ids.initial_from(ids.first_byte(PeerId(0)), None))
        } else {
            ClientConfig::new(crypto)
        };
        let mut transport = transport::transport_config(None, PacketSizes::up_to(1200), 4, 256 << 20);
        if let Some(bytes) = window {
            transport.stream_receive_window(VarInt::from_u32(bytes));
        }
        tune(&mut transport);
        client.transport_config(Arc::new(transport));
        let (handle, quinn) = endpoint.connect(now, client, remote, tls::SERVER_NAME).unwrap();
        Self {
            socket: host.udp(local, None),
            remote,
            endpoint,
            handle,
            quinn,
            ids,
            own,
            control: None,
            waiting: None,
            outgoing: Vec::new(),
            framer: Framer::new(MAX_MESSAGE_BYTES),
            asked: Vec::new(),
            lanes: Vec::new(),
            preshared: Vec::new(),
            mixes: true,
            parity: u64::from(identity.public_key().0 > expected),
            connected: false,
            lost: None,
            messages: Vec::new(),
            data: Vec::new(),
        }
    }

    /// The hello of a peer that means well.
    pub(super) fn hello() -> Message {
        Self::hello_with_lanes(64)
    }

    /// The hello of a peer that takes so many lanes; without any it is in standard mode.
    pub(super) fn hello_with_lanes(max_lanes: u8) -> Message {
        Message::Hello(Hello {
            instance: [0x66; 16],
            software: "rogue/1".to_owned(),
            workers: 1,
            max_lanes,
            max_datagram_packet: 1200,
            services: Vec::new(),
            features: Features::default(),
            possession: None,
            preshared_keys: Vec::new(),
        })
    }

    /// Writes a message to the control stream.
    pub(super) fn say(&mut self, message: &Message) {
        match message {
            // It proves possession of the key, which needs the finished handshake.
            Message::Hello(hello) if !self.connected => self.waiting = Some(hello.clone()),
            Message::Hello(hello) => self.proven(hello.clone()).encode(&mut self.outgoing),
            Message::LaneOpen(_)
            | Message::LaneAccept(_)
            | Message::LaneRefuse(_)
            | Message::LaneClose(_)
            | Message::ServicesChanged(_)
            | Message::Here
            | Message::Join(_)
            | Message::Joined
            | Message::StreamsWanted
            | Message::Release
            | Message::ReceiveRate { .. }
            | Message::ReportsWanted { .. }
            | Message::PacketRepair(_)
            | Message::PresharedKeys(_)
            | Message::StreamAbort(_)
            | Message::StreamCredit { .. }
            | Message::LineState(_)
            | Message::Leave => message.encode(&mut self.outgoing),
        }
    }

    /// Says hello with this in place of the proof that it holds its key.
    pub(super) fn say_unproven(&mut self, possession: Option<[u8; 64]>) {
        if let Message::Hello(hello) = Self::hello() {
            Message::Hello(Hello { possession, ..hello }).encode(&mut self.outgoing);
        }
    }

    /// The hello of a peer with so many workers that knows stream connections.
    pub(super) fn hello_with_streams(workers: u16) -> Message {
        let Message::Hello(hello) = Self::hello() else { panic!("a hello") };
        Message::Hello(Hello { workers, features: Features::STREAM_CONNECTIONS, ..hello })
    }

    /// What stream connections call the session of this connection.
    pub(super) fn session_name(&self) -> [u8; 16] {
        let mut name = [0; 16];
        self.export(b"EXPORTER culvert session", &[], &mut name);
        name
    }

    /// A join of this connection to `session`, with its proof of possession.
    pub(super) fn join(&self, session: [u8; 16], number: u8) -> Join {
        Join { instance: [0x66; 16], session, number, possession: self.possession() }
    }

    /// The hello with the signature that belongs to this connection.
    fn proven(&self, hello: Hello) -> Message {
        let preshared_keys = self.preshared.iter().map(|key| self.proof(key)).collect();
        Message::Hello(Hello { possession: self.possession(), preshared_keys, ..hello })
    }

    /// The proof that the dialler of this connection has a preshared key.
    pub(super) fn proof(&self, key: &PresharedKey) -> KeyProof {
        let mut exported = [0; 32];
        self.export(b"EXPORTER culvert psk", &[], &mut exported);
        key.proof(&exported, Prover::Dialler)
    }

    fn possession(&self) -> Option<[u8; 64]> {
        let mut exported = [0; 32];
        self.export(b"EXPORTER-culvert-possession", &[], &mut exported);
        self.own.sign(&[&b"culvert possession 1"[..], &exported].concat())
    }

    /// What TLS exports. The labels stand here as in `docs/wire-format.md`, and are not those of the agent's code: an agent of another
    /// version must be understood.
    fn export(&self, label: &[u8], context: &[u8], out: &mut [u8]) {
        self.quinn.crypto_session().export_keying_material(out, label, context).unwrap();
    }

    /// Writes bytes to the control stream.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.outgoing.extend_from_slice(bytes);
    }

    /// Asks for a lane; the offer that was sent.
    pub(super) fn ask_for_lane(&mut self, lane: u8, epoch: u64) -> LaneOffer {
        let named = self.preshared.first().map(|key| self.proof(key));
        self.ask_for_lane_with(lane, epoch, named)
    }

    /// The same, with this proof of a preshared key.
    pub(super) fn ask_for_lane_with(
        &mut self,
        lane: u8,
        epoch: u64,
        preshared_key: Option<KeyProof>,
    ) -> LaneOffer {
        let offer = LaneOffer { lane, epoch, connection_id: self.ids.next_id().0, preshared_key, line: None };
        self.asked.push(offer);
        self.say(&Message::LaneOpen(offer));
        offer
    }

    /// How many lanes the agent has accepted.
    pub(super) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Datagrams that found the receive buffer full.
    pub(super) fn drops(&self) -> u64 {
        self.socket.drops()
    }

    /// The number of the `place`th flow that this end opens.
    pub(super) fn flow(&self, place: u64) -> FlowNumber {
        FlowNumber(2 * place + self.parity)
    }

    /// Sends `data` in a DATAGRAM frame on the newest lane.
    pub(super) fn send(&mut self, data: &[u8], now: Instant) {
        self.send_frame(&[&[DATAGRAM], data].concat(), now);
    }

    /// Sends a packet with these frames on the newest lane.
    pub(super) fn send_frame(&mut self, frames: &[u8], now: Instant) {
        let packet = self.seal(frames, now);
        self.socket.send(self.remote, &packet);
    }

    /// A packet with these frames of the newest lane.
    pub(super) fn seal(&mut self, frames: &[u8], now: Instant) -> Vec<u8> {
        let (_, lane) = self.lanes.last_mut().expect("a lane was accepted");
        let mut packet = vec![0; OVERHEAD + frames.len()];
        let start = quic_core::HEADER_LEN;
        packet[start..start + frames.len()].copy_from_slice(frames);
        lane.seal(&mut packet, true, now).unwrap();
        packet
    }

    /// Sends packets as they are.
    pub(super) fn send_packets(&mut self, packets: &[Vec<u8>]) {
        for packet in packets {
            self.socket.send(self.remote, packet);
        }
    }

    /// Opens a stream and begins it with these bytes; `None` if the agent allows no more.
    pub(super) fn open_stream(&mut self, bytes: &[u8]) -> Option<StreamId> {
        let id = self.quinn.streams().open(Dir::Bi)?;
        self.quinn.send_stream(id).write(bytes).unwrap();
        Some(id)
    }

    /// Takes the oldest stream that the agent has opened.
    pub(super) fn accept_stream(&mut self) -> Option<StreamId> {
        self.quinn.streams().accept(Dir::Bi)
    }

    /// Writes these bytes to a stream, which has room for them.
    pub(super) fn write_stream(&mut self, id: StreamId, bytes: &[u8]) {
        assert_eq!(self.quinn.send_stream(id).write(bytes), Ok(bytes.len()));
    }

    /// Wants no more of a stream.
    pub(super) fn stop_stream(&mut self, id: StreamId) {
        self.quinn.recv_stream(id).stop(VarInt::from_u32(1)).unwrap();
    }

    /// What has come on a stream; the error is the code with which the agent has reset it.
    pub(super) fn read_stream(&mut self, id: StreamId) -> Result<Vec<u8>, VarInt> {
        let mut stream = self.quinn.recv_stream(id);
        let Ok(mut chunks) = stream.read(true) else { panic!("the stream is read to its end, or stopped") };
        let mut came = Vec::new();
        let result = loop {
            match chunks.next(usize::MAX) {
                Ok(Some(chunk)) => came.extend_from_slice(&chunk.bytes),
                Ok(None) | Err(ReadError::Blocked) => break Ok(came),
                Err(ReadError::Reset(code)) => break Err(code),
            }
        };
        let _transmit = chunks.finalize();
        result
    }

    /// Whether the agent wants no more of a stream.
    pub(super) fn is_stopped(&mut self, id: StreamId) -> bool {
        !matches!(self.quinn.send_stream(id).stopped(), Ok(None))
    }

    /// Gives a stream up, both ways.
    pub(super) fn reset_stream(&mut self, id: StreamId) {
        self.quinn.send_stream(id).reset(VarInt::from_u32(1)).unwrap();
        self.quinn.recv_stream(id).stop(VarInt::from_u32(1)).unwrap();
    }

    /// Sends `data` in a DATAGRAM frame of the control connection, as standard mode does.
    pub(super) fn send_plain(&mut self, data: &[u8]) {
        self.quinn.datagrams().send(Bytes::copy_from_slice(data), true).unwrap();
    }

    /// The reason with which the agent closed the connection.
    pub(super) fn closed(&self) -> Option<CloseReason> {
        match &self.lost {
            Some(ConnectionError::ApplicationClosed(close)) => CloseReason::from_code(close.error_code),
            Some(other) => panic!("lost for another reason: {other}"),
            None => None,
        }
    }

    /// Takes what has come, and sends what there is to send.
    pub(super) fn poll(&mut self, now: Instant) {
        for (_, datagram) in self.socket.receive() {
            self.datagram(datagram, now);
        }
        if self.quinn.poll_timeout().is_some_and(|at| at <= now) {
            self.quinn.handle_timeout(now);
        }
        self.events();
        self.read(now);
        self.flush();
        while let Some(event) = self.quinn.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(self.handle, event) {
                self.quinn.handle_event(answer);
            }
        }
        let mut buffer = Vec::new();
        while let Some(transmit) = self.quinn.poll_transmit(now, 1, &mut buffer) {
            self.socket.send(self.remote, &buffer[..transmit.size]);
            buffer.clear();
        }
        let mut packet = [0; TRANSMIT_CAPACITY];
        for (_, lane) in &mut self.lanes {
            if lane.poll_timeout().is_some_and(|(at, _)| at <= now) {
                lane.handle_timeout(now);
            }
            while let Ok(Some(len)) = lane.poll_transmit(&mut packet, now) {
                self.socket.send(self.remote, &packet[..len]);
            }
        }
    }

    fn datagram(&mut self, mut datagram: Vec<u8>, now: Instant) {
        let cid = quic_core::destination(&datagram);
        let lane = self.lanes.iter_mut().find(|(known, _)| Some(*known) == cid);
        if let Some((_, lane)) = lane {
            let Ok(opened) = lane.open(&mut datagram, now) else { return };
            self.data.extend(opened.datagrams().map(|datagram| datagram.payload.to_vec()));
            if let Some(data) = opened.path_challenge {
                let mut packet = [0; TRANSMIT_CAPACITY];
                let len = lane.seal_path_response(data, &mut packet, now).unwrap();
                self.socket.send(self.remote, &packet[..len]);
            }
            return;
        }
        let data = BytesMut::from(&*datagram);
        let mut response = Vec::new();
        match self.endpoint.handle(now, self.remote, None, None, data, &mut response) {
            Some(DatagramEvent::ConnectionEvent(_, event)) => self.quinn.handle_event(event),
            Some(DatagramEvent::NewConnection(_) | DatagramEvent::Response(_)) | None => {}
        }
    }

    fn events(&mut self) {
        while let Some(event) = self.quinn.poll() {
            match event {
                Event::Connected => {
                    self.connected = true;
                    if let Some(hello) = self.waiting.take() {
                        let mut first = Vec::new();
                        self.proven(hello).encode(&mut first);
                        self.outgoing.splice(0..0, first);
                    }
                }
                Event::ConnectionLost { reason } => self.lost = Some(reason),
                Event::Stream(
                    StreamEvent::Opened { .. }
                    | StreamEvent::Readable { .. }
                    | StreamEvent::Writable { .. }
                    | StreamEvent::Finished { .. }
                    | StreamEvent::Stopped { .. }
                    | StreamEvent::Available { .. },
                )
                | Event::HandshakeDataReady
                | Event::DatagramReceived
                | Event::DatagramsUnblocked => {}
            }
        }
    }

    fn read(&mut self, now: Instant) {
        while let Some(data) = self.quinn.datagrams().recv() {
            self.data.push(data.to_vec());
        }
        let Some(id) = self.control.filter(|_| self.lost.is_none()) else { return };
        let mut stream = self.quinn.recv_stream(id);
        let Ok(mut chunks) = stream.read(true) else { return };
        let mut accepted = Vec::new();
        while let Ok(Some(chunk)) = chunks.next(usize::MAX) {
            let mut bytes = chunk.bytes;
            while let Some(message) = self.framer.pull(&mut bytes).unwrap() {
                let message = Message::decode(&message).unwrap();
                if let Message::LaneAccept(offer) = &message {
                    accepted.push(*offer);
                }
                self.messages.push(message);
            }
        }
        drop(chunks);
        for offer in accepted {
            self.accepted(&offer, now);
        }
    }

    fn accepted(&mut self, theirs: &LaneOffer, now: Instant) {
        let place = |offer: &LaneOffer| (offer.lane, offer.epoch);
        let asked = self.asked.iter().position(|asked| place(asked) == place(theirs));
        let ours = self.asked.swap_remove(asked.expect("only what was asked for is accepted"));
        assert_eq!(self.quinn.side(), Side::Client);
        let suite = suite::negotiated(self.quinn.crypto_session()).unwrap();
        // From the dialler, and to it.
        let [send, receive] = [0, 1].map(|direction| {
            let mut secret = vec![0; suite.secret_len()];
            let context = [&[0, theirs.lane, direction][..], &theirs.epoch.to_be_bytes()].concat();
            self.export(b"EXPORTER culvert lane", &context, &mut secret);
            if let Some(key) = self.preshared.first().filter(|_| self.mixes) {
                key.mix_into_lane(suite, &mut secret);
            }
            secret
        });
        let config = LaneConfig {
            suite,
            send_secret: &send,
            receive_secret: &receive,
            remote_cid: ConnectionId(theirs.connection_id),
            local_cid: ConnectionId(ours.connection_id),
            ack: AckProfile::Throughput,
            key_limit: None,
            initial_rtt: None,
        };
        let mut lane = Lane::new(&config).unwrap();
        let mut packet = [0; TRANSMIT_CAPACITY];
        let len = lane.seal_path_challenge([7; 8], &mut packet, now).unwrap();
        self.socket.send(self.remote, &packet[..len]);
        self.lanes.push((config.local_cid, lane));
    }

    fn flush(&mut self) {
        if !self.connected || self.lost.is_some() {
            return;
        }
        let id = *self.control.get_or_insert_with(|| self.quinn.streams().open(Dir::Bi).unwrap());
        let mut stream = self.quinn.send_stream(id);
        while !self.outgoing.is_empty() {
            match stream.write(&self.outgoing) {
                Ok(written) => drop(self.outgoing.drain(..written)),
                Err(_) => return,
            }
        }
    }
}

/// A malicious peer's address for its `place`th connection.
pub(super) fn address(ip: IpAddr, place: u16) -> SocketAddr {
    SocketAddr::new(ip, 50_000 + place)
}
