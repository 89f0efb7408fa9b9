//! `[records]`: where it is written what UDP flows and TCP forwards have carried.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use crate::{
    checks::Checks,
    kinds::{path, size, truth, whole},
    section::{Table, section},
    sections::address,
};

section! {
    /// `[records]`: what is written of each UDP flow, TCP forward and request of a user when it ends, and of IP packets.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Records {
        /// A file that gets a line of JSON for each UDP flow, TCP forward and request of a user that ends, and for the IP packets between
        /// two addresses each minute: who, when, how much, and why it ended
        /// ([operations](operations.md#who-used-what)). Relative paths start at the folder of the configuration file; the folder must
        /// exist, and the agent's user must be able to write there. It names peers and addresses, so it is closed to other users. Left
        /// out: there is no file.
        file: PathBuf = PathBuf::new(), path(), Restart;
        /// A collector that gets the same as IPFIX (RFC 7011) over UDP: two records for each line, one in each direction.
        /// Left out: none does.
        collector: Option<SocketAddr> = None, address().then(Checks::sendable).optional(), Restart;
        /// Whether IP packets are recorded by ports, too, not by protocol and addresses alone.
        ports: bool = false, truth(), Restart;
        /// The size at which the file becomes `FILE.1` and a new one begins. A new one also begins, at once and without a signal, when a
        /// program such as logrotate has moved it away.
        max_size: u64 = 64 << 20, size(1 << 16..=1 << 40), Restart;
        /// How many of these older files are kept: `FILE.1` is the newest.
        keep: u16 = 8, whole(0..=1_000), Restart;
    }
}

impl Records {
    /// Whether anything is recorded.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.has_file() || self.collector.is_some()
    }

    /// Whether there is a file of records.
    #[must_use]
    pub fn has_file(&self) -> bool {
        !self.file.as_os_str().is_empty()
    }
}

impl Checks {
    pub(super) fn read_records(&mut self, root: &mut Table<'_>, base: &Path) -> Records {
        let mut table = root.table("records", &mut self.report);
        let mut records: Records = table.fill(self);
        if records.has_file() {
            records.file = base.join(&records.file);
        } else if let Some(key) = ["max_size", "keep"].into_iter().find(|key| table.has(key)) {
            let remedy = "add records.file, or remove it";
            self.report.note(&table.place(key), "there is no records.file, so it has no effect", remedy);
        }
        records
    }
}
