//! Packets through the device.

use std::{
    future::poll_fn,
    net::{SocketAddr, UdpSocket},
    rc::Rc,
    task::Poll,
    time::Duration,
};

use base::clock::SystemClock;
use culvert_tests::random::Random;
use ip::{
    packets::{PacketDelivery, TunOffload},
    vnet::{Gso, VnetHeader},
};
use net::{
    Net, Ready, ReceiveBatch, SendOutcome, Token, TunQueue, batch::Meta, kernel::KernelNet, ports::Ports,
    tun::TunPort,
};

use crate::{
    Space, config, gone, open,
    packets::{self, Checksum},
    tun, until,
};

/// How long a test waits for the kernel before it fails.
const PATIENCE: Duration = Duration::from_secs(10);

/// A worker's view of its queue.
pub(crate) struct Queue {
    pub(crate) queue: Box<dyn TunQueue>,
    ready: Ready,
    batch: ReceiveBatch,
    headers: Vec<VnetHeader>,
}

impl Queue {
    /// Within a runtime.
    pub(crate) fn new(port: TunPort) -> Self {
        let ready = Ready::default();
        let net = KernelNet::new(ready.clone(), Rc::new(SystemClock), Ports::default());
        let queue = net.with_tun(Some(port)).tun(Token(1)).unwrap().unwrap();
        Self { queue, ready, batch: ReceiveBatch::default(), headers: Vec::new() }
    }

    /// Reads once, waiting until there is something.
    pub(crate) async fn read(&mut self) -> Vec<(VnetHeader, Vec<u8>)> {
        let read = poll_fn(|context| {
            self.ready.register(context.waker());
            self.ready.drain(&mut Vec::new());
            match self.queue.receive(&mut self.batch, &mut self.headers, usize::MAX) {
                Ok(()) => Poll::Ready(()),
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
                    Poll::Pending
                }
            }
        });
        tokio::time::timeout(PATIENCE, read).await.expect("nothing came");
        assert_eq!(self.headers.len(), self.batch.len());
        let packets = (0..self.batch.len()).map(|index| self.batch.buffer(index).to_vec());
        self.headers.iter().copied().zip(packets).collect()
    }

    /// The next packet of a protocol; the kernel says things of its own, too.
    async fn next(&mut self, wanted: impl Fn(&[u8]) -> bool) -> (VnetHeader, Vec<u8>) {
        loop {
            if let Some(found) = self.read().await.into_iter().find(|(_, packet)| wanted(packet)) {
                return found;
            }
        }
    }

    /// Writes a message with an own header, and a payload in pieces of `piece` bytes.
    fn write(&mut self, vnet: VnetHeader, header: &[u8], payload: &[u8], piece: usize) -> SendOutcome {
        let mut batch = ReceiveBatch::new(64, 65_536);
        let mut list = PacketDelivery::default();
        let place = list.begin(vnet, 7, header);
        for (slot, piece) in payload.chunks(piece).enumerate() {
            // Not at the start of its buffer.
            assert!(batch.push(Meta::EMPTY, &[b"before", piece].concat()));
            list.add(place, slot, 6..6 + piece.len());
        }
        let mut outcomes = Vec::new();
        self.queue.deliver(&batch, &mut list, &mut |message, outcome| {
            assert_eq!(message.owner, 7);
            outcomes.push(outcome);
        });
        assert!(list.is_empty());
        assert_eq!(outcomes.len(), 1);
        outcomes[0]
    }
}

pub(crate) fn in_runtime<T>(run: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run)
}

