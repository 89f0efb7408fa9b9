//! Endpoints that are URLs, and the proxy on the way to them.

use std::path::Path;

use super::*;
use crate::Config;

fn endpoint(text: &str) -> Result<Endpoint, String> {
    parsed_endpoint(text).map_err(|bad| bad.problem)
}

#[test]
fn an_endpoint_may_be_a_url() {
    for (text, shown, name, port) in [
        ("https://gw.example.net/", "https://gw.example.net/", "gw.example.net", 443),
        ("HTTPS://GW.example.net", "https://gw.example.net/", "gw.example.net", 443),
        ("https://gw.example.net:443/", "https://gw.example.net/", "gw.example.net", 443),
        ("https://gw.example.net:8443", "https://gw.example.net:8443/", "gw.example.net", 8443),
        ("https://192.0.2.7/", "https://192.0.2.7/", "192.0.2.7", 443),
        ("https://[2001:db8::1]/", "https://[2001:db8::1]/", "2001:db8::1", 443),
        ("https://[2001:db8::1]:8443/", "https://[2001:db8::1]:8443/", "2001:db8::1", 8443),
    ] {
        let endpoint = endpoint(text).unwrap();
        assert!(endpoint.is_over_tcp());
        assert_eq!((endpoint.to_string().as_str(), endpoint.name(), endpoint.port), (shown, name, port));
    }
    let udp = endpoint("[2001:db8::1]:4433").unwrap();
    assert!(!udp.is_over_tcp());
    assert_eq!((udp.name(), udp.to_string().as_str()), ("2001:db8::1", "[2001:db8::1]:4433"));
}

#[test]
fn what_a_url_cannot_say_is_refused() {
    for text in [
        "http://gw.example.net/",
        "wss://gw.example.net/",
        "https://gw.example.net/path",
        "https://gw.example.net/?x",
        "https://me@gw.example.net/",
        "https://[fe80::1%eth0]/",
        "https://gw.example.net:0/",
        "https://:443/",
        "https:///",
        "https://",
        "https://0.0.0.0/",
    ] {
        assert!(endpoint(text).is_err(), "{text}");
    }
}

#[test]
fn a_proxy_has_a_host_and_maybe_a_password() {
    let proxy = |text| Proxy::parse(text).map_err(|bad| bad.problem);
    let plain = proxy("http://proxy.example:3128").unwrap();
    assert_eq!((plain.at.to_string().as_str(), plain.login()), ("proxy.example:3128", None));
    assert_eq!(proxy("http://proxy.example/").unwrap().at.port, 80);
    assert_eq!(proxy("http://[2001:db8::1]/").unwrap().at.to_string(), "[2001:db8::1]:80");
    // RFC 7617 §2.
    let with_password = proxy("http://Aladdin:open%20sesame@proxy.example:3128").unwrap();
    assert_eq!(with_password.login().unwrap(), b"Aladdin:open sesame");
    assert_eq!(with_password.to_string(), "http://Aladdin:open%20sesame@proxy.example:3128");
    assert_eq!(format!("{with_password:?}"), "http://…@proxy.example:3128");
    assert_eq!(without_password(&with_password.to_string()), "http://…@proxy.example:3128");
    for wrong in [
        "proxy.example:3128",
        "https://proxy.example:3128",
        "http://",
        "http://me@proxy.example:1",
        "http://a:b%@proxy.example:1",
        "http://a:b%0a@proxy.example:1",
        "http://a:b/c@proxy.example:1",
        "http://proxy.example:1/path",
    ] {
        let problem = proxy(wrong).map(drop).unwrap_err();
        assert!(!problem.contains("b%"), "{wrong}: {problem}");
    }
}

const HEAD: &str = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n";

/// A configuration with one peer that has these keys, and another one with a URL.
fn parse(keys: &str) -> Result<Config, String> {
    let text = format!(
        "{HEAD}[[peer]]\nname = \"a\"\npublic_key = \"bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA\"\n{keys}\n\
         [[peer]]\nname = \"b\"\npublic_key = \"n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0\"\nendpoints = [\"https://b.example/\"]\n"
    );
    Config::parse(&text, Path::new("/etc/culvert")).map_err(|error| error.to_string())
}

#[test]
fn the_carrier_says_which_endpoints_have_their_turns() {
    let dialled = |carrier: &str| {
        let keys =
            format!("endpoints = [\"https://a.example/\", \"a.example:4433\"]\ncarrier = \"{carrier}\"\n");
        let peer = &parse(&keys).unwrap().peers[0];
        peer.dialled().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(dialled("fallback"), "a.example:4433 https://a.example/");
    assert_eq!(dialled("always"), "https://a.example/");
    assert_eq!(dialled("off"), "a.example:4433");
}

#[test]
fn what_can_never_be_dialled_is_a_problem() {
    for (keys, problem) in [
        ("endpoints = [\"a.example:1\"]\ncarrier = \"always\"", "no endpoint is an https:// one"),
        ("carrier = \"always\"", "no endpoint is an https:// one"),
        ("endpoints = [\"https://a.example/\"]\ncarrier = \"off\"", "all endpoints are https:// ones"),
        ("endpoints = [\"https://B.example:443/\"]", "https://b.example/ is an endpoint of \"a\" already"),
        ("ca_file = \"\"", "is empty"),
    ] {
        let error = parse(keys).unwrap_err();
        assert!(error.contains(problem), "{keys}: {error}");
    }
    let config = parse("carrier = \"off\"\nca_file = \"ca.pem\"").unwrap();
    assert_eq!(config.peers[0].ca_file.as_deref(), Some(Path::new("/etc/culvert/ca.pem")));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    assert!(check_ca_file(&file).is_err());
    std::fs::write(&file, "none").unwrap();
    assert_eq!(check_ca_file(&file).unwrap_err().to_string(), "has no certificate");
    std::fs::write(&file, "x\n-----BEGIN CERTIFICATE-----\n").unwrap();
    check_ca_file(&file).unwrap();
}
