//! The pace at which the packets of a connection leave.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use config::CongestionControl;
use quinn_proto::{Connection, Transmit};
use rate::{Acknowledged, LEAST_GAP, Pacer, RateAccount, RateAccounts, Release, Share};

use crate::control::congestion::Congestion;

/// The pace at which the packets of one connection leave: by its congestion control, and by the rate account of its peer.
///
/// It also knows when an acknowledgement is owed: quinn-proto makes none while data waits for the window.
#[derive(Debug)]
pub struct Pace {
    congestion: Arc<Congestion>,
    pacer: Pacer,
    /// The connection's share of the rate to its peer.
    share: Option<Share>,
    /// The line that it is on, if its peer has several and the line is known.
    line: Option<u8>,
    /// Whether the share is a limit by itself. In standard mode it is not: datagrams have had their turn when they come here.
    has_turn: bool,
    /// The time at which the next burst may leave, if one waits.
    release_at: Option<Instant>,
    owed: Owed,
    is_closing: bool,
    begun: Instant,
    reported: Reported,
}

/// What limits how much more a connection may send.
#[derive(Clone, Copy, Debug)]
pub struct Congested {
    pub in_flight: u64,
    /// The limit on all that is sent to the peer, in bytes a second.
    pub rate: Option<u64>,
}

/// What the law of an automatic rate was last told of a connection.
#[derive(Clone, Copy, Debug)]
struct Reported {
    at: Instant,
    bytes: u64,
}

/// As often, and from as many bytes on, as the far end reports on a lane.
const REPORT_INTERVAL: Duration = Duration::from_millis(25);
const REPORT_BYTES: u64 = 1_200;

/// The datagrams that came since the last packet left.
#[derive(Debug, Default)]
struct Owed {
    datagrams: u32,
    since: Option<Instant>,
    /// Frames that ask for an acknowledgement, received before the last packet left.
    acknowledged: u64,
}

/// How long an acknowledgement may be delayed (`max_ack_delay`, RFC 9000 §18.2, and quinn-proto's default).
const ACK_DELAY: Duration = Duration::from_millis(25);

/// The number of datagrams after which an acknowledgement is owed at once, twice as many as in RFC 9000 §13.2.2.
const ACK_AFTER: u32 = 4;

/// The IP and UDP headers of a packet to `address`, in bytes.
fn outer_overhead(quinn: &Connection) -> u64 {
    if quinn.remote_address().is_ipv4() { 20 + 8 } else { 40 + 8 }
}

/// The number of frames with data that were received.
fn data_frames(quinn: &Connection) -> u64 {
    let frames = quinn.stats().frame_rx;
    frames.stream + frames.datagram
}

impl Pace {
    /// The pace of a connection that begins `now`.
    #[must_use]
    pub fn new(congestion: Arc<Congestion>, now: Instant) -> Self {
        Self {
            congestion,
            pacer: Pacer::new(now),
            share: None,
            line: None,
            has_turn: true,
            release_at: None,
            owed: Owed::default(),
            is_closing: false,
            begun: now,
            reported: Reported { at: now, bytes: 0 },
        }
    }

    /// When this end dialled the connection, or its first packet came.
    pub(in crate::control) fn begun(&self) -> Instant {
        self.begun
    }

    /// The state that it shares with the controllers of the connection.
    #[must_use]
    pub fn congestion(&self) -> &Congestion {
        &self.congestion
    }

    /// Sets the algorithm and the account that the connection's packets are charged to.
    pub fn set(&mut self, control: CongestionControl, account: Arc<RateAccount>, now: Instant) {
        self.congestion.set(control, account.rate());
        (self.share, self.line) = (Some(Share::new(account, now)), None);
    }

    /// Has the packets charged to the account of this line, too, or to that of the peer alone.
    pub fn set_line(&mut self, line: Option<u8>, rates: &RateAccounts, now: Instant) {
        if self.line == line || self.share.is_none() {
            return;
        }
        let whole = Arc::clone(rates.whole());
        self.share = Some(match line {
            Some(line) => Share::of_line(Arc::clone(rates.line(line)), whole, now),
            None => Share::new(whole, now),
        });
        self.line = line;
        self.apply_account();
    }

    /// Follows a change of the account's rate.
    pub fn apply_account(&mut self) {
        if let Some(share) = &self.share {
            self.congestion.set(self.congestion.control(), share.rate());
        }
    }

    /// Notes that the connection carries datagrams, which have had their turn in the queue before: standard mode.
    pub fn carries_datagrams(&mut self) {
        self.has_turn = false;
    }

    /// Notes that quinn-proto has nothing more to send now.
    pub fn has_sent_all(&mut self) {
        if let Some(share) = &mut self.share {
            share.set_waiting(0);
        }
    }

    pub fn received(&mut self, now: Instant) {
        self.owed.datagrams += 1;
        self.owed.since.get_or_insert(now);
    }

