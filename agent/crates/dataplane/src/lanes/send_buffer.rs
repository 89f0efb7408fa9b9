//! Send buffers: payloads become packets here, straight in the tail of their socket's send batch.
//!
//! ```text
//!   SendBatch  [packet][packet][packet][ header room | frame | frame | … ]
//!               └──────── committed ───┘└──── under construction ───────┘ ──finish──► sealed, committed
//! ```
//!
//! At most one packet is under construction per socket. Payloads of one batch that fit share it; whoever writes
//! for another lane finishes it first. A packet in which no further payload of this size would fit is finished at
//! once, with a DATAGRAM frame without length (RFC 9221 §4), so a run of equal payloads makes equal packets: one
//! GSO message.
//!
//! While the kernel has no room, a send buffer takes no payloads, and keeps those that it has for as long as they may wait
//! (`send_buffer_expiry.rs`). `send_buffer_packets.rs` writes frames and seals packets, `send_buffer_room.rs` has which sockets hold a
//! buffer. A reserve at its end is for the agent's own packets.

use std::{net::SocketAddr, time::Instant};

use base::ids::PeerId;
use net::{
    Burst, Path, SendBatch, SendFailure, SendOutcome, SendRefusal, Token, UdpRole, UdpSocket, batch::Message,
    carrier::is_stream, stats::Booked, way::Over,
};
use quic_core::{HEADER_LEN, TAG_LEN, frame::datagram};
use repair::Repaired;
use slab::Slab;
use wire::context::{Header, MOST_NUMBERED, REPAIR_OVERHEAD};

use crate::{
    lanes::{Frame, LaneId, Lanes, Payloads, frame::MOST_PREFIX as MOST_FRAME_PREFIX, numbers::Number},
    relay::{DropReason, Settlements, fragments::LEAST_PIECE},
};

/// Room for what precedes a payload in its packet: a frame's type and length (at most 9 bytes), a number for repair (at most 9), and a
/// context (at most 24).
const MAX_PREFIX: usize = 9 + MOST_NUMBERED + Header::CAPACITY;

/// Marks a message without a peer's payloads: control packets, acknowledgements.
const NO_OWNER: u32 = u32::MAX;

/// The owner of the decoy's answers to unauthenticated senders; no peer has this number.
pub const UNAUTHENTICATED: PeerId = PeerId(u32::MAX - 1);

/// The part of a send buffer that is not for payloads: room for acknowledgements, challenges, probes and control packets, some
/// 60 of the usual full size or one of the largest and 20 of those, while payloads fill the rest.
const RESERVE_BYTES: usize = 96 * 1024;

const RESERVE_MESSAGES: usize = 64;

/// Packets of this many bytes together are worth a system call of their own.
const WORTH_A_CALL: usize = 16 * 1024;

/// The send buffers that the sockets of a worker may hold at once: 44 MiB. Before another socket gets one, sockets that do not
/// need theirs give it back; if none does, the socket that has been without room for longest loses its own.
const MOST_SEND_BUFFERS: usize = 128;

/// The send buffers that a worker keeps for the next sockets, 2.8 MiB: allocating one costs 10 µs, which matters from turn to turn.
const MOST_SPARE: usize = 8;

/// The index of a socket among the worker's underlay sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnderlayId(pub u32);

/// Datagrams that wait in a send buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    pub datagrams: usize,
    /// Bytes of the datagrams that wait.
    pub bytes: usize,
}

/// Why a payload was not put into a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError {
    /// The payload does not fit into a packet; `most` is the largest one that does, with this header, in bytes.
    TooLarge { most: usize },
    /// The socket has no room: try again when it has.
    Blocked,
    /// The lane is not up, so it takes no payloads.
    NotUp,
}

/// The sizes of payloads that packets of a lane take now, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The largest payload that fits behind what is in the packet under construction; 0 if there is none.
    pub begun: usize,
    /// The largest payload that fits into a packet of its own.
    pub empty: usize,
}

