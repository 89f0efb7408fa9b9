//! Numbered datagrams that go to an echo and come back, on several lines at once, while a test does things to the way.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use socket2::SockRef;

use crate::{
    clock::{self, PATIENCE},
    place::Place,
    ports,
};

/// Between two datagrams of a line.
pub const INTERVAL: Duration = Duration::from_millis(5);

/// Bytes of a datagram: two share no packet of a lane, and an impairment knows those that carry one by their size.
pub const LENGTH: usize = 800;

/// How often a thread looks whether it shall end.
const TICK: Duration = Duration::from_millis(20);

/// A client and its echo.
#[derive(Debug)]
pub struct Line {
    name: &'static str,
    client: UdpSocket,
    echo: UdpSocket,
    target: SocketAddr,
    length: usize,
    book: Mutex<Book>,
}

/// What became of a line's datagrams.
#[derive(Clone, Debug, Default)]
struct Book {
    /// When each was sent, by its number.
    sent: Vec<Instant>,
    /// The numbers that came to the echo, and were sent back.
    arrived: Vec<u64>,
    echoed: u64,
    /// The numbers that came back, and when.
    returned: Vec<(u64, Instant)>,
    /// What came and is none of this line's.
    strays: u64,
}

/// How many datagrams of a line were where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Sent by the client.
    pub sent: u64,
    /// Came to the echo.
    pub arrived: u64,
    /// Sent back by the echo.
    pub echoed: u64,
    /// Came back to the client.
    pub returned: u64,
}

/// Lines on which datagrams go; dropping it ends them.
#[derive(Debug)]
pub struct Streams {
    lines: Vec<Arc<Line>>,
    inside: Arc<Inside>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Inside {
    stop: AtomicBool,
    paused: AtomicBool,
}

impl Line {
    /// From a client at `from` to an echo at `address` of `to`.
    ///
    /// # Panics
    /// When the kernel has no socket for it.
    #[must_use]
    #[track_caller]
    pub fn new(name: &'static str, from: &Place, to: &Place, address: IpAddr) -> Self {
        let address = SocketAddr::new(address, ports::free());
        let any = SocketAddr::new(if address.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() }, 0);
        let (client, echo) = (from.enter(|| socket(any)), to.enter(|| socket(address)));
        Self { name, client, echo, target: address, length: LENGTH, book: Mutex::default() }
    }

    /// The client sends to `target`, from where its datagrams get to the echo.
    #[must_use]
    pub fn through(mut self, target: SocketAddr) -> Self {
        self.target = target;
        self
    }

    /// Its datagrams have so many bytes instead of [`LENGTH`].
    #[must_use]
    pub fn sized(mut self, bytes: usize) -> Self {
        self.length = bytes;
        self
    }

    /// Where the echo is.
    ///
    /// # Panics
    /// Never: it is bound.
    #[must_use]
    pub fn echo_address(&self) -> SocketAddr {
        self.echo.local_addr().expect("it is bound")
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether its echo is behind agent `site`; its name says so.
    #[must_use]
    pub fn leads_to(&self, site: &str) -> bool {
        self.name.ends_with(site)
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self) {
        let mut book = self.book();
        let mut datagram = vec![0; self.length];
        let number = book.sent.len() as u64;
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        datagram[8..8 + self.name.len()].copy_from_slice(self.name.as_bytes());
        // Where there is no route just now, it was not sent, and the number is not used.
        if self.client.send_to(&datagram, self.target).is_ok() {
            book.sent.push(clock::now());
        }
    }

    fn number(&self, datagram: &[u8]) -> Option<u64> {
        let number = u64::from_be_bytes(*datagram.first_chunk()?);
        (datagram.len() == self.length && datagram[8..].starts_with(self.name.as_bytes())).then_some(number)
    }

    fn echo(&self, stop: &AtomicBool) {
        let mut buffer = [0; 2000];
        while !stop.load(Ordering::Relaxed) {
            let Ok((length, client)) = self.echo.recv_from(&mut buffer) else { continue };
            let mut book = self.book();
            match self.number(&buffer[..length]) {
                Some(number) => {
                    book.arrived.push(number);
                    book.echoed += u64::from(self.echo.send_to(&buffer[..length], client).is_ok());
                }
                None => book.strays += 1,
            }
        }
    }

    fn receive(&self, stop: &AtomicBool) {
        let mut buffer = [0; 2000];
        while !stop.load(Ordering::Relaxed) {
            let Ok((length, _)) = self.client.recv_from(&mut buffer) else { continue };
            let mut book = self.book();
            match self.number(&buffer[..length]) {
                Some(number) => book.returned.push((number, clock::now())),
                None => book.strays += 1,
            }
        }
    }

    /// How many of its datagrams were where.
    #[must_use]
    pub fn count(&self) -> Count {
        let book = self.book();
        Count {
            sent: book.sent.len() as u64,
            arrived: book.arrived.len() as u64,
            echoed: book.echoed,
            returned: book.returned.len() as u64,
        }
    }

    /// When the first datagram came back that was sent at `since` or later.
    #[must_use]
    pub fn first_answer(&self, since: Instant) -> Option<Instant> {
        let book = self.book();
        let first = book.sent.partition_point(|sent| *sent < since) as u64;
        // They come back in the order in which they were sent, or nearly so: the newest are at the end.
        let later = book.returned.iter().rev().take_while(|(_, at)| *at >= since);
        later.filter(|(number, _)| *number >= first).map(|(_, at)| *at).min()
    }

    /// The newest number that has come back.
    #[must_use]
    pub fn newest(&self) -> Option<u64> {
        self.book().returned.iter().map(|(number, _)| *number).max()
    }

    /// The numbers of those that were sent and did not come back, in stretches: first, last.
    #[must_use]
    pub fn gaps(&self) -> Vec<(u64, u64)> {
        let book = self.book();
        let returned: BTreeSet<u64> = book.returned.iter().map(|(number, _)| *number).collect();
        let mut gaps: Vec<(u64, u64)> = Vec::new();
        for number in (0..book.sent.len() as u64).filter(|number| !returned.contains(number)) {
            match gaps.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => gaps.push((number, number)),
            }
        }
        gaps
    }