pub(crate) fn socket(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

fn is_l4(protocol: u8) -> impl Fn(&[u8]) -> bool {
    move |packet| match packet[0] >> 4 {
        4 => packet[9] == protocol,
        _ => packet[6] == protocol,
    }
}

const ADDRESSES: &str = "10.9.0.1/24 fd09::1/64";

/// (here, beyond the tunnel) of both families.
const PAIRS: [(&str, &str); 2] = [("10.9.0.1:5000", "10.9.0.2:6000"), ("[fd09::1]:5000", "[fd09::2]:6000")];

#[test]
fn datagrams_go_in_and_out_with_and_without_offload() {
    let Some(space) = Space::new("a TUN device") else { return };
    for offload in [true, false] {
        space.place().enter(|| {
            in_runtime(async {
                let mut tun = tun("culvert7", ADDRESSES);
                tun.offload = offload;
                let (tunnel, ports) = open(&config(""), &tun, 1).unwrap();
                let mut queue = Queue::new(ports.into_iter().next().unwrap());
                // Without multi-queue or USO on an old kernel there is less.
                assert_eq!(queue.queue.offload().tcp, offload);
                // The kernel takes an IPv6 address into use a moment after it was set.
                until(&space, "-6 route show table local dev culvert7 to fd09::1", |said| !said.is_empty());
                for (here, beyond) in PAIRS {
                    let own = UdpSocket::bind(here).unwrap();
                    own.set_read_timeout(Some(PATIENCE)).unwrap();
                    own.send_to(b"out", beyond).unwrap();
                    let (vnet, packet) = queue.next(is_l4(17)).await;
                    assert_eq!(vnet.gso, Gso::None);
                    assert_eq!(packets::payload(&packet, !vnet.needs_checksum), b"out");
                    let (packet, _) = packets::udp(socket(beyond), socket(here), b"in", Checksum::Complete);
                    assert_eq!(queue.queue.send(&packet), SendOutcome::Sent);
                    let mut buffer = [0; 10];
                    assert_eq!(own.recv_from(&mut buffer).unwrap(), (2, socket(beyond)));
                }
                let stats = queue.queue.stats();
                assert_eq!(
                    (stats.writes, stats.write_errors, stats.write_bytes),
                    (2, 0, 30 + 50),
                    "{stats:?}"
                );
                drop(tunnel);
            });
        });
        gone(&space, "culvert7");
    }
}

#[test]
fn every_kind_of_super_packet_is_taken_and_arrives_cut() {
    let Some(space) = Space::new("super-packets into a TUN device") else { return };
    space.set("net/ipv4/ip_forward", "1");
    space.set("net/ipv6/conf/all/forwarding", "1");
    let mut random = Random::new(20);
    let payload = random.bytes(10_000);
    const SIZE: usize = 1_200;
    space.place().enter(|| {
        in_runtime(async {
            let config = config("");
            let (_first, ports) = open(&config, &tun("culvert7", ADDRESSES), 1).unwrap();
            let mut written = Queue::new(ports.into_iter().next().unwrap());
            // What leaves there has been cut by the kernel, and all of its checksums are complete.
            let mut plain = tun("culvert8", "10.8.0.1/24 fd08::1/64");
            plain.offload = false;
            let (_second, ports) = open(&config, &plain, 1).unwrap();
            let mut read = Queue::new(ports.into_iter().next().unwrap());
            for (from, to) in [("10.9.0.2:5", "10.8.0.2:6"), ("[fd09::2]:5", "[fd08::2]:6")] {
                let (from, to) = (socket(from), socket(to));
                let tcp = packets::tcp(from, to, 77, &payload, Checksum::Partial);
                let gso = if from.is_ipv4() { Gso::Tcp4 } else { Gso::Tcp6 };
                let udp = packets::udp(from, to, &payload, Checksum::Partial);
                let mut kinds = vec![(tcp, gso, 6, 20, 16)];
                if written.queue.offload().udp {
                    kinds.push((udp, Gso::Udp, 17, 8, 6));
                }
                for ((packet, headers), gso, protocol, l4_header, checksum_offset) in kinds {
                    let vnet = VnetHeader {
                        needs_checksum: true,
                        gso,
                        gso_ecn: false,
                        header_len: headers as u16,
                        gso_size: SIZE as u16,
                        checksum_start: (headers - l4_header) as u16,
                        checksum_offset,
                        tunnel: None,
                    };
                    let (header, payload) = packet.split_at(headers);
                    assert_eq!(written.write(vnet, header, payload, SIZE), SendOutcome::Sent, "{gso:?}");
                    let mut arrived = Vec::new();
                    while arrived.len() < payload.len() {
                        for (_, packet) in read.read().await {
                            if is_l4(protocol)(&packet) {
                                assert!(packet.len() <= headers + SIZE);
                                arrived.extend(packets::payload(&packet, true));
                            }
                        }
                    }
                    assert_eq!(arrived, payload, "{gso:?}, seed {}", random.seed);
                }
            }
            let stats = written.queue.stats();
            assert_eq!((stats.write_super, stats.write_errors), (stats.writes, 0), "{stats:?}");
        });
    });
}

#[test]
fn what_the_kernel_would_cut_and_sum_up_is_handed_over_whole() {
    let Some(space) = Space::new("super-packets from a TUN device") else { return };
    space.set("net/ipv4/ip_forward", "1");
    let mut random = Random::new(21);
    let payload = random.bytes(10_000);
    space.place().enter(|| {
        in_runtime(async {
            let config = config("");
            let (_first, ports) = open(&config, &tun("culvert7", "10.9.0.1/24"), 1).unwrap();
            let mut written = Queue::new(ports.into_iter().next().unwrap());
            let (_second, ports) = open(&config, &tun("culvert8", "10.8.0.1/24"), 1).unwrap();
            let mut read = Queue::new(ports.into_iter().next().unwrap());
            let (from, to) = (socket("10.9.0.2:5"), socket("10.8.0.2:6"));
            let (packet, headers) = packets::tcp(from, to, 77, &payload, Checksum::Partial);
            let vnet = VnetHeader {
                needs_checksum: true,
                gso: Gso::Tcp4,
                header_len: headers as u16,
                gso_size: 1_200,
                checksum_start: 20,
                checksum_offset: 16,
                ..VnetHeader::default()
            };
            assert_eq!(written.write(vnet, &packet[..headers], &payload, 1_200), SendOutcome::Sent);
            let (vnet, packet) = read.next(is_l4(6)).await;
            assert_eq!((vnet.gso, vnet.gso_size, vnet.needs_checksum), (Gso::Tcp4, 1_200, true));
            assert_eq!((vnet.checksum_start, vnet.checksum_offset), (20, 16));
            assert_eq!(packets::payload(&packet, false), payload, "seed {}", random.seed);
            assert_eq!(read.queue.stats().read_super, 1);
            // A single packet whose checksum the kernel completes, and then the receiver does.
            let (packet, _) = packets::udp(from, to, b"single", Checksum::Partial);
            let vnet = VnetHeader {
                needs_checksum: true,
                checksum_start: 20,
                checksum_offset: 6,
                ..VnetHeader::default()
            };
            assert_eq!(written.write(vnet, &[], &packet, 10), SendOutcome::Sent);
            let (vnet, packet) = read.next(is_l4(17)).await;
            assert_eq!(packets::payload(&packet, !vnet.needs_checksum), b"single");
        });
    });
}

#[test]
fn each_worker_has_a_queue_and_a_device_that_is_down_refuses() {
    let Some(space) = Space::new("queues of a TUN device") else { return };
    let mut others = Vec::new();
    space.place().enter(|| {
        in_runtime(async {
            let (tunnel, ports) = open(&config(""), &tun("culvert7", ADDRESSES), 3).unwrap();
            let mut queues: Vec<Queue> = ports.into_iter().map(Queue::new).collect();
            assert_eq!(queues.len(), 3);
            let offload = queues[0].queue.offload();
            assert_eq!(offload, TunOffload { tcp: true, ..offload });
            let own = UdpSocket::bind("10.9.0.1:5000").unwrap();
            own.set_read_timeout(Some(PATIENCE)).unwrap();
            // The kernel answers on the queue from which the other direction came.
            for queue in &mut queues {
                let (beyond, here) = (socket("10.9.0.2:6000"), socket("10.9.0.1:5000"));
                let (packet, _) = packets::udp(beyond, here, b"in", Checksum::Complete);
                assert_eq!(queue.queue.send(&packet), SendOutcome::Sent);
                assert_eq!(own.recv_from(&mut [0; 9]).unwrap().0, 2);
                own.send_to(b"out", beyond).unwrap();
                let (_, packet) = queue.next(is_l4(17)).await;
                assert_eq!(packets::payload(&packet, false), b"out");
            }
            space.ip("link set culvert7 down");
            let outcome = queues[0].queue.send(&[0x45; 40]);
            assert_eq!(outcome, SendOutcome::Failed(net::SendFailure::Unreachable));
            others.push(tunnel);
        });
    });
}
