//! More changes of routes than a netlink socket holds: the loss is a change like any other, and the socket goes on.

use std::{io::Write, time::Duration};

use net::netlink::Netlink;

use crate::Space;

#[test]
fn lost_messages_are_a_change_and_later_ones_arrive() {
    let Some(space) = Space::new("an overrun of netlink") else { return };
    let mut changes = space.place().enter(|| Netlink::open().and_then(Netlink::follow)).unwrap();
    let mut take = |within: u64| changes.wait(Duration::from_millis(within)).unwrap();
    // What came before it listened, late.
    while take(100) {}

    let mut batch = tempfile::NamedTempFile::new().unwrap();
    for number in 0..8_000 {
        writeln!(batch, "route add 10.{}.{}.0/24 dev lo", number / 256, number % 256).unwrap();
    }
    let before = space.place().netlink_overruns();
    space.ip(&format!("-batch {}", batch.path().display()));
    assert!(space.place().netlink_overruns() > before, "the socket held them all");
    assert!(take(0));
    assert!(!take(100), "all has been taken");
    space.ip("route del 10.0.0.0/24");
    assert!(take(10_000), "it is told of what comes later");
}
