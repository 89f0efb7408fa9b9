//! Which connection of a client that named us gives way to a newer one.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::{Duration, Instant},
};

use quinn_proto::ConnectionHandle;

use super::{IDLE, Refused};

/// The part of the places that one /24 or /56 may have.
const SHARE: usize = 8;

/// A place that is taken.
pub(super) struct Held {
    pub(super) handle: ConnectionHandle,
    pub(super) prefix: IpAddr,
    /// When bytes of a stream came or went last.
    pub(super) last_active: Instant,
    /// Whether it is closed if a newer one needs its place.
    pub(super) gives_way: bool,
}

/// Finds one of `most` places for a connection from `prefix`: `None` if one is free, else the connection that gives its place up. Whose
/// share is used up takes the place of a neighbour.
///
/// # Errors
///
/// Why there is none.
pub(super) fn room(held: &[Held], prefix: IpAddr, most: usize) -> Result<Option<ConnectionHandle>, Refused> {
    let neighbours = held.iter().filter(|place| place.prefix == prefix);
    if neighbours.clone().count() >= most.div_ceil(SHARE) {
        return oldest(neighbours).map(Some).ok_or(Refused::Source);
    }
    if held.len() < most {
        return Ok(None);
    }
    oldest(held.iter()).map(Some).ok_or(Refused::Full)
}

fn oldest<'h>(places: impl Iterator<Item = &'h Held>) -> Option<ConnectionHandle> {
    let giving_way = places.filter(|place| place.gives_way);
    giving_way.min_by_key(|place| (place.last_active, place.handle.0)).map(|place| place.handle)
}

/// Whether a connection of a visitor is closed if a newer one needs its place: without an open request, or one on whose streams nothing has
/// come or gone for a minute. A user's is kept as long as it has a request.
pub(super) fn gives_way(is_idle: bool, is_user: bool, silent_for: Duration) -> bool {
    is_idle || !is_user && silent_for >= IDLE
}

/// The /24 or /56 of an address.
pub(super) fn prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & !0xff).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 72 << 72).into(),
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, SystemClock};

    use super::*;

    #[test]
    fn a_request_on_which_nothing_moves_for_a_minute_keeps_no_place() {
        const SECOND: Duration = Duration::from_secs(1);
        assert!(gives_way(true, false, Duration::ZERO), "no request is open");
        assert!(!gives_way(false, false, 59 * SECOND));
        assert!(gives_way(false, false, 60 * SECOND));
        assert!(!gives_way(false, true, 600 * SECOND), "a user's tunnel may be silent");
        assert!(gives_way(true, true, Duration::ZERO));
    }

    fn ip(text: &str) -> IpAddr {
        prefix(text.parse().unwrap())
    }

    fn held(number: usize, address: &str, gives_way: bool, now: Instant) -> Held {
        let last_active = now + Duration::from_secs(number as u64);
        Held { handle: ConnectionHandle(number), prefix: ip(address), last_active, gives_way }
    }

    #[test]
    fn one_prefix_has_an_eighth_of_the_places_and_replaces_its_own() {
        let now = SystemClock.now();
        let mut places: Vec<Held> = (0..3).map(|number| held(number, "192.0.2.1", false, now)).collect();
        places.push(held(3, "198.51.100.1", true, now));
        assert_eq!(room(&places, ip("192.0.2.200"), 32), Ok(None));
        places.push(held(4, "::ffff:192.0.2.9", false, now));
        assert_eq!(room(&places, ip("192.0.2.200"), 32), Err(Refused::Source));
        assert_eq!(room(&places, ip("192.0.3.1"), 32), Ok(None));
        places[1].gives_way = true;
        assert_eq!(room(&places, ip("192.0.2.200"), 32), Ok(Some(ConnectionHandle(1))));
        let v6: Vec<Held> =
            (0..4).map(|number| held(number, &format!("2001:db8:0:1{number}::1"), false, now)).collect();
        assert_eq!(room(&v6, ip("2001:db8:0:ff::1"), 32), Err(Refused::Source));
        assert_eq!(room(&v6, ip("2001:db8:0:100::1"), 32), Ok(None));
    }

    #[test]
    fn when_all_places_are_taken_the_one_that_is_silent_longest_gives_way() {
        let now = SystemClock.now();
        let mut places: Vec<Held> =
            (0..16).map(|number| held(number, &format!("192.0.{number}.1"), number % 3 == 2, now)).collect();
        assert_eq!(room(&places, ip("203.0.113.1"), 16), Ok(Some(ConnectionHandle(2))));
        places.iter_mut().for_each(|place| place.gives_way = false);
        assert_eq!(room(&places, ip("203.0.113.1"), 16), Err(Refused::Full));
        assert_eq!(room(&places[1..], ip("203.0.113.1"), 16), Ok(None));
    }
}
