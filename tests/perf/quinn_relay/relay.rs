//! Flows, from clients to datagrams and back.
//!
//! A flow is a client's address. Its number, two bytes, stands before the payload in each QUIC datagram.

use std::{
    cell::RefCell,
    collections::HashMap,
    future::{Future, poll_fn},
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::Poll,
};

use anyhow::Context;
use bytes::{BufMut, Bytes, BytesMut};
use quinn::{Connection, ConnectionError};
use tokio::task::{spawn_local, yield_now};

use crate::{
    Books,
    quic::{self, Congestion, SERVER_NAME},
    udp::{Counters, Inbox, Run, Udp},
};

/// Bytes before each payload.
pub(crate) const FLOW_LEN: usize = 2;

/// Clients by flow and flows by client.
#[derive(Default)]
struct Flows {
    clients: Vec<SocketAddr>,
    numbers: HashMap<SocketAddr, u16>,
    /// The flow of the datagram before: runs of one flow are not looked up.
    last: Option<(SocketAddr, u16)>,
}

impl Flows {
    /// The flow of `client`, a new one if it has none; none once 65,536 are in use.
    fn of(&mut self, client: SocketAddr) -> Option<u16> {
        if let Some((address, flow)) = self.last
            && address == client
        {
            return Some(flow);
        }
        let flow = match self.numbers.get(&client) {
            Some(flow) => *flow,
            None => {
                let flow = self.clients.len().try_into().ok()?;
                self.clients.push(client);
                self.numbers.insert(client, flow);
                flow
            }
        };
        self.last = Some((client, flow));
        Some(flow)
    }
}

