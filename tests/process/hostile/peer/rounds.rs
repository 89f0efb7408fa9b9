//! Attacks on the control connection and its streams. Most of them end the session; the next round dials again.

use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use quinn::SendStream;
use tokio::time::{sleep, timeout};

use super::{
    attack::{Attack, Attacker, Lanes, Mode},
    handshakes,
    messages::{self, Incoming, STREAMS_IN_MESSAGE},
    payload::{Payload, put_varint},
    rotations,
    session::Session,
};

/// How long the agent may take to end a session that it does not like.
const END_LIMIT: Duration = Duration::from_millis(500);

/// Messages of a burst: more than may wait at the agent.
const TINY_MESSAGES: usize = 80_000;

/// Flows that the peer has while its services come and go.
const FLOWS: u64 = 4_000;

/// Lists of services in a burst: more than a peer's rate.
const LISTS: usize = 1_000;

/// What opens every 20 ms: with 800 messages a second the session stays.
const LANES_AT_ONCE: u64 = 16;

/// Streams that wait for the rest of their header.
const STREAMS: usize = 1_000;

/// Streams at a time to the service that does not read.
const UNREAD_STREAMS: usize = 64;

/// Runs one round of `attack`.
pub(super) async fn harm(
    attacker: &mut Attacker,
    session: &mut Session,
    attack: Attack,
    round: u64,
) -> Result<()> {
    match attack {
        Attack::TinyMessages => tiny_messages(attacker, session).await,
        Attack::ServicesChanged => services_changed(attacker, session).await,
        Attack::Hellos => {
            let hello = attacker.dialler.hello(&session.connection)?;
            session.control.write_all(&hello).await?;
            wait_for_end(session).await;
            Ok(())
        }
        Attack::Joins => handshakes::joins(attacker, session).await,
        Attack::PresharedKeys => rotations::rotate(attacker, session).await,
        Attack::HalfHellos => handshakes::half_hellos(attacker, session).await,
        Attack::WrongShares => handshakes::wrong_shares(attacker, session).await,
        Attack::Farewells => farewells(attacker, session).await,
        Attack::Leaving => leaving(attacker, session).await,
        Attack::Lanes => abandoned_lanes(attacker, session).await,
        Attack::Headerless => headerless(attacker, session).await,
        Attack::Unread => unread(attacker, session).await,
        Attack::StreamAborts => stream_aborts(attacker, session).await,
        Attack::StreamCredits => stream_credits(attacker, session).await,
        Attack::Overtaking => overtaking(attacker, session).await,
        Attack::Oversized => oversized(attacker, session, round).await,
        Attack::Honest
        | Attack::Openings
        | Attack::OpenClose
        | Attack::Colliding
        | Attack::Challenges
        | Attack::Fragments
        | Attack::KeyUpdates
        | Attack::Held
        | Attack::Gaps
        | Attack::Symbols
        | Attack::Reports
        | Attack::Packets
        | Attack::Inside
        | Attack::HeldPackets
        | Attack::Lines
        | Attack::Mixed => Ok(()),
    }
}

pub(super) async fn wait_for_end(session: &Session) {
    // An agent that lets the session live is attacked on it again.
    drop(timeout(END_LIMIT, session.connection.closed()).await);
}

async fn tiny_messages(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    let messages = messages::unknown(0).repeat(TINY_MESSAGES);
    while attacker.goes_on(session) {
        session.socket.lose_next();
        session.control.write_all(&messages).await?;
        wait_for_end(session).await;
        attacker.rest().await;
    }
    Ok(())
}

async fn services_changed(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    if attacker.mode == Mode::Standard {
        let service = session.service("sink")?;
        for place in 0..FLOWS {
            let opening = Payload::Open { flow: place * 2 + session.parity, service };
            session.connection.send_datagram_wait(Bytes::from(opening.encode())).await?;
        }
    }
    let mut lists = messages::services_changed("one");
    lists.extend(messages::services_changed(""));
    let lists = lists.repeat(LISTS);
    while attacker.goes_on(session) {
        session.control.write_all(&lists).await?;
        wait_for_end(session).await;
        attacker.rest().await;
    }
    Ok(())
}

async fn abandoned_lanes(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    const INTERVAL: Duration = Duration::from_millis(20);
    let (mut lanes, mut index) = (Lanes::default(), 0);
    while attacker.goes_on(session) {
        for _ in 0..LANES_AT_ONCE {
            lanes.ask(session, index % 64).await?;
            index += 1;
        }
        while session.inbox.try_recv().is_ok() {}
        attacker.rest().await;
        sleep(INTERVAL).await;
    }
    Ok(())
}

