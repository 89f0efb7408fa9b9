//! How a forward is opened: its header, the connection to the service, the answer.

use std::{
    io::{self, ErrorKind},
    time::{Duration, Instant},
};

use net::{
    TcpStream, Token,
    process::{is_out_of_descriptors, is_out_of_resources},
};
use quinn_proto::Connection;
use wire::messages::{Framer, StreamAnswer, StreamOpen};

use crate::{
    forward::tcp::{
        Pumped, RESET, TcpForward,
        direction::Direction,
        places::{CONNECT_TIMEOUT, Places},
    },
    upstreams::Place,
};

/// How long the end that opened a stream may take to send its header, which is in the first packet of the stream.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the other end may take to answer: [`CONNECT_TIMEOUT`] for its service, and as long again for the network.
pub const ANSWER_TIMEOUT: Duration = CONNECT_TIMEOUT.saturating_mul(2);

/// The progress of a forward. A `framer` has the part of the frame that has come, boxed, because it is gone once the forward is open;
/// `until` is when waiting is given up.
#[derive(Debug)]
pub(super) enum Stage {
    /// Opened here: the answer has not come. Bytes of the client are sent already.
    AwaitingAnswer { framer: Box<Framer>, until: Instant },
    /// Opened by the peer: the header has not come.
    AwaitingHeader { framer: Box<Framer>, until: Instant },
    /// Opened by the peer: the service is being connected, at the current one of the places.
    Connecting { places: Box<Places>, until: Instant },
    /// The forward is open, and bytes flow.
    Open,
}

impl TcpForward {
    #[must_use]
    pub fn was_open(&self) -> bool {
        matches!(self.stage, Stage::Open)
    }

    /// The time at which it is given up, unless it is open by then.
    #[must_use]
    pub fn open_by(&self) -> Option<Instant> {
        match self.stage {
            Stage::Connecting { until, .. }
            | Stage::AwaitingAnswer { until, .. }
            | Stage::AwaitingHeader { until, .. } => Some(until),
            Stage::Open => None,
        }
    }

    fn has_other_place(&self) -> bool {
        matches!(&self.stage, Stage::Connecting { places, .. } if places.has_more())
    }

    /// The kernel's error of the attempt to connect to the service, once after it has failed.
    pub fn take_failure(&mut self) -> Option<io::Error> {
        self.failure.take()
    }

    /// Gives up a forward that was not open in time: tells the other end, and the client if it has one.
    pub fn give_up(&mut self, quinn: &mut Connection) {
        if let Stage::Connecting { .. } = self.stage {
            self.refuse(quinn, StreamAnswer::UpstreamTimeout);
        } else {
            self.end(quinn);
        }
    }

    /// Notes that `service` is being connected at the current one of `places`.
    pub fn connect(
        &mut self,
        service: u32,
        tcp: Box<dyn TcpStream>,
        token: Token,
        places: Box<Places>,
        now: Instant,
    ) {
        self.service = Some(service);
        self.tcp = Some((tcp, token));
        self.stage = Stage::Connecting { until: places.attempt_until(now), places };
    }

    /// Has the service get this header before what the peer sends.
    pub fn announce(&mut self, header: Vec<u8>) {
        self.inward.put_first(header);
    }

    /// The place at which the service is being connected.
    #[must_use]
    pub fn place(&self) -> Option<&Place> {
        match &self.stage {
            Stage::Connecting { places, .. } => places.current(),
            Stage::AwaitingAnswer { .. } | Stage::AwaitingHeader { .. } | Stage::Open => None,
        }
    }

    /// Ends the attempt to connect to the service, if there is another place for it: the places, and the token of the connection that
    /// is given up.
    pub fn take_places(&mut self) -> Option<(Box<Places>, Option<Token>)> {
        let Stage::Connecting { places, until } = &mut self.stage else { return None };
        if !places.has_more() {
            return None;
        }
        let places = std::mem::replace(places, Box::new(Places::new(Vec::new(), *until)));
        Some((places, self.tcp.take().map(|(_, token)| token)))
    }

