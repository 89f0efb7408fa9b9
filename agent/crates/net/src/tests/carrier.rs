//! What workers and streams see of carriers, with the kernel's network around them.

use std::{
    cell::{Cell, RefCell},
    net::UdpSocket as StdSocket,
    time::Duration,
};

use base::clock::{ManualClock, SystemClock};

use super::*;
use crate::{Net, Path, UdpOptions, UdpRole, kernel::KernelNet, ports::Ports};

const URL: &str = "https://gw.example.net/";

/// A network that knows one stream, number 7, and keeps what is to be dialled.
struct One {
    wanted: RefCell<Vec<Wanted>>,
    exit: Exit,
    discarded: Arc<AtomicU64>,
    /// Where UDP leads beside the stream.
    beside: Cell<Option<SocketAddr>>,
    /// Where it leads since then, and how often that was asked.
    moved: Cell<(Option<SocketAddr>, u32)>,
    experience: Arc<Experience>,
    resolved: RefCell<Vec<(String, u16, Vec<SocketAddr>)>>,
}

impl Carriers for One {
    fn label(&self, endpoint: &str) -> Option<SocketAddr> {
        (endpoint == URL).then(|| label(7))
    }

    fn dial(&self, wanted: Wanted) {
        self.wanted.borrow_mut().push(wanted);
    }

    fn discarded(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.discarded)
    }

    fn failure(&self, _: &str) -> Option<(Instant, Arc<str>)> {
        None
    }

    fn listens(&self) -> Option<Arc<Port>> {
        self.exit.port(0).map(Arc::clone)
    }

    fn resolved(&self, host: &str, port: u16, addresses: &[SocketAddr]) {
        self.resolved.borrow_mut().push((host.to_owned(), port, addresses.to_vec()));
    }

    fn beside(&self, address: SocketAddr) -> Option<Beside> {
        let over_udp = self.beside.get()?;
        let other = if address == over_udp { label(7) } else { over_udp };
        Some(Beside { other, experience: Arc::clone(&self.experience) })
    }

    fn moved(&self, of: SocketAddr, from: SocketAddr) -> Option<SocketAddr> {
        assert_eq!(of, label(7));
        let (to, asked) = self.moved.get();
        self.moved.set((to, asked + 1));
        to.filter(|to| *to != from)
    }
}

struct Worker {
    net: KernelNet,
    ready: Ready,
    one: Rc<One>,
    clock: ManualClock,
}

impl Worker {
    fn new(workers: u8) -> Self {
        let (ready, discarded) = (Ready::default(), Arc::default());
        let one = Rc::new(One {
            wanted: RefCell::default(),
            exit: Exit::new(workers, &discarded),
            discarded,
            beside: Cell::default(),
            moved: Cell::default(),
            experience: Arc::default(),
            resolved: RefCell::default(),
        });
        let carriers: Rc<dyn Carriers> = Rc::<One>::clone(&one);
        let clock = ManualClock::default();
        let net = KernelNet::new(ready.clone(), Rc::new(clock.clone()), Ports::default());
        Self { net: net.with_carriers(carriers), ready, one, clock }
    }

    fn socket(&mut self, role: UdpRole, connect: Option<SocketAddr>, token: u32) -> Box<dyn UdpSocket> {
        let bind = "127.0.0.1:0".parse().unwrap();
        let options =
            UdpOptions { bind, connect, role, buffer_bytes: 65_536, interface: None, mark: 0, gso: true };
        self.net.udp(&options, Token(token)).unwrap()
    }

    fn marked(&self) -> Vec<u32> {
        let mut tokens = Vec::new();
        self.ready.drain(&mut tokens);
        tokens.into_iter().map(|token| token.0).collect()
    }
}

