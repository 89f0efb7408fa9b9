//! An innocent pair, beside it a [`MaliciousPeer`] with an allowed key, and what was logged.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::Duration,
};

use base::clock::Clock;
use gate::identity::Identity;
use tracing::Dispatch;
use wire::{
    context::{Context, ServiceNumber},
    messages::{CloseReason, Features, Hello, Message},
};

use crate::{
    EXIT, INGRESS, Pair,
    harness::{Host, Udp},
    malicious::{MaliciousPeer, address},
    number_of, numbered,
};

/// The malicious peer's host.
pub(super) const ROGUE: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 6));
/// What the exit calls its service.
pub(super) const ECHO: ServiceNumber = ServiceNumber(0);

/// An innocent pair, and a malicious peer that has an allowed key at the exit.
pub(super) struct GateFlood {
    /// The innocent is its entry.
    pub(super) pair: Pair,
    pub(super) malicious: MaliciousPeer,
    /// Where the malicious peer's sockets are.
    pub(super) host: Host,
    pub(super) identity: Identity,
    innocent: Udp,
    next_number: u32,
}

impl GateFlood {
    /// The malicious peer's handshake is complete; it has said nothing.
    pub(super) fn new(seed: u64, limits: &str) -> Self {
        Self::with_window(seed, limits, None)
    }

    /// See [`MaliciousPeer::dial`] for `window`.
    pub(super) fn with_window(seed: u64, limits: &str, window: Option<u32>) -> Self {
        Self::with_workers(seed, 1, limits, window)
    }

    /// The exit has this many workers.
    pub(super) fn with_workers(seed: u64, workers: u8, limits: &str, window: Option<u32>) -> Self {
        Self::begin(seed, workers, limits, |pair, host, identity| dial(pair, host, identity, 0, window))
    }

    /// The malicious peer puts all it has on the wire at once; it has said hello and has lane 0 in epoch 1.
    pub(super) fn greedy(seed: u64, limits: &str) -> Self {
        let dial = |pair: &Pair, host: &mut Host, identity: &Identity| {
            let addresses = (address(ROGUE, 0), SocketAddr::new(EXIT, 4433));
            let keys = (identity, pair.exit_key.public_key().0);
            MaliciousPeer::dial_greedily(host, addresses, keys, &pair.world.clock)
        };
        Self::begin(seed, 1, limits, dial).given_a_lane()
    }

    fn begin(
        seed: u64,
        workers: u8,
        limits: &str,
        dial: impl FnOnce(&Pair, &mut Host, &Identity) -> MaliciousPeer,
    ) -> Self {
        let identity = Identity::generate().unwrap();
        let exit_extra = format!("{}\n{limits}", peer_table("rogue", &identity));
        let mut pair = Pair::with_workers(seed, (1, workers), "", &exit_extra);
        pair.wait_for_lanes(1);
        let mut host = pair.world.host(&[ROGUE]);
        let malicious = dial(&pair, &mut host, &identity);
        let innocent = pair.client(9000);
        let mut flood = Self { pair, malicious, host, identity, innocent, next_number: 0 };
        flood.run(100);
        assert!(flood.malicious.connected, "its key is allowed");
        flood
    }

    /// The malicious peer dials once more, from its port `place`.
    pub(super) fn dial_again(&mut self, place: u16) {
        self.malicious = dial(&self.pair, &mut self.host, &self.identity, place, None);
    }

    /// The malicious peer has said hello and has lane 0 in epoch 1.
    pub(super) fn with_lane(seed: u64, limits: &str) -> Self {
        Self::new(seed, limits).given_a_lane()
    }

    /// The malicious peer says hello with these features, in standard mode or for one lane.
    pub(super) fn say_hello(&mut self, standard: bool, features: Features) {
        if let Message::Hello(hello) = MaliciousPeer::hello_with_lanes(if standard { 0 } else { 64 }) {
            self.malicious.say(&Message::Hello(Hello { features, max_datagram_packet: 1452, ..hello }));
        }
        if !standard {
            self.malicious.ask_for_lane(0, 1);
        }
        self.run(100);
        assert_eq!(self.malicious.lanes(), usize::from(!standard));
    }

    fn given_a_lane(mut self) -> Self {
        self.malicious.say(&MaliciousPeer::hello());
        self.malicious.ask_for_lane(0, 1);
        self.run(100);
        assert_eq!(self.malicious.lanes(), 1);
        self
    }

