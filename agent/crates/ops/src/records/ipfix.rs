//! Records as IPFIX messages (RFC 7011), which a collector gets over UDP.
//!
//! A flow or forward becomes two data records, one for each direction in which something was carried, as nfdump and pmacct expect them.
//! Each message begins with both templates: over UDP one that is lost would keep what follows from being read.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use dataplane::records::{Carried, Ended, RecordCounts};

/// The upper bound of a message in bytes: it fits into one packet of a path with 1,500 bytes, VPN or not.
const MOST_MESSAGE: usize = 1_400;

/// The length of a message's header: version, length, export time, sequence number, observation domain (RFC 7011 §3.1).
const HEADER: usize = 16;

/// The set ID of templates (RFC 7011 §3.3.2).
const TEMPLATES: u16 = 2;

/// Our templates, by the family of the addresses.
const IPV4: u16 = 256;
const IPV6: u16 = 257;

/// The length that stands for a field whose length precedes it (RFC 7011 §7).
const VARIABLE: u16 = u16::MAX;

/// The most bytes of a name in a record: those of our configuration are shorter, but not all that users ask for.
const MOST_NAME: usize = 64;

/// The information elements of a record (IANA's registry "IPFIX Information Elements") behind its two addresses, with their lengths.
const FIELDS: [(u16, u16); 10] = [
    // sourceTransportPort, destinationTransportPort, protocolIdentifier.
    (7, 2),
    (11, 2),
    (4, 1),
    // flowStartMilliseconds, flowEndMilliseconds.
    (152, 8),
    (153, 8),
    // octetDeltaCount, packetDeltaCount.
    (1, 8),
    (2, 8),
    // flowEndReason.
    (136, 1),
    // userName: the peer or user; applicationName: the service, or what a user has asked for.
    (371, VARIABLE),
    (96, VARIABLE),
];

/// A direction of a flow, as a collector sees it.
struct OneWay<'a> {
    ended: &'a Ended,
    from: Option<SocketAddr>,
    to: Option<SocketAddr>,
    carried: Carried,
}

impl<'a> OneWay<'a> {
    /// The directions in which something was carried; without any, the way from the client.
    fn all(ended: &'a Ended) -> impl Iterator<Item = Self> {
        // The client's bytes go to the peer if the client is here.
        let (asked, answered) =
            if ended.opened_here { (ended.uplink, ended.downlink) } else { (ended.downlink, ended.uplink) };
        let there = Self { ended, from: ended.source, to: ended.destination, carried: asked };
        let back = Self { ended, from: ended.destination, to: ended.source, carried: answered };
        let is_empty = |carried: Carried| carried == Carried::default();
        let shows_there = !is_empty(asked) || is_empty(answered);
        [(there, shows_there), (back, !is_empty(answered))]
            .into_iter()
            .filter_map(|(way, is_shown)| is_shown.then_some(way))
    }

    /// The template of the record, and its bytes.
    fn encode(&self, record: &mut Vec<u8>) -> u16 {
        let Self { ended, from, to, carried } = self;
        let ip = |end: &Option<SocketAddr>| end.map(|end| end.ip().to_canonical());
        let port = |end: &Option<SocketAddr>| end.map_or(0, |end| end.port());
        let template = match (ip(from), ip(to)) {
            (Some(IpAddr::V6(_)), _) | (_, Some(IpAddr::V6(_))) => IPV6,
            (Some(IpAddr::V4(_)) | None, Some(IpAddr::V4(_)) | None) => IPV4,
        };
        for end in [from, to] {
            match (ip(end), template) {
                (Some(IpAddr::V4(ip)), IPV4) => record.extend(ip.octets()),
                (Some(IpAddr::V4(ip)), _) => record.extend(ip.to_ipv6_mapped().octets()),
                (Some(IpAddr::V6(ip)), _) => record.extend(ip.octets()),
                (None, IPV4) => record.extend(Ipv4Addr::UNSPECIFIED.octets()),
                (None, _) => record.extend(Ipv6Addr::UNSPECIFIED.octets()),
            }
        }
        record.extend(port(from).to_be_bytes());
        record.extend(port(to).to_be_bytes());
        record.push(ended.protocol);
        for time in [ended.span.began, ended.span.ended] {
            record.extend(u64::try_from(time.as_millis()).unwrap_or(u64::MAX).to_be_bytes());
        }
        record.extend(carried.bytes.to_be_bytes());
        record.extend(carried.packets.to_be_bytes());
        record.push(end_reason(ended.reason));
        for name in [&*ended.peer, &*ended.service] {
            // A string is UTF-8 (RFC 7011 §6.1.6), also where it is cut.
            let most = (0..=MOST_NAME.min(name.len())).rev().find(|at| name.is_char_boundary(*at));
            let name = &name.as_bytes()[..most.unwrap_or(0)];
            // At most 64, so it has one byte.
            record.push(name.len() as u8);
            record.extend(name);
        }
        template
    }
}

