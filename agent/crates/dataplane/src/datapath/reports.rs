//! Reports about lanes: what the far end says has arrived, for an automatic rate.

use wire::report::Report;

use crate::{
    datapath::downlink::{Downlink, Outside},
    lanes::LaneId,
    peer::PeerTable,
};

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// Takes a report about the lane that it came on. One that nobody asked for, that comes too early, or that makes no sense is
    /// counted and has no effect.
    pub(super) fn report(&mut self, id: LaneId, fields: &[u8]) {
        let Some(slot) = self.lanes.get_mut(id) else { return };
        let Some(state) = self.peers.data_mut(slot.peer) else { return };
        let account = state.relay.account_of(slot.line);
        let sample = Report::decode(fields)
            .filter(|_| account.is_measured())
            .and_then(|report| slot.take_report(&report, self.now));
        if let Some(sample) = &sample {
            account.report(sample, self.now);
        }
        state.relay.stats.reports.count(sample.is_some());
    }
}
