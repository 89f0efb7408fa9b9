use proptest::prelude::*;

use super::*;
use crate::{
    cut::Cut,
    model::Recipe,
    packets::TunnelOffload,
    properties::{self, written},
};

const ALL: TunOffload = TunOffload { tcp: true, udp: true, tunnels: TunnelOffload::ALL };

/// A batch with one packet in each buffer, and what has been listed of it.
struct Fixture {
    batch: Vec<Vec<u8>>,
    list: PacketDelivery,
    merger: Merger,
}

impl Fixture {
    fn new(packets: &[Vec<u8>]) -> Self {
        Self { batch: packets.to_vec(), list: PacketDelivery::default(), merger: Merger::default() }
    }

    /// Lists every packet, with a view or, where it is possible, without; returns how many each message has.
    fn push_all(&mut self, partial: bool, offload: TunOffload, same_flow: bool) -> Vec<u16> {
        for slot in 0..self.batch.len() {
            let range = 0..self.batch.bytes(slot).len();
            let packet = Packet { slot, range, partial, owner: 1 };
            if same_flow && self.merger.try_join(&mut self.list, &self.batch, &packet) {
                continue;
            }
            let view = IpView::parse(self.batch.bytes(slot)).unwrap();
            let (list, batch) = (&mut self.list, &mut self.batch);
            self.merger.push(list, batch, packet, &view, offload);
        }
        self.list.messages().iter().map(|message| message.packets).collect()
    }
}

/// `count` packets that follow each other, the last of them `last` bytes long.
fn stream(recipe: Recipe, count: usize, last: usize) -> Vec<Recipe> {
    (0..count)
        .map(|index| Recipe {
            sequence: recipe.sequence.wrapping_add((index * recipe.payload) as u32),
            id: recipe.id.wrapping_add(index as u16),
            payload: if index + 1 == count { last } else { recipe.payload },
            fill: index as u8,
            ..recipe
        })
        .collect()
}

fn counts(recipes: &[Recipe]) -> Vec<u16> {
    let [with_views, without, complete] =
        [(true, false), (true, true), (false, true)].map(|(partial, same_flow)| {
            let packets: Vec<Vec<u8>> = recipes
                .iter()
                .map(|recipe| if partial { recipe.partial() } else { recipe.complete() })
                .collect();
            let mut fixture = Fixture::new(&packets);
            let counts = fixture.push_all(partial, ALL, same_flow);
            let sorted = |mut packets: Vec<Vec<u8>>| {
                packets.sort();
                packets
            };
            let written = written(&fixture.list, &fixture.batch, ALL).into_iter().map(|(_, packet)| packet);
            let came: Vec<Vec<u8>> = recipes.iter().map(Recipe::complete).collect();
            assert_eq!(sorted(written.collect()), sorted(came));
            counts
        });
    assert_eq!((&with_views, &with_views), (&without, &complete));
    with_views
}

#[test]
fn the_packets_of_a_flow_become_one() {
    for ipv6 in [false, true] {
        for recipe in [Recipe::TCP, Recipe::UDP] {
            let recipe = Recipe { ipv6, ..recipe };
            assert_eq!(counts(&stream(recipe, 40, 100)), [40]);
            assert_eq!(counts(&stream(recipe, 40, 7)), [40], "the last may be shorter");
            assert_eq!(counts(&stream(recipe, 3, 101)), [2, 1], "but not longer");
            let wraps = Recipe { sequence: u32::MAX - 150, id: u16::MAX, ..recipe };
            assert_eq!(counts(&stream(wraps, 4, 100)), [4]);
        }
    }
}

#[test]
fn a_message_stays_below_the_bounds() {
    assert_eq!(counts(&stream(Recipe::UDP, 70, 100)), [64, 6]);
    // 52 + 45 × 1440 = 64,852 bytes.
    assert_eq!(counts(&stream(Recipe { payload: 1440, ..Recipe::TCP }, 46, 1440)), [45, 1]);
    assert_eq!(counts(&stream(Recipe { payload: 1, ..Recipe::TCP }, 1100, 1)), [1022, 78]);
    let exact = Recipe { payload: 65_483 / 3, ..Recipe::TCP };
    assert_eq!(counts(&stream(exact, 3, exact.payload)), [3]);
}

