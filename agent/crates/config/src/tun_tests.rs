use std::{fs, time::Duration};

use gate::identity::PublicKey;
use ipnet::IpNet;

use super::*;
use crate::tests::*;

/// The base with a tunnel, lines 9 and 10, and a peer that is dialled at an address, lines 11 to 14.
const TUNNEL: &str = "[tun]\naddress = [\"10.9.0.1/24\", \"fd09::1/64\"]\n[[peer]]\nname = \"b\"\n\
     public_key = \"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE\"\nendpoints = [\"192.0.2.7:4433\"]\n";

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Appends `more` to the tunnel, whose last table is the peer "b", and expects one problem there.
#[track_caller]
fn refused(more: &str, line: usize, key_path: &str, words: &str) {
    expect(&format!("{TUNNEL}{more}"), line, key_path, words);
}

#[track_caller]
fn accepted(more: &str) -> Config {
    parse(&format!("{BASE}{TUNNEL}{more}")).unwrap()
}

#[test]
fn a_tunnel_has_defaults_and_every_value_arrives() {
    let config = accepted("");
    let tun = Tun {
        pool: Vec::new(),
        name: "culvert0".into(),
        addresses: nets(&["10.9.0.1/24", "fd09::1/64"]),
        mtu: None,
        offload: true,
        routes: OwnRoutes::All,
        routing: Routing::AllowedIps,
        source_check: SourceCheck::AllowedIps,
        icmp_errors: false,
        multicast: false,
        hold: Duration::from_secs(5),
        spread: Spread::Addresses,
        up: Vec::new(),
        down: Vec::new(),
    };
    assert_eq!(config.tun, Some(tun));
    assert_eq!((config.notes.len(), config.notes[0].line), (1, Some(9)), "{:?}", config.notes);
    assert!(config.notes[0].to_string().contains("--allowed-ip"), "{}", config.notes[0]);

    let config = accepted(
        "allowed_ips = [\"10.9.0.2\", \"10.9.0.0/24\", \"fd09::/64\", \"fd09::2\", \"10.20.0.0/16\"]\ndscp = 46\n",
    );
    assert_eq!(config.notes, []);
    let expected = ["10.9.0.2/32", "10.9.0.0/24", "fd09::/64", "fd09::2/128", "10.20.0.0/16"];
    assert_eq!(config.peers[1].allowed_ips, nets(&expected));
    assert_eq!((config.peers[0].dscp, config.peers[1].dscp), (Dscp::Copy, Dscp::Fixed(46)));
    let whole = "[tun]\nname = \"t\"\naddress = [\"10.9.0.0/31\"]\nmtu = \"9000B\"\noffload = \"off\"\nroutes = false\n";
    let tun = parse(&format!("{BASE}{whole}")).unwrap().tun.unwrap();
    assert_eq!((&*tun.name, tun.mtu, tun.offload, tun.routes), ("t", Some(9000), false, OwnRoutes::Off));
    let connected =
        parse(&format!("{BASE}{}", whole.replace("routes = false", "routes = \"connected\""))).unwrap();
    assert_eq!(connected.tun.map(|tun| tun.routes), Some(OwnRoutes::Connected));
    assert_eq!(parse(BASE).unwrap().tun, None);
}

#[test]
fn keys_of_the_other_routing_have_no_effect_and_are_noted() {
    let config = |more: &str| {
        let tun = TUNNEL.replace("[[peer]]", &format!("{more}\n[[peer]]"));
        parse(&format!("{BASE}{tun}allowed_ips = [\"10.1.0.0/16\"]\n")).unwrap()
    };
    for (more, multicast, noted) in [
        ("multicast = true", false, &["tun.multicast"][..]),
        ("multicast = false\nsource_check = \"route\"", false, &["tun.source_check"]),
        ("routing = \"kernel\"\nmulticast = true\nsource_check = \"route\"", true, &[]),
        ("routing = \"kernel\"\nroutes = true", false, &["tun.routes"]),
    ] {
        let config = config(more);
        assert_eq!(config.tun.unwrap().copies_multicast(), multicast, "{more}");
        let notes: Vec<String> = config.notes.iter().map(ToString::to_string).collect();
        assert_eq!(notes.len(), noted.len(), "{more}: {notes:?}");
        for (note, key) in notes.iter().zip(noted) {
            assert!(note.contains(key) && note.contains("has no effect"), "{more}: {note}");
        }
    }
}

