//! The attacks, and the run of one of them.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result};
use bytes::Bytes;
use clap::ValueEnum;
use gate::identity::{Identity, PublicKey};
use tokio::{runtime::Builder, time::sleep};

use super::{
    contents::{Contents, Honest},
    duty::{Duty, Pace, thread_time},
    lane::{Lane, other_ports, path_challenge},
    messages::{self, Incoming, Proof},
    rounds,
    session::{Dialler, Session},
    socket::Leaky,
};

/// How many lanes an attack has: their packets come to two workers.
const LANES: u64 = 2;

/// Frames of a full packet on a path that carries 1280 bytes.
const FRAME_BYTES: usize = 1_200;

/// Packets of a lane between two looks at the clock.
const BURST: usize = 32;

/// Between two rounds of what the mixture sends beside its packets: as many messages as a session survives.
const BESIDE_SECONDS: f64 = 0.025;

/// Between two ports of an attacker in standard mode.
const MOVE_SECONDS: f64 = 0.02;

/// What is sent at full rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Attack {
    /// Datagrams of a few flows to a service: the control of all figures
    Honest,
    /// Control messages of three bytes behind a gap in the stream
    TinyMessages,
    /// Services that come and go, from a peer with many flows
    ServicesChanged,
    /// Flows without a datagram, each with a new number
    Openings,
    /// Flows that are opened and closed at once
    OpenClose,
    /// Flows whose numbers fall into one bucket of a hash without a secret
    Colliding,
    /// Path challenges, each from another port than the one before
    Challenges,
    /// First pieces of datagrams whose other pieces never come
    Fragments,
    /// Streams that end before their header does
    Headerless,
    /// Streams full of data for a service that never reads
    Unread,
    /// Resets told of streams that are open, may come or cannot come, after as many bytes as chance has it
    StreamAborts,
    /// Limits of streams that change thousands of times a second
    StreamCredits,
    /// Packets that leave in the reverse order, each of them twice, with data of streams that are then reset
    Overtaking,
    /// Payloads behind a number that never comes, in order: thousands wait, and are given up together
    Held,
    /// Numbers with wide gaps between them: each is to be asked for
    Gaps,
    /// Repair symbols that contradict the payloads that they cover
    Symbols,
    /// Reports about lanes by the thousand, whose times go back and whose totals cannot be
    Reports,
    /// IP packets to groups and to the agent's host, from our own addresses and from others', some of them broken
    Packets,
    /// IP packets to the ports of VXLAN and Geneve, in runs that may be joined and with lengths and headers that are wrong
    Inside,
    /// IP packets behind a number that never comes, in order
    HeldPackets,
    /// A second hello on each connection, and another connection after it
    Hellos,
    /// Stream connections that leave at once, or join under wrong names and numbers, or are more than may be
    Joins,
    /// Preshared keys that change without end, and proofs of keys that nobody has
    PresharedKeys,
    /// The first datagram of a ClientHello of two, without the second, under a valid knock
    HalfHellos,
    /// ClientHellos with an ML-KEM share that is none, of the right length
    WrongShares,
    /// Lanes that are closed again and again, for contradictory causes, and words of leaving that are not ours to say
    Farewells,
    /// An agent that dials us is asked to leave, for streams and for lanes, in contradiction and without end
    Leaving,
    /// Lanes that are opened and never used
    Lanes,
    /// Lanes on eight lines whose state changes without end, full of payloads that have no copy or many, in series by chance
    Lines,
    /// A key update with every packet
    KeyUpdates,
    /// Messages, headers and packets beyond every limit of size
    Oversized,
    /// All that a session survives, at the same time
    Mixed,
}

