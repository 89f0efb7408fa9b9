//! One direction: packets from the device through the bottleneck and back to the device, in real time.

use std::{
    io::ErrorKind,
    os::fd::AsFd,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use culvert_tests::clock;
use nix::{
    poll::{PollFd, PollFlags, ppoll},
    sys::{prctl, time::TimeSpec},
};
use serde_json::{Value, json};
use testkit::simulation::bottleneck::{Bottleneck, Packet, flip};
use tun_rs::SyncDevice;

use super::{
    options::{Change, Settings},
    router::MTU,
};

/// The largest packet of any device.
const MOST_BYTES: usize = 65_535;

/// The length of the longer of the two IP headers, which stay whole.
const HEADER_BYTES: usize = 40;

/// Packets that are read before those that are due are written.
const READS: usize = 32;

/// The thread looks for a step this often.
const LONGEST_WAIT: Duration = Duration::from_millis(5);

/// Upper ends of the classes in which lateness is counted.
const CLASSES: [Duration; 8] = [
    Duration::from_micros(50),
    Duration::from_micros(100),
    Duration::from_micros(200),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_millis(2),
    Duration::from_millis(5),
    Duration::from_millis(10),
];

/// A packet as the kernel gave it.
type Bytes = Vec<u8>;

/// One direction.
pub(crate) struct Carrier {
    device: SyncDevice,
    state: Mutex<State>,
}

struct State {
    settings: Settings,
    bottleneck: Bottleneck<Bytes>,
    /// Buffers to use again.
    spare: Vec<Bytes>,
    /// Packets of the router itself, or of no known version of IP.
    ignored: u64,
    /// Packets of more than [`MTU`] bytes, which no link like this carries.
    too_large: u64,
    /// Packets by how late they were written.
    late: [u64; CLASSES.len() + 1],
    latest: Duration,
    read_error: Option<String>,
}

/// What a direction says of itself.
pub(crate) struct Account {
    pub(crate) json: Value,
    pub(crate) void: Vec<String>,
}

impl Carrier {
    pub(crate) fn new(device: SyncDevice, settings: Settings, seed: u64) -> Self {
        let state = State {
            bottleneck: Bottleneck::new(settings.parameters(), seed),
            settings,
            spare: Vec::new(),
            ignored: 0,
            too_large: 0,
            late: [0; CLASSES.len() + 1],
            latest: Duration::ZERO,
            read_error: None,
        };
        Self { device, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries packets until the process ends.
    pub(crate) fn run(&self) {
        // Else the kernel may wake us 50 µs late. A kernel that refuses makes packets late, which is counted.
        prctl::set_timerslack(1).ok();
        let mut buffer = vec![0; MOST_BYTES];
        loop {
            let next = {
                let mut state = self.state();
                self.read(&mut state, &mut buffer);
                self.write(&mut state);
                state.bottleneck.next()
            };
            let now = clock::now();
            let wait =
                next.map_or(LONGEST_WAIT, |next| next.saturating_duration_since(now).min(LONGEST_WAIT));
            if !wait.is_zero() {
                let mut fds = [PollFd::new(self.device.as_fd(), PollFlags::POLLIN)];
                // An interrupted wait is a short one.
                ppoll(&mut fds, Some(TimeSpec::from_duration(wait)), None).ok();
            }
        }
    }

    fn read(&self, state: &mut State, buffer: &mut [u8]) {
        for _ in 0..READS {
            match self.device.recv(buffer) {
                Ok(bytes) => state.take(&buffer[..bytes]),
                Err(error) => {
                    if error.kind() != ErrorKind::WouldBlock {
                        state.read_error.get_or_insert_with(|| error.to_string());
                    }
                    return;
                }
            }
        }
    }

    fn write(&self, state: &mut State) {
        let now = clock::now();
        state.bottleneck.advance(now);
        while let Some(due) = state.bottleneck.next().filter(|due| *due <= now) {
            let Some(packet) = state.bottleneck.pop(now) else { break };
            let Packet { tos, mut content, damage, .. } = packet;
            set_tos(&mut content, tos);
            if let Some(damage) = damage {
                // The checksum of its protocol tells the receiver.
                flip(content.split_at_mut_checked(HEADER_BYTES).map_or(&mut [], |(_, rest)| rest), damage);
            }
            if self.device.send(&content).is_err() {
                state.bottleneck.counts.refused += 1;
            }
            state.count_late(due);
            state.spare.push(content);
        }
    }

    /// Makes these changes now.
    pub(crate) fn change(&self, changes: &[Change]) {
        let mut state = self.state();
        state.settings.apply(changes);
        let parameters = state.settings.parameters();
        state.bottleneck.set(clock::now(), parameters);
    }

    /// What became of the packets so far; a packet is late after `bound`.
    pub(crate) fn account(&self, name: &str, bound: Duration) -> Account {
        let state = self.state();
        let (counts, held) = (state.bottleneck.counts, state.bottleneck.held());
        let classes = CLASSES.iter().map(|class| format!("{} us", class.as_micros()));
        let classes = classes.chain(["more".to_owned()]).zip(state.late.map(Value::from));
        let late = state.late_after(bound);
        let json = json!({
            "came": counts.came,
            "came_bytes": counts.came_bytes,
            "passed": counts.passed,
            "passed_bytes": counts.passed_bytes,
            "held": held,
            "lost_random": counts.lost_random,
            "lost_burst": counts.lost_burst,
            "tail_dropped": counts.tail_dropped,
            "marked": counts.marked,
            "duplicated": counts.duplicated,
            "corrupted": counts.corrupted,
            "overtaken": counts.overtaken,
            "refused": counts.refused,
            "ignored": state.ignored,
            "too_large": state.too_large,
            "most_queued_bytes": counts.most_queued_bytes,
            "late": late,
            "latest_us": state.latest.as_micros() as u64,
            "within": classes.collect::<serde_json::Map<_, _>>(),
        });
        let mut void = Vec::new();
        if counts.refused > 0 {
            void.push(format!("{name}: the device refused {} packets", counts.refused));
        }
        if state.too_large > 0 {
            void.push(format!("{name}: {} packets of more than {MTU} bytes", state.too_large));
        }
        if late * 1000 > counts.passed {
            void.push(format!("{name}: {late} packets later than {bound:?}"));
        }
        void.extend(state.read_error.iter().map(|error| format!("{name}: {error}")));
        Account { json, void }
    }
}

impl State {
    fn take(&mut self, packet: &[u8]) {
        let Some(tos) = tos(packet) else {
            self.ignored += 1;
            return;
        };
        if packet.len() > MTU {
            self.too_large += 1;
            return;
        }
        let mut content = self.spare.pop().unwrap_or_default();
        content.clear();
        content.extend_from_slice(packet);
        // The buffer of a lost packet goes with it.
        self.bottleneck.enqueue(clock::now(), Packet::new(packet.len(), tos, content));
    }

    fn count_late(&mut self, due: Instant) {
        let late = clock::now().saturating_duration_since(due);
        self.latest = self.latest.max(late);
        let class = CLASSES.iter().position(|class| late <= *class).unwrap_or(CLASSES.len());
        self.late[class] += 1;
    }

    /// Packets in the classes above `bound`.
    fn late_after(&self, bound: Duration) -> u64 {
        let first = CLASSES.iter().position(|class| *class > bound).unwrap_or(CLASSES.len());
        self.late[first..].iter().sum()
    }
}

/// The TOS or traffic class byte of a packet from one host to another.
fn tos(packet: &[u8]) -> Option<u8> {
    match (packet.first()? >> 4, packet.len()) {
        (4, 20..) => Some(packet[1]),
        // Not what the router itself tells its neighbours.
        (6, 40..) if packet[24] != 0xff => Some(packet[0] << 4 | packet[1] >> 4),
        _ => None,
    }
}

/// Writes the byte into the header, and what that is to the checksum (RFC 1624).
fn set_tos(packet: &mut [u8], now: u8) {
    let Some(before) = tos(packet).filter(|before| *before != now) else { return };
    if packet[0] >> 4 == 6 {
        packet[0] = packet[0] & 0xf0 | now >> 4;
        packet[1] = packet[1] & 0x0f | now << 4;
        return;
    }
    packet[1] = now;
    let checksum = u16::from_be_bytes([packet[10], packet[11]]);
    let sum = u32::from(!checksum) + u32::from(!u16::from(before)) + u32::from(now);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    packet[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}