#[test]
fn a_hook_is_a_program_with_arguments() {
    let hooks = "[tun]\naddress = [\"10.9.0.1/24\"]\nup = [\"/bin/ip\", \"-6\", \"\"]\ndown = [\"logger\", \"gone\"]\n";
    let tun = parse(&format!("{BASE}{hooks}")).unwrap().tun.unwrap();
    assert_eq!(
        (tun.up, tun.down),
        (vec!["/bin/ip".into(), "-6".into(), "".into()], vec!["logger".into(), "gone".into()])
    );
    for wrong in ["[\"bin/ip\"]", "[\"\", \"a\"]", "[\"./up\"]"] {
        expect(&format!("[tun]\naddress = [\"10.9.0.1/24\"]\nup = {wrong}\n"), 11, "tun.up", "absolute path");
    }
    expect("[tun]\naddress = [\"10.9.0.1/24\"]\ndown = \"logger gone\"\n", 11, "tun.down", "list");
    expect("[tun]\naddress = [\"10.9.0.1/24\"]\ndown = [\"a\", \"\\u0000\"]\n", 11, "tun.down[1]", "zero");
}

#[test]
fn the_device_is_checked() {
    let tun = |more: &str, line, key_path, words| expect(&format!("[tun]\n{more}"), line, key_path, words);
    let address = "address = [\"10.9.0.1/24\"]\n";
    for name in ["", "a b", "a/b", "..", "all", "culvert%d", "0123456789abcdef"] {
        let words = "is not a name for a device (remedy: use 1 to 15";
        tun(&format!("{address}name = \"{name}\"\n"), 11, "tun.name", words);
    }
    tun("", 9, "tun.address", "is missing (remedy: write our own addresses");
    tun("address = []\n", 10, "tun.address", "is an empty list");
    tun("address = \"10.9.0.1/24\"\n", 10, "tun.address", "write a list in brackets");
    for (mtu, words) in [("1279", "1280 to 65535"), ("65536", "1280"), ("\"big\"", "1280"), ("-1", "1280")] {
        tun(&format!("{address}mtu = {mtu}\n"), 11, "tun.mtu", words);
    }
    tun(&format!("{address}offload = \"on\"\n"), 11, "tun.offload", "\"auto\" or \"off\"");
    tun(&format!("{address}routes = 1\n"), 11, "tun.routes", "\"connected\", or true or false");
    tun(&format!("{address}adress = []\n"), 11, "tun.adress", "did you mean address?");
    expect("[[tun]]\nname = \"x\"\n", 9, "tun", "write [tun]");

    let one = |list: &str, index: usize, words: &str| {
        let line = format!("[tun]\naddress = [{list}]\n");
        expect(&line, 10, &format!("tun.address[{index}]"), words);
    };
    one("\"10.9.0.1\"", 0, "has no prefix length (remedy: write \"10.9.0.1/24\" for the prefix of its link");
    one("\"10.9.0.1/33\"", 0, "is not a prefix");
    one(
        "\"10.9.0.0/24\"",
        0,
        "is the network, not an address in it (remedy: write one of its addresses, as in \"10.9.0.1/24\"",
    );
    one("\"10.9.0.255/24\"", 0, "is the broadcast address of its link");
    one("\"fd09::/64\"", 0, "as in \"fd09::1/64\"");
    one("\"127.0.0.2/8\"", 0, "is loopback");
    one("\"224.0.0.5/24\"", 0, "is multicast");
    one("\"ff02::5/64\"", 0, "is multicast");
    one("\"0.0.0.0/32\"", 0, "is the unspecified address");
    one("\"::/128\"", 0, "is the unspecified address");
    one("\"::ffff:10.9.0.1/120\"", 0, "is IPv4 in the form of IPv6");
    one("\"10.9.0.1/24\", \"10.9.0.1/32\"", 1, "10.9.0.1 is named twice");
    one("\"10.9.0.1/24\", \"10.9.1.1/16\"", 1, "10.9.1.1/16 shares a link with 10.9.0.1/24");
    parse(&format!(
        "{BASE}[tun]\naddress = [\"10.9.0.0/31\", \"fd09::/127\", \"10.9.1.0/32\", \"fd09::ffff/64\"]\n"
    ))
    .unwrap_err();
    parse(&format!("{BASE}[tun]\naddress = [\"10.9.0.0/31\", \"fd09::/127\", \"10.9.1.0/32\"]\n")).unwrap();
}

