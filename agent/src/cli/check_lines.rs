//! What `culvert check` says of the lines of this host (`[[transport.uplink]]`).

use config::{Cost, Uplink};

/// What an operator should know of these lines, although the agent starts; `is_missing` says of which there is nothing on this host now.
pub(super) fn notes(uplinks: &[Uplink], is_missing: impl Fn(&Uplink) -> bool) -> Vec<String> {
    let mut notes: Vec<String> = shares(uplinks).into_iter().collect();
    notes.extend(half_of_rates(uplinks));
    for (place, uplink) in uplinks.iter().enumerate() {
        if let Some(earlier) = uplinks[..place].iter().find(|earlier| is_same_way(earlier, uplink)) {
            notes.push(format!(
                "the lines {:?} and {:?} have the same {}, and other marks: they are two lines only if the routes of the marks differ \
                 (remedy: ip rule show; else remove one)",
                earlier.name,
                uplink.name,
                uplink.way()
            ));
        }
        if is_missing(uplink) {
            notes.push(format!(
                "the line {:?} has the {}, which this host does not have now: it carries nothing until that appears (remedy: none if it \
                 comes later, as a modem does; else ip address shows what there is{})",
                uplink.name,
                uplink.way(),
                route_of(uplink)
            ));
        }
    }
    notes
}

/// Which route the line of an interface needs; over IPv4 the kernel does not say when it is missing.
fn route_of(uplink: &Uplink) -> String {
    let interface = uplink.interface.as_ref();
    interface.map_or_else(String::new, |name| {
        format!(", and ip route show dev {name} must list a route that holds the peers")
    })
}

fn is_same_way(one: &Uplink, other: &Uplink) -> bool {
    one.interface == other.interface && one.source == other.source
}

/// The part of each line that carries payloads while all are well, by rate if each of them has one, else by weight.
fn shares(uplinks: &[Uplink]) -> Option<String> {
    let carries = first(uplinks);
    if carries.len() < 2 {
        return None;
    }
    let by_rate = carries.iter().all(|uplink| uplink.rate.is_some());
    let part = |uplink: &Uplink| {
        if by_rate { uplink.rate.unwrap_or(0) } else { uplink.weight.unwrap_or(1).into() }
    };
    let sum: u64 = carries.iter().map(|uplink| part(uplink)).fold(0, u64::saturating_add);
    let share = |uplink: &&Uplink| {
        let percent = part(uplink) as f64 * 100.0 / sum.max(1) as f64;
        format!("{} {percent:.0} %", uplink.name)
    };
    let shares: Vec<String> = carries.iter().map(share).collect();
    let what = if by_rate { "rate" } else { "weight" };
    Some(format!("full lines share by {what}: {}", shares.join(", ")))
}

/// The lines that carry payloads while all are well: no backups, and no metered ones beside others.
fn first(uplinks: &[Uplink]) -> Vec<&Uplink> {
    let rank = |uplink: &Uplink| (uplink.backup, uplink.cost == Cost::Metered);
    let best = uplinks.iter().map(rank).min();
    uplinks.iter().filter(|uplink| Some(rank(uplink)) == best).collect()
}

/// A rate counts only beside other rates.
fn half_of_rates(uplinks: &[Uplink]) -> Option<String> {
    let carries = first(uplinks);
    let with = carries.iter().find(|uplink| uplink.rate.is_some())?;
    let without = carries.iter().find(|uplink| uplink.rate.is_none())?;
    Some(format!(
        "the line {:?} has a rate, and {:?} has none: they share equally, as if there were no rate (remedy: a rate for both)",
        with.name, without.name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, interface: &str) -> Uplink {
        Uplink { name: name.into(), interface: Some(interface.into()), ..Uplink::default() }
    }

    #[test]
    fn the_parts_of_lines_are_those_of_the_ones_that_carry() {
        let nowhere = |_: &Uplink| false;
        let (dsl, lte) = (line("dsl", "eth0"), line("lte", "wwan0"));
        assert_eq!(notes(std::slice::from_ref(&dsl), nowhere), Vec::<String>::new());
        let equal = notes(&[dsl.clone(), lte.clone()], nowhere);
        assert_eq!(equal, ["full lines share by weight: dsl 50 %, lte 50 %"]);
        let heavy = Uplink { weight: Some(3), ..dsl.clone() };
        assert_eq!(notes(&[heavy, lte.clone()], nowhere), ["full lines share by weight: dsl 75 %, lte 25 %"]);
        let rated = |line: &Uplink, rate| Uplink { rate: Some(rate), ..line.clone() };
        let by_rate = notes(&[rated(&dsl, 300_000_000), rated(&lte, 100_000_000)], nowhere);
        assert_eq!(by_rate, ["full lines share by rate: dsl 75 %, lte 25 %"]);
        // A line that stands by has no part, and a rate of it alone misleads nobody.
        let metered = Uplink { cost: Cost::Metered, ..rated(&lte, 1_000_000) };
        assert_eq!(notes(&[dsl.clone(), metered], nowhere), Vec::<String>::new());
        let half = notes(&[rated(&dsl, 300_000_000), lte], nowhere);
        assert!(half[1].starts_with("the line \"dsl\" has a rate, and \"lte\" has none"), "{half:?}");
    }

    #[test]
    fn lines_that_are_one_and_lines_that_are_not_there_are_named() {
        let marked = Uplink { mark: 7, ..line("b", "eth0") };
        let said = notes(&[line("a", "eth0"), marked, line("c", "wwan0")], |line| &*line.name == "c");
        let [_, same, missing] = &said[..] else { panic!("{said:?}") };
        assert!(same.starts_with("the lines \"a\" and \"b\" have the same interface eth0, and other marks"));
        assert!(
            missing.starts_with("the line \"c\" has the interface wwan0, which this host does not have now")
        );
    }
}
