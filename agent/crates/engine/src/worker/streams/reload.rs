//! The ports of `[[tcp]]` after a reload.

use std::time::Instant;

use config::{Config, Forward, TcpKeys};

use crate::worker::{
    context::{
        Context,
        sources::{Class, Party},
        timer::Timer,
    },
    streams::TcpForwards,
};

impl TcpForwards {
    /// Opens and closes the ports of `[[tcp]]`; existing connections stay.
    pub(crate) fn follow_tcp(&mut self, cx: &mut Context, old: &Config, new: &Config, now: Instant) {
        self.listeners.resize_with(new.tcp.len(), || None);
        for (port, forward) in new.tcp.iter().enumerate() {
            // Every key is named, so that the compiler asks what a reload does with a new one.
            #[rustfmt::skip]
            let Forward {
                listen, open,
                // Read when a connection comes.
                peer: _, service: _, tcp: TcpKeys { keepalive: _, accept_proxy: _ }, udp: _,
            } = forward;
            let was_open = old.tcp.get(port).is_some_and(|before| before.open);
            match (was_open, *open) {
                (false, true) => match cx.sockets.factory.tcp_listen(*listen, port) {
                    Ok((listener, token)) => {
                        self.listeners[port] = Some((listener, token));
                        cx.sources.add(token, Class::Other, Party::Source(token));
                    }
                    Err(error) => {
                        tracing::error!(%listen, %error, "a TCP port of the new configuration cannot be used (remedy: restart the daemon, once the cause is gone)");
                    }
                },
                (true, false) => {
                    if let Some((listener, token)) = self.listeners[port].take() {
                        drop(listener);
                        cx.sockets.factory.release(token);
                        cx.hub.backlogs.end(port);
                    }
                }
                // The worker that accepts may have changed.
                (true, true) => cx.timers.arm(Timer::Listener(port), now),
                (false, false) => {}
            }
        }
    }
}
