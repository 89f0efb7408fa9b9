//! The packages that the tests look at, built from the program that cargo built beside the tests.

use std::{
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

/// The package, built once for all tests of this process.
pub(crate) fn package() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    // Nobody would delete a temporary folder of a static.
    BUILT.get_or_init(|| build(&target().join("package-tests")))
}

/// Builds it into `folder`.
pub(crate) fn build(folder: &Path) -> PathBuf {
    let mut command = Command::new(repository("deploy/debian/build"));
    command.arg("--binary").arg(binary()).arg("--out").arg(folder);
    // Seconds of compression are no part of what is tested.
    command.env("DPKG_DEB_COMPRESSOR_LEVEL", "0");
    let output = run(&mut command, Duration::from_secs(120));
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).trim().into()
}
