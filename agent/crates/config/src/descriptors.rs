//! How many files an agent may have to keep open, which the limit on open files must allow.

use crate::{Config, Peer};

/// The most connections to `http.listen`, in all.
pub const MOST_WEB_CONNECTIONS: usize = 512;

/// Sessions of all users together; each has a socket, and up to 256 KiB in its queues.
pub const MOST_USER_SESSIONS: usize = 1_024;

/// Connections to `http.listen` on which a user was let in, in all; they are no visitors' any more.
pub const MOST_USER_CONNECTIONS: usize = 512;

/// Names that are looked up at a time for all users; each look-up has a thread, and a socket to the resolver.
pub const MOST_USER_LOOKUPS: usize = 64;

/// The same for requests to the site, if it is a name; among the others of the sum below.
pub const MOST_SITE_LOOKUPS: usize = 16;

impl Config {
    /// How many files peers, users and unauthenticated senders may keep open.
    #[must_use]
    pub fn descriptors(&self) -> u64 {
        /// For ports, logs, the runtime and names being looked up.
        const OTHERS: u64 = 256;
        /// Lanes of a peer whose number is left to the workers of both ends.
        const CHOSEN_LANES: u64 = 8;
        let lanes = |peer: &Peer| match peer.lanes {
            0 => CHOSEN_LANES,
            chosen => u64::from(chosen),
        };
        // A lane that changes its port has the old one for 3 s more.
        let ports = if self.transport.hop.is_some() { 2 } else { 1 };
        let dialled = self.peers.iter().filter(|peer| !peer.endpoints.is_empty());
        let tcp = self.limits.tcp_streams as u64;
        let decoy = self.access.decoy.map_or(0, |_| self.limits.decoy_flows as u64);
        // Each connection may have another to the site.
        let web = if self.http.listen.is_empty() { 0 } else { 2 * MOST_WEB_CONNECTIONS as u64 };
        let on_tcp = if self.http.listen.is_empty() { 0 } else { MOST_USER_CONNECTIONS };
        let of_users = MOST_USER_SESSIONS + MOST_USER_LOOKUPS + on_tcp;
        let users = if self.users.is_empty() { 0 } else { of_users as u64 };
        let proxied = self.tcp.iter().any(|forward| !forward.tcp.accept_proxy.is_empty());
        let headers = u64::from(self.worker_count()) * if proxied { crate::MOST_HEADERS as u64 } else { 0 };
        let visitors = web + users + headers;
        self.limits.flows as u64 + tcp + visitors + ports * dialled.map(lanes).sum::<u64>() + decoy + OTHERS
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn descriptors_are_counted_for_flows_forwards_lanes_and_the_decoy() {
        const PASSWORD_KEY: &str = "AAAAAAAAAAAAAAAAAAAAAA.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";
        let count = |more: &str| {
            let text = format!(
                "identity.key_file = \"x\"\ntransport.listen = [\"127.0.0.1:4433\"]\n\
                 limits = {{ flows = 1000, tcp_streams = 100, open_peers = 3, decoy_flows = 50 }}\n\
                 [[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n\
                 [[peer]]\nname = \"a\"\npublic_key = \"{KEY}\"\n{more}"
            );
            Config::parse(&text, Path::new("")).unwrap().descriptors()
        };
        let alone = 1000 + 100 + 256;
        assert_eq!(count(""), alone);
        assert_eq!(count("endpoints = [\"a:1\"]\n"), alone + 8);
        assert_eq!(count("endpoints = [\"a:1\"]\nlanes = 64\n"), alone + 64);
        let user =
            format!("[[user]]\nname = \"anna\"\npassword_key = \"{PASSWORD_KEY}\"\nservices = [\"dns\"]\n");
        assert_eq!(count(&user), alone + 1_024 + 64);
        assert_eq!(count("[access]\ndecoy = \"127.0.0.1:1\"\n"), alone + 50);
    }
}