    /// Tells the law of an automatic rate what the far end has acknowledged on this connection, `number` among those to the peer.
    pub fn tell_law(&mut self, quinn: &Connection, number: u8, now: Instant) {
        let Some(account) =
            self.share.as_ref().map(|share| &share.account).filter(|account| account.is_measured())
        else {
            return;
        };
        let Reported { at, bytes } = self.reported;
        if now.saturating_duration_since(at) < REPORT_INTERVAL {
            return;
        }
        if self.congestion.control() == CongestionControl::Rate {
            // A reload has just made the rate automatic.
            self.congestion.set(CongestionControl::Rate, account.rate());
        }
        // The count begins anew when the connection moves to another path.
        let is_enough = |acked: u64| acked.wrapping_sub(bytes) >= REPORT_BYTES;
        let Some(acks) = self.congestion.acks().filter(|acks| is_enough(acks.bytes)) else { return };
        self.reported = Reported { at: now, bytes: acks.bytes };
        account.acknowledged(
            &Acknowledged {
                number,
                begun: self.begun,
                rtt: acks.rtt,
                packets: acks.packets,
                lost: quinn.stats().path.lost_packets,
                bytes: acks.bytes + acks.packets * outer_overhead(quinn),
                smoothed_rtt: quinn.rtt(),
                min_rtt: acks.min_rtt,
            },
            now,
        );
    }

    /// Notes that the connection ends: its CONNECTION_CLOSE leaves at once.
    pub fn closing(&mut self) {
        self.is_closing = true;
        self.congestion.lift_window(true);
    }

    /// The time at which packets may leave that must wait now.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.release_at
    }

    /// The number of packets that may leave now, at most `room`; `None` if they must wait for the [`deadline`](Self::deadline).
    pub fn packets(&mut self, quinn: &Connection, room: usize, now: Instant) -> Option<usize> {
        self.release_at = None;
        if self.is_closing {
            return Some(room);
        }
        let mtu = u64::from(quinn.current_mtu());
        let by_pace = self.congestion.pacing_rate().map(|rate| self.pacer.release(rate, mtu, now));
        let by_rate = self.share.as_mut().map(|share| match self.has_turn {
            true => share.release(now),
            false => share.account.release(now),
        });
        let mut most = u64::MAX;
        for release in by_pace.into_iter().chain(by_rate) {
            match release {
                Release::Bytes(bytes) => most = most.min(bytes),
                Release::At(at) => self.release_at = self.release_at.max(Some(at)),
            }
        }
        let packets = usize::try_from(most / mtu).unwrap_or(usize::MAX);
        self.release_at.is_none().then_some(packets.clamp(1, room))
    }

    /// Notes that `transmit` leaves, and charges it to the pacer and the rate account.
    pub fn sent(&mut self, quinn: &Connection, transmit: &Transmit, now: Instant) {
        self.pacer.spend(transmit.size as u64);
        if let Some(share) = &mut self.share {
            let packets =
                transmit.size.div_ceil(transmit.segment_size.unwrap_or(transmit.size).max(1)) as u64;
            let bytes = transmit.size as u64 + packets * outer_overhead(quinn);
            if self.has_turn {
                share.set_waiting(1);
                share.spend(bytes);
            }
            share.charge(bytes, packets, now);
        }
        if self.owed.datagrams > 0 {
            self.owed = Owed { acknowledged: data_frames(quinn), ..Owed::default() };
        }
    }

    /// The bytes in flight, and the limit on all that is sent to the peer.
    #[must_use]
    pub fn congested(&self) -> Congested {
        let rate = self.share.as_ref().and_then(Share::rate);
        Congested { in_flight: self.congestion.in_flight(), rate }
    }

    /// Charges a copy of a packet to the pacer and the rate account.
    pub fn sent_copy(&mut self, quinn: &Connection, bytes: usize, now: Instant) {
        self.pacer.spend(bytes as u64);
        if let Some(share) = &mut self.share {
            let bytes = bytes as u64 + outer_overhead(quinn);
            if self.has_turn {
                share.spend(bytes);
            }
            share.charge(bytes, 1, now);
        }
    }

    /// Lifts the window for one packet if quinn-proto has nothing that it would send, but an acknowledgement is owed;
    /// [`lower`](Self::lower) is to follow.
    pub fn lift(&mut self, quinn: &Connection, now: Instant) -> Option<()> {
        let since = self.owed.since?;
        if data_frames(quinn) == self.owed.acknowledged {
            self.owed = Owed { acknowledged: self.owed.acknowledged, ..Owed::default() };
            return None;
        }
        // A little later than quinn-proto, which acknowledges by itself unless the window holds it back.
        let due = since + ACK_DELAY + LEAST_GAP;
        if self.owed.datagrams < ACK_AFTER && now < due {
            self.release_at = Some(due);
            return None;
        }
        self.owed = Owed { acknowledged: data_frames(quinn), ..Owed::default() };
        self.congestion.lift_window(true);
        Some(())
    }

    /// Ends the exemption: the congestion window counts again.
    pub fn lower(&self) {
        self.congestion.lift_window(self.is_closing);
    }
}
