//! Port ranges: one `[[service]]`, `[[udp]]` or `[[tcp]]` whose ports are written as `6000-6009` is ten of them, each with one port and
//! the number of its place behind its name: `games.0` to `games.9`. Whatever comes afterwards knows single ports only.

use std::{
    borrow::Cow,
    ops::{Range, RangeInclusive},
};

use toml::{
    Spanned,
    de::{DeArray, DeTable, DeValue},
};

use crate::{
    problem::{At, Report},
    value::{self, Bad, bad},
};

/// The sections that may have ranges, each with the key of its ports and the one of the name that gets a number.
const RANGED: [(&str, &str, &str); 3] =
    [("service", "upstream", "name"), ("udp", "listen", "service"), ("tcp", "listen", "service")];

/// The hello that tells a peer our services holds at most this many.
pub(super) const MAX_SERVICES: usize = 256;

/// Ports in one range. Each has a listener or the sockets of its flows, and a row in status and metrics.
const MOST_PORTS: usize = MAX_SERVICES;

/// Writes each table with a range as one for each port; one whose range is wrong stays and is reported.
pub(super) fn expand<'t>(root: &mut DeTable<'t>, whole: &At, report: &mut Report) {
    for (section, ports, name) in RANGED {
        let Some(DeValue::Array(tables)) = root.get_mut(section).map(Spanned::get_mut) else { continue };
        if !tables.iter().any(|table| is_ranged(table.get_ref(), ports)) {
            continue;
        }
        if section == "service" {
            names(tables, whole, report);
        }
        let mut expanded = DeArray::new();
        for (index, table) in std::mem::replace(tables, DeArray::new()).into_iter().enumerate() {
            let length = length(table.get_ref(), ports).unwrap_or_else(|Bad { problem, remedy }| {
                let at = place_of(whole, section, index, &table);
                report.add(&at.key(ports, span(table.get_ref(), ports)), problem, remedy);
                // What is wrong with its other keys is reported once.
                Some(1)
            });
            match length {
                Some(length) => (0..length).for_each(|place| expanded.push(copy(&table, ports, name, place))),
                None => expanded.push(table),
            }
        }
        *tables = expanded;
    }
}

/// Reports services that would be taken for one of a range, or whose name is that of one.
fn names(tables: &DeArray<'_>, whole: &At, report: &mut Report) {
    let ranged = |table: &DeValue<'_>| is_ranged(table, "upstream");
    let of_ranges: Vec<&str> = tables
        .iter()
        .map(Spanned::get_ref)
        .filter(|table| ranged(table))
        .filter_map(|table| texts(table, "name").next())
        .collect();
    for (index, table) in tables.iter().enumerate().filter(|(_, table)| !ranged(table.get_ref())) {
        let Some(own) = texts(table.get_ref(), "name").next() else { continue };
        let base = own.rsplit_once('.').filter(|(_, place)| place.bytes().all(|byte| byte.is_ascii_digit()));
        let base = base.map_or(own, |(base, _)| base);
        if of_ranges.contains(&base) {
            let at = place_of(whole, "service", index, table);
            let problem = format!("{own:?} would be taken for the range of ports that is called {base:?}");
            report.add(&at.key("name", span(table.get_ref(), "name")), problem, "choose another name");
        }
    }
}

/// Where a table of a section is.
fn place_of(whole: &At, section: &str, index: usize, table: &Spanned<DeValue<'_>>) -> At {
    let name = texts(table.get_ref(), "name").next().and_then(|name| value::name(name).ok());
    At { table: name, ..whole.key(section, None).element(index, table.span()) }
}

/// How many ports the places at the key `ports` have each; `None` if no range is among them.
fn length(table: &DeValue<'_>, ports: &str) -> Result<Option<usize>, Bad> {
    let mut lengths = Vec::new();
    for text in texts(table, ports) {
        lengths.push(range(text)?.map(|(_, ports)| ports.len()));
    }
    let Some(length) = lengths.iter().flatten().next().copied() else { return Ok(None) };
    if lengths.iter().any(|other| *other != Some(length)) {
        return Err(bad("the ranges differ in length", format!("write {length} ports for each place")));
    }
    Ok(Some(length))
}

/// `table` with the port at `place` of its ranges, and that number behind its name.
fn copy<'t>(table: &Spanned<DeValue<'t>>, ports: &str, name: &str, place: usize) -> Spanned<DeValue<'t>> {
    let mut copy = table.clone();
    if let DeValue::Table(keys) = copy.get_mut() {
        if let Some(value) = keys.get_mut(ports) {
            if let DeValue::Array(list) = value.get_mut() {
                list.iter_mut().for_each(|one| pick(one.get_mut(), place));
            } else {
                pick(value.get_mut(), place);
            }
        }
        if let Some(DeValue::String(name)) = keys.get_mut(name).map(Spanned::get_mut)
            && !name.is_empty()
        {
            *name = Cow::Owned(named(name, place));
        }
    }
    copy
}

