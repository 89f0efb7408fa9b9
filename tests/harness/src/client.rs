//! Clients that send numbered datagrams.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use crate::clock::{self, PATIENCE};

/// A UDP client whose socket is connected, so that the kernel gives it nothing but what comes from the address that
/// it asked.
#[derive(Debug)]
pub struct Client {
    socket: UdpSocket,
    number: u32,
    next: u32,
    /// Nobody waits for the answers to its datagrams before this one any more, and they may still come.
    awaited: u32,
}

impl Client {
    /// Client `number` of the service at `server`.
    ///
    /// # Panics
    /// When the kernel has no socket for it.
    #[must_use]
    pub fn new(number: u32, server: SocketAddr) -> Self {
        let any: SocketAddr = if server.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
        let socket = UdpSocket::bind(any).expect("a port is free");
        socket.connect(server).expect("there is a route");
        Self { socket, number, next: 0, awaited: 0 }
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Which client it is.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The number of its newest datagram, if it has sent one.
    #[must_use]
    pub fn newest(&self) -> Option<u32> {
        self.next.checked_sub(1)
    }

    /// Sends its next datagram, which it numbers.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn send(&mut self) {
        let datagram = self.datagram(self.next);
        self.next += 1;
        // An ICMP error of an earlier datagram is reported once, and then the datagram has not been sent.
        let sent = self.socket.send(&datagram).or_else(|_| self.socket.send(&datagram));
        sent.expect("the kernel takes a datagram");
    }

    /// Receives its datagram `number` back, and passes over late answers to what [`reach`](Self::reach) has sent.
    ///
    /// # Errors
    /// What came instead, or that nothing came within `limit`.
    pub fn receive(&self, number: u32, limit: Duration) -> Result<(), String> {
        let end = clock::now() + limit;
        loop {
            // A socket has no timeout of zero.
            let left = end.saturating_duration_since(clock::now()).max(Duration::from_millis(1));
            let answer = self.receive_any(left).map_err(|error| format!("datagram {number}: {error}"))?;
            if answer == self.datagram(number) {
                return Ok(());
            }
            let is_late = |(client, old): (u32, u32)| client == self.number && old < self.awaited;
            if !numbers_of(&answer).is_some_and(is_late) {
                let client = self.number;
                return Err(format!("client {client} expected its datagram {number} and got {answer:02x?}"));
            }
        }
    }

    /// Receives the numbers of the datagrams that came back until now, or within `limit` if there are none.
    ///
    /// # Panics
    /// When one of them is not its own.
    #[track_caller]
    pub fn receive_numbers(&self, limit: Duration) -> Vec<u32> {
        let mut numbers = Vec::new();
        // An error is the end of the wait, or that of an earlier datagram.
        while let Ok(answer) =
            self.receive_any(if numbers.is_empty() { limit } else { Duration::from_millis(1) })
        {
            match numbers_of(&answer) {
                Some((client, number)) if client == self.number => numbers.push(number),
                Some(_) | None => panic!("client {} got {answer:02x?}", self.number),
            }
        }
        numbers
    }

    /// Receives any datagram.
    ///
    /// # Errors
    /// The kernel's, also when nothing came within `limit`.
    pub fn receive_any(&self, limit: Duration) -> io::Result<Vec<u8>> {
        self.socket.set_read_timeout(Some(limit))?;
        let mut buffer = vec![0; 65_535];
        let length = self.socket.recv(&mut buffer)?;
        buffer.truncate(length);
        Ok(buffer)
    }

    /// Sends `count` datagrams, each after the answer to the one before.
    ///
    /// # Panics
    /// When an answer is missing or another one.
    #[track_caller]
    pub fn converse(&mut self, count: u32) {
        for _ in 0..count {
            let number = self.next;
            self.send();
            self.receive(number, PATIENCE).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    /// Sends a datagram of its own bytes and waits for the same to come back.
    ///
    /// # Panics
    /// When it does not.
    #[track_caller]
    pub fn echo(&self, payload: &[u8]) {
        self.socket.send(payload).expect("the kernel takes a datagram");
        let answer = self.receive_any(PATIENCE);
        assert!(
            answer.as_ref().is_ok_and(|answer| answer == payload),
            "{} bytes: {answer:02x?}",
            payload.len()
        );
    }

    /// Sends until there is an answer, and passes over answers to earlier datagrams.
    ///
    /// # Panics
    /// When there is none soon.
    #[track_caller]
    pub fn reach(&mut self) {
        clock::until("an answer", PATIENCE, || {
            self.send();
            self.receive_any(Duration::from_millis(200))
        });
        // What was sent before that one may be answered still: in most cases before there is silence, and later by agents that
        // stand still.
        while self.receive_any(Duration::from_millis(500)).is_ok() {}
        self.awaited = self.next;
    }

    fn datagram(&self, number: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LENGTH);
        while bytes.len() < LENGTH {
            bytes.extend(self.number.to_be_bytes());
            bytes.extend(number.to_be_bytes());
        }
        bytes
    }
}

/// Bytes of a numbered datagram.
const LENGTH: usize = 64;

/// Which client sent a numbered datagram, and its number; `None` if it is none.
#[must_use]
pub fn numbers_of(datagram: &[u8]) -> Option<(u32, u32)> {
    let pattern = datagram.first_chunk::<8>()?;
    let whole = datagram.len() == LENGTH && datagram.chunks(8).all(|chunk| chunk == pattern);
    let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte));
    whole.then(|| (number(&pattern[..4]), number(&pattern[4..])))
}
