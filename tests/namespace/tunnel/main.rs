//! Sites with a tunnel between them: real kernels' TUN devices, routers in between, hosts behind.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod begun;
mod ends;
mod failover;
mod first_steps;
mod fleet;
mod forwarding;
mod hub;
mod impaired;
mod imported;
mod inside;
mod kernel_routes;
mod life;
mod marks;
mod mtu;
mod multicast;
mod odd;
mod overlap;
mod peer_set;
mod qdiscs;
mod readme;
mod routing_daemon;
mod shell;
mod source_check;
mod stop;
mod two_sites;
mod users;
mod warned;

use culvert_tests::needs;

/// Whether this machine can run a test here.
#[track_caller]
fn possible(test: &str) -> bool {
    needs::met(test, needs::NETNS) && needs::met(test, needs::TUNNEL)
}
