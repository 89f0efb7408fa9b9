//! How a forward ends after a reset on either side.

use std::time::{Duration, Instant};

use quinn_proto::Connection;

use crate::forward::tcp::{Pumped, RESET, TcpForward, opening::Stage};

/// How long a forward whose TCP connection was reset may stand still while what came before the reset is passed on.
pub const LAST_BYTES_TIMEOUT: Duration = Duration::from_secs(2);

/// How soon the kernel is asked again whether it has sent the last bytes.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How a forward ends after a reset.
#[derive(Debug)]
pub(super) enum Ending {
    /// Our TCP connection was reset: what it had received is passed on until `until`, which each byte postpones. `read` once TCP has
    /// no more. `tells_end` if TCP reads as ended only where a FIN came before the reset: the kernel tells a reset once.
    Ours { until: Instant, read: bool, tells_end: bool },
    /// The far end was told, and is to stop the stream.
    Told,
    /// The far end's TCP connection was reset after this many bytes of the stream: they are passed on until `until`, likewise. The kernel
    /// had `unsent` bytes left when it was last asked, and is asked again at `look`.
    Theirs { bytes: u64, until: Instant, unsent: usize, look: Instant },
}

impl Ending {
    /// Whether TCP has nothing more to read because it was reset.
    pub(super) fn has_read_all(&self) -> bool {
        matches!(self, Self::Ours { read: true, .. })
    }

    pub(super) fn is_told(&self) -> bool {
        matches!(self, Self::Told)
    }

    /// Notes that TCP reads as ended; returns whether it has ended in order.
    pub(super) fn reads_end(&mut self) -> bool {
        match self {
            Self::Ours { read, tells_end, .. } => {
                *read = true;
                *tells_end
            }
            Self::Told | Self::Theirs { .. } => true,
        }
    }

    /// Notes that TCP cannot be read; returns whether that is the reset by which the forward ends.
    pub(super) fn expects_error(&mut self) -> bool {
        match self {
            Self::Ours { read, .. } => {
                *read = true;
                true
            }
            Self::Told | Self::Theirs { .. } => false,
        }
    }

    /// When the forward is to be served although nothing happens.
    pub(super) fn look_at(&self) -> Option<Instant> {
        match *self {
            Self::Ours { until, .. } | Self::Theirs { until, unsent: 0, .. } => Some(until),
            // The kernel does not say when it has sent everything.
            Self::Theirs { until, look, .. } => Some(look.min(until)),
            Self::Told => None,
        }
    }
}

impl TcpForward {
    /// The peer says that its TCP connection was reset after `bytes` bytes of the stream.
    pub fn abort_after(&mut self, bytes: u64, now: Instant) {
        // If both connections were reset, nobody waits for anything.
        if self.ending.is_none() {
            let ending = Ending::Theirs { bytes, until: now + LAST_BYTES_TIMEOUT, unsent: 0, look: now };
            self.ending = Some(Box::new(ending));
        }
    }

    /// If the far end's TCP connection was reset, sends nothing more there; returns whether the forward is to end at once.
    pub(super) fn stop_sending(&mut self, quinn: &mut Connection, now: Instant) -> bool {
        let Some(Ending::Theirs { until, .. }) = self.ending.as_deref() else { return false };
        if !self.was_open() {
            return *until <= now;
        }
        if !self.outward.is_closed() {
            // The peer takes nothing more.
            self.outward.close();
            let _reset = quinn.send_stream(self.stream).reset(RESET).is_ok();
        }
        false
    }

    /// Whether its TCP connection has failed where reading does not find out.
    pub(super) fn has_failed(&self) -> bool {
        !self.outward.waits_for_tcp() && self.tcp.as_ref().is_some_and(|(tcp, _)| tcp.has_failed())
    }

    /// The peer has stopped the stream.
    pub(super) fn stopped(&mut self, quinn: &mut Connection, now: Instant) {
        // Otherwise quinn-proto would keep the stream open for an end that never comes.
        let _reset = quinn.send_stream(self.stream).reset(RESET).is_ok();
        if self.inward.is_closed() {
            // After the end of its own stream only a reset makes the peer do that.
            self.abort_after(self.inward.offset(), now);
        }
    }

    /// Its TCP connection was reset, or failed otherwise; `read` if it has nothing more to read, `tells_end` as in [`Ending::Ours`].
    pub(super) fn tcp_failed(
        &mut self,
        quinn: &mut Connection,
        read: bool,
        tells_end: bool,
        now: Instant,
    ) -> Pumped {
        if !self.knows.aborts || matches!(self.ending.as_deref(), Some(Ending::Theirs { .. })) {
            return self.end(quinn);
        }
        self.inward.close();
        let _stopped = quinn.recv_stream(self.stream).stop(RESET).is_ok();
        if let Stage::AwaitingAnswer { .. } = self.stage {
            self.stage = Stage::Open;
        }
        let had_read_all = self.ending.as_ref().is_some_and(|ending| ending.has_read_all());
        let read = read || self.outward.has_ended() || had_read_all;
        self.ending = Some(Box::new(Ending::Ours { until: now + LAST_BYTES_TIMEOUT, read, tells_end }));
        // What is left to read and to write follows at once.
        self.go_on_ending(quinn, self.moved(), !read, now)
    }

    /// Goes on after a reset on either side; `before` is what [`TcpForward::moved`] was, `is_busy` whether more can be moved at once.
    pub(super) fn go_on_ending(
        &mut self,
        quinn: &mut Connection,
        before: (u64, u64),
        is_busy: bool,
        now: Instant,
    ) -> Pumped {
        let moved = self.moved();
        match self.ending.as_deref_mut() {
            Some(Ending::Ours { until, read, .. }) => {
                if moved.0 != before.0 {
                    *until = now + LAST_BYTES_TIMEOUT;
                }
                let all_is_told = self.outward.is_closed() || *read && self.outward.held() == 0;
                if !all_is_told && *until > now {
                    return if is_busy { Pumped::Busy } else { Pumped::Waiting };
                }
                if !all_is_told {
                    return self.end(quinn);
                }
                self.abort();
                self.ending = Some(Box::new(Ending::Told));
                // The end of the stream is to be passed on before the reset, too.
                Pumped::Aborted { bytes: self.outward.offset_with_end() }
            }
            Some(Ending::Theirs { bytes, until, unsent, look }) => {
                let left = self.tcp.as_ref().map_or(0, |(tcp, _)| tcp.unacknowledged().unwrap_or(0));
                // That it rests is our own doing.
                if moved.1 != before.1 || left < *unsent || self.inward.rests() {
                    *until = now + LAST_BYTES_TIMEOUT;
                }
                let has_all =
                    self.inward.is_closed() || self.inward.offset() >= *bytes && self.inward.held() == 0;
                (*unsent, *look) = (if has_all { left } else { 0 }, now + LOOK_AGAIN);
                if has_all && left == 0 || *until <= now {
                    return self.end(quinn);
                }
                if is_busy { Pumped::Busy } else { Pumped::Waiting }
            }
            Some(Ending::Told) | None => Pumped::Waiting,
        }
    }

    /// Ends the forward once the far end, which was told of the reset, has stopped the stream.
    pub(super) fn await_stop(&mut self, quinn: &mut Connection) -> Pumped {
        match quinn.send_stream(self.stream).stopped() {
            Ok(None) => Pumped::Waiting,
            Ok(Some(_)) | Err(_) => self.end(quinn),
        }
    }
}