/// Opens a stream that begins with `bytes`; nothing if the agent allows no more.
async fn open_stream(session: &Session, bytes: &[u8]) -> Result<Option<SendStream>> {
    const PATIENCE: Duration = Duration::from_millis(2);
    let Ok(opened) = timeout(PATIENCE, session.connection.open_bi()).await else { return Ok(None) };
    let (mut stream, _) = opened?;
    stream.write_all(bytes).await?;
    Ok(Some(stream))
}

async fn headerless(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    let mut streams = Vec::new();
    while attacker.goes_on(session) {
        // A header of two bytes, of which none comes.
        match open_stream(session, &[2]).await? {
            Some(stream) if streams.len() < STREAMS => streams.push(stream),
            Some(_) | None => streams.drain(..).for_each(|mut stream| drop(stream.reset(0u8.into()))),
        }
        attacker.rest().await;
    }
    Ok(())
}

async fn overtaking(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    let header = messages::stream_open(session.service("mute")?);
    let mut first = header.clone();
    first.resize(48 * 1024, 0);
    session.socket.scramble();
    while attacker.goes_on(session) {
        if let Some(mut stream) = open_stream(session, &first).await? {
            stream.reset(0u8.into())?;
        }
        attacker.rest().await;
    }
    Ok(())
}

async fn unread(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    const PATIENCE: Duration = Duration::from_millis(1);
    const STUCK: u32 = 20;
    let header = messages::stream_open(session.service("mute")?);
    let chunk = vec![0; 65_536];
    let (mut streams, mut stuck) = (Vec::new(), 0);
    while attacker.goes_on(session) {
        if streams.len() < UNREAD_STREAMS {
            streams.extend(open_stream(session, &header).await?);
        }
        let mut written = 0;
        for stream in &mut streams {
            match timeout(PATIENCE, stream.write(&chunk)).await {
                Ok(Ok(bytes)) => written += bytes,
                // Refused or reset.
                Ok(Err(_)) => stuck = STUCK,
                Err(_) => (),
            }
            attacker.duty.rest().await;
        }
        stuck = if written == 0 { stuck + 1 } else { stuck };
        if stuck >= STUCK {
            stuck = 0;
            streams.drain(..).for_each(|mut stream| drop(stream.reset(0u8.into())));
        }
    }
    Ok(())
}

/// Full messages, as many as a session survives: of streams that are open, that may come, and that cannot.
async fn stream_aborts(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    /// 1,000 units a second are free, and a message of 256 streams costs 30.
    const INTERVAL: Duration = Duration::from_millis(31);
    const STREAM_BYTES: usize = 1_024;
    /// Streams that an agent may allow in addition.
    const MAY_COME: u64 = 1_024;
    let mut begun = messages::stream_open(session.service("mute")?);
    begun.resize(STREAM_BYTES, 0);
    let bytes = || rand::random_range(0..2 * STREAM_BYTES as u64);
    let mut last = 0;
    while attacker.goes_on(session) {
        let (mut streams, mut aborts) = (Vec::new(), Vec::new());
        while streams.len() < UNREAD_STREAMS
            && let Some(stream) = open_stream(session, &begun).await?
        {
            last = stream.id().into();
            aborts.push((last, bytes()));
            streams.push(stream);
        }
        for place in aborts.len()..STREAMS_IN_MESSAGE {
            let may_come = last + 4 * rand::random_range(1..MAY_COME);
            let stream = if place.is_multiple_of(2) { may_come } else { rand::random_range(0..1 << 62) };
            aborts.push((stream, bytes()));
        }
        session.control.write_all(&messages::stream_abort(&aborts)).await?;
        attacker.rest().await;
        sleep(INTERVAL).await;
        // What the agent has not reset ends in order.
        drop(streams);
    }
    Ok(())
}

/// The limits of a few streams change several times in each message, as many as a session survives.
async fn stream_credits(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    /// 1,000 units a second are free, and a message of 256 limits costs 3.
    const INTERVAL: Duration = Duration::from_millis(3);
    let header = messages::stream_open(session.service("mute")?);
    let mut streams = Vec::new();
    while streams.len() < UNREAD_STREAMS {
        let (mut stream, answers) = session.connection.open_bi().await?;
        stream.write_all(&header).await?;
        streams.push((stream, answers));
    }
    let mut initial = 0;
    while attacker.goes_on(session) {
        let places = 0..STREAMS_IN_MESSAGE;
        let limits = places.map(|place| {
            let (stream, _) = &streams[place % streams.len()];
            (stream.id().into(), 1 + (place / streams.len()) as u64 % 2)
        });
        initial = 1 - initial;
        let message = messages::stream_credit(initial, &limits.collect::<Vec<_>>());
        session.control.write_all(&message).await?;
        attacker.rest().await;
        sleep(INTERVAL).await;
    }
    Ok(())
}

