//! What an operator sees when the configuration is wrong.

use std::{fmt, io, path::PathBuf};

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
