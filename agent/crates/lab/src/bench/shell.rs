//! Runs a party on a thread of its own, over the kernel's sockets.

use std::{net::SocketAddr, rc::Rc, thread::JoinHandle};

use anyhow::Context as _;
use base::clock::{Clock, SystemClock};
use net::{
    Net, Ready, Token, UdpOptions, UdpRole, UdpSocket, alarm::Alarm, kernel::KernelNet, ports::Ports,
    wildcard_for,
};

use crate::bench::party::{Party, Turn};

/// Socket buffers in bytes: what a millisecond of 64 Gbit/s needs. A sink that cannot hold a burst measures itself.
pub(super) const BUFFER_BYTES: usize = 8 << 20;

/// Starts a thread that makes a party, runs it until it has ended, and takes what it found.
pub(crate) fn spawn<P: Party, T: Send + 'static>(
    name: String,
    make: impl FnOnce(&mut KernelNet, Rc<dyn Clock>) -> anyhow::Result<P> + Send + 'static,
    finish: impl FnOnce(P) -> T + Send + 'static,
) -> anyhow::Result<JoinHandle<anyhow::Result<T>>> {
    let thread = std::thread::Builder::new().name(name.clone());
    let work = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let (ready, clock) = (Ready::default(), Rc::new(SystemClock));
            let mut net = KernelNet::new(ready.clone(), Rc::<SystemClock>::clone(&clock), Ports::default());
            let mut party = make(&mut net, clock)?;
            let mut alarm = Alarm::new()?;
            let mut tokens = Vec::new();
            loop {
                tokens.clear();
                ready.drain(&mut tokens);
                match party.turn(&tokens) {
                    Turn::Ended => return Ok(finish(party)),
                    // Lets the runtime look at the sockets.
                    Turn::Now => tokio::task::yield_now().await,
                    Turn::At(at) => {
                        alarm.wait(&ready, at.saturating_duration_since(SystemClock.now())).await?;
                    }
                }
            }
        })
    };
    thread.spawn(work).with_context(|| format!("cannot start the thread {name}"))
}

/// Opens a socket that hears `to` alone, and of ICMP errors.
pub(crate) fn connected(
    net: &mut dyn Net,
    to: SocketAddr,
    buffer_bytes: usize,
    gso: bool,
    token: Token,
) -> anyhow::Result<Box<dyn UdpSocket>> {
    let (bind, role) = (wildcard_for(to), UdpRole::Upstream);
    let options = UdpOptions { bind, connect: Some(to), role, buffer_bytes, interface: None, mark: 0, gso };
    net.udp(&options, token).with_context(|| format!("cannot open a socket to {to}"))
}

/// Opens the socket of the sink at `listen`.
pub(super) fn sink_socket(
    net: &mut dyn Net,
    listen: SocketAddr,
    gso: bool,
) -> anyhow::Result<Box<dyn UdpSocket>> {
    let (role, buffer_bytes) = (UdpRole::Ingress, BUFFER_BYTES);
    let options =
        UdpOptions { bind: listen, connect: None, role, buffer_bytes, interface: None, mark: 0, gso };
    net.udp(&options, Token(0)).with_context(|| {
        format!("the sink cannot listen on {listen}: is another process there? `ss -ulnp` names it")
    })
}
