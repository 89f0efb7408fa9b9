//! A batch of equal datagrams over loopback: the kernel cuts large messages into datagrams (GSO) and hands several over in one
//! buffer (GRO), where it can do so.
//!
//! `cargo run --example gso -p culvert-net`

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    rc::Rc,
    time::Duration,
};

use base::clock::SystemClock;
use culvert_net::{
    Gso, Net, Path, Ready, ReceiveBatch, SendBatch, SendOutcome, Token, UdpOptions, UdpRole, UdpSocket,
    kernel::KernelNet, ports::Ports,
};

const DATAGRAMS: usize = 100;
const BYTES: usize = 1_200;

fn main() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let patience = Duration::from_secs(10);
    runtime.block_on(async { tokio::time::timeout(patience, carry()).await? })
}

#[expect(clippy::print_stdout, reason = "an example shows what happens")]
async fn carry() -> io::Result<()> {
    // A source that may make progress puts its token into this queue, and wakes whoever waits for it.
    let ready = Ready::default();
    let mut net = KernelNet::new(ready.clone(), Rc::new(SystemClock), Ports::default());
    let mut sender = net.udp(&options(UdpRole::QuicDial), Token(1))?;
    let mut receiver = net.udp(&options(UdpRole::QuicListen), Token(2))?;
    let destination = receiver.local_addr();

    // Datagrams are written one behind the other. Those of one path and one size become one message.
    let mut batch = SendBatch::with_segments(DATAGRAMS * BYTES, net.most_segments());
    let path = Path { destination, source: None, tos: 0 };
    for number in 0..DATAGRAMS {
        batch.tail(BYTES).expect("the batch was made for them").fill(number as u8);
        batch.commit(&path, 0, BYTES, 1);
    }
    let messages = batch.messages().len();
    sender.send(&mut batch, &mut |_message, outcome| assert_eq!(outcome, SendOutcome::Sent));
    let (sent, offload) = (sender.stats(), sender.offload(destination));
    println!(
        "sent: {} datagrams of {BYTES} bytes in {messages} messages, {} of them with GSO; system calls: {}",
        sent.sent_datagrams, sent.gso_messages, sent.send_calls,
    );

    let arrived = receive(&mut *receiver, &ready).await?;
    assert_eq!(arrived, (0..DATAGRAMS).map(|number| vec![number as u8; BYTES]).collect::<Vec<_>>());
    let received = receiver.stats();
    println!(
        "received: {} datagrams in {} buffers; system calls: {}",
        received.received_datagrams, received.received_buffers, received.receive_calls,
    );
    let yes = |has: bool| if has { "yes" } else { "no" };
    println!("GSO: {}; GRO: {}", yes(offload.gso == Gso::On), yes(receiver.offload(destination).gro));
    Ok(())
}

/// All datagrams of the example, in the order in which they arrive.
async fn receive(socket: &mut dyn UdpSocket, ready: &Ready) -> io::Result<Vec<Vec<u8>>> {
    let (mut batch, mut tokens) = (ReceiveBatch::default(), Vec::new());
    let mut arrived = Vec::new();
    while arrived.len() < DATAGRAMS {
        match socket.receive(&mut batch) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // A socket is reported only after it has said so: until then there may be more in it.
                ready.marked().await;
                ready.drain(&mut tokens);
                continue;
            }
            Err(error) => return Err(error),
        }
        for index in 0..batch.len() {
            // One buffer holds several datagrams where the kernel joined them.
            let buffer = batch.buffer(index);
            arrived.extend(batch.meta(index).segments().map(|range| buffer[range].to_vec()));
        }
    }
    Ok(arrived)
}

fn options(role: UdpRole) -> UdpOptions {
    UdpOptions {
        bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        connect: None,
        role,
        buffer_bytes: 1024 * 1024,
        interface: None,
        mark: 0,
        gso: true,
    }
}
