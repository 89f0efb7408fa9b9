//! A manager with a real socket; the time is the test's.

use std::{io, os::unix::net::UnixDatagram, sync::Arc};

use base::clock::{Clock, ManualClock};
use tempfile::TempDir;

use super::*;

const SUMMARY: Summary = Summary { peers: 3, connected: 2, flows: 7 };

const WITHIN: Duration = Duration::from_secs(30);

struct Manager {
    socket: UnixDatagram,
    folder: TempDir,
}

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, folder }
    }

    fn service(&self, watchdog: Option<Duration>) -> Service {
        let address = self.folder.path().join("notify");
        Service::new(Some(NotifySocket::new(address.as_os_str()).unwrap()), watchdog)
    }

    /// What it was told since the last call, one string per datagram.
    fn told(&self) -> Vec<String> {
        let mut told = Vec::new();
        let mut datagram = [0; 512];
        loop {
            match self.socket.recv(&mut datagram) {
                Ok(length) => told.push(String::from_utf8(datagram[..length].to_vec()).unwrap()),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    return told;
                }
            }
        }
    }
}

#[test]
fn ready_reloading_and_stopping_are_told_in_turn() {
    let (manager, clock) = (Manager::new(), ManualClock::default());
    let mut service = manager.service(None);
    service.ready(SUMMARY, clock.now());
    assert_eq!(manager.told(), ["READY=1\nSTATUS=2 of 3 peers connected, 7 flows"]);
    service.reloading(clock.now());
    let [reloading] = &manager.told()[..] else {
        panic!("one datagram: MONOTONIC_USEC belongs to RELOADING")
    };
    let lines: Vec<&str> = reloading.lines().collect();
    let ["RELOADING=1", since, "STATUS=reloading"] = lines[..] else { panic!("{reloading:?}") };
    let since = since.strip_prefix("MONOTONIC_USEC=").unwrap().parse::<u64>().unwrap();
    assert!(since > 0);
    for (end, words) in [
        (ReloadEnd::Done { changes: 0 }, "reloaded, nothing had changed"),
        (ReloadEnd::Done { changes: 1 }, "reloaded, 1 change"),
        (ReloadEnd::Done { changes: 4 }, "reloaded, 4 changes"),
        (ReloadEnd::Failed, "the last reload failed and changed nothing, see the log"),
    ] {
        service.reloaded(end, SUMMARY, clock.now());
        assert_eq!(
            manager.told(),
            [format!("READY=1\nSTATUS=2 of 3 peers connected, 7 flows; {words}")],
            "ready again, whether it succeeded or not"
        );
    }
    service.stopping(clock.now());
    assert_eq!(manager.told(), ["STOPPING=1\nSTATUS=stopping"]);
}

#[test]
fn the_status_is_told_when_it_has_changed_and_not_too_often() {
    let (manager, clock) = (Manager::new(), ManualClock::default());
    let health = Health::new(0, clock.now());
    let mut service = manager.service(None);
    assert_eq!(service.tick_interval(), Some(LONGEST_TICK));
    service.ready(SUMMARY, clock.now());
    manager.told();
    let now = Summary { flows: 8, ..SUMMARY };
    clock.advance(STATUS_INTERVAL - Duration::from_millis(1));
    service.tick(&health, || panic!("it is asked for only when it is due"), clock.now());
    assert_eq!(manager.told(), [""; 0]);
    clock.advance(Duration::from_millis(1));
    service.tick(&health, || now, clock.now());
    assert_eq!(manager.told(), ["STATUS=2 of 3 peers connected, 8 flows"]);
    clock.advance(STATUS_INTERVAL);
    service.tick(&health, || now, clock.now());
    assert_eq!(manager.told(), [""; 0], "it is as it was");
}

#[test]
fn the_watchdog_is_told_twice_in_its_time_while_every_worker_beats() {
    let (manager, clock) = (Manager::new(), ManualClock::default());
    let health = Arc::new(Health::new(2, clock.now()));
    let mut service = manager.service(Some(WITHIN));
    let tick = service.tick_interval().unwrap();
    assert_eq!(tick, Duration::from_secs(1));
    service.ready(SUMMARY, clock.now());
    manager.told();
    let mut signs = Vec::new();
    for second in 0..=60_u64 {
        health.beat(0, clock.now());
        health.beat(1, clock.now());
        // The TUN device may be gone meanwhile: that is no reason to be killed.
        health.set_ready(second % 2 == 0);
        service.tick(&health, || SUMMARY, clock.now());
        signs.extend(manager.told().into_iter().map(|told| (second, told)));
        clock.advance(tick);
    }
    let expected = [0, 15, 30, 45, 60].map(|second| (second, "WATCHDOG=1".to_owned()));
    assert_eq!(signs, expected);
}

