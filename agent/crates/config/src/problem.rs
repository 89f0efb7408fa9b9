//! What an operator sees when the configuration is wrong, and where that is.

use std::{
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use base::files;

use crate::spelled::spelled;

spelled! {
    /// Which file a peer stands in.
    pub enum PeerOrigin {
        /// The configuration, which only its author changes.
        Config => "config",
        /// The state file, which `culvert peer` writes.
        State => "state",
    }
}

impl PeerOrigin {
    /// The file, as an operator calls it.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Config => "the configuration",
            Self::State => "the state file",
        }
    }
}

/// Where something stands in one of the files.
#[derive(Clone, Debug)]
pub(super) struct At {
    pub(super) file: PeerOrigin,
    /// Which file of the directory of peers it is, if it is one: its index in the report.
    pub(super) entry: Option<usize>,
    /// As in `peer[0].endpoints[1]`; empty: the file as a whole.
    pub(super) path: String,
    /// The name of the table that the first index of the path is, if it has a good one.
    pub(super) table: Option<Arc<str>>,
    /// In bytes; `None`: it is not there.
    pub(super) span: Option<Range<usize>>,
}

impl At {
    pub(super) fn file(file: PeerOrigin) -> Self {
        Self { file, entry: None, path: String::new(), table: None, span: None }
    }

    pub(super) fn key(&self, key: &str, span: Option<Range<usize>>) -> Self {
        let path = if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        Self { path, span, ..self.clone() }
    }

    /// The path of the innermost list that this is in.
    pub(super) fn list(&self) -> &str {
        self.path.rsplit_once('[').map_or("", |(list, _)| list)
    }

    pub(super) fn element(&self, index: usize, span: Range<usize>) -> Self {
        Self { path: format!("{}[{index}]", self.path), span: Some(span), ..self.clone() }
    }

    /// The path as an operator finds it: `peer "paris".endpoints[1]`.
    pub(super) fn shown(&self) -> String {
        shown(&self.path, self.table.as_deref())
    }

    /// The key path, for a problem that is reported in `file`.
    pub(super) fn seen_from(&self, file: PeerOrigin) -> String {
        let shown = self.shown();
        if self.file == file { shown } else { format!("{shown} of {}", self.file.words()) }
    }
}

/// The path with the name of its table in place of the first index.
fn shown(path: &str, table: Option<&str>) -> String {
    let split = table.and_then(|table| {
        let (list, rest) = path.split_once('[')?;
        Some((list, table, rest.split_once(']')?.1))
    });
    split.map_or_else(|| path.to_owned(), |(list, table, rest)| format!("{list} {table:?}{rest}"))
}

/// One thing that is wrong with the configuration, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    /// The state file or the file of a peer, if it is there; `None`: the configuration file.
    pub file: Option<PathBuf>,
    /// Which key, as in `peer[0].endpoints[1]`; empty when it is about the file as a whole.
    pub key_path: String,
    /// The name of the table that the first index of the path is: it is shown instead, as in `peer "paris".endpoints[1]`.
    pub table: Option<Arc<str>>,
    /// The line in the file, counted from 1; `None` when the problem is that something is missing.
    pub line: Option<usize>,
    pub problem: String,
    /// What the operator should do about the problem.
    pub remedy: String,
}

impl ConfigProblem {
    /// Where it is, as "file:line"; `file` is the configuration file.
    #[must_use]
    pub fn place(&self, file: &Path) -> String {
        let file = self.file.as_deref().unwrap_or(file).display();
        self.line.map_or_else(|| file.to_string(), |line| format!("{file}:{line}"))
    }

    /// Which key, with the name of its table if that has one.
    #[must_use]
    pub fn key(&self) -> String {
        shown(&self.key_path, self.table.as_deref())
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key_path.is_empty() {
            write!(f, "{}: ", self.key())?;
        }
        write!(f, "{} (remedy: {})", self.problem, self.remedy)
    }
}

/// Every problem of one configuration, one per line when displayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblems {
    /// The file, as the operator named it; `None` for text that came from elsewhere.
    pub file: Option<PathBuf>,
    /// The problems in the order of their lines, those of the state file last, never none.
    pub problems: Vec<ConfigProblem>,
}

impl std::error::Error for ConfigProblems {}

impl fmt::Display for ConfigProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line =
            |problem: &ConfigProblem| match (problem.file.as_ref().or(self.file.as_ref()), problem.line) {
                (Some(file), _) => format!("{}: {problem}", problem.place(file)),
                (None, Some(line)) => format!("line {line}: {problem}"),
                (None, None) => problem.to_string(),
            };
        f.write_str(&self.problems.iter().map(line).collect::<Vec<_>>().join("\n"))
    }
}

