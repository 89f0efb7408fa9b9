//! `peer.map`: networks of a peer that have other addresses here than there.

use ip::map::Mapping;
use ipnet::IpNet;

use crate::{
    Peer,
    checks::Checks,
    kinds::{Kind, text},
    prefix::allowed_prefix,
    section::Table,
    value::{Bad, bad},
};

/// The limit on mappings of a peer: as many sites as one would write down; each packet to it is looked up among them.
const MOST_MAPPINGS: usize = 64;

const REMEDY: &str =
    "write the network as this host is to see it, and as it is there, as in \"10.1.0.0/16 = 192.168.0.0/16\"";

pub(super) fn mappings() -> Kind<Vec<Mapping>> {
    text("mapping", mapping, ToString::to_string).list()
}

/// One mapping, with or without spaces.
pub(super) fn mapping(text: &str) -> Result<Mapping, Bad> {
    let Some((here, there)) = text.split_once('=') else {
        return Err(bad(format!("{text:?} is no mapping"), REMEDY));
    };
    let (here, there) = (allowed_prefix(here.trim())?, allowed_prefix(there.trim())?);
    let family = |net: IpNet| if net.addr().is_ipv4() { "IPv4" } else { "IPv6" };
    if family(here) != family(there) {
        let problem = format!("{here} is {}, and {there} is {}", family(here), family(there));
        return Err(bad(problem, "an address stays IPv4 or IPv6: write two prefixes of one kind"));
    }
    if here.prefix_len() != there.prefix_len() {
        let problem = format!("{here} and {there} have different lengths");
        return Err(bad(problem, "each address becomes one address: write two prefixes of the same length"));
    }
    if here == there {
        return Err(bad(
            format!("{here} is the same on both sides"),
            "leave it out: what is not named stays",
        ));
    }
    Ok(Mapping { here, there })
}

impl Checks {
    /// Checks what the mappings of a peer say together, and beside its `allowed_ips`.
    pub(super) fn check_map(&mut self, table: &mut Table<'_>, peer: &Peer) {
        if peer.map.is_empty() {
            return;
        }
        let at = table.place("map");
        if peer.map.len() > MOST_MAPPINGS {
            let problem = format!("names {} networks", peer.map.len());
            self.report.add(&at, problem, format!("write at most {MOST_MAPPINGS}, shorter prefixes"));
            return;
        }
        let overlap = |one: IpNet, other: IpNet| one.contains(&other) || other.contains(&one);
        for (index, second) in peer.map.iter().enumerate() {
            for first in &peer.map[..index] {
                for [one, other] in [[first.here, second.here], [first.there, second.there]] {
                    if overlap(one, other) {
                        let remedy = "an address has one other: write prefixes apart from each other";
                        self.report.add(&at, format!("{one} and {other} overlap"), remedy);
                    }
                }
            }
            let here = second.here;
            if !peer.allowed_ips.iter().any(|allowed| allowed.contains(&here)) {
                let problem = format!("{here} is in no prefix of allowed_ips, so no packet goes there");
                self.report.add(&at, problem, format!("add \"{here}\" to allowed_ips"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Config, value::Bad};

    const HEAD: &str = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n\
                        tun.address = [\"10.9.0.1/24\"]\n\
                        [[peer]]\nname = \"b\"\npublic_key = \"bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA\"\n";

    fn problems(keys: &str) -> Vec<String> {
        match Config::parse(&format!("{HEAD}{keys}"), Path::new("/")) {
            Ok(_) => Vec::new(),
            Err(error) => error.problems.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn a_mapping_is_two_prefixes_of_one_kind_and_length() {
        let wrong = |text: &str| {
            let Err(Bad { problem, .. }) = super::mapping(text) else { panic!("{text:?} is right") };
            problem
        };
        let right =
            super::mapping(" 10.1.0.0/16=192.168.0.0/16 ").unwrap_or_else(|bad| panic!("{}", bad.problem));
        assert_eq!(right.to_string(), "10.1.0.0/16 = 192.168.0.0/16");
        assert!(super::mapping("fd01::7 = fd09::1").is_ok());
        for (text, part) in [
            ("10.1.0.0/16", "is no mapping"),
            ("10.1.0.0/16 = fd09::/16", "is IPv4, and"),
            ("10.1.0.0/16 = 192.168.0.0/24", "different lengths"),
            ("10.1.0.1/16 = 192.168.0.0/16", "is an address and the length"),
            ("10.1.0.0/16 = 10.1.0.0/16", "is the same on both sides"),
            ("224.1.0.0/16 = 10.1.0.0/16", "multicast"),
            ("10.1.0.0/16 = 10.2.0.0/16 = 10.3.0.0/16", "is not a prefix"),
        ] {
            assert!(wrong(text).contains(part), "{text}: {}", wrong(text));
        }
    }

    #[test]
    fn mappings_lie_in_allowed_ips_and_apart_from_each_other() {
        let map = |allowed: &str, map: &str| problems(&format!("allowed_ips = [{allowed}]\nmap = [{map}]\n"));
        let all = "\"10.1.0.0/16\", \"10.2.0.0/15\"";
        let right = "\"10.1.0.0/16 = 192.168.0.0/16\", \"10.2.0.0/16 = 172.16.0.0/16\"";
        assert_eq!(map(all, right), Vec::<String>::new());
        // A prefix that is the one side here, and the other side there, is no contradiction.
        assert_eq!(
            map(all, "\"10.1.0.0/16 = 10.2.0.0/16\", \"10.2.0.0/16 = 10.1.0.0/16\""),
            Vec::<String>::new()
        );
        for (allowed, text, part) in [
            ("\"10.1.0.0/17\"", "\"10.1.0.0/16 = 192.168.0.0/16\"", "add \"10.1.0.0/16\" to allowed_ips"),
            (
                all,
                "\"10.1.0.0/16 = 192.168.0.0/16\", \"10.1.5.0/24 = 10.7.5.0/24\"",
                "10.1.0.0/16 and 10.1.5.0/24 overlap",
            ),
            (
                all,
                "\"10.1.0.0/16 = 192.168.0.0/16\", \"10.2.5.0/24 = 192.168.5.0/24\"",
                "192.168.5.0/24 overlap",
            ),
        ] {
            let found = map(allowed, text);
            assert!(found.len() == 1 && found[0].contains(part), "{found:?}");
        }
        let many: Vec<_> =
            (0..65).map(|third| format!("\"10.1.{third}.0/24 = 172.16.{third}.0/24\"")).collect();
        assert!(map(all, &many.join(", "))[0].contains("names 65 networks"));
    }
}
