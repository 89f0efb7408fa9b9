//! The stream connections of a session: how many there are, and how each finds its worker.

/// The connections that carry the TCP forwards of one peer, at most: the control connection, which is number 0, and the
/// stream connections.
pub const MAX_STREAM_CONNECTIONS: u8 = 8;

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
