//! Tests of the files of used knocks. A replay log that is dropped is one whose process was killed: nothing is flushed
//! on the way out.

use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;

use super::*;

fn boot() -> BootId {
    BootId::parse(b"0b6f8a3e-5d0c-4d3e-9a61-2f3c1b7a9d10\n").unwrap()
}

fn other_boot() -> BootId {
    BootId::parse(b"ffffffff-5d0c-4d3e-9a61-2f3c1b7a9d10").unwrap()
}

/// When every process of a test starts, unless it says otherwise.
const START: u64 = 1_700_000_000;

fn record(number: u8) -> Record {
    Record { tag: [number; 16], expiry: START + u64::from(number) }
}

/// Opens, lets worker `w` of `workers` append the records `10 w` and `10 w + 1`, and ends.
fn run(folder: &TempDir, workers: u8) {
    for (worker, (mut replay_log, _)) in
        (0..).zip(open(folder.path(), workers, boot(), START).unwrap().workers)
    {
        replay_log.append(record(10 * worker)).unwrap();
        replay_log.append(record(10 * worker + 1)).unwrap();
    }
}

fn names(folder: &TempDir) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn what_was_written_is_there_after_the_process_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let first = open(folder.path(), 2, boot(), START).unwrap();
    assert!(!first.trusted, "there was nothing");
    assert!(first.workers.iter().all(|(_, records)| records.is_empty()));
    drop(first);

    run(&folder, 2);
    let second = open(folder.path(), 2, boot(), START).unwrap();
    assert!(second.trusted);
    assert_eq!(second.workers[0].1, [record(0), record(1)]);
    assert_eq!(second.workers[1].1, [record(10), record(11)]);
    for name in names(&folder) {
        let mode = fs::metadata(folder.path().join(&name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

/// A version that reads this otherwise lets knocks in again that were used before an update.
#[test]
fn a_file_has_the_same_bytes_in_every_version() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder, 1);
    let expected = [
        &b"culvknk\x010b6f8a3e-5d0c-4d3e-9a61-2f3c1b7a9d10\x01\0\0\0"[..],
        // Unix seconds 1,700,000,000; then the records 0 and 1.
        &[0, 0, 0, 0, 0x65, 0x53, 0xf1, 0],
        &[0; 16],
        &[0, 0, 0, 0, 0x65, 0x53, 0xf1, 0],
        &[1; 16],
        &[0, 0, 0, 0, 0x65, 0x53, 0xf1, 1],
    ];
    assert_eq!(names(&folder), ["knocks-0.log"]);
    assert_eq!(fs::read(folder.path().join("knocks-0.log")).unwrap(), expected.concat());
}

#[test]
fn a_file_cut_at_any_byte_gives_the_whole_records_before_the_cut() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder, 1);
    let path = folder.path().join("knocks-0.log");
    let complete = fs::read(&path).unwrap();
    assert_eq!(complete.len(), HEADER_BYTES + 2 * RECORD_BYTES);
    for length in 0..=complete.len() {
        fs::write(&path, &complete[..length]).unwrap();
        let Loaded { records, trusted_after } = load(folder.path(), 1, boot()).unwrap();
        let expected = length.saturating_sub(HEADER_BYTES) / RECORD_BYTES;
        assert_eq!(records, [[record(0), record(1)][..expected].to_vec()], "cut at {length}");
        assert_eq!(trusted_after.is_some(), length >= HEADER_BYTES, "cut at {length}");
    }
}

#[test]
fn a_torn_record_is_gone_before_the_next_is_appended() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder, 1);
    let path = folder.path().join("knocks-0.log");
    let complete = fs::read(&path).unwrap();
    fs::write(&path, &complete[..complete.len() - 5]).unwrap();
    let mut opened = open(folder.path(), 1, boot(), START).unwrap();
    opened.workers[0].0.append(record(7)).unwrap();
    drop(opened);
    assert_eq!(load(folder.path(), 1, boot()).unwrap().records, [[record(0), record(7)]]);
}

#[test]
fn files_of_another_boot_or_version_are_not_trusted() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder, 1);
    let Loaded { records, trusted_after } = load(folder.path(), 1, other_boot()).unwrap();
    assert_eq!((records, trusted_after), (vec![vec![record(0), record(1)]], None));

    let path = folder.path().join("knocks-0.log");
    let complete = fs::read(&path).unwrap();
    for at in (0..8).chain(44..48) {
        let mut changed = complete.clone();
        changed[at] ^= 0x80;
        fs::write(&path, &changed).unwrap();
        assert!(load(folder.path(), 1, boot()).unwrap().trusted_after.is_none(), "byte {at}");
    }
    fs::write(&path, [&complete[..44], &[0], &complete[45..]].concat()).unwrap();
    assert!(load(folder.path(), 1, boot()).unwrap().trusted_after.is_none(), "no workers");
}

