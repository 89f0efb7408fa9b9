//! Relative links between documents.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Component, Path, PathBuf},
};

use super::files::{root, slug};

/// Documents outside `docs/`. The crates' READMEs come with them.
const DOCUMENTS: [&str; 6] =
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "fuzz/README.md", "tests/README.md"];

/// Paths of all documents, relative to the repository.
fn documents() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = DOCUMENTS.iter().map(PathBuf::from).collect();
    found.push("quic-core/README.md".into());
    for entry in fs::read_dir(root().join("agent/crates")).unwrap() {
        let path = entry.unwrap().path().join("README.md");
        assert!(path.is_file(), "{} is missing", path.display());
        found.push(path.strip_prefix(root()).unwrap().to_owned());
    }
    found.extend(below("docs"));
    found
}

/// Markdown files below a folder of the repository.
fn below(folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join(&folder)).unwrap() {
        let entry = entry.unwrap();
        let path = folder.as_ref().join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            found.extend(below(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found
}

/// Lines outside blocks of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// Targets of the links in a line, code between backticks left out.
fn targets(line: &str) -> Vec<String> {
    let (mut text, mut code) = (String::new(), false);
    for c in line.chars() {
        code ^= c == '`';
        text.push(if code { ' ' } else { c });
    }
    text.match_indices("](")
        .map(|(start, opening)| {
            let target = &text[start + opening.len()..];
            target.split_once(')').unwrap_or_else(|| panic!("no end of the link: {line}")).0.to_owned()
        })
        .collect()
}

/// Anchors of a document. GitHub and mdBook number the second heading with one text, and those after it.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen = BTreeMap::new();
    prose(text)
        .filter_map(|line| slug(line.strip_prefix('#')?))
        .map(|slug| {
            let count = seen.entry(slug.clone()).or_insert(0);
            *count += 1;
            if *count == 1 { slug } else { format!("{slug}-{}", *count - 1) }
        })
        .collect()
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(found.pop(), "{} leads out of the repository", path.display()),
            Component::Normal(name) => found.push(name),
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir => panic!("{} is absolute", path.display()),
        }
    }
    found
}

#[test]
fn every_link_and_anchor_leads_somewhere() {
    let mut checked = 0;
    for document in documents() {
        let text = fs::read_to_string(root().join(&document)).unwrap();
        for target in prose(&text).flat_map(targets) {
            if target.contains("://") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let folder = document.parent().unwrap();
            let path = if path.is_empty() { document.clone() } else { normal(&folder.join(path)) };
            let name = document.display();
            assert!(root().join(&path).is_file(), "{name}: there is no {target}");
            if !anchor.is_empty() {
                let other = fs::read_to_string(root().join(&path)).unwrap();
                assert!(anchors(&other).contains(anchor), "{name}: no heading for {target}");
            }
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked} links were found");
}

#[test]
fn the_book_has_every_document_once() {
    let summary = PathBuf::from("docs/SUMMARY.md");
    let text = fs::read_to_string(root().join(&summary)).unwrap();
    let mut listed = BTreeSet::new();
    for target in prose(&text).flat_map(targets) {
        let path = normal(&Path::new("docs").join(&target));
        assert!(listed.insert(path), "{target} stands twice");
    }
    let expected: BTreeSet<_> = documents().into_iter().filter(|path| *path != summary).collect();
    assert_eq!(listed, expected);
}

#[test]
fn links_are_found_where_a_reader_sees_them() {
    let text = "See [a](b.md#c), `[no](code)` and [d](e).\n```\n[no](block)\n```\n# One `two`!\n# One two\n";
    let found: Vec<_> = prose(text).flat_map(targets).collect();
    assert_eq!(found, ["b.md#c", "e"]);
    assert_eq!(anchors(text), ["one-two", "one-two-1"].map(String::from).into());
    assert_eq!(normal(Path::new("docs/./a/../../b.md")), Path::new("b.md"));
}

/// Rust files and folders of the sources, relative to the repository.
pub(crate) fn sources() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = ["agent", "quic-core", "tests", "fuzz"].map(PathBuf::from).into();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = folder.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                if entry.file_name() != "target" {
                    folders.push(path.clone());
                    found.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found
}

/// The documents but the changelog, and the heads of all modules.
pub(crate) fn texts() -> Vec<(PathBuf, String)> {
    let mut texts: Vec<(PathBuf, String)> = documents()
        .into_iter()
        .filter(|path| *path != Path::new("CHANGELOG.md"))
        .map(|path| (path.clone(), fs::read_to_string(root().join(path)).unwrap()))
        .collect();
    for path in sources().into_iter().filter(|path| path.extension().is_some()) {
        let text = fs::read_to_string(root().join(&path)).unwrap();
        let head: Vec<_> = text.lines().filter(|line| line.starts_with("//!")).collect();
        texts.push((path, head.join("\n")));
    }
    texts
}

/// Names between backticks in a line that are those of Rust files, or of folders.
fn names(line: &str) -> impl Iterator<Item = &str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    line.split('`').skip(1).step_by(2).filter(move |name| {
        let is_path = name.ends_with(".rs") || name.ends_with('/');
        is_path && name.chars().all(plain) && !name.starts_with(['/', '.'])
    })
}

#[test]
fn every_source_that_a_document_or_the_head_of_a_module_names_is_there() {
    let (sources, mut checked) = (sources(), 0);
    let texts = texts();
    let mut missing = Vec::new();
    for (path, text) in &texts {
        for name in prose(text).flat_map(names) {
            checked += 1;
            let is_source = path.extension().is_some_and(|extension| extension == "rs");
            let found = if is_source && !name.trim_end_matches('/').contains('/') {
                // The head of a module names its neighbours, and those of the folders above.
                let own = path.with_extension("");
                own.ancestors().any(|folder| root().join(folder).join(name).exists())
            } else {
                sources.iter().any(|source| source.ends_with(name))
                    || ["", "docs", "deploy"].iter().any(|folder| root().join(folder).join(name).exists())
            };
            if !found && name != "target/" {
                missing.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "they name what is not there:\n{}", missing.join("\n"));
    assert!(checked > 500, "{checked} names were found");
}