#[test]
fn the_prefixes_of_peers_are_checked() {
    let one = |text: &str, words: &str| {
        refused(&format!("allowed_ips = [\n\"{text}\"]\n"), 16, "peer[1].allowed_ips[0]", words);
    };
    one("10.9.0.x", "is not a prefix (remedy: write an address and a length");
    one("10.9.0.2/24", "(remedy: write \"10.9.0.0/24\" for all of it, or \"10.9.0.2/32\" for this address)");
    one("fd09::2/64", "\"fd09::/64\" for all of it, or \"fd09::2/128\"");
    one("10.9.0.1", "10.9.0.1 is our own address (tun.address[0])");
    one("fd09::1/128", "fd09::1 is our own address (tun.address[1])");
    one("127.0.0.0/8", "is loopback");
    one("::1", "is loopback");
    one("224.0.0.0/4", "is multicast");
    one("ff00::/8", "is multicast");
    one("255.255.255.255", "is broadcast");
    one("0.0.0.0", "is the unspecified address");
    one("::ffff:10.9.0.2", "is IPv4 in the form of IPv6, which no packet has (remedy: write it as IPv4)");
    refused("allowed_ips = \"10.9.0.2\"\n", 15, "peer[1].allowed_ips", "a list in brackets");
    refused("allowed_ips = [5]\n", 15, "peer[1].allowed_ips[0]", "is an integer");
    let twice = "allowed_ips = [\"10.9.0.2\",\n\"10.9.0.2/32\"]\n";
    refused(twice, 16, "peer[1].allowed_ips[1]", "10.9.0.2/32 is named twice (remedy: remove one)");
    let other = "allowed_ips = [\"10.9.0.0/28\"]\n[[peer]]\nname = \"c\"\npublic_key = \"n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0\"\n\
                 allowed_ips = [\"10.9.0.0/27\", \"10.9.0.0/28\"]\n";
    let words = "10.9.0.0/28 belongs to \"b\" (allowed_ips[0]) already";
    refused(other, 19, "peer[2].allowed_ips[1]", words);
    let one_shares = other.replace("[\"10.9.0.0/28\"]", "[\"10.9.0.0/28\"]\npriority = 1");
    refused(&one_shares, 20, "peer[2].allowed_ips[1]", words);
    let both_share = accepted(&format!("{one_shares}weight = 256\n"));
    let priorities =
        both_share.peers[1..].iter().map(|peer| (peer.priority_or_default(), peer.weight_or_default()));
    assert_eq!(priorities.collect::<Vec<_>>(), [(1, 1), (100, 256)]);
    let kernel = accepted("address = [\"10.9.0.7\", \"fd09::7\"]\n");
    assert_eq!(kernel.peers[1].addresses.len(), 2);
    refused("address = [\"10.9.0.1\"]\n", 15, "peer[1].address[0]", "10.9.0.1 is our own address");
    refused("address = [\"10.9.0.0/24\"]\n", 15, "peer[1].address[0]", "is not an address");
    let both = "address = [\"10.9.0.7\",\n\"10.9.0.7\"]\n";
    refused(both, 16, "peer[1].address[1]", "10.9.0.7 belongs to \"b\" already");
    expect("allowed_ips = [\"10.9.0.2\"]\n", 9, "peer[0].allowed_ips", "there is no [tun]");
    let both = parse(&format!("{BASE}allowed_ips = [\"x\"]\n")).unwrap_err().to_string();
    assert!(both.contains("there is no [tun]") && both.contains("is not a prefix"), "{both}");
    assert!(parse(&format!("{BASE}allowed_ips = []\n")).is_ok());
    for dscp in ["64", "-1", "\"46\"", "\"EF\""] {
        refused(
            &format!("dscp = {dscp}\n"),
            15,
            "peer[1].dscp",
            "write \"copy\", or a whole number from 0 to 63",
        );
    }
    refused("dscp = 4.6\n", 15, "peer[1].dscp", "is a fraction");
}

