//! The PROXY protocol, by which a balancer tells a service who its client is: versions 1 and 2 are read, version 2 is written.
//!
//! <https://www.haproxy.org/download/2.6/doc/proxy-protocol.txt>, §2. What is not needed here is passed over: the rest of a version 1
//! line that says UNKNOWN, the TLVs of version 2, families other than IP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The signature of version 2 (§2.2).
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";

/// The fixed part of a header of version 2: the signature, version and command, family and protocol, the length of the rest.
const FIXED: usize = 16;

/// The longest line of version 1, its end included (§2.1).
const MOST_LINE: usize = 107;

/// The longest header that is taken. §2.2.4 wants room for addresses and TLVs; the largest TLV in use, a client's certificate name, has
/// some hundred bytes.
pub const MOST_HEADER: usize = 4_096;

/// A header of version 2 with the addresses of IPv4, and of IPv6; without addresses it has 16 bytes.
pub const IPV4_HEADER: usize = FIXED + 12;

/// A header with the addresses of IPv6.
pub const IPV6_HEADER: usize = FIXED + 36;

/// Who connected, and to which address: both of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientAddresses {
    source: SocketAddr,
    destination: SocketAddr,
}

impl ClientAddresses {
    /// A client at `source` that connected to `destination`; `None` if these are of two families. What belongs to one host alone, zones
    /// and flow labels, is left out. IPv4 in the form of IPv6 is IPv4 where both addresses are, and stays as it is beside one of IPv6.
    #[must_use]
    pub fn new(source: SocketAddr, destination: SocketAddr) -> Option<Self> {
        let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        let plain = |address: SocketAddr| SocketAddr::new(address.ip(), address.port());
        let both = [(canonical(source), canonical(destination)), (plain(source), plain(destination))];
        let same = both.into_iter().find(|(source, destination)| source.is_ipv4() == destination.is_ipv4());
        same.map(|(source, destination)| Self { source, destination })
    }

    /// Whether the client's address may be that of another host than the one that is told: services trust their own host.
    #[must_use]
    pub fn names_a_host(&self) -> bool {
        let source = self.source.ip().to_canonical();
        !(source.is_loopback() || source.is_unspecified() || source.is_multicast())
    }

    /// The address of the client.
    #[must_use]
    pub fn source(&self) -> SocketAddr {
        self.source
    }

    /// The address to which it connected.
    #[must_use]
    pub fn destination(&self) -> SocketAddr {
        self.destination
    }

    /// The most bytes of [`ClientAddresses::encode`].
    pub const MOST_ENCODED: usize = 1 + 36;

    /// The addresses as contexts have them: 4 or 6 for the family, then as in a header of version 2.
    #[must_use]
    pub(crate) fn encode(&self) -> Encoded {
        let mut encoded = Encoded { bytes: [0; Self::MOST_ENCODED], len: 1 };
        let mut add = |part: &[u8]| {
            let end = encoded.len + part.len();
            encoded.bytes[encoded.len..end].copy_from_slice(part);
            encoded.len = end;
        };
        self.each_part(&mut add);
        encoded.bytes[0] = if self.is_ipv4() { 4 } else { 6 };
        encoded
    }

    /// Reads what [`ClientAddresses::encode`] writes at the beginning of `bytes`; with its length.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, usize)> {
        let (family, rest) = bytes.split_first()?;
        match family {
            4 => Some((addresses::<4>(rest)?, 1 + 12)),
            // Those of IPv4 have a form of their own.
            6 => Some((addresses::<16>(rest).filter(|addresses| !addresses.is_ipv4())?, 1 + 36)),
            _ => None,
        }
    }

    /// Whether both are written as IPv4.
    fn is_ipv4(&self) -> bool {
        self.source.is_ipv4() && self.destination.is_ipv4()
    }

    /// Calls `add` with the parts of the addresses in the order of a header of version 2.
    fn each_part(&self, mut add: impl FnMut(&[u8])) {
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                add(&from.octets());
                add(&to.octets());
            }
            (from, to) => {
                let octets = |ip: IpAddr| match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                    IpAddr::V6(ip) => ip.octets(),
                };
                add(&octets(from));
                add(&octets(to));
            }
        }
        add(&self.source.port().to_be_bytes());
        add(&self.destination.port().to_be_bytes());
    }
}

/// A client's addresses as a context has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoded {
    bytes: [u8; ClientAddresses::MOST_ENCODED],
    len: usize,
}

impl Encoded {
    /// The bytes of the addresses.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// What follows a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A byte stream, as TCP is.
    Stream,
    /// The payload of the same datagram.
    Datagram,
}