/// A value of flowEndReason: 1 is idle, 2 goes on, 3 an end that was seen, 4 one that was forced.
fn end_reason(reason: &str) -> u8 {
    match reason {
        "idle" => 1,
        "active" => 2,
        "closed" | "finished" | "reset" => 3,
        _ => 4,
    }
}

/// A message that is being filled.
#[derive(Debug, Default)]
struct Message {
    /// Empty without a record.
    bytes: Vec<u8>,
    /// Where the set begins that gets the next record, and its template.
    set: Option<(usize, u16)>,
    records: u32,
}

impl Message {
    /// Adds a record, if it has room for it.
    fn add(&mut self, template: u16, record: &[u8]) -> bool {
        if self.bytes.is_empty() {
            self.bytes.resize(HEADER, 0);
            self.templates();
        }
        if self.records > 0 && self.bytes.len() + 4 + record.len() > MOST_MESSAGE {
            return false;
        }
        if self.set.is_none_or(|(_, of)| of != template) {
            self.close();
            self.set = Some((self.open(template), template));
        }
        self.bytes.extend(record);
        self.records += 1;
        true
    }

    fn templates(&mut self) {
        let set = self.open(TEMPLATES);
        for (template, addresses, length) in [(IPV4, [8, 12], 4), (IPV6, [27, 28], 16)] {
            let fields = addresses.map(|element| (element, length)).into_iter().chain(FIELDS);
            self.number(template);
            self.number(2 + FIELDS.len() as u16);
            for (element, length) in fields {
                self.number(element);
                self.number(length);
            }
        }
        self.set = Some((set, TEMPLATES));
    }

    fn number(&mut self, number: u16) {
        self.bytes.extend(number.to_be_bytes());
    }

    /// Begins a set; returns where.
    fn open(&mut self, id: u16) -> usize {
        let at = self.bytes.len();
        self.number(id);
        self.number(0);
        at
    }

    /// Ends a set.
    fn close(&mut self) {
        if let Some((at, _)) = self.set.take() {
            let length = (self.bytes.len() - at) as u16;
            self.bytes[at + 2..at + 4].copy_from_slice(&length.to_be_bytes());
        }
    }

    /// Completes the message, which leaves at `now`, after `sequence` records in earlier ones.
    fn complete(&mut self, now: Duration, sequence: u32) -> &[u8] {
        self.close();
        let length = self.bytes.len() as u16;
        // Seconds as RFC 7011 has them, until 2106.
        let seconds = now.as_secs() as u32;
        self.bytes[..2].copy_from_slice(&10_u16.to_be_bytes());
        self.bytes[2..4].copy_from_slice(&length.to_be_bytes());
        self.bytes[4..8].copy_from_slice(&seconds.to_be_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_be_bytes());
        &self.bytes
    }

    fn clear(&mut self) {
        self.bytes.clear();
        (self.set, self.records) = (None, 0);
    }
}

/// Sends messages to a collector.
#[derive(Debug)]
pub(super) struct Exporter {
    collector: SocketAddr,
    socket: UdpSocket,
    /// When the last socket in place of one that had failed was opened.
    reopened: Option<Duration>,
    message: Message,
    record: Vec<u8>,
    /// The records in messages before this one, modulo 2^32.
    sequence: u32,
    counts: Arc<RecordCounts>,
}

/// The shortest time between two sockets that are opened because sending failed.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);

