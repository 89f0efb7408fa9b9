//! Sessions of users as records of the agent.

use dataplane::records::{Carried, Ended, RecordKind, Recorder};
use users::{
    Users,
    session::{SessionKind, SessionRecord},
};

/// Has sessions of `users` put into the queue of `recorder` when they are over.
pub(super) fn record(users: &Users, recorder: &Recorder) {
    let recorder = recorder.clone();
    users.record_ends(Box::new(move |session| recorder.note(ended(session, &recorder))));
}

fn ended(session: SessionRecord, recorder: &Recorder) -> Ended {
    let (kind, protocol) = match session.kind {
        SessionKind::Bytes => (RecordKind::Connect, 6),
        SessionKind::Datagrams => (RecordKind::ConnectUdp, 17),
        // Of several.
        SessionKind::Packets => (RecordKind::ConnectIp, 0),
    };
    let carried = |(packets, bytes)| Carried { packets, bytes };
    Ended {
        kind,
        protocol,
        peer: session.user,
        service: session.target,
        // The user has opened it, as a peer would have.
        opened_here: false,
        source: Some(session.client),
        destination: session.address,
        span: recorder.span_until(session.began, session.ended),
        uplink: carried(session.to_user),
        downlink: carried(session.to_target),
        reason: session.end.label(),
    }
}