impl Room {
    /// The length of the first of the pieces that the `left` bytes of a datagram are cut into.
    ///
    /// It fills the packet that the last piece of the datagram before has begun, unless it would be too short or more packets would
    /// carry the datagram. So the packets of a run of datagrams have one size and are one GSO message, and a lost one costs two
    /// datagrams at most.
    #[must_use]
    pub fn piece(self, left: usize) -> usize {
        let Self { begun, empty } = self;
        // What the last of the fewest packets has to carry.
        let rest = left.saturating_sub(left.div_ceil(empty.max(1)).saturating_sub(1) * empty);
        let most = if left > empty && begun >= rest.max(LEAST_PIECE) { begun } else { empty };
        left.min(most)
    }
}

/// The largest payload that fits behind a header of `header` bytes into a packet of `budget` bytes, alone.
fn alone_in(budget: usize, header: usize) -> usize {
    budget.saturating_sub(HEADER_LEN + datagram::encoded_len_to_end(header) + TAG_LEN)
}

/// The packet that is under construction.
#[derive(Clone, Copy, Debug)]
struct OpenPacket {
    lane: LaneId,
    peer: PeerId,
    /// Bytes so far, header room included.
    len: usize,
    frames: u16,
    /// Frames that carry a datagram, not only a message about a flow.
    payloads: u16,
    /// Its traffic class, which all frames in it ask for.
    tos: u8,
}

impl OpenPacket {
    /// Drops the packet: its lane or its socket is gone, or the lane's keys are used up.
    fn drop(self, settlements: &mut Settlements) {
        settlements.note(self.peer, u64::from(self.payloads), Some(DropReason::LaneClosed));
    }
}

/// A datagram that is added to a send buffer as a whole, not made of frames.
#[derive(Clone, Copy, Debug)]
struct Whole<'a> {
    path: &'a Path,
    /// Bytes that the datagram may have.
    most: usize,
    /// The number of the peer whose payload the datagram is, or [`NO_OWNER`].
    owner: u32,
}

/// One socket of the underlay and what is about to be sent on it.
pub struct Underlay {
    pub socket: Box<dyn UdpSocket>,
    /// Whether it listens for peers, or belongs to one dialled connection or lane.
    pub role: UdpRole,
    /// The line that it is bound to, if this host has several.
    pub line: Option<u8>,
    /// Its token, to be released with it.
    pub token: Token,
    /// What has been booked of it.
    pub booked: Booked,
    send_buffer: Option<SendBatch>,
    open: Option<OpenPacket>,
    /// Since when the kernel has had no room; no payloads are added until it has.
    blocked: Option<Instant>,
    dirty: bool,
    /// The kernel knew no way for what was sent last.
    unreachable: bool,
}

impl Underlay {
    /// Whether packets to `destination` go over TCP, or may do so: it repairs what is lost.
    #[must_use]
    pub fn is_over_tcp(&self, destination: &SocketAddr) -> bool {
        is_stream(destination) || self.socket.taken().is_some_and(|taken| taken.over != Over::Udp)
    }
}

/// All underlay sockets of a worker.
#[derive(Default)]
pub struct Underlays {
    sockets: Slab<Underlay>,
    /// Batches that no socket is using: an idle socket costs none.
    spare: Vec<SendBatch>,
    /// The number of those that were not needed since [`Underlays::free_spare`] was called last.
    unneeded: usize,
    /// The number of sockets that hold a batch.
    held: usize,
    /// Sockets whose send buffer another one needed.
    pub evicted: Vec<UnderlayId>,
    /// How often that has happened.
    pub send_buffers_taken_away: u64,
    dirty: Vec<UnderlayId>,
    /// Sockets for whose packets the kernel knew no way.
    pub unreachable: Vec<UnderlayId>,
    /// What the kernel has refused to send, and on which sockets.
    pub refusals: Vec<(UnderlayId, SendRefusal)>,
    /// Those that found no room since this was last asked.
    pub newly_blocked: Vec<UnderlayId>,
    pub settlements: Settlements,
}

impl Underlays {
    /// The id that [`Underlays::insert`] will give the next socket.
    #[must_use]
    pub fn vacant(&mut self) -> UnderlayId {
        UnderlayId(u32::try_from(self.sockets.vacant_key()).unwrap_or(u32::MAX))
    }

