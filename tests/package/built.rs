//! The packages that the tests look at, built from the program that cargo built beside the tests.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use culvert_tests::{
    agent::binary,
    process::{run, text},
};

use crate::{repository, target};

/// The time of everything in the tarballs, in seconds since 1970.
pub(crate) const TIME: &str = "1790000000";

/// Downloads Go and compiles nfpm, once.
const NFPM_LIMIT: Duration = Duration::from_secs(600);

/// Packs a program: a few seconds, many on a machine that compiles beside.
const PACKING_LIMIT: Duration = Duration::from_secs(300);

/// The package, built once for all tests of this process.
pub(crate) fn package() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    // Nobody would delete a temporary folder of a static.
    BUILT.get_or_init(|| build(&repository(""), &target().join("package-tests")))
}

/// Builds it into `folder`, by the scripts of `repository`.
pub(crate) fn build(repository: &Path, folder: &Path) -> PathBuf {
    pack(repository, folder, "deb").pop().unwrap()
}

/// Builds packages of these formats, with commas between them, into `folder`, by the scripts of `repository`.
pub(crate) fn pack(repository: &Path, folder: &Path, formats: &str) -> Vec<PathBuf> {
    let mut command = Command::new(repository.join("deploy/packages"));
    command.arg("--binary").arg(binary()).arg("--out").arg(folder).args(["--format", formats]);
    // Seconds of compression are no part of what is tested.
    command.args(["--compression", "gzip"]);
    command.env("CULVERT_NFPM", nfpm());
    built(&mut command)
}

/// The program that packs, compiled once and kept under `target/`.
fn nfpm() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let mut command = Command::new(repository("deploy/nfpm/get"));
        let output = run(command.arg(target().join("nfpm")), NFPM_LIMIT);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).trim().into()
    })
}

/// The tarball and the list of its parts, built once for all tests of this process.
pub(crate) fn tarball() -> &'static [PathBuf; 2] {
    static BUILT: OnceLock<[PathBuf; 2]> = OnceLock::new();
    BUILT.get_or_init(|| build_tarball(&repository(""), &target().join("package-tests")))
}

/// Builds both into `folder`, by the scripts of `repository`.
pub(crate) fn build_tarball(repository: &Path, folder: &Path) -> [PathBuf; 2] {
    let mut command = Command::new(repository.join("deploy/tarball/build"));
    command.arg("--binary").arg(binary()).arg("--out").arg(folder).env("SOURCE_DATE_EPOCH", TIME);
    command.args(["--target", &format!("{}-unknown-linux-gnu", std::env::consts::ARCH)]);
    built(&mut command).try_into().unwrap()
}

/// The paths that a script prints.
fn built(command: &mut Command) -> Vec<PathBuf> {
    let output = run(command, PACKING_LIMIT);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(PathBuf::from).collect()
}

/// A copy of what the scripts read, in a folder of another name and depth, without git.
pub(crate) fn elsewhere() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_to(&folder.path().join("a/copy"));
    folder
}

/// Copies what the scripts read into `copy`, without git.
pub(crate) fn copy_to(copy: &Path) {
    fs::create_dir_all(copy).unwrap();
    let mut command = Command::new("cp");
    command.args(["--recursive", "--preserve=mode"]).current_dir(repository(""));
    command.args(["Cargo.toml", "Cargo.lock", "README.md", "CHANGELOG.md", "SECURITY.md"]);
    command.args(["LICENSE-MIT", "LICENSE-APACHE"]);
    command.args(["agent", "config", "deploy", "docs", "quic-core", "tests"]).arg(copy);
    assert!(run(&mut command, Duration::from_secs(60)).status.success());
}
