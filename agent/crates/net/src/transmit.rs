//! Sends messages: many per `sendmmsg`, cut by `UDP_SEGMENT`, and in single datagrams where that fails.
//!
//! | the kernel says | to a GSO message | to a single datagram |
//! |---|---|---|
//! | EIO (the device cannot checksum, or IPsec) | GSO is off for the destination for [`GSO_RETRY`]; sent as singles | fails |
//! | EMSGSIZE, EINVAL (too large) | sent as singles, so that each pays for itself; GSO stays on, because a peer could cause this | fails |
//! | ECONNREFUSED and the like, connected socket | tried once more: the error belongs to an earlier datagram | the same |
//! | EAGAIN | stops; progress is kept in the message | the same |

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    sync::Once,
    time::{Duration, Instant},
};

use base::clock::Clock;

use crate::{
    Gso, ReceiveBatch, SendFailure, SendOutcome, SendRefusal, UdpStats,
    batch::{Message, Progress},
    delivery::{DeliveryMessage, Piece},
    sys::{Envelope, Outgoing, Scratch},
};

/// The time for which GSO stays off for a destination after EIO; routes and devices change on this scale (our choice).
pub(super) const GSO_RETRY: Duration = Duration::from_secs(60);

/// Destinations whose GSO may be off at once; past this one more is tried with GSO each time, which costs a system call.
const GSO_OFF_DESTINATIONS: usize = 1_024;

/// The kernel's part of a send; a test replaces it to inject failures.
pub(super) type RawSend = for<'s, 'b> fn(&mut Outgoing<'s, 'b>, BorrowedFd<'_>) -> io::Result<usize>;

/// The outline of a message that the send loop needs.
#[derive(Clone, Copy)]
pub(super) struct Outline {
    envelope: Envelope,
    segment: usize,
    segments: u16,
}

/// Messages of one kind of batch, and where their bytes are.
pub(super) trait Cargo<'b> {
    /// The kind of message that a batch holds.
    type Message;
    /// The outline of the message that the send loop needs.
    fn outline(&self, message: &Self::Message) -> Outline;
    /// How much of the message has been handed to the kernel.
    fn progress<'m>(&self, message: &'m mut Self::Message) -> &'m mut Progress;
    /// Adds it to `call` as one GSO message, or as the one datagram that it is.
    fn push_message(&self, message: &Self::Message, outline: &Outline, call: &mut Outgoing<'_, 'b>);
    /// The datagram of the message with this index.
    fn segment(&self, message: &Self::Message, index: u16) -> &'b [u8];
}

/// The cargo of a `SendBatch`: its buffer.
pub(super) struct Contiguous<'b>(pub(super) &'b [u8]);

impl<'b> Cargo<'b> for Contiguous<'b> {
    type Message = Message;

    fn outline(&self, message: &Message) -> Outline {
        let path = message.path;
        let envelope = Envelope { destination: Some(path.destination), source: path.source, tos: path.tos };
        Outline { envelope, segment: message.segment, segments: message.segments }
    }

    fn progress<'m>(&self, message: &'m mut Message) -> &'m mut Progress {
        &mut message.progress
    }

    fn push_message(&self, message: &Message, outline: &Outline, call: &mut Outgoing<'_, 'b>) {
        let bytes = &self.0[message.range.clone()];
        call.push(&outline.envelope, outline.segment, outline.segments, std::iter::once(bytes));
    }

    fn segment(&self, message: &Message, index: u16) -> &'b [u8] {
        &self.0[message.segment_range(index)]
    }
}

/// The cargo of a `Delivery`: pieces of received buffers.
pub(super) struct Scattered<'b> {
    pub(super) received: &'b ReceiveBatch,
    pub(super) pieces: &'b [Piece],
}

impl<'b> Cargo<'b> for Scattered<'b> {
    type Message = DeliveryMessage;

    fn outline(&self, message: &DeliveryMessage) -> Outline {
        let envelope = Envelope { destination: message.to.destination, source: message.to.source, tos: 0 };
        Outline { envelope, segment: message.segment, segments: message.payloads }
    }

    fn progress<'m>(&self, message: &'m mut DeliveryMessage) -> &'m mut Progress {
        &mut message.progress
    }

    fn push_message(&self, message: &DeliveryMessage, outline: &Outline, call: &mut Outgoing<'_, 'b>) {
        let pieces = self.pieces[message.pieces.clone()].iter().map(|piece| piece.bytes(self.received));
        call.push(&outline.envelope, outline.segment, outline.segments, pieces);
    }

    fn segment(&self, message: &DeliveryMessage, index: u16) -> &'b [u8] {
        message.payload(index, self.pieces, self.received)
    }
}

