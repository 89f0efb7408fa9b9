//! The secret that requests to the admin server show.

use std::{
    io::{self, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use base::files;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::credential;

/// Too many to guess one after the other.
const LEAST_CHARACTERS: usize = 16;

/// The most characters; a header holds as many easily.
const MOST_CHARACTERS: usize = 256;

/// A secret that a client shows as `Authorization: Bearer SECRET`; it is wiped when it is dropped.
pub struct Token(Zeroizing<Vec<u8>>);

/// Why a file holds no secret that can be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("{}: {cause}", path.display())]
    Read { path: PathBuf, cause: io::Error },
    /// Other users have rights on the file.
    #[error("{}: every user of this host may use it (mode {mode:04o})", path.display())]
    Exposed { path: PathBuf, mode: u32 },
    /// The file is empty, has several lines, or characters that no header has.
    #[error("{}: is not one line of {LEAST_CHARACTERS} to {MOST_CHARACTERS} visible ASCII characters", .0.display())]
    NoSecret(PathBuf),
}

impl TokenError {
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Read { path, cause } if cause.kind() == io::ErrorKind::NotFound => make(path),
            Self::Read { path, cause } => files::remedy(cause).map_or_else(
                || format!("let the user that runs culvert read it, as in chgrp culvert {}", path.display()),
                str::to_owned,
            ),
            Self::Exposed { path, .. } => format!("chmod o= {}", path.display()),
            Self::NoSecret(path) => make(path),
        }
    }
}

fn make(path: &Path) -> String {
    format!("(umask 027; head -c 32 /dev/urandom | base64 > {})", path.display())
}

impl Token {
    /// Reads the secret from `path`, or from the credential of systemd that is named like it.
    ///
    /// # Errors
    /// See [`TokenError`].
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let path = credential::of(path);
        let failed = |cause| TokenError::Read { path: path.clone(), cause };
        let read = files::in_time(&path, |path| {
            let file = files::open(path)?;
            let mode = file.metadata()?.permissions().mode() & 0o7777;
            if mode & 0o007 != 0 {
                return Ok(Err(mode));
            }
            // With room for what is read, and for one byte more than is allowed with a line's end.
            let most = MOST_CHARACTERS + 3;
            let mut text = Zeroizing::new(Vec::with_capacity(most));
            file.take(most as u64).read_to_end(&mut text)?;
            Ok(Ok(text))
        });
        let mut text = match read.map_err(failed)? {
            Ok(text) => text,
            Err(mode) => return Err(TokenError::Exposed { path, mode }),
        };
        while text.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            text.pop();
        }
        let fits = (LEAST_CHARACTERS..=MOST_CHARACTERS).contains(&text.len());
        if !fits || !text.iter().all(u8::is_ascii_graphic) {
            return Err(TokenError::NoSecret(path));
        }
        Ok(Self(text))
    }

    /// Whether `shown` is the secret, in a time that depends on the length of `shown` only.
    #[must_use]
    pub fn matches(&self, shown: &[u8]) -> bool {
        self.0.ct_eq(shown).into()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// What comes of a file with this text and mode.
    fn with_file<T>(text: &str, mode: u32, then: impl FnOnce(Result<Token, TokenError>) -> T) -> T {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        then(Token::read(&path))
    }

    #[test]
    fn a_secret_is_one_line_that_a_header_can_hold() {
        let longest = "x".repeat(MOST_CHARACTERS);
        for text in [
            "0123456789abcdef",
            "0123456789abcdef\n",
            "0123456789abcde=\r\n",
            &longest,
            &format!("{longest}\n"),
        ] {
            with_file(text, 0o640, |token| {
                let token = token.unwrap_or_else(|error| panic!("{text:?}: {error}"));
                assert!(token.matches(text.trim_end().as_bytes()), "{text:?}");
            });
        }
        let long = format!("{longest}x");
        for text in [
            "",
            "\n",
            "0123456789abcde",
            "0123456789 abcdef",
            "0123456789abcdef\nx",
            "0123456789abcdéf",
            &long,
        ] {
            with_file(text, 0o600, |token| {
                assert!(matches!(token, Err(TokenError::NoSecret(_))), "{text:?}")
            });
        }
    }

    #[test]
    fn only_the_whole_secret_matches() {
        let token = with_file("0123456789abcdef", 0o600, Result::unwrap);
        for shown in ["", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0", "0123456789ABCDEF"] {
            assert!(!token.matches(shown.as_bytes()), "{shown:?}");
        }
    }

    #[test]
    fn a_file_that_others_can_use_is_refused_and_a_missing_one_has_a_remedy() {
        for mode in [0o604, 0o602, 0o644] {
            let error = with_file("0123456789abcdef", mode, |token| token.map(drop).unwrap_err());
            assert!(error.remedy().starts_with("chmod o= /"), "{error}");
        }
        let error = Token::read(Path::new("/nowhere/token")).map(drop).unwrap_err();
        assert!(error.remedy().contains("/dev/urandom"), "{error}");
    }
}
