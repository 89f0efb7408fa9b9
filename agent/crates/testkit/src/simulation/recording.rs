//! What `[records]` has of an agent's flows and forwards.

use std::sync::{Arc, mpsc::Receiver};

use dataplane::records::{Ended, RecordCounts, Recorder};

use super::World;

/// The records of one agent.
pub struct Recording {
    queue: Receiver<Ended>,
    pub counts: Arc<RecordCounts>,
}

impl Recording {
    /// The records since the last call, oldest first.
    pub fn take(&self) -> Vec<Ended> {
        self.queue.try_iter().collect()
    }
}

impl World {
    /// Records what ends at an agent, but for flows that are there already; at most `most` records wait to be taken.
    pub fn record(&self, place: usize, most: usize) -> Recording {
        let (recorder, queue, counts) = Recorder::new(most, Arc::new(self.clock.clone()));
        self.agents[place].as_ref().expect("it runs").hub.record_ends(recorder);
        Recording { queue, counts }
    }
}