/// The state that a socket keeps for sending.
pub(super) struct Transmitter {
    connected: Option<SocketAddr>,
    gso: bool,
    /// Destinations where GSO failed with EIO, and when to try it again. By address: a port does not change the route.
    /// Peers choose theirs, so the hash has a secret.
    gso_off: HashMap<IpAddr, Instant>,
    /// A connected socket's refusal that a second try swallowed; `receive` reports it.
    pub(super) refused: bool,
    /// What the kernel has refused since that was last asked.
    pub(super) refusals: Vec<SendRefusal>,
    pub(super) raw: RawSend,
}

/// The socket's parts that one call of [`Transmitter::transmit`] works with.
pub(super) struct Means<'a> {
    pub(super) socket: BorrowedFd<'a>,
    pub(super) scratch: &'a mut Scratch,
    pub(super) clock: &'a dyn Clock,
    pub(super) stats: &'a mut UdpStats,
}

impl Transmitter {
    /// For a socket that may be connected, with or without GSO.
    pub(super) fn new(connected: Option<SocketAddr>, gso: bool) -> Self {
        let raw: RawSend = |call, socket| call.send(socket);
        Self { connected, gso, gso_off: HashMap::new(), refused: false, refusals: Vec::new(), raw }
    }

    /// Whether the socket hears of ICMP errors.
    /// Notes that the socket is connected to another address.
    pub(super) fn set_connected(&mut self, remote: SocketAddr) {
        self.connected = Some(remote);
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected.is_some()
    }

