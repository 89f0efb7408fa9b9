//! The cost of the gate's checks without a network, in one thread: bogus Initials, clients that knock, and clients that must prove
//! their address first.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{anyhow, ensure};
use base::clock::{Clock, ManualClock, SystemClock};
use culvert_gate::{
    Arrival, Gate, GateParts, Own, Verdict,
    admission::{Admits, Allowlist, Room},
    budget::Budget,
    client::{Knock, arm},
    identity::Identity,
    knock::ServerKey,
    replay_log::MemoryReplayLog,
    table::SingleUse,
    tls::{self, TlsIdentity},
};
use quinn_proto::{ConnectionId, Endpoint, crypto};
use rand::{RngExt, SeedableRng, rngs::SmallRng, rngs::StdRng};
use ring::hmac;
use serde_json::{Value, json};
use wire::cid::ConnectionIds;
use zeroize::Zeroizing;

use crate::initial::{BYTES, bogus};

/// Bogus Initials of one pass: too many for them or their tokens to stay in the nearest cache.
const INITIALS: usize = 1_024;

/// Knocks of one pass: well above what an idle budget grants at once, so that most of them are asked to prove their address.
const KNOCKS: u16 = 512;

/// The kinds of check take turns this often, so that a disturbance of the machine affects all of them.
const ROUNDS: u32 = 5;

/// The wall clock of the gate: knocks must not become too old between their making and the last pass.
const UNIX_TIME: Duration = Duration::from_secs(1_700_000_000);

/// Measures each kind for `duration`, over all rounds.
///
/// # Errors
/// A datagram that ended elsewhere in the gate, which would be a defect.
pub(crate) fn run(duration: Duration) -> anyhow::Result<Found> {
    let bench = Bench::new()?;
    let slice = duration / ROUNDS;
    let mut found = Found::default();
    for _ in 0..ROUNDS {
        found.bogus.add(repeat(slice, bench.bogus())?);
        found.knocks.add(repeat(slice, || bench.knocks())?);
        found.retries.add(repeat(slice, bench.retries()?)?);
    }
    Ok(found)
}

/// Repeats `pass` until the counted passes have taken `duration`; the first one is a warm-up and does not count.
fn repeat(duration: Duration, mut pass: impl FnMut() -> anyhow::Result<Sum>) -> anyhow::Result<Sum> {
    pass()?;
    let mut sum = Sum::default();
    while sum.elapsed < duration {
        sum.add(pass()?);
    }
    Ok(sum)
}

/// How many datagrams were checked, and how long that took.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    datagrams: u64,
    elapsed: Duration,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.datagrams += other.datagrams;
        self.elapsed += other.elapsed;
    }

    fn per_second(&self) -> f64 {
        self.datagrams as f64 / self.elapsed.as_secs_f64()
    }

    fn nanoseconds(&self) -> f64 {
        self.elapsed.as_secs_f64() * 1e9 / self.datagrams as f64
    }
}

/// The results of a run, by kind of check.
#[derive(Default)]
pub(crate) struct Found {
    bogus: Sum,
    knocks: Sum,
    retries: Sum,
}

impl Found {
    pub(crate) fn json(&self) -> Value {
        json!({
            "mode": "gate",
            "bogus_per_second": self.bogus.per_second(),
            "bogus_ns": self.bogus.nanoseconds(),
            "knocks_per_second": self.knocks.per_second(),
            "knocks_ns": self.knocks.nanoseconds(),
            "retries_per_second": self.retries.per_second(),
            "retries_ns": self.retries.nanoseconds(),
            "rounds": ROUNDS,
        })
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the gate, in memory                     ns each     a second")?;
        let rows = [
            ("bogus Initials refused", &self.bogus),
            ("valid knocks admitted", &self.knocks),
            ("Retry packets made", &self.retries),
        ];
        for (name, sum) in rows {
            writeln!(f, "{name:<28}{:>19.1}{:>13.0}", sum.nanoseconds(), sum.per_second())?;
        }
        Ok(())
    }
}

