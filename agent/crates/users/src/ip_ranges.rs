//! Sets of addresses as ranges: what is left of prefixes after others were taken out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use h3::addresses::Route;
use ipnet::IpNet;

/// A set of addresses of both families.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    ipv4: Family,
    ipv6: Family,
}

/// Addresses of one family as numbers: first and last of each range, in order, and no two touch.
type Family = Vec<(u128, u128)>;

impl Ranges {
    /// All addresses in `nets`.
    pub fn of<'n>(nets: impl IntoIterator<Item = &'n IpNet>) -> Self {
        let mut made = Self::default();
        for net in nets {
            made.family_mut(net.addr()).push((number(net.network()), number(net.broadcast())));
        }
        made.settle();
        made
    }

    /// All addresses of `sets`, which are brought into order once.
    pub(crate) fn union(sets: impl IntoIterator<Item = Self>) -> Self {
        let mut made = Self::default();
        for Self { ipv4, ipv6 } in sets {
            made.ipv4.extend(ipv4);
            made.ipv6.extend(ipv6);
        }
        made.settle();
        made
    }

    /// Takes out `others`.
    pub fn remove(&mut self, others: &Self) {
        self.ipv4 = without(&self.ipv4, &others.ipv4);
        self.ipv6 = without(&self.ipv6, &others.ipv6);
    }

    /// Keeps what is in `others`, too.
    pub fn keep(&mut self, others: &Self) {
        let mut rest = self.clone();
        rest.remove(others);
        self.remove(&rest);
    }

    /// Whether `address` is in the set.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let (ranges, address) = (self.family(address), number(address));
        let after = ranges.partition_point(|(first, _)| *first <= address);
        after.checked_sub(1).and_then(|at| ranges.get(at)).is_some_and(|(_, last)| address <= *last)
    }

    /// Whether there are no addresses.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ipv4.is_empty() && self.ipv6.is_empty()
    }

    /// Whether there are addresses of the family of `any`.
    #[must_use]
    pub fn has_family(&self, any: IpAddr) -> bool {
        !self.family(any).is_empty()
    }

    /// The ranges in the order of ROUTE_ADVERTISEMENT, for packets of `protocol`.
    #[must_use]
    pub fn routes(&self, protocol: u8) -> Vec<Route> {
        let ipv4 = |bits: u128| IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(bits).unwrap_or(u32::MAX)));
        let ipv6 = |bits: u128| IpAddr::V6(Ipv6Addr::from_bits(bits));
        let route = |first, last| Route { first, last, protocol };
        let of_ipv4 = self.ipv4.iter().map(|(first, last)| route(ipv4(*first), ipv4(*last)));
        of_ipv4.chain(self.ipv6.iter().map(|(first, last)| route(ipv6(*first), ipv6(*last)))).collect()
    }

    fn family(&self, any: IpAddr) -> &Family {
        if any.is_ipv4() { &self.ipv4 } else { &self.ipv6 }
    }

    fn family_mut(&mut self, any: IpAddr) -> &mut Family {
        if any.is_ipv4() { &mut self.ipv4 } else { &mut self.ipv6 }
    }

    /// Brings the ranges into order, and joins those that overlap or touch.
    fn settle(&mut self) {
        for ranges in [&mut self.ipv4, &mut self.ipv6] {
            ranges.sort_unstable();
            ranges.dedup_by(|next, before| {
                let joins = next.0 <= before.1.saturating_add(1);
                if joins {
                    before.1 = before.1.max(next.1);
                }
                joins
            });
        }
    }
}

/// What is in `ranges` and not in `others`.
fn without(ranges: &[(u128, u128)], others: &[(u128, u128)]) -> Family {
    let mut left = Vec::with_capacity(ranges.len());
    let mut others = others.iter().peekable();
    for (first, last) in ranges {
        let mut from = Some(*first);
        while let Some((gone, until)) = others.peek() {
            let Some(start) = from.filter(|start| *start <= *last) else { break };
            if *gone > *last {
                break;
            }
            if start < *gone {
                left.push((start, gone - 1));
            }
            from = until.checked_add(1).map(|next| next.max(start));
            if *until > *last {
                // It may take of the next range, too.
                break;
            }
            others.next();
        }
        if let Some(start) = from.filter(|start| *start <= *last) {
            left.push((start, *last));
        }
    }
    left
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nets(texts: &[&str]) -> Ranges {
        Ranges::of(&texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>())
    }

    #[test]
    fn prefixes_join_and_are_taken_out() {
        let mut ranges = nets(&["10.0.1.0/24", "10.0.0.0/24", "10.0.0.128/25", "::/0"]);
        assert_eq!(ranges.routes(0).len(), 2);
        ranges.remove(&nets(&["10.0.1.7/32", "10.0.1.255/32", "fd00::/8", "ffff::/16"]));
        let text: Vec<_> =
            ranges.routes(6).iter().map(|route| format!("{}-{}", route.first, route.last)).collect();
        let expected = [
            "10.0.0.0-10.0.1.6",
            "10.0.1.8-10.0.1.254",
            "::-fcff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
            "fe00::-fffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        ];
        assert_eq!(text, expected);
        let mut out = Vec::new();
        h3::addresses::put_routes(&mut out, &ranges.routes(6));
        ranges.keep(&nets(&["10.0.1.0/24"]));
        assert!(ranges.has_family("0.0.0.0".parse().unwrap()) && !ranges.has_family("::".parse().unwrap()));
        assert!(!ranges.is_empty() && ranges.contains("10.0.1.6".parse().unwrap()));
        assert!(
            !ranges.contains("10.0.1.7".parse().unwrap()) && !ranges.contains("10.0.0.1".parse().unwrap())
        );
        ranges.remove(&nets(&["0.0.0.0/0"]));
        assert!(ranges.is_empty());
    }

    proptest! {
        #[test]
        fn sets_are_what_their_prefixes_say(
            a in proptest::collection::vec((any::<u8>(), 24_u8..=32), 0..8),
            b in proptest::collection::vec((any::<u8>(), 24_u8..=32), 0..8),
        ) {
            let net = |(last, length): &(u8, u8)| {
                IpNet::new(Ipv4Addr::new(255, 255, 255, *last).into(), *length).unwrap().trunc()
            };
            let (a, b): (Vec<_>, Vec<_>) = (a.iter().map(net).collect(), b.iter().map(net).collect());
            let (of_a, of_b) = (Ranges::of(&a), Ranges::of(&b));
            let sum = Ranges::union([of_a.clone(), of_b.clone()]);
            let (mut difference, mut both) = (of_a.clone(), of_a);
            difference.remove(&of_b);
            both.keep(&of_b);
            for last in 0..=255 {
                let address = Ipv4Addr::new(255, 255, 255, last).into();
                let within = |nets: &[IpNet]| nets.iter().any(|net| net.contains(&address));
                let (in_a, in_b) = (within(&a), within(&b));
                prop_assert_eq!(sum.contains(address), in_a || in_b);
                prop_assert_eq!(difference.contains(address), in_a && !in_b);
                prop_assert_eq!(both.contains(address), in_a && in_b);
            }
        }
    }
}
