//! How much work a turn may do at the very most: a schedule in which a turn does more fails.

use dataplane::datapath::work::MOST_PER_TURN;
use quinn_proto::ConnectionHandle;

use crate::{
    control::driver::{Event, UNITS_PER_TURN},
    worker::{Worker, work::TurnWork},
};

impl Worker {
    /// The first count of the last turn that exceeds what any turn may do, in words.
    #[must_use]
    pub fn excess_of_turn(&self) -> Option<String> {
        let flows: usize = self.cx.peers.iter().map(|peer| peer.data.relay.flows.len()).sum();
        self.cx.stats.work.excess(self.sessions.control.len() as u64, flows as u64)
    }
}

impl TurnWork {
    /// What of it is more than a turn may do of a worker with so many control connections and flows, in words.
    ///
    /// | count | bound | why |
    /// |---|---|---|
    /// | work, frames | `MOST_PER_TURN` | `dataplane/src/datapath/work.rs` |
    /// | message units | of each connection `UNITS_PER_TURN`, and 272 more | a last message of 64 KiB |
    /// | events | as many as message units, and 1,100 more of each connection | its streams, and each kind of event twice |
    /// | walked | sixteen times the flows | a session that is replaced and all of its lanes come up |
    /// | opened | 1,200, and 80 more of each connection | `MOST_PER_TURN` in openings of flows; streams, dialled lanes |
    fn excess(&self, connections: u64, flows: u64) -> Option<String> {
        let connections = connections.max(1);
        let units = connections * (u64::from(UNITS_PER_TURN) + 272);
        let events = units + connections * 1_100;
        let event_bytes = events * size_of::<(ConnectionHandle, Event)>() as u64;
        let checks = [
            ("work", self.work, MOST_PER_TURN),
            ("frames", self.frames, MOST_PER_TURN),
            ("events", self.events, events),
            ("bytes of events", self.event_bytes, event_bytes),
            ("units of messages", self.message_units, units),
            ("flows looked at", self.walked, 16 * (flows + 64)),
            ("sockets opened", self.opened, 1_200 + 80 * connections),
        ];
        let (what, count, most) = checks.into_iter().find(|(_, count, most)| count > most)?;
        Some(format!("{count} {what} in a turn, not {most}"))
    }
}
