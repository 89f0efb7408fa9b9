//! Metrics and functions that documents name.

use std::fs;

use super::files::{families, root};

/// Words of that form that are no metrics.
const OTHERS: [&str; 3] = ["culvert_exit", "culvert_ports", "culvert_tests"];

#[test]
fn every_metric_that_a_document_names_exists() {
    let families = families();
    let mut files: Vec<_> =
        fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.extend(["README.md", "CHANGELOG.md", "config/agent.example.toml"].map(|file| root().join(file)));
    let mut named = 0;
    for file in files.iter().filter(|file| file.is_file()) {
        let Ok(text) = fs::read_to_string(file) else { continue };
        for (start, _) in text.match_indices("culvert_") {
            let before = text[..start].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '/') {
                continue;
            }
            let word = &text[start..];
            let end = word.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(word.len());
            let (word, rest) = word.split_at(end);
            // The target of a log line, or the name of a package with its version.
            if rest.starts_with("::") || word["culvert_".len()..].starts_with(|c: char| c.is_ascii_digit()) {
                continue;
            }
            // `culvert_lane_*`, and `culvert_socket_received_{bytes,datagrams}_total`, stand for several.
            let known = if rest.starts_with(['*', '{', '…']) && word.ends_with('_') {
                families.keys().any(|family| family.starts_with(word))
            } else {
                let suffixes = ["_bucket", "_sum", "_count"];
                let family = suffixes.iter().find_map(|suffix| word.strip_suffix(suffix)).unwrap_or(word);
                families.contains_key(family) || families.contains_key(word) || OTHERS.contains(&word)
            };
            assert!(known, "{}: there is no metric {word}", file.display());
            named += 1;
        }
    }
    assert!(named > families.len(), "{named} were found");
}

/// The text of the first string literal in `code`, with its continued lines joined.
fn first_literal(code: &str) -> String {
    let (_, literal) = code.split_once('"').expect("a message");
    let end = literal.char_indices().find(|(at, c)| *c == '"' && !literal[..*at].ends_with('\\'));
    let lines = literal[..end.expect("it ends").0].split("\\\n");
    lines.enumerate().map(|(number, line)| if number == 0 { line } else { line.trim_start() }).collect()
}

#[test]
fn every_warning_in_the_log_says_what_to_do_or_operations_does() {
    let operations = fs::read_to_string(root().join("docs/operations.md")).unwrap();
    let (_, part) = operations.split_once("### Warnings in the log").unwrap();
    let (part, _) = part.split_once("\n### ").unwrap();
    let mut folders = vec![root().join("agent")];
    let rows: Vec<&str> = part
        .lines()
        .filter(|line| line.starts_with("| `"))
        .flat_map(|line| line.split('|').nth(1).unwrap().split('`').skip(1).step_by(2))
        .collect();
    let mut listed = vec![false; rows.len()];
    let mut warnings = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let shown = path.display().to_string();
            if path.is_dir() && !shown.contains("testkit") {
                folders.push(path);
                continue;
            }
            if !shown.ends_with(".rs") || shown.contains("tests") {
                continue;
            }
            let source = fs::read_to_string(&path).unwrap();
            let throttled = source.split("throttled!(").skip(1);
            let throttled = throttled.filter(|line| line.trim_start().starts_with("warn,"));
            for warning in source.split("tracing::warn!(").skip(1).chain(throttled) {
                let text = first_literal(warning);
                warnings += 1;
                let row = rows.iter().position(|row| text.starts_with(row));
                // A text that is made elsewhere has its remedy from there.
                let says_it = text.contains("remedy") || text.starts_with('{');
                assert!(says_it || row.is_some(), "{shown}: no remedy in {text:?}, nor in operations.md");
                row.into_iter().for_each(|row| listed[row] = true);
            }
        }
    }
    assert!(warnings > 50, "{warnings} were found");
    let missing: Vec<_> = rows.iter().zip(listed).filter(|(_, listed)| !listed).collect();
    assert!(missing.is_empty(), "operations.md: nothing logs {missing:?}");
}

/// Most steps of a path through the worker in `docs/architecture.md`.
const MOST_STEPS: usize = 10;

/// Source files of the agent whose paths end with `suffix`.
fn sources(suffix: &str) -> Vec<String> {
    let mut folders = vec![root().join("agent/crates")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.ends_with(suffix) {
                found.push(fs::read_to_string(path).unwrap());
            }
        }
    }
    found
}

#[test]
fn every_step_through_a_worker_names_functions_that_are_there() {
    let text = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let (_, parts) = text.split_once("## The parts of a worker").unwrap();
    let (parts, _) = parts.split_once("\n## ").unwrap();
    let mut paths = 0;
    for path in parts.split("\n### ").skip(1) {
        let steps: Vec<&str> =
            path.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit())).collect();
        assert!((1..=MOST_STEPS).contains(&steps.len()), "{path}");
        for step in steps {
            let names: Vec<&str> = step.split('`').skip(1).step_by(2).collect();
            let mut files = Vec::new();
            let mut functions = 0;
            for name in names {
                if name.ends_with(".rs") {
                    files = sources(name);
                    assert!(!files.is_empty(), "{step}: there is no {name}");
                } else {
                    let declared = [format!("fn {name}("), format!("fn {name}<")];
                    let has = |file: &String| declared.iter().any(|declared| file.contains(declared));
                    assert!(files.iter().any(has), "{step}: there is no function {name}");
                    functions += 1;
                }
            }
            assert!(functions > 0, "{step}: no function is named");
        }
        paths += 1;
    }
    assert_eq!(paths, 5);
}