#[test]
fn what_differs_begins_anew() {
    let changes: [fn(&mut Recipe); 9] = [
        |packet| packet.sequence += 1,
        |packet| packet.sequence -= 100,
        |packet| packet.window += 1,
        |packet| packet.traffic_class = 3,
        |packet| packet.tcp_options = 8,
        |packet| packet.flags = 0x11,
        |packet| packet.flags = 0x12,
        |packet| packet.payload = 0,
        |packet| packet.id += 1,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut packets = stream(Recipe { dont_fragment: false, ..Recipe::TCP }, 5, 100);
        change(&mut packets[2]);
        assert_eq!(counts(&packets), [2, 1, 2], "change {index}");
    }
}

#[test]
fn a_push_ends_a_message() {
    let mut packets = stream(Recipe::TCP, 5, 100);
    packets[2].flags = 0x18;
    assert_eq!(counts(&packets), [3, 2]);
    packets[0].flags = 0x18;
    assert_eq!(counts(&packets), [1, 2, 2]);
}

#[test]
fn identifications_count_up_or_mean_nothing() {
    let same = |dont_fragment: bool| {
        let packets = stream(Recipe { dont_fragment, ..Recipe::UDP }, 3, 100);
        let packets: Vec<Vec<u8>> =
            packets.into_iter().map(|recipe| Recipe { id: 5, ..recipe }.partial()).collect();
        Fixture::new(&packets).push_all(true, ALL, true)
    };
    assert_eq!(same(true), [3]);
    assert_eq!(same(false), [1, 1, 1]);
    assert_eq!(counts(&stream(Recipe { dont_fragment: false, ..Recipe::UDP }, 3, 100)), [3]);
}

#[test]
fn interleaved_flows_are_joined_each_for_itself() {
    let streams: Vec<Vec<Recipe>> =
        (0..9).map(|flow| stream(Recipe { flow, ..Recipe::TCP }, 4, 100)).collect();
    let interleaved = |flows: usize| -> Vec<Recipe> {
        (0..4).flat_map(|index| streams[..flows].iter().map(move |stream| stream[index])).collect()
    };
    assert_eq!(counts(&interleaved(8)), [4; 8]);
    // One more than is kept: order is kept all the same, which `counts` has seen.
    assert!(counts(&interleaved(9)).len() > 9);
}

#[test]
fn other_owners_checksums_and_kinds_are_not_mixed() {
    let packets: Vec<Vec<u8>> = stream(Recipe::UDP, 4, 100).iter().map(Recipe::complete).collect();
    let mut fixture = Fixture::new(&packets);
    for (slot, owner) in [(0, 1), (1, 1), (2, 2), (3, 1)] {
        let packet = Packet { slot, range: 0..packets[slot].len(), partial: false, owner };
        let view = IpView::parse(&packets[slot]).unwrap();
        let Fixture { batch, list, merger } = &mut fixture;
        if slot > 0 && merger.try_join(list, batch, &packet) {
            continue;
        }
        merger.push(list, batch, packet, &view, ALL);
    }
    let listed: Vec<(u32, u16)> =
        fixture.list.messages().iter().map(|message| (message.owner, message.packets)).collect();
    assert_eq!(listed, [(1, 2), (2, 1), (1, 1)]);

    let broken = |at: usize| {
        let mut packets = packets.clone();
        *packets[at].last_mut().unwrap() ^= 1;
        Fixture::new(&packets).push_all(false, ALL, true)
    };
    assert_eq!(broken(0), [1, 3], "a wrong checksum stays wrong");
    assert_eq!(broken(1), [1, 1, 2]);
    assert_eq!(broken(3), [3, 1]);
    let mut none = packets.clone();
    for packet in &mut none {
        packet[26..28].fill(0);
    }
    assert_eq!(Fixture::new(&none).push_all(false, ALL, true), [1; 4], "UDP without checksums");
}

