//! An entry and two exits with the same network behind them, in network namespaces, and a flow through the better one.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use socket2::SockRef;

use crate::{
    agent::Agent,
    clock,
    impairment::{Impairment, Path},
    place::{Cable, Place},
    sites::Family,
};

/// The addresses of the host behind both exits.
pub const TARGET: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1));
pub const TARGET_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1));

/// The entry's addresses in the tunnel.
pub const ENTRY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
pub const ENTRY_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1));

/// Where the host sends datagrams back.
const PORT: u16 = 7_777;

/// Between two datagrams of the flow.
const EVERY: Duration = Duration::from_millis(1);

/// An entry, and two exits that it prefers in their order.
pub struct Exits {
    pub entry: Agent,
    pub exits: [Agent; 2],
    echoes: Vec<JoinHandle<()>>,
    host: Arc<Host>,
    /// The paths to the exits, unless they have no delay: then the entry dials the exits themselves.
    pub paths: Vec<Impairment>,
    /// The second one's first end is unused: the entry has a link of its own to its second end.
    _cables: [Cable; 2],
}

/// The host behind the exits.
#[derive(Debug)]
struct Host {
    over: AtomicBool,
    /// See [`Exits::answer_by`]; the number of exits: none in particular.
    answers_by: AtomicUsize,
    /// The exit by which its newest datagram came.
    newest: AtomicUsize,
}

/// What became of a flow.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    pub sent: usize,
    pub answered: usize,
    /// How many of those came by each exit.
    pub by: [usize; 2],
    /// The longest time without an answer while it was sent.
    pub gap: Duration,
}

impl Exits {
    /// Starts all three, `delay` apart each way; `of_tun` is more of the entry's `[tun]`.
    ///
    /// # Panics
    /// When one of them does not start, or they do not connect.
    #[must_use]
    pub fn start(delay: Duration, of_tun: &str) -> Self {
        Self::start_with(delay, "", of_tun)
    }

    /// The same; `of_transport` is more of the entry's `transport`, as whole lines.
    ///
    /// # Panics
    /// When one of them does not start, or they do not connect.
    #[must_use]
    pub fn start_with(delay: Duration, of_transport: &str, of_tun: &str) -> Self {
        let cables = [Cable::new(), Cable::new()];
        let [entry, first] = cables[0].places();
        let [_, second] = cables[1].places();
        link(&entry, &second);
        let exits = [("exit-1", &first), ("exit-2", &second)].map(|(name, place)| {
            place.tell(&["ip", "addr", "add", &TARGET.to_string(), "dev", "lo"]);
            place.tell(&["ip", "addr", "add", &TARGET_V6.to_string(), "dev", "lo", "nodad"]);
            Agent::new(name, place)
        });
        let path = Path { delay, ..Path::default() };
        let servers = ["192.0.2.2:4433", "192.0.3.2:4433"].map(|text| text.parse().expect("an address"));
        let paths: Vec<Impairment> = [("192.0.2.1", servers[0]), ("192.0.3.1", servers[1])]
            .into_iter()
            .filter(|_| !delay.is_zero())
            .map(|(front, server)| {
                let front = Impairment::reserve(front.parse().expect("an address"));
                Impairment::new(&entry, front, server, path)
            })
            .collect();
        let endpoint = |index: usize| paths.get(index).map_or(servers[index], |path| path.address);
        let entry = Agent::new("entry", &entry);
        let kernel = of_tun.contains("kernel");
        // With routes of the agent's own they would lead the tunnel's packets into the tunnel.
        let more = if kernel { ", \"192.0.2.0/24\"" } else { "" };
        let peer = |index: usize| {
            format!(
                "[[peer]]\nname = \"exit-{index}\"\npublic_key = \"{}\"\nendpoints = [\"{}\"]\npriority = {index}\n\
                 allowed_ips = [\"10.77.0.0/16\", \"fd77::/64\"{more}]\naddress = [\"10.9.0.{host}\", \"fd09::{host}\"]\n\
                 {QUEUE}",
                exits[index - 1].key(),
                endpoint(index - 1),
                host = index + 1
            )
        };
        entry.configure(&format!(
            "transport.workers = 2\n{of_transport}{}{}[tun]\naddress = [\"{ENTRY}/24\", \"{ENTRY_V6}/64\"]\n{of_tun}\n",
            peer(1),
            peer(2)
        ));
        // The entry's link-local address is on their link only if they have the kernel's routes, too.
        let of_exits = if kernel { "routing = \"kernel\"\n" } else { "" };
        for (exit, host) in exits.iter().zip(2..) {
            exit.configure(&format!(
                "transport.listen = [\"0.0.0.0:4433\"]\ntransport.workers = 2\n[[peer]]\nname = \"entry\"\n\
                 public_key = \"{}\"\nallowed_ips = [\"{ENTRY}\", \"{ENTRY_V6}\"]\naddress = [\"{ENTRY}\", \"{ENTRY_V6}\"]\n\
                 {QUEUE}[tun]\naddress = [\"10.9.0.{host}/24\", \"fd09::{host}/64\"]\n{of_exits}",
                entry.key()
            ));
        }
        let host = Arc::new(Host {
            over: AtomicBool::new(false),
            answers_by: AtomicUsize::new(exits.len()),
            newest: AtomicUsize::new(0),
        });
        let echoes = serve([&first, &second], &host);
        let mut all = Self { entry, exits, echoes, host, paths, _cables: cables };
        all.exits.iter_mut().for_each(Agent::start);
        all.entry.start();
        all.wait_for_lanes();
        all
    }

