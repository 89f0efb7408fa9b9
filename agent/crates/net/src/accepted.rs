//! The listening end of carriers: a queue for each client's stream, which all workers share, and a port for each worker.
//!
//! A stream's source is of a kind that no datagram of UDP has: the client's address as IPv6 has it, with the number of the stream for flow
//! information, which the kernel gives no address. So it is found from a destination alone which way a packet takes, a client's UDP
//! behind the same address and port is another source, and nothing goes over UDP to where only a stream was.

use std::{
    collections::HashMap,
    mem,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    num::NonZeroU32,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use base::panics::lock;

use crate::{
    carrier::{NAME_BYTES, Port, Probe, StreamQueue},
    steering,
};

/// The source of what comes over stream `number` of the client at this address of TCP.
fn source(client: SocketAddr, number: NonZeroU32) -> SocketAddr {
    let ip = match client.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    SocketAddrV6::new(ip, client.port(), number.get(), 0).into()
}

/// Whether this is the source of a client's stream, and no address of UDP.
#[inline]
#[must_use]
pub fn is_stream(address: &SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(address) if address.flowinfo() != 0)
}

/// The client's address, whatever way it has come.
#[must_use]
pub fn client_of(source: SocketAddr) -> SocketAddr {
    if is_stream(&source) { SocketAddr::new(source.ip().to_canonical(), source.port()) } else { source }
}

/// The streams of an exit's clients at one time.
#[derive(Clone, Debug, Default)]
pub(super) struct Streams {
    queues: HashMap<SocketAddr, Arc<StreamQueue>>,
    /// The questions of the queues' far ends, by their names.
    probes: HashMap<[u8; NAME_BYTES], Arc<Probe>>,
}

impl Streams {
    pub(super) fn queue(&self, to: &SocketAddr) -> Option<&Arc<StreamQueue>> {
        self.queues.get(to)
    }

    /// Whether there is anybody who may ask.
    pub(super) fn answers(&self) -> bool {
        !self.probes.is_empty()
    }

    /// The answer to a question, if it is one.
    pub(super) fn answer(&self, question: &[u8]) -> Option<&Arc<Probe>> {
        self.probes.get(&Probe::name(question)?).filter(|probe| *probe.question == *question)
    }
}

/// The streams of an exit's clients, which are replaced as a whole, so that a worker looks only whether they have changed.
#[derive(Debug, Default)]
pub(super) struct Table {
    streams: Mutex<Arc<Streams>>,
    changes: AtomicU64,
}

impl Table {
    fn change(&self, change: impl FnOnce(&mut Streams)) {
        let mut streams = lock(&self.streams);
        let mut changed = Streams::clone(&streams);
        change(&mut changed);
        *streams = Arc::new(changed);
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// The streams as a worker knows them.
#[derive(Debug)]
pub(super) struct Known {
    table: Arc<Table>,
    streams: Arc<Streams>,
    changes: u64,
}

impl Known {
    pub(super) fn new(table: &Arc<Table>) -> Self {
        Self { table: Arc::clone(table), streams: Arc::default(), changes: 0 }
    }

    /// The streams that there are now.
    pub(super) fn now(&mut self) -> &Streams {
        let changes = self.table.changes.load(Ordering::Acquire);
        if changes != mem::replace(&mut self.changes, changes) {
            self.streams = Arc::clone(&lock(&self.table.streams));
        }
        &self.streams
    }
}

/// The listening end: a port for each worker.
#[derive(Clone, Debug)]
pub struct Exit {
    ports: Arc<[Arc<Port>]>,
    table: Arc<Table>,
    newest: Arc<AtomicU32>,
    discarded: Arc<AtomicU64>,
}

impl Exit {
    /// The ports of `workers` workers. Packets that a stream leaves behind are counted in `discarded`.
    #[must_use]
    pub fn new(workers: u8, discarded: &Arc<AtomicU64>) -> Self {
        let table = Arc::default();
        let ports = (0..workers.max(1)).map(|_| Port::of(&table, discarded)).collect();
        Self { ports, table, newest: Arc::default(), discarded: Arc::clone(discarded) }
    }

    /// The port of a worker.
    #[must_use]
    pub fn port(&self, worker: u8) -> Option<&Arc<Port>> {
        self.ports.get(usize::from(worker))
    }

    /// Opens a stream of the client at this address of TCP.
    #[must_use]
    pub fn open(&self, client: SocketAddr, probe: Option<Probe>) -> Accepted {
        let (queue, probe) = (StreamQueue::new(true, &self.discarded), probe.map(Arc::new));
        // Four billion streams later a number is free again.
        let number = NonZeroU32::new(self.newest.fetch_add(1, Ordering::Relaxed).wrapping_add(1));
        let source = source(client, number.unwrap_or(NonZeroU32::MIN));
        self.table.change(|streams| {
            streams.queues.insert(source, Arc::clone(&queue));
            if let Some((name, probe)) =
                probe.as_ref().and_then(|probe| Some((Probe::name(&probe.question)?, probe)))
            {
                streams.probes.insert(name, Arc::clone(probe));
            }
        });
        Accepted { exit: self.clone(), source, queue, probe }
    }
}

/// A stream of a client, until it is dropped.
#[derive(Debug)]
pub struct Accepted {
    exit: Exit,
    source: SocketAddr,
    queue: Arc<StreamQueue>,
    probe: Option<Arc<Probe>>,
}

impl Accepted {
    /// The address that its packets seem to come from.
    #[must_use]
    pub fn source(&self) -> SocketAddr {
        self.source
    }

    /// What waits for it.
    #[must_use]
    pub fn queue(&self) -> &StreamQueue {
        &self.queue
    }

    /// Takes a packet to the worker whose it is, as the kernel does; false: there was no room.
    pub fn put(&self, packet: &[u8]) -> bool {
        let workers = u8::try_from(self.exit.ports.len()).unwrap_or(u8::MAX);
        let port = self.exit.port(steering::owner(packet, workers));
        port.is_some_and(|port| port.put(self.source, packet))
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        self.exit.table.change(|streams| {
            streams.queues.remove(&self.source);
            if let Some(name) = self.probe.as_ref().and_then(|probe| Probe::name(&probe.question)) {
                streams.probes.remove(&name);
            }
        });
        self.queue.close();
        self.queue.discard();
    }
}