    pub fn insert(&mut self, socket: Box<dyn UdpSocket>, role: UdpRole, token: Token) -> UnderlayId {
        let id = self.vacant();
        self.sockets.insert(Underlay {
            socket,
            role,
            line: None,
            token,
            booked: Booked::default(),
            send_buffer: None,
            open: None,
            blocked: None,
            dirty: false,
            unreachable: false,
        });
        id
    }

    /// Gives `id` another socket; what waits goes out through that. Returns the old one.
    pub fn replace(
        &mut self,
        id: UnderlayId,
        socket: Box<dyn UdpSocket>,
        token: Token,
    ) -> Option<(Box<dyn UdpSocket>, Token, Booked)> {
        let underlay = self.sockets.get_mut(id.0 as usize)?;
        underlay.blocked = None;
        if underlay.send_buffer.is_some() && !underlay.dirty {
            underlay.dirty = true;
            self.dirty.push(id);
        }
        Some((
            std::mem::replace(&mut underlay.socket, socket),
            std::mem::replace(&mut underlay.token, token),
            std::mem::take(&mut underlay.booked),
        ))
    }

    /// Closes a socket; payloads still in its send buffer are settled as blocked.
    pub fn remove(&mut self, id: UnderlayId) -> Option<Underlay> {
        let mut underlay = self.sockets.try_remove(id.0 as usize)?;
        if let Some(open) = underlay.open.take() {
            open.drop(&mut self.settlements);
        }
        if let Some(batch) = underlay.send_buffer.take() {
            for message in batch.messages() {
                settle(&mut self.settlements, message, SendOutcome::Failed(SendFailure::WouldBlock));
            }
            self.give_back(batch);
        }
        Some(underlay)
    }

    #[must_use]
    pub fn get(&self, id: UnderlayId) -> Option<&Underlay> {
        self.sockets.get(id.0 as usize)
    }

