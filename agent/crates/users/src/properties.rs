//! What holds of any bytes of a client, for the fuzz target.

use std::net::IpAddr;

use crate::{
    credentials::{MOST_BYTES, presented},
    ip::scope::{IP, Scope, Wanted},
    target::{Host, Target, UDP},
};

/// Takes `input` as the value of `authorization`, as the authority of a CONNECT and as the path of a CONNECT-UDP or a CONNECT-IP.
///
/// A target is the same when it is written again, and credentials have no colon in the name.
pub fn user_request(input: &[u8]) {
    let mut buffer = [0; MOST_BYTES];
    if let Some(presented) = presented(input, &mut buffer) {
        assert!(!presented.name.contains(':') && presented.password.len() < MOST_BYTES);
    }
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Some(scope) = Scope::of_path(text) {
        let target = match &scope.target {
            Wanted::All => "*".to_owned(),
            Wanted::Prefix(net) => net.to_string().replace(':', "%3A").replace('/', "%2F"),
            Wanted::Name(name) => name.clone(),
        };
        let protocol = scope.protocol.map_or_else(|| "*".to_owned(), |protocol| protocol.to_string());
        assert_eq!(Scope::of_path(&format!("{IP}{target}/{protocol}/")), Some(scope));
    }
    for target in [Target::of_connect(text), Target::of_connect_udp(text)].into_iter().flatten() {
        assert!(target.port > 0);
        let host = match &target.host {
            Host::Name(name) => name.clone(),
            Host::Address(IpAddr::V4(address)) => address.to_string(),
            Host::Address(IpAddr::V6(address)) => format!("[{address}]"),
        };
        assert_eq!(Target::of_connect(&format!("{host}:{}", target.port)).as_ref(), Some(&target));
        let host = host.trim_matches(['[', ']']).replace(':', "%3A");
        assert_eq!(Target::of_connect_udp(&format!("{UDP}{host}/{}/", target.port)), Some(target));
    }
}
