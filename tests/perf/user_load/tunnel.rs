//! A user's tunnels: datagrams of local clients by CONNECT-UDP, packets of a device by CONNECT-IP.

use std::{
    cell::RefCell,
    collections::HashMap,
    future::{Future, poll_fn},
    io::{self, BufRead, IoSlice, IoSliceMut},
    net::SocketAddr,
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::Poll,
    thread,
};

use anyhow::{Context, bail, ensure};
use bytes::{BufMut, Bytes, BytesMut};
use h3::{
    addresses, capsule,
    capsule::{Capsule, CapsuleReader},
    datagram,
    frame::DATA,
};
use ip::{
    cut::Cut,
    merge::Merger,
    packets::{Packet, PacketDelivery, TunOffload},
    view::IpView,
    vnet::{VNET_HEADER_BYTES, VnetHeader},
};
use quinn::{Connection, SendStream};
use serde_json::{Value, json};
use tokio::task::{spawn_local, yield_now};
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::{
    User,
    http::{self, Answer, Http},
    print,
    udp::{Counters, Inbox, Run, Udp},
};

/// Of one read of a device, or what is written to it at a time.
const LARGEST_BYTES: usize = 65_535;

/// The longest capsule that is read.
const CAPSULE_BYTES: u64 = 16 << 10;

/// What was carried: from here to the agent, and back.
#[derive(Default)]
pub(crate) struct Books {
    there: Counters,
    back: Counters,
}

/// A tunnel that the agent has opened. Its stream ends when this is dropped.
struct Opened {
    sender: SendStream,
    answer: Answer,
}

async fn open(http: &Http, user: &User, protocol: &'static str, path: String) -> anyhow::Result<Opened> {
    let mut request = http::opening(&user.server, protocol, path)?;
    let (field, value) = http::authorization(user);
    request.fields.push(field, value)?;
    let (sender, mut answer) = http.ask(&request, false).await?;
    let status = answer.head().await?.status()?;
    ensure!(status == 200, "{protocol} is answered with {status}");
    Ok(Opened { sender, answer })
}

/// Ends with the connection.
pub(crate) async fn udp(
    user: &User,
    listen: SocketAddr,
    target: &str,
    sessions: usize,
) -> anyhow::Result<Value> {
    let ingress = Rc::new(Udp::bind(listen).with_context(|| format!("listening at {listen}"))?);
    let endpoint = http::endpoint(user.server.to)?;
    let http = Http::connect(&endpoint, &user.server).await?;
    let mut opened = Vec::new();
    for _ in 0..sessions {
        opened.push(open(&http, user, "connect-udp", http::udp_path(target)).await?);
    }
    let books = Arc::new(Books::default());
    answer_questions(&books, &http.connection);
    let heads: Vec<_> = opened.iter().map(|one| http::datagram_head(&one.sender)).collect();
    let sessions: HashMap<u64, usize> =
        opened.iter().map(|one| one.sender.id().index() * 4).zip(0..).collect();
    let parted = move |frame: &Bytes| {
        let (stream, datagram) = datagram::split(frame).ok()?;
        let (0, payload) = datagram::context(datagram)? else { return None };
        Some((*sessions.get(&stream.index())?, frame.slice_ref(payload)))
    };
    carry(ingress, http.connection.clone(), &heads, parted, books).await
}

