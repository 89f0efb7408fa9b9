//! A clean Debian: what debootstrap makes, kept under `target/` and only ever read. Where that cannot be made, this host's
//! own system takes its place, out of which `boot.sh` takes what makes a difference.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use culvert_tests::{
    needs,
    process::{run, text},
};

use crate::{MACHINE, target};

/// Downloads and unpacks about a hundred packages: half a minute near a mirror.
const DEBOOTSTRAP_LIMIT: Duration = Duration::from_secs(180);

/// What a host must have to stand in for a clean Debian.
const OF_A_HOST: [&str; 3] = ["/lib/systemd/systemd", "/usr/bin/dpkg", "/usr/bin/deb-systemd-helper"];

/// Where a minimal Debian with systemd is, of this host's release: a folder, or `/`, which is this host itself. Where there
/// is neither, `test` is listed as skipped and shall return.
#[track_caller]
pub(crate) fn clean(test: &str) -> Option<&'static Path> {
    static ROOT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if !needs::met(test, MACHINE) {
        return None;
    }
    match ROOT.get_or_init(|| make().or_else(|why| instead(&why))) {
        Ok(root) => Some(root),
        Err(why) => {
            needs::missing(test, &format!("a clean Debian: {why}"));
            None
        }
    }
}

/// This host, because a clean Debian cannot be made.
fn instead(why: &str) -> Result<PathBuf, String> {
    if let Some(missing) = OF_A_HOST.into_iter().find(|file| !Path::new(file).exists()) {
        return Err(format!("{why}; and this host cannot stand in for one without {missing}"));
    }
    say(&format!("an overlay over this host's own /, because of a clean Debian: {why}"));
    Ok("/".into())
}

/// Says which root the machines of these tests have; not captured when the tests pass.
fn say(root: &str) {
    let line = format!("the package's tests run in {root}\n");
    io::stderr().write_all(line.as_bytes()).unwrap();
}

fn make() -> Result<PathBuf, String> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let suite = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let suite =
        suite.filter(|_| release.lines().any(|line| line == "ID=debian")).ok_or("this host is no Debian")?;
    let root = target().join(format!("debian-{suite}"));
    // The other groups of tests are processes of their own, and so is a second run.
    let lock = fs::File::create(root.with_extension("lock")).map_err(|error| error.to_string())?;
    lock.lock().map_err(|error| error.to_string())?;
    if !root.exists() {
        let unready = root.with_extension("unready");
        finished(Command::new("rm").args(["-rf", "--one-file-system"]).arg(&unready))?;
        debootstrap(suite, &unready)?;
        // Last, so that what was interrupted is begun again.
        fs::rename(&unready, &root).map_err(|error| error.to_string())?;
    }
    say(&root.display().to_string());
    Ok(root)
}

fn debootstrap(suite: &str, folder: &Path) -> Result<(), String> {
    let program = needs::tool("debootstrap").ok_or("no debootstrap (apt-get install debootstrap)")?;
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", &DEBOOTSTRAP_LIMIT.as_secs().to_string()]);
    // What it mounts goes with it.
    command.args(["unshare", "--mount", "--propagation", "private", "--"]).arg(program);
    command.args(["--variant=minbase", "--include=systemd", suite]).arg(folder);
    let format = "$(RELEASE) $(COMPONENT) $(ORIGIN) $(REPO_URI)";
    let targets =
        said(Command::new("apt-get").args(["indextargets", "--format", format, "Identifier: Packages"]));
    command.arg(mirror(&targets, suite).unwrap_or("http://deb.debian.org/debian"));
    // apt's own configuration goes before the environment, as it does for apt.
    if let Some(proxy) = proxy(&said(Command::new("apt-config").args(["dump", "Acquire::http::Proxy"]))) {
        command.env("http_proxy", proxy).env("https_proxy", proxy);
    }
    finished(&mut command)
}

/// Debian's mirror among apt's sources, each a line of release, component, origin and address. The origin is empty before
/// the first `apt-get update`; then the address decides.
fn mirror<'a>(targets: &'a str, suite: &str) -> Option<&'a str> {
    let main = format!("{suite} main ");
    let sources = || targets.lines().filter_map(|line| line.strip_prefix(&main)?.split_once(' '));
    let fits = |uri: &str| uri.starts_with("http") || uri.starts_with("file:");
    let named = sources().find(|&(origin, uri)| origin == "Debian" && fits(uri));
    let likely = || sources().find(|&(origin, uri)| origin.is_empty() && fits(uri) && uri.contains("debian"));
    named.or_else(likely).map(|(_, uri)| uri.trim_end_matches('/'))
}

/// The proxy in what `apt-config dump` prints.
fn proxy(dump: &str) -> Option<&str> {
    let proxy =
        dump.lines().find_map(|line| line.strip_prefix("Acquire::http::Proxy "))?.split('"').nth(1)?;
    (!proxy.is_empty() && proxy != "DIRECT" && proxy != "false").then_some(proxy)
}

/// What a command of apt's prints; nothing where there is no apt.
fn said(command: &mut Command) -> String {
    command.output().map(|output| text(&output.stdout)).unwrap_or_default()
}

fn finished(command: &mut Command) -> Result<(), String> {
    let output = run(command, DEBOOTSTRAP_LIMIT + Duration::from_secs(20));
    if output.status.success() {
        return Ok(());
    }
    let said = text(&output.stdout) + &text(&output.stderr);
    let last: Vec<&str> = said.lines().rev().take(5).collect();
    Err(format!("{command:?}: {}: {last:?}", output.status))
}

#[test]
fn the_mirror_and_the_proxy_are_those_of_apt() {
    let targets = "nodistro main  https://deb.example.net/node/\n\
        bookworm main Elsewhere https://apt.example.net/debian/\n\
        bookworm-updates main Debian http://mirror.example.net/d12-updates/\n\
        bookworm main Debian http://mirror.example.net/d12/\n";
    assert_eq!(mirror(targets, "bookworm"), Some("http://mirror.example.net/d12"));
    let unread =
        "bookworm main  https://apt.example.net/\nbookworm main  https://mirror.example.net/debian\n";
    assert_eq!(mirror(unread, "bookworm"), Some("https://mirror.example.net/debian"));
    assert_eq!(mirror(targets, "trixie"), None);
    let set =
        "Acquire::http::Proxy::a.example.net \"DIRECT\";\nAcquire::http::Proxy \"http://192.0.2.7:3142\";\n";
    assert_eq!(proxy(set), Some("http://192.0.2.7:3142"));
    assert_eq!(proxy(""), None);
    assert_eq!(proxy("Acquire::http::Proxy \"DIRECT\";\n"), None);
}