#[test]
fn with_another_number_of_workers_each_gets_every_record() {
    for (before, after) in [(1, 2), (2, 1), (2, 3), (4, 2)] {
        let folder = tempfile::tempdir().unwrap();
        run(&folder, before);
        let opened = open(folder.path(), after, boot(), START).unwrap();
        assert!(opened.trusted, "{before} to {after}");
        for (_, records) in &opened.workers {
            let mut numbers: Vec<u8> = records.iter().map(|record| record.tag[0]).collect();
            numbers.sort_unstable();
            let expected: Vec<u8> = (0..before).flat_map(|worker| [10 * worker, 10 * worker + 1]).collect();
            assert_eq!(numbers, expected, "{before} to {after}");
        }
        drop(opened);
        let expected: Vec<String> = (0..after).map(|worker| format!("knocks-{worker}.log")).collect();
        assert_eq!(names(&folder), expected);
        let again = load(folder.path(), after, boot()).unwrap();
        assert!(
            again.trusted_after.is_some()
                && again.records.iter().all(|records| records.len() == 2 * usize::from(before))
        );
    }
}

/// Every state in which a process can be killed while it changes from 2 to 4 workers or back: what is trusted then
/// holds every record for every worker.
#[test]
fn a_process_killed_while_the_number_of_workers_changes_loses_no_record_that_is_trusted() {
    for (before, after) in [(2u8, 4u8), (4, 2)] {
        let old = tempfile::tempdir().unwrap();
        run(&old, before);
        let new = tempfile::tempdir().unwrap();
        run(&new, before);
        drop(open(new.path(), after, boot(), START).unwrap());

        let copy = |from: &TempDir, to: &TempDir, worker: u8| {
            fs::copy(from.path().join(file_name(worker)), to.path().join(file_name(worker))).unwrap();
        };
        let removals = before.saturating_sub(after);
        for done in 0..=after + removals {
            let folder = tempfile::tempdir().unwrap();
            let left = before - done.saturating_sub(after);
            (0..left).for_each(|worker| copy(&old, &folder, worker));
            (0..done.min(after)).for_each(|worker| copy(&new, &folder, worker));
            for workers in [before, after] {
                let loaded = load(folder.path(), workers, boot()).unwrap();
                if loaded.trusted_after.is_none() {
                    continue;
                }
                let all = 2 * usize::from(before);
                let mut found: Vec<u8> = Vec::new();
                for records in &loaded.records {
                    let mut tags: Vec<u8> = records.iter().map(|record| record.tag[0]).collect();
                    tags.sort_unstable();
                    tags.dedup();
                    assert!(
                        tags.len() == all || (done == 0 && workers == before),
                        "{before} to {after} killed after {done} steps: {tags:?}",
                    );
                    found.extend(tags);
                }
                found.sort_unstable();
                found.dedup();
                assert_eq!(found.len(), all, "{before} to {after} killed after {done} steps");
            }
        }
    }
}

#[test]
fn a_missing_file_of_one_worker_is_not_trusted() {
    for missing in 0..3 {
        let folder = tempfile::tempdir().unwrap();
        run(&folder, 3);
        fs::remove_file(folder.path().join(file_name(missing))).unwrap();
        let loaded = load(folder.path(), 3, boot()).unwrap();
        assert!(loaded.trusted_after.is_none(), "worker {missing}");
        assert_eq!(loaded.records.iter().map(Vec::len).sum::<usize>(), 4);
    }
}

#[test]
fn a_rewrite_replaces_the_file_and_appending_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut opened = open(folder.path(), 1, boot(), START).unwrap();
    let replay_log = &mut opened.workers[0].0;
    for number in 0..100 {
        replay_log.append(record(number)).unwrap();
    }
    replay_log.rewrite(&mut [record(98), record(99)].into_iter()).unwrap();
    replay_log.append(record(100)).unwrap();
    let loaded = load(folder.path(), 1, boot()).unwrap();
    assert_eq!(loaded.records, [[record(98), record(99), record(100)]]);
    assert!(loaded.trusted_after.is_some());
    assert_eq!(names(&folder), ["knocks-0.log"]);
}