/// A server, and the datagrams that arrive at its gate.
struct Bench {
    own: Arc<Own>,
    ids: ConnectionIds,
    crypto: Arc<dyn crypto::ServerConfig>,
    clock: ManualClock,
    initials: Vec<[u8; BYTES as usize]>,
    /// First flights of clients that know the server's key, each with its source address.
    knocks: Vec<(SocketAddr, Vec<u8>)>,
}

/// An allowlist in open mode, without any peer.
struct Open;

impl Allowlist for Open {
    fn admits(&self, _agreement: &[u8; 32], _now: Instant) -> Admits {
        Admits::Anyone
    }
}

impl Bench {
    fn new() -> anyhow::Result<Self> {
        let server = Identity::from_seed(Zeroizing::new([2; 32]))?;
        let clock = ManualClock::new(UNIX_TIME);
        let own = Own::new(&server);
        let ids = ConnectionIds::new(own.issued.clone(), [3; 32], 0, 1);
        let mut rng = SmallRng::seed_from_u64(1);
        let mut datagrams = vec![[0; BYTES as usize]; INITIALS];
        datagrams.iter_mut().for_each(|datagram| bogus(datagram, &mut rng));
        Ok(Self {
            ids,
            crypto: tls::initial_crypto(&TlsIdentity::from_pkcs8(&server.pkcs8_der())?)?,
            initials: datagrams,
            knocks: knocks(&server, &clock)?,
            own,
            clock,
        })
    }

    /// A gate that has not checked anything yet.
    fn gate(&self) -> Gate {
        let now = self.clock.now();
        let unix_seconds = self.clock.unix_seconds();
        Gate::new(GateParts {
            own: Arc::clone(&self.own),
            ids: self.ids.clone(),
            allowlist: Arc::new(Open),
            refusals: Arc::default(),
            required: true,
            key_exchange: tls::KeyExchange::Hybrid,
            window: Duration::from_secs(90),
            table: SingleUse::restore(Box::<MemoryReplayLog>::default(), 1, Vec::new(), 0, now, unix_seconds),
            budget: Budget::new(1, now),
            clock: Arc::new(self.clock.clone()),
            crypto: Arc::clone(&self.crypto),
            rng: StdRng::from_seed([4; 32]),
        })
    }

    /// Passes over the bogus Initials, at one gate.
    fn bogus(&self) -> impl FnMut() -> anyhow::Result<Sum> + use<'_> {
        let (mut gate, now) = (self.gate(), self.clock.now());
        let source = SocketAddr::from((Ipv4Addr::new(198, 51, 100, 1), 4_433));
        move || {
            timed(self.initials.len(), || {
                let refused = |datagram: &&[u8; BYTES as usize]| {
                    gate.check(*datagram, arrival(source), now) == Verdict::Unauthenticated
                };
                self.initials.iter().filter(refused).count()
            })
        }
    }

    /// A pass over the knocks, at a fresh gate.
    fn knocks(&self) -> anyhow::Result<Sum> {
        /// The monotonic clock advances by this much from knock to knock, so that the budget refuses none.
        const STEP: Duration = Duration::from_millis(100);
        let (mut gate, mut now) = (self.gate(), self.clock.now());
        timed(self.knocks.len(), || {
            let admitted = |(source, datagram): &&(SocketAddr, Vec<u8>)| {
                now += STEP;
                matches!(gate.check(datagram, arrival(*source), now), Verdict::Admit(_))
            };
            self.knocks.iter().filter(admitted).count()
        })
    }

    /// Passes over the knocks that are asked to prove their address, at one gate whose budget is used up.
    fn retries(&self) -> anyhow::Result<impl FnMut() -> anyhow::Result<Sum> + use<'_>> {
        let (mut gate, now) = (self.gate(), self.clock.now());
        // A proof from the same source has one Retry in a moment, so each pass comes from ports of its own.
        let mut check = move |(source, datagram): &(SocketAddr, Vec<u8>), pass: u16| {
            let source = SocketAddr::new(source.ip(), pass);
            gate.check(datagram, arrival(source), now) == Verdict::Retry
        };
        // The first ones use up the budget; time stands still, so all others are told to come back.
        let first = self.knocks.iter().position(|knock| check(knock, 0));
        let first =
            first.ok_or_else(|| anyhow!("the budget granted every knock: a defect, please report it"))?;
        let (rest, mut pass) = (&self.knocks[first..], 0_u16);
        Ok(move || {
            pass = pass.wrapping_add(1);
            timed(rest.len(), || rest.iter().filter(|knock| check(knock, pass)).count())
        })
    }
}