/// Replaces a range by the port at `place` of it.
fn pick(value: &mut DeValue<'_>, place: usize) {
    if let DeValue::String(text) = value
        && let Some((host, port)) = port_at(text, place)
    {
        *text = Cow::Owned(format!("{host}:{port}"));
    }
}

/// The host and the port at `place` of a range; of one that is wrong, any, since it was reported.
fn port_at(text: &str, place: usize) -> Option<(&str, u16)> {
    match range(text) {
        Ok(found) => found.and_then(|(host, mut ports)| Some((host, ports.nth(place)?))),
        Err(_) => text.rsplit_once(':').map(|(host, _)| (host, 1)),
    }
}

/// The name of the service at `place`. A name that no service may have stays as it is at every place, so that the problem is said once.
fn named(name: &str, place: usize) -> String {
    let is_name = |name: &str| value::name(name).is_ok();
    if !is_name(name) {
        return name.to_owned();
    }
    let own = numbered(name, place);
    if is_name(&own) {
        return own;
    }
    (0..place).map(|place| numbered(name, place)).find(|name| !is_name(name)).unwrap_or(own)
}

/// The name of the service at `place` of the range that is called `name`.
pub(super) fn numbered(name: &str, place: usize) -> String {
    format!("{name}.{place}")
}

/// The indices of the services of the range that is called `name`, none if there is no such range.
pub(super) fn services_of<'n>(
    name: &'n str,
    services: &'n [impl AsRef<str>],
) -> impl Iterator<Item = usize> + 'n {
    (0..MOST_PORTS).map_while(move |place| {
        let name = numbered(name, place);
        services.iter().position(|service| service.as_ref() == name)
    })
}

fn is_ranged(table: &DeValue<'_>, ports: &str) -> bool {
    texts(table, ports).any(|text| !matches!(range(text), Ok(None)))
}

/// The text or the texts at `key`.
fn texts<'v>(table: &'v DeValue<'_>, key: &str) -> impl Iterator<Item = &'v str> {
    let value = table.as_table().and_then(|keys| keys.get(key)).map(Spanned::get_ref);
    let list = value.and_then(DeValue::as_array).into_iter().flat_map(|list| list.iter());
    value.into_iter().chain(list.map(Spanned::get_ref)).filter_map(DeValue::as_str)
}

fn span(table: &DeValue<'_>, key: &str) -> Option<Range<usize>> {
    table.as_table()?.get(key).map(Spanned::span)
}

