//! Packets that never arrive.

use std::{
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use serde_json::Value;

use crate::{
    needs,
    place::Place,
    process::{run, text},
};

/// A rule of nftables that discards what arrives at a place or passes it, without a word to the sender, or what it sends; dropping it removes the
/// rule.
#[derive(Debug)]
pub struct Blockade {
    place: Place,
    table: String,
}

impl Blockade {
    /// Discards what fits `pattern`, in the words of nftables: `udp dport 4433`.
    ///
    /// # Panics
    /// When nftables refuses, or outside of a namespace that the test made.
    #[must_use]
    #[track_caller]
    pub fn new(place: &Place, pattern: &str) -> Self {
        Self::at(place, "input", pattern)
    }

    /// The same for what a router forwards.
    ///
    /// # Panics
    /// When nftables refuses, or outside of a namespace that the test made.
    #[must_use]
    #[track_caller]
    pub fn on_the_way(place: &Place, pattern: &str) -> Self {
        Self::at(place, "forward", pattern)
    }

    /// Discards what the host itself sends, which its kernel tells the sender: EPERM.
    ///
    /// # Panics
    /// When nftables refuses, or outside of a namespace that the test made.
    #[must_use]
    #[track_caller]
    pub fn of_own(place: &Place, pattern: &str) -> Self {
        Self::at(place, "output", pattern)
    }

    #[track_caller]
    fn at(place: &Place, hook: &str, pattern: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        assert_ne!(*place, Place::Host, "the host's packets are not the test's business");
        let table = format!("culvert{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let blockade = Self { place: place.clone(), table };
        let table = &blockade.table;
        blockade.nft(&format!(
            "add table inet {table}; \
             add chain inet {table} arriving {{ type filter hook {hook} priority 0; }}; \
             add rule inet {table} arriving {pattern} counter drop"
        ));
        blockade
    }

    /// How many buffers it has discarded, each of one or more datagrams.
    ///
    /// # Panics
    /// When nftables does not say.
    #[must_use]
    #[track_caller]
    pub fn discarded(&self) -> u64 {
        let listing = self.nft(&format!("list table inet {}", self.table));
        let listing: Value = serde_json::from_str(&listing).expect("nft -j writes JSON");
        let objects = listing["nftables"].as_array().map(Vec::as_slice).unwrap_or_default();
        let expressions = objects.iter().filter_map(|object| object["rule"]["expr"].as_array()).flatten();
        let counts = expressions.filter_map(|expression| expression["counter"]["packets"].as_u64());
        counts.sum()
    }

    #[track_caller]
    fn nft(&self, words: &str) -> String {
        let output = run(&mut self.command(words), Duration::from_secs(10));
        assert!(output.status.success(), "nft {words}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn command(&self, words: &str) -> Command {
        let mut command = self.place.command(needs::tool("nft").expect("asked for"));
        command.args(["-j", words]);
        command
    }
}

impl Drop for Blockade {
    fn drop(&mut self) {
        // Fails if `new` did not get as far as to make it.
        drop(self.command(&format!("delete table inet {}", self.table)).output());
    }
}