impl Attack {
    /// What is sent in DATAGRAM frames rather than messages or streams.
    pub(crate) fn is_of_contents(self) -> bool {
        match self {
            Self::Honest
            | Self::Openings
            | Self::OpenClose
            | Self::Colliding
            | Self::Fragments
            | Self::KeyUpdates
            | Self::Challenges
            | Self::Held
            | Self::Gaps
            | Self::Symbols
            | Self::Reports
            | Self::Packets
            | Self::Inside
            | Self::HeldPackets
            | Self::Lines
            | Self::Mixed => true,
            Self::TinyMessages
            | Self::ServicesChanged
            | Self::Headerless
            | Self::Unread
            | Self::StreamAborts
            | Self::StreamCredits
            | Self::Overtaking
            | Self::Hellos
            | Self::Joins
            | Self::PresharedKeys
            | Self::HalfHellos
            | Self::WrongShares
            | Self::Farewells
            | Self::Leaving
            | Self::Lanes
            | Self::Oversized => false,
        }
    }
}

/// Which way datagrams travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// On lanes
    Lanes,
    /// In DATAGRAM frames of the control connection
    Standard,
}

/// Whom to attack, as whom, and how.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) agent: SocketAddr,
    pub(crate) agent_key: PublicKey,
    pub(crate) identity: Identity,
    pub(crate) attack: Attack,
    pub(crate) mode: Mode,
    pub(crate) length: Duration,
    /// Percent of one processor.
    pub(crate) cpu: u32,
    /// What the honest peer sends; an attack has none.
    pub(crate) pace: Option<Pace>,
    /// Bytes of the honest peer's datagrams; else one of them fills a packet.
    pub(crate) datagram: Option<usize>,
    /// Flows of the honest peer.
    pub(crate) flows: u64,
    /// The inner address that the agent lets us have, if it has a device.
    pub(crate) inner: Ipv4Addr,
    /// Where the agent dials us, for the attack that waits for that.
    pub(crate) listen: Option<SocketAddr>,
}

/// What was sent.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) packets: u64,
    /// UDP payloads.
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    pub(crate) sessions: u64,
    pub(crate) failed_dials: u64,
    /// How sessions ended, and how many so.
    pub(crate) ends: BTreeMap<String, u64>,
    /// Why the last attempt to dial failed.
    pub(crate) refusal: Option<String>,
}

/// Runs one attack to its end.
///
/// # Errors
/// When nothing could be sent at all: a bad key, no socket, or an agent that never answers.
pub(crate) fn run(options: Options) -> Result<Report> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (attack, mode) = (options.attack, options.mode);
        let (cpu, length) = (options.cpu, options.length);
        let (pace, datagram, flows) = (options.pace, options.datagram, options.flows);
        let dialler = Dialler::new(options)?;
        // An agent dials when it likes.
        let first = if attack == Attack::Leaving { Some(dialler.dial().await?) } else { None };
        let (duty, ports) = (Duty::new(cpu, length), other_ports(64)?);
        let mut attacker = Attacker { attack, mode, pace, datagram, flows, duty, dialler, first, ports };
        attacker.run().await
    })
}

/// One attack on its way.
pub(crate) struct Attacker {
    attack: Attack,
    pub(crate) mode: Mode,
    pace: Option<Pace>,
    datagram: Option<usize>,
    flows: u64,
    pub(crate) duty: Duty,
    pub(crate) dialler: Dialler,
    /// A session that was there before the time began.
    first: Option<Session>,
    ports: Vec<UdpSocket>,
}

impl Attacker {
    async fn run(&mut self) -> Result<Report> {
        let (mut report, cpu) = (Report::default(), thread_time());
        let mut round = 0_u64;
        while !self.duty.is_over() {
            // An agent that has no key of ours refuses one.
            self.dialler.shows_keys = self.attack == Attack::PresharedKeys && round.is_multiple_of(2);
            let dialled = match self.first.take() {
                Some(session) => Ok(session),
                None => self.dialler.dial().await,
            };
            match dialled {
                Ok(mut session) => {
                    report.sessions += 1;
                    let outcome = self.harm(&mut session, round).await;
                    let end = match outcome {
                        Err(error) if !session.is_closed() => error.to_string(),
                        Ok(()) | Err(_) => session.end(),
                    };
                    *report.ends.entry(end).or_default() += 1;
                    session.leave();
                }
                Err(error) => {
                    report.failed_dials += 1;
                    report.refusal = Some(format!("{error:#}"));
                    sleep(Duration::from_millis(50)).await;
                }
            }
            round += 1;
            self.duty.rest().await;
        }
        // What closes the last session is still to be sent.
        sleep(Duration::from_millis(20)).await;
        (report.packets, report.bytes) = (self.dialler.sent.packets(), self.dialler.sent.bytes());
        report.seconds = self.duty.elapsed();
        report.cpu_seconds = thread_time().saturating_sub(cpu).as_secs_f64();
        Ok(report)
    }

