//! One file per file under test; what they share is here.

use std::{
    cell::RefCell,
    future::poll_fn,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    task::Poll,
    time::Duration,
};

use base::clock::ManualClock;

use crate::{
    Path, Ready, ReceiveBatch, SendBatch, SendOutcome, Token, UdpOptions, UdpRole, UdpSocket,
    kernel::KernelNet, ports::Ports,
};

mod batch;
mod memory;
mod ports;
mod tcp;
mod udp;
mod unix;

const V4: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
const V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);

/// How long a test waits for the kernel before it fails.
const PATIENCE: Duration = Duration::from_secs(10);

fn kernel() -> (KernelNet, Ready, ManualClock) {
    kernel_with(Ports::default())
}

fn kernel_with(ports: Ports) -> (KernelNet, Ready, ManualClock) {
    let ready = Ready::default();
    let clock = ManualClock::new(Duration::ZERO);
    (KernelNet::new(ready.clone(), Rc::new(clock.clone()), ports), ready, clock)
}

fn options(ip: IpAddr, role: UdpRole) -> UdpOptions {
    UdpOptions {
        bind: SocketAddr::new(ip, 0),
        connect: None,
        role,
        buffer_bytes: 512 * 1024,
        interface: None,
        mark: 0,
        gso: true,
    }
}

fn connected(remote: SocketAddr) -> UdpOptions {
    let bind = crate::wildcard_for(remote);
    UdpOptions { bind, connect: Some(remote), ..options(remote.ip(), UdpRole::Upstream) }
}

fn path(destination: SocketAddr) -> Path {
    Path { destination, source: None, tos: 0 }
}

/// A datagram of `len` bytes that its number tells from others.
fn payload(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| (number * 31 + index * 7) as u8).collect()
}

fn put(batch: &mut SendBatch, path: &Path, payload: &[u8]) {
    batch.tail(payload.len()).unwrap().copy_from_slice(payload);
    batch.commit(path, 0, payload.len(), 1);
}

fn send(socket: &mut dyn UdpSocket, batch: &mut SendBatch) -> Vec<SendOutcome> {
    let mut outcomes = Vec::new();
    socket.send(batch, &mut |_, outcome| outcomes.push(outcome));
    outcomes
}

/// Waits until `token` is reported as ready.
async fn wait(ready: &Ready, token: Token) {
    let tokens = RefCell::new(Vec::new());
    let reported = poll_fn(|context| {
        ready.register(context.waker());
        ready.drain(&mut tokens.borrow_mut());
        if tokens.borrow().contains(&token) { Poll::Ready(()) } else { Poll::Pending }
    });
    tokio::time::timeout(PATIENCE, reported).await.expect("the token is reported in time");
}

/// A datagram as the receiving socket saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Got {
    bytes: Vec<u8>,
    source: SocketAddr,
    local: Option<IpAddr>,
    ecn: u8,
}

fn datagrams(batch: &ReceiveBatch) -> impl Iterator<Item = Got> {
    (0..batch.len()).flat_map(move |index| {
        let meta = *batch.meta(index);
        meta.segments().map(move |range| Got {
            bytes: batch.buffer(index)[range].to_vec(),
            source: meta.source,
            local: meta.local,
            ecn: meta.ecn,
        })
    })
}

/// Receives `count` datagrams, waiting for `token` between batches.
async fn receive(socket: &mut dyn UdpSocket, ready: &Ready, token: Token, count: usize) -> Vec<Got> {
    let mut batch = ReceiveBatch::new(8, ReceiveBatch::DEFAULT_SLOT_BYTES);
    let mut got = Vec::new();
    while got.len() < count {
        match socket.receive(&mut batch) {
            Ok(()) => got.extend(datagrams(&batch)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => wait(ready, token).await,
            Err(error) => panic!("receive failed: {error}"),
        }
    }
    got
}