#[test]
fn what_carries_the_tunnel_does_not_go_into_it() {
    let one = |text: &str, words: &str| {
        refused(&format!("allowed_ips = [\"{text}\"]\n"), 15, "peer[1].allowed_ips[0]", words);
    };
    let held = "192.0.2.0/24 holds 192.0.2.7 of \"b\" (endpoints[0]): the tunnel's own packets would go into";
    one("192.0.2.0/24", held);
    one("192.0.2.0/24", "(remedy: set transport.mark");
    one("192.0.2.7", "192.0.2.7/32 holds 192.0.2.7");
    for everything in [
        "0.0.0.0/0",
        "0.0.0.0/1",
        "128.0.0.0/1",
        "64.0.0.0/2",
        "32.0.0.0/3",
        "::/0",
        "8000::/1",
        "4000::/2",
        "2000::/3",
    ] {
        one(
            everything,
            "is a default route: the tunnel's own packets would take it (remedy: set transport.mark",
        );
    }
    let listening = BASE.replace("127.0.0.1:4433", "[2001:db8::1]:4433\", \"0.0.0.0:4433");
    let text = format!("{listening}{TUNNEL}allowed_ips = [\"2001:db8::/32\"]\n");
    let problem = only_problem(&text).to_string();
    assert!(problem.contains("holds 2001:db8::1 of transport.listen[0]"), "{problem}");

    // What carries the tunnel may stand before or after it.
    let text = format!("{BASE}allowed_ips = [\"192.0.0.0/16\"]\n{TUNNEL}");
    let problem = only_problem(&text);
    assert_eq!((problem.line, &*problem.key_path), (Some(9), "peer[0].allowed_ips[0]"), "{problem}");

    for fine in ["transport.mark = 1\n", "[tun]\nroutes = false\n"] {
        let (text, more) = match fine.strip_prefix("[tun]\n") {
            Some(key) => (TUNNEL.replace("[tun]\n", &format!("[tun]\n{key}")), ""),
            None => (TUNNEL.to_owned(), fine),
        };
        let all = format!("{more}{BASE}{text}allowed_ips = [\"0.0.0.0/0\", \"::/0\", \"192.0.2.0/24\"]\n");
        parse(&all).unwrap();
        // Its link is another matter: the kernel looks there whatever the mark is.
        let link = format!("{more}{BASE}{text}").replace("10.9.0.1/24", "192.0.2.1/24");
        let problem = only_problem(&link);
        assert_eq!(problem.key_path, "tun.address[0]");
        let words = "192.0.2.1/24 holds 192.0.2.7 of \"b\" (endpoints[0]): it would be looked for behind";
        assert!(problem.to_string().contains(words), "{problem}");
    }
    let link = format!("{BASE}{TUNNEL}").replace("10.9.0.1/24", "127.0.0.9/8");
    assert!(only_problem(&link).to_string().contains("is loopback"));
    let listen = format!("{BASE}{TUNNEL}").replace("127.0.0.1:4433", "10.9.0.1:4433");
    assert!(only_problem(&listen).to_string().contains("10.9.0.1/24 holds 10.9.0.1 of transport.listen[0]"));
    accepted("allowed_ips = [\"192.0.2.8/29\", \"4000::/4\", \"fc00::/7\", \"64.0.0.0/4\"]\n");
}

#[test]
fn a_name_that_is_looked_up_through_the_tunnel_is_noted() {
    let marked = format!("transport.mark = 1\n{BASE}");
    let named = "[[peer]]\nname = \"c\"\npublic_key = \"n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0\"\n\
                 endpoints = [\"192.0.2.8:1\", \"c.example:1\"]\n";
    let text = |marked: &str, allowed: &str| {
        let tunnel = TUNNEL.replace("[tun]\n", "[tun]\nroutes = true\n");
        format!("{marked}{tunnel}allowed_ips = [\"{allowed}\"]\n{named}")
    };
    let notes = parse(&text(&marked, "0.0.0.0/0")).unwrap().notes;
    let [note] = &notes[..] else { panic!("{notes:?}") };
    assert_eq!(note.key_path, "peer[2].endpoints[1]");
    let words = "the endpoint of \"c\" is a host name, and may be looked up through the tunnel (remedy: write an address, or";
    assert!(note.to_string().contains(words), "{note}");
    assert_eq!(parse(&text(&marked, "::/2")).unwrap().notes.len(), 1);

    let with_proxy = |proxy: &str| {
        let keys = "endpoints = [\"https://192.0.2.8/\"]\nproxy = \"http://me:secret@PROXY:3128\"\n";
        let named = "endpoints = [\"192.0.2.8:1\", \"c.example:1\"]\n";
        parse(&text(&marked, "0.0.0.0/0").replace(named, &keys.replace("PROXY", proxy)))
    };
    let notes = with_proxy("proxy.example").unwrap().notes;
    let [note] = &notes[..] else { panic!("{notes:?}") };
    assert_eq!(note.key_path, "peer[2].proxy");
    assert!(
        note.to_string().contains("the proxy of \"c\" is a host name")
            && !note.to_string().contains("secret")
    );
    assert_eq!(with_proxy("192.0.2.9").unwrap().notes, []);
    let inside = with_proxy("10.9.0.7").unwrap_err();
    assert!(inside.to_string().contains("10.9.0.7"), "the tunnel holds it: {inside}");

    let without = text(&marked, "0.0.0.0/0").replace("routes = true", "routes = false");
    for fine in [text(BASE, "10.20.0.0/16"), text(&marked, "10.20.0.0/16"), without] {
        assert_eq!(parse(&fine).unwrap().notes, []);
    }
    // A peer of the state file, too.
    let state = format!(
        "[[peer]]\nname = \"late\"\npublic_key = \"{OTHER_KEY}\"\nendpoints = [\"late.example:1\"]\n"
    );
    let folder = tempfile::tempdir().unwrap();
    Identity::generate().unwrap().write_new(&folder.path().join("id.key")).unwrap();
    let path = folder.path().join("culvert.toml");
    fs::write(&path, format!("{marked}{TUNNEL}allowed_ips = [\"0.0.0.0/0\"]\n")).unwrap();
    let (config, _) = Config::load_with(&path, |_| Ok(Some(state))).unwrap();
    let [note] = &config.notes[..] else { panic!("{:?}", config.notes) };
    assert!(note.file.as_ref().is_some_and(|file| file.ends_with("peers.toml")), "{note:?}");
    assert_eq!((note.line, &*note.key_path), (Some(4), "peer[0].endpoints[0]"), "{note}");
}