    /// Lets time pass while the service answers and the malicious peer plays along.
    pub(super) fn run(&mut self, milliseconds: u64) {
        for _ in 0..milliseconds {
            self.pair.run_served(Duration::from_millis(1));
            self.malicious.poll(self.pair.world.clock.now());
        }
    }

    pub(super) fn send(&mut self, data: &[u8]) {
        self.malicious.send(data, self.pair.world.clock.now());
    }

    pub(super) fn open(&self, flow: u64, service: ServiceNumber) -> Vec<u8> {
        let number = self.malicious.flow(flow);
        Context::Open { number, service, client: None, payload_at: 0 }.encode().as_slice().to_vec()
    }

    /// The value of one of the exit's metrics.
    pub(super) fn metric(&mut self, series: &str) -> u64 {
        self.pair.world.metric(self.pair.exit, series)
    }

    pub(super) fn dropped(&mut self, reason: &str) -> u64 {
        self.metric(&format!("culvert_datagrams_dropped_total{{direction=\"downlink\",reason=\"{reason}\"}}"))
    }

    pub(super) fn message_errors(&mut self, reason: &str) -> u64 {
        self.metric(&format!("culvert_control_message_errors_total{{reason=\"{reason}\"}}"))
    }

    /// Twenty datagrams of the innocent peer come back, on the connection that it has had all along, and both agents
    /// account for all that they received.
    pub(super) fn assert_innocent_is_unharmed(&mut self) {
        let first = self.next_number;
        self.next_number += 20;
        for number in first..self.next_number {
            self.innocent.send(INGRESS, &numbered(number));
            self.run(2);
        }
        self.run(60);
        let answers: Vec<u32> =
            self.innocent.receive().iter().map(|(_, payload)| number_of(payload)).collect();
        assert_eq!(answers, (first..self.next_number).collect::<Vec<_>>());
        let (entry, exit) = (self.pair.entry, self.pair.exit);
        let established = "culvert_handshakes_total{outcome=\"established\"}";
        assert_eq!(self.pair.world.metric(entry, established), 1, "the innocent never had to dial again");
        for peer in [self.pair.world.peers(entry), self.pair.world.peers(exit)].concat() {
            assert!(peer.uplink.balances && peer.downlink.balances, "{peer:?}");
        }
    }

    /// The malicious peer's connection was closed for `reason`, and nothing of it is left but what drains.
    pub(super) fn assert_closed(&mut self, reason: CloseReason) {
        self.run(50);
        assert_eq!(self.malicious.closed(), Some(reason));
        assert!(!self.pair.world.peers(self.pair.exit)[1].connected());
        self.run(5000);
        assert_eq!(self.metric("culvert_connections"), 1, "the innocent's");
        assert_eq!(self.metric("culvert_lanes{state=\"draining\"}"), 0);
        assert_eq!(self.metric("culvert_lanes{state=\"up\"}"), 1);
    }
}

pub(super) fn peer_table(name: &str, identity: &Identity) -> String {
    let key = identity.public_key();
    format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\nservices = [\"echo\"]")
}

pub(super) fn dial(
    pair: &Pair,
    host: &mut Host,
    identity: &Identity,
    place: u16,
    window: Option<u32>,
) -> MaliciousPeer {
    let exit = SocketAddr::new(EXIT, 4433);
    let keys = (identity, pair.exit_key.public_key().0);
    MaliciousPeer::dial(host, address(ROGUE, place), exit, keys, window, &pair.world.clock)
}

/// The same from another address; its first packet is on its way.
pub(super) fn dial_from(
    pair: &Pair,
    host: &mut Host,
    identity: &Identity,
    (ip, place): (IpAddr, u16),
) -> MaliciousPeer {
    let exit = SocketAddr::new(EXIT, 4433);
    let keys = (identity, pair.exit_key.public_key().0);
    let mut malicious = MaliciousPeer::dial(host, address(ip, place), exit, keys, None, &pair.world.clock);
    malicious.poll(pair.world.clock.now());
    malicious
}

/// What was logged on this thread.
#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(super) fn record(&self, work: impl FnOnce()) {
        /// With one subscriber in the process, tracing asks that of the thread that comes to a line first, which may have none, and
        /// forgets the line for all. With two it asks both.
        static OTHER: LazyLock<Dispatch> =
            LazyLock::new(|| Dispatch::new(tracing_subscriber::fmt().with_writer(io::sink).finish()));
        LazyLock::force(&OTHER);
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || log.clone()).finish();
        tracing::subscriber::with_default(subscriber, work);
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
