//! The hooks through real handshakes, and each fact about quinn-proto and rustls that they rest on.

use std::time::Duration;

use quinn_proto::Side;

use super::*;
use crate::{
    classify::{Class, Initial, classify},
    knock::{epochs, hello_hash, open},
    session, suite,
    testing::{
        DCID, Fate, Link, SECONDS, client_tls, knock, knocking, no_tokens, server_identity, server_key,
    },
};

const LONG: Duration = Duration::from_secs(60);

fn initial(datagram: &[u8]) -> Option<Initial<'_>> {
    match classify(datagram) {
        Class::Initial(initial) => Some(initial),
        Class::Short { .. }
        | Class::ZeroRtt { .. }
        | Class::Handshake { .. }
        | Class::Retry { .. }
        | Class::Other => None,
    }
}

/// Asserts that all Initials of the client carry one token, a knock: how many there were.
fn knocks(link: &Link) -> usize {
    let mut count = 0;
    let mut token = None;
    for (_, datagram) in &link.up {
        let Some(initial) = initial(datagram) else { continue };
        assert!(datagram.len() >= 1200);
        assert_eq!(*token.get_or_insert(initial.token), initial.token);
        count += 1;
    }
    let opened = open(&server_identity().agreement_key(), &server_key(), &DCID, token.unwrap()).unwrap();
    assert_eq!(opened.unix_seconds, SECONDS);
    count
}

#[test]
fn every_initial_carries_the_knock() {
    let mut link = Link::new(knocking(), no_tokens(), false);
    assert!(link.run(LONG, |_, _| Fate::Pass));
    assert!(knocks(&link) >= 2, "a first and a second flight");
    assert_eq!(link.connections.len(), 1);
    // A token that the server's key does not open is no token: nothing is validated, nobody is answered.
    assert!(!link.connections[0].validated && link.connections[0].may_retry && link.responses == 0);
    assert_eq!(link.connections[0].original_dcid, DCID);
}

#[test]
fn repeated_flights_carry_it_as_well() {
    for lost in [&[0][..], &[0, 1, 2], &[1], &[1, 2]] {
        let mut link = Link::new(knocking(), no_tokens(), false);
        let connected =
            link.run(LONG, |number, _| if lost.contains(&number) { Fate::Lose } else { Fate::Pass });
        assert!(connected, "without {lost:?}");
        assert!(knocks(&link) >= 2, "without {lost:?}");
    }
}

#[test]
fn an_unanswered_client_repeats_it_for_fifteen_seconds() {
    let mut link = Link::new(knocking(), no_tokens(), false);
    assert!(!link.run(LONG, |_, _| Fate::Lose));
    assert!(knocks(&link) > 3);
    let (first, last) = (link.up[0].0, link.up[link.up.len() - 1].0);
    assert!(last - first <= Duration::from_secs(16), "{:?}", last - first);
}

#[test]
fn the_second_flight_goes_to_the_servers_connection_id() {
    let mut link = Link::new(knocking(), no_tokens(), false);
    assert!(link.run(LONG, |_, _| Fate::Pass));
    let initials: Vec<_> = link.up.iter().filter_map(|(_, datagram)| initial(datagram)).collect();
    let epochs = epochs(SECONDS, Duration::from_secs(90));
    assert!(server_key().is_proof(initials[0].dcid, initials[0].token, epochs.clone()));
    assert_ne!(initials[1].dcid, DCID);
    let holds = server_key().is_proof(initials[1].dcid, initials[1].token, epochs);
    assert!(!holds, "it passes by the table alone");
}

#[test]
fn the_hello_that_is_sent_is_the_one_that_was_hashed() {
    let mut link = Link::new(knocking(), no_tokens(), false);
    let mut opened = None;
    assert!(link.run(LONG, |number, datagram| {
        if number == 0 {
            let initial = initial(datagram).unwrap();
            let tls = crate::testing::server_tls();
            let hello = crate::initial::client_hello(&*tls, &[datagram]);
            let own = server_identity().agreement_key();
            let knock = open(&own, &server_key(), initial.dcid, initial.token).unwrap();
            opened = Some((hello_hash(&hello.unwrap().unwrap()), knock.hello_hash));
        }
        Fate::Pass
    }));
    let (sent, hashed) = opened.unwrap();
    assert_eq!(sent, hashed);
}

