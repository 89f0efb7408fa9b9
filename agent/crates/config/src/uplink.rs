//! `[[transport.uplink]]`: the lines of this host, if it has several.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use wire::line::{LineTerms, MOST_LINES, MOST_WEIGHT};

use crate::{
    checks::Checks,
    kinds::{Kind, name, one_of, text, truth, whole},
    problem::{At, Report},
    section::{Table, section},
    spelled::spelled,
    value::{self, Bad, bad},
};

/// The longest name of an interface in bytes: IFNAMSIZ of linux/if.h, less the zero behind it.
const MOST_INTERFACE_BYTES: usize = 15;

fn interface() -> Kind<Arc<str>> {
    let read = |text: &str| -> Result<Arc<str>, Bad> {
        // As the kernel's dev_valid_name has it.
        let fits = |c: char| !c.is_whitespace() && !matches!(c, '/' | ':' | '\0');
        let is_good = (1..=MOST_INTERFACE_BYTES).contains(&text.len())
            && text.chars().all(fits)
            && !matches!(text, "." | "..");
        let remedy = "write it as ip link shows it, as in \"eth0\": at most 15 bytes";
        is_good
            .then(|| text.into())
            .ok_or_else(|| bad(format!("{text:?} is not the name of an interface"), remedy))
    };
    text("interface", read, ToString::to_string)
}

fn source() -> Kind<IpAddr> {
    let read = |text: &str| -> Result<IpAddr, Bad> {
        let remedy = "write one address of this host, without a port, as in \"192.0.2.7\"";
        let address: IpAddr = text.parse().map_err(|_| bad(format!("{text:?} is not an address"), remedy))?;
        let is_own = !address.is_unspecified() && !address.is_multicast();
        is_own.then_some(address).ok_or_else(|| bad(format!("{text:?} is no address to send from"), remedy))
    };
    text("IP address", read, ToString::to_string)
}

/// Bits a second.
fn rate() -> Kind<u64> {
    text("64kbit to 100Gbit", value::bit_rate, value::bit_rate_text)
}

section! {
    /// A `[[transport.uplink]]`: one of several lines of this host, by which peers are dialled.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Uplink {
        /// Our name for the line, in logs, metrics and status. Unique; at most 8 lines. Each peer that we dial is dialled on all of
        /// them, and has lanes on each.
        name: Arc<str> = "".into(), name(), Restart, required "give the line a name, as in \"dsl\"";
        /// The interface that the line's packets leave by (SO_BINDTODEVICE), whatever the routing table prefers: a default route on
        /// each interface is enough. It may appear later, as a USB modem does. Needs Linux 5.7, or CAP_NET_RAW before.
        interface: Option<Arc<str>> = None, interface().optional(), Restart;
        /// In place of `interface`: the address that the line's packets come from. The host needs a rule that sends what comes from it
        /// out on that line (`ip rule add from`).
        source: Option<IpAddr> = None, source().optional(), Restart;
        /// SO_MARK of the line's sockets, in place of `transport.mark`; 0: that one. Needs CAP_NET_ADMIN.
        mark: u32 = 0, whole(0..=i64::from(u32::MAX)), Restart;
        /// The line's part where no rate is known: a line with 2 carries twice as much as one with 1. Either `weight` or `rate`, and of
        /// all lines the same.
        weight: Option<u16> = None, whole(1..=i64::from(MOST_WEIGHT)).optional(), Now;
        /// What this host sends on the line to each peer at most, in bits a second of IP packets: what exceeds it waits in the agent, flow
        /// by flow. The other end sends by the ratio of the lines' rates. With `peer.rate = "auto"` it counts until the line is measured.
        rate: Option<u64> = None, rate().optional(), Now;
        /// `"metered"`: the line's bytes cost money. It then carries payloads only while no other line can that is not a backup, in both
        /// directions if the peer's version knows lines. A line that was suspect is held for 10 s, or 60 s if it flaps; meanwhile metered
        /// lines carry everything.
        cost: Cost = Cost::Flat, one_of(), Now;
        /// Whether the line carries payloads only while no other one can. While the others are held after a suspicion, 10 s or 60 s,
        /// it carries everything.
        backup: bool = false, truth(), Now;
    }
}

spelled! {
    /// `uplink.cost`: what the bytes of a line cost.
    pub enum Cost {
        /// They cost nothing.
        Flat => "flat",
        /// They are counted and paid for.
        Metered => "metered",
    }
}

