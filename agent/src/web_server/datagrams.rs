//! The socket of a CONNECT-UDP, whatever the version of HTTP.

use std::{io, pin::pin, time::Duration};

use bytes::Bytes;
use engine::control::web::Datagrams;
use tokio::{
    net::UdpSocket,
    time::{Instant, sleep},
};
use users::{Grant, account::Dropped, rate::Direction};

/// How long a CONNECT-UDP lives without a datagram: no less than NATs keep a mapping (RFC 4787, REQ-5; RFC 9298 §3.1).
const IDLE: Duration = Duration::from_secs(120);

/// The largest payload of a UDP datagram.
const MOST_DATAGRAM: usize = 65_535;

/// Carries datagrams between `socket` and the queues of a session until none has come for a while; calls `tell` for each that waits for the
/// user.
pub(crate) async fn relay(socket: &UdpSocket, datagrams: &Datagrams, grant: &Grant, tell: impl Fn()) {
    let mut buffer = vec![0; MOST_DATAGRAM];
    let mut idle = pin!(sleep(IDLE));
    loop {
        tokio::select! {
            payload = std::future::poll_fn(|cx| datagrams.poll_from_user(cx)) => {
                let mut sent = Sent { datagrams, outcome: Err(Dropped::Ended) };
                sent.outcome = if grant.lets_pass(Direction::FromUser, payload.len()) {
                    send(socket, &payload).await
                } else {
                    Err(Dropped::OverRate)
                };
            }
            received = socket.recv(&mut buffer) => {
                // An error is about a datagram that was sent before, as ICMP tells of it.
                let Ok(length) = received else { continue };
                let is_within_rate = grant.lets_pass(Direction::ToUser, length);
                if datagrams.put_from_target(Bytes::copy_from_slice(&buffer[..length]), is_within_rate) {
                    tell();
                }
            }
            () = &mut idle => return,
        }
        idle.as_mut().reset(Instant::now() + IDLE);
    }
}

/// A payload on its way, which counts also where the session ends meanwhile.
struct Sent<'d> {
    datagrams: &'d Datagrams,
    outcome: Result<usize, Dropped>,
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        self.datagrams.was_sent(self.outcome);
    }
}

/// Sends a payload; an error that is about one before it does not keep it.
async fn send(socket: &UdpSocket, payload: &[u8]) -> Result<usize, Dropped> {
    for _ in 0..2 {
        match socket.send(payload).await {
            Ok(length) => return Ok(length),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            // EMSGSIZE
            Err(error) if error.raw_os_error() == Some(90) => return Err(Dropped::TooLarge),
            Err(_) => return Err(Dropped::SendError),
        }
    }
    Err(Dropped::SendError)
}
