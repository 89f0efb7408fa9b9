//! Names whose addresses change: `/etc/hosts` of a network namespace.

use std::{
    fmt::Write,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use crate::place::Place;

/// Where `ip netns exec` looks for files that it lays over those of `/etc`.
const FOLDER: &str = "/etc/netns";

/// The names that processes know which start in a namespace from now on; dropping it removes the file.
#[derive(Debug)]
pub struct Names {
    folder: PathBuf,
}

impl Names {
    /// Of `place`, in place of all names in the `/etc/hosts` of this host.
    ///
    /// # Panics
    /// On this host itself, and when the file cannot be written.
    #[must_use]
    #[track_caller]
    pub fn new(place: &Place, names: &[(&str, IpAddr)]) -> Self {
        let Place::Namespace(namespace) = place else {
            panic!("the host's names are not the test's business")
        };
        let names_of = Self { folder: Path::new(FOLDER).join(namespace) };
        fs::create_dir_all(&names_of.folder).expect("the test runs as root");
        names_of.set(names);
        names_of
    }

    /// The names have other addresses from now on, for processes that run already, too.
    ///
    /// # Panics
    /// When the file cannot be written.
    #[track_caller]
    pub fn set(&self, names: &[(&str, IpAddr)]) {
        let mut text = String::from("127.0.0.1 localhost\n");
        for (name, address) in names {
            writeln!(text, "{address} {name}").expect("a String takes all");
        }
        // In place: what was laid over `/etc/hosts` is this very file, whatever is put where it was.
        fs::write(self.folder.join("hosts"), text).expect("the test runs as root");
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        // Fails if `new` did not get as far as to make it.
        fs::remove_dir_all(&self.folder).ok();
        // Fails while others have theirs in it.
        fs::remove_dir(FOLDER).ok();
    }
}
