//! The words of labels and comments.

use std::{collections::BTreeMap, fs, path::PathBuf};

use super::{
    files::root,
    links::{sources, texts},
};

/// The sources of the program: path and text, without tests, benches and examples.
fn shipped() -> impl Iterator<Item = (String, String)> {
    let paths = sources().into_iter().map(|path| path.display().to_string());
    let shipped = paths.filter(|path| {
        let others = ["tests", "testkit/", "testing", "benches/", "examples/", "fuzz/"];
        path.ends_with(".rs") && !others.iter().any(|other| path.contains(other))
    });
    shipped.map(|path| (path.clone(), fs::read_to_string(root().join(path)).unwrap()))
}

/// Variants whose labels are the names that others have given: of a TLS group, of packets in RFC 9001.
const NAMED_ELSEWHERE: [(&str, &str); 2] = [("Hybrid", "x25519mlkem768"), ("ZeroRtt", "0-rtt")];

/// The words of a variant's name or of a label, without capitals and what joins them.
fn words(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

#[test]
fn a_label_is_the_name_of_its_variant() {
    let mut labels = 0;
    for (path, text) in shipped() {
        let starts = ["labelled! {", "spelled! {"];
        for block in starts.into_iter().flat_map(|start| text.split(start).skip(1)) {
            let block = block.split("\n}\n").next().unwrap_or_default();
            for (variant, label) in block.lines().filter_map(|line| line.trim().split_once(" => \"")) {
                let variant = variant.split(" = ").next().unwrap_or_default();
                let label = label.trim_end_matches("\",");
                // What is shown to people only may be a phrase.
                if label.contains(' ') || NAMED_ELSEWHERE.contains(&(variant, label)) {
                    continue;
                }
                assert_eq!(
                    words(variant),
                    words(label),
                    "{path}: code and operator have two words for one thing"
                );
                labels += 1;
            }
        }
    }
    assert!(labels > 150, "{labels} were found");
}

/// Phrases that a reader has to read twice, or that name nobody.
fn is_obscure(comment: &str) -> bool {
    let comment = comment.to_ascii_lowercase();
    let vague = ["somebody", "stranger", "that is to be", "that are to be"];
    let nothing = |phrase: &str| {
        comment.match_indices(phrase).any(|(at, _)| {
            let ends = !comment[at + phrase.len()..].starts_with(char::is_alphanumeric);
            ends && !comment[..at].ends_with("there ")
        })
    };
    vague.iter().any(|phrase| comment.contains(phrase)) || nothing("is none") || nothing("are none")
}

#[test]
fn comments_name_their_subject() {
    let mut obscure = Vec::new();
    for (path, text) in shipped() {
        for (number, line) in (1..).zip(text.lines()) {
            if line.split_once("//").is_some_and(|(_, comment)| is_obscure(comment)) {
                obscure.push(format!("{path}:{number}: {}", line.trim()));
            }
        }
    }
    assert!(obscure.is_empty(), "say who or what, in other words:\n{}", obscure.join("\n"));
    assert!(is_obscure("Somebody else has it.") && is_obscure("a number that is none"));
    assert!(!is_obscure("`None` if there is none.") && !is_obscure("it is nonetheless"));
}

#[test]
fn an_example_that_runs_is_no_comment() {
    for package in Package::all() {
        let has_lib = package.sources.iter().any(|(path, _)| path.ends_with("src/lib.rs"));
        assert!(!has_lib || package.manifest.contains("doctest = false"), "{}", package.manifest);
        for (path, text) in &package.sources {
            let fences = |fence: &str| text.lines().filter(|line| line.trim_start().ends_with(fence)).count();
            let opened = fences("/ ```text") + fences("! ```text");
            let closed = fences("/ ```") + fences("! ```");
            // Rustdoc would take a minute to find none: it is a test, an example, or text.
            assert_eq!(opened, closed, "{}: an example in a comment is not run", path.display());
        }
    }
}

/// The value of an option in the words of a command.
fn value<'a>(words: &[&'a str], option: &str) -> Option<&'a str> {
    words.iter().position(|word| *word == option).and_then(|at| words.get(at + 1).copied())
}

/// A package of the repository: its manifest, and its sources by path.
struct Package {
    manifest: String,
    sources: Vec<(PathBuf, String)>,
}

impl Package {
    /// All packages; a source belongs to the nearest manifest above it.
    fn all() -> Vec<Self> {
        let paths = sources();
        let roots = ["agent", "quic-core", "tests", "fuzz"].map(PathBuf::from);
        let mut packages = BTreeMap::new();
        for folder in paths.iter().chain(&roots) {
            if let Ok(manifest) = fs::read_to_string(root().join(folder).join("Cargo.toml")) {
                packages.insert(folder.clone(), Self { manifest, sources: Vec::new() });
            }
        }
        for path in paths.iter().filter(|path| path.extension().is_some()) {
            let folder = path.ancestors().find(|folder| packages.contains_key(*folder)).unwrap();
            let text = fs::read_to_string(root().join(path)).unwrap();
            packages.get_mut(folder).unwrap().sources.push((path.clone(), text));
        }
        packages.into_values().collect()
    }

    fn declares(&self, name: &str) -> bool {
        let line = format!("name = \"{name}\"");
        self.manifest.lines().any(|declared| declared == line)
    }

    /// Whether part of a path, or of the name of a function, is `part`.
    fn has(&self, part: &str) -> bool {
        self.sources.iter().any(|(path, text)| {
            let named = |line: &str| line.contains("fn ") && line.contains(part);
            path.display().to_string().contains(part) || text.lines().any(named)
        })
    }
}

/// What is wrong with the arguments of cargo.
fn fault(words: &[&str], packages: &[Package]) -> Option<String> {
    let name = value(words, "-p")?;
    let Some(package) = packages.iter().find(|package| package.declares(name)) else {
        return Some(format!("there is no package {name}"));
    };
    for (kind, folder) in [("--test", "tests"), ("--example", "examples"), ("--bench", "benches")] {
        let Some(target) = value(words, kind) else { continue };
        if !package.declares(target) && !package.has(&format!("{folder}/{target}")) {
            return Some(format!("{name} has no {kind} {target}"));
        }
    }
    // What remains of a test's command is a filter: part of the name of a module or a function.
    let taken = [Some(name), value(words, "--test")];
    let filter = words.last().copied().filter(|word| words[0] == "test" && !taken.contains(&Some(word)))?;
    let part = filter.trim_end_matches(':').rsplit("::").next().unwrap_or_default();
    (!package.has(part)).then(|| format!("no test of {name} is named {filter}"))
}

#[test]
fn a_cargo_command_in_a_document_or_the_head_of_a_module_finds_what_it_names() {
    let (packages, mut commands, mut faults) = (Package::all(), 0, Vec::new());
    for (path, text) in texts() {
        for command in text.split("cargo ").skip(1) {
            let command = command.split(['\n', '`', '#', '&']).next().unwrap_or_default();
            let words: Vec<&str> = command.split_whitespace().take_while(|word| *word != "--").collect();
            commands += usize::from(words.contains(&"-p"));
            let fault = fault(&words, &packages);
            faults.extend(fault.map(|fault| format!("{}: {fault}: cargo {command}", path.display())));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(commands > 50, "{commands} were found");
    for stale in ["-p culvert-nothing", "-p culvert --test agents", "-p culvert --lib restarts"] {
        let words: Vec<&str> = ["test"].into_iter().chain(stale.split(' ')).collect();
        assert!(fault(&words, &packages).is_some(), "{stale}");
    }
}