/// Sends `packets` of equal length as one message.
fn send(socket: &mut dyn UdpSocket, to: SocketAddr, packets: &[&[u8]]) -> SendOutcome {
    let mut batch = SendBatch::new(1 << 20);
    let path = Path { destination: to, source: None, tos: 0 };
    for packet in packets {
        batch.tail(packet.len()).unwrap()[..packet.len()].copy_from_slice(packet);
        batch.commit(&path, 0, packet.len(), 1);
    }
    batch.end_message();
    let mut outcomes = Vec::new();
    socket.send(&mut batch, &mut |_, outcome| outcomes.push(outcome));
    assert!(batch.is_empty());
    *outcomes.last().unwrap()
}

/// What a socket has received, until nothing waits.
fn received(socket: &mut dyn UdpSocket) -> Vec<(SocketAddr, Vec<u8>)> {
    let (mut batch, mut all) = (ReceiveBatch::new(4, 2_048), Vec::new());
    while socket.receive(&mut batch).is_ok() {
        all.extend((0..batch.len()).map(|at| (batch.meta(at).source, batch.buffer(at).to_vec())));
    }
    all
}

#[test]
fn a_label_is_known_again_and_other_addresses_are_none() {
    for number in [0, 1, 0xffff, 0x1_0000, u32::MAX] {
        assert_eq!(number_of(label(number)), Some(number));
    }
    for other in
        ["192.0.2.1:443", "[100:0:0:1::1]:443", "[100::1:0:0:1]:443", "[2001:db8::1]:443", "[::]:443"]
    {
        assert_eq!(number_of(other.parse().unwrap()), None, "{other}");
    }
}

#[tokio::test]
async fn a_dialled_carrier_begins_with_its_first_packet_and_ends_with_its_socket() {
    let mut worker = Worker::new(1);
    worker.net.resolve(URL, 443, Token(1));
    assert_eq!(worker.net.resolved(Token(1)).unwrap().unwrap(), [label(7)]);
    assert_eq!(*worker.one.resolved.borrow(), [(URL.to_owned(), 443, vec![label(7)])]);
    assert_eq!(worker.net.ways()(label(7)), Some(PACKET_BYTES));
    let mut socket = worker.socket(UdpRole::QuicDial, Some(label(7)), 2);
    assert!(received(&mut *socket).is_empty());
    assert!(worker.one.wanted.borrow().is_empty(), "nothing was sent");
    assert_eq!(send(&mut *socket, label(7), &[b"one", b"two"]), SendOutcome::Sent);
    assert_eq!(send(&mut *socket, label(7), &[b"three"]), SendOutcome::Sent);
    let wanted = worker.one.wanted.borrow_mut().pop().unwrap();
    assert!(worker.one.wanted.borrow().is_empty(), "it is dialled once");
    assert_eq!(wanted.label, label(7));
    assert!(wanted.queue.ready().await);
    let sent: Vec<_> = std::iter::from_fn(|| wanted.queue.take()).collect();
    assert_eq!(sent, [&b"one"[..], b"two", b"three"]);

    worker.marked();
    assert!(wanted.port.put(wanted.label, b"answer"));
    assert_eq!(worker.marked(), [2], "the worker is told");
    assert!(wanted.port.put(wanted.label, b"more"));
    assert!(worker.marked().is_empty(), "once, until it has found nothing");
    assert_eq!(received(&mut *socket), [(label(7), b"answer".to_vec()), (label(7), b"more".to_vec())]);
    assert_eq!(socket.stats().received_datagrams, 2);

    assert_eq!(send(&mut *socket, label(7), &[b"close"]), SendOutcome::Sent);
    drop(socket);
    assert!(wanted.queue.ready().await, "the last packet is still to be sent");
    assert_eq!(wanted.queue.take().unwrap(), b"close");
    assert!(!wanted.queue.ready().await);
}

