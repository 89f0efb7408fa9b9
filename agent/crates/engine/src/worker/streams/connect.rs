//! How a service is reached: at one place after the other, until one takes the connection.

use std::{io, sync::Arc, time::Instant};

use config::ProxyProtocol;
use dataplane::{
    forward::tcp::{Cause, Places, TcpId, answer_for},
    upstreams::Place,
};
use quinn_proto::ConnectionHandle;
use wire::{
    messages::{StreamAnswer, StreamOpen},
    proxy::{self, ClientAddresses, Transport},
};

use crate::worker::{
    context::Context,
    report::stats::TcpRefusal,
    session::Sessions,
    streams::{OpenForward, TcpForwards},
};

/// Why a forward to a service is refused, and the kernel's error if that is why.
struct Refusal {
    service: u32,
    answer: StreamAnswer,
    error: Option<io::Error>,
}

impl Refusal {
    fn of(open: &StreamOpen, answer: StreamAnswer) -> Self {
        Self { service: open.service, answer, error: None }
    }

    fn by(service: u32, error: io::Error) -> Self {
        Self { service, answer: answer_for(&error), error: Some(error) }
    }
}

impl TcpForwards {
    /// Connects a stream to the service that the peer has named.
    pub(super) fn connect_service(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        id: TcpId,
        open: &StreamOpen,
        now: Instant,
    ) {
        let Some(OpenForward { peer, forward, sight, .. }) = self.open.get_mut(id.0 as usize) else { return };
        let (peer, index) = (*peer, open.service as usize);
        let config = Arc::clone(&cx.config);
        let allowed = cx.peers.get(peer).is_some_and(|state| state.data.config.services.contains(&index));
        match config.services.get(index).filter(|service| service.tcp) {
            None => self.refuse(cx, sessions, id, Refusal::of(open, StreamAnswer::UnknownService), now),
            Some(_) if !allowed => {
                self.refuse(cx, sessions, id, Refusal::of(open, StreamAnswer::NotAllowed), now);
            }
            Some(service) => {
                let places = cx.sockets.factory.upstreams.tcp(&service.upstream);
                if places.is_empty() {
                    let error = cx.sockets.factory.upstreams.unknown(&service.upstream);
                    return self.refuse(cx, sessions, id, Refusal::by(open.service, error), now);
                }
                cx.forward_serves(peer, sight, &service.name);
                if service.proxy_protocol != ProxyProtocol::Off {
                    let mut header = Vec::new();
                    let client = open.client.filter(ClientAddresses::names_a_host);
                    proxy::write(client, Transport::Stream, &mut header);
                    let held = forward.held();
                    forward.announce(header);
                    cx.hub.streams.hold(held, forward.held());
                }
                self.try_places(cx, sessions, id, open.service, Box::new(Places::new(places, now)), now);
            }
        }
    }

    /// Starts to connect to the service at the next of `places` where that can be started, or refuses the forward.
    fn try_places(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        id: TcpId,
        service: u32,
        mut places: Box<Places>,
        now: Instant,
    ) {
        let mut last = None;
        while let Some(place) = places.advance(now) {
            match cx.sockets.factory.tcp_connect(&place, id) {
                Ok((stream, token)) => {
                    let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize) else { return };
                    let known = cx.config.services.get(service as usize);
                    self.keepalives.begin(id, &*stream, known.and_then(|known| known.keepalive));
                    forward.connect(service, stream, token, places, now);
                    self.watch_opening(cx, id);
                    return self.pump(cx, sessions, id, Cause::Tcp, now);
                }
                Err(error) => {
                    cx.note_unreached(&place, &error, now);
                    last = Some(error);
                }
            }
        }
        let error = last.unwrap_or_else(|| io::ErrorKind::TimedOut.into());
        self.refuse(cx, sessions, id, Refusal::by(service, error), now);
    }

    /// Goes on at the next place after an attempt has failed by `error`; returns whether there is one.
    pub(super) fn try_next(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        id: TcpId,
        error: Option<io::Error>,
        now: Instant,
    ) -> bool {
        let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize) else { return false };
        let (place, service) = (forward.place().cloned(), forward.service().unwrap_or(0));
        let Some((places, token)) = forward.take_places() else { return false };
        if let Some(token) = token {
            cx.sockets.factory.release(token);
        }
        if let Some((place, error)) = place.zip(error) {
            cx.note_unreached(&place, &error, now);
            cx.report_unreached(service, &place, &error, now);
        }
        self.try_places(cx, sessions, id, service, places, now);
        true
    }

    /// Refuses a forward that was never connected to the service.
    fn refuse(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        id: TcpId,
        Refusal { service, answer, error }: Refusal,
        now: Instant,
    ) {
        let Some(OpenForward { key, peer, forward, .. }) = self.open.get_mut(id.0 as usize) else { return };
        if let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection)) {
            forward.refuse(quinn, answer);
        }
        cx.report_service(*peer, service, answer, error.as_ref(), now);
        cx.stats.totals.tcp.refused[TcpRefusal::from(answer)] += 1;
        self.remove_tcp(cx, sessions, id);
    }
}

impl Context {
    /// Notes that a service was not reached at a place.
    pub(super) fn note_unreached(&mut self, place: &Place, error: &io::Error, now: Instant) {
        self.stats.totals.tcp.unreached[TcpRefusal::from(answer_for(error))] += 1;
        self.sockets.factory.upstreams.fail(place, error, now);
    }

    /// Logs that a service was not reached at a place, and is tried at the next.
    fn report_unreached(&mut self, service: u32, place: &Place, error: &io::Error, now: Instant) {
        let service = self.config.services.get(service as usize).map(|service| &*service.name);
        throttled!(
            warn, self.logs.unreached.allow(now), { service, %place, %error },
            "a service was not reached at one of its places, the next one is tried (remedy: is the service running there? Else remove \
             the place from service.upstream)"
        );
    }
}
