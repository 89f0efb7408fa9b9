//! How every schedule ends: all is well again, everybody recovers in time, everything arrives, and nothing is left.

use std::time::Duration;

use testkit::simulation::WorkerBooks;

use super::{
    agents::IDLE_MS,
    invariants::{books_of, disconnected, left_over, sum},
    model::{Failure, fail},
    run::{Fault, Run},
    schedule::{EXIT, PLENTY, Service, What},
};

/// Until datagrams flow again where there is traffic: silence is noticed after three PTO of what the path was, at least half a
/// second, and attempts follow each other by a second.
const MOST_RECOVERY: Duration = Duration::from_secs(5);

/// Without lanes nothing but QUIC's idle time tells that the other end has forgotten the session.
const STANDARD_RECOVERY: Duration = Duration::from_secs(30);

/// Until a short connection is complete on a good path.
const MOST_CONNECTION: Duration = Duration::from_secs(2);

/// A host behind a device that sends nothing earlier.
const LAST_HOST: u8 = 200;

impl Run<'_> {
    /// The network is well again: everybody is connected in time, and datagrams flow both ways.
    pub(crate) fn recover(&mut self) -> Result<(), Failure> {
        let setup = self.schedule.setup.clone();
        self.clear();
        for agent in setup.agents() {
            self.start(agent, false);
            if self.variants[usize::from(agent)] != 0 {
                self.reload(agent, 0);
            }
        }
        let echoes: Vec<u16> =
            (0..setup.entries).map(|entry| self.flow(1_000, entry, Service::Echo)).collect();
        if setup.is_eager {
            self.answered(&echoes)?;
        }
        // The interval between attempts grows to 15 s, with jitter.
        let most = Duration::from_secs(setup.keepalive_seconds.max(15).into())
            + Duration::from_secs(8)
            + self.most_idle();
        let until = self.world.clock.elapsed() + most;
        while let Some(why) = disconnected(&books_of(&self.world, &setup), &setup) {
            if self.world.clock.elapsed() >= until {
                fail!("recovers", "after {most:?}: {why}");
            }
            self.run_for(Duration::from_millis(200))?;
        }
        // An address that has changed without anybody's notice is noticed now.
        self.answered(&echoes)?;
        // What was under way arrives, and what waited goes.
        self.run_for(Duration::from_millis(1_500))?;
        self.conserve(&echoes)?;
        self.connect_all()?;
        self.tunnel_all()
    }

    /// How much later a session that its other end has forgotten is noticed.
    fn most_idle(&self) -> Duration {
        if self.schedule.setup.is_standard { STANDARD_RECOVERY } else { Duration::ZERO }
    }

    /// Sends until everybody is answered.
    fn answered(&mut self, echoes: &[u16]) -> Result<(), Failure> {
        let before: Vec<usize> = echoes.iter().map(|flow| self.model.arrived(*flow)[1]).collect();
        // Where the ceiling is reached, flows have to end first.
        let most = MOST_RECOVERY + Duration::from_millis(IDLE_MS);
        let most = if self.schedule.setup.flows_per_peer < PLENTY { most } else { MOST_RECOVERY };
        let most = most + self.most_idle();
        let until = self.world.clock.elapsed() + most;
        while echoes.iter().zip(&before).any(|(flow, before)| self.model.arrived(*flow)[1] == *before) {
            if self.world.clock.elapsed() > until {
                fail!("recovers", "no answer after {most:?} with traffic");
            }
            echoes.iter().for_each(|flow| self.send(*flow, 100));
            self.run_for(Duration::from_millis(50))?;
        }
        Ok(())
    }

    /// On a good path everything arrives, and is in every account on its way.
    fn conserve(&mut self, echoes: &[u16]) -> Result<(), Failure> {
        const EACH: u64 = 10;
        let setup = &self.schedule.setup.clone();
        let before = books_of(&self.world, setup);
        let arrived: Vec<[usize; 2]> = echoes.iter().map(|flow| self.model.arrived(*flow)).collect();
        for _ in 0..EACH {
            echoes.iter().for_each(|flow| self.send(*flow, 100));
            self.run_for(Duration::from_millis(7))?;
        }
        self.run_for(Duration::from_millis(150))?;
        let mut after = books_of(&self.world, setup);
        if self.fault == Some(Fault::Omit) {
            after[0].1[0].peers[0].uplink.account.delivered -= 1;
        }
        for (entry, flow) in echoes.iter().enumerate() {
            let (now, before) = (self.model.arrived(*flow), arrived[entry]);
            let arrived = [now[0] - before[0], now[1] - before[1]].map(|count| count as u64);
            if arrived != [EACH; 2] {
                fail!(
                    "everything arrives",
                    "entry {entry}: {arrived:?} of {EACH} there and back on a good path"
                );
            }
        }
        for (entry, workers) in after.iter().enumerate().take(echoes.len()) {
            let peers = [(entry, 0), (echoes.len(), entry)];
            for (agent, peer) in peers {
                let [now, was] = [&after, &before].map(|books| sum(&books[agent].1, peer));
                for (now, was) in now.iter().zip(was) {
                    let counts = (now.received - was.received, now.delivered - was.delivered);
                    if counts != (EACH, EACH) {
                        fail!(
                            "everything is counted",
                            "agent {agent} of {}: {counts:?} of {EACH}",
                            workers.0
                        );
                    }
                }
            }
        }
        Ok(())
    }

    /// On a good path the bytes of a connection through every entry come back, all of them.
    fn connect_all(&mut self) -> Result<(), Failure> {
        let entries = u32::from(self.schedule.setup.entries);
        let before = self.streams.completed;
        for entry in 0..self.schedule.setup.entries {
            self.event(&What::Connection { entry, bytes: 5_000 })?;
        }
        let until = self.world.clock.elapsed() + MOST_CONNECTION;
        while self.streams.completed < before + entries {
            if self.world.clock.elapsed() >= until {
                let completed = self.streams.completed - before;
                fail!(
                    "connections complete",
                    "{completed} of {entries} after {MOST_CONNECTION:?} on a good path"
                );
            }
            self.run_for(Duration::from_millis(20))?;
        }
        Ok(())
    }

    /// On a good path a packet arrives from behind every device, and one at each.
    fn tunnel_all(&mut self) -> Result<(), Failure> {
        if !self.schedule.setup.has_tun {
            return Ok(());
        }
        let entries = 0..self.schedule.setup.entries;
        let ways: Vec<(u8, u8, u8)> =
            entries.flat_map(|entry| [(entry, EXIT, LAST_HOST), (EXIT, entry, LAST_HOST)]).collect();
        // Their lane may be one that has carried nothing since an address changed: that is noticed now.
        let until = self.world.clock.elapsed() + MOST_RECOVERY + self.most_idle();
        while let Some(way) = ways.iter().find(|way| self.model.packets_arrived(**way) == 0) {
            if self.world.clock.elapsed() >= until {
                fail!("packets arrive", "{way:?}: none after {MOST_RECOVERY:?} on a good path");
            }
            ways.iter().for_each(|way| self.push(*way, 200));
            self.world.settle();
            self.run_for(Duration::from_millis(50))?;
        }
        self.run_for(Duration::from_millis(150))?;
        let before: Vec<usize> = ways.iter().map(|way| self.model.packets_arrived(*way)).collect();
        ways.iter().for_each(|way| self.push(*way, 200));
        self.world.settle();
        self.run_for(Duration::from_millis(150))?;
        for (way, before) in ways.iter().zip(before) {
            let arrived = self.model.packets_arrived(*way) - before;
            if arrived != 1 {
                fail!("packets arrive", "{way:?}: {arrived} of 1 on a good path");
            }
        }
        Ok(())
    }

    fn books_at_rest(&self) -> Vec<(u8, Vec<WorkerBooks>)> {
        let mut books = books_of(&self.world, &self.schedule.setup);
        if self.fault == Some(Fault::Leak) {
            books[0].1[0].upstreams += 1;
        }
        books
    }

    /// When nobody has sent anything for long enough, nothing is left but connections and lanes.
    pub(crate) fn rest(&mut self) -> Result<(), Failure> {
        self.streams.hang_up();
        self.run_for(Duration::from_millis(2 * IDLE_MS + 1_000))?;
        let setup = self.schedule.setup.clone();
        let flows_left = |books: &[(u8, Vec<WorkerBooks>)]| {
            let workers = books.iter().flat_map(|(_, workers)| workers);
            workers.flat_map(|worker| &worker.peers).map(|peer| peer.flows).sum::<usize>()
        };
        let flows = flows_left(&books_of(&self.world, &setup));
        if flows > 0 {
            fail!("idle flows end", "{flows} flows have been silent for longer than they may");
        }
        // A connection that its other end has forgotten is given up after QUIC's idle time, a stream connection after a minute without
        // a forward. It then drains for three PTOs (RFC 9000 §10.2), which are long if its handshake was repeated for seconds and it
        // has had few round trips since.
        let until = self.world.clock.elapsed() + Duration::from_secs(140);
        while let Err(failure) = left_over(&self.books_at_rest(), &setup) {
            if self.world.clock.elapsed() >= until {
                return Err(failure);
            }
            self.run_for(Duration::from_secs(1))?;
        }
        Ok(())
    }
}
