//! What is in the package.

use std::{collections::BTreeMap, fs, path::Path, process::Command, time::Duration};

use culvert_tests::{
    needs::{self, Need},
    process::{run, text},
};

use crate::{BUILD, built, repository};

const LIMIT: Duration = Duration::from_secs(120);

/// Runs a tool of dpkg's on the package, and returns what it printed.
fn tell(program: &str, args: &[&str], package: &Path) -> String {
    let mut command = Command::new(program);
    let output = run(command.args(args).arg(package), LIMIT);
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Path → mode and owner, as `tar` writes them: `-rwxr-xr-x root/root`.
fn files(package: &Path) -> BTreeMap<String, String> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let modes = format!("{} {}", words.next().unwrap(), words.next().unwrap());
        (words.nth(3).unwrap().trim_start_matches('.').to_owned(), modes)
    };
    tell("dpkg-deb", &["--contents"], package).lines().map(line).collect()
}

#[test]
fn the_package_has_everything_in_its_place_and_no_configuration() {
    if !needs::met("the package's contents", BUILD) {
        return;
    }
    let files = files(built::package());
    let (program, data) = ("-rwxr-xr-x root/root", "-rw-r--r-- root/root");
    let doc = "/usr/share/doc/culvert";
    for (path, modes) in [
        ("/usr/bin/culvert", program),
        ("/usr/lib/systemd/system/culvert.service", data),
        ("/usr/lib/sysusers.d/culvert.conf", data),
        ("/usr/lib/sysctl.d/05-culvert.conf", data),
        ("/etc/culvert/", "drwxr-x--- root/root"),
        ("/usr/share/man/man1/culvert.1.gz", data),
        ("/usr/share/man/man1/culvert-init.1.gz", data),
        ("/usr/share/bash-completion/completions/culvert", data),
        ("/usr/share/zsh/vendor-completions/_culvert", data),
        ("/usr/share/fish/vendor_completions.d/culvert.fish", data),
        (&format!("{doc}/copyright"), data),
        (&format!("{doc}/changelog.Debian.gz"), data),
        (&format!("{doc}/third-party-notices.gz"), data),
        (&format!("{doc}/sbom.cdx.json.gz"), data),
        (&format!("{doc}/operations.md"), data),
        (&format!("{doc}/examples/agent.example.toml"), data),
    ] {
        assert_eq!(files.get(path).map(String::as_str), Some(modes), "{path}");
    }
    let in_etc: Vec<_> = files.keys().filter(|path| path.starts_with("/etc/culvert/")).collect();
    assert_eq!(in_etc, ["/etc/culvert/"], "an upgrade would ask about it, or a removal take it away");
    for file in fs::read_dir(repository("config")).unwrap() {
        let name = file.unwrap().file_name();
        let path = format!("{doc}/examples/{}", name.to_str().unwrap());
        assert!(files.contains_key(&path), "{path}");
    }
    for path in examples_of_daemons() {
        let path = format!("{doc}/examples/{path}");
        assert_eq!(files.get(&path).map(String::as_str), Some(data), "{path}");
    }
    // Nothing that anybody could change, nothing that runs as somebody else.
    for (path, modes) in &files {
        assert!(!modes[8..9].contains('w') && !modes[..10].contains(['s', 't']), "{path}: {modes}");
    }
}

/// The configurations of other programs that packages have, in the folder of examples.
pub(crate) fn examples_of_daemons() -> Vec<String> {
    let mut paths = Vec::new();
    for folder in ["babel", "bird", "certbot", "frr", "grafana", "nftables", "prometheus"] {
        for file in fs::read_dir(repository("deploy").join(folder)).unwrap() {
            paths.push(format!("{folder}/{}", file.unwrap().file_name().to_str().unwrap()));
        }
    }
    for known in ["babel/babeld.conf", "bird/site.conf", "bird/site.toml", "frr/exit.conf"] {
        assert!(paths.iter().any(|path| path == known), "{known} is gone");
    }
    paths
}

