//! A wire between hosts, and a TUN device, that allocate nothing once their buffers have grown.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    rc::{Rc, Weak},
};

use ip::{
    packets::{PacketDelivery, PacketMessage, TunOffload},
    vnet::{Gso, VnetHeader},
};
use net::{
    Delivery, DeliveryMessage, KernelQueue, Net, Ready, ReceiveBatch, SendBatch, SendOutcome, TcpListener,
    TcpStream, Token, TunQueue, TunStats, UdpOptions, UdpSocket, UdpStats,
    batch::{Message, Meta},
};

/// Datagrams that wait in one socket at most, each message of a sender as one buffer.
const MOST_WAITING: usize = 256;
const BUFFER_BYTES: usize = 65_535;

/// All sockets of all hosts.
#[derive(Default)]
pub(crate) struct Wire {
    sockets: RefCell<Vec<Weak<Line>>>,
    next_port: Cell<u16>,
}

/// One socket.
struct Line {
    address: SocketAddr,
    token: Token,
    ready: Ready,
    waiting: RefCell<VecDeque<(Meta, Vec<u8>)>>,
    /// Buffers that were received, to be used again.
    spare: RefCell<Vec<Vec<u8>>>,
}

/// The network of one host.
pub(crate) struct WireNet {
    wire: Rc<Wire>,
    host: IpAddr,
    ready: Ready,
    resolved: HashMap<Token, SocketAddr>,
    tun: Rc<Device>,
}

impl WireNet {
    pub(crate) fn new(wire: &Rc<Wire>, host: IpAddr, ready: &Ready, tun: &Rc<Device>) -> Self {
        let (wire, tun) = (Rc::clone(wire), Rc::clone(tun));
        Self { wire, host, ready: ready.clone(), resolved: HashMap::new(), tun }
    }
}

impl Net for WireNet {
    fn udp(&mut self, options: &UdpOptions, token: Token) -> io::Result<Box<dyn UdpSocket>> {
        let port = match options.bind.port() {
            0 => {
                self.wire.next_port.set(self.wire.next_port.get() + 1);
                50_000 + self.wire.next_port.get()
            }
            port => port,
        };
        let line = Rc::new(Line {
            address: SocketAddr::new(self.host, port),
            token,
            ready: self.ready.clone(),
            waiting: RefCell::new(VecDeque::with_capacity(MOST_WAITING)),
            spare: RefCell::new(Vec::with_capacity(MOST_WAITING)),
        });
        self.wire.sockets.borrow_mut().push(Rc::downgrade(&line));
        Ok(Box::new(WireSocket { wire: Rc::clone(&self.wire), line }))
    }

    fn tcp_listen(&mut self, _address: SocketAddr, _token: Token) -> io::Result<Box<dyn TcpListener>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn tcp_connect(&mut self, _address: SocketAddr, _token: Token) -> io::Result<Box<dyn TcpStream>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn resolve(&mut self, host: &str, port: u16, token: Token) {
        self.resolved.insert(token, SocketAddr::new(host.parse().unwrap(), port));
        self.ready.mark(token);
    }

    fn resolved(&mut self, token: Token) -> Option<io::Result<Vec<SocketAddr>>> {
        self.resolved.remove(&token).map(|address| Ok(vec![address]))
    }

    fn tun(&mut self, token: Token) -> io::Result<Option<Box<dyn TunQueue>>> {
        *self.tun.reader.borrow_mut() = Some((self.ready.clone(), token));
        Ok(Some(Box::new(DeviceQueue(Rc::clone(&self.tun)))))
    }
}

struct WireSocket {
    wire: Rc<Wire>,
    line: Rc<Line>,
}