    /// The entry's peers for an inner address, and what each does.
    ///
    /// # Panics
    /// When the entry does not say so.
    #[must_use]
    #[track_caller]
    pub fn carriers(&self, address: &str) -> Vec<(String, String)> {
        let answer = self.entry.ask(&["status", "--json", "--routes", address]);
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
        let peers = answer["status"]["routes"][0]["peers"].as_array().cloned().unwrap_or_default();
        let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
        peers.iter().map(|peer| (text(&peer["name"]), text(&peer["state"]))).collect()
    }

    /// Waits until these peers carry packets for an inner address, and no others.
    ///
    /// # Panics
    /// When that takes long.
    #[track_caller]
    pub fn wait_for_carriers(&self, address: &str, expected: &[&str]) {
        clock::until("the carriers", clock::PATIENCE, || {
            let all = self.carriers(address);
            let carry = all.iter().filter(|(_, state)| state == "carries").map(|(name, _)| &**name);
            if carry.eq(expected.iter().copied()) { Ok(()) } else { Err(format!("{address}: {all:?}")) }
        });
    }

    /// Waits until the entry is connected to both exits.
    ///
    /// # Panics
    /// When that takes long.
    pub fn wait_for_lanes(&self) {
        clock::until("lanes to both exits", clock::PATIENCE, || {
            let status: serde_json::Value =
                serde_json::from_str(&self.entry.ask(&["status", "--json"])).expect("JSON");
            let up = |peer: &serde_json::Value| peer["lanes_up"].as_u64() >= Some(2);
            let status = &status["status"];
            let peers = status["peers"].as_array().expect("a list");
            if peers.iter().all(up) { Ok(()) } else { Err(status.to_string()) }
        });
    }

    /// From now on, answers of the host go by this exit, whichever the datagram came by; `None`: by the same.
    pub fn answer_by(&self, exit: Option<usize>) {
        self.host.answers_by.store(exit.unwrap_or(self.exits.len()), Ordering::Relaxed);
    }

    /// The index of the exit by which the host's newest datagram came: it carries the flow.
    #[must_use]
    pub fn busy(&self) -> usize {
        self.host.newest.load(Ordering::Relaxed)
    }

    /// Sends 1,000 datagrams a second for `time` to the host behind the exits, and calls `meanwhile` once, after a quarter: it sends
    /// for another quarter at least after `meanwhile` has returned.
    ///
    /// # Panics
    /// When the kernel refuses a socket.
    pub fn flow(&mut self, time: Duration, meanwhile: impl FnOnce(&mut Self)) -> Flow {
        self.flow_over(Family::V4, time, meanwhile)
    }

