//! The steps of the container file, run on a clean Debian where no builder is needed, and what comes out: an agent that
//! is not root on a file system that it cannot write.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    agent::{SHUTDOWN_LIMIT, binary},
    clock::{self, PATIENCE},
    needs::{self, Need},
    place::{Cable, Place},
    process::{Running, run, text},
};

use crate::{
    built,
    containerfile::{Stage, stages},
    debian,
    machine::Machine,
    repository,
};

const NEEDS: &[Need] = &[
    Need::Tun,
    Need::Tool("setcap", "libcap2-bin"),
    Need::Tool("strip", "binutils"),
    Need::Tool("setpriv", "util-linux"),
];

/// What the papers need besides.
const PAPERS: &[Need] = &[Need::Tool("cargo", "cargo"), Need::Tool("python3", "python3")];

/// The image, and how a container of it runs.
pub(crate) struct Image {
    pub(crate) machine: Machine,
    pub(crate) last: Stage,
    pub(crate) cable: Cable,
}

/// A folder that a container gets from outside of its image.
pub(crate) struct Mount {
    /// Where the folder is on the machine.
    pub(crate) from: String,
    /// Where the container has it.
    pub(crate) to: String,
    pub(crate) read_only: bool,
}

impl Image {
    /// The image, if this machine can build it; else the test is listed as skipped. It lacks the papers, which take seconds to
    /// write.
    pub(crate) fn new(test: &str) -> Option<Self> {
        let debian = debian::clean(test)?;
        needs::met(test, NEEDS).then(|| Self::build(debian, false))
    }

    /// The same with the papers: notices and the list of its parts.
    fn with_papers(test: &str) -> Option<Self> {
        let debian = debian::clean(test)?;
        needs::met(test, &[NEEDS, PAPERS].concat()).then(|| Self::build(debian, true))
    }

    /// Builds it, but for the compiler.
    fn build(debian: &Path, papers: bool) -> Self {
        let cable = Cable::new();
        let machine = Machine::idle(debian, &cable.places()[0]);
        let [first, last] = stages();
        // A folder of this host: its tools do not find their way in that of another root.
        let source = tempfile::tempdir().unwrap();
        let folder = source.path();
        if papers {
            built::copy_to(folder);
        }
        fs::create_dir_all(folder.join("target/release")).unwrap();
        fs::copy(binary(), folder.join("target/release/culvert")).unwrap();
        if !papers {
            fs::create_dir(folder.join("target/papers")).unwrap();
        }
        // What it does with the program once that is there.
        let is_compiler = |(kind, step): &(&str, &str)| *kind == "RUN" && step.starts_with("cargo build");
        let after = first.instructions().skip_while(|step| !is_compiler(step)).skip(1);
        for (_, step) in after.filter(|(_, step)| papers || !step.contains("target/papers")) {
            // With this host's tools, which a clean Debian has not.
            let output =
                run(Command::new("sh").args(["-ec", step]).current_dir(folder), Duration::from_secs(60));
            assert!(output.status.success(), "{step}: {}", text(&output.stderr));
        }
        fs::create_dir(machine.path("/src")).unwrap();
        let mut copy = Command::new("cp");
        copy.args(["--recursive", "--preserve=all"]).arg(folder.join("target")).arg(machine.path("/src"));
        let output = run(&mut copy, Duration::from_secs(60));
        assert!(output.status.success(), "{}", text(&output.stderr));
        for (kind, step) in last.instructions() {
            match kind {
                "RUN" => drop(machine.tell(&["sh", "-ec", step])),
                "COPY" => {
                    let (from, to) = step.strip_prefix("--from=build ").unwrap().split_once(' ').unwrap();
                    // As a builder copies: a file to that path, of a folder what is in it.
                    let copy = "mkdir -p \"$(dirname \"$2\")\"; cp --recursive --preserve=all --no-target-directory \"$1\" \"$2\"";
                    machine.tell(&["sh", "-ec", copy, "sh", from, to]);
                }
                "FROM" => assert!(step.contains("debian:"), "{step}"),
                "VOLUME" | "USER" | "HEALTHCHECK" | "ENTRYPOINT" | "CMD" => {}
                other => panic!("what is {other}?"),
            }
        }
        machine.tell(&["rm", "-r", "/src"]);
        Self { machine, last, cable }
    }

    /// A command as a container with `capabilities` runs it: by the image's user, on its file system, of which only the
    /// volumes can be written.
    fn command(&self, capabilities: &str, words: &[String]) -> Command {
        let volumes = self.last.words("VOLUME").into_iter();
        let mounts: Vec<Mount> =
            volumes.map(|folder| Mount { from: folder.clone(), to: folder, read_only: false }).collect();
        self.command_with(capabilities, &mounts, words)
    }

    /// A command as a container with `capabilities` and `mounts` runs it: by the image's user, on its file system, of which
    /// only the mounts can be written.
    pub(crate) fn command_with(&self, capabilities: &str, mounts: &[Mount], words: &[String]) -> Command {
        let (uid, gid) = self.last.only("USER").split_once(':').unwrap();
        let script = "while [ \"$1\" != -- ]; do mount --bind \"$1\" \"$2\"; mount -o \"remount,bind,$3\" \"$2\"; shift 3; done
            shift
            mount -o remount,bind,ro /
            exec \"$@\"";
        let mut command = self.machine.command();
        command.args(["unshare", "--mount", "--propagation", "private", "--", "sh", "-ec", script, "sh"]);
        for Mount { from, to, read_only } in mounts {
            command.args([from.as_str(), to, if *read_only { "ro" } else { "rw" }]);
        }
        command.arg("--");
        command.args(["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups", "--inh-caps=-all"]);
        command
            .arg(format!("--bounding-set=-all{capabilities}"))
            .args(["--pdeathsig", "KILL", "--"])
            .args(words);
        command
    }

