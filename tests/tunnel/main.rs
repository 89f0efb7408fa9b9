//! Sites with a tunnel between them: real kernels' TUN devices, routers in between, hosts behind.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod ends;
mod failover;
mod first_steps;
mod fleet;
mod forwarding;
mod hub;
mod impaired;
mod kernel_routes;
mod life;
mod marks;
mod mtu;
mod multicast;
mod odd;
mod routing_daemon;
mod source_check;
mod two_sites;
mod warned;

use culvert_tests::needs;

/// How often a run is repeated on a machine that stands still now and then.
const ATTEMPTS: usize = 5;

/// Runs `run` anew until all is well with it. When the machine stands still for a moment, what takes time takes longer, and agents
/// take each other for gone; it does not in each of the runs.
#[track_caller]
fn in_attempts<T>(mut run: impl FnMut() -> Result<T, String>) -> T {
    let mut refusals = Vec::new();
    for _ in 0..ATTEMPTS {
        match run() {
            Ok(answer) => return answer,
            Err(refusal) => refusals.push(refusal),
        }
    }
    panic!("in each of {ATTEMPTS} attempts: {refusals:#?}");
}

/// Whether this machine can run a test here.
#[track_caller]
fn possible(test: &str) -> bool {
    needs::met(test, needs::NETNS) && needs::met(test, needs::TUNNEL)
}
