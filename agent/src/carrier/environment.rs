//! The proxy that the environment names (`HTTPS_PROXY`, `NO_PROXY`), as curl and others read it.

use std::{env, net::IpAddr};

use config::Proxy;
use ipnet::IpNet;

/// The proxy on the way to `host`, if the environment names one that can be used.
pub(super) fn proxy_to(host: &str) -> Option<Proxy> {
    let variable = |names: [&str; 2]| names.iter().find_map(|name| env::var(name).ok());
    let text = variable(["https_proxy", "HTTPS_PROXY"]).filter(|text| !text.is_empty())?;
    let proxy = proxy_of(&text)?;
    let exempt = variable(["no_proxy", "NO_PROXY"]).unwrap_or_default();
    (!is_exempt(&exempt, host)).then_some(proxy)
}

/// The proxy of a variable, with a scheme or without one.
fn proxy_of(text: &str) -> Option<Proxy> {
    if text.contains("://") { Proxy::of_url(text) } else { Proxy::of_url(&format!("http://{text}")) }
}

/// Whether a list of names, addresses and prefixes has `host`; a name stands for those below it, too.
fn is_exempt(list: &str, host: &str) -> bool {
    let address: Option<IpAddr> = host.parse().ok();
    list.split(',').map(str::trim).filter(|entry| !entry.is_empty()).any(|entry| {
        if entry == "*" {
            return true;
        }
        if let Some(address) = address {
            let is_in = |net: IpNet| net.contains(&address);
            return entry.parse() == Ok(address) || entry.parse().is_ok_and(is_in);
        }
        let (name, host) = (entry.trim_start_matches('.').to_ascii_lowercase(), host.to_ascii_lowercase());
        host.strip_suffix(&*name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_needs_no_scheme() {
        for text in ["proxy.example:3128", "http://proxy.example:3128"] {
            assert_eq!(proxy_of(text), Proxy::of_url("http://proxy.example:3128"), "{text}");
        }
        assert_eq!(proxy_of("socks5://proxy.example:3128"), None);
    }

    #[test]
    fn a_list_has_names_with_those_below_them_addresses_and_prefixes() {
        let list = "localhost, .example.net,example.org ,192.0.2.1,10.0.0.0/8,2001:db8::/32";
        for host in [
            "localhost",
            "example.net",
            "gw.Example.NET",
            "a.b.example.org",
            "192.0.2.1",
            "10.1.2.3",
            "2001:db8::1",
        ] {
            assert!(is_exempt(list, host), "{host}");
        }
        for host in ["notexample.org", "example.com", "192.0.2.2", "11.0.0.1", "2001:db9::1", "net"] {
            assert!(!is_exempt(list, host), "{host}");
        }
        assert!(is_exempt("*", "anything") && !is_exempt("", "anything") && !is_exempt(" , ", "anything"));
    }
}
