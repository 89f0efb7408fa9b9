//! The workers of an agent, and what they share.
//!
//! | what | module |
//! |---|---|
//! | one worker: its loop, its sockets, sessions, lanes and forwards | [`worker`] |
//! | messages and hand-off batches between workers | [`hub`] |
//! | control connections: quinn-proto, dialling, congestion control, windows | [`control`] |
//! | one peer, as a worker sees it | [`peer`]; the way to it: [`reach`]; when its ports change: [`hops`] |
//! | all peers, and who may connect | [`registry`], [`origin`] |
//! | how a reload reaches the workers | [`follow`] |
//! | the TUN device, its addresses and routes; the packet size to each peer | [`tunnel`], [`mtu_table`] |
//! | what an operator is told of all these | [`status`]; in a list of peers: [`brief`] |
//! | what a metric is, qlog captures, liveness | [`metrics`], [`capture`], [`health`] |

/// Adds the fields of `other` to those of `sum`.
macro_rules! add {
    ($sum:expr, $other:expr; $($field:ident),*) => { $($sum.$field += $other.$field;)* };
}

/// Declares a struct of throttles, each of which lets one log line through per interval.
macro_rules! throttles {
    ($(#[$doc:meta])* $visibility:vis struct $name:ident { $($(#[$of:meta])* $each:vis $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        $visibility struct $name { $($(#[$of])* $each $field: base::throttle::Throttle,)* }

        impl $name {
            pub(crate) fn new(interval: std::time::Duration) -> Self {
                Self { $($field: base::throttle::Throttle::new(interval),)* }
            }
        }
    };
}

pub mod brief;
pub mod capture;
pub mod control;
pub mod follow;
pub mod health;
pub mod hops;
pub mod hub;
pub mod metrics;
pub mod mtu_table;
pub mod origin;
pub mod peer;
pub mod quota;
pub mod reach;
pub mod registry;
mod registry_error;
pub mod status;
pub mod tunnel;
pub mod uplinks;
pub mod worker;
