//! The uplink of a peer with several lines: which line datagrams wait for, and sending what waits for each.

use crate::{
    datapath::uplink::{Drained, Uplink, bucket_of},
    lines::{Place, on_line},
    relay::{FlowId, QueueClass, Run},
};

impl Uplink<'_> {
    /// The line that lane `index` is on, if there are several.
    #[inline]
    pub(super) fn line_of_lane(&self, index: u8) -> Option<u8> {
        let lines = self.link.as_deref()?.pool.lines.as_ref()?;
        Some(lines.of_lane(index))
    }

    /// The line that carries a flow now, if there are several.
    #[inline]
    pub(super) fn line_of_flow(&mut self, id: FlowId) -> Option<u8> {
        let lines = self.link.as_deref()?.pool.lines.as_ref()?;
        let number = self.relay.flows.get(id)?.number;
        let place = Place { bucket: bucket_of(number), index: 0 };
        Some(lines.of_lane(on_line(Some(lines), &mut self.relay.lines, place, self.now)))
    }

    /// The line for a run that waits.
    fn line_of_run(&mut self, run: &Run) -> Option<u8> {
        match run.class {
            QueueClass::Flow(flow) => self.line_of_flow(flow),
            QueueClass::Packets(class) => {
                let is_up = |lane: u8| {
                    let pool = self.link.as_deref().map(|link| &link.pool)?;
                    let line = pool.lines.as_ref()?.of_lane(lane);
                    let is_left = pool.lines.as_ref()?.is_left(line);
                    (pool.is_up(self.lanes, lane) && !is_left).then_some(line)
                };
                class.lane.and_then(is_up).or_else(|| {
                    let lane = self.stripe(class.bucket());
                    self.line_of_lane(lane)
                })
            }
        }
    }

    /// Sends what waits for each line while there are lanes and room, and the rates let it go, up to about `most` datagrams of each.
    pub(super) fn drain_lines(&mut self, most: usize) -> Drained {
        self.settle_lines();
        let lines = u8::try_from(self.relay.line_queues.len()).unwrap_or(u8::MAX);
        let (mut more, mut paced, mut blocked) = (false, None, None);
        for line in [None].into_iter().chain((0..lines).map(Some)) {
            match self.drain_queue(line, most) {
                Drained::Empty => {}
                Drained::More => more = true,
                Drained::Blocked(done) => blocked = Some(blocked.unwrap_or(0) + done),
                Drained::Paced(at) => paced = Some(paced.map_or(at, |before| at.min(before))),
            }
        }
        match (paced, blocked) {
            // Whoever sends a part only comes again.
            _ if more && (most < usize::MAX || paced.is_none()) => Drained::More,
            (Some(at), _) => Drained::Paced(at),
            (None, Some(done)) => Drained::Blocked(done),
            (None, None) => Drained::Empty,
        }
    }

    /// Gives what waits for no line, and for one that is suspect or down, to other lines: what came first goes first.
    fn settle_lines(&mut self) {
        let Some(lines) = self.link.as_deref().and_then(|link| link.pool.lines.as_ref()) else { return };
        let mut runs = Vec::new();
        for (line, waiting) in (0..).zip(&mut self.relay.line_queues) {
            if !waiting.queue.is_empty() && lines.is_left(line) {
                runs.extend(waiting.queue.take_all());
            }
        }
        if !self.relay.queue.is_empty() {
            runs.extend(self.relay.queue.take_all());
        }
        for run in runs {
            let line = self.line_of_run(&run);
            self.relay.admit(line, run);
        }
    }
}
