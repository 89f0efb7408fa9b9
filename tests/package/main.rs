//! The Debian package, its service and the container's image, on a clean Debian; and the other files of a release.
//!
//! | question | file |
//! |---|---|
//! | the packages, built once | `built.rs` |
//! | a clean Debian, and a machine that runs it | `debian.rs`, `machine.rs`, `boot.sh` |
//! | what is in the package, and what Debian's own checker says | `contents.rs` |
//! | the unit as systemd reads it: valid, and how exposed | `unit.rs` |
//! | the package's scripts, one call at a time | `scripts.rs` |
//! | from installation to purge under a real systemd, with a tunnel | `life.rs` |
//! | the README's commands on two machines, with `culvert init --now` | `first_steps.rs` |
//! | the steps of the container file | `container.rs`, `containerfile.rs` |
//! | the image as the pod of the manifests runs it | `pod.rs` |
//! | the tarball and its installer | `tarball.rs` |
//! | the installation from a checkout | `install.rs` |
//! | packages of other distributions, as their formats have them | `formats.rs` |
//! | the configuration of OpenWrt as TOML, and its init script | `openwrt.rs` |
//! | what a program has to have against attacks | `defences.rs` |
//! | what is said about the parts of the program, and who signed it | `parts.rs`, `signature.rs` |
//!
//! By command, because they take longer: `distributions` installs every package in a clean system, `virtual-machine` the .deb on a
//! kernel of Debian's.
//!
//! A machine is a set of namespaces: processes, mounts over an overlay, network, control groups. systemd is its process
//! 1, so the unit's sandbox is the one that an operator gets. When the machine ends, the kernel ends what ran in it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod built;
mod container;
mod containerfile;
mod contents;
mod debian;
mod defences;
mod first_steps;
mod formats;
mod install;
mod life;
mod machine;
mod openwrt;
mod parts;
mod pod;
mod scripts;
mod signature;
mod tarball;
mod unit;

use std::path::{Path, PathBuf};

use culvert_tests::needs::Need;

/// What a clean Debian and a machine that runs it need.
const MACHINE: &[Need] = &[
    Need::Root,
    Need::Tool("unshare", "util-linux"),
    Need::Tool("nsenter", "util-linux"),
    Need::Tool("ip", "iproute2"),
];

/// What building the package needs.
const BUILD: &[Need] = &[
    Need::Tool("dpkg-deb", "dpkg"),
    Need::Tool("strip", "binutils"),
    Need::Tool("cargo", "cargo"),
    Need::Tool("python3", "python3"),
];

/// A file of the repository.
fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

/// Cargo's target folder, for what takes long to make and may stay.
fn target() -> PathBuf {
    // target/<profile>/deps/<test>
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned()
}