/// The host and the ports of `host:first-last`; `None` if the text does not end like that.
fn range(text: &str) -> Result<Option<(&str, RangeInclusive<u16>)>, Bad> {
    let Some((host, ports)) = text.rsplit_once(':') else { return Ok(None) };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let Some((first, last)) =
        ports.split_once('-').filter(|(first, last)| is_number(first) && is_number(last))
    else {
        return Ok(None);
    };
    let example = format!("write the first and the last port, as in \"{host}:6000-6009\"");
    let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else {
        return Err(bad(format!("{text:?} has a port above 65535"), example));
    };
    if first == 0 || last < first {
        return Err(bad(format!("{text:?} is no range of ports"), example));
    }
    let ports = first..=last;
    if ports.len() > MOST_PORTS {
        let problem = format!("{text:?} has {} ports, more than {MOST_PORTS}", ports.len());
        return Err(bad(problem, "carry whole networks with [tun], or name fewer ports"));
    }
    Ok(Some((host, ports)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Config, ConfigProblems, Service};

    const HEAD: &str = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n";
    const PEER: &str = "[[peer]]\nname = \"b\"\npublic_key = \"bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA\"\n\
                        endpoints = [\"192.0.2.1:4433\"]\n";

    fn parsed(text: &str) -> Result<Config, ConfigProblems> {
        Config::parse(&format!("{HEAD}{text}"), Path::new("/etc/culvert"))
    }

    /// The problems of a configuration, each as it is printed.
    fn problems(text: &str) -> Vec<String> {
        parsed(text).expect_err(text).problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_range_is_a_service_of_each_port_and_its_name_grants_all() {
        let text = format!(
            "[[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n\
             [[service]]\nname = \"games\"\nupstream = [\"10.0.0.5:6000-6002\", \"b.example:7000-7002\"]\nidle = \"5s\"\n\
             {PEER}services = [\"games\", \"dns\"]\n\
             [[peer]]\nname = \"c\"\npublic_key = \"6YSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA\"\nservices = [\"games.1\"]\n"
        );
        let config = parsed(&text).unwrap();
        let shown = |Service { name, upstream, .. }: &Service| format!("{name} = {upstream}");
        assert_eq!(
            config.services.iter().map(shown).collect::<Vec<_>>(),
            [
                "dns = 127.0.0.1:53",
                "games.0 = 10.0.0.5:6000, b.example:7000",
                "games.1 = 10.0.0.5:6001, b.example:7001",
                "games.2 = 10.0.0.5:6002, b.example:7002",
            ]
        );
        assert!(config.services[1..].iter().all(|service| service.idle.as_secs() == 5));
        assert_eq!(config.peers[0].services, [1, 2, 3, 0]);
        assert_eq!(config.peers[1].services, [2]);
    }

    #[test]
    fn a_range_is_a_forward_of_each_port() {
        let text = format!(
            "{PEER}[[udp]]\nlisten = \"[::1]:6000-6001\"\npeer = \"b\"\nservice = \"games\"\n\
             [[tcp]]\nlisten = \"127.0.0.1:65535-65535\"\npeer = \"b\"\nservice = \"games\"\n"
        );
        let config = parsed(&text).unwrap();
        let shown = |forwards: &[crate::Forward]| {
            forwards.iter().map(|one| format!("{} {}", one.listen, one.service)).collect::<Vec<_>>()
        };
        assert_eq!(shown(&config.udp), ["[::1]:6000 games.0", "[::1]:6001 games.1"]);
        assert_eq!(shown(&config.tcp), ["127.0.0.1:65535 games.0"]);
    }

    #[test]
    fn what_is_wrong_is_said_once_and_where_it_stands() {
        let service = |upstream: &str| format!("[[service]]\nname = \"games\"\nupstream = {upstream}\n");
        for (upstream, problem) in [
            ("\"10.0.0.5:6009-6000\"", "is no range of ports"),
            ("\"10.0.0.5:0-9\"", "is no range of ports"),
            ("\"10.0.0.5:65530-65536\"", "port above 65535"),
            ("\"10.0.0.5:6000-6256\"", "has 257 ports, more than 256"),
            ("[\"10.0.0.5:6000-6001\", \"10.0.0.6:6000-6002\"]", "differ in length"),
            ("[\"10.0.0.5:6000-6001\", \"10.0.0.6:6000\"]", "differ in length"),
        ] {
            let found = problems(&service(upstream));
            assert!(found.len() == 1 && found[0].contains(problem), "{upstream}: {found:?}");
            assert!(found[0].contains("service \"games\".upstream"), "{found:?}");
        }
        // Three ports, and two mistakes: the second table is the second one, whatever the first stands for.
        let twice = format!(
            "{}[[service]]\nname = \"!\"\nupstream = \"10.0.0.5:6000-6002\"\nburst = 0\n",
            service("\"10.0.0.5:1-9\"")
        );
        let found = problems(&twice);
        assert_eq!(found.iter().filter(|one| one.contains("service[1].burst")).count(), 1, "{found:?}");
        let unknown =
            problems(&format!("{}{PEER}services = [\"games.3\", \"game\"]\n", service("\"10.0.0.5:1-3\"")));
        assert!(unknown.len() == 2 && unknown[0].contains("\"games.3\""), "{unknown:?}");
        for other in ["games", "games.3"] {
            let other = format!("[[service]]\nname = \"{other}\"\nupstream = \"127.0.0.1:22\"\n");
            let found = problems(&format!("{}{other}", service("\"10.0.0.5:1-3\"")));
            assert!(found.len() == 1 && found[0].contains(".name: "), "{found:?}");
        }
        let named_twice =
            problems(&format!("{}{PEER}services = [\"games\", \"games\"]\n", service("\"10.0.0.5:1-3\"")));
        assert!(named_twice.len() == 1 && named_twice[0].contains("named twice"), "{named_twice:?}");
    }

    #[test]
    fn a_bad_name_of_a_range_is_said_once() {
        for (name, shown) in [
            ("a b", "\"a b\" is not a name".to_owned()),
            (&*"x".repeat(62), format!("\"{}.10\" is not a name", "x".repeat(62))),
        ] {
            for ports in ["6000-6003", "6000-6019", "6000-6199"] {
                let text = format!("[[service]]\nname = \"{name}\"\nupstream = \"10.0.0.5:{ports}\"\n");
                if name.len() == 62 && ports == "6000-6003" {
                    parsed(&text).expect("the numbers have one digit");
                    continue;
                }
                let found = problems(&text);
                assert!(found.len() == 1 && found[0].contains(&shown), "{name} {ports}: {found:?}");
            }
        }
    }

    #[test]
    fn services_are_not_more_than_there_may_be() {
        let found = problems(
            "[[service]]\nname = \"a\"\nupstream = \"10.0.0.5:1-200\"\n[[service]]\nname = \"b\"\nupstream = \"10.0.0.5:1-57\"\n",
        );
        assert!(found.len() == 1 && found[0].contains("more than 256 services"), "{found:?}");
    }
}
