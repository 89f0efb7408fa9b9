//! The notices and the list of parts (SBOM) say the same as Cargo.lock, and nothing is missing.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
    time::Duration,
};

use culvert_tests::{needs, process::run};
use serde_json::Value;

use crate::{BUILD, built, repository};

/// Unpacks the tarball into `folder`, and returns the one folder that is in it.
pub(crate) fn unpack(folder: &Path) -> std::path::PathBuf {
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--file"]).arg(&built::tarball()[0]).arg("--directory").arg(folder);
    assert!(run(&mut tar, Duration::from_secs(60)).status.success());
    fs::read_dir(folder).unwrap().next().unwrap().unwrap().path()
}

/// Name and version of each package in Cargo.lock, with its checksum; ours have none.
fn locked() -> BTreeMap<(String, String), Option<String>> {
    let text = fs::read_to_string(repository("Cargo.lock")).unwrap();
    let package = |text: &str| {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} = \"")));
            line.map(|rest| rest.trim_end_matches('"').to_owned())
        };
        Some(((field("name")?, field("version")?), field("checksum")))
    };
    text.split("[[package]]").filter_map(package).collect()
}

#[test]
fn every_part_of_the_program_is_named_with_its_license_and_notice() {
    if !needs::met("the parts of the program", BUILD) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let root = unpack(folder.path());
    let bill: Value = serde_json::from_slice(&fs::read(&built::tarball()[1]).unwrap()).unwrap();
    assert_eq!(fs::read(root.join("doc/sbom.cdx.json")).unwrap(), fs::read(&built::tarball()[1]).unwrap());
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    let notices = fs::read_to_string(root.join("doc/third-party-notices")).unwrap();
    let (listed, texts) = notices.split_once("\n\n--- ").unwrap();
    let texts = format!("--- {texts}");

    let (locked, mut foreign) = (locked(), BTreeSet::new());
    for part in bill["components"].as_array().unwrap() {
        let text = |name: &str| part[name].as_str().unwrap().to_owned();
        let (name, version) = (text("name"), text("version"));
        let license = part["licenses"][0]["expression"].as_str().unwrap();
        assert!(!license.is_empty() && !license.contains('/'), "{name}: {license}");
        // std comes with the compiler, not by Cargo.lock.
        if name != "std" {
            let checksum = locked.get(&(name.clone(), version.clone()));
            let checksum = checksum.unwrap_or_else(|| panic!("{name} {version} is not in Cargo.lock"));
            assert_eq!(part["hashes"][0]["content"].as_str(), checksum.as_deref(), "{name}");
            if checksum.is_none() {
                continue;
            }
        }
        foreign.insert(format!("{name} {version}"));
        let heading = |line: &str| {
            line.starts_with("--- ") && line.split(' ').any(|word| word == name) && line.ends_with(" ---")
        };
        assert!(texts.lines().any(heading), "the notice of {name} is missing");
    }
    let said: BTreeSet<String> =
        listed.lines().map(|line| line.split_once(": ").unwrap().0.to_owned()).collect();
    assert_eq!(said, foreign, "the notices and the list of parts differ");
    for name in ["quinn-proto", "ring", "rustls", "tokio", "std"] {
        assert!(foreign.iter().any(|part| part.starts_with(&format!("{name} "))), "{name}");
    }
    // Those of the tests are not in the program.
    assert!(!foreign.iter().any(|part| part.starts_with("criterion ")));

    // Whatever needs something, and whatever is needed, is there.
    let reference = |part: &Value| part["bom-ref"].as_str().unwrap().to_owned();
    let mut known: BTreeSet<String> = bill["components"].as_array().unwrap().iter().map(reference).collect();
    known.insert(reference(&bill["metadata"]["component"]));
    for edge in bill["dependencies"].as_array().unwrap() {
        assert!(known.contains(edge["ref"].as_str().unwrap()), "{edge}");
        for needed in edge["dependsOn"].as_array().unwrap() {
            assert!(known.contains(needed.as_str().unwrap()), "{edge}");
        }
    }
}
