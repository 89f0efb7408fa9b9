//! Ports that change, and ranges of ports.

use std::time::Duration;

use crate::tests::{only_problem, parse};

const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";

fn with(transport: &str, endpoint: &str) -> String {
    format!(
        "identity.key_file = \"x\"\n[transport]\n{transport}\n[[peer]]\nname = \"a\"\npublic_key = \"{KEY}\"\n\
         endpoints = [\"{endpoint}\"]\nlanes = 6\n"
    )
}

#[test]
fn ports_change_within_5_s_to_a_day_or_not_at_all() {
    let hop =
        |value: &str| parse(&with(&format!("hop = \"{value}\""), "gw:1")).map(|config| config.transport.hop);
    assert_eq!(parse(&with("", "gw:1")).unwrap().transport.hop, None);
    assert_eq!(hop("off").unwrap(), None);
    assert_eq!(hop("5s").unwrap(), Some(Duration::from_secs(5)));
    assert_eq!(hop("1day").unwrap(), Some(Duration::from_secs(86_400)));
    for value in ["4999ms", "0s", "25h", "never"] {
        let problem = only_problem(&with(&format!("hop = \"{value}\""), "gw:1"));
        assert_eq!((problem.key_path.as_str(), problem.line), ("transport.hop", Some(3)), "{value}");
    }
}

#[test]
fn lanes_whose_ports_change_have_two_sockets_for_a_while() {
    let files = |transport: &str| parse(&with(transport, "gw:1")).unwrap().descriptors();
    assert_eq!(files("hop = \"5s\"") - files(""), 6);
}

#[test]
fn an_endpoint_may_have_a_range_of_ports_and_a_socket_may_not() {
    let config = parse(&with("advertise = \"gw:20-30\"", "[2001:db8::1]:20000-20100")).unwrap();
    let endpoint = &config.peers[0].endpoints[0];
    assert_eq!((endpoint.port, endpoint.last_port), (20_000, 20_100));
    assert_eq!(endpoint.to_string(), "[2001:db8::1]:20000-20100");
    assert_eq!(config.transport.advertise.unwrap().to_string(), "gw:20-30");

    for listen in ["0.0.0.0:20000-20100", "[::]:20000-20100"] {
        let problem = only_problem(&with(&format!("listen = [\"{listen}\"]"), "gw:1"));
        assert!(problem.problem.contains("is a range of ports"), "{problem:?}");
        let rule = "udp dport 20000-20100 redirect to :20000";
        assert!(problem.remedy.contains(rule), "{problem:?}");
    }
    for (key, value) in [("http.site", "http://127.0.0.1:80-90"), ("access.decoy", "127.0.0.1:1-2")] {
        let text = format!("{key} = \"{value}\"\n{}", with("listen = [\"127.0.0.1:1\"]", "gw:1"));
        let found = parse(&text).unwrap_err().problems;
        assert!(
            found.iter().any(|problem| problem.key_path == key && problem.problem.contains("range of ports")),
            "{found:?}"
        );
    }
    only_problem(&with("", "https://gw:80-90/"));
}