#[test]
fn a_worker_that_hangs_stops_the_watchdog_and_one_that_is_late_is_forgiven() {
    // How long worker 1 is silent, from when on, and the seconds at which the manager hears of life.
    for (from, silent, expected) in [
        // It hangs for good: the manager gives up at 15 + 30 s.
        (18, u64::MAX, vec![0, 15]),
        // Silent over a sign that was due, for less than what is called stuck.
        (13, 5, vec![0, 15, 30, 45]),
        // For longer: the sign comes as soon as it beats again, in time.
        (20, 16, vec![0, 15, 36, 51]),
    ] {
        let (manager, clock) = (Manager::new(), ManualClock::default());
        let health = Arc::new(Health::new(2, clock.now()));
        let mut service = manager.service(Some(WITHIN));
        service.ready(SUMMARY, clock.now());
        manager.told();
        let mut signs = Vec::new();
        for second in 0..58_u64 {
            health.beat(0, clock.now());
            if second < from || second - from >= silent {
                health.beat(1, clock.now());
            }
            service.tick(&health, || SUMMARY, clock.now());
            signs.extend(manager.told().iter().map(|told| (told == "WATCHDOG=1").then_some(second).unwrap()));
            clock.advance(Duration::from_secs(1));
        }
        assert_eq!(signs, expected, "silent for {silent} s from {from} on");
    }
}

#[test]
fn no_alignment_of_beats_and_signs_kills_before_the_documented_time() {
    // Half a second's steps: when the worker's silence begins, against when signs are due.
    let least = WITHIN / 2 + Duration::from_secs(4);
    for offset in 0..120_u32 {
        let clock = ManualClock::default();
        let health = Health::new(1, clock.now());
        let mut watchdog = Watchdog::new(WITHIN);
        let (mut last_sign, start) = (clock.now(), clock.now());
        let silence_begins = start + Duration::from_millis(500) * offset;
        loop {
            if clock.now() <= silence_begins {
                health.beat(0, clock.now());
            }
            if watchdog.is_due(&health, clock.now()) {
                last_sign = clock.now();
            }
            if clock.now() - last_sign >= WITHIN {
                break;
            }
            // Ticks once a second, beats more often.
            clock.advance(Duration::from_millis(500));
            if clock.now() <= silence_begins {
                health.beat(0, clock.now());
            }
            clock.advance(Duration::from_millis(500));
        }
        let silent = clock.now() - silence_begins;
        assert!(silent >= least, "killed after {silent:?} (offset {offset})");
        assert!(silent <= WITHIN + Health::STUCK_AFTER + LONGEST_TICK, "killed after {silent:?}");
    }
}

#[test]
fn a_short_watchdog_is_looked_at_more_often_and_none_is_none() {
    let manager = Manager::new();
    let tick = |within| manager.service(within).tick_interval().unwrap();
    assert_eq!(tick(Some(Duration::from_secs(4))), Duration::from_millis(500));
    assert_eq!(tick(Some(Duration::from_millis(1))), SHORTEST_TICK);
    assert_eq!(tick(Some(Duration::ZERO)), LONGEST_TICK, "0 is off");
    let clock = ManualClock::default();
    let mut service = manager.service(Some(Duration::ZERO));
    service.tick(&Health::new(0, clock.now()), || SUMMARY, clock.now());
    assert_eq!(manager.told(), [""; 0]);
}

#[test]
fn without_a_manager_nothing_is_asked() {
    let clock = ManualClock::default();
    let mut service = Service::new(None, Some(WITHIN));
    assert_eq!(service.tick_interval(), None);
    service.ready(SUMMARY, clock.now());
    service.reloading(clock.now());
    service.reloaded(ReloadEnd::Failed, SUMMARY, clock.now());
    service.stopping(clock.now());
}

#[test]
fn readiness_that_nobody_took_is_told_again() {
    let Manager { socket, folder } = Manager::new();
    let path = folder.path().join("notify");
    let clock = ManualClock::default();
    let health = Health::new(0, clock.now());
    let mut service = Service::new(Some(NotifySocket::new(path.as_os_str()).unwrap()), None);
    std::fs::remove_file(&path).unwrap();
    drop(socket);
    service.ready(SUMMARY, clock.now());
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_nonblocking(true).unwrap();
    let manager = Manager { socket, folder };
    clock.advance(LONGEST_TICK);
    service.tick(&health, || SUMMARY, clock.now());
    assert_eq!(manager.told(), ["READY=1\nSTATUS=2 of 3 peers connected, 7 flows"]);
    clock.advance(LONGEST_TICK);
    service.tick(&health, || SUMMARY, clock.now());
    assert_eq!(manager.told(), [""; 0], "once is enough");
}