async fn oversized(attacker: &mut Attacker, session: &mut Session, round: u64) -> Result<()> {
    match round % 4 {
        0 => {
            let mut message = Vec::new();
            put_varint(&mut message, 1 << 40);
            message.resize(100_000, 0);
            session.control.write_all(&message).await?;
        }
        1 => {
            let messages = messages::unknown(65_000).repeat(8);
            session.control.write_all(&messages).await?;
        }
        2 => {
            let header = messages::framed(&vec![0; 8_192]);
            while attacker.goes_on(session) && open_stream(session, &header).await?.is_some() {
                attacker.rest().await;
            }
        }
        _ => {
            let list: Vec<u8> =
                (0..64).flat_map(|_| messages::services_changed(&"x".repeat(60_000))).collect();
            session.control.write_all(&list).await?;
        }
    }
    wait_for_end(session).await;
    Ok(())
}

/// Closes lanes that are there, were there and never were, for each cause in turn, as often as a session survives. At the end of a
/// session comes what only the agent may say, or only a stream connection.
async fn farewells(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    /// 1,000 units a second are free; a message costs one, and an address that is shown four.
    const INTERVAL: Duration = Duration::from_millis(50);
    const LANES_A_ROUND: u64 = 8;
    const ROUNDS: u64 = 100;
    const CAUSES: u64 = 7;
    let (mut lanes, mut round) = (Lanes::default(), 0_u64);
    while attacker.goes_on(session) {
        let mut said = messages::here();
        for place in 0..LANES_A_ROUND {
            let index = (round * LANES_A_ROUND + place) % 64;
            if attacker.mode == Mode::Lanes {
                lanes.ask(session, index).await?;
            }
            for (later, epoch) in
                [lanes.epoch, lanes.epoch, lanes.epoch / 2, lanes.epoch + 1].into_iter().enumerate()
            {
                said.extend(messages::lane_close(index, epoch, (round + place + later as u64) % CAUSES));
            }
        }
        session.control.write_all(&said).await?;
        while session.inbox.try_recv().is_ok() {}
        round += 1;
        if round.is_multiple_of(ROUNDS) {
            let all = [messages::leave(), messages::release(), messages::streams_wanted()];
            session.control.write_all(&all[(round / ROUNDS) as usize % all.len()]).await?;
            wait_for_end(session).await;
        }
        attacker.rest().await;
        sleep(INTERVAL).await;
    }
    Ok(())
}

/// To an agent that dialled us: asks it to leave without letting it go, for streams that nobody needs, and for lanes that are closed as
/// soon as they are asked for.
async fn leaving(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    /// 1,000 units a second are free, and each message costs one.
    const INTERVAL: Duration = Duration::from_millis(25);
    const EACH: usize = 5;
    /// Answers to one `LaneOpen`, and how many of these are answered in a round.
    const CAUSES: u64 = 5;
    const OPENINGS: usize = 2;
    const ROUNDS: u32 = 60;
    for _ in 0..ROUNDS {
        if !attacker.goes_on(session) {
            break;
        }
        let mut said = messages::leave().repeat(EACH);
        said.extend(messages::streams_wanted().repeat(EACH));
        let mut answered = 0;
        while answered < OPENINGS
            && let Ok(message) = session.inbox.try_recv()
        {
            if let Incoming::LaneOpen { lane, epoch } = message {
                answered += 1;
                said.extend(messages::lane_accept(lane, epoch));
                said.extend(messages::lane_refuse(lane, epoch, 2));
                said.extend((1..=CAUSES).flat_map(|cause| messages::lane_close(lane, epoch, cause)));
            }
        }
        session.control.write_all(&said).await?;
        attacker.rest().await;
        sleep(INTERVAL).await;
    }
    Ok(())
}

/// What goes on beside the packets of an attack: as many messages as a session survives, and streams.
pub(super) async fn beside(
    attack: Attack,
    session: &mut Session,
    lanes: &mut Lanes,
    count: usize,
) -> Result<()> {
    // Standard mode has no lines.
    let attacks_lanes = lanes.epoch > 0;
    if attack == Attack::Reports {
        let rate = [0, 1, 1_000_000, u64::MAX][count % 4];
        session.control.write_all(&messages::reports_wanted(count.is_multiple_of(2))).await?;
        session.control.write_all(&messages::receive_rate(rate)).await?;
    }
    if attack == Attack::Lines && attacks_lanes {
        let turn = u64::from(rand::random::<u32>());
        session.control.write_all(&messages::line_state(turn % 2, turn)).await?;
        if turn.is_multiple_of(8) {
            lanes.ask(session, 2 + turn / 8 % 6).await?;
        }
    }
    if attack != Attack::Mixed {
        return Ok(());
    }
    let name = if count.is_multiple_of(2) { "one" } else { "" };
    session.control.write_all(&messages::services_changed(name)).await?;
    lanes.ask(session, 2 + count as u64 % 62).await?;
    if let Some(mut stream) = open_stream(session, &[2]).await? {
        stream.reset(0u8.into())?;
    }
    Ok(())
}
