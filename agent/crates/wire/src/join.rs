//! The first message on a stream connection: the session that it joins, and its number.

use crate::{
    messages::{MessageError, SIGNATURE_BYTES, id, narrow},
    protobuf,
};

/// The connections that carry the TCP forwards of one peer, at most: the control connection, which is number 0, and the
/// stream connections.
pub const MAX_STREAM_CONNECTIONS: u8 = 8;

/// The first message on a stream connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// The dialler's process, as in its hello.
    pub instance: [u8; 16],
    /// The session: 16 bytes that TLS exports at both ends of its control connection.
    pub session: [u8; 16],
    /// The number of the stream connection: 1 or more, and below [`MAX_STREAM_CONNECTIONS`].
    pub number: u8,
    /// The dialler's Ed25519 signature over what [`possession`](crate::messages::possession) gives for this connection.
    pub possession: Option<[u8; SIGNATURE_BYTES]>,
}

/// The number of connections that carry the TCP forwards of a peer, the control connection included: one for each worker of the
/// end that has more.
#[must_use]
pub fn connections_for(own_workers: u8, peer_workers: u16) -> u8 {
    let most = u16::from(own_workers).max(peer_workers).clamp(1, u16::from(MAX_STREAM_CONNECTIONS));
    u8::try_from(most).unwrap_or(MAX_STREAM_CONNECTIONS)
}

/// The first byte of the Initial's destination with which stream connection `number` reaches its worker at the listener, which
/// has `workers`: the control connection was dialled with `control`. `choice` picks one of the bytes that do.
#[must_use]
pub fn first_byte(control: u8, number: u8, workers: u16, choice: u8) -> u8 {
    let workers = workers.max(1);
    let worker = (u16::from(control) % workers + u16::from(number)) % workers;
    let choices = 255u16.saturating_sub(worker) / workers + 1;
    u8::try_from(u16::from(choice) % choices * workers + worker).unwrap_or(control)
}

impl TryFrom<protobuf::Join> for Join {
    type Error = MessageError;

    fn try_from(join: protobuf::Join) -> Result<Self, MessageError> {
        Ok(Self {
            instance: id("instance", &join.instance)?,
            session: id("session", &join.session)?,
            number: narrow("number", join.number, 1..=MAX_STREAM_CONNECTIONS - 1)?,
            possession: match &join.possession[..] {
                [] => None,
                signature => Some(id("possession", signature)?),
            },
        })
    }
}

impl From<&Join> for protobuf::Join {
    fn from(join: &Join) -> Self {
        Self {
            instance: join.instance.to_vec(),
            session: join.session.to_vec(),
            number: join.number.into(),
            possession: join.possession.map(|signature| signature.to_vec()).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::join::*;

    #[test]
    fn the_first_byte_leads_to_the_worker_that_many_after_the_one_of_the_control_connection() {
        for workers in [1u16, 2, 3, 7, 8, 64, 256] {
            for control in [0u8, 1, 100, 255] {
                for number in 0..MAX_STREAM_CONNECTIONS {
                    for choice in [0u8, 1, 77, 255] {
                        let first = first_byte(control, number, workers, choice);
                        let expected = (u16::from(control) + u16::from(number)) % workers;
                        let owner = u16::from(control) % workers;
                        assert_eq!(u16::from(first) % workers, (owner + u16::from(number)) % workers);
                        if 256 % workers == 0 {
                            assert_eq!(u16::from(first) % workers, expected);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn there_are_as_many_as_the_end_with_more_workers_has_and_at_most_eight() {
        assert_eq!(connections_for(1, 1), 1);
        assert_eq!(connections_for(2, 1), 2);
        assert_eq!(connections_for(2, 5), 5);
        assert_eq!(connections_for(64, 256), MAX_STREAM_CONNECTIONS);
    }
}
