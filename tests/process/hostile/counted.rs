//! A hostile peer that has a quota, that ends flows faster than a disk takes their records, or whose network is mapped.

use std::{cell::Cell, fs, net::Ipv4Addr, path::Path, process::Command, thread, time::Duration};

use clap::ValueEnum;
use culvert_tests::{
    clock::PATIENCE,
    needs::{self, Need},
    place::Place,
    process::{run, text},
};

use crate::{
    Scene, Setting, attack_a_device, name,
    peer::{Attack, Mode},
};

/// What each hostile peer may carry in a month.
pub(crate) const QUOTA: &str = "quota = { bytes = \"1MB\" }\n";

/// Where an exit records what its peers have carried.
pub(crate) const RECORDS: &str =
    "[records]\nfile = \"records/records.json\"\nmax_size = \"64KiB\"\nkeep = 2\n";

/// What the folder of the records has room for: less than its files may have together.
const DISK: &str = "size=128k";

/// The lines of a peer that has this address there, and another one here.
pub(crate) fn mapped(there: Ipv4Addr) -> String {
    let [.., last] = there.octets();
    format!("map = [\"10.10.0.{last}/32 = 10.9.0.{last}/32\"]\nallowed_ips = [\"10.10.0.{last}\"]\n")
}

impl Scene {
    /// The bytes of the attacker that were delivered, and those of its forwards.
    fn carried(&self, attack: Attack) -> u64 {
        let (samples, peer) = (self.pair.exit.samples(), name(attack));
        let mut bytes = 0;
        for direction in ["uplink", "downlink"] {
            let labels = [("peer", &*peer), ("direction", direction)];
            bytes += samples.count("culvert_peer_bytes_delivered_total", &labels);
            let of_a_service = |service| {
                let labels = [("peer", &*peer), ("service", service), ("direction", direction)];
                samples.count("culvert_service_tcp_bytes_total", &labels)
            };
            bytes += of_a_service("sink") + of_a_service("mute");
        }
        bytes
    }

    fn quota(&self, attack: Attack, what: &str) -> u64 {
        self.pair.exit.samples().count(&format!("culvert_peer_quota_{what}"), &[("peer", &*name(attack))])
    }
}

#[test]
fn a_peer_beyond_its_quota_carries_nothing_whatever_it_does() {
    if !needs::met("hostile quota", needs::AGENTS) {
        return;
    }
    let mut scene = Scene::new(&Place::Host, Setting::Quota);
    // It floods, and connects again and again: what it gets through is its quota, and what a second carries.
    for _ in 0..3 {
        scene.harm(Attack::Honest, Mode::Lanes);
    }
    scene.pair.exit.wait_for_count("culvert_peer_quota_reached", &[("peer", &*name(Attack::Honest))], 1);
    let carried = scene.carried(Attack::Honest);
    assert_eq!(scene.quota(Attack::Honest, "used_bytes"), carried);
    // 2.4 MB come each second.
    assert!((1_000_000..=4_000_000).contains(&carried), "{carried}");
    for attack in Attack::value_variants() {
        let said = scene.pair.exit.ask(&["peer", "set", &name(*attack), "--quota-used", "1MB"]);
        assert!(said.contains("effective now"), "{said}");
    }
    // Each worker looks once a second.
    thread::sleep(Duration::from_millis(2_200));
    for attack in Attack::value_variants() {
        assert_eq!(scene.quota(*attack, "reached"), 1, "{attack:?}");
        let before = scene.carried(*attack);
        scene.harm(*attack, Mode::Lanes);
        assert_eq!(scene.carried(*attack), before, "{attack:?}");
    }
    assert!(scene.pair.exit.samples().dropped("quota") > 0);
    // A restart gives it nothing but the time until the first charge.
    assert_eq!(scene.pair.exit.terminate().code(), Some(0));
    scene.pair.exit.start();
    scene.client.reach();
    let reached = scene.quota(Attack::Mixed, "reached");
    assert_eq!(reached, 1, "the count is there before anything is charged");
    scene.attacked(Attack::Mixed, Mode::Lanes);
    let before = scene.carried(Attack::Mixed);
    scene.attacked(Attack::Mixed, Mode::Lanes);
    assert_eq!(scene.carried(Attack::Mixed), before);
    assert_eq!(scene.pair.exit.process().ended(), None);
}

#[test]
fn packets_of_a_mapped_peer_harm_nobody_else() {
    attack_a_device("hostile IP packets behind a map", Setting::Mapped);
}

/// A small disk, until it is dropped.
struct Disk<'d>(&'d Path);

impl<'d> Disk<'d> {
    fn at(folder: &'d Path) -> Self {
        let mount = ["-t", "tmpfs", "-o", DISK, "none"];
        let output = run(Command::new("mount").args(mount).arg(folder), PATIENCE);
        assert!(output.status.success(), "{}", text(&output.stderr));
        Self(folder)
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        let _best_effort = run(Command::new("umount").arg("--lazy").arg(self.0), PATIENCE);
    }
}

#[test]
fn records_of_a_flood_end_at_a_full_disk_and_not_in_the_agent() {
    let needs = [needs::AGENTS, &[Need::Root, Need::Tool("mount", "mount")]].concat();
    if !needs::met("hostile records", &needs) {
        return;
    }
    let mut scene = Scene::new(&Place::Host, Setting::Recorded);
    let folder = scene.pair.exit.folder().join("records");
    let disk = Disk::at(&folder);
    for attack in [Attack::OpenClose, Attack::Openings, Attack::Mixed] {
        scene.harm(attack, Mode::Lanes);
    }
    // Flows to the sink end after 2 s of silence.
    let exit = &scene.pair.exit;
    let noted = exit.wait_for("records are lost", |samples| {
        let [noted, lost] = [
            samples.count("culvert_records_total", &[]),
            samples.count("culvert_records_lost_total", &[("reason", "write")]),
        ];
        // A line has some 300 bytes.
        if noted > 2_000 && lost > 0 { Ok(noted) } else { Err(format!("{noted} records, {lost} lost")) }
    });
    let files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()).collect();
    let bytes: u64 = files.iter().map(|entry| entry.metadata().unwrap().len()).sum();
    assert!(files.len() <= 3 && bytes <= 128 << 10, "{} files, {bytes} bytes, {noted} records", files.len());
    assert!(exit.log().contains("records cannot be written (remedy: room for"));
    // Once there is room again, what ends is recorded: the innocent's flow, too.
    drop(disk);
    scene.client.reach();
    let before = Cell::new(u64::MAX);
    scene.pair.exit.wait_for("records are written", |samples| {
        let lost = samples.count("culvert_records_lost_total", &[("reason", "write")]);
        let is_steady = before.replace(lost) == lost && folder.join("records.json").exists();
        if is_steady { Ok(()) } else { Err(format!("{lost} are lost")) }
    });
}
