//! A peer as a file has it: its `[[peer]]`, with every key that is not at its default.

use std::{fmt::Write as _, sync::Arc};

use crate::{
    Peer, Service, User,
    kinds::{Kind, Names},
    section::{Key, Section, Walker},
};

/// The `[[peer]]` of `peer`, whose services are those of the list. Paths in it are absolute.
#[must_use]
pub fn peer_toml(peer: &Peer, services: &[Service]) -> String {
    let services: Vec<Arc<str>> = services.iter().map(|service| Arc::clone(&service.name)).collect();
    let mut text = "[[peer]]\n".to_owned();
    let names = Names { services: &services, peers: &[] };
    let mut writer = Writer { text: &mut text, before: "", names };
    peer.clone().walk(&Peer::default(), &mut writer);
    text
}

/// The `[[user]]` of `user`, whose services are those of the list.
#[must_use]
pub fn user_toml(user: &User, services: &[Service]) -> String {
    let services: Vec<Arc<str>> = services.iter().map(|service| Arc::clone(&service.name)).collect();
    let mut text = "[[user]]\n".to_owned();
    let names = Names { services: &services, peers: &[] };
    let mut writer = Writer { text: &mut text, before: "", names };
    user.clone().walk(&User::default(), &mut writer);
    text
}

/// Writes a line for each key that is not as in the other section.
struct Writer<'w> {
    text: &'w mut String,
    /// What comes before the name of a key.
    before: &'w str,
    names: Names<'w>,
}

impl Walker for Writer<'_> {
    fn key<T: Clone + 'static>(&mut self, key: &Key, kind: &Kind<T>, value: &mut T, other: &T) {
        let [shown, default] = [&*value, other].map(|value| kind.show(value, self.names));
        if let Some(shown) = shown.filter(|shown| default.as_ref() != Some(shown)) {
            // Writing to a String cannot fail.
            writeln!(self.text, "{}{} = {}", self.before, key.name, shown.toml()).ok();
        }
    }

    fn table<S: Section>(&mut self, name: &'static str, section: &mut S, other: &S) {
        let before = format!("{}{name}.", self.before);
        section.walk(other, &mut Writer { text: &mut *self.text, before: &before, names: self.names });
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Config;

    const HEAD: &str = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n\
                        tun.address = [\"10.9.0.1/24\"]\n\
                        [[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n\
                        [[service]]\nname = \"web\"\nupstream = \"127.0.0.1:80\"\n";

    #[test]
    fn what_is_written_is_read_as_the_same_peer() {
        let identity =
            "[[peer]]\nname = \"b\"\npublic_key = \"bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA\"\n";
        let more = "endpoints = [\"b.example:1\", \"[::1]:2\"]\nlanes = 4\nprofile = \"latency\"\nkeepalive = \"0s\"\n\
                    drop = \"newest\"\nflow_quota = 1\nservices = [\"web\"]\nallowed_ips = [\"10.9.0.2\", \"10.3.0.0/16\"]\n\
                    map = [\"10.3.0.0/16 = 192.168.0.0/16\"]\naddress = [\"10.9.0.2\"]\npriority = 7\nweight = 2\ndscp = 46\ncongestion = \"cubic\"\nthin = \"off\"\n\
                    rate = \"auto\"\nrate_min = \"1Mbit\"\nrate_max = \"50Mbit\"\nrate_receive = \"10Mbit\"\n\
                    quota = { bytes = \"1500MB\", from = 31, then = \"64kbit\" }\n\
                    rate_overhead = 18\ncarrier = \"off\"\nca_file = \"/etc/ca.pem\"\nproxy = \"http://me:p%40ss@proxy.example:3128\"\nrepair = { mode = \"auto\", dscp = [46, 34] }\n\
                    redundant = { dscp = [46], services = [\"web\", \"voice\"], metered = true }\n\
                    queue = { packets = 7, time = \"1s\" }\naqm = { target = \"10ms\" }\n\
                    preshared_key_file = \"/etc/culvert/it's \\\"b\\\".psk\"\n";
        for more in ["", more] {
            let read = |peer: &str| {
                let text = format!("{HEAD}{peer}");
                Config::parse(&text, Path::new("/etc/culvert"))
                    .unwrap_or_else(|error| panic!("{error}\n{text}"))
            };
            let config = read(&format!("{identity}{more}"));
            let text = peer_toml(&config.peers[0], &config.services);
            assert_eq!(read(&text).peers, config.peers, "{text}");
            assert_eq!(text.lines().count() == 3, more.is_empty(), "defaults are left out: {text}");
        }
    }
}