    /// How many it has sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.book().sent.len() as u64
    }

    /// Checks that nothing came twice, and nothing that is another line's.
    ///
    /// # Panics
    /// When something did.
    #[track_caller]
    pub fn check(&self) {
        let book = self.book();
        assert_eq!(book.strays, 0, "{} got what is not its own", self.name);
        for (what, numbers) in [
            ("the echo", book.arrived.clone()),
            ("the client", book.returned.iter().map(|(number, _)| *number).collect()),
        ] {
            let each: BTreeSet<u64> = numbers.iter().copied().collect();
            assert_eq!(each.len(), numbers.len(), "{what} of {} got a datagram twice", self.name);
        }
    }
}

impl Streams {
    /// Begins to send on all lines, a datagram each every [`INTERVAL`].
    #[must_use]
    pub fn start(lines: Vec<Line>) -> Self {
        let lines: Vec<Arc<Line>> = lines.into_iter().map(Arc::new).collect();
        let inside = Arc::<Inside>::default();
        let mut threads = Vec::new();
        for line in &lines {
            for run in [Line::echo, Line::receive] {
                let (line, inside) = (Arc::clone(line), Arc::clone(&inside));
                threads.push(thread::spawn(move || run(&line, &inside.stop)));
            }
        }
        let (all, stop) = (lines.clone(), Arc::clone(&inside));
        threads.push(thread::spawn(move || {
            let mut due = clock::now();
            while !stop.stop.load(Ordering::Relaxed) {
                if !stop.paused.load(Ordering::SeqCst) {
                    all.iter().for_each(|line| line.send());
                }
                // What a busy machine has kept from being sent is not sent in a burst.
                due = (due + INTERVAL).max(clock::now());
                thread::sleep(due.saturating_duration_since(clock::now()).max(INTERVAL / 5));
            }
        }));
        Self { lines, inside, threads }
    }

    /// The lines.
    #[must_use]
    pub fn lines(&self) -> &[Arc<Line>] {
        &self.lines
    }

    /// Sends nothing more until [`resume`](Self::resume).
    pub fn pause(&self) {
        self.inside.paused.store(true, Ordering::SeqCst);
        // A round that has begun is over after this.
        thread::sleep(2 * INTERVAL);
    }

    /// Sends again.
    pub fn resume(&self) {
        self.inside.paused.store(false, Ordering::SeqCst);
    }

    /// Waits until each line has an answer to what was sent from now on, and returns how long that took for the first and for
    /// the last of them.
    ///
    /// # Panics
    /// When one has none within [`PATIENCE`].
    #[track_caller]
    pub fn wait_for_answers(&self, what: &str) -> [Duration; 2] {
        self.wait_for_answers_since(clock::now(), what)
    }

    /// The same for what was sent from `since` on.
    ///
    /// # Panics
    /// When one has none within [`PATIENCE`].
    #[track_caller]
    pub fn wait_for_answers_since(&self, since: Instant, what: &str) -> [Duration; 2] {
        clock::until(&format!("after {what}: an answer on each line"), PATIENCE, || {
            let answers: Vec<_> =
                self.lines.iter().map(|line| (line.name(), line.first_answer(since))).collect();
            let silent: Vec<_> =
                answers.iter().filter(|(_, at)| at.is_none()).map(|(name, _)| name).collect();
            let times: Vec<Instant> = answers.iter().filter_map(|(_, at)| *at).collect();
            match (silent.is_empty(), times.iter().min(), times.iter().max()) {
                (true, Some(first), Some(last)) => Ok([*first - since, *last - since]),
                _ => Err(format!("none on {silent:?}")),
            }
        })
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.inside.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Its panic has been written to standard error.
            drop(thread.join());
        }
    }
}

fn socket(address: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(address).expect("the address is ours");
    socket.set_read_timeout(Some(TICK)).expect("not zero");
    SockRef::from(&socket).set_recv_buffer_size(4 << 20).expect("a size");
    socket
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn what_is_sent_comes_back_once_and_what_never_came_is_a_gap() {
        let loopback = Ipv4Addr::LOCALHOST.into();
        let streams = Streams::start(vec![
            Line::new("one", &Place::Host, &Place::Host, loopback),
            Line::new("two", &Place::Host, &Place::Host, loopback),
        ]);
        streams.wait_for_answers("the start");
        streams.pause();
        let [one, two] = [0, 1].map(|place| &streams.lines()[place]);
        clock::until("all are back", PATIENCE, || {
            let count = one.count();
            if count.returned == count.sent { Ok(()) } else { Err(format!("{count:?}")) }
        });
        let count = one.count();
        assert_eq!((count.arrived, count.echoed), (count.sent, count.sent));
        assert_eq!((one.gaps(), one.newest()), (vec![], Some(count.sent - 1)));
        one.check();
        two.check();
        let missing = two.count().sent;
        two.book().sent.extend([clock::now(); 2]);
        assert_eq!(two.gaps().last().map(|(_, last)| *last), Some(missing + 1));
    }
}
