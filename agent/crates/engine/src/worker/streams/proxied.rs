//! Connections of balancers, whose PROXY header says who the client is: it is read before the connection is forwarded.

use std::{
    io::ErrorKind,
    time::{Duration, Instant},
};

use config::MOST_HEADERS;
use dataplane::{forward::tcp::TcpId, sockets::Source};
use wire::proxy::{self, Header, Transport};

use crate::worker::{
    context::{
        Context,
        timer::{Timer, index_u32},
    },
    report::stats::TcpRefusal,
    session::Sessions,
    streams::{TcpForwards, awaited::Awaited, serve::Accepted},
};

/// How long a header may take. A balancer sends it with its first packet: what is slower than two lost packets is no balancer.
const HEADER_WITHIN: Duration = Duration::from_secs(5);

/// The bytes that are read at once: a header, and most of a request behind it.
const READ: usize = 1_024;

impl TcpForwards {
    /// Takes a connection of a port that expects a PROXY header. The oldest gives way if too many are awaited.
    pub(super) fn await_proxy(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        port: usize,
        accepted: Accepted,
        now: Instant,
    ) {
        let Accepted { stream, token, client: balancer, .. } = accepted;
        let prefixes = cx.config.tcp.get(port).map_or(&[][..], |forward| &forward.tcp.accept_proxy);
        let is_trusted = prefixes.iter().any(|prefix| prefix.contains(&balancer.ip().to_canonical()));
        if is_trusted
            && self.proxied.len() >= MOST_HEADERS
            && let Some((oldest, _)) = self.proxied.iter().min_by_key(|(_, one)| one.until)
        {
            self.end_proxied(cx, oldest, TcpRefusal::ProxyTimeout, "too many headers are awaited", now);
        }
        let until = now + HEADER_WITHIN;
        let index = self.proxied.insert(Awaited { stream, token, balancer, port, read: Vec::new(), until });
        cx.sockets.factory.turn(token, Source::Proxied(index_u32(index)));
        if !is_trusted {
            let why = "it comes from none of the prefixes in tcp.accept_proxy";
            return self.end_proxied(cx, index, TcpRefusal::ProxySource, why, now);
        }
        cx.timers.arm(Timer::Proxied(index_u32(index)), until);
        self.read_proxy(cx, sessions, index_u32(index), now);
    }

    /// Reads more of a header; forwards the connection once it is complete.
    pub(crate) fn read_proxy(&mut self, cx: &mut Context, sessions: &mut Sessions, index: u32, now: Instant) {
        let place = index as usize;
        loop {
            let Some(one) = self.proxied.get_mut(place) else { return };
            let mut buffer = [0; READ];
            let len = match one.stream.read(&mut buffer) {
                Ok(0) => {
                    let why = "it ended before its header";
                    return self.end_proxied(cx, place, TcpRefusal::ProxyHeader, why, now);
                }
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    let why = "it was reset before its header";
                    return self.end_proxied(cx, place, TcpRefusal::ProxyHeader, why, now);
                }
            };
            one.read.extend_from_slice(&buffer[..len]);
            match proxy::read(&one.read, Transport::Stream) {
                Ok(None) => {}
                Ok(Some(header)) => return self.proxy_read(cx, sessions, place, header, now),
                Err(error) => {
                    return self.end_proxied(cx, place, TcpRefusal::ProxyHeader, &error.to_string(), now);
                }
            }
        }
    }

    /// Forwards a connection whose header is complete.
    fn proxy_read(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        place: usize,
        Header { client: told, length }: Header,
        now: Instant,
    ) {
        let Some(Awaited { stream, token, balancer, port, mut read, .. }) = self.proxied.remove(place) else {
            return;
        };
        cx.sockets.factory.turn(token, Source::Tcp(TcpId(index_u32(self.open.next_place()))));
        let client = told.map_or(balancer, |told| told.source());
        read.drain(..length);
        let before = self.open.len();
        self.forward(cx, sessions, port, Accepted { stream, token, client, told, read }, now);
        if self.open.len() == before {
            self.retry_listeners(cx);
        }
    }

    /// Ends a connection whose header has not come in time.
    pub(crate) fn proxy_timeout(&mut self, cx: &mut Context, index: u32, now: Instant) {
        let Some(one) = self.proxied.get(index as usize) else { return };
        if one.until > now {
            // The timer was set for an earlier connection with this index.
            return cx.timers.arm(Timer::Proxied(index), one.until);
        }
        let why = "its header did not come within 5 s";
        self.end_proxied(cx, index as usize, TcpRefusal::ProxyTimeout, why, now);
    }

    fn end_proxied(&mut self, cx: &mut Context, place: usize, reason: TcpRefusal, why: &str, now: Instant) {
        let Some(Awaited { mut stream, token, balancer, port, .. }) = self.proxied.remove(place) else {
            return;
        };
        stream.abort();
        cx.sockets.factory.release(token);
        cx.stats.totals.tcp.refused[reason] += 1;
        let listen = cx.config.tcp.get(port).map(|forward| tracing::field::display(forward.listen));
        throttled!(
            warn, cx.logs.proxied.allow(now), { listen, from = %balancer, reason = reason.label(), why },
            "a connection to a port that expects a PROXY header was ended (remedy: have the balancer send one, health checks too, and name \
             its addresses in tcp.accept_proxy; without a balancer remove the key)"
        );
        // It held the room of a forward.
        self.retry_listeners(cx);
    }
}
