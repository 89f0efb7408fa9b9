//! What an operator sees when the configuration is wrong.

use std::{
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
};

/// One thing that is wrong with the configuration, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    /// Which key, as in `peer[0].endpoints[1]`; empty when it is about the file as a whole.
    pub key_path: String,
    /// The line in the file, counted from 1; `None` when the problem is that something is missing.
    pub line: Option<usize>,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub remedy: String,
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
    /// The problems in the order of their lines, never none.
    pub problems: Vec<ConfigProblem>,
}

impl std::error::Error for ConfigProblems {}

impl fmt::Display for ConfigProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            match (&self.file, problem.line) {
                (Some(file), Some(line)) => write!(f, "{}:{line}: {problem}", file.display())?,
                (Some(file), None) => write!(f, "{}: {problem}", file.display())?,
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
pub(super) struct Report<'t> {
    text: &'t str,
    problems: Vec<ConfigProblem>,
}

impl<'t> Report<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { text, problems: Vec::new() }
    }

    /// Records a problem; `span` is its position in the text, in bytes.
    pub(super) fn add(
        &mut self,
        key_path: &str,
        span: Option<Range<usize>>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let line = |span: Range<usize>| {
            let before = self.text.as_bytes().iter().take(span.start);
            1 + before.filter(|b| **b == b'\n').count()
        };
        self.problems.push(ConfigProblem {
            key_path: key_path.to_owned(),
            line: span.map(line),
            problem: problem.into(),
            remedy: remedy.into(),
        });
    }

    /// Whether nothing was reported.
    pub(super) fn is_empty(&self) -> bool {
        self.problems.is_empty()
    }

    /// What was reported, in the order of the lines.
    pub(super) fn into_problems(mut self, file: Option<&Path>) -> ConfigProblems {
        self.problems.sort_by_key(|problem| problem.line.unwrap_or(usize::MAX));
        ConfigProblems { file: file.map(Path::to_owned), problems: self.problems }
    }
}
