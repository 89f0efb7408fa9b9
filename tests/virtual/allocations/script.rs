//! Sockets that receive what the test wrote down, without the kernel and without allocating.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    net::SocketAddr,
    rc::{Rc, Weak},
};

use net::{
    Delivery, DeliveryMessage, KernelQueue, Net, Ready, ReceiveBatch, SendBatch, SendOutcome, TcpListener,
    TcpStream, Token, UdpOptions, UdpRole, UdpSocket, UdpStats,
    batch::{Message, Meta},
};

/// Buffers as the kernel would give them: with GRO one is many datagrams.
pub(crate) type Buffers = Rc<Vec<(Meta, Vec<u8>)>>;

/// What one worker sees of the outside world.
pub(crate) struct Script {
    ready: Ready,
    sockets: RefCell<Vec<Weak<Line>>>,
    resolved: RefCell<HashMap<Token, SocketAddr>>,
}

/// One socket.
struct Line {
    address: SocketAddr,
    role: UdpRole,
    token: Token,
    waiting: RefCell<Buffers>,
    next: Cell<usize>,
    sent: RefCell<Vec<Vec<u8>>>,
}

impl Script {
    pub(crate) fn new(ready: &Ready) -> Rc<Self> {
        Rc::new(Self { ready: ready.clone(), sockets: RefCell::default(), resolved: RefCell::default() })
    }

    /// Lets every socket of `role` receive `buffers`; how many sockets there are.
    pub(crate) fn receive(&self, role: UdpRole, buffers: &Buffers) -> usize {
        let mut count = 0;
        for line in self.sockets.borrow().iter().filter_map(Weak::upgrade).filter(|line| line.role == role) {
            *line.waiting.borrow_mut() = Rc::clone(buffers);
            line.next.set(0);
            self.ready.mark(line.token);
            count += 1;
        }
        count
    }

    /// What open sockets have sent since this was last asked.
    pub(crate) fn sent(&self) -> Vec<Vec<u8>> {
        let lines = self.sockets.borrow();
        lines.iter().filter_map(Weak::upgrade).flat_map(|line| line.sent.take()).collect()
    }
}

/// The way to a script that a worker owns.
pub(crate) struct ScriptNet(pub(crate) Rc<Script>);

impl Net for ScriptNet {
    fn udp(&mut self, options: &UdpOptions, token: Token) -> io::Result<Box<dyn UdpSocket>> {
        let line = Rc::new(Line {
            address: options.bind,
            role: options.role,
            token,
            waiting: RefCell::default(),
            next: Cell::new(0),
            sent: RefCell::default(),
        });
        self.0.sockets.borrow_mut().push(Rc::downgrade(&line));
        Ok(Box::new(ScriptSocket(line)))
    }

    fn tcp_listen(&mut self, _address: SocketAddr, _token: Token) -> io::Result<Box<dyn TcpListener>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn tcp_connect(&mut self, _address: SocketAddr, _token: Token) -> io::Result<Box<dyn TcpStream>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn resolve(&mut self, host: &str, port: u16, token: Token) {
        let address = SocketAddr::new(host.parse().unwrap(), port);
        self.0.resolved.borrow_mut().insert(token, address);
        self.0.ready.mark(token);
    }

    fn resolved(&mut self, token: Token) -> Option<io::Result<Vec<SocketAddr>>> {
        self.0.resolved.borrow_mut().remove(&token).map(|address| Ok(vec![address]))
    }
}

struct ScriptSocket(Rc<Line>);

impl UdpSocket for ScriptSocket {
    fn local_addr(&self) -> SocketAddr {
        self.0.address
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        batch.clear();
        let (waiting, mut next) = (self.0.waiting.borrow(), self.0.next.get());
        while let Some((meta, bytes)) = waiting.get(next)
            && batch.push(*meta, bytes)
        {
            next += 1;
        }
        self.0.next.set(next);
        if batch.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        for message in batch.messages() {
            self.0.sent.borrow_mut().extend(batch.segments(message).map(<[u8]>::to_vec));
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
        panic!("strangers have no flows");
    }

    fn stats(&self) -> UdpStats {
        UdpStats::default()
    }

    fn kernel_queue(&self) -> KernelQueue {
        KernelQueue::default()
    }
}