#[test]
fn what_the_device_cannot_take_is_not_written() {
    let udp: Vec<Vec<u8>> = stream(Recipe::UDP, 3, 100).iter().map(Recipe::partial).collect();
    let tcp: Vec<Vec<u8>> = stream(Recipe::TCP, 3, 100).iter().map(Recipe::partial).collect();
    let no_udp = TunOffload { udp: false, ..ALL };
    assert_eq!(Fixture::new(&udp).push_all(true, no_udp, true), [1; 3]);
    assert_eq!(Fixture::new(&tcp).push_all(true, no_udp, true), [3]);
    for packets in [udp, tcp] {
        let mut fixture = Fixture::new(&packets);
        let nothing = TunOffload::default();
        assert_eq!(fixture.push_all(true, nothing, true), [1; 3]);
        for (_, packet) in written(&fixture.list, &fixture.batch, nothing) {
            let view = IpView::parse(&packet).unwrap();
            let pseudo = checksum::pseudo_header(view.source, view.destination, view.protocol);
            let covered = &packet[view.transport_at..];
            let sum = u64::from(pseudo) + u64::from(checksum::sum(covered)) + covered.len() as u64;
            assert_eq!(checksum::fold(sum), 0xffff);
        }
    }
}

#[test]
fn a_cleared_merger_joins_nothing_that_was() {
    let packets: Vec<Vec<u8>> = stream(Recipe::TCP, 2, 100).iter().map(Recipe::partial).collect();
    let Fixture { mut batch, mut list, mut merger } = Fixture::new(&packets);
    let view = IpView::parse(&packets[0]).unwrap();
    let packet = |slot: usize| Packet { slot, range: 0..packets[slot].len(), partial: true, owner: 1 };
    merger.push(&mut list, &mut batch, packet(0), &view, ALL);
    merger.clear();
    assert!(!merger.try_join(&mut list, &batch, &packet(1)));
    assert_eq!(list.messages().len(), 1);
}

impl Fixture {
    /// Whether the packet in `slot` continues a flow.
    fn try_join(&mut self, slot: usize) -> bool {
        let packet = Packet { slot, range: 0..self.batch[slot].len(), partial: true, owner: 1 };
        self.merger.try_join(&mut self.list, &self.batch, &packet)
    }
}

#[test]
fn without_a_view_a_packet_joins_any_flow_that_it_continues() {
    let streams = [1, 2].map(|flow| stream(Recipe { flow, ..Recipe::TCP }, 3, 100));
    let packets: Vec<Vec<u8>> =
        (0..3).flat_map(|index| streams.each_ref().map(|stream| stream[index].partial())).collect();
    let mut fixture = Fixture::new(&packets[..2]);
    fixture.push_all(true, ALL, false);
    fixture.batch = packets;
    assert!((2..6).all(|slot| fixture.try_join(slot)));
}

#[test]
fn flows_that_begin_when_all_places_are_taken_take_different_ones() {
    let streams: Vec<Vec<Recipe>> =
        (0..11).map(|flow| stream(Recipe { flow, ..Recipe::TCP }, 2, 100)).collect();
    let first: Vec<Vec<u8>> = streams.iter().map(|stream| stream[0].partial()).collect();
    let mut fixture = Fixture::new(&first);
    assert_eq!(fixture.push_all(true, ALL, false), [1; 11]);
    fixture.batch = streams.iter().map(|stream| stream[1].partial()).collect();
    let joined: Vec<bool> = (0..11).map(|slot| fixture.try_join(slot)).collect();
    assert_eq!(joined.iter().filter(|joined| **joined).count(), FLOWS);
    assert_eq!(joined[8..], [true; 3], "the latest ones are kept");
}

#[test]
fn a_packet_without_payload_takes_no_flows_place() {
    let mut packets: Vec<Recipe> = (0..8).map(|flow| Recipe { flow, ..Recipe::TCP }).collect();
    packets.push(Recipe { flow: 8, payload: 0, ..Recipe::TCP });
    packets.extend((0..8).map(|flow| stream(Recipe { flow, ..Recipe::TCP }, 2, 100)[1]));
    assert_eq!(counts(&packets), [&[2; 8][..], &[1]].concat());
}

