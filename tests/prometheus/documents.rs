//! Metrics that documents name.

use std::fs;

use super::files::{families, root};

/// Words of that form that are no metrics.
const OTHERS: [&str; 2] = ["culvert_exit", "culvert_tests"];

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
            // The target of a log line.
            if rest.starts_with("::") {
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
