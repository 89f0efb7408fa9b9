"""A crate with circles that its imports do not show, to check the search with."""

import tempfile
from pathlib import Path

from .folders import between, calls_of, folder_in, part_of

FILES = {
    "lib.rs": "mod conn; mod session; mod flows; mod lanes; mod device; mod report; mod decoy; mod top; mod hub; mod timer;",
    "conn.rs": """
        use crate::session::Session;
        use std::collections::HashMap;
        pub struct Peer { pub name: String }
        pub struct Control;
        pub struct Conn<'a> { pub peer: &'a mut Peer, pub session: &'a mut Session, pub control: Option<Box<Control>> }
        pub type ById<T> = HashMap<u32, T>;
    """,
    # A circle through a field of a borrowed struct, and through a parameter.
    "session/mod.rs": """
        use crate::{conn::Conn, flows::Flows};
        pub struct Session { flows: Flows }
        impl Session {
            pub fn close(&mut self) { let Self { flows, .. } = self; flows.drop_all(); }
            pub fn end(conn: &mut Conn<'_>) { conn.control.as_ref().map(|control| control.finish()); }
        }
    """,
    "flows/mod.rs": """
        use crate::conn::{Conn, Control};
        pub struct Flows;
        impl Flows {
            pub fn drop_all(&mut self) { /* session.close() */ }
            pub fn expire(&self, conn: &mut Conn<'_>) { let Conn { session, .. } = conn; session.close(); }
        }
        // Of this folder, though the type is not.
        impl Control { pub fn finish(&self) {} }
    """,
    # A circle through a local that `let … else` binds.
    "lanes/mod.rs": """
        use crate::{conn::ById, device::Device};
        pub struct Lane;
        pub struct Lanes { of: ById<Vec<Lane>> }
        impl Lanes {
            pub fn last(&mut self, id: u32) -> Option<&mut Lane> { self.of.get_mut(&id)?.iter_mut().rev().next() }
        }
        impl Lane {
            pub fn send(&mut self) {}
            pub fn up(&self, devices: &[Device]) { for device in devices { device.write(b"{"); } }
        }
    """,
    "device/mod.rs": """
        use crate::lanes::Lanes;
        pub struct Device { lanes: Lanes }
        impl Device {
            pub fn read(&mut self) { let Some(found) = self.lanes.last(1) else { return }; found.send(); }
            pub fn write(&self, _bytes: &[u8]) {}
        }
    """,
    # A circle through a trait, whose impl lies in another folder; and through a free function.
    "report/mod.rs": """
        pub trait Tally { fn tally(&self) -> u64; }
        pub fn note(text: &str) {}
        pub fn publish(decoys: &[std::sync::Arc<crate::decoy::Decoy>]) -> u64 { decoys.iter().map(|decoy| decoy.tally()).sum() }
        pub fn sum(all: &[&dyn Tally]) -> u64 { all.iter().map(|each| each.tally()).sum() }
    """,
    "decoy/mod.rs": """
        use crate::report::{self, Tally};
        pub struct Decoy;
        impl Tally for Decoy { fn tally(&self) -> u64 { report::note("decoy"); 1 } }
    """,
    # No circle: the top calls down, and what lies below has locals and methods of the same names, a closure, a trait and a test.
    "top/mod.rs": """
        use crate::{hub::{Hub, Post, count::{self, count}}, timer::Timer};
        pub struct Top { hub: Hub, timer: Timer }
        impl Top {
            pub fn turn(&mut self) { let Self { hub, timer } = self; timer.arm(hub.close(|number| number + 1)); hub.post(&Inbox); }
            pub fn close(&mut self) { count(count::MOST); }
            pub fn wake(&self) {}
        }
        struct Inbox;
        impl Post for Inbox { fn put(&self) {} }
    """,
    "hub/mod.rs": """
        use crate::timer::Timer;
        pub trait Post { fn put(&self); }
        pub mod count { pub const MOST: u64 = 1; pub fn count(number: u64) {} }
        pub struct Hub { top: Timer }
        impl Hub {
            pub fn close(&mut self, each: impl Fn(u64) -> u64) -> u64 { let top = &mut self.top; top.close(); each(1) }
            pub fn post(&self, to: &impl Post) { to.put() }
        }
        #[cfg(test)]
        mod tests { fn test(top: &mut crate::top::Top) { top.turn() } }
    """,
    "timer/mod.rs": """
        pub struct Timer;
        impl Timer {
            pub fn arm(&self, at: u64) {}
            pub fn close(&self) { std::thread::current().wake(); }
        }
    """,
}
EXPECTED = {
    "session": {"flows": {("Session::close", "Flows::drop_all"), ("Session::end", "Control::finish")}},
    "flows": {"session": {("Flows::expire", "Session::close")}},
    "lanes": {"device": {("Lane::up", "Device::write")}},
    "device": {"lanes": {("Device::read", "Lanes::last"), ("Device::read", "Lane::send")}},
    "report": {"decoy": {("publish", "Decoy::tally")}},
    "decoy": {"report": {("Decoy::tally", "note")}},
    "top": {
        "hub": {("Top::turn", "Hub::close"), ("Top::turn", "Hub::post"), ("Top::close", "count")},
        "timer": {("Top::turn", "Timer::arm")},
    },
    "hub": {"timer": {("Hub::close", "Timer::close")}},
    "timer": {},
}
CIRCLES = [["decoy", "report"], ["device", "lanes"], ["flows", "session"]]


def self_test(cycles):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "fixture/src"
        for name, text in FILES.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        [(_, calls)] = calls_of([root])
        edges = between(calls, folder_in(root))
        assert edges == EXPECTED, edges
        assert sorted(cycles(edges)) == CIRCLES, cycles(edges)
        assert not calls.unknown and not calls.problems, (calls.unknown, calls.problems)
        assert between(calls, part_of(root, False)) == EXPECTED
        assert between(calls, part_of(root, True))["hub/mod.rs"] == {"timer/mod.rs": EXPECTED["hub"]["timer"]}