fn arrival(source: SocketAddr) -> Arrival {
    Arrival { source, validated: false, listening: true, room: Room::Free }
}

/// Times `pass`, which says how many datagrams ended where they should; all `expected` must.
fn timed(expected: usize, pass: impl FnOnce() -> usize) -> anyhow::Result<Sum> {
    let start: Instant = SystemClock.now();
    let done = pass();
    let elapsed = SystemClock.now().saturating_duration_since(start);
    ensure!(
        done == expected,
        "{done} of {expected} datagrams ended where they should: a defect, please report it"
    );
    Ok(Sum { datagrams: done as u64, elapsed })
}

/// The first packets of clients that knock at `server`, each from an address of its own.
fn knocks(server: &Identity, clock: &ManualClock) -> anyhow::Result<Vec<(SocketAddr, Vec<u8>)>> {
    let client = Identity::from_seed(Zeroizing::new([1; 32]))?;
    let agreement = Arc::new(client.agreement_key());
    let key = ServerKey::new(&server.public_key()).ok_or_else(|| anyhow!("the public key is a point"))?;
    let key = Arc::new(key);
    let tls = tls::client_crypto(
        &TlsIdentity::from_pkcs8(&client.pkcs8_der())?,
        tls::KeyExchange::X25519,
        &[server.public_key().0],
    )?;
    let own = Own::new(&client);
    let ids = ConnectionIds::new(own.issued.clone(), [5; 32], 0, 1);
    let reset_key = Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &[6; 32]));
    let config = tls::endpoint_config(move || Box::new(ids.clone()), reset_key, Some([7; 32]));
    let mut endpoint = Endpoint::new(Arc::new(config), None, true, None);
    let (mut rng, now) = (SmallRng::seed_from_u64(2), clock.now());
    let to = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 4_433));
    let mut first_flights = Vec::new();
    for number in 0..KNOCKS {
        let (dcid, ephemeral): ([u8; 8], [u8; 32]) = (rng.random(), rng.random());
        let knock = Knock {
            own: Arc::clone(&agreement),
            server: Arc::clone(&key),
            unix_seconds: clock.unix_seconds(),
            ephemeral: Zeroizing::new(ephemeral),
            fallback: false,
        };
        let config = arm(Arc::clone(&tls), knock, Arc::new(move || ConnectionId::new(&dcid)));
        let (_, mut connection) = endpoint.connect(now, config, to, tls::SERVER_NAME)?;
        let mut datagram = Vec::new();
        ensure!(connection.poll_transmit(now, 1, &mut datagram).is_some(), "a client has something to say");
        let source = Ipv4Addr::from_bits(Ipv4Addr::new(203, 0, 0, 0).to_bits() + u32::from(number));
        first_flights.push((SocketAddr::from((source, 4_433)), datagram));
    }
    Ok(first_flights)
}

/// Every datagram ends where it should, and the figures of a run fit together.
pub(crate) fn self_test() -> anyhow::Result<()> {
    let bench = Bench::new()?;
    let (mut bogus, mut retries) = (bench.bogus(), bench.retries()?);
    for _ in 0..2 {
        assert_eq!(bogus()?.datagrams, INITIALS as u64);
        assert_eq!(bench.knocks()?.datagrams, u64::from(KNOCKS));
        assert!(retries()?.datagrams > u64::from(KNOCKS) / 2);
    }
    let found = run(Duration::from_millis(50))?.json();
    for kind in ["bogus", "knocks", "retries"] {
        let figure = |unit| found[format!("{kind}_{unit}")].as_f64();
        let nanoseconds = figure("ns").zip(figure("per_second")).map(|(each, rate)| each * rate);
        assert!(nanoseconds.is_some_and(|all| (all / 1e9 - 1.0).abs() < 1e-9), "{found:#}");
    }
    Ok(())
}
