//! What L3 costs per packet, without the copies: cutting a super-packet of 64 KiB, joining its packets again, and finding whose
//! address one is.

use std::{
    hint::black_box,
    net::{IpAddr, Ipv4Addr},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ip::{
    checksum,
    cut::Cut,
    merge::Merger,
    packets::{Packet, PacketDelivery, TunOffload},
    routes::Routes,
    view::IpView,
    vnet::{Gso, VnetHeader},
};
use ipnet::IpNet;
use net::{ReceiveBatch, batch::Meta};

const PAYLOAD: usize = 1388;
const PACKETS: usize = 46;

/// A TCP super-packet of IPv4 with timestamps, and what the kernel says of it.
fn super_packet() -> (VnetHeader, Vec<u8>) {
    let mut packet = vec![1; 52 + PAYLOAD * PACKETS];
    packet[..20].copy_from_slice(&[0x45, 0, 0, 0, 0, 9, 0x40, 0, 64, 6, 0, 0, 10, 9, 0, 1, 10, 9, 1, 1]);
    let total = packet.len() as u16;
    packet[2..4].copy_from_slice(&total.to_be_bytes());
    (packet[32], packet[33]) = (0x80, 0x10);
    let vnet = VnetHeader {
        needs_checksum: true,
        gso: Gso::Tcp4,
        gso_ecn: false,
        header_len: 52,
        gso_size: PAYLOAD as u16,
        checksum_start: 20,
        checksum_offset: 16,
        tunnel: None,
    };
    (vnet, packet)
}

fn cut(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("cut");
    group.throughput(Throughput::Elements(PACKETS as u64));
    for (name, completes) in [("partial", true), ("complete", false)] {
        let (vnet, mut packet) = super_packet();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let view = IpView::super_packet(&packet).expect("a packet");
                let cut = Cut::new(&vnet, &mut packet, &view, completes).expect("a super-packet");
                let mut header = [0; 52];
                for index in 0..cut.count() {
                    header.copy_from_slice(cut.header());
                    cut.complete_header(&mut header, index, &cut.payload()[cut.range(index)]);
                    black_box(&header);
                }
            });
        });
    }
    group.finish();
}

fn merge(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("merge");
    group.throughput(Throughput::Elements(PACKETS as u64));
    for (name, partial, alike) in
        [("push_alike", true, true), ("push", true, false), ("push_alike verified", false, true)]
    {
        let (vnet, mut packet) = super_packet();
        let view = IpView::super_packet(&packet).expect("a packet");
        let cut = Cut::new(&vnet, &mut packet, &view, partial).expect("a super-packet");
        let (mut buffer, mut ranges) = (vec![0; 1 << 17], Vec::new());
        let mut at = 0;
        for index in 0..cut.count() {
            at += 30;
            let len = cut.write(index, &mut buffer[at..]);
            ranges.push(at..at + len);
            at += len;
        }
        let mut batch = ReceiveBatch::new(1, at);
        assert!(batch.push(Meta::EMPTY, &buffer[..at]));
        let (mut merger, mut list) = (Merger::default(), PacketDelivery::default());
        let offload = TunOffload { tcp: true, udp: true, ..TunOffload::default() };
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                merger.clear();
                list.clear();
                for range in &ranges {
                    let packet = Packet { slot: 0, range: range.clone(), partial, owner: 1 };
                    if alike && merger.try_join(&mut list, &batch, &packet) {
                        continue;
                    }
                    let view = IpView::parse(&batch.buffer(0)[range.clone()]).expect("a packet");
                    merger.push(&mut list, &mut batch, packet, &view, offload);
                }
                // The 46th would make it longer than 65,535 bytes.
                assert!(list.messages().len() <= 2);
            });
        });
    }
    group.finish();
}

fn view(criterion: &mut Criterion) {
    let (_, packet) = super_packet();
    criterion.bench_function("view", |bencher| {
        bencher.iter(|| IpView::super_packet(black_box(&packet)));
    });
    let view = IpView::super_packet(&packet).expect("a packet");
    criterion.bench_function("flow_hash", |bencher| bencher.iter(|| black_box(&view).flow_hash()));
    criterion.bench_function("sum of 1440 bytes", |bencher| {
        bencher.iter(|| checksum::sum(black_box(&packet[..1440])));
    });
}

/// Whose an address is: always the same one, as in a stream, and another one each time, anywhere in the table.
fn routes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("routes");
    for count in [10, 1_000, 10_000_u32] {
        let address = |index: u32| Ipv4Addr::from_bits(0x0a00_0000 + (index << 8));
        let prefix = |index| IpNet::new(address(index).into(), 24).expect("a prefix");
        let table: Routes<u32> = (0..count).map(|index| (prefix(index), index % 4)).collect();
        let one = IpAddr::from(address(count / 2));
        group.bench_function(BenchmarkId::new("one", count), |bencher| {
            bencher.iter(|| table.lookup(black_box(one)));
        });
        let mut index = 0;
        group.bench_function(BenchmarkId::new("any", count), |bencher| {
            bencher.iter(|| {
                // 7919 is a prime, which visits all of them.
                index = (index + 7919) % count;
                table.lookup(address(index).into())
            });
        });
    }
    group.finish();
}

criterion_group!(benches, view, cut, merge, routes);
criterion_main!(benches);
