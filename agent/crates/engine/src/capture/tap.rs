//! The text that quinn-proto writes about control connections, which waits here until the control thread takes it.

use std::{
    io::{self, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use base::{ids::PeerId, panics::lock};
use quinn_proto::{QlogConfig, QlogStream};

use crate::capture::Capture;

/// The limit on waiting text, in bytes.
const MOST_BYTES: usize = 1 << 20;

/// The waiting text: complete records only.
#[derive(Debug, Default)]
pub struct Tap {
    shared: Mutex<Shared>,
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Shared {
    text: Vec<u8>,
    /// The number of records that found no room since the text was last taken.
    untold: u64,
    lost: u64,
}

impl Tap {
    fn put(&self, record: &[u8]) {
        let shared = &mut *lock(&self.shared);
        if shared.text.len() + record.len() <= MOST_BYTES {
            shared.text.extend_from_slice(record);
        } else {
            shared.untold += 1;
            shared.lost += 1;
        }
    }

    /// Takes the waiting text, and the number of records that were lost after it.
    pub fn take(&self) -> (Vec<u8>, u64) {
        let shared = &mut *lock(&self.shared);
        (std::mem::take(&mut shared.text), std::mem::take(&mut shared.untold))
    }

    /// The number of records that found no room so far.
    #[must_use]
    pub fn lost(&self) -> u64 {
        lock(&self.shared).lost
    }

    /// Closes the tap: whatever is written from now on is dropped.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Closes the tap and drops the waiting text.
    pub(super) fn abandon(&self) {
        self.close();
        lock(&self.shared).text = Vec::new();
    }
}

/// The sink for quinn-proto's records of one connection. It leaves out quinn-proto's file header.
pub(super) struct Writer {
    capture: Arc<Capture>,
    record: Vec<u8>,
    header: bool,
}

impl Writer {
    pub(super) fn new(capture: Arc<Capture>) -> Self {
        Self { capture, record: Vec::new(), header: true }
    }
}

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // An error would be logged for each packet, for as long as the connection lives.
        if self.capture.tap.closed.load(Ordering::Relaxed) {
            self.record = Vec::new();
            return Ok(bytes.len());
        }
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.record.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                if !std::mem::replace(&mut self.header, false) {
                    self.capture.tap.put(&self.record);
                }
                self.record.clear();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The running captures of control connections, which are looked up when a connection begins.
#[derive(Debug, Default)]
pub struct Taps {
    running: Mutex<Vec<Arc<Capture>>>,
    any: AtomicBool,
}

impl Taps {
    /// Adds a capture: from now on the connections of its peer are recorded, each from its first packet.
    pub fn add(&self, capture: &Arc<Capture>) {
        let mut running = lock(&self.running);
        running.push(Arc::clone(capture));
        self.any.store(true, Ordering::Release);
    }

    /// The stream for the records of a connection of `peer` that begins now, if it is to be recorded.
    #[must_use]
    pub fn stream(&self, peer: PeerId, now: Instant) -> Option<QlogStream> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let running = lock(&self.running);
        let capture = running.iter().find(|capture| capture.peer == peer && !capture.is_over(now))?;
        capture.begin();
        let mut config = QlogConfig::default();
        config.writer(Box::new(Writer::new(Arc::clone(capture)))).start_time(capture.since);
        config.into_stream()
    }

    /// Ends captures whose time is over, or that nobody asks for.
    pub fn expire(&self, now: Instant) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut running = lock(&self.running);
        running.retain(|capture| {
            let over = capture.is_over(now);
            if over {
                capture.close();
            }
            if capture.is_abandoned(now) {
                capture.tap.abandon();
            }
            !over
        });
        self.any.store(!running.is_empty(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, time::Duration};

    use base::clock::{Clock, ManualClock};

    use super::*;
    use crate::capture::Subject;

    #[test]
    fn what_quinn_writes_is_bounded_and_has_no_header_of_its_own() {
        let clock = ManualClock::default();
        let (now, taps) = (clock.now(), Taps::default());
        assert!(taps.stream(PeerId(1), now).is_none());
        let capture = Arc::new(Capture::new(PeerId(1), Subject::Control, now, Duration::from_secs(5)));
        taps.add(&capture);
        assert!(taps.stream(PeerId(2), now).is_none(), "another peer");
        assert!(taps.stream(PeerId(1), now).is_some());
        assert_eq!((capture.begun(), capture.tap.take()), (1, (Vec::new(), 0)), "its header is left out");

        let mut writer = Writer::new(Arc::clone(&capture));
        writer.write_all(b"\x1e{\"header\":1}\n").unwrap();
        for piece in [&b"\x1e"[..], b"{\"one\"", b":1}", b"\n", b"\x1e{\"half\""] {
            writer.write_all(piece).unwrap();
        }
        assert_eq!(capture.tap.take(), (b"\x1e{\"one\":1}\n".to_vec(), 0), "only whole records");
        writer.write_all(b":1}\n").unwrap();
        let record = [&b"\x1e{"[..], &[b' '; 1000], b"}\n"].concat();
        for _ in 0..2000 {
            writer.write_all(&record).unwrap();
        }
        let (text, lost) = capture.tap.take();
        assert!(text.len() <= 1 << 20 && text.len() > 1 << 19);
        let kept = text.iter().filter(|byte| **byte == b'\n').count() as u64;
        assert_eq!((kept + lost, capture.tap.lost()), (2001, lost));

        taps.expire(now + Duration::from_secs(5));
        writer.write_all(&record).unwrap();
        assert_eq!(capture.tap.take(), (Vec::new(), 0), "it is over");
        assert!(taps.stream(PeerId(1), now).is_none());
    }
}
