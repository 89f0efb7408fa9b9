//! Assigns datagrams on a listening port to workers, as a rule and as the kernel's program (pure).
//!
//! ```text
//!  byte        0           1 … 4      5              6
//!  long        1xxxxxxx    version    DCID length    DCID …      → byte 6 mod workers
//!  short       0xxxxxxx    DCID …                                → byte 1 mod workers
//! ```
//!
//! A connection ID that we issue begins with a byte that is congruent to its worker (RFC 8999 §5 has the offsets). The
//! kernel joins datagrams of one 4-tuple before it looks, and looks at the first; whatever comes to another worker is
//! handed over.

use libc::sock_filter;

/// The bit of the first byte that tells a long header (RFC 8999 §5.1).
const LONG_HEADER: u8 = 0x80;

/// The index of the destination connection ID in a packet with a long header.
const LONG_DCID: usize = 6;

/// The index of the destination connection ID in a packet with a short header.
const SHORT_DCID: usize = 1;

/// The worker of `datagram`, 0 to `workers - 1`; a datagram that ends before its connection ID is worker 0's.
#[must_use]
pub fn owner(datagram: &[u8], workers: u8) -> u8 {
    let Some(first) = datagram.first() else { return 0 };
    let offset = if first & LONG_HEADER == 0 { SHORT_DCID } else { LONG_DCID };
    datagram.get(offset).map_or(0, |byte| byte % workers.max(1))
}

/// [`owner`] as classic BPF for `SO_ATTACH_REUSEPORT_CBPF`: it sees the UDP payload and returns an index into the group.
/// A load beyond the end ends the program with 0.
pub(super) fn steering_program(workers: u8) -> [sock_filter; 7] {
    let load = |offset: usize| statement(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, offset as u32);
    [
        load(0),
        // Past the load of the long header and the jump behind it, when the bit is not set.
        sock_filter {
            jf: 2,
            ..statement(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, u32::from(LONG_HEADER))
        },
        load(LONG_DCID),
        statement(libc::BPF_JMP | libc::BPF_JA, 1),
        load(SHORT_DCID),
        statement(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, u32::from(workers.max(1))),
        statement(libc::BPF_RET | libc::BPF_A, 0),
    ]
}

fn statement(code: u32, k: u32) -> sock_filter {
    // Every code of classic BPF fits a byte.
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_of_the_connection_id_decides() {
        for workers in [1, 2, 3, 64] {
            for byte in 0..=u8::MAX {
                assert_eq!(owner(&[0x40, byte, 9, 9, 9, 9, 9], workers), byte % workers);
                assert_eq!(owner(&[0xc0, 9, 9, 9, 9, 8, byte], workers), byte % workers);
            }
        }
    }

    #[test]
    fn a_short_datagram_is_worker_zeros() {
        for datagram in [&[][..], &[0x7f], &[0x80], &[0xff; 6]] {
            assert_eq!(owner(datagram, 3), 0);
        }
        assert_eq!(owner(&[0xff; 7], 0), 0, "no workers count as one");
    }

    #[test]
    fn the_program_is_the_rule() {
        let program = steering_program(5).map(|line| (line.code, line.jt, line.jf, line.k));
        let (load_byte, jump_if_set, jump, modulo, result) = (0x30, 0x45, 0x05, 0x94, 0x16);
        assert_eq!(
            program,
            [
                (load_byte, 0, 0, 0),
                (jump_if_set, 0, 2, 0x80),
                (load_byte, 0, 0, 6),
                (jump, 0, 0, 1),
                (load_byte, 0, 0, 1),
                (modulo, 0, 0, 5),
                (result, 0, 0, 0),
            ]
        );
    }
}
