//! Lanes from outside: against each other, against another implementation, against strangers.

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod interop;
#[cfg(test)]
mod support;
#[cfg(test)]
mod two_lanes;
