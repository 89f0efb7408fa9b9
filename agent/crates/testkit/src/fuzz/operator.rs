//! What an operator, or a program of this host, hands to an agent: lines of the control socket and files.

use config::{
    Config,
    state::{self, NewPeer},
};
use gate::{identity::Identity, preshared::PresharedKey, properties::identity};
use ops::control_socket::{
    protocol::{Answer, Request},
    status::{Show, Status},
};

/// Takes `input` as a line that a client writes to the control socket.
///
/// What is understood is written as a line that is understood alike. A peer that is to be added is a good one, or every problem
/// has words and a remedy.
pub fn socket_request(input: &[u8]) {
    let request = match Request::from_line(input) {
        Ok(request) => request,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let line = request.to_line();
    assert!(line.ends_with('\n') && line.matches('\n').count() == 1);
    let again = Request::from_line(line.as_bytes());
    assert!(again.is_ok_and(|again| again == request), "{line}");
    match request {
        Request::PeerAdd(peer) | Request::PeerReplace(peer) => added(&peer),
        Request::PeerList {}
        | Request::PeerSet(_)
        | Request::PeerQuota { .. }
        | Request::PeerExport { .. }
        | Request::PeerRemove { .. }
        | Request::UserList {}
        | Request::UserAdd(_)
        | Request::UserSet(_)
        | Request::UserExport { .. }
        | Request::UserRemove { .. }
        | Request::Reload { .. }
        | Request::Drain { .. }
        | Request::Status(_)
        | Request::QlogStart(_)
        | Request::QlogTake { .. }
        | Request::ForwardEnd { .. }
        | Request::QlogStop { .. } => {}
    }
}

/// Checks a peer as the daemon does before it adds it.
fn added(new: &NewPeer) {
    let config = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n\
                  tun.address = [\"10.9.0.1/24\"]\n[[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n";
    let config = Config::parse(config, std::path::Path::new("/etc/culvert")).expect("a good configuration");
    match state::check(&config, &identity(1).public_keys(), &config.peers, new) {
        Ok(peer) => {
            assert_eq!((&*peer.name, peer.endpoints.len()), (new.name.as_str(), new.endpoints.len()));
            assert!(peer.services.iter().all(|place| *place == 0));
        }
        Err(problems) => {
            assert!(!problems.problems.is_empty());
            for problem in &problems.problems {
                assert!(!problem.problem.is_empty() && !problem.remedy.is_empty(), "{problem:?}");
                assert_eq!(problem.line, None, "nobody has written that text");
            }
        }
    }
}

/// Takes `input` as a line that a daemon answers.
///
/// What is understood is written as a line that is understood alike, but for the last digits of numbers. What is shown of it
/// fits into the screen and has nothing in it that moves a terminal's cursor.
pub fn socket_answer(input: &[u8]) {
    let Some(answer) = Answer::from_line(input) else { return };
    let line = answer.to_line("0.1.0");
    assert!(line.ends_with('\n') && line.matches('\n').count() == 1);
    let again = Answer::from_line(line.as_bytes()).expect("it was written by us");
    assert_eq!(std::mem::discriminant(&again), std::mem::discriminant(&answer));
    match answer {
        Answer::Status { status } => shown(*status),
        Answer::Done { .. }
        | Answer::Peers { .. }
        | Answer::Users { .. }
        | Answer::Exported { .. }
        | Answer::Reloaded { .. }
        | Answer::QlogStarted { .. }
        | Answer::Qlog(_)
        | Answer::Refused { .. } => assert_eq!(again, answer),
    }
}

fn shown(mut status: Status) {
    status.sort_by_traffic();
    for lanes in [false, true] {
        for page in [status.to_page(Show { lanes }), status.peer_page(), status.lane_page()] {
            let cut = page.clone().cut(24, 80);
            assert!(
                cut.lines().len() <= 24 && cut.lines().iter().all(|(_, line)| line.chars().count() <= 80)
            );
            for (_, line) in page.lines() {
                assert!(!line.contains(|char: char| char.is_control()), "{line:?}");
            }
        }
    }
}

/// Takes `input` as the file of a private key, and as that of a preshared key.
///
/// What is read is written as a key that is read alike; anything else is refused with words.
pub fn key_file(input: &[u8]) {
    if let Some(key) = PresharedKey::from_text(input) {
        assert_eq!(PresharedKey::from_text(key.to_text().as_ref()), Some(key));
    }
    match Identity::from_pem(input) {
        Ok(identity) => {
            let again = Identity::from_pem(pem(&identity.pkcs8_der()).as_bytes());
            assert!(again.is_ok_and(|again| again.public_key() == identity.public_key()));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn pem(der: &[u8]) -> String {
    let text = data_encoding::BASE64.encode(der);
    format!("-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n")
}

/// Takes `input` as the files that the kernel and systemd write, with a zero byte between them.
///
/// They are read, or are not: it costs nothing else.
pub fn host_text(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut texts = text.split('\0');
    let files = std::array::from_fn(|_| texts.next().unwrap_or_default());
    ops::metrics::host_text(files);
    culvert::doctor::host_text(&text);
}