    /// The same over either family.
    ///
    /// # Panics
    /// When the kernel refuses a socket.
    pub fn flow_over(&mut self, family: Family, time: Duration, meanwhile: impl FnOnce(&mut Self)) -> Flow {
        let (own, target) = match family {
            Family::V4 => (ENTRY, TARGET),
            Family::V6 => (ENTRY_V6, TARGET_V6),
        };
        let target = SocketAddr::new(target, PORT);
        let socket = self.entry.place().enter(|| UdpSocket::bind((own, 0))).expect("the tunnel's address");
        let span = Span::new(time);
        thread::scope(|scope| {
            let flow = scope.spawn(|| {
                let mut by = [0; 2];
                let all = exchange(&socket, target, EVERY, &span, |exit| by[usize::from(exit)] += 1);
                Flow { sent: all.sent, answered: all.answered, by, gap: all.gap }
            });
            span.interrupt(|| meanwhile(self));
            flow.join().expect("it has said why")
        })
    }
}

impl Drop for Exits {
    fn drop(&mut self) {
        self.host.over.store(true, Ordering::Relaxed);
        for thread in self.echoes.drain(..) {
            // Its panic has been written to standard error.
            drop(thread.join());
        }
    }
}

/// How long datagrams are sent: for a time, and until what happens meanwhile is over and a quarter of that time longer.
#[derive(Debug)]
pub(crate) struct Span {
    begin: Instant,
    time: Duration,
    happened: OnceLock<Instant>,
}

impl Span {
    /// It begins now.
    pub(crate) fn new(time: Duration) -> Self {
        Self { begin: clock::now(), time, happened: OnceLock::new() }
    }

    /// Calls `meanwhile` after a quarter of the time.
    pub(crate) fn interrupt(&self, meanwhile: impl FnOnce()) {
        // Also if it panics: who sends would go on for ever.
        let _happened = Happened(&self.happened);
        thread::sleep(self.time / 4);
        meanwhile();
    }

    fn goes_on(&self) -> bool {
        let happened = self.happened.get();
        self.begin.elapsed() < self.time || happened.is_none_or(|at| at.elapsed() < self.time / 4)
    }
}

/// Notes when it is dropped.
struct Happened<'a>(&'a OnceLock<Instant>);

impl Drop for Happened<'_> {
    fn drop(&mut self) {
        self.0.set(clock::now()).ok();
    }
}

/// What became of the datagrams that [`exchange`] sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    pub(crate) sent: usize,
    pub(crate) answered: usize,
    /// The longest time without an answer while datagrams were sent.
    pub(crate) gap: Duration,
    /// The longest time between two datagrams that were sent: it is long if this machine stood still.
    pub(crate) pause: Duration,
}

/// How long a socket waits for an answer at a time.
const TICK: Duration = Duration::from_millis(20);

/// How many of these waits in a row find nothing until what is missing is lost. A machine that stands still does so in one of them.
const MOST_QUIET: usize = 100;

/// Bytes of a socket's receive buffer: more than what comes while a thread is kept from the processor.
pub(crate) const BUFFER: usize = 4 << 20;

/// A machine that stands still is no reason to drop what waits.
const QUEUE: &str = "queue.time = \"5s\"\n";