#[test]
fn flows_of_the_same_hosts_are_told_apart_by_ports_and_protocol() {
    let first = stream(Recipe::TCP, 2, 100);
    let other_ports = first.iter().map(|recipe| {
        let mut packet = recipe.partial();
        packet[21] ^= 1;
        packet
    });
    let other_protocol = stream(Recipe::UDP, 2, 100).into_iter().map(|recipe| recipe.partial());
    let others: [Vec<Vec<u8>>; 2] = [other_ports.collect(), other_protocol.collect()];
    for other in others {
        let packets: Vec<Vec<u8>> =
            first.iter().zip(&other).flat_map(|(recipe, other)| [recipe.partial(), other.clone()]).collect();
        assert_eq!(Fixture::new(&packets).push_all(true, ALL, false), [2, 2]);
    }
}

#[test]
fn a_fragment_is_not_overtaken_by_packets_of_its_hosts_and_stops_no_others() {
    for (flow, expected) in [(1, [1, 1, 1].as_slice()), (2, &[2, 1])] {
        let [one, two] = stream(Recipe::UDP, 2, 100).try_into().unwrap();
        let mut fragment = Recipe { flow, ..Recipe::UDP }.partial();
        fragment[7] = 8;
        let packets = [one.partial(), fragment, two.partial()];
        assert_eq!(Fixture::new(&packets).push_all(true, ALL, false), expected, "flow {flow}");
    }
}

#[test]
fn a_header_with_options_is_not_joined_whatever_stands_in_its_fields() {
    // An identification that could be taken for the length of an IPv6 packet, and another one.
    for id in [108, 7] {
        let packet = Recipe { ip_options: 8, id, ..Recipe::UDP }.partial();
        assert_eq!(Fixture::new(&[packet.clone(), packet]).push_all(true, ALL, true), [1, 1], "{id}");
    }
}

#[test]
fn the_longest_packet_is_filled_to_its_last_byte() {
    let recipe = Recipe { payload: 21_828, ..Recipe::TCP };
    assert_eq!(32 + 20 + 2 * 21_828 + 21_827, MOST_PACKET);
    assert_eq!(counts(&stream(recipe, 3, 21_827)), [3]);
    assert_eq!(counts(&stream(recipe, 3, 21_828)), [2, 1]);
}