    /// Attacks until the time is over or the session ends.
    async fn harm(&mut self, session: &mut Session, round: u64) -> Result<()> {
        if !self.attack.is_of_contents() {
            return rounds::harm(self, session, self.attack, round).await;
        }
        let service = session.service("sink")?;
        let own = self.dialler.own_addresses();
        let mut contents = Contents::new(self.attack, session.parity, service, self.honest(), own);
        if self.attack == Attack::HeldPackets {
            session.control.write_all(&messages::packet_repair()).await?;
        }
        match self.mode {
            Mode::Lanes => self.flood_lanes(session, &mut contents).await,
            Mode::Standard => self.flood_datagrams(session, &mut contents).await,
        }
    }

    /// What the honest peer sends.
    fn honest(&self) -> Honest {
        /// The header and tag of a packet, of a frame and of an opening.
        const AROUND: usize = 29 + 3 + 3;
        let whole = self.pace.map_or(FRAME_BYTES, |pace| pace.packet_bytes.saturating_sub(AROUND).max(1));
        Honest { bytes: self.datagram.unwrap_or(whole).min(whole), flows: self.flows.max(1) }
    }

    /// Packets that the honest peer should have sent by now and has not.
    fn due(&self) -> usize {
        let Some(pace) = self.pace else { return BURST };
        let due = self.duty.elapsed() * pace.packets_per_second - self.dialler.sent.packets() as f64;
        (due.max(0.0) as usize).min(2 * BURST)
    }

    /// Rests as a peer that is as fast as its share of a processor, or waits for what is due next.
    pub(crate) async fn rest(&mut self) {
        self.duty.rest().await;
        if self.pace.is_some() && self.due() == 0 {
            sleep(Duration::from_micros(500)).await;
        }
    }

    pub(crate) fn goes_on(&self, session: &Session) -> bool {
        !self.duty.is_over() && !session.is_closed()
    }

    /// Fills the packets of two lanes.
    async fn flood_lanes(&mut self, session: &mut Session, contents: &mut Contents) -> Result<()> {
        let mut lanes = Lanes { on_lines: self.attack == Attack::Lines, ..Lanes::default() };
        for index in 0..LANES {
            lanes.ask(session, index).await?;
        }
        let frame_bytes = self.pace.map_or(FRAME_BYTES, |pace| pace.packet_bytes.saturating_sub(29).max(12));
        let (mut frames, mut count, mut beside) = (Vec::new(), 0_usize, 0.0);
        while self.goes_on(session) {
            lanes.listen(session, &self.dialler).await?;
            let burst = self.due();
            for (index, lane) in &mut lanes.open {
                contents.lane = *index as usize;
                contents.heard = lane.heard();
                for _ in 0..burst.div_ceil(LANES as usize) {
                    count += 1;
                    self.push(lane, contents, &mut frames, frame_bytes, count);
                }
                lane.flush();
                lane.receive();
            }
            if self.duty.elapsed() > beside {
                beside = self.duty.elapsed() + BESIDE_SECONDS;
                rounds::beside(self.attack, session, &mut lanes, count).await?;
            }
            self.rest().await;
        }
        Ok(())
    }