/// Sends a datagram to `target` at each interval `every` for a `span`, waits for those that are under way, and calls `answer` with the
/// first byte of each that comes.
pub(crate) fn exchange(
    socket: &UdpSocket,
    target: SocketAddr,
    every: Duration,
    span: &Span,
    mut answer: impl FnMut(u8),
) -> Exchange {
    socket.set_read_timeout(Some(TICK)).expect("not zero");
    SockRef::from(socket).set_recv_buffer_size(BUFFER).expect("a size");
    let ended = OnceLock::new();
    thread::scope(|scope| {
        let sender = scope.spawn(|| ended.set(send(socket, target, every, span)).ok());
        let (mut answered, mut quiet) = (0, 0);
        let (mut last, mut gap) = (clock::now(), Duration::ZERO);
        let mut buffer = [0; 2_048];
        let sent = loop {
            let all = ended.get();
            // When all are back, one more look finds what came twice.
            let over = |sent: &&Sent| quiet >= if answered < sent.count { MOST_QUIET } else { 1 };
            if let Some(sent) = all.filter(over) {
                break *sent;
            }
            // An error is the timeout.
            if socket.recv_from(&mut buffer).is_err() {
                quiet += usize::from(all.is_some());
                continue;
            }
            (answered, quiet) = (answered + 1, 0);
            answer(buffer[0]);
            let now = clock::now();
            let end = ended.get().map_or(now, |sent| sent.end.min(now));
            (gap, last) = (gap.max(end.saturating_duration_since(last)), now);
        };
        sender.join().expect("it sends");
        let gap = gap.max(sent.end.saturating_duration_since(last));
        Exchange { sent: sent.count, answered, gap, pause: sent.pause }
    })
}

/// What was sent.
#[derive(Clone, Copy, Debug)]
struct Sent {
    count: usize,
    pause: Duration,
    end: Instant,
}

fn send(socket: &UdpSocket, target: SocketAddr, every: Duration, span: &Span) -> Sent {
    let mut due = clock::now();
    let mut sent = Sent { count: 0, pause: Duration::ZERO, end: due };
    while span.goes_on() {
        // What finds no route for a moment is not answered.
        drop(socket.send_to(&[7; 100], target));
        let now = clock::now();
        sent = Sent { count: sent.count + 1, pause: sent.pause.max(now - sent.end), end: now };
        // What a busy machine has kept from being sent is not sent in a burst.
        due = (due + every).max(now);
        thread::sleep(due.saturating_duration_since(clock::now()));
    }
    sent
}

/// The host behind each exit.
fn serve(exits: [&Place; 2], host: &Arc<Host>) -> Vec<JoinHandle<()>> {
    let of_family = |target: IpAddr| {
        let bind = |place: &Place| place.enter(|| UdpSocket::bind((target, PORT)));
        let sockets = exits.map(|place| bind(place).expect("the namespace is ours"));
        sockets.each_ref().map(|socket| {
            socket.set_read_timeout(Some(Duration::from_millis(50))).expect("not zero");
            SockRef::from(socket).set_recv_buffer_size(BUFFER).expect("a size");
            sockets.each_ref().map(|socket| socket.try_clone().expect("a descriptor is free"))
        })
    };
    let all = [TARGET, TARGET_V6].map(of_family).into_iter();
    let echo = |(exit, sockets): (usize, [UdpSocket; 2])| {
        let host = Arc::clone(host);
        thread::spawn(move || echo(exit, &sockets, &host))
    };
    all.flat_map(|of_family| of_family.into_iter().enumerate()).map(echo).collect()
}

/// Sends back what comes by `exit`, with the exit's number in front.
fn echo(exit: usize, sockets: &[UdpSocket; 2], host: &Host) {
    let mut buffer = [0; 2_048];
    while !host.over.load(Ordering::Relaxed) {
        // An error is the timeout, or that the way back is gone.
        if let Ok((length, from)) = sockets[exit].recv_from(&mut buffer) {
            host.newest.store(exit, Ordering::Relaxed);
            buffer[0] = u8::try_from(exit).unwrap_or(u8::MAX);
            let by = sockets.get(host.answers_by.load(Ordering::Relaxed)).unwrap_or(&sockets[exit]);
            drop(by.send_to(&buffer[..length], from));
        }
    }
}

/// A link from the entry to the second exit, beside the cable's.
fn link(entry: &Place, second: &Place) {
    let Place::Namespace(name) = second else { return };
    entry.tell(&["ip", "link", "add", "veth1", "type", "veth", "peer", "name", "veth1", "netns", name]);
    for (place, address) in [(entry, "192.0.3.1/24"), (second, "192.0.3.2/24")] {
        place.tell(&["ip", "link", "set", "veth1", "up"]);
        place.tell(&["ip", "addr", "add", address, "dev", "veth1"]);
    }
}