#[test]
fn the_suite_is_known_through_the_wrapper() {
    let mut link = Link::new(knocking(), no_tokens(), false);
    assert!(link.run(LONG, |_, _| Fate::Pass));
    let (_, client) = link.client.connection.as_ref().unwrap();
    let (_, server) = link.server.connection.as_ref().unwrap();
    let suite = suite::negotiated(client.crypto_session());
    assert!(suite.is_some());
    assert_eq!(suite, suite::negotiated(server.crypto_session()));
    let exported = |connection: &quinn_proto::Connection| {
        let mut secret = [0; 48];
        connection.crypto_session().export_keying_material(&mut secret, b"label", b"context").unwrap();
        secret
    };
    assert_eq!(exported(client), exported(server));
}

/// The order in which quinn-proto calls the hooks within one `connect`.
#[test]
fn hooks_are_called_in_their_order() {
    struct Watched(Arc<dyn crypto::ClientConfig>, Arc<Mutex<Vec<&'static str>>>);
    impl crypto::ClientConfig for Watched {
        fn start_session(
            self: Arc<Self>,
            version: u32,
            server_name: &str,
            params: &TransportParameters,
        ) -> Result<Box<dyn Session>, ConnectError> {
            self.1.lock().unwrap_or_else(PoisonError::into_inner).push("start_session");
            let mut session = Arc::clone(&self.0).start_session(version, server_name, params)?;
            // rustls has the complete ClientHello at once, and nothing after it.
            let (mut hello, mut more) = (Vec::new(), Vec::new());
            assert!(session.write_handshake(&mut hello).is_none());
            assert!(is_complete(&hello));
            assert!(session.write_handshake(&mut more).is_none() && more.is_empty());
            let written = Some((hello, None));
            Ok(Box::new(session::Watched { written, ..session::Watched::new(session, Side::Client) }))
        }
    }
    struct WatchedTokens(Arc<Slot>, Arc<Mutex<Vec<&'static str>>>);
    impl TokenStore for WatchedTokens {
        fn insert(&self, name: &str, token: Bytes) {
            self.0.insert(name, token);
        }
        fn take(&self, name: &str) -> Option<Bytes> {
            self.1.lock().unwrap().push("take");
            self.0.take(name)
        }
    }

    let order = Arc::new(Mutex::new(Vec::new()));
    let watched = Watched(client_tls(crate::tls::KeyExchange::X25519), Arc::clone(&order));
    let slot = Arc::new(Slot(Mutex::new(State { knock: Some(knock()), dcid: None, token: None })));
    let crypto =
        KnockClientConfig { inner: Arc::new(SuiteClientConfig(Arc::new(watched))), slot: Arc::clone(&slot) };
    let mut config = quinn_proto::ClientConfig::new(Arc::new(crypto));
    let (asked, remembers) = (Arc::clone(&order), Arc::clone(&slot));
    config.initial_dst_cid_provider(Arc::new(move || {
        asked.lock().unwrap().push("dcid");
        remembers.lock().dcid = Some(ConnectionId::new(&DCID));
        ConnectionId::new(&DCID)
    }));
    config.token_store(Arc::new(WatchedTokens(slot, Arc::clone(&order))));
    let mut link = Link::new(config, no_tokens(), false);
    assert_eq!(*order.lock().unwrap(), ["dcid", "start_session", "take"], "all within `connect`");
    assert!(link.run(LONG, |_, _| Fate::Pass));
    assert!(knocks(&link) >= 2);
}

#[test]
fn an_armed_config_serves_one_attempt() {
    let config = knocking();
    let mut link = Link::new(config.clone(), no_tokens(), false);
    let again = link.client.endpoint.connect(link.now, config, link.server_address(), "culvert");
    assert!(matches!(again, Err(ConnectError::EndpointStopping)));
    assert!(link.run(LONG, |_, _| Fate::Pass), "the first attempt is not disturbed");
}

#[test]
fn half_a_hello_is_no_hello() {
    assert!(is_complete(&[1, 0, 0, 2, 7, 7]));
    for bytes in [&[][..], &[1], &[1, 0, 0, 2, 7], &[1, 0, 0, 2, 7, 7, 7], &[2, 0, 0, 2, 7, 7], &[1, 0, 0]] {
        assert!(!is_complete(bytes), "{bytes:?}");
    }
    assert_ne!(hello_hash(&[1, 0, 0, 0]), hello_hash(&[1, 0, 0, 1]));
}

#[test]
fn a_token_from_elsewhere_is_forgotten() {
    let slot = Slot(Mutex::new(State { knock: Some(knock()), dcid: None, token: None }));
    slot.insert("culvert", Bytes::from_static(b"a token"));
    assert_eq!(slot.take("culvert"), None);
}