    /// Sends `messages` in order until all are done or the kernel would block; returns how many are done. `outcome` is
    /// called for each of those.
    pub(super) fn transmit<'b, C: Cargo<'b>>(
        &mut self,
        messages: &mut [C::Message],
        cargo: &C,
        means: &mut Means<'_>,
        outcome: &mut dyn FnMut(&C::Message, SendOutcome),
    ) -> usize {
        self.reprobe_gso(means.clock);
        let mut next = 0;
        let mut retried = false;
        while next < messages.len() {
            let mut call = means.scratch.outgoing();
            self.fill(&mut messages[next..], cargo, &mut call, means.stats);
            means.stats.send_calls += 1;
            match (self.raw)(&mut call, means.socket) {
                Ok(sent) => {
                    retried = false;
                    for header in (0..sent).map(|index| call.header(index)) {
                        means.stats.count_sent(header.0, header.1 as u64);
                        next += settle(&mut messages[next], cargo, header.0, None, outcome);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let why = failure(&error);
                    let segments = call.header(0).0;
                    if why == SendFailure::WouldBlock {
                        means.stats.would_block += 1;
                        break;
                    }
                    if !retried && self.belongs_to_an_earlier_datagram(why, segments) {
                        retried = true;
                        self.refused |= why == SendFailure::Refused;
                        continue;
                    }
                    retried = false;
                    let message = &mut messages[next];
                    if segments > 1 && self.falls_back(&error, &cargo.outline(message), means.clock) {
                        cargo.progress(message).single = true;
                        means.stats.gso_fallbacks += 1;
                        continue;
                    }
                    means.stats.send_failures += u64::from(segments);
                    // What a connected socket says a second time is not about an earlier datagram.
                    let outline = cargo.outline(message);
                    let destination = outline.envelope.destination.or(self.connected);
                    let refusal = destination.and_then(|to| SendRefusal::of(&error, to, outline.segment));
                    if let Some(refusal) = refusal {
                        refusal.note(&mut self.refusals);
                    }
                    next += settle(message, cargo, segments, Some(why), outcome);
                }
            }
        }
        next
    }

    /// Adds headers for what is left of `messages`, as many as one call takes.
    fn fill<'b, C: Cargo<'b>>(
        &self,
        messages: &mut [C::Message],
        cargo: &C,
        call: &mut Outgoing<'_, 'b>,
        stats: &mut UdpStats,
    ) {
        for message in messages {
            let outline = cargo.outline(message);
            let progress = cargo.progress(message);
            if outline.segments > 1 && !progress.single && !self.gso_works(&outline) {
                progress.single = true;
                stats.gso_fallbacks += 1;
            }
            // A message that was sent in part goes on in single datagrams.
            if outline.segments == 1 || !progress.single {
                if !call.has_room() {
                    return;
                }
                cargo.push_message(message, &outline, call);
                continue;
            }
            for index in progress.done..outline.segments {
                if !call.has_room() {
                    return;
                }
                let piece = cargo.segment(message, index);
                call.push(&outline.envelope, piece.len(), 1, std::iter::once(piece));
            }
        }
    }

    /// Whether a message to `destination` would be one that the kernel cuts.
    pub(super) fn gso_to(&self, destination: IpAddr) -> Gso {
        match (self.gso, self.gso_off.contains_key(&destination)) {
            (false, _) => Gso::Off,
            (true, true) => Gso::Failed,
            (true, false) => Gso::On,
        }
    }

    fn gso_works(&self, outline: &Outline) -> bool {
        self.gso
            && (self.gso_off.is_empty()
                || self.destination(outline).is_none_or(|ip| !self.gso_off.contains_key(&ip)))
    }

    fn destination(&self, outline: &Outline) -> Option<IpAddr> {
        outline.envelope.destination.or(self.connected).map(|address| address.ip())
    }

    /// Forgets the destinations whose time is over.
    fn reprobe_gso(&mut self, clock: &dyn Clock) {
        if !self.gso_off.is_empty() {
            let now = clock.now();
            self.gso_off.retain(|_, until| *until > now);
        }
    }

    /// Whether a failed GSO message is to be sent in single datagrams.
    fn falls_back(&mut self, error: &io::Error, outline: &Outline, clock: &dyn Clock) -> bool {
        if error.raw_os_error() == Some(libc::EIO) {
            static LOGGED: Once = Once::new();
            let destination = self.destination(outline);
            LOGGED.call_once(|| {
                tracing::warn!(
                    ?destination,
                    "UDP_SEGMENT failed with EIO: datagrams to it are sent singly, tried again every minute; \
                     further destinations are only counted (remedy: none is needed; it costs CPU time)"
                );
            });
            if let Some(ip) = destination
                && self.gso_off.len() < GSO_OFF_DESTINATIONS
            {
                self.gso_off.insert(ip, clock.now() + GSO_RETRY);
            }
            return true;
        }
        failure(error) == SendFailure::TooLarge
    }

    /// A connected socket reports an ICMP error at the next send, whatever that is.
    fn belongs_to_an_earlier_datagram(&self, why: SendFailure, segments: u16) -> bool {
        self.connected.is_some()
            && match why {
                SendFailure::Refused | SendFailure::Unreachable => true,
                // A GSO message is tried again in single datagrams anyway.
                SendFailure::TooLarge => segments == 1,
                SendFailure::WouldBlock
                | SendFailure::NoBuffers
                | SendFailure::CarrierFull
                | SendFailure::Forbidden
                | SendFailure::Other => false,
            }
    }
}

/// Notes that `segments` more of `message` are done; returns how many messages that completed.
fn settle<'b, C: Cargo<'b>>(
    message: &mut C::Message,
    cargo: &C,
    segments: u16,
    failed: Option<SendFailure>,
    outcome: &mut dyn FnMut(&C::Message, SendOutcome),
) -> usize {
    let all = cargo.outline(message).segments;
    let progress = cargo.progress(message);
    progress.done += segments;
    if failed.is_some() {
        progress.failed += segments;
        progress.why = failed;
    }
    if progress.done < all {
        return 0;
    }
    let result = progress.outcome(all);
    outcome(message, result);
    1
}

/// Gives up on what is left of `messages` because the kernel would block.
pub(super) fn abandon<'b, C: Cargo<'b>>(
    messages: &mut [C::Message],
    cargo: &C,
    stats: &mut UdpStats,
    outcome: &mut dyn FnMut(&C::Message, SendOutcome),
) {
    for message in messages {
        let left = cargo.outline(message).segments - cargo.progress(message).done;
        stats.send_failures += u64::from(left);
        settle(message, cargo, left, Some(SendFailure::WouldBlock), outcome);
    }
}

pub(super) fn failure(error: &io::Error) -> SendFailure {
    match error.raw_os_error().unwrap_or(0) {
        libc::EAGAIN => SendFailure::WouldBlock,
        libc::EMSGSIZE | libc::EINVAL => SendFailure::TooLarge,
        libc::ECONNREFUSED => SendFailure::Refused,
        libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EADDRNOTAVAIL | libc::ENETDOWN => {
            SendFailure::Unreachable
        }
        libc::ENOBUFS | libc::ENOMEM => SendFailure::NoBuffers,
        libc::EPERM | libc::EACCES => SendFailure::Forbidden,
        _ => SendFailure::Other,
    }
}