#[test]
fn what_a_killed_rewrite_left_behind_is_in_nobodys_way() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder, 1);
    fs::write(folder.path().join("knocks-0.new"), b"half").unwrap();
    fs::write(folder.path().join("knocks-00.log"), b"not ours").unwrap();
    fs::write(folder.path().join("knocks-x.log"), b"not ours").unwrap();
    let opened = open(folder.path(), 1, boot(), START).unwrap();
    assert!(opened.trusted);
    assert_eq!(names(&folder), ["knocks-0.log", "knocks-00.log", "knocks-x.log"]);
}

#[test]
fn after_a_write_that_failed_the_file_is_gone_until_it_is_whole_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut opened = open(folder.path(), 1, boot(), START).unwrap();
    let replay_log = &mut opened.workers[0].0;
    // A file that is open for reading refuses to be written.
    replay_log.file = Some(File::open(&replay_log.path).unwrap());
    assert!(replay_log.append(record(1)).is_err());
    assert!(load(folder.path(), 1, boot()).unwrap().trusted_after.is_none());
    assert!(replay_log.append(record(2)).is_err(), "until it is made anew");
    replay_log.rewrite(&mut [record(1), record(2)].into_iter()).unwrap();
    replay_log.append(record(3)).unwrap();
    let loaded = load(folder.path(), 1, boot()).unwrap();
    assert_eq!(
        (loaded.records, loaded.trusted_after),
        (vec![vec![record(1), record(2), record(3)]], Some(START))
    );
}

#[test]
fn a_rewrite_that_fails_leaves_the_file_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let mut opened = open(folder.path(), 1, boot(), START).unwrap();
    let replay_log = &mut opened.workers[0].0;
    replay_log.append(record(1)).unwrap();
    fs::create_dir(folder.path().join("knocks-0.new")).unwrap();
    assert!(replay_log.rewrite(&mut [record(2)].into_iter()).is_err());
    replay_log.append(record(3)).unwrap();
    let loaded = load(folder.path(), 1, boot()).unwrap();
    assert_eq!((loaded.records, loaded.trusted_after), (vec![vec![record(1), record(3)]], Some(START)));
}

#[test]
fn a_directory_is_for_one_agent_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let first = open(folder.path(), 2, boot(), START).unwrap();
    let second = open(folder.path(), 2, boot(), START).err().unwrap();
    assert!(matches!(second, ReplayLogError::InUse { .. }), "{second}");
    let mut workers = first.workers;
    let last = workers.pop();
    drop(workers);
    assert!(open(folder.path(), 2, boot(), START).is_err(), "one worker still runs");
    drop(last);
    assert!(open(folder.path(), 2, boot(), START).is_ok());
}

#[test]
fn problems_name_the_directory_and_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let problem = open(&missing, 1, boot(), START).err().unwrap();
    assert!(matches!(&problem, ReplayLogError::Missing { directory } if *directory == missing));
    assert!(problem.to_string().contains("remedy") && problem.to_string().contains("identity.state_dir"));

    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let problem = open(&file, 1, boot(), START).err().unwrap();
    assert!(matches!(problem, ReplayLogError::Failed { .. }), "{problem}");

    // As root there is no file that cannot be read.
    let denied = ReplayLogError::of_directory(&file, io::ErrorKind::PermissionDenied.into());
    assert!(matches!(&denied, ReplayLogError::Denied { path } if *path == file));
}

#[test]
fn a_boot_id_is_36_characters() {
    assert!(BootId::parse(b"").is_none());
    assert!(BootId::parse(&[b'a'; 35]).is_none());
    assert!(BootId::parse(&[b'a'; 37]).is_none());
    assert_ne!(boot(), other_boot());
    if let Ok(content) = fs::read("/proc/sys/kernel/random/boot_id") {
        assert!(BootId::parse(&content).is_some());
    }
}

/// What an untrusted process refuses, the one after it must refuse as well: it is in no file.
#[test]
fn a_second_restart_is_as_blind_as_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let opened = |unix_seconds| {
        let opened = open(folder.path(), 2, boot(), unix_seconds).unwrap();
        (opened.trusted, opened.blind_until)
    };
    assert_eq!(opened(START), (false, START));
    assert_eq!(opened(START + 10), (true, START));
    fs::remove_file(folder.path().join(file_name(1))).unwrap();
    assert_eq!(opened(START + 20), (false, START + 20));
    assert_eq!(opened(START + 30), (true, START + 20));
    assert_eq!(opened(START - 500), (true, START - 500), "the wall clock was put back");
    assert_eq!(opened(START + 40), (true, START - 500));
}
