//! Lanes from outside: against each other, against another implementation, against unauthenticated senders.

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod interop;
#[cfg(test)]
mod key_limits;
#[cfg(test)]
mod key_update;
#[cfg(test)]
mod losses;
#[cfg(test)]
mod mtu;
#[cfg(test)]
mod net;
#[cfg(test)]
mod recorded;
#[cfg(test)]
mod reordering;
#[cfg(test)]
mod support;
#[cfg(test)]
mod two_lanes;
