//! What a user is let in with, as `culvert user` takes or makes it. A password is read from standard input, where neither the list of
//! processes nor a shell's history shows it.

use std::{
    fs::File,
    io::{self, BufRead as _, IsTerminal as _, Read as _},
    os::fd::AsFd as _,
    path::Path,
};

use anyhow::Context as _;
use clap::Args;
use gate::{chosen_password::PasswordHash, client_key::ClientKey};
use nix::sys::termios::{LocalFlags, SetArg, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

use super::Failure;
use crate::out;

/// The fewest bytes of a password that a person chooses.
const FEWEST_BYTES: usize = 8;

/// The most: with the longest name it has to fit into the field of a request that the agent looks at.
const MOST_BYTES: usize = 128;

/// The longest file of a certificate that is read, in bytes.
const MOST_FILE_BYTES: u64 = 64 << 10;

/// Print what is kept of a password that a person has chosen: a password_hash, Argon2id
///
/// The password is asked for, or is the first line of standard input. `culvert user add` makes better ones.
#[derive(Debug, Args)]
pub(super) struct Hash {}

impl Hash {
    pub(super) fn execute(&self) -> Result<(), Failure> {
        Ok(out::say(&chosen()?)?)
    }
}

/// Reads a password that a person has chosen, and hashes it.
pub(super) fn chosen() -> Result<PasswordHash, Failure> {
    let password = read()?;
    let problem = match password.len() {
        ..FEWEST_BYTES => format!("it has less than {FEWEST_BYTES} characters"),
        FEWEST_BYTES..=MOST_BYTES => {
            return Ok(PasswordHash::new(password.as_bytes()).context("cannot make a salt")?);
        }
        _ => format!("it has more than {MOST_BYTES} bytes"),
    };
    Err(Failure::Input(format!(
        "no such password: {problem} (remedy: take another, or let culvert user add make one)"
    )))
}

fn read() -> Result<Zeroizing<String>, Failure> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return line();
    }
    let silent = Silent::new().context("cannot keep the terminal from showing it")?;
    out::complain(&"Password:");
    let first = line()?;
    out::complain(&"Again:");
    let second = line()?;
    drop(silent);
    if first != second {
        return Err(Failure::Input("the two are not the same (remedy: type it again)".to_owned()));
    }
    Ok(first)
}

/// The next line of standard input.
fn line() -> Result<Zeroizing<String>, Failure> {
    // It does not grow, which would leave copies behind.
    let mut line = Zeroizing::new(String::with_capacity(2 * MOST_BYTES));
    let read = io::stdin().lock().take(2 * MOST_BYTES as u64 - 1).read_line(&mut line);
    read.context("standard input")?;
    let end = line.trim_end_matches(['\r', '\n']).len();
    line.truncate(end);
    Ok(line)
}

/// Keeps the terminal from showing what is typed, until it is dropped.
struct Silent(nix::sys::termios::Termios);

impl Silent {
    fn new() -> nix::Result<Self> {
        let stdin = io::stdin();
        let before = tcgetattr(stdin.as_fd())?;
        let mut silent = before.clone();
        silent.local_flags.remove(LocalFlags::ECHO);
        tcsetattr(stdin.as_fd(), SetArg::TCSAFLUSH, &silent)?;
        Ok(Self(before))
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        tcsetattr(io::stdin().as_fd(), SetArg::TCSAFLUSH, &self.0).ok();
    }
}

/// The hash of a user's key: as it is written, or of the certificate or public key in a file.
pub(super) fn client_key(text: &str) -> Result<ClientKey, Failure> {
    if text.starts_with("sha256:") {
        let wrong =
            |error| Failure::Input(format!("{text:?} {error} (remedy: name the file of the certificate)"));
        return text.parse().map_err(wrong);
    }
    let path = Path::new(text);
    let mut pem = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST_FILE_BYTES).read_to_end(&mut pem));
    read.with_context(|| path.display().to_string())?;
    ClientKey::of_pem(&pem).ok_or_else(|| {
        let remedy = "name a certificate or a public key in PEM form, or write sha256: and its hash";
        Failure::Input(format!("{text:?} has no key that can be read (remedy: {remedy})"))
    })
}
