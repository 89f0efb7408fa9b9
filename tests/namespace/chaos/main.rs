//! Things that happen to two agents, to their hosts and to the path between them, while datagrams and iperf3 go both ways.
//!
//! | question | file |
//! |---|---|
//! | iperf3 runs beside it all | `beside.rs` |
//! | a NAT forgets, an address changes, a link goes, a path turns bad or small | `path.rs` |
//! | an agent ends or is killed and comes back, the one that is dialled moves | `ends.rs` |
//! | several of those at once, from a seed | `mixture.rs` |
//!
//! After each the traffic goes on by itself, and every datagram is accounted for ([`culvert_tests::ledger`]).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod beside;
mod ends;
mod mixture;
mod path;

use culvert_tests::needs;

/// Whether this machine can run a test here.
#[track_caller]
fn possible(test: &str) -> bool {
    needs::met(test, needs::NETNS) && needs::met(test, needs::TUNNEL)
}
