//! The packages that are not Debian's: the same bytes from two folders, and what is in them, as plain archives show it.
//! `tests/package/distributions` installs them, by command.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use culvert_tests::{
    needs::{self, Need},
    process::{run, text},
};

use crate::{BUILD, built, repository};

const LIMIT: Duration = Duration::from_secs(60);

const NEEDS: &[Need] = &[Need::Tool("zstd", "zstd"), Need::Tool("busybox", "busybox")];

/// The output of a command that must succeed.
fn told(command: &mut Command) -> Vec<u8> {
    let output = run(command, LIMIT);
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    output.stdout
}

/// Mode, owner and path of each file of a tarball, without a slash at the front.
fn listed(package: &Path) -> Vec<String> {
    let mut tar = Command::new("tar");
    tar.args(["--list", "--verbose", "--numeric-owner", "--ignore-zeros", "--file"]).arg(package);
    let line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        format!("{} {} {}", words[0], words[1], words[5])
    };
    text(&told(&mut tar)).lines().map(line).collect()
}

/// A file of a tarball.
fn file(package: &Path, path: &str) -> String {
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--to-stdout", "--ignore-zeros", "--file"]).arg(package).arg(path);
    text(&told(&mut tar))
}

#[test]
fn packages_of_other_distributions_have_their_places_and_the_same_bytes_again() {
    const TEST: &str = "packages of other distributions";
    if !needs::met(TEST, &[BUILD, NEEDS].concat()) {
        return;
    }
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), built::elsewhere());
    let formats = "rpm,archlinux,apk";
    let packages = built::pack(&repository(""), &folder.path().join("first"), formats);
    let again = built::pack(&elsewhere.path().join("a/copy"), &folder.path().join("second"), formats);
    assert_eq!(packages.len(), 3);
    for (first, second) in packages.iter().zip(&again) {
        assert_eq!(first.file_name(), second.file_name());
        assert!(fs::read(first).unwrap() == fs::read(second).unwrap(), "{} differs", first.display());
    }
    let [rpm, arch, apk]: [PathBuf; 3] = packages.try_into().unwrap();

    let (program, data) = ("-rwxr-xr-x 0/0", "-rw-r--r-- 0/0");
    let common = [
        (program, "usr/bin/culvert"),
        (data, "usr/share/man/man1/culvert.1.gz"),
        (data, "usr/share/zsh/site-functions/_culvert"),
        (data, "usr/share/licenses/culvert/LICENSE-MIT"),
        (data, "usr/share/doc/culvert/third-party-notices.gz"),
        (data, "usr/share/doc/culvert/sbom.cdx.json.gz"),
        (data, "usr/share/doc/culvert/examples/bird/site.conf"),
    ];
    for (package, service) in
        [(&arch, (data, "usr/lib/systemd/system/culvert.service")), (&apk, (program, "etc/init.d/culvert"))]
    {
        let files = listed(package);
        for (modes, path) in common.iter().chain([&service]) {
            assert!(files.contains(&format!("{modes} {path}")), "{path}: {files:#?}");
        }
        let is_open = |file: &&String| file[8..9] == *"w" || file[..10].contains(['s', 't']);
        assert_eq!(files.iter().find(is_open), None);
    }
    // Neither brings the other's service.
    assert!(!listed(&arch).iter().any(|file| file.contains("init.d")));
    assert!(!listed(&apk).iter().any(|file| file.contains("systemd")));
    // RPM's own header: a lead, then names and scripts; its payload is for rpm to read.
    let header = String::from_utf8_lossy(&fs::read(&rpm).unwrap()[..64 << 10]).into_owned();
    for words in ["MIT OR Apache-2.0", "systemd-sysusers culvert.conf", "culvert.service", "localhost"] {
        assert!(header.contains(words), "{words}");
    }

    // The scripts are such that the shells of both distributions read them.
    let scripts = folder.path().join("scripts");
    fs::create_dir(&scripts).unwrap();
    for (package, shell, names) in [
        (&arch, &["bash", "-n"][..], &[".INSTALL"][..]),
        (
            &apk,
            &["busybox", "sh", "-n"],
            &[".pre-install", ".post-install", ".post-upgrade", ".pre-deinstall", "etc/init.d/culvert"],
        ),
    ] {
        for name in names {
            let path = scripts.join(name.rsplit('/').next().unwrap());
            fs::write(&path, file(package, name)).unwrap();
            told(Command::new(shell[0]).args(&shell[1..]).arg(&path));
        }
    }
    let install = fs::read_to_string(scripts.join(".INSTALL")).unwrap();
    for function in ["post_install", "post_upgrade", "pre_remove", "post_remove"] {
        assert!(install.contains(&format!("function {function}()")), "{install}");
    }
    for line in ["license = MIT OR Apache-2.0", "depend = openrc", "depend = setpriv"] {
        assert!(file(&apk, ".PKGINFO").contains(line), "{line}");
    }
    let needs = file(&arch, ".PKGINFO");
    for line in ["\ndepend = glibc>=2.", "\ndepend = gcc-libs\n", "\ndepend = systemd\n"] {
        assert!(needs.contains(line), "{line}: {needs}");
    }
}
