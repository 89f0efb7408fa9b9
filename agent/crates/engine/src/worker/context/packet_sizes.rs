//! How large packets to a peer may be at most: by the configuration, the interface on the way there, and the rate.

use std::net::SocketAddr;

use config::Transport;
use gate::tls::{LARGEST_UDP_PAYLOAD, MIN_PACKET};
use net::{Ways, batch::MAX_MESSAGE_BYTES};

/// The largest packet that a socket can send, in bytes of UDP payload.
const MOST: u16 = MAX_MESSAGE_BYTES as u16;

/// The packets that a receive buffer holds at least: with fewer, a short burst is lost. The kernel counts twice what the far end sends,
/// and grants twice what was asked for.
const LEAST_HELD: usize = 16;

/// The sizes to which a rate limits packets, largest first, in bytes of UDP payload.
const BY_RATE: [u16; 6] = [MOST, 32_740, 16_356, 8_972, 4_078, 2_020];

/// The largest packet through Ethernet to `to`, in bytes of UDP payload: where the search for its path's MTU pauses, and what is assumed
/// of an interface that is not known.
pub(crate) fn usual_packet(to: SocketAddr) -> u16 {
    if to.is_ipv4() { MOST_USUAL } else { 1_452 }
}

/// The same of either family.
pub(crate) const MOST_USUAL: u16 = 1_472;

/// The configured limit on packets of lanes, sent and received, in bytes of UDP payload.
pub(crate) fn largest_packet(transport: &Transport) -> u16 {
    transport.max_packet.unwrap_or(MOST)
}

/// The largest packet on a lane that this end takes by sockets with a receive buffer of so many bytes.
pub(crate) fn accepted_packet(transport: &Transport, receive_buffer: Option<usize>) -> u16 {
    transport.max_packet.unwrap_or_else(|| {
        let held = receive_buffer.map_or(usize::MAX, |bytes| bytes / LEAST_HELD);
        u16::try_from(held).unwrap_or(u16::MAX).clamp(MOST_USUAL, LARGEST_UDP_PAYLOAD)
    })
}

/// Where the search for the MTU of a path to `to` ends, in bytes of UDP payload, whatever the far end takes.
pub(crate) fn most_towards(transport: &Transport, ways: &Ways, to: SocketAddr) -> u16 {
    let unknown = || transport.max_packet.unwrap_or_else(|| usual_packet(to));
    let interface = ways(to).map_or_else(unknown, |bytes| u16::try_from(bytes).unwrap_or(u16::MAX));
    largest_packet(transport).min(interface).max(MIN_PACKET)
}

/// The largest packet at `rate` bytes a second, of which `present` was the last: it takes 1 ms of the rate at most, or is as large as
/// is usual. So the share of others, and the queue that a rate keeps short, are not a few large packets. It grows only when there is a
/// quarter more than it needs.
pub(crate) fn most_at(rate: Option<u64>, present: u16) -> u16 {
    let Some(rate) = rate else { return MOST };
    let within = |share: u64| {
        BY_RATE.into_iter().find(|size| u64::from(*size) * 1_000 <= rate * share / 5).unwrap_or(MOST_USUAL)
    };
    within(5).min(present.max(within(4)))
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn a_packet_takes_a_millisecond_of_the_rate_at_most() {
        let mbit = |mbit: u64| Some(mbit * 125_000);
        for (rate, most) in [(1, 1_472), (10, 1_472), (20, 2_020), (100, 8_972), (500, 32_740), (1_000, MOST)]
        {
            assert_eq!(most_at(mbit(rate), MOST), most, "{rate} Mbit/s");
        }
        assert_eq!(most_at(None, 1_472), MOST);
        // It falls at once, and grows with a quarter to spare.
        assert_eq!([most_at(mbit(71), 8_972), most_at(mbit(72), 8_972)], [4_078, 8_972]);
        assert_eq!([most_at(mbit(80), 4_078), most_at(mbit(90), 4_078)], [4_078, 8_972]);
    }

    #[test]
    fn a_small_receive_buffer_takes_smaller_packets() {
        let transport = Transport::DEFAULT;
        assert_eq!(accepted_packet(&transport, None), 65_527);
        assert_eq!(accepted_packet(&transport, Some(4 << 20)), 65_527);
        assert_eq!(accepted_packet(&transport, Some(212_992)), 13_312);
        assert_eq!(accepted_packet(&transport, Some(4_096)), 1_472);
    }

    #[test]
    fn an_interface_that_is_not_known_is_taken_for_ethernet() {
        let (unknown, jumbo): (Ways, Ways) = (Rc::new(|_| None), Rc::new(|_| Some(8_972)));
        let mut transport = Transport::DEFAULT;
        let [v4, v6] = ["192.0.2.1:1", "[2001:db8::1]:1"].map(|to| to.parse().unwrap());
        assert_eq!(
            [most_towards(&transport, &unknown, v4), most_towards(&transport, &unknown, v6)],
            [1_472, 1_452]
        );
        assert_eq!(most_towards(&transport, &jumbo, v4), 8_972);
        transport.max_packet = Some(4_000);
        assert_eq!(
            [most_towards(&transport, &unknown, v4), most_towards(&transport, &jumbo, v4)],
            [4_000, 4_000]
        );
    }
}