const OTHER_KEY: &str = "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0";

/// The tunnel with what follows of its peer "b", beside a state file.
fn with_state(more: &str, state: &str) -> (tempfile::TempDir, Result<Config, LoadError>) {
    let folder = tempfile::tempdir().unwrap();
    Identity::generate().unwrap().write_new(&folder.path().join("id.key")).unwrap();
    let path = folder.path().join("culvert.toml");
    fs::write(&path, format!("{BASE}{TUNNEL}{more}")).unwrap();
    let loaded = Config::load_with(&path, |_| Ok(Some(state.to_owned())));
    (folder, loaded.map(|(config, _)| config))
}

#[test]
fn what_the_configuration_says_stands_and_the_state_file_is_at_fault() {
    let late = format!("[[peer]]\nname = \"late\"\npublic_key = \"{OTHER_KEY}\"\n");
    let (_folder, loaded) = with_state("", &format!("{late}allowed_ips = [\"10.9.0.2\"]\ndscp = 0\n"));
    let config = loaded.unwrap();
    assert_eq!(
        (&config.peers[2].allowed_ips, config.peers[2].dscp),
        (&nets(&["10.9.0.2/32"]), Dscp::Fixed(0))
    );
    assert_eq!(config.notes, []);
    for (more, state, key_path, words) in [
        (
            "allowed_ips = [\"10.9.0.2\"]\n",
            "allowed_ips = [\"10.9.0.2/32\"]\n",
            "peer[0].allowed_ips[0]",
            "belongs to \"b\" (allowed_ips[0]) of the configuration already",
        ),
        (
            "allowed_ips = [\"198.51.100.0/24\"]\n",
            "endpoints = [\"198.51.100.9:1\"]\n",
            "peer[0].endpoints[0]",
            "198.51.100.9 lies in 198.51.100.0/24 of \"b\" (allowed_ips[0]) of the configuration",
        ),
        (
            "",
            "allowed_ips = [\"192.0.2.0/28\"]\n",
            "peer[0].allowed_ips[0]",
            "192.0.2.0/28 holds 192.0.2.7 of \"b\" (endpoints[0]) of the configuration",
        ),
        (
            "",
            "endpoints = [\"10.9.0.9:1\"]\n",
            "peer[0].endpoints[0]",
            "lies in 10.9.0.1/24 of tun.address[0]",
        ),
        ("", "allowed_ips = [\"::/0\"]\n", "peer[0].allowed_ips[0]", "is a default route"),
    ] {
        let error = with_state(more, &format!("{late}{state}")).1.unwrap_err();
        let LoadError::Problems(found) = error else { panic!("{error}") };
        let [problem] = &found.problems[..] else { panic!("{found}") };
        assert!(problem.file.as_ref().is_some_and(|file| file.ends_with("peers.toml")), "{problem:?}");
        assert_eq!((problem.line, &*problem.key_path), (Some(4), key_path), "{problem}");
        assert!(problem.to_string().contains(words), "{problem}");
    }
}