/// Why a configuration could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file itself cannot be read.
    #[error("{}: cannot be read: {cause} (remedy: {})", path.display(), remedy(.cause))]
    Read {
        path: PathBuf,
        /// Why, in the kernel's words; in the message, so not repeated as a source.
        cause: io::Error,
    },
    /// What it says is wrong, its identity included.
    #[error(transparent)]
    Problems(#[from] ConfigProblems),
}

fn remedy(cause: &io::Error) -> &'static str {
    let general = if cause.kind() == io::ErrorKind::NotFound {
        "culvert init writes one, or name the file with --config"
    } else if cause.kind() == io::ErrorKind::PermissionDenied {
        "do it as root, or let this user read it"
    } else {
        "name the file with --config, and let this user read it"
    };
    files::remedy(cause).unwrap_or(general)
}

/// Why the state file cannot be read, and the remedy: that of the cause, if it has one.
pub(super) fn why_unreadable(cause: &io::Error) -> (String, String) {
    let general =
        files::remedy(cause).unwrap_or("let the user that runs culvert read it, or set identity.state_dir");
    let said = cause.to_string();
    // What keeps the folder from being used says what to do.
    let (why, remedy) = said.rsplit_once(" (remedy: ").unwrap_or((&said, general));
    (why.to_owned(), remedy.trim_end_matches(')').to_owned())
}

/// A file of the directory of peers.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// Collects the problems of all files.
#[derive(Clone, Default)]
pub(super) struct Report {
    config: String,
    state: String,
    /// The path of the state file.
    state_file: Option<PathBuf>,
    /// The files of the directory of peers.
    entries: Vec<Entry>,
    problems: Vec<ConfigProblem>,
    notes: Vec<ConfigProblem>,
}

impl Report {
    /// Makes an empty report on a configuration, whose text is `config`.
    pub(super) fn new(config: &str) -> Self {
        Self { config: config.to_owned(), ..Self::default() }
    }

    /// The text that stands in the state file.
    pub(super) fn read_state(&mut self, text: &str, path: PathBuf) {
        (self.state, self.state_file) = (text.to_owned(), Some(path));
    }

    /// Takes a file of the directory of peers; returns the place of the whole file.
    pub(super) fn read_entry(&mut self, entry: Entry) -> At {
        self.entries.push(entry);
        At { entry: Some(self.entries.len() - 1), ..At::file(PeerOrigin::Config) }
    }

    /// Takes out the problems of files for which `is_theirs` holds.
    pub(super) fn take_problems(&mut self, is_theirs: impl Fn(&ConfigProblem) -> bool) -> Vec<ConfigProblem> {
        let (theirs, others) = std::mem::take(&mut self.problems).into_iter().partition(is_theirs);
        self.problems = others;
        theirs
    }

    /// Records a problem at its place, with the remedy for it, once for all ports of a range.
    pub(super) fn add(&mut self, at: &At, problem: impl Into<String>, remedy: impl Into<String>) {
        let problem = self.describe(at, problem.into(), remedy.into());
        if !self.problems.iter().rev().take(16).any(|before| *before == problem) {
            self.problems.push(problem);
        }
    }

    /// Records what an operator should know, although the agent starts.
    pub(super) fn note(&mut self, at: &At, problem: impl Into<String>, remedy: impl Into<String>) {
        let note = self.describe(at, problem.into(), remedy.into());
        self.notes.push(note);
    }

    fn describe(&self, at: &At, problem: String, remedy: String) -> ConfigProblem {
        let entry = at.entry.and_then(|index| self.entries.get(index));
        let (text, file) = match (entry, at.file) {
            (Some(entry), _) => (&entry.text, Some(entry.path.clone())),
            (None, PeerOrigin::Config) => (&self.config, None),
            (None, PeerOrigin::State) => (&self.state, self.state_file.clone()),
        };
        let line = at.span.as_ref().map(|span| {
            let before = text.as_bytes().iter().take(span.start);
            1 + before.filter(|byte| **byte == b'\n').count()
        });
        // The name of a peer's file stands before the keys in it, so that others can refer to them.
        let prefix = entry.and_then(|entry| entry.path.file_name()?.to_str());
        let key_path = prefix.and_then(|prefix| at.path.strip_prefix(prefix)).unwrap_or(&at.path);
        let key_path = key_path.trim_start_matches('.').to_owned();
        ConfigProblem { file, key_path, table: at.table.clone(), line, problem, remedy }
    }

    /// The problems and the notes, each in the order of their lines, those of other files last.
    pub(super) fn into_parts(mut self) -> (Vec<ConfigProblem>, Vec<ConfigProblem>) {
        for list in [&mut self.problems, &mut self.notes] {
            list.sort_by_key(|problem| (problem.file.clone(), problem.line.unwrap_or(usize::MAX)));
        }
        (self.problems, self.notes)
    }
}