    /// One packet of the attack.
    fn push(
        &self,
        lane: &mut Lane,
        contents: &mut Contents,
        frames: &mut Vec<u8>,
        bytes: usize,
        count: usize,
    ) {
        if self.attack == Attack::KeyUpdates {
            lane.update_keys();
            frames.clear();
            // A PING, and what makes it a packet of that size.
            frames.push(1);
            frames.resize(bytes, 0);
            lane.push(frames);
        } else if self.attack == Attack::Challenges {
            let mut challenge = path_challenge();
            challenge.resize(if count.is_multiple_of(2) { 9 } else { bytes }, 0);
            lane.send_from(&self.ports[count % self.ports.len()], &challenge);
        } else if self.attack == Attack::Mixed && count.is_multiple_of(64) {
            lane.update_keys();
            lane.send_from(&self.ports[count / 64 % self.ports.len()], &path_challenge());
        } else {
            contents.fill(frames, bytes);
            lane.push(frames);
        }
    }

    /// The same in DATAGRAM frames of the connection.
    async fn flood_datagrams(&mut self, session: &mut Session, contents: &mut Contents) -> Result<()> {
        let (mut moved, mut beside, mut count) = (0.0, 0.0, 0);
        while self.goes_on(session) {
            let room = session.connection.max_datagram_size().context("no DATAGRAM frames")?;
            for _ in 0..self.due() {
                if session.connection.datagram_send_buffer_space() < 8 * room {
                    break;
                }
                self.send(session, contents, room);
            }
            if self.attack == Attack::KeyUpdates {
                session.connection.force_key_update();
            }
            if matches!(self.attack, Attack::Challenges | Attack::Mixed) && self.duty.elapsed() > moved {
                moved = self.duty.elapsed() + MOVE_SECONDS;
                session.endpoint.rebind_abstract(Leaky::new(&self.dialler.sent)?)?;
            }
            if self.duty.elapsed() > beside {
                beside = self.duty.elapsed() + BESIDE_SECONDS;
                count += 1;
                rounds::beside(self.attack, session, &mut Lanes::default(), count).await?;
            }
            self.rest().await;
        }
        Ok(())
    }

    fn send(&self, session: &Session, contents: &mut Contents, room: usize) {
        let mut content = contents.next();
        content.truncate(room);
        // A datagram that the connection does not take is none that the agent sees.
        drop(session.connection.send_datagram(Bytes::from(content)));
    }
}

/// The lanes of a session, as the agent answers.
#[derive(Default)]
pub(crate) struct Lanes {
    open: BTreeMap<u64, Lane>,
    /// The newest one that was asked for.
    pub(crate) epoch: u64,
    /// Whether each of them is on a line of its own.
    on_lines: bool,
}

impl Lanes {
    /// Asks for the lane `index`, under a new epoch.
    pub(crate) async fn ask(&mut self, session: &mut Session, index: u64) -> Result<()> {
        self.ask_with(session, index, None).await
    }

    /// The same, with this proof of a preshared key.
    pub(crate) async fn ask_with(
        &mut self,
        session: &mut Session,
        index: u64,
        proof: Option<&Proof>,
    ) -> Result<()> {
        self.epoch += 1;
        let message = if self.on_lines {
            messages::lane_open_on_line(index, self.epoch, &rand::random())
        } else {
            messages::lane_open(index, self.epoch, &rand::random(), proof)
        };
        session.control.write_all(&message).await?;
        Ok(())
    }

    /// Takes what the agent said.
    async fn listen(&mut self, session: &mut Session, dialler: &Dialler) -> Result<()> {
        while let Ok(message) = session.inbox.try_recv() {
            match message {
                Incoming::LaneAccept { lane, epoch, connection_id } if lane < LANES => {
                    let opened = Lane::new(&session.connection, &dialler.sent, lane, epoch, connection_id)?;
                    self.open.insert(lane, opened);
                }
                Incoming::LaneClose { lane } if lane < LANES => {
                    self.open.remove(&lane);
                    self.ask(session, lane).await?;
                }
                Incoming::Hello { .. }
                | Incoming::LaneOpen { .. }
                | Incoming::LaneAccept { .. }
                | Incoming::LaneClose { .. }
                | Incoming::Other => (),
            }
        }
        Ok(())
    }
}
