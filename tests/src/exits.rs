//! An entry and two exits with the same network behind them, in network namespaces, and a flow through the better one.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

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
    over: Arc<AtomicBool>,
    /// See [`Exits::answer_by`]; the number of exits: none in particular.
    answers_by: Arc<AtomicUsize>,
    /// The paths to the exits, unless they have no delay: then the entry dials the exits themselves.
    pub paths: Vec<Impairment>,
    /// The second one's first end is unused: the entry has a link of its own to its second end.
    _cables: [Cable; 2],
}

/// What became of a flow.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    pub sent: usize,
    pub answered: usize,
    /// How many of those came by each exit.
    pub by: [usize; 2],
    /// The longest time without an answer.
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
                 allowed_ips = [\"10.77.0.0/16\", \"fd77::/64\"{more}]\naddress = [\"10.9.0.{host}\", \"fd09::{host}\"]\n",
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
                 [tun]\naddress = [\"10.9.0.{host}/24\", \"fd09::{host}/64\"]\n{of_exits}",
                entry.key()
            ));
        }
        let (over, answers_by) = (Arc::default(), Arc::new(AtomicUsize::new(exits.len())));
        let echoes = serve([&first, &second], &over, &answers_by);
        let mut all = Self { entry, exits, echoes, over, answers_by, paths, _cables: cables };
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
        self.answers_by.store(exit.unwrap_or(self.exits.len()), Ordering::Relaxed);
    }

    /// Sends 1,000 datagrams a second for `time` to the host behind the exits, and calls `meanwhile` once, after a quarter.
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
        socket.set_read_timeout(Some(Duration::from_millis(20))).expect("not zero");
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let (begin, mut sent) = (clock::now(), 0);
                while begin.elapsed() < time {
                    // What finds no route for a moment is not answered.
                    drop(socket.send_to(&[7; 100], target));
                    sent += 1;
                    let due = begin + EVERY * sent;
                    thread::sleep(due.saturating_duration_since(clock::now()));
                }
                sent as usize
            });
            let receiver = scope.spawn(|| {
                let (mut by, mut last, mut gap) = ([0; 2], clock::now(), Duration::ZERO);
                let mut buffer = [0; 2_048];
                while !over.load(Ordering::Relaxed) {
                    // Until there is one: the time is over, or an ICMP error came.
                    if socket.recv_from(&mut buffer).is_ok() {
                        by[usize::from(buffer[0])] += 1;
                        (gap, last) = (gap.max(last.elapsed()), clock::now());
                    }
                }
                (by, gap.max(last.elapsed()))
            });
            thread::sleep(time / 4);
            meanwhile(self);
            let sent = sender.join().expect("it sends");
            thread::sleep(Duration::from_millis(200));
            over.store(true, Ordering::Relaxed);
            let (by, gap) = receiver.join().expect("it receives");
            Flow { sent, answered: by.iter().sum(), by, gap }
        })
    }
}

impl Drop for Exits {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.echoes.drain(..) {
            // Its panic has been written to standard error.
            drop(thread.join());
        }
    }
}

/// The host behind each exit.
fn serve(exits: [&Place; 2], over: &Arc<AtomicBool>, answers_by: &Arc<AtomicUsize>) -> Vec<JoinHandle<()>> {
    let of_family = |target: IpAddr| {
        let bind = |place: &Place| place.enter(|| UdpSocket::bind((target, PORT)));
        let sockets = exits.map(|place| bind(place).expect("the namespace is ours"));
        sockets.each_ref().map(|socket| {
            socket.set_read_timeout(Some(Duration::from_millis(50))).expect("not zero");
            sockets.each_ref().map(|socket| socket.try_clone().expect("a descriptor is free"))
        })
    };
    let all = [TARGET, TARGET_V6].map(of_family).into_iter();
    let echo = |(exit, sockets): (usize, [UdpSocket; 2])| {
        let (over, answers_by) = (Arc::clone(over), Arc::clone(answers_by));
        thread::spawn(move || echo(exit, &sockets, &over, &answers_by))
    };
    all.flat_map(|of_family| of_family.into_iter().enumerate()).map(echo).collect()
}

/// Sends back what comes by `exit`, with the exit's number in front.
fn echo(exit: usize, sockets: &[UdpSocket; 2], over: &AtomicBool, answers_by: &AtomicUsize) {
    let mut buffer = [0; 2_048];
    while !over.load(Ordering::Relaxed) {
        // An error is the timeout, or that the way back is gone.
        if let Ok((length, from)) = sockets[exit].recv_from(&mut buffer) {
            buffer[0] = u8::try_from(exit).unwrap_or(u8::MAX);
            let by = sockets.get(answers_by.load(Ordering::Relaxed)).unwrap_or(&sockets[exit]);
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