#[tokio::test]
async fn packets_of_clients_come_to_the_worker_whose_they_are_and_answers_go_back() {
    let mut worker = Worker::new(2);
    let mut socket = worker.socket(UdpRole::QuicListen, None, 3);
    assert!(received(&mut *socket).is_empty());
    let client: SocketAddr = "192.0.2.7:50000".parse().unwrap();
    let (first, second) = (worker.one.exit.open(client, None), worker.one.exit.open(client, None));
    assert!([first.source(), second.source()].iter().all(is_stream) && !is_stream(&client));
    assert_ne!(first.source(), second.source(), "a server in front may speak for both");
    assert_eq!([first.source(), second.source()].map(client_of), [client, client]);
    assert_eq!(worker.net.ways()(first.source()), Some(PACKET_BYTES));
    worker.marked();
    // Short headers: the byte behind the first one names the worker.
    assert!(first.put(&[0x40, 4]) && first.put(&[0x40, 5]) && second.put(&[0x40, 6]));
    assert_eq!(worker.marked(), [3]);
    let here = received(&mut *socket);
    assert_eq!(here, [(first.source(), vec![0x40, 4]), (second.source(), vec![0x40, 6])]);
    let other = worker.one.exit.port(1).unwrap().inbox().queue.take();
    assert_eq!(other, Some((first.source(), vec![0x40, 5])));

    assert_eq!(send(&mut *socket, second.source(), &[b"to the second"]), SendOutcome::Sent);
    assert!(first.queue().take().is_none());
    assert_eq!(second.queue().take().unwrap(), b"to the second");
    assert_eq!(send(&mut *socket, second.source(), &[b"too", b"lat"]), SendOutcome::Sent);
    let gone = second.source();
    drop(second);
    assert_eq!(worker.one.discarded.load(Ordering::Relaxed), 2, "what waited is counted");
    let failed = SendOutcome::Failed(SendFailure::CarrierFull);
    assert_eq!(send(&mut *socket, gone, &[b"one", b"two"]), failed, "and nothing goes there over UDP");
    assert_eq!((socket.stats().send_failures, worker.one.discarded.load(Ordering::Relaxed)), (2, 2));
    assert!(first.queue().take().is_none());
    assert_ne!(worker.one.exit.open(client, None).source(), gone);
    let v6: SocketAddr = "[2001:db8::7]:50000".parse().unwrap();
    let third = worker.one.exit.open(v6, None);
    assert_eq!((client_of(third.source()), third.source() == v6), (v6, false));
}

#[tokio::test]
async fn what_a_stream_does_not_take_is_dropped_and_counted() {
    let mut worker = Worker::new(1);
    let mut socket = worker.socket(UdpRole::QuicDial, Some(label(7)), 2);
    let packet = [7; 1_000];
    let fits = MOST_OUT_BYTES / (packet.len() + OVERHEAD_BYTES);
    for count in 0..fits {
        assert_eq!(send(&mut *socket, label(7), &[&packet]), SendOutcome::Sent, "{count} of {fits}");
    }
    let blocked = SendOutcome::Failed(SendFailure::CarrierFull);
    assert_eq!(send(&mut *socket, label(7), &[&packet, &packet]), blocked);
    let wanted = worker.one.wanted.borrow_mut().pop().unwrap();
    assert_eq!((wanted.queue.drops(), socket.stats().send_failures), (2, 2));
    wanted.queue.take().unwrap();
    let partly = SendOutcome::Partly { failed: 1, why: SendFailure::CarrierFull };
    assert_eq!(send(&mut *socket, label(7), &[&packet, &packet]), partly);

    let mut put = 0;
    while wanted.port.put(wanted.label, &packet) {
        put += 1;
    }
    assert_eq!(put, MOST_IN_BYTES / (packet.len() + OVERHEAD_BYTES));
    let queue = socket.kernel_queue();
    assert_eq!((queue.drops, queue.bytes), (1, (put * (packet.len() + OVERHEAD_BYTES)) as u64));
    assert_eq!(received(&mut *socket).len(), put);

    assert!(wanted.port.put(wanted.label, &packet), "it comes when the socket is gone");
    drop(socket);
    assert_eq!(worker.one.discarded.load(Ordering::Relaxed), 0, "the last packets may still be sent");
    drop(wanted);
    assert_eq!(worker.one.discarded.load(Ordering::Relaxed), fits as u64 + 1);
}