#[test]
fn a_packet_that_differs_in_one_field_or_says_something_wrong_is_not_joined() {
    for (ipv6, recipe) in
        [false, true].into_iter().flat_map(|ipv6| [(ipv6, Recipe::TCP), (ipv6, Recipe::UDP)])
    {
        let recipe = Recipe { ipv6, ..recipe };
        let ip = recipe.transport_at();
        let [one, two] = stream(recipe, 2, 100).try_into().unwrap();
        let joins = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut fixture = Fixture::new(&[one.partial()]);
            fixture.push_all(true, ALL, false);
            let mut packet = two.partial();
            change(&mut packet);
            fixture.batch.push(packet);
            fixture.try_join(1)
        };
        assert!(joins(&|_| {}));
        // A bit of: the lengths and checksums of the headers; the acknowledgement and the urgent pointer.
        let ip_fields: &[usize] = if ipv6 { &[5] } else { &[3, 11] };
        let l4_fields: &[usize] = if recipe.protocol == TCP { &[8, 17, 18] } else { &[5, 7] };
        for at in ip_fields.iter().copied().chain(l4_fields.iter().map(|at| ip + at)) {
            assert!(!joins(&|packet| packet[at] ^= 1), "{recipe:?}: byte {at}");
        }
        // Words that change places leave every sum as it is.
        let addresses = if ipv6 { 8..40 } else { 12..20 };
        for at in addresses.step_by(4) {
            let swap = |packet: &mut Vec<u8>| {
                packet.swap(at, at + 2);
                packet.swap(at + 1, at + 3);
            };
            let mut swapped = two.partial();
            swap(&mut swapped);
            assert!(swapped == two.partial() || !joins(&swap), "{recipe:?}: addresses at {at}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_packets_are_written_as_they_came(how: u8, recipes in prop::collection::vec(any::<[u8; 8]>(), 0..60)) {
        properties::ip_merge(&[&[how][..], recipes.as_flattened()].concat());
    }

    /// With little that keeps packets from being joined.
    #[test]
    fn flows_with_nothing_special_are_written_as_they_came(
        how in 0u8..4, flows in 1u8..9, recipes in prop::collection::vec((any::<u8>(), 0u8..14, 0u8..31, any::<u8>()), 0..200),
        special in any::<[u8; 8]>(), at in 0usize..200,
    ) {
        let mut input = vec![how << 6 | how];
        for (flow, size, flags, fill) in recipes {
            input.extend([(flow % flows) | 0x20, size, 0, flags, 0, 100, 0, fill]);
        }
        if let Some(target) = input.get_mut(1 + at * 8..).and_then(|rest| rest.first_chunk_mut()) {
            *target = special;
        }
        properties::ip_merge(&input);
    }

    #[test]
    fn what_was_cut_is_put_together_again(
        ipv6: bool, tcp: bool, push: bool, payload in 2usize..60_000, packets in 2usize..64, tcp_options in 0usize..11,
        (sequence, id, fill) in any::<(u32, u16, u8)>(), completes: bool,
    ) {
        let gso_size = payload.div_ceil(packets);
        prop_assume!(payload > gso_size);
        let protocol = if tcp { TCP } else { UDP };
        let flags = if push { 0x18 } else { 0x10 };
        let recipe = Recipe { ipv6, protocol, flags, payload, tcp_options: tcp_options * 4, sequence, id, fill, ..Recipe::TCP };
        let (vnet, original) = recipe.super_packet(gso_size as u16);
        let (mut read, view) = (original.clone(), IpView::super_packet(&original).unwrap());
        let cut = Cut::new(&vnet, &mut read, &view, completes).unwrap();
        let packets: Vec<Vec<u8>> = (0..cut.count())
            .map(|index| {
                let mut packet = vec![0; cut.largest()];
                let len = cut.write(index, &mut packet);
                packet.truncate(len);
                packet
            })
            .collect();
        let mut fixture = Fixture::new(&packets);
        prop_assert_eq!(fixture.push_all(completes, ALL, true), [cut.count() as u16]);
        let message = &fixture.list.messages()[0];
        let mut bytes = fixture.list.header(message).to_vec();
        bytes.extend(fixture.list.pieces(message, &fixture.batch).flatten());
        prop_assert_eq!((message.vnet, bytes), (vnet, original));
    }
}

/// A TCP packet whose header says that it has `offset` words.
fn tcp_with_offset(offset: u8, sequence: u32) -> Vec<u8> {
    let mut packet = Recipe { tcp_options: 0, payload: 10, sequence, ..Recipe::TCP }.partial();
    packet[32] = offset << 4;
    packet
}

#[test]
fn a_tcp_header_that_says_less_than_its_least_length_is_joined_by_nothing() {
    for offset in 0..5_u8 {
        let first = tcp_with_offset(offset, 1_000);
        let payload = 10 + (5 - u32::from(offset)) * 4;
        let next = tcp_with_offset(offset, 1_000 + payload);
        let mut fixture = Fixture::new(&[first.clone(), next]);
        assert_eq!(fixture.push_all(true, ALL, true), [1, 1], "offset {offset}");
        let mut fixture = Fixture::new(&[first.clone(), first[..21].to_vec()]);
        let Fixture { batch, list, merger, .. } = &mut fixture;
        let view = IpView::parse(batch.bytes(0)).unwrap();
        let packet = |slot: usize, len: usize| Packet { slot, range: 0..len, partial: true, owner: 1 };
        merger.push(list, batch, packet(0, first.len()), &view, ALL);
        assert!(!merger.try_join(list, batch, &packet(1, 21)), "offset {offset}");
    }
}