/// Why bytes begin with no header that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyError {
    /// They begin otherwise.
    #[error("no PROXY header comes first")]
    Missing,
    /// The header breaks the rules of its version.
    #[error("the PROXY header is malformed")]
    Malformed,
    /// It is longer than [`MOST_HEADER`], or than a line of version 1 may be.
    #[error("the PROXY header is too long")]
    TooLong,
}

/// A header that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Who connected; `None`: the sender itself (LOCAL), or a client of which nothing is known.
    pub client: Option<ClientAddresses>,
    /// The number of bytes of the header.
    pub length: usize,
}

/// Reads the header at the beginning of `bytes`; `None` while more of it has to come.
///
/// # Errors
/// Whatever comes next, it is no header that can be used.
pub fn read(bytes: &[u8], transport: Transport) -> Result<Option<Header>, ProxyError> {
    let begins_like = |whole: &[u8]| {
        let common = bytes.len().min(whole.len());
        bytes[..common] == whole[..common]
    };
    if begins_like(&SIGNATURE) {
        return version_2(bytes, transport);
    }
    if transport == Transport::Stream && begins_like(b"PROXY ") {
        return version_1(bytes);
    }
    Err(ProxyError::Missing)
}

fn version_1(bytes: &[u8]) -> Result<Option<Header>, ProxyError> {
    let Some(end) = bytes.iter().take(MOST_LINE).position(|byte| *byte == b'\n') else {
        return if bytes.len() < MOST_LINE { Ok(None) } else { Err(ProxyError::TooLong) };
    };
    let line = bytes[..end].strip_suffix(b"\r").and_then(|line| str::from_utf8(line).ok());
    let line = line.and_then(|line| line.strip_prefix("PROXY ")).ok_or(ProxyError::Malformed)?;
    let mut words = line.split(' ');
    let client = match words.next() {
        Some("UNKNOWN") => None,
        Some(family @ ("TCP4" | "TCP6")) => {
            let words: Vec<&str> = words.collect();
            let [source, destination, source_port, destination_port] = words[..] else {
                return Err(ProxyError::Malformed);
            };
            let ip = |text: &str| {
                let ip: IpAddr = match family {
                    "TCP4" => text.parse::<Ipv4Addr>().ok()?.into(),
                    _ => text.parse::<Ipv6Addr>().ok()?.into(),
                };
                Some(ip)
            };
            let address = |text, number| Some(SocketAddr::new(ip(text)?, port(number)?));
            let addresses = address(source, source_port).zip(address(destination, destination_port));
            let (source, destination) = addresses.ok_or(ProxyError::Malformed)?;
            ClientAddresses::new(source, destination)
        }
        Some(_) | None => return Err(ProxyError::Malformed),
    };
    Ok(Some(Header { client, length: end + 1 }))
}

/// A port as version 1 writes it: without a sign, and without zeros in front.
fn port(text: &str) -> Option<u16> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| is_plain)
}

fn version_2(bytes: &[u8], transport: Transport) -> Result<Option<Header>, ProxyError> {
    let Some(fixed) = bytes.first_chunk::<FIXED>() else { return Ok(None) };
    let (command, family) = (fixed[12], fixed[13]);
    let rest = usize::from(u16::from_be_bytes([fixed[14], fixed[15]]));
    let length = FIXED + rest;
    if length > MOST_HEADER {
        return Err(ProxyError::TooLong);
    }
    // Version 2 with LOCAL or PROXY; §2.2 wants others dropped.
    let is_local = match command {
        0x20 => true,
        0x21 => false,
        _ => return Err(ProxyError::Malformed),
    };
    let Some(body) = bytes.get(FIXED..length) else { return Ok(None) };
    if is_local {
        return Ok(Some(Header { client: None, length }));
    }
    let wanted = match transport {
        Transport::Stream => 1,
        Transport::Datagram => 2,
    };
    let client = match (family >> 4, family & 15) {
        (0, _) | (3, 1 | 2) => None,
        (1, protocol) if protocol == wanted => Some(addresses::<4>(body).ok_or(ProxyError::Malformed)?),
        (2, protocol) if protocol == wanted => Some(addresses::<16>(body).ok_or(ProxyError::Malformed)?),
        _ => return Err(ProxyError::Malformed),
    };
    Ok(Some(Header { client, length }))
}

/// The addresses of a family whose addresses have `N` bytes; TLVs may follow them.
fn addresses<const N: usize>(body: &[u8]) -> Option<ClientAddresses>
where
    IpAddr: From<[u8; N]>,
{
    let (source, rest) = body.split_first_chunk::<N>()?;
    let (destination, rest) = rest.split_first_chunk::<N>()?;
    let ports = rest.first_chunk::<4>()?;
    let source = SocketAddr::new(IpAddr::from(*source), u16::from_be_bytes([ports[0], ports[1]]));
    let destination = SocketAddr::new(IpAddr::from(*destination), u16::from_be_bytes([ports[2], ports[3]]));
    ClientAddresses::new(source, destination)
}

