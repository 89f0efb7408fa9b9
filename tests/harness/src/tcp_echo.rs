//! A TCP server that echoes piece by piece, and tells how each of its connections ended.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

/// It echoes until its client ends, then ends itself; after a `!` it resets. Its threads end with the process.
#[derive(Debug)]
pub struct TcpEcho {
    /// Where it listens.
    pub address: SocketAddr,
    ends: Mutex<mpsc::Receiver<&'static str>>,
}

impl TcpEcho {
    /// Starts one on loopback.
    ///
    /// # Panics
    /// No port is free.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it starts a server")]
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = listener.local_addr().expect("it is bound");
        let (told, ends) = mpsc::sync_channel(1_000);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), told) = (stream, told.clone()) else { return };
                // Whoever asks for no ends gets none beyond these, and no thread waits for it.
                thread::spawn(move || told.try_send(echo(stream)).ok());
            }
        });
        Self { address, ends: Mutex::new(ends) }
    }

    /// How the next of its connections ended: `end`, `reset` by the client, or `reset it`.
    ///
    /// # Panics
    /// None ends within half a minute.
    #[must_use]
    #[track_caller]
    pub fn end(&self) -> &'static str {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.recv_timeout(Duration::from_secs(30)).expect("a connection ends")
    }
}

fn echo(mut stream: TcpStream) -> &'static str {
    let mut buffer = [0; 16 << 10];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return "end",
            Ok(_) if buffer[0] == b'!' => {
                socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).ok();
                return "reset it";
            }
            Ok(length) => {
                if stream.write_all(&buffer[..length]).is_err() {
                    return "reset";
                }
            }
            Err(_) => return "reset",
        }
    }
}
