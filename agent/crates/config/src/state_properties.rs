//! What holds of any state file, beside a configuration, and of its edits: what its fuzz target checks.

use std::{fs::File, path::Path};

use crate::{
    resolve::Draft,
    state::{Config, ConfigProblems, Edit, NewPeer, PeerOrigin, StateError},
};

/// A configuration with a service, a peer, and a tunnel, for peers to have inner addresses.
const BASE: &str = r#"identity.key_file = "id.key"
transport.listen = ["127.0.0.1:4433"]
tun.address = ["10.9.0.1/24"]
[[service]]
name = "dns"
upstream = "127.0.0.1:53"
[[peer]]
name = "exit"
public_key = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA"
allowed_ips = ["10.9.0.2/32"]
"#;

/// A key that stands in no file here.
const OTHER_KEY: &str = "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0";

fn beside(state: &str) -> Result<Config, ConfigProblems> {
    Draft::read(BASE, Path::new("/etc/culvert"), |_| Ok(Some(state.to_owned()))).finish(None)
}

/// Takes `input` as a state file.
///
/// It is accepted, or every problem has words, a remedy and a line within it; a peer that is added to it is found there, stays
/// there when the text is read again, and is gone when it is removed.
pub fn state_text(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let before = beside(text);
    match &before {
        Ok(config) => {
            let from_state = |peer: &&crate::state::Peer| peer.origin == PeerOrigin::State;
            assert_eq!(config.peers.len(), 1 + config.peers.iter().filter(from_state).count());
            assert!(config.peers.iter().flat_map(|peer| &peer.services).all(|place| *place == 0));
        }
        Err(problems) => crate::properties::well_said(problems, text),
    }
    edits(text, before.is_ok());
}

fn edits(text: &str, accepted: bool) {
    let new = NewPeer {
        name: "added".to_owned(),
        public_key: OTHER_KEY.to_owned(),
        services: vec!["dns".to_owned()],
        allowed_ips: vec!["10.9.0.77".to_owned()],
        ..NewPeer::default()
    };
    let Some(mut edit) = edit(text) else { return };
    match edit.add(&new) {
        Ok(()) => {}
        Err(StateError::Broken { .. }) => {
            assert!(!accepted, "what is accepted is TOML");
            return;
        }
        Err(error) => {
            assert!(matches!(error, StateError::Exists { .. }), "{error}");
            return;
        }
    }
    let with = edit.text().to_owned();
    let has = |config: &Config| config.peers.iter().any(|peer| &*peer.name == "added");
    if accepted {
        // It may clash with what the file has: never with words that it cannot have.
        match beside(&with) {
            Ok(config) => assert!(has(&config)),
            Err(problems) => crate::properties::well_said(&problems, &with),
        }
        assert!(matches!(edit.add(&new), Err(StateError::Exists { .. })), "nobody is added twice");
    }
    let Ok(true) = edit.remove("added", true) else {
        // Where `peer` is no list of tables nothing can be added either.
        assert!(!accepted);
        return;
    };
    assert!(!edit.remove("added", true).is_ok_and(|there| there));
    let without = edit.text().to_owned();
    edit.forget("added").expect("it is TOML");
    if accepted {
        assert!(!has(&beside(&without).expect("it is as it was")));
        assert!(!has(&beside(edit.text()).expect("it is as it was")));
    }
}

/// The edit of a file with this text, that is never written.
fn edit(text: &str) -> Option<Edit> {
    let nothing = File::open("/dev/null").ok()?;
    let lock = nothing.try_clone().ok()?;
    Some(Edit { path: "peers.toml".into(), folder: nothing, _lock: lock, text: text.to_owned() })
}
