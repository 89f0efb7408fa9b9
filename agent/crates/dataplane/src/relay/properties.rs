//! Properties of any pieces in any order: what a fuzz target and a test check.

use std::{sync::Arc, time::Duration};

use base::clock::{Clock, ManualClock};
use wire::context::MOST_DATAGRAM;

use crate::relay::{
    Account, FlowId, Piece, Reassembler,
    fragments::{LEAST_PIECE, MOST_INCOMPLETE, REASSEMBLY_TIME},
};

/// The length of one step in the input, in bytes.
const STEP: usize = 7;

/// Takes `input` as what a peer does with pieces, in steps of seven bytes behind one that gives the limit.
///
/// What waits never exceeds the limit, a datagram that is put together is the one that was cut, and each is received once and
/// then delivered, dropped or waiting.
pub fn reassembly(input: &[u8]) {
    let Some((&limit, steps)) = input.split_first() else { return };
    let limit = (64 << 10) + (usize::from(limit) << 12);
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut reassembler = Reassembler::within(limit, &Arc::default());
    for step in steps.chunks_exact(STEP) {
        let &[kind, name, total_high, total_low, offset_high, offset_low, len] = step else { return };
        let now = clock.now();
        let (flow, datagram) = (FlowId((name & 3).into()), u32::from(name >> 2 & 15));
        let total = usize::from(u16::from_be_bytes([total_high, total_low])) + 1;
        let offset = usize::from(u16::from_be_bytes([offset_high, offset_low]));
        match kind {
            0..200 => {
                let len = match len {
                    0..128 => LEAST_PIECE + usize::from(len) * 8,
                    128..240 => total.saturating_sub(offset),
                    short => usize::from(short - 240),
                };
                let byte = |at: usize| (at * 3 + at / 200 + total + usize::from(name & 63)) % 255 + 1;
                let bytes: Vec<u8> = (offset..offset + len).map(|at| byte(at) as u8).collect();
                let piece = Piece { flow, datagram, total, offset };
                let mut joined = b"before it".to_vec();
                let taken = reassembler.take(&piece, &bytes, now, &mut account, &mut joined);
                assert!(joined.starts_with(b"before it") && (taken.is_some() || joined.len() == 9));
                if let Some(whole) = taken.map(|range| &joined[range]) {
                    account.delivered += 1;
                    assert!(whole.len() == total && total <= MOST_DATAGRAM);
                    assert!(whole.iter().enumerate().all(|(at, found)| usize::from(*found) == byte(at)));
                }
            }
            200..215 => clock.advance(Duration::from_millis(u64::from(name) * 5)),
            215..225 => reassembler.expire(now, &mut account),
            225..235 => reassembler.end_flow(flow, &mut account),
            235..240 => reassembler.clear(&mut account),
            240.. => reassembler.give_up(flow, datagram, total, now, &mut account),
        }
        assert!(reassembler.held_bytes() <= limit && reassembler.len() <= MOST_INCOMPLETE);
        assert_eq!(reassembler.is_empty(), reassembler.held_bytes() == 0);
        assert!(account.balances(reassembler.len() as u64));
    }
    clock.advance(REASSEMBLY_TIME);
    reassembler.expire(clock.now(), &mut account);
    assert!(reassembler.is_empty() && reassembler.held_bytes() == 0 && account.balances(0));
}