impl UdpSocket for WireSocket {
    fn local_addr(&self) -> SocketAddr {
        self.line.address
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        batch.clear();
        let (mut waiting, mut spare) = (self.line.waiting.borrow_mut(), self.line.spare.borrow_mut());
        while let Some((meta, bytes)) = waiting.front()
            && batch.push(*meta, bytes)
        {
            spare.extend(waiting.pop_front().map(|(_, bytes)| bytes));
        }
        if batch.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        for message in batch.messages() {
            let sockets = self.wire.sockets.borrow();
            let to = sockets
                .iter()
                .filter_map(Weak::upgrade)
                .find(|line| line.address == message.path.destination);
            if let Some(line) = to {
                let spare = line.spare.borrow_mut().pop();
                let mut bytes = spare.unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES));
                bytes.clear();
                let mut segment = 1;
                for (place, datagram) in batch.segments(message).enumerate() {
                    segment = if place == 0 { datagram.len() } else { segment };
                    bytes.extend_from_slice(datagram);
                }
                let (len, source, ecn) = (bytes.len(), self.line.address, message.path.tos & 3);
                let meta = Meta { len, segment, source, local: Some(line.address.ip()), ecn, ..Meta::EMPTY };
                line.waiting.borrow_mut().push_back((meta, bytes));
                line.ready.mark(line.token);
            }
            outcome(message, SendOutcome::Sent);
        }
        batch.clear();
    }

    fn deliver(
        &mut self,
        _received: &ReceiveBatch,
        _delivery: &mut Delivery,
        _outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
        panic!("there are no services");
    }

    fn stats(&self) -> UdpStats {
        UdpStats::default()
    }

    fn kernel_queue(&self) -> KernelQueue {
        KernelQueue::default()
    }
}

/// What a kernel gives its agent again and again, and how much it was given.
pub(crate) struct Device {
    packets: Vec<(VnetHeader, Vec<u8>)>,
    reader: RefCell<Option<(Ready, Token)>>,
    /// How many of `packets` wait to be read.
    waiting: Cell<usize>,
    /// What was written: calls, super-packets, bytes.
    pub(crate) written: Cell<(u64, u64, u64)>,
}

impl Device {
    pub(crate) fn new(packets: Vec<(VnetHeader, Vec<u8>)>) -> Rc<Self> {
        let (reader, waiting, written) = (RefCell::default(), Cell::default(), Cell::default());
        Rc::new(Self { packets, reader, waiting, written })
    }

    /// Lets the agent read all packets once.
    pub(crate) fn give(&self) {
        self.waiting.set(self.packets.len());
        if let Some((ready, token)) = &*self.reader.borrow() {
            ready.mark(*token);
        }
    }
}

struct DeviceQueue(Rc<Device>);

impl DeviceQueue {
    fn count(&self, bytes: usize, many: bool) -> SendOutcome {
        let (calls, super_packets, sum) = self.0.written.get();
        self.0.written.set((calls + 1, super_packets + u64::from(many), sum + bytes as u64));
        SendOutcome::Sent
    }
}

impl TunQueue for DeviceQueue {
    fn receive(
        &mut self,
        batch: &mut ReceiveBatch,
        headers: &mut Vec<VnetHeader>,
        most_bytes: usize,
    ) -> io::Result<()> {
        batch.clear();
        headers.clear();
        let mut bytes = 0;
        while bytes < most_bytes
            && let Some(left) = self.0.waiting.get().checked_sub(1)
        {
            let (vnet, packet) = &self.0.packets[self.0.packets.len() - 1 - left];
            if !batch.push(Meta { len: packet.len(), segment: packet.len(), ..Meta::EMPTY }, packet) {
                break;
            }
            headers.push(*vnet);
            bytes += packet.len();
            self.0.waiting.set(left);
        }
        if batch.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut PacketDelivery,
        outcome: &mut dyn FnMut(&PacketMessage, SendOutcome),
    ) {
        for message in delivery.messages() {
            let pieces: usize = delivery.pieces(message, received).map(<[u8]>::len).sum();
            assert_eq!(delivery.header(message).len() + pieces, message.bytes);
            outcome(message, self.count(message.bytes, message.vnet.gso != Gso::None));
        }
        delivery.clear();
    }

    fn send(&mut self, packet: &[u8]) -> SendOutcome {
        self.count(packet.len(), false)
    }

    fn offload(&self) -> TunOffload {
        TunOffload { tcp: true, udp: true, ..TunOffload::default() }
    }

    fn stats(&self) -> TunStats {
        TunStats::default()
    }
}
