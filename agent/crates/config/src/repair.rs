//! `service.repair` and `peer.repair`: a word, or a table with more.

use std::{fmt, time::Duration};

use wire::repair_terms::{DEADLINES, Deadline, MOST_OVERHEAD_PPM, Mode, Order, Terms};

use crate::{
    kinds::{Given, Kind, Shown, one_of, time, whole},
    section::Table,
    spelled::{Spelled, spelled},
    value::{Bad, bad},
};

impl Spelled for Mode {
    const ALL: &'static [Self] = &[Self::Auto, Self::Retransmit, Self::Fec, Self::Off];

    fn label(self) -> &'static str {
        self.label()
    }
}

spelled!(impl Order);

/// `peer.repair`: which IP packets to the peer are repaired, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketRepair {
    /// The terms by which those packets are repaired.
    pub terms: Terms,
    /// The DSCPs of the packets that are repaired.
    pub dscp: DscpSet,
}

impl PacketRepair {
    /// What it is when it is left out.
    pub const OFF: Self = Self { terms: Terms::OFF, dscp: DscpSet::ALL };
}

/// A set of DSCPs (RFC 2474): bit `n` is DSCP `n`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DscpSet(u64);

impl fmt::Display for DscpSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}", self.members())
    }
}

impl DscpSet {
    pub const ALL: Self = Self(u64::MAX);

    /// Whether a DSCP, 0 to 63, is in the set.
    #[inline]
    #[must_use]
    pub fn contains(self, dscp: u8) -> bool {
        self.0 >> (dscp & 63) & 1 == 1
    }

    fn members(self) -> Vec<u8> {
        (0..64).filter(|dscp| self.contains(*dscp)).collect()
    }
}

/// The share of repairs: above 0 and at most 2, in millionths.
fn overhead() -> Kind<u32> {
    let remedy = "write a number above 0 and at most 2, without quotes: 0.3 lets repairs take 30 % of the bytes of payloads";
    let read = move |given: Given<'_>| {
        let ppm = given.number().map(|share| (share * 1e6).round());
        let ppm = ppm.filter(|ppm| *ppm >= 1.0 && *ppm <= f64::from(MOST_OVERHEAD_PPM));
        ppm.map(|ppm| ppm as u32).ok_or_else(|| bad("is no share of repairs", remedy))
    };
    Kind::new("above 0, at most 2", read, |ppm, _| Shown::bare(share_text(*ppm)))
}

fn share_text(ppm: u32) -> f64 {
    f64::from(ppm) / 1e6
}

fn deadline() -> Kind<Deadline> {
    let why = [
        "a request or a repair takes a few milliseconds",
        "what comes later is of no use to real-time traffic",
    ];
    let fixed = time(DEADLINES, Some(why));
    let words = format!("`\"auto\"`, {}", fixed.words);
    let read = move |given: Given<'_>| {
        if given.value.as_str() == Some("auto") {
            return Ok(Deadline::Path);
        }
        // The other end is told whole milliseconds.
        let whole = |deadline: Duration| Duration::from_millis(deadline.as_millis() as u64);
        (fixed.read)(given).map(|deadline| Deadline::Fixed(whole(deadline)))
    };
    Kind::new(words, read, |deadline: &Deadline, _| Shown::text(deadline_text(*deadline)))
}

fn deadline_text(deadline: Deadline) -> String {
    match deadline {
        Deadline::Path => "auto".into(),
        Deadline::Fixed(deadline) => humantime::format_duration(deadline).to_string(),
    }
}

/// A list of DSCPs.
pub(super) fn dscp_list() -> Kind<DscpSet> {
    let list = whole::<u8>(0..=63).list().not_empty("name a DSCP as in [46], or leave dscp out");
    let read = move |given: Given<'_>| {
        let members = (list.read)(given)?;
        Ok(DscpSet(members.into_iter().fold(0, |set, dscp| set | 1 << dscp)))
    };
    Kind::new("list of numbers, 0 to 63", read, |set: &DscpSet, _| Shown::bare(set))
}

