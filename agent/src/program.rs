//! What this program is: its version, and the commit that it was built from.

/// The version alone, as in "0.1.0".
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit and its date, as in "3f2a9c1b2d4e 2026-11-27"; `None` in a build for development, or where the sources do not
/// say it.
pub(crate) const COMMIT: Option<&str> = {
    let commit = env!("CULVERT_BUILT_FROM");
    if commit.is_empty() { None } else { Some(commit) }
};

/// What we call our program to peers, as in "culvert/0.1.0 (3f2a9c1b2d4e 2026-11-27)".
pub(crate) fn software() -> String {
    named(COMMIT)
}

fn named(commit: Option<&str>) -> String {
    match commit {
        Some(commit) => format!("culvert/{VERSION} ({commit})"),
        None => format!("culvert/{VERSION}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_are_told_is_short_enough_for_a_hello() {
        let longest = named(Some("0123456789ab 2026-11-27, changed"));
        assert!(longest.ends_with(" (0123456789ab 2026-11-27, changed)"), "{longest}");
        assert!(longest.len() <= wire::messages::MAX_NAME_BYTES, "{longest}");
        assert_eq!(named(None), format!("culvert/{VERSION}"));
    }
}