/// Carries datagrams of local clients, each of which has one of the heads, which stands before its payloads. `parted` says of a frame
/// that came whose it is, by the place of its head, and what its payload is. Ends with the connection.
pub(crate) async fn carry(
    ingress: Rc<Udp>,
    connection: Connection,
    heads: &[Vec<u8>],
    parted: impl Fn(&Bytes) -> Option<(usize, Bytes)> + 'static,
    books: Arc<Books>,
) -> anyhow::Result<Value> {
    let clients = Rc::new(RefCell::new(vec![None; heads.len()]));
    let mut newest = 0;
    spawn_local(to_clients(
        Rc::clone(&ingress),
        connection.clone(),
        parted,
        Rc::clone(&clients),
        Arc::clone(&books),
    ));
    let mut inbox = Inbox::new();
    loop {
        ingress.readable().await?;
        ingress.receive(&mut inbox, &books.there)?;
        let mut space = BytesMut::with_capacity(inbox.len() + inbox.datagrams().count() * 4);
        for (source, payload) in inbox.datagrams() {
            let mut clients = clients.borrow_mut();
            let place = clients.iter().position(|known| *known == Some(source)).unwrap_or_else(|| {
                // The oldest client makes room: it is one of an earlier run.
                newest = (newest + 1) % heads.len();
                clients[newest] = Some(source);
                newest
            });
            space.put_slice(&heads[place]);
            space.put_slice(payload);
            if connection.send_datagram(space.split().freeze()).is_err() {
                books.there.refused();
            }
        }
        if let Some(why) = connection.close_reason() {
            return Err(why.into());
        }
        yield_now().await;
    }
}

async fn to_clients(
    ingress: Rc<Udp>,
    connection: Connection,
    parted: impl Fn(&Bytes) -> Option<(usize, Bytes)>,
    clients: Rc<RefCell<Vec<Option<SocketAddr>>>>,
    books: Arc<Books>,
) -> anyhow::Result<()> {
    let mut run = Run::new();
    loop {
        let frame = next(&connection, || run.flush(&ingress, &books.back)).await?;
        let Some((place, payload)) = parted(&frame) else { continue };
        let client = clients.borrow().get(place).copied().flatten();
        if let Some(client) = client {
            run.push(&ingress, client, &payload, &books.back);
        }
    }
}

/// The next datagram; `idle` is called before it waits for one.
async fn next(connection: &Connection, idle: impl FnOnce()) -> anyhow::Result<Bytes> {
    let mut reading = pin!(connection.read_datagram());
    let now = poll_fn(|context| Poll::Ready(reading.as_mut().poll(context))).await;
    match now {
        Poll::Ready(datagram) => Ok(datagram?),
        Poll::Pending => {
            idle();
            Ok(reading.await?)
        }
    }
}

/// Ends with the connection. The device has no address and is down; the first line says which address it should have.
pub(crate) async fn ip(user: &User, device: &str, path: String) -> anyhow::Result<Value> {
    let endpoint = http::endpoint(user.server.to)?;
    let http = Http::connect(&endpoint, &user.server).await?;
    let mut opened = open(&http, user, "connect-ip", path).await?;
    let address = assigned(&mut opened.answer).await?;
    let made = DeviceBuilder::new().name(device).offload(true).inherit_enable_state().build_sync()?;
    let (device, books) = (Arc::new(made), Arc::new(Books::default()));
    answer_questions(&books, &http.connection);
    print(&json!({ "address": address.to_string() }));
    let head = http::datagram_head(&opened.sender);
    thread::spawn({
        let (device, connection, books) = (Arc::clone(&device), http.connection.clone(), Arc::clone(&books));
        move || outward(&device, &connection, &head, &books)
    });
    // The agent tells routes and addresses on this stream, which has to be read.
    let Opened { sender, mut answer } = opened;
    spawn_local(async move {
        let _sender = sender;
        while let Ok(Some(_)) = answer.frame().await {}
    });
    inward(&device, &http.connection).await
}

/// The first address that the agent assigns.
async fn assigned(answer: &mut Answer) -> anyhow::Result<std::net::IpAddr> {
    let mut capsules = CapsuleReader::new(CAPSULE_BYTES);
    while let Some((kind, payload)) = answer.frame().await? {
        let mut payload = Bytes::from(payload);
        if kind != DATA {
            continue;
        }
        while let Some(capsule) = capsules.take(&mut payload) {
            if let Capsule::Whole { kind: capsule::ADDRESS_ASSIGN, value } = capsule {
                let addresses = addresses::assigned(&value, 16)?;
                return Ok(addresses.first().context("no address")?.address);
            }
        }
    }
    bail!("it ended before it assigned an address")
}