/// Appends a header of version 2: PROXY with the addresses of a client, or LOCAL without.
pub fn write(client: Option<ClientAddresses>, transport: Transport, out: &mut Vec<u8>) {
    out.extend(SIGNATURE);
    let protocol = match transport {
        Transport::Stream => 1,
        Transport::Datagram => 2,
    };
    let Some(client) = client else {
        out.extend([0x20, 0, 0, 0]);
        return;
    };
    out.extend(if client.is_ipv4() {
        [0x21, 0x10 | protocol, 0, 12]
    } else {
        [0x21, 0x20 | protocol, 0, 36]
    });
    client.each_part(|part| out.extend(part));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn client(source: &str, destination: &str) -> Option<ClientAddresses> {
        ClientAddresses::new(source.parse().unwrap(), destination.parse().unwrap())
    }

    fn stream(bytes: &[u8]) -> Result<Option<Header>, ProxyError> {
        read(bytes, Transport::Stream)
    }

    #[test]
    fn lines_of_version_1_are_read_as_the_specification_has_them() {
        // §2.1 has these.
        let longest = "PROXY TCP6 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 65535 65535\r\n";
        let ones = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535";
        for (line, found) in [
            (
                "PROXY TCP4 255.255.255.255 192.0.2.1 65535 443\r\n",
                client("255.255.255.255:65535", "192.0.2.1:443"),
            ),
            (longest, client(ones, ones)),
            ("PROXY TCP6 ::ffff:192.0.2.1 ::ffff:192.0.2.2 1 2\r\n", client("192.0.2.1:1", "192.0.2.2:2")),
            (
                "PROXY TCP6 ::ffff:192.0.2.1 2001:db8::1 1 2\r\n",
                client("[::ffff:192.0.2.1]:1", "[2001:db8::1]:2"),
            ),
            ("PROXY UNKNOWN\r\n", None),
            ("PROXY UNKNOWN ffff::1 anything at all\r\n", None),
        ] {
            let header = Header { client: found, length: line.len() };
            assert_eq!(stream(line.as_bytes()), Ok(Some(header)), "{line}");
            assert_eq!(stream(format!("{line}GET /").as_bytes()), Ok(Some(header)), "{line} and more");
            for cut in 0..line.len() {
                assert_eq!(stream(&line.as_bytes()[..cut]), Ok(None), "{line} cut to {cut}");
            }
        }
        for bad in [
            "PROXY TCP4 192.0.2.1 192.0.2.2 1 2\n",
            "PROXY TCP4 192.0.2.1 192.0.2.2 1\r\n",
            "PROXY TCP4 192.0.2.1 192.0.2.2 1 2 3\r\n",
            "PROXY TCP4  192.0.2.1 192.0.2.2 1 2\r\n",
            "PROXY TCP4 192.0.2.1 192.0.2.2 01 2\r\n",
            "PROXY TCP4 192.0.2.1 192.0.2.2 +1 2\r\n",
            "PROXY TCP4 192.0.2.1 192.0.2.2 1 65536\r\n",
            "PROXY TCP4 192.0.2.01 192.0.2.2 1 2\r\n",
            "PROXY TCP6 192.0.2.1 192.0.2.2 1 2\r\n",
            "PROXY TCP4 ::1 ::1 1 2\r\n",
            "PROXY UDP4 192.0.2.1 192.0.2.2 1 2\r\n",
            "PROXY  UNKNOWN\r\n",
        ] {
            assert_eq!(stream(bad.as_bytes()), Err(ProxyError::Malformed), "{bad}");
        }
        assert_eq!(stream(b"GET / HTTP/1.1\r\n"), Err(ProxyError::Missing));
        assert_eq!(stream(b"PROXX"), Err(ProxyError::Missing));
        let endless = [&b"PROXY UNKNOWN "[..], &[b'x'; 200]].concat();
        assert_eq!(stream(&endless[..106]), Ok(None));
        assert_eq!(stream(&endless[..107]), Err(ProxyError::TooLong));
        assert_eq!(read(b"PROXY UNKNOWN\r\n", Transport::Datagram), Err(ProxyError::Missing));
    }

    #[test]
    fn headers_of_version_2_are_those_of_the_specification() {
        let v4 = client("192.0.2.1:4660", "198.51.100.2:443");
        let mut bytes = Vec::new();
        write(v4, Transport::Stream, &mut bytes);
        let by_hand = [
            &b"\x0D\x0A\x0D\x0A\x00\x0D\x0A\x51\x55\x49\x54\x0A\x21\x11\x00\x0C"[..],
            &[192, 0, 2, 1, 198, 51, 100, 2, 0x12, 0x34, 0x01, 0xbb],
        ]
        .concat();
        assert_eq!((&bytes, bytes.len()), (&by_hand, IPV4_HEADER));
        assert_eq!(stream(&bytes), Ok(Some(Header { client: v4, length: IPV4_HEADER })));
        assert_eq!(read(&bytes, Transport::Datagram), Err(ProxyError::Malformed), "it says TCP");
        // TLVs are passed over, and LOCAL says nothing whatever it carries.
        let mut tlvs = by_hand.clone();
        tlvs[15] += 5;
        tlvs.extend([0x04, 0, 2, 0, 0]);
        assert_eq!(stream(&tlvs), Ok(Some(Header { client: v4, length: IPV4_HEADER + 5 })));
        tlvs[12] = 0x20;
        assert_eq!(stream(&tlvs), Ok(Some(Header { client: None, length: IPV4_HEADER + 5 })));
        let with = |at: usize, value: u8| {
            let mut changed = by_hand.clone();
            changed[at] = value;
            stream(&changed)
        };
        assert_eq!(with(12, 0x11), Err(ProxyError::Malformed), "version 1 in the form of 2");
        assert_eq!(with(12, 0x22), Err(ProxyError::Malformed), "a command of later");
        assert_eq!(with(13, 0x21), Err(ProxyError::Malformed), "12 bytes are no IPv6 addresses");
        assert_eq!(with(13, 0x12), Err(ProxyError::Malformed), "UDP");
        assert_eq!(with(13, 0x41), Err(ProxyError::Malformed), "a family of later");
        assert_eq!(with(13, 0x00), Ok(Some(Header { client: None, length: IPV4_HEADER })), "UNSPEC");
        assert_eq!(with(14, 0x10), Err(ProxyError::TooLong));
        assert_eq!(with(14, 0x0f), Ok(None), "within the limit, and not there yet");
    }

    #[test]
    fn mixed_families_are_no_client_and_mapped_addresses_are_ipv4() {
        assert_eq!(client("192.0.2.1:1", "[2001:db8::1]:2"), None);
        assert_eq!(client("[::ffff:192.0.2.1]:1", "192.0.2.2:2"), client("192.0.2.1:1", "192.0.2.2:2"));
        // Both are addresses of IPv6, as NAT64 and sockets of both families have them.
        for [from, to] in
            [["[::ffff:192.0.2.1]:1", "[2001:db8::1]:2"], ["[2001:db8::1]:1", "[::ffff:192.0.2.1]:2"]]
        {
            let both = client(from, to);
            assert!(both.is_some_and(|both| both.source() == from.parse().unwrap()), "{from}");
            let mut bytes = Vec::new();
            write(both, Transport::Stream, &mut bytes);
            assert_eq!(stream(&bytes), Ok(Some(Header { client: both, length: IPV6_HEADER })), "{from}");
        }
    }

    fn any_client() -> impl Strategy<Value = Option<ClientAddresses>> {
        let v4 = (any::<[[u8; 4]; 2]>(), any::<[u16; 2]>()).prop_map(|(ips, ports)| {
            ClientAddresses::new((ips[0], ports[0]).into(), (ips[1], ports[1]).into())
        });
        let v6 = (any::<[[u8; 16]; 2]>(), any::<[u16; 2]>()).prop_map(|(ips, ports)| {
            ClientAddresses::new((ips[0], ports[0]).into(), (ips[1], ports[1]).into())
        });
        prop_oneof![Just(None), v4, v6]
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_in_whatever_pieces(client in any_client(), rest: Vec<u8>, is_stream: bool) {
            let transport = if is_stream { Transport::Stream } else { Transport::Datagram };
            let mut bytes = Vec::new();
            write(client, transport, &mut bytes);
            let length = bytes.len();
            bytes.extend(rest);
            prop_assert_eq!(read(&bytes, transport), Ok(Some(Header { client, length })));
            for cut in 0..length {
                prop_assert_eq!(read(&bytes[..cut], transport), Ok(None));
            }
        }

        #[test]
        fn lines_are_read_as_they_are_written(client in any_client()) {
            let Some(client) = client else { return Ok(()) };
            let (source, destination) = (client.source(), client.destination());
            let family = if source.is_ipv4() { 4 } else { 6 };
            let [from, to] = [source.port(), destination.port()];
            let line = format!("PROXY TCP{family} {} {} {from} {to}\r\n", source.ip(), destination.ip());
            prop_assert_eq!(stream(line.as_bytes()), Ok(Some(Header { client: Some(client), length: line.len() })));
        }

        #[test]
        fn any_bytes_keep_the_rules(bytes: Vec<u8>, begins in 0..3_usize) {
            let start: [&[u8]; 3] = [b"", b"PROXY TCP4 ", &[SIGNATURE.as_slice(), &[0x21, 0x11, 0, 12]].concat()];
            crate::properties::proxy_header(&[start[begins], &bytes].concat());
        }
    }
}