#[test]
fn the_links_of_the_installed_documents_lead_to_installed_files() {
    if !needs::met("installed documents", BUILD) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut extract = Command::new("dpkg-deb");
    assert!(run(extract.arg("--extract").arg(built::package()).arg(folder.path()), LIMIT).status.success());
    let doc = folder.path().join("usr/share/doc/culvert");
    let (mut links, mut dead) = (0, Vec::new());
    for file in fs::read_dir(&doc).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let words = fs::read_to_string(&file).unwrap();
        let targets = words.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        for (target, _) in targets.filter(|(target, _)| !target.contains(':') && !target.contains(' ')) {
            let path = target.split('#').next().unwrap_or_default();
            links += 1;
            if !path.is_empty() && !doc.join(path).exists() {
                dead.push(format!("{}: {target}", file.file_name().unwrap().to_string_lossy()));
            }
        }
    }
    assert!(
        dead.is_empty() && links > 100,
        "{links} links, of which these lead nowhere:\n{}",
        dead.join("\n")
    );
}

#[test]
fn the_package_depends_on_what_the_program_links_to() {
    if !needs::met("the package's fields", BUILD) {
        return;
    }
    let field =
        |name: &str| tell("dpkg-deb", &["--showformat", &format!("${{{name}}}"), "--show"], built::package());
    assert!(field("Depends").contains("libc6 (>= "), "{}", field("Depends"));
    assert!(field("Depends").contains("systemd"), "the user is made by systemd-sysusers");
    assert_eq!(field("Version"), concat!(env!("CARGO_PKG_VERSION"), "-1"));
    assert!(field("Installed-Size").parse::<u32>().unwrap() > 1000);
}

#[test]
fn the_same_program_makes_the_same_package() {
    if !needs::met("a second package", BUILD) {
        return;
    }
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), built::elsewhere());
    let again = built::build(&elsewhere.path().join("a/copy"), folder.path());
    assert_eq!(again.file_name(), built::package().file_name());
    if fs::read(&again).unwrap() != fs::read(built::package()).unwrap() {
        panic!("they differ:\n{}", differences([built::package(), &again]));
    }
}

/// What differs between two packages: files and fields, and what is in the compressed ones.
fn differences(packages: [&Path; 2]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut listings = String::new();
    for (package, name) in packages.into_iter().zip(["first", "second"]) {
        let root = folder.path().join(name);
        let mut extract = Command::new("dpkg-deb");
        assert!(run(extract.arg("--raw-extract").arg(package).arg(&root), LIMIT).status.success());
        // It says of links that it leaves them alone.
        run(Command::new("gzip").args(["--decompress", "--recursive", "--quiet"]).arg(&root), LIMIT);
        fs::write(folder.path().join(format!("{name}.files")), tell("dpkg-deb", &["--contents"], package))
            .unwrap();
    }
    for [first, second] in [["first.files", "second.files"], ["first", "second"]] {
        let mut diff = Command::new("diff");
        diff.args(["--recursive", "--unified=1", first, second]).current_dir(folder.path());
        listings += &text(&run(&mut diff, LIMIT).stdout);
    }
    listings.lines().take(200).map(|line| format!("{line}\n")).collect()
}

#[test]
fn what_differs_between_packages_is_told() {
    if !needs::met("different packages", BUILD) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (root, other) = (folder.path().join("root"), folder.path().join("other.deb"));
    let mut extract = Command::new("dpkg-deb");
    assert!(run(extract.arg("--raw-extract").arg(built::package()).arg(&root), LIMIT).status.success());
    let notices = root.join("usr/share/doc/culvert/third-party-notices.gz");
    let text_of = |path: &Path| run(Command::new("gzip").arg("-dc").arg(path), LIMIT).stdout;
    let fewer = text(&text_of(&notices)).replacen("tokio ", "tokyo ", 1);
    let plain = notices.with_extension("");
    fs::write(&plain, fewer).unwrap();
    assert!(run(Command::new("gzip").args(["-9nf"]).arg(&plain), LIMIT).status.success());
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "-Znone", "--build"]).arg(&root).arg(&other);
    assert!(run(&mut build, LIMIT).status.success());
    let said = differences([built::package(), &other]);
    assert!(said.contains("\n+tokyo "), "{said}");
}

#[test]
fn lintian_finds_nothing() {
    const LINTIAN: Need = Need::Tool("lintian", "lintian");
    if !needs::met("lintian", &[BUILD, &[LINTIAN]].concat()) {
        return;
    }
    let mut lintian = Command::new("lintian");
    lintian.args(["--allow-root", "--no-cfg", "--fail-on", "error,warning"]).arg(built::package());
    let output = run(&mut lintian, LIMIT);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}