/// From the device to the agent: super-packets are cut, since a datagram holds one packet, and their checksums completed.
fn outward(device: &SyncDevice, connection: &Connection, head: &[u8], books: &Books) -> io::Result<()> {
    let (mut vnet, mut buffer) = ([0; VNET_HEADER_BYTES], vec![0; LARGEST_BYTES]);
    let mut packet_bytes = Vec::new();
    loop {
        let read = device.recv_vectored(&mut [IoSliceMut::new(&mut vnet), IoSliceMut::new(&mut buffer)])?;
        let packet = &mut buffer[..read.saturating_sub(VNET_HEADER_BYTES)];
        let (Some(vnet), Ok(view)) = (VnetHeader::decode(&vnet), IpView::super_packet(packet)) else {
            continue;
        };
        let Ok(cut) = Cut::new(&vnet, packet, &view, false) else { continue };
        for index in 0..cut.count() {
            packet_bytes.clear();
            packet_bytes.extend_from_slice(head);
            cut.append(index, &mut packet_bytes);
            if connection.send_datagram(Bytes::copy_from_slice(&packet_bytes)).is_err() {
                books.there.refused();
            }
        }
    }
}

/// From the agent to the device, joined where the device takes it.
async fn inward(device: &SyncDevice, connection: &Connection) -> anyhow::Result<Value> {
    let offload = TunOffload { tcp: true, udp: device.udp_gso(), ..TunOffload::default() };
    let (mut merger, mut list) = (Merger::default(), PacketDelivery::default());
    let mut ended = None;
    while ended.is_none() {
        let mut frames = vec![connection.read_datagram().await?];
        let mut bytes = frames[0].len();
        // What has come meanwhile.
        while bytes < LARGEST_BYTES / 2 && ended.is_none() {
            let mut reading = pin!(connection.read_datagram());
            match poll_fn(|context| Poll::Ready(reading.as_mut().poll(context))).await {
                Poll::Ready(Ok(frame)) => {
                    bytes += frame.len();
                    frames.push(frame);
                }
                Poll::Ready(Err(error)) => ended = Some(error),
                Poll::Pending => break,
            }
        }
        let mut buffers = vec![Vec::with_capacity(LARGEST_BYTES)];
        merger.clear();
        let mut ranges = Vec::new();
        for frame in &frames {
            let (_, datagram) = datagram::split(frame)?;
            if let Some((0, packet)) = datagram::context(datagram) {
                let start = buffers[0].len();
                buffers[0].extend_from_slice(packet);
                ranges.push(start..buffers[0].len());
            }
        }
        for range in ranges {
            let packet = Packet { slot: 0, range, partial: false, owner: 0 };
            if merger.try_join(&mut list, &buffers, &packet) {
                continue;
            }
            if let Ok(view) = IpView::parse(&buffers[0][packet.range.clone()]) {
                merger.push(&mut list, &mut buffers, packet, &view, offload);
            }
        }
        for message in list.messages() {
            let header = message.vnet.encode();
            let mut pieces =
                vec![IoSlice::new(&header[..VNET_HEADER_BYTES]), IoSlice::new(list.header(message))];
            pieces.extend(list.pieces(message, &buffers).map(IoSlice::new));
            // A packet that the device does not take, since it is down, is lost.
            drop(device.send_vectored(&pieces));
        }
        list.clear();
        yield_now().await;
    }
    Err(ended.context("it has ended")?.into())
}

/// Says that the tunnel is open, and answers each line of the standard input.
pub(crate) fn answer_questions(books: &Arc<Books>, connection: &Connection) {
    let (books, connection) = (Arc::clone(books), connection.clone());
    print(&json!({ "ready": true }));
    thread::spawn(move || {
        for _ in io::stdin().lock().lines().map_while(Result::ok) {
            let stats = connection.stats();
            print(&json!({
                "there": books.there.json(),
                "back": books.back.json(),
                "sent_packets": stats.path.sent_packets,
                "lost_packets": stats.path.lost_packets,
                "largest_datagram": connection.max_datagram_size(),
            }));
        }
    });
}
