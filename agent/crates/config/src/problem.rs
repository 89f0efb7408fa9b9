//! What an operator sees when the configuration is wrong.

use std::{
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
};

/// One thing that is wrong with the configuration, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    /// The state file, if it is there; `None`: the configuration file.
    pub file: Option<PathBuf>,
    /// Which key, as in `peer[0].endpoints[1]`; empty when it is about the file as a whole.
    pub key_path: String,
    /// The line in the file, counted from 1; `None` when the problem is that something is missing.
    pub line: Option<usize>,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl ConfigProblem {
    /// Where it is, as "file:line"; `file` is the configuration file.
    #[must_use]
    pub fn place(&self, file: &Path) -> String {
        let file = self.file.as_deref().unwrap_or(file).display();
        self.line.map_or_else(|| file.to_string(), |line| format!("{file}:{line}"))
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key_path.is_empty() {
            write!(f, "{}: ", self.key_path)?;
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
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            match (problem.file.as_ref().or(self.file.as_ref()), problem.line) {
                (Some(file), _) => write!(f, "{}: {problem}", problem.place(file))?,
                (None, Some(line)) => write!(f, "line {line}: {problem}")?,
                (None, None) => write!(f, "{problem}")?,
            }
        }
        Ok(())
    }
}

/// Why a configuration could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file itself cannot be read.
    #[error("{}: cannot be read: {cause} (remedy: name the file with --config, and let this user read it)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why, in the kernel's words; in the message, so not repeated as a source.
        cause: io::Error,
    },
    /// What it says is wrong, its identity included.
    #[error(transparent)]
    Problems(#[from] ConfigProblems),
}

/// Collects the problems of one text.
pub(super) struct Report {
    text: String,
    /// The state file; `None`: the configuration file.
    file: Option<PathBuf>,
    problems: Vec<ConfigProblem>,
    notes: Vec<ConfigProblem>,
}

impl Report {
    pub(super) fn new(text: String, file: Option<PathBuf>) -> Self {
        Self { text, file, problems: Vec::new(), notes: Vec::new() }
    }

    /// Records a problem; `span` is its position in the text, in bytes.
    pub(super) fn add(
        &mut self,
        key_path: &str,
        span: Option<Range<usize>>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let problem = self.describe(key_path, span, problem.into(), remedy.into());
        self.problems.push(problem);
    }

    /// Records what an operator should know, although the agent starts.
    pub(super) fn note(
        &mut self,
        key_path: &str,
        span: Option<Range<usize>>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let note = self.describe(key_path, span, problem.into(), remedy.into());
        self.notes.push(note);
    }

    fn describe(
        &self,
        key_path: &str,
        span: Option<Range<usize>>,
        problem: String,
        remedy: String,
    ) -> ConfigProblem {
        let line = |span: Range<usize>| {
            let before = self.text.as_bytes().iter().take(span.start);
            1 + before.filter(|b| **b == b'\n').count()
        };
        let (file, key_path) = (self.file.clone(), key_path.to_owned());
        ConfigProblem { file, key_path, line: span.map(line), problem, remedy }
    }

    /// The problems and the notes, each in the order of their lines.
    pub(super) fn into_parts(mut self) -> (Vec<ConfigProblem>, Vec<ConfigProblem>) {
        for list in [&mut self.problems, &mut self.notes] {
            list.sort_by_key(|problem| problem.line.unwrap_or(usize::MAX));
        }
        (self.problems, self.notes)
    }
}