fn socket_to(collector: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = match collector {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    socket.connect(collector)?;
    Ok(socket)
}

impl Exporter {
    pub(super) fn new(collector: SocketAddr, counts: &Arc<RecordCounts>) -> io::Result<Self> {
        Ok(Self {
            collector,
            socket: socket_to(collector)?,
            reopened: None,
            message: Message::default(),
            record: Vec::new(),
            sequence: 0,
            counts: Arc::clone(counts),
        })
    }

    /// Adds a record, and sends those before it if they fill a message.
    ///
    /// # Errors
    /// The kernel's, about the message; it is lost.
    pub(super) fn add(&mut self, ended: &Ended, now: Duration) -> io::Result<()> {
        let mut outcome = Ok(());
        for way in OneWay::all(ended) {
            self.record.clear();
            let template = way.encode(&mut self.record);
            if !self.message.add(template, &self.record) {
                let sent = self.send(now);
                outcome = outcome.and(sent);
                self.message.add(template, &self.record);
            }
        }
        outcome
    }

    /// Sends what waits.
    ///
    /// # Errors
    /// As those of [`Exporter::add`].
    pub(super) fn send(&mut self, now: Duration) -> io::Result<()> {
        if self.message.records == 0 {
            return Ok(());
        }
        let message = self.message.complete(now, self.sequence);
        let sent = match self.socket.send(message) {
            // That was about the message before.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => self.socket.send(message),
            // A connected socket keeps its source address, which the host may have lost.
            Err(error)
                if error.kind() != ErrorKind::WouldBlock
                    && self.reopened.is_none_or(|last| now.abs_diff(last) >= REOPEN_INTERVAL) =>
            {
                self.reopened = Some(now);
                socket_to(self.collector).and_then(|socket| {
                    self.socket = socket;
                    self.socket.send(message)
                })
            }
            sent => sent,
        };
        self.sequence = self.sequence.wrapping_add(self.message.records);
        if sent.is_err() {
            self.counts.note_unsent(self.message.records.into());
        }
        self.message.clear();
        sent.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use dataplane::records::{RecordKind, Span};

    use super::*;

    fn ended(source: Option<&str>, destination: Option<&str>, opened_here: bool) -> Ended {
        let address = |text: &str| text.parse().expect("an address");
        Ended {
            kind: RecordKind::Udp,
            protocol: 17,
            peer: "exit".into(),
            service: "dns".into(),
            opened_here,
            source: source.map(address),
            destination: destination.map(address),
            span: Span {
                began: Duration::from_millis(1_780_000_000_250),
                ended: Duration::from_millis(1_780_000_005_000),
            },
            uplink: Carried { packets: 2, bytes: 1_200 },
            downlink: Carried { packets: 1, bytes: 80 },
            reason: "idle",
        }
    }

    /// The sets of a message: their IDs, and their bytes behind the header.
    fn sets(message: &[u8]) -> Vec<(u16, &[u8])> {
        let number = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
        assert_eq!((number(0), usize::from(number(2))), (10, message.len()));
        let (mut at, mut sets) = (HEADER, Vec::new());
        while at < message.len() {
            let end = at + usize::from(number(at + 2));
            sets.push((number(at), &message[at + 4..end]));
            at = end;
        }
        sets
    }

    #[test]
    fn a_record_is_laid_out_as_its_template_says() {
        let mut message = Message::default();
        let flow = ended(Some("[::ffff:192.0.2.9]:1000"), Some("192.0.2.1:53"), true);
        let mut ways = Vec::new();
        for way in OneWay::all(&flow) {
            let mut record = Vec::new();
            let template = way.encode(&mut record);
            assert!(message.add(template, &record));
            ways.push(record);
        }
        let bytes = message.complete(Duration::from_secs(1_780_000_006), 7).to_vec();
        assert_eq!(bytes[4..12], [1_780_000_006_u32.to_be_bytes(), 7_u32.to_be_bytes()].concat()[..]);
        let sets = sets(&bytes);
        assert_eq!(sets.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [TEMPLATES, IPV4]);
        assert_eq!(sets[1].1, ways.concat());
        let mut there = vec![192, 0, 2, 9, 192, 0, 2, 1, 3, 232, 0, 53, 17];
        there.extend(1_780_000_000_250_u64.to_be_bytes());
        there.extend(1_780_000_005_000_u64.to_be_bytes());
        there.extend([0, 0, 0, 0, 0, 0, 4, 176, 0, 0, 0, 0, 0, 0, 0, 2, 1]);
        there.extend(b"\x04exit\x03dns");
        assert_eq!(ways[0], there);
        // The lengths that the templates declare, with a byte for each length of a name.
        let fixed =
            FIELDS.iter().filter(|(_, length)| *length != VARIABLE).map(|(_, length)| usize::from(*length));
        assert_eq!(there.len(), 2 * 4 + fixed.sum::<usize>() + 2 + "exitdns".len());
    }

    #[test]
    fn the_way_of_bytes_is_that_of_the_client() {
        for (opened_here, asked) in [(true, 1_200), (false, 80)] {
            let flow = ended(None, Some("[2001:db8::1]:53"), opened_here);
            let ways: Vec<_> = OneWay::all(&flow).collect();
            assert_eq!(ways.iter().map(|way| way.to.is_some()).collect::<Vec<_>>(), [true, false]);
            assert_eq!(ways[0].carried.bytes, asked);
            assert_eq!(ways[0].encode(&mut Vec::new()), IPV6);
        }
        let silent = Ended { downlink: Carried::default(), ..ended(None, None, true) };
        assert_eq!(OneWay::all(&silent).count(), 1);
        let nothing = Ended { uplink: Carried::default(), ..silent };
        assert_eq!(OneWay::all(&nothing).count(), 1, "an end without a byte is one, too");
    }

    #[test]
    fn a_name_is_cut_between_characters() {
        for (name, length) in
            [("é".repeat(40), 64), (format!("x{}", "é".repeat(40)), 63), ("x".repeat(65), 64)]
        {
            let flow = Ended { service: name.as_str().into(), ..ended(None, None, true) };
            let mut record = Vec::new();
            OneWay::all(&flow).next().expect("a way").encode(&mut record);
            let at = record.len() - length;
            assert_eq!(usize::from(record[at - 1]), length);
            assert_eq!(str::from_utf8(&record[at..]), Ok(&name[..length]));
        }
    }

    #[test]
    fn messages_are_short_and_numbered_by_their_records() {
        let collector = UdpSocket::bind("127.0.0.1:0").expect("there is a port");
        let mut exporter =
            Exporter::new(collector.local_addr().expect("it is bound"), &Arc::default()).expect("it is made");
        let now = Duration::from_secs(1_780_000_000);
        let long: Arc<str> = "ä".repeat(200).into();
        let mut records = 0;
        for place in 0..100 {
            let at = if place % 3 == 0 { "192.0.2.1:53" } else { "[2001:db8::1]:53" };
            let flow = Ended { service: Arc::clone(&long), ..ended(None, Some(at), true) };
            exporter.add(&flow, now).expect("it is sent");
            records += 2;
        }
        exporter.send(now).expect("it is sent");
        exporter.send(now).expect("there is nothing to be sent");
        collector.set_nonblocking(true).expect("it is a socket");
        let (mut buffer, mut numbers, mut bytes_of_data) = ([0; 2_000], Vec::new(), 0);
        while let Ok(length) = collector.recv(&mut buffer) {
            let message = &buffer[..length];
            assert!(length <= MOST_MESSAGE, "{length}");
            numbers.push(u32::from_be_bytes([message[8], message[9], message[10], message[11]]));
            bytes_of_data += sets(message)
                .iter()
                .filter(|(id, _)| *id != TEMPLATES)
                .map(|(_, data)| data.len())
                .sum::<usize>();
        }
        assert!(numbers.len() > 10 && numbers[0] == 0 && numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
        assert_eq!(exporter.sequence, records);
        let fixed: usize = 13 - 8 + 16 + 16 + 1 + 2 + "exit".len() + MOST_NAME;
        assert_eq!(bytes_of_data, 34 * 2 * (8 + fixed) + 66 * 2 * (32 + fixed));
    }

    #[test]
    fn a_collector_that_is_not_there_costs_its_messages_only() {
        let gone =
            UdpSocket::bind("127.0.0.1:0").expect("there is a port").local_addr().expect("it is bound");
        let counts = Arc::default();
        let mut exporter = Exporter::new(gone, &counts).expect("it is made");
        let mut lost = 0;
        for _ in 0..3 {
            exporter.add(&ended(None, None, true), Duration::ZERO).expect("it is only added");
            // Whether the kernel tells of the one before depends on its timing.
            lost += if exporter.send(Duration::ZERO).is_err() { 2 } else { 0 };
            assert_eq!(counts.unsent(), lost);
            assert_eq!(exporter.message.records, 0);
        }
        assert_eq!(exporter.sequence, 6);
    }
    #[test]
    fn a_socket_that_cannot_send_any_more_is_replaced_once_a_second() {
        let collector = UdpSocket::bind("127.0.0.1:0").expect("there is a port");
        collector.set_nonblocking(true).expect("it is a socket");
        let counts = Arc::default();
        let mut exporter =
            Exporter::new(collector.local_addr().expect("it is bound"), &counts).expect("it is made");
        let mut send = |millis| {
            // As after the loss of its source address, the kernel refuses whatever it is to send.
            exporter.socket = UdpSocket::bind("127.0.0.1:0").expect("there is a port");
            exporter.add(&ended(None, None, true), Duration::ZERO).expect("it is only added");
            let sent = exporter.send(Duration::from_millis(millis)).is_ok();
            (sent, collector.recv(&mut [0; 2_000]).is_ok())
        };
        let start = 1_780_000_000_000;
        assert_eq!(send(start), (true, true));
        assert_eq!(send(start + 999), (false, false));
        assert_eq!(send(start + 1_000), (true, true));
        assert_eq!(send(start - 3_600_000), (true, true), "a clock that goes back delays nothing");
        assert_eq!(counts.unsent(), 2);
    }
}