    /// What the image runs, with these arguments.
    pub(crate) fn entry(&self, arguments: &[&str]) -> Vec<String> {
        let arguments = arguments.iter().map(|word| (*word).to_owned());
        self.last.words("ENTRYPOINT").into_iter().chain(arguments).collect()
    }
}

/// The capability that a container needs.
pub(crate) const GIVEN: &str = ",+net_admin";

#[test]
fn the_image_runs_without_root_on_a_file_system_that_it_cannot_write() {
    let Some(image) = Image::new("the container's image") else { return };
    let limit = Duration::from_secs(30);
    // As the file says: the container must be given the capability.
    assert!(!run(&mut image.command("", &image.entry(&["--version"])), limit).status.success());
    let init = [
        "init",
        "--role",
        "exit",
        "--listen",
        "0.0.0.0:4433",
        "--advertise",
        "192.0.2.1:4433",
        "--tun",
        "10.9.0.1/24",
    ];
    let output = run(&mut image.command(GIVEN, &image.entry(&init)), limit);
    assert!(output.status.success(), "{}", text(&output.stderr));

    let health = image.last.words("HEALTHCHECK");
    let is_healthy = || run(&mut image.command(GIVEN, &health), limit);
    assert!(!is_healthy().status.success(), "nothing runs yet");
    let arguments = image.last.words("CMD");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut command = image.command(GIVEN, &image.entry(&arguments));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap());
    let mut agent = Running::start("the container's agent", &mut command);
    clock::until("the agent is healthy", PATIENCE, || {
        let said = fs::read_to_string(&log).unwrap();
        assert!(agent.ended().is_none(), "{said}");
        if is_healthy().status.success() { Ok(()) } else { Err(said) }
    });
    let place: &Place = &image.cable.places()[0];
    assert!(place.tell(&["ip", "-brief", "address"]).contains("10.9.0.1/24"));
    // `nsenter` waits for it, and passes its end on.
    let pid = image.machine.processes("culvert");
    image.machine.tell(&["sh", "-c", "kill -TERM \"$1\"", "sh", &pid.concat()]);
    assert!(agent.wait(SHUTDOWN_LIMIT).success(), "{}", fs::read_to_string(&log).unwrap());
}

#[test]
fn the_image_has_the_notices_and_the_list_of_its_parts() {
    let Some(image) = Image::with_papers("what the image says of its parts") else { return };
    let read =
        |file: &str| fs::read_to_string(image.machine.path("/usr/share/doc/culvert").join(file)).unwrap();
    let notices = read("third-party-notices");
    for library in ["quinn-proto", "ring", "tokio", "std"] {
        assert!(notices.lines().any(|line| line.starts_with(&format!("{library} "))), "{library}");
    }
    let bill: serde_json::Value = serde_json::from_str(&read("sbom.cdx.json")).unwrap();
    let program = fs::read(image.machine.path("/usr/bin/culvert")).unwrap();
    let digest = &bill["metadata"]["component"]["hashes"][0]["content"];
    assert_eq!(digest.as_str(), Some(&*sha256(&program)), "of the program in the image");
    assert!(read("LICENSE-MIT").contains("Permission is hereby granted"));
}

/// The digest of a file, in hexadecimal digits.
fn sha256(bytes: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    let output = run(Command::new("sha256sum").arg(file.path()), Duration::from_secs(30));
    text(&output.stdout).split(' ').next().unwrap().to_owned()
}

#[test]
fn the_container_file_copies_what_the_build_reads() {
    let [first, _] = stages();
    assert!(first.instructions().any(|step| step == ("COPY", ". .")));
    let ignored = fs::read_to_string(repository("deploy/container/Containerfile.dockerignore")).unwrap();
    let ignored: Vec<&str> =
        ignored.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    // Members of the workspace, without which cargo reads nothing, and what is compiled into the program.
    let members = ["Cargo.toml", "Cargo.lock", "agent", "quic-core", "tests"].map(PathBuf::from);
    let included = included();
    assert!(included.contains(Path::new("docs/configuration.md")), "{included:?}");
    for needed in members.into_iter().chain(included) {
        assert!(repository(needed.to_str().unwrap()).exists(), "{needed:?}");
        let left_out = ignored.iter().find(|&path| needed.starts_with(path));
        assert_eq!(left_out, None, "{needed:?} is missing when the image is built");
    }
}

/// The files that `include_str!` and `include_bytes!` put into the program, from the root of the repository.
fn included() -> BTreeSet<PathBuf> {
    let root = repository("");
    let mut folders = vec![root.join("agent/src"), root.join("agent/crates"), root.join("quic-core/src")];
    let mut included = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for file in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = file.file_name().unwrap().to_str().unwrap();
            if file.is_dir() && name != "tests" {
                folders.push(file);
            } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
                let text = fs::read_to_string(&file).unwrap();
                for (at, found) in
                    text.match_indices("include_str!(").chain(text.match_indices("include_bytes!("))
                {
                    let path = text[at + found.len()..].trim_start().strip_prefix('"');
                    let path = path.unwrap_or_else(|| panic!("this reader knows plain paths only: {file:?}"));
                    let path = folder.join(path.split_once('"').unwrap().0).canonicalize().unwrap();
                    included.insert(path.strip_prefix(root.canonicalize().unwrap()).unwrap().to_owned());
                }
            }
        }
    }
    included
}