impl Uplink {
    /// What a peer is told of the line.
    #[must_use]
    pub fn terms(&self) -> LineTerms {
        let Self { weight, rate, cost, backup, .. } = self;
        LineTerms {
            rate: *rate,
            weight: weight.unwrap_or(1),
            metered: *cost == Cost::Metered,
            backup: *backup,
        }
    }

    /// The line in words: what its packets leave by.
    #[must_use]
    pub fn way(&self) -> String {
        match (&self.interface, self.source) {
            (Some(interface), _) => format!("interface {interface}"),
            (None, Some(source)) => format!("source {source}"),
            (None, None) => String::new(),
        }
    }

    /// Reports what is wrong with the line by itself.
    fn check(&self, table: &Table<'_>, report: &mut Report) {
        // A value that is wrong was reported where it stands.
        match (table.has("interface"), table.has("source")) {
            (true, true) => {
                let remedy = "remove one: an interface needs no source";
                report.add(&table.place("source"), "there is an interface, too", remedy);
            }
            (false, false) => {
                let remedy = "write its interface, or its source, which is an address of this host";
                report.add(&table.at, "nothing says which line this is", remedy);
            }
            (true, false) | (false, true) => {}
        }
        if table.has("weight") && table.has("rate") {
            let remedy = "remove one: a rate says more than a weight";
            report.add(&table.place("weight"), "there is a rate, too", remedy);
        }
    }
}

impl Checks {
    /// Reads the lines, and checks what holds between them.
    pub(super) fn read_uplinks(&mut self, tables: Vec<Table<'_>>) -> Vec<Uplink> {
        if let Some(first) = tables.get(usize::from(MOST_LINES)) {
            let problem = format!("more than {MOST_LINES} lines");
            self.report.add(&first.at, problem, "leave out those that carry least");
        }
        let places: Vec<At> = tables.iter().map(|table| table.at.clone()).collect();
        let (mut uplinks, mut ways) = (Vec::<Uplink>::new(), BTreeSet::new());
        for mut table in tables {
            let uplink: Uplink = table.fill(self);
            uplink.check(&table, &mut self.report);
            if !uplink.name.is_empty() && uplinks.iter().any(|other| other.name == uplink.name) {
                self.taken(&table.place("name"), &uplink.name, "an earlier line");
            }
            let way = uplink.way();
            if !way.is_empty() && !ways.insert((way.clone(), uplink.mark)) {
                let problem = format!("an earlier line has the {way}, too");
                self.report.add(&table.at, problem, "remove one: two lines that are one fail together");
            }
            let counts = uplinks.iter().find(|other| other.rate.is_some() || other.weight.is_some());
            if let Some(other) = counts
                && (uplink.rate.is_some() || uplink.weight.is_some())
                && uplink.rate.is_some() != other.rate.is_some()
            {
                let [this, that] =
                    if uplink.rate.is_some() { ["rate", "weight"] } else { ["weight", "rate"] };
                let problem =
                    format!("the line {:?} has a {that}, which cannot be compared with a {this}", other.name);
                self.report.add(
                    &table.place(this),
                    problem,
                    "write a rate for every line, or a weight for every line",
                );
            }
            uplinks.push(uplink);
        }
        if let Some(at) = places.first().filter(|_| uplinks.iter().all(|uplink| uplink.backup)) {
            let remedy = "remove backup from the line that is to carry the traffic";
            self.report.add(at, "every line is a backup, and none of them stands in for one", remedy);
        }
        uplinks
    }

    /// Checks the lines beside what else the file says: the tunnel's name, and whether anybody is dialled.
    pub(super) fn uplinks_beside(
        &mut self,
        uplinks: &[Uplink],
        tun: Option<&str>,
        dials: bool,
        transport: &At,
    ) {
        let leads_in = |uplink: &&Uplink| uplink.interface.as_deref().is_some_and(|name| Some(name) == tun);
        if let Some(uplink) = uplinks.iter().find(leads_in) {
            let problem = format!("the line {:?} leads into the tunnel itself", uplink.name);
            self.report.add(
                transport,
                problem,
                "name the interface that leads to the Internet, or another tun.name",
            );
        }
        if !uplinks.is_empty() && !dials {
            let problem = "there are lines, and no peer has endpoints, so nobody is dialled on them";
            self.report.note(
                transport,
                problem,
                "add endpoints to a [[peer]], or remove [[transport.uplink]]",
            );
        }
    }
}