#[tokio::test]
async fn a_stream_is_woken_by_the_packet_that_ends_its_wait() {
    let mut worker = Worker::new(1);
    let mut socket = worker.socket(UdpRole::QuicDial, Some(label(7)), 2);
    send(&mut *socket, label(7), &[b"first"]);
    let wanted = worker.one.wanted.borrow_mut().pop().unwrap();
    wanted.queue.take().unwrap();
    let waits = async { wanted.queue.ready().await };
    let sends = async {
        tokio::task::yield_now().await;
        send(&mut *socket, label(7), &[b"second"]);
    };
    let both = async { tokio::join!(waits, sends) };
    let (is_open, ()) = tokio::time::timeout(Duration::from_secs(5), both).await.unwrap();
    assert!(is_open);
    assert_eq!(wanted.queue.take().unwrap(), b"second");
}

fn probe(name: u8) -> Probe {
    Probe { question: vec![name; PROBE_BYTES].into(), answer: vec![name + 1; PROBE_BYTES].into() }
}

/// A socket of another host, as far as the tests go.
fn far_end() -> (StdSocket, SocketAddr) {
    let socket = StdSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// What comes to a far end next.
fn come(socket: &StdSocket) -> Vec<u8> {
    let mut bytes = vec![0; 2_048];
    let count = socket.recv(&mut bytes).unwrap();
    bytes.truncate(count);
    bytes
}

/// What a socket receives once something is there.
async fn awaited(socket: &mut dyn UdpSocket) -> Vec<(SocketAddr, Vec<u8>)> {
    for _ in 0..1_000 {
        let all = received(socket);
        if !all.is_empty() {
            return all;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("nothing has come");
}

/// The seconds after which UDP is asked beside a stream: every five in the first minute, before it is half a minute.
fn until_half_a_minute() -> impl Iterator<Item = u64> {
    [1, 2, 4].into_iter().chain([5; 11]).chain([10, 20])
}

fn ways(socket: &dyn UdpSocket) -> (Over, Because) {
    let taken = socket.taken().unwrap();
    (taken.over, taken.because)
}

#[test]
fn an_open_stream_that_falls_behind_takes_no_more() {
    let (queue, now) = (StreamQueue::new(false, &Arc::default()), SystemClock.now());
    let late = now + LONGEST_WAIT + Duration::from_millis(1);
    for _ in 0..16 {
        assert!(queue.put(&[7; 1_000], now));
    }
    assert!(queue.put(&[7; 1_000], late), "it is being opened");
    queue.opens(Some(probe(1)));
    assert!(!queue.put(&[7; 1_000], late));
    assert_eq!(queue.drops(), 1);
    assert!(queue.put(&[7; 1_000], now + LONGEST_WAIT), "nothing has waited for longer");
    for _ in 0..3 {
        queue.take().unwrap();
    }
    assert!(queue.put(&[7; 1_000], late), "what is left may always wait");
}

#[tokio::test]
async fn a_listening_socket_has_clients_on_both_ways() {
    let mut worker = Worker::new(1);
    let mut socket = worker.socket(UdpRole::QuicListen, None, 3);
    let here = socket.local_addr();
    let (far, at) = far_end();
    far.send_to(b"over UDP", here).unwrap();
    assert_eq!(awaited(&mut *socket).await, [(at, b"over UDP".to_vec())]);

    // A client behind the same NAT has the address of UDP for one of TCP: its packets are its own.
    let accepted = worker.one.exit.open(at, Some(probe(5)));
    let client = accepted.source();
    assert!(accepted.put(&[0x40, 1]));
    assert_eq!(awaited(&mut *socket).await, [(client, vec![0x40, 1])]);
    // One batch, to both.
    let mut batch = SendBatch::new(1 << 16);
    for (to, byte) in [(at, 1), (client, 2), (client, 3), (at, 4)] {
        batch.tail(1).unwrap()[0] = byte;
        batch.commit(&Path { destination: to, source: None, tos: 0 }, 0, 1, 1);
    }
    let mut outcomes = Vec::new();
    socket.send(&mut batch, &mut |message, outcome| outcomes.push((message.path.destination, outcome)));
    assert_eq!(outcomes, [at, client, at].map(|to| (to, SendOutcome::Sent)));
    assert_eq!([come(&far), come(&far)], [vec![1], vec![4]]);
    assert_eq!([accepted.queue().take(), accepted.queue().take()], [Some(vec![2]), Some(vec![3])]);

    // A question is answered, and shown to nobody; what only looks like one is.
    let mut other = probe(5).question;
    other[PROBE_BYTES - 1] = 9;
    for packet in [&probe(5).question, &other] {
        far.send_to(packet, here).unwrap();
    }
    assert_eq!(awaited(&mut *socket).await, [(at, other.to_vec())]);
    assert_eq!(come(&far), *probe(5).answer);
    drop(accepted);
    far.send_to(&probe(5).question, here).unwrap();
    assert_eq!(awaited(&mut *socket).await.len(), 1, "its stream has ended");
    // Only what comes now has a queue to look for.
    assert_eq!(send(&mut *socket, at, &[b"over UDP"]), SendOutcome::Sent);
    assert_eq!(come(&far), b"over UDP");
}

#[tokio::test]
async fn a_dialled_socket_that_is_silent_tries_both_ways_and_keeps_to_the_one_that_answers() {
    let mut worker = Worker::new(1);
    let (far, at) = far_end();
    worker.one.beside.set(Some(at));
    let mut socket = worker.socket(UdpRole::QuicDial, Some(at), 2);
    send(&mut *socket, at, &[b"one"]);
    assert_eq!(come(&far), b"one");
    assert!(worker.one.wanted.borrow().is_empty());
    assert_eq!(ways(&*socket), (Over::Udp, Because::Dialled));

    assert!(socket.seek());
    assert_eq!(ways(&*socket), (Over::Both, Because::UdpSilent));
    send(&mut *socket, at, &[b"two"]);
    assert_eq!(come(&far), b"two");
    let wanted = worker.one.wanted.borrow_mut().pop().unwrap();
    assert_eq!(wanted.queue.take().unwrap(), b"two");
    wanted.queue.opens(Some(probe(5)));
    assert!(wanted.port.put(label(7), b"answer"));
    assert_eq!(awaited(&mut *socket).await, [(at, b"answer".to_vec())], "the worker sees one address");
    send(&mut *socket, at, &[b"three"]);
    assert_eq!([come(&far), come(&far)], [b"three".to_vec(), probe(5).question.to_vec()]);

    // The stream alone has answered.
    worker.clock.advance(Duration::from_millis(500));
    assert!(wanted.port.put(label(7), b"answer"));
    awaited(&mut *socket).await;
    assert_eq!(wanted.queue.take().unwrap(), b"three");
    send(&mut *socket, at, &[b"four"]);
    assert_eq!(wanted.queue.take().unwrap(), b"four");
    let begins = worker.socket(UdpRole::QuicDial, Some(at), 4);
    assert_eq!(begins.offload(at), crate::UdpOffload::default(), "another socket begins with the stream");

    assert_eq!(ways(&*begins), (Over::Carrier, Because::HeardThere));
    assert_eq!(ways(&*socket), (Over::Carrier, Because::UdpSilent));

    for seconds in until_half_a_minute().chain([30, 30]) {
        worker.clock.advance(Duration::from_secs(seconds) - Duration::from_millis(1));
        send(&mut *socket, at, &[b"early"]);
        worker.clock.advance(Duration::from_millis(1));
        far.set_nonblocking(true).unwrap();
        assert!(far.recv(&mut [0; 2_048]).is_err(), "{seconds}");
        far.set_nonblocking(false).unwrap();
        send(&mut *socket, at, &[b"asks"]);
        assert_eq!(come(&far), *probe(5).question);
    }
    let near = socket.local_addr();
    far.send_to(b"stale", near).unwrap();
    assert_eq!(awaited(&mut *socket).await, [(at, b"stale".to_vec())]);
    assert!(!socket.take_moved(), "what comes over UDP does not show that ours arrives");
    far.send_to(&probe(5).answer, near).unwrap();
    while !socket.take_moved() {
        assert!(received(&mut *socket).is_empty(), "an answer is shown to nobody");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(ways(&*socket), (Over::Udp, Because::UdpAnswers));
    while wanted.queue.take().is_some() {}
    assert!(!wanted.queue.ready().await, "the stream has had its time");
    send(&mut *socket, at, &[b"five"]);
    assert_eq!(come(&far), b"five");
}

#[tokio::test]
async fn a_label_with_udp_beside_it_begins_with_the_stream_and_leads_to_both() {
    let mut worker = Worker::new(1);
    let (far, at) = far_end();
    worker.one.beside.set(Some(at));
    let mut socket = worker.socket(UdpRole::QuicDial, Some(label(7)), 2);
    send(&mut *socket, label(7), &[b"one"]);
    let wanted = worker.one.wanted.borrow_mut().pop().unwrap();
    assert_eq!(wanted.queue.take().unwrap(), b"one");
    wanted.queue.opens(Some(probe(5)));
    worker.clock.advance(Duration::from_secs(1));
    send(&mut *socket, label(7), &[b"two"]);
    assert_eq!(come(&far), *probe(5).question);
    far.send_to(&probe(5).answer, socket.local_addr()).unwrap();
    while !socket.take_moved() {
        assert!(received(&mut *socket).is_empty());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    send(&mut *socket, label(7), &[b"three"]);
    assert_eq!(come(&far), b"three");
    far.send_to(b"answer", socket.local_addr()).unwrap();
    assert_eq!(awaited(&mut *socket).await, [(label(7), b"answer".to_vec())]);
}

#[tokio::test]
async fn a_stream_that_lasts_asks_over_udp_where_the_far_end_is_now() {
    for dialled_over_udp in [true, false] {
        let mut worker = Worker::new(1);
        let ((far, at), (moved, there)) = (far_end(), far_end());
        worker.one.beside.set(Some(at));
        let remote = if dialled_over_udp { at } else { label(7) };
        worker.one.experience.note(Heard::Stream, worker.clock.now());
        let mut socket = worker.socket(UdpRole::QuicDial, Some(remote), 2);
        send(&mut *socket, remote, &[b"one"]);
        let wanted = worker.one.wanted.borrow_mut().pop().unwrap();
        wanted.queue.opens(Some(probe(5)));
        worker.one.moved.set((Some(there), 0));
        for seconds in until_half_a_minute() {
            worker.clock.advance(Duration::from_secs(seconds));
            send(&mut *socket, remote, &[b"asks"]);
            assert_eq!(come(&far), *probe(5).question);
        }
        assert_eq!(worker.one.moved.get().1, 0, "names are not looked up so often");
        for _ in 0..3 {
            worker.clock.advance(Duration::from_secs(30));
            send(&mut *socket, remote, &[b"asks"]);
            assert_eq!(come(&moved), *probe(5).question);
        }
        assert_eq!(worker.one.moved.get().1, 3);
        moved.send_to(&probe(5).answer, socket.local_addr()).unwrap();
        while !socket.take_moved() {
            assert!(received(&mut *socket).is_empty());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        send(&mut *socket, remote, &[b"two"]);
        assert_eq!(come(&moved), b"two");
        moved.send_to(b"answer", socket.local_addr()).unwrap();
        assert_eq!(
            awaited(&mut *socket).await,
            [(remote, b"answer".to_vec())],
            "the worker sees one address"
        );
    }
}
