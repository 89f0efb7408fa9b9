//! Names what the binary is built from: the profile, which `culvert demo` says because figures depend on it, the commit, which
//! the daemon tells peers and operators, and the whole version, which `culvert --version` says.

use std::{env, ffi::OsStr, fs, path::Path, process::Command};

/// What stands for the commit of a build for development.
const NO_COMMIT: &str = "no commit";

/// What stands for the commit of sources that do not say it.
const UNKNOWN_COMMIT: &str = "commit unknown";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // `PROFILE` names only the profile that this one inherits from; OUT_DIR is …/<profile>/build/<package>/out.
    let out = variable("OUT_DIR");
    let profile = Path::new(&out).ancestors().nth(3).and_then(Path::file_name).and_then(OsStr::to_str);
    let profile = profile.unwrap_or("unknown");
    println!("cargo::rustc-env=CULVERT_PROFILE={profile}");

    let (version, target) = (variable("CARGO_PKG_VERSION"), variable("TARGET"));
    // A build for development names no commit: it would be built anew after each.
    let commit = if variable("PROFILE") == "debug" { NO_COMMIT.to_owned() } else { commit() };
    println!("cargo::rustc-env=CULVERT_VERSION={version} ({commit}, {profile}, {target})");
    let known = if [NO_COMMIT, UNKNOWN_COMMIT].contains(&commit.as_str()) { "" } else { &commit };
    println!("cargo::rustc-env=CULVERT_BUILT_FROM={known}");
}

/// The commit and its date, from the first that knows it: who builds, the archive that the sources come from, git.
fn commit() -> String {
    println!("cargo::rerun-if-env-changed=CULVERT_COMMIT");
    println!("cargo::rerun-if-changed=commit");
    let given = env::var("CULVERT_COMMIT").ok().filter(|commit| !commit.is_empty());
    // `git archive` replaces the format by what it says.
    let archived = || fs::read_to_string("commit").ok().filter(|commit| !commit.starts_with("$Format"));
    match given.or_else(archived) {
        Some(commit) => shortened(commit.trim()),
        None => checked_out().unwrap_or_else(|| UNKNOWN_COMMIT.to_owned()),
    }
}

/// `HASH DATE` with as much of the hash as tells commits apart.
fn shortened(commit: &str) -> String {
    let (hash, date) = commit.split_once(' ').unwrap_or((commit, ""));
    format!("{} {date}", hash.get(..12).unwrap_or(hash)).trim_end().to_owned()
}

/// The commit that git has checked out, and whether files were changed since.
fn checked_out() -> Option<String> {
    // What may change the answer: what is checked out, and every source.
    for name in ["HEAD", "packed-refs"] {
        watch(&git(&["rev-parse", "--git-path", name])?);
    }
    if let Some(branch) = git(&["symbolic-ref", "--quiet", "HEAD"]) {
        watch(&git(&["rev-parse", "--git-path", &branch])?);
    }
    for sources in ["src", "crates", "../quic-core/src", "../Cargo.lock", "../Cargo.toml"] {
        watch(sources);
    }
    let commit = shortened(&git(&["show", "--no-patch", "--format=%H %cs", "HEAD"])?);
    let changed = !git(&["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if changed { format!("{commit}, changed") } else { commit })
}

/// Runs the script again when this file changes. One that does not exist would make it run each time.
fn watch(path: &str) {
    if Path::new(path).exists() {
        println!("cargo::rerun-if-changed={path}");
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_default()
}
