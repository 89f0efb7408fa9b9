//! Checksums and their signature, made with a key that exists for this test only, and checked as the document says.

use std::{fs, path::Path, process::Command, time::Duration};

use culvert_tests::{
    needs::{self, Need},
    process::{run, text},
};

use crate::repository;

const LIMIT: Duration = Duration::from_secs(30);

/// A new key `name` in `folder`, and its line for the file of those who sign.
fn key(folder: &Path, name: &str) -> String {
    let file = folder.join(name);
    let mut make = Command::new("ssh-keygen");
    make.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&file);
    assert!(run(&mut make, LIMIT).status.success());
    let public = fs::read_to_string(file.with_extension("pub")).unwrap();
    format!("release@culvert namespaces=\"culvert-release\" {public}")
}

#[test]
fn a_release_is_signed_by_a_known_key_and_any_change_is_noticed() {
    if !needs::met("the signature", &[Need::Tool("ssh-keygen", "openssh-client")]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let files = folder.join("files");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("culvert-0.1.0.tar.gz"), "a tarball").unwrap();
    fs::write(files.join("culvert_0.1.0-1_amd64.deb"), "a package").unwrap();
    let signers = folder.join("release.signers");
    fs::write(&signers, key(folder, "ours")).unwrap();
    key(folder, "other");
    let sign = |key: &str| {
        let mut command = Command::new(repository("deploy/sign"));
        command.arg("--signers").arg(&signers).arg(folder.join(key)).arg(&files);
        run(&mut command, LIMIT)
    };
    // What docs/releasing.md tells whoever downloads a release.
    let check = || {
        let script = "ssh-keygen -Y verify -f \"$1\" -I release@culvert -n culvert-release -s SHA256SUMS.sig <SHA256SUMS &&
            sha256sum --check --ignore-missing SHA256SUMS";
        let mut command = Command::new("sh");
        command.args(["-ec", script, "sh"]).arg(&signers).current_dir(&files);
        run(&mut command, LIMIT).status.success()
    };

    let refused = sign("other");
    assert!(
        !refused.status.success() && text(&refused.stderr).contains("is not among the keys"),
        "{refused:?}"
    );
    assert!(!files.join("SHA256SUMS").exists(), "nobody could check it");
    let signed = sign("ours");
    assert!(signed.status.success(), "{}", text(&signed.stderr));
    assert!(check());
    assert!(sign("ours").status.success(), "once more, after another file came");
    assert_eq!(fs::read_to_string(files.join("SHA256SUMS")).unwrap().lines().count(), 2);

    fs::write(files.join("culvert-0.1.0.tar.gz"), "another").unwrap();
    assert!(!check(), "a file was changed");
    fs::write(files.join("culvert-0.1.0.tar.gz"), "a tarball").unwrap();
    assert!(check());
    let sums = fs::read_to_string(files.join("SHA256SUMS")).unwrap();
    fs::write(files.join("SHA256SUMS"), sums + "\n").unwrap();
    assert!(!check(), "the list was changed");
    // The keys of the repository: none signs anything but a release.
    for line in fs::read_to_string(repository("deploy/release.signers")).unwrap().lines() {
        let known =
            line.starts_with('#') || line.starts_with("release@culvert namespaces=\"culvert-release\" ");
        assert!(known, "{line}");
    }
}