#[test]
fn a_peer_that_is_added_is_checked_against_the_tunnel_that_runs() {
    let config = accepted("allowed_ips = [\"10.9.0.2\", \"198.51.100.0/24\"]\n");
    let own = PublicKey([9; 32]);
    let check = |endpoints: &[&str], allowed_ips: &[&str]| {
        let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
        let new = state::NewPeer {
            name: "c".to_owned(),
            public_key: OTHER_KEY.to_owned(),
            endpoints: owned(endpoints),
            allowed_ips: owned(allowed_ips),
            ..state::NewPeer::default()
        };
        state::check(&config, &[own], &config.peers, &new)
    };
    let peer = check(&["203.0.113.1:1"], &["10.9.0.3", "198.51.100.0/25"]).unwrap();
    assert_eq!(peer.allowed_ips, nets(&["10.9.0.3/32", "198.51.100.0/25"]));
    for (endpoints, allowed_ips, words) in [
        (
            &[][..],
            &["10.9.0.2/32"][..],
            "allowed_ips[0]: 10.9.0.2/32 belongs to \"b\" of the configuration already",
        ),
        (
            &[],
            &["10.9.0.4", "10.9.0.1"],
            "allowed_ips[1]: 10.9.0.1 is our own address (tun.address of the conf",
        ),
        (
            &[],
            &["192.0.2.0/24"],
            "allowed_ips[0]: 192.0.2.0/24 holds 192.0.2.7 of \"b\" of the configuration: ",
        ),
        (&[], &["127.0.0.0/7"], "allowed_ips[0]: 127.0.0.0/7 is an address and the length of a prefix"),
        (&[], &["0.0.0.0/0"], "allowed_ips[0]: 0.0.0.0/0 is a default route"),
        (&["198.51.100.1:1"], &[], "endpoints[0]: 198.51.100.1 lies in 198.51.100.0/24 of \"b\" of the conf"),
        (&["[fd09::7]:1"], &[], "endpoints[0]: fd09::7 lies in fd09::1/64 of tun.address of the conf"),
    ] {
        let refusal = check(endpoints, allowed_ips).unwrap_err().to_string();
        assert!(refusal.starts_with(words) && refusal.contains("remedy: "), "{refusal}");
    }
}

#[test]
fn the_two_ends_of_the_examples_fit_together() {
    let example = |name: &str| parse(&fs::read_to_string(root().join("config").join(name)).unwrap()).unwrap();
    for (one, other) in [
        ("site-a.toml", "site-b.toml"),
        ("site-b.toml", "site-a.toml"),
        ("spoke.toml", "hub.toml"),
        ("hub.toml", "spoke.toml"),
    ] {
        let (one, other) = (example(one), example(other));
        // One of its peers is the other end.
        let has = |peer: &Peer, own: &IpNet| peer.allowed_ips.iter().any(|net| net.contains(&own.addr()));
        let own = other.tun.unwrap().addresses;
        assert!(one.peers.iter().any(|peer| own.iter().all(|own| has(peer, own))));
        // On one link, and only one of them dials.
        let link = one.tun.unwrap().addresses.iter().map(IpNet::trunc).collect::<Vec<_>>();
        assert_eq!(link, own.iter().map(IpNet::trunc).collect::<Vec<_>>());
        let dials = |peers: &[Peer]| peers.iter().any(|peer| !peer.endpoints.is_empty());
        assert_ne!(dials(&one.peers), dials(&other.peers));
    }
}

#[test]
fn no_prefix_is_written_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut edit = state::Edit::begin(&folder.path().join("peers.toml")).unwrap();
    let new = |name: &str, key: &str, prefix: &str| state::NewPeer {
        name: name.to_owned(),
        public_key: key.to_owned(),
        allowed_ips: vec![prefix.to_owned()],
        ..state::NewPeer::default()
    };
    edit.add(&new("a", KEY, "10.9.0.2")).unwrap();
    assert!(edit.text().contains("allowed_ips = [\"10.9.0.2\"]\n"), "{}", edit.text());
    let twice = edit.add(&new("b", KEY_2, "10.9.0.2/32")).unwrap_err().to_string();
    assert!(twice.contains("has a peer of that prefix"), "{twice}");
    edit.add(&new("b", KEY_2, "10.9.0.0/24")).unwrap();
}
