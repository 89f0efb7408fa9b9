//! The name of a session, which a stream connection gives when it joins.

use quinn_proto::crypto::Session;

use crate::control::driver::ControlConnection;

/// The label under which TLS exports the name of a session (RFC 8446 §7.5).
const SESSION_LABEL: &[u8] = b"EXPORTER culvert session";

/// The name of the session whose control connection this is: 16 bytes that only its two ends have.
#[must_use]
pub fn session_name(connection: &ControlConnection) -> Option<[u8; 16]> {
    name_of(connection.quinn().crypto_session())
}

pub(crate) fn name_of(session: &dyn Session) -> Option<[u8; 16]> {
    let mut name = [0; 16];
    session.export_keying_material(&mut name, SESSION_LABEL, &[]).ok()?;
    Some(name)
}