fn dscp() -> Kind<DscpSet> {
    let list = whole::<u8>(0..=63).list().not_empty("write \"all\", or leave dscp out");
    let words = format!("`\"all\"`, {}", list.words);
    let read = move |given: Given<'_>| {
        if given.value.as_str() == Some("all") {
            return Ok(DscpSet::ALL);
        }
        let members = (list.read)(given)?;
        Ok(DscpSet(members.into_iter().fold(0, |set, dscp| set | 1 << dscp)))
    };
    Kind::new(words, read, |set: &DscpSet, _| dscp_text(*set))
}

fn dscp_text(set: DscpSet) -> Option<Shown> {
    if set == DscpSet::ALL { Shown::text("all") } else { Shown::bare(format!("{:?}", set.members())) }
}

/// How something is repaired: one of the modes, or a table.
pub(super) fn repair() -> Kind<Terms> {
    let read = |given: Given<'_>| read_table(given, false).map(|repair| repair.terms);
    Kind::new(one_of::<Mode>().words, read, |terms: &Terms, _| {
        shown(&PacketRepair { terms: *terms, ..PacketRepair::OFF })
    })
}

/// How IP packets are repaired: the same, and which of them.
pub(super) fn packet_repair() -> Kind<PacketRepair> {
    Kind::new(
        one_of::<Mode>().words,
        |given: Given<'_>| read_table(given, true),
        |repair: &PacketRepair, _| shown(repair),
    )
}

fn read_table(given: Given<'_>, packets: bool) -> Result<PacketRepair, Bad> {
    let mode_alone = |mode| PacketRepair { terms: Terms { mode, ..Terms::OFF }, ..PacketRepair::OFF };
    let Some(entries) = given.value.as_table() else {
        return (one_of::<Mode>().read)(given).map(mode_alone);
    };
    let Given { at, checks, .. } = given;
    let mut table = Table::new(at.clone(), Some(entries));
    let mut repair = mode_alone(Mode::Auto);
    let terms = &mut repair.terms;
    terms.mode = table.value("mode", &one_of(), checks).unwrap_or(terms.mode);
    terms.deadline = table.value("deadline", &deadline(), checks).unwrap_or(terms.deadline);
    terms.max_overhead_ppm =
        table.value("max_overhead", &overhead(), checks).unwrap_or(terms.max_overhead_ppm);
    terms.order = table.value("order", &one_of(), checks).unwrap_or(terms.order);
    if terms.order == Order::Hold && terms.mode != Mode::Off {
        let problem =
            "the first packets whose order a path changes after 20,000 in order come as the path leaves them";
        let remedy = "nothing is needed for TCP inside; an application that bears no change has to number its datagrams";
        checks.report.note(&table.place("order"), problem, remedy);
    }
    if packets {
        repair.dscp = table.value("dscp", &dscp(), checks).unwrap_or(repair.dscp);
    }
    table.end(&mut checks.report);
    Ok(repair)
}

/// The word if nothing else was changed, or the table.
fn shown(repair: &PacketRepair) -> Option<Shown> {
    let Terms { mode, deadline, max_overhead_ppm, order } = repair.terms;
    let usual = PacketRepair { terms: Terms { mode, ..Terms::OFF }, ..PacketRepair::OFF };
    if *repair == usual {
        return Shown::text(mode.label());
    }
    let dscp = dscp_text(repair.dscp).filter(|_| repair.dscp != DscpSet::ALL);
    let dscp = dscp.map(|dscp| format!(", dscp = {}", dscp.toml())).unwrap_or_default();
    Shown::bare(format!(
        "{{ mode = {:?}, deadline = \"{}\", max_overhead = {}, order = {:?}{dscp} }}",
        mode.label(),
        deadline_text(deadline),
        share_text(max_overhead_ppm),
        order.label(),
    ))
}