    pub fn get_mut(&mut self, id: UnderlayId) -> Option<&mut Underlay> {
        self.sockets.get_mut(id.0 as usize)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Underlay> {
        self.sockets.iter().map(|(_, underlay)| underlay)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Underlay> {
        self.sockets.iter_mut().map(|(_, underlay)| underlay)
    }

    /// Puts one frame with a payload that may be repaired into a packet of `lane`.
    ///
    /// # Errors
    /// As those of [`Underlays::push`].
    #[inline]
    pub fn push(
        &mut self,
        lanes: &mut Lanes,
        lane: LaneId,
        frame: Frame<'_>,
        repair: Option<Repaired>,
        now: Instant,
    ) -> Result<(), PushError> {
        let slot = lanes.get_mut(lane).filter(|slot| slot.is_up()).ok_or(PushError::NotUp)?;
        // A payload sent for repair leaves room for what repairs it.
        let reserve = if repair.is_some() { REPAIR_OVERHEAD } else { 0 };
        // Taken out, because the lane seals meanwhile.
        let mut streams = repair.and_then(|_| slot.repair.take());
        let mut number = Number::of_streams(repair, streams.as_deref_mut(), now);
        let pushed = self.push_numbered(lanes, lane, frame, reserve, &mut number, now);
        if streams.is_some()
            && let Some(slot) = lanes.get_mut(lane)
        {
            slot.repair = streams;
        }
        pushed
    }

    /// Puts one frame into a packet of `lane` that has `reserve` bytes more.
    #[inline]
    fn push_numbered(
        &mut self,
        lanes: &mut Lanes,
        lane: LaneId,
        frame: Frame<'_>,
        reserve: usize,
        number: &mut Number<'_>,
        now: Instant,
    ) -> Result<(), PushError> {
        let slot = lanes.get(lane).ok_or(PushError::NotUp)?;
        let (id, budget, peer) = (slot.underlay, slot.size.budget(), slot.peer);
        let inner_len = frame.header.len() + frame.payload.len();
        let alone = HEADER_LEN + datagram::encoded_len_to_end(inner_len + reserve) + TAG_LEN;
        let data_len = number.header().len() + inner_len;
        let with_len = datagram::encoded_len(data_len);
        if alone > budget {
            return Err(PushError::TooLarge { most: alone_in(budget, frame.header.len() + reserve) });
        }
        let underlay = self.sockets.get_mut(id.0 as usize).ok_or(PushError::NotUp)?;
        if let Some(open) = underlay.open {
            if open.lane == lane && open.tos == frame.tos && open.len + with_len + TAG_LEN <= budget {
                return underlay.append(open, budget, frame, with_len - data_len, number);
            }
            underlay.finish(lanes, now, &mut self.settlements);
        }
        self.make_room(id, Share::Payloads, budget, now)?;
        let underlay = self.sockets.get_mut(id.0 as usize).ok_or(PushError::NotUp)?;
        let open = OpenPacket { lane, peer, len: HEADER_LEN, frames: 0, payloads: 0, tos: frame.tos };
        if HEADER_LEN + 2 * with_len + TAG_LEN <= budget {
            underlay.append(open, budget, frame, with_len - data_len, number)
        } else {
            underlay.append(open, budget, frame, 1, number)?;
            underlay.finish(lanes, now, &mut self.settlements);
            Ok(())
        }
    }

    /// The payloads that fit into packets of `lane` behind a header of `header` bytes, in packets with the traffic class `tos`.
    ///
    /// # Errors
    /// [`PushError::NotUp`].
    pub fn room(&self, lanes: &Lanes, lane: LaneId, header: usize, tos: u8) -> Result<Room, PushError> {
        let slot = lanes.get(lane).filter(|slot| slot.is_up()).ok_or(PushError::NotUp)?;
        let budget = slot.size.budget();
        let underlay = self.get(slot.underlay).ok_or(PushError::NotUp)?;
        let open = underlay.open.filter(|open| open.lane == lane && open.tos == tos);
        // A frame that is to fill the rest of the packet has at least the length of the rest, so that its prefix is no shorter.
        let begun = open.map_or(0, |open| {
            let rest = budget.saturating_sub(open.len + TAG_LEN);
            rest.saturating_sub(datagram::header_len(rest) + header)
        });
        Ok(Room { begun, empty: alone_in(budget, header) })
    }

    /// Puts datagrams into packets of `lane`, in order; returns how many, and why the next of them was not.
    pub fn push_all(
        &mut self,
        lanes: &mut Lanes,
        lane: LaneId,
        payloads: &Payloads<'_>,
        now: Instant,
    ) -> (usize, Result<(), PushError>) {
        let all = payloads.count();
        let mut prefix = [0; MOST_FRAME_PREFIX];
        let mut done = 0;
        while done < all {
            let left = payloads.skip(done);
            if let Err(error) = self.push(lanes, lane, left.first(&mut prefix), left.repair, now) {
                return (done, Err(error));
            }
            done += 1 + self.push_same_size(lanes, lane, &left.skip(1), now);
            if let Some(repair) = payloads.repair.filter(|repair| repair.numbered) {
                self.push_repairs(lanes, lane, repair.stream, now);
            }
        }
        (done, Ok(()))
    }

    /// Does with datagrams what [`Underlays::push`] just did with one of the same length, as long as that is simple:
    /// they fit into the same packet, or each fills one. Returns with how many.
    fn push_same_size(
        &mut self,
        lanes: &mut Lanes,
        lane: LaneId,
        payloads: &Payloads<'_>,
        now: Instant,
    ) -> usize {
        let Some(slot) = lanes.get_mut(lane) else { return 0 };
        let Some(underlay) = self.sockets.get_mut(slot.underlay.0 as usize) else { return 0 };
        match underlay.open {
            Some(open) => {
                let budget = slot.size.budget();
                underlay.append_same_size(open, budget, payloads, &mut Number::of(payloads.repair, slot, now))
            }
            None => {
                // Taken out, because the lane seals meanwhile.
                let mut repair = payloads.repair.and_then(|_| slot.repair.take());
                let mut number = Number::of_streams(payloads.repair, repair.as_deref_mut(), now);
                let count = underlay.seal_same_size(slot, payloads, &mut number, now);
                if repair.is_some() {
                    slot.repair = repair;
                }
                count
            }
        }
    }

    /// Seals whatever is under construction, so that only whole packets are left.
    pub fn finish(&mut self, lanes: &mut Lanes, now: Instant) {
        for id in &self.dirty {
            if let Some(underlay) = self.sockets.get_mut(id.0 as usize) {
                underlay.finish(lanes, now, &mut self.settlements);
            }
        }
    }

    /// Adds one packet that is already protected: `write` fills a slice of `most` bytes and returns the length,
    /// or `None` to add nothing. A packet that finds no room is not sent: acknowledgements and control packets are
    /// made again by who made them.
    pub fn packet(
        &mut self,
        lanes: &mut Lanes,
        id: UnderlayId,
        path: &Path,
        most: usize,
        now: Instant,
        write: impl FnOnce(&mut Lanes, &mut [u8]) -> Option<usize>,
    ) -> bool {
        self.whole(lanes, id, Whole { path, most, owner: NO_OWNER }, now, write)
    }

    /// Adds packets that are already protected; returns how many of them are not sent because they find no room. Many go to the kernel
    /// at once, without a copy, behind what waits already.
    pub fn packets(&mut self, lanes: &mut Lanes, id: UnderlayId, burst: &Burst<'_>, now: Instant) -> usize {
        let at_once = burst.bytes.len() >= WORTH_A_CALL;
        let sent = if at_once { self.send_now(lanes, id, burst, now) } else { 0 };
        let mut refused = 0;
        for packet in burst.bytes[sent..].chunks(burst.segment.max(1)) {
            refused += usize::from(!self.packet(lanes, id, &burst.path, packet.len(), now, copy_of(packet)));
        }
        refused
    }

    /// Sends packets at once; returns the bytes of those that need no more work.
    fn send_now(&mut self, lanes: &mut Lanes, id: UnderlayId, burst: &Burst<'_>, now: Instant) -> usize {
        let Some(underlay) = self.sockets.get_mut(id.0 as usize) else { return 0 };
        underlay.finish(lanes, now, &mut self.settlements);
        if !underlay.dirty {
            underlay.dirty = true;
            self.dirty.push(id);
        }
        if underlay.blocked.is_none() && underlay.send(&mut self.settlements, now) {
            self.newly_blocked.push(id);
        }
        if underlay.blocked.is_some() {
            return 0;
        }
        let unreachable = &mut underlay.unreachable;
        underlay.socket.send_now(burst, &mut |outcome| *unreachable |= is_unreachable(outcome))
    }

    /// Adds an answer of the decoy to an unauthenticated sender, as it is. One that is added is settled as a payload of
    /// [`UNAUTHENTICATED`]; false if it finds no room.
    pub fn answer(
        &mut self,
        lanes: &mut Lanes,
        id: UnderlayId,
        path: &Path,
        datagram: &[u8],
        now: Instant,
    ) -> bool {
        let whole = Whole { path, most: datagram.len(), owner: UNAUTHENTICATED.0 };
        self.whole(lanes, id, whole, now, copy_of(datagram))
    }

    /// Adds one datagram: `write` fills a slice of as many bytes as it may have and returns its length, or `None` to add nothing.
    fn whole(
        &mut self,
        lanes: &mut Lanes,
        id: UnderlayId,
        whole: Whole<'_>,
        now: Instant,
        write: impl FnOnce(&mut Lanes, &mut [u8]) -> Option<usize>,
    ) -> bool {
        let Whole { path, most, owner } = whole;
        let Some(underlay) = self.sockets.get_mut(id.0 as usize) else { return false };
        underlay.finish(lanes, now, &mut self.settlements);
        let share = if owner == NO_OWNER { Share::Whole } else { Share::Payloads };
        if self.make_room(id, share, most, now).is_err() {
            return false;
        }
        let Some(batch) =
            self.sockets.get_mut(id.0 as usize).and_then(|underlay| underlay.send_buffer.as_mut())
        else {
            return false;
        };
        let Some(len) = batch.tail(most).and_then(|tail| write(lanes, &mut tail[..most])) else {
            return false;
        };
        batch.commit(path, owner, len, u16::from(owner != NO_OWNER));
        true
    }

    /// Makes sure that a packet of `most` bytes has room in its share of the send buffer of socket `id`, sending what is there if it must.
    fn make_room(
        &mut self,
        id: UnderlayId,
        share: Share,
        most: usize,
        now: Instant,
    ) -> Result<(), PushError> {
        let underlay = self.sockets.get_mut(id.0 as usize).ok_or(PushError::NotUp)?;
        if underlay.blocked.is_some() && share == Share::Payloads {
            return Err(PushError::Blocked);
        }
        if !underlay.dirty {
            underlay.dirty = true;
            self.dirty.push(id);
        }
        match &underlay.send_buffer {
            Some(batch) if share.fits(batch, most) => return Ok(()),
            Some(_) => {}
            None => {
                self.give_send_buffer(id, now);
                return Ok(());
            }
        }
        let underlay = self.sockets.get_mut(id.0 as usize).ok_or(PushError::NotUp)?;
        if underlay.blocked.is_none() && underlay.send(&mut self.settlements, now) {
            self.newly_blocked.push(id);
        }
        match underlay.send_buffer.as_ref().is_some_and(|batch| share.fits(batch, most)) {
            true => Ok(()),
            false => Err(PushError::Blocked),
        }
    }

    /// Hands everything that waits to the kernel.
    pub fn flush(&mut self, lanes: &mut Lanes, now: Instant) {
        while let Some(id) = self.dirty.pop() {
            let Some(underlay) = self.sockets.get_mut(id.0 as usize) else { continue };
            underlay.dirty = false;
            underlay.finish(lanes, now, &mut self.settlements);
            if underlay.blocked.is_none() && underlay.send(&mut self.settlements, now) {
                self.newly_blocked.push(id);
            }
            if std::mem::take(&mut underlay.unreachable) {
                self.unreachable.push(id);
            }
            self.refusals.extend(underlay.socket.take_refusals().into_iter().map(|refusal| (id, refusal)));
            if underlay.blocked.is_none()
                && let Some(batch) = underlay.send_buffer.take()
            {
                self.give_back(batch);
            }
        }
    }
}

fn is_unreachable(outcome: SendOutcome) -> bool {
    match outcome {
        SendOutcome::Sent => false,
        SendOutcome::Partly { why, .. } | SendOutcome::Failed(why) => why == SendFailure::Unreachable,
    }
}

/// Which part of a send buffer a packet may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    /// The send buffer without the reserve.
    Payloads,
    Whole,
}

impl Share {
    #[inline]
    fn fits(self, batch: &SendBatch, bytes: usize) -> bool {
        match self {
            Self::Payloads => batch.has_room(1 + RESERVE_MESSAGES, bytes + RESERVE_BYTES),
            Self::Whole => batch.has_room(1, bytes),
        }
    }
}

/// Writes a copy of `datagram`, which is complete: for [`Underlays::packet`].
pub fn copy_of(datagram: &[u8]) -> impl FnOnce(&mut Lanes, &mut [u8]) -> Option<usize> {
    |_, tail| {
        tail.copy_from_slice(datagram);
        Some(datagram.len())
    }
}

/// Notes what became of a message's payloads; other messages are nobody's.
fn settle(settlements: &mut Settlements, message: &Message, outcome: SendOutcome) {
    if message.owner != NO_OWNER {
        let (payloads, segments) = (u64::from(message.payloads), u64::from(message.segments));
        settlements.message(PeerId(message.owner), payloads, segments, outcome);
    }
}

#[path = "send_buffer_expiry.rs"]
mod expiry;
#[path = "send_buffer_packets.rs"]
mod packets;
#[path = "send_buffer_room.rs"]
mod room;
pub use expiry::Expiry;
#[cfg(test)]
#[path = "send_buffer_tests.rs"]
mod tests;
