//! Properties of any configuration file: what its fuzz target checks.

use std::path::Path;

use crate::{Config, ConfigProblems};

/// Takes `input` as a configuration file.
///
/// It is accepted, or every problem has words and a remedy, and a line within the file.
pub fn config_text(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Config::parse(&text, Path::new("/etc/culvert")) {
        Ok(config) => {
            assert!(config.udp.iter().chain(&config.tcp).all(|forward| forward.peer < config.peers.len()));
            let services = config.peers.iter().flat_map(|peer| &peer.services);
            assert!(services.into_iter().all(|place| *place < config.services.len()));
        }
        Err(problems) => well_said(&problems, &text),
    }
}

/// There are problems, and each has words, a remedy, and a line within the text, if it is about a line.
pub fn well_said(problems: &ConfigProblems, text: &str) {
    assert!(!problems.problems.is_empty() && !problems.to_string().is_empty());
    let lines = 1 + text.bytes().filter(|byte| *byte == b'\n').count();
    for problem in &problems.problems {
        assert!(!problem.problem.is_empty() && !problem.remedy.is_empty(), "{problem:?}");
        assert!(problem.line.is_none_or(|line| (1..=lines).contains(&line)), "{problem:?}");
    }
}