    /// Refuses the forward and tells the peer why.
    pub fn refuse(&mut self, quinn: &mut Connection, answer: StreamAnswer) {
        let mut bytes = Vec::new();
        answer.encode(&mut bytes);
        let mut stream = quinn.send_stream(self.stream);
        // A few bytes at the start of a stream; a stream that takes none is being reset by the peer.
        let _written = stream.write(&bytes).is_ok() && stream.finish().is_ok();
        let _stopped = quinn.recv_stream(self.stream).stop(RESET).is_ok();
    }

    pub(super) fn read_header(&mut self, quinn: &mut Connection) -> Pumped {
        let Stage::AwaitingHeader { framer, .. } = &mut self.stage else { return Pumped::Waiting };
        match self.inward.read_frame(quinn, self.stream, framer, StreamOpen::decode) {
            Ok(Some(header)) => Pumped::Wants(header),
            Ok(None) => Pumped::Waiting,
            Err(_) => self.end(quinn),
        }
    }

    pub(super) fn read_answer(&mut self, quinn: &mut Connection) -> Result<(), Pumped> {
        let Stage::AwaitingAnswer { framer, .. } = &mut self.stage else { return Ok(()) };
        match self.inward.read_frame(quinn, self.stream, framer, StreamAnswer::decode) {
            Ok(Some(StreamAnswer::Ok)) => {
                self.stage = Stage::Open;
                Ok(())
            }
            Ok(Some(refused)) => {
                self.end(quinn);
                Err(Pumped::Refused(refused))
            }
            Ok(None) => Ok(()),
            Err(_) => Err(self.end(quinn)),
        }
    }

    /// If the service's connection attempt has ended, tells the peer how.
    pub(super) fn finish_connect(&mut self, quinn: &mut Connection) -> Option<Pumped> {
        let (tcp, _) = self.tcp.as_mut()?;
        match tcp.connected() {
            Ok(()) => {
                let mut answer = Vec::new();
                StreamAnswer::Ok.encode(&mut answer);
                self.outward = Direction::beginning_with(answer);
                self.stage = Stage::Open;
                Some(Pumped::Answered(StreamAnswer::Ok))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) if self.has_other_place() => {
                self.failure = Some(error);
                Some(Pumped::Unreached)
            }
            Err(error) => {
                let answer = answer_for(&error);
                self.failure = Some(error);
                self.refuse(quinn, answer);
                Some(Pumped::Answered(answer))
            }
        }
    }
}

/// The answer to the peer about a failed connection attempt. What this host lacks is not the service's refusal.
#[must_use]
pub fn answer_for(error: &io::Error) -> StreamAnswer {
    // A firewall of this host, or a prohibiting route, is EPERM or EACCES.
    let no_way = [
        ErrorKind::NetworkUnreachable,
        ErrorKind::HostUnreachable,
        ErrorKind::NetworkDown,
        ErrorKind::PermissionDenied,
    ];
    if is_out_of_descriptors(error) {
        StreamAnswer::TooManyFiles
    } else if is_out_of_resources(error) {
        StreamAnswer::NoResources
    } else if no_way.contains(&error.kind()) {
        StreamAnswer::NoRoute
    } else if error.kind() == ErrorKind::TimedOut {
        StreamAnswer::UpstreamTimeout
    } else {
        StreamAnswer::UpstreamRefused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_host_lacks_is_not_called_a_refusal_of_the_service() {
        // Numbers of Linux: EMFILE, ENFILE, EADDRNOTAVAIL, EAGAIN, ENOBUFS, ENOMEM, ENETUNREACH, EHOSTUNREACH, EACCES, EPERM,
        // ETIMEDOUT, ECONNREFUSED, ECONNRESET.
        for (code, answer) in [
            (24, StreamAnswer::TooManyFiles),
            (23, StreamAnswer::TooManyFiles),
            (99, StreamAnswer::NoResources),
            (11, StreamAnswer::NoResources),
            (105, StreamAnswer::NoResources),
            (12, StreamAnswer::NoResources),
            (101, StreamAnswer::NoRoute),
            (113, StreamAnswer::NoRoute),
            (13, StreamAnswer::NoRoute),
            (1, StreamAnswer::NoRoute),
            (110, StreamAnswer::UpstreamTimeout),
            (111, StreamAnswer::UpstreamRefused),
            (104, StreamAnswer::UpstreamRefused),
        ] {
            assert_eq!(answer_for(&io::Error::from_raw_os_error(code)), answer, "{code}");
        }
    }
}