/// Ends with the connection.
pub(crate) async fn entry(
    listen: SocketAddr,
    peer: SocketAddr,
    congestion: Congestion,
    books: &Arc<Books>,
) -> anyhow::Result<()> {
    let ingress = Rc::new(Udp::bind(listen).with_context(|| format!("listening at {listen}"))?);
    let any = match peer {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let endpoint = quic::client(any, congestion, &[])?;
    let connection =
        endpoint.connect(peer, SERVER_NAME)?.await.with_context(|| format!("connecting to {peer}"))?;
    books.set_connection(connection.clone());
    let flows = Rc::new(RefCell::new(Flows::default()));
    spawn_local(to_clients(Rc::clone(&ingress), connection.clone(), Rc::clone(&flows), Arc::clone(books)));
    let mut inbox = Inbox::new();
    loop {
        ingress.readable().await?;
        ingress.receive(&mut inbox, &books.requests)?;
        carry(&inbox, &connection, &books.requests, |client| flows.borrow_mut().of(client));
        if let Some(why) = connection.close_reason() {
            return Err(why.into());
        }
        yield_now().await;
    }
}

/// Hands what was received to the connection, each datagram with the number of its flow.
fn carry(
    inbox: &Inbox,
    connection: &Connection,
    counters: &Counters,
    mut flow_of: impl FnMut(SocketAddr) -> Option<u16>,
) {
    // One allocation for all.
    let mut space = BytesMut::with_capacity(inbox.len() + inbox.datagrams().count() * FLOW_LEN);
    for (source, payload) in inbox.datagrams() {
        let Some(flow) = flow_of(source) else {
            counters.refused();
            continue;
        };
        space.put_u16(flow);
        space.put_slice(payload);
        if connection.send_datagram(space.split().freeze()).is_err() {
            counters.refused();
        }
    }
}

async fn to_clients(
    ingress: Rc<Udp>,
    connection: Connection,
    flows: Rc<RefCell<Flows>>,
    books: Arc<Books>,
) -> Result<(), ConnectionError> {
    let mut run = Run::new();
    loop {
        let datagram = next(&connection, || run.flush(&ingress, &books.answers)).await?;
        if let Some((flow, payload)) = parted(&datagram)
            && let Some(client) = flows.borrow().clients.get(usize::from(flow))
        {
            run.push(&ingress, *client, payload, &books.answers);
        }
    }
}

/// Serves one entry after the other, without end.
pub(crate) async fn exit(
    listen: SocketAddr,
    upstream: SocketAddr,
    congestion: Congestion,
    books: &Arc<Books>,
) -> anyhow::Result<()> {
    let endpoint = quic::server(listen, congestion).with_context(|| format!("listening at {listen}"))?;
    let inbox = Rc::new(RefCell::new(Inbox::new()));
    while let Some(incoming) = endpoint.accept().await {
        let connection = incoming.await?;
        books.set_connection(connection.clone());
        let ended = to_upstream(&connection, upstream, &inbox, books).await;
        anyhow::ensure!(matches!(ended, Ok(()) | Err(ConnectionError::ApplicationClosed(_))), "{ended:?}");
    }
    Ok(())
}

async fn to_upstream(
    connection: &Connection,
    upstream: SocketAddr,
    inbox: &Rc<RefCell<Inbox>>,
    books: &Arc<Books>,
) -> Result<(), ConnectionError> {
    let mut sockets: HashMap<u16, Rc<Udp>> = HashMap::new();
    let mut run = Run::new();
    // The flow whose datagrams are in the run.
    let mut current: Option<(u16, Rc<Udp>)> = None;
    loop {
        let flush = || {
            if let Some((_, udp)) = &current {
                run.flush(udp, &books.requests);
            }
        };
        let datagram = next(connection, flush).await?;
        let Some((flow, payload)) = parted(&datagram) else { continue };
        if current.as_ref().is_none_or(|(last, _)| *last != flow) {
            if let Some((_, udp)) = &current {
                run.flush(udp, &books.requests);
            }
            let udp = match sockets.get(&flow) {
                Some(udp) => Rc::clone(udp),
                None => {
                    let Ok(udp) = Udp::connect(upstream).await.map(Rc::new) else {
                        books.requests.refused();
                        continue;
                    };
                    sockets.insert(flow, Rc::clone(&udp));
                    let (connection, inbox, books) =
                        (connection.clone(), Rc::clone(inbox), Arc::clone(books));
                    spawn_local(from_upstream(Rc::clone(&udp), flow, connection, inbox, books));
                    udp
                }
            };
            current = Some((flow, udp));
        }
        if let Some((_, udp)) = &current {
            run.push(udp, upstream, payload, &books.requests);
        }
    }
}

async fn from_upstream(
    udp: Rc<Udp>,
    flow: u16,
    connection: Connection,
    inbox: Rc<RefCell<Inbox>>,
    books: Arc<Books>,
) -> io::Result<()> {
    while connection.close_reason().is_none() {
        udp.readable().await?;
        {
            let mut inbox = inbox.borrow_mut();
            udp.receive(&mut inbox, &books.answers)?;
            carry(&inbox, &connection, &books.answers, |_| Some(flow));
        }
        yield_now().await;
    }
    Ok(())
}

/// The next datagram; `idle` is called before it waits for one.
async fn next(connection: &Connection, idle: impl FnOnce()) -> Result<Bytes, ConnectionError> {
    let mut reading = pin!(connection.read_datagram());
    let now = poll_fn(|context| Poll::Ready(reading.as_mut().poll(context))).await;
    match now {
        Poll::Ready(datagram) => datagram,
        Poll::Pending => {
            idle();
            reading.await
        }
    }
}

fn parted(datagram: &Bytes) -> Option<(u16, &[u8])> {
    let (flow, payload) = datagram.split_first_chunk::<FLOW_LEN>()?;
    Some((u16::from_be_bytes(*flow), payload))
}

/// One hop: datagrams as they are, each client with a socket of its own to the upstream. Without end.
pub(crate) async fn plain(
    listen: SocketAddr,
    upstream: SocketAddr,
    books: &Arc<Books>,
) -> anyhow::Result<()> {
    let ingress = Rc::new(Udp::bind(listen).with_context(|| format!("listening at {listen}"))?);
    let mut sockets: HashMap<SocketAddr, Rc<Udp>> = HashMap::new();
    let (mut inbox, answers) = (Inbox::new(), Rc::new(RefCell::new(Inbox::new())));
    let mut run = Run::new();
    loop {
        ingress.readable().await?;
        ingress.receive(&mut inbox, &books.requests)?;
        let mut current: Option<(SocketAddr, Rc<Udp>)> = None;
        for (client, payload) in inbox.datagrams() {
            if current.as_ref().is_none_or(|(last, _)| *last != client) {
                if let Some((_, udp)) = &current {
                    run.flush(udp, &books.requests);
                }
                let udp = match sockets.get(&client) {
                    Some(udp) => Rc::clone(udp),
                    None => {
                        let udp = Rc::new(Udp::connect(upstream).await?);
                        sockets.insert(client, Rc::clone(&udp));
                        let (ingress, books) = (Rc::clone(&ingress), Arc::clone(books));
                        spawn_local(plain_answers(
                            Rc::clone(&udp),
                            ingress,
                            client,
                            Rc::clone(&answers),
                            books,
                        ));
                        udp
                    }
                };
                current = Some((client, udp));
            }
            if let Some((_, udp)) = &current {
                run.push(udp, upstream, payload, &books.requests);
            }
        }
        if let Some((_, udp)) = &current {
            run.flush(udp, &books.requests);
        }
        yield_now().await;
    }
}

async fn plain_answers(
    udp: Rc<Udp>,
    ingress: Rc<Udp>,
    client: SocketAddr,
    inbox: Rc<RefCell<Inbox>>,
    books: Arc<Books>,
) -> io::Result<()> {
    let mut run = Run::new();
    loop {
        udp.readable().await?;
        {
            let mut inbox = inbox.borrow_mut();
            udp.receive(&mut inbox, &books.answers)?;
            for (_, payload) in inbox.datagrams() {
                run.push(&ingress, client, payload, &books.answers);
            }
        }
        run.flush(&ingress, &books.answers);
        yield_now().await;
    }
}
