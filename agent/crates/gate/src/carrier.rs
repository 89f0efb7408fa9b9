//! The token that opens a carrier: a path that an exit's web server recognises, and that is any path of the site to everybody else (pure).
//!
//! ```text
//!  path   "/" │ base64url, without padding, of   nonce 8 │ knock 136
//! ```
//!
//! The knock is that of a connection attempt (`knock.rs`) with the nonce in place of the connection ID, and [`LABEL`] in place of the
//! ClientHello. A ClientHello begins with another byte, so neither opens what the other is for. Whoever does not know the exit's
//! public key sees 192 random characters. A token is single use as a knock is; a web server in front that sends a request twice gets the
//! carrier once, and the site's answer then.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::token_bucket::{Allowance, Pace};
use data_encoding::BASE64URL_NOPAD;

use crate::{
    Own,
    admission::{Admits, Allowlist},
    identity::AgreementKey,
    knock::{self, About, EPOCH_SECONDS, KNOCK_BYTES, KnockError, MAX_CLOCK_WINDOW, ServerKey, epochs},
    replay_log::MemoryReplayLog,
    table::{SingleUse, Used},
};

/// The bytes of a nonce: as many as a connection ID of ours has.
pub const NONCE_BYTES: usize = 8;

/// The length of a token's path, its slash included.
pub const PATH_BYTES: usize = 1 + (NONCE_BYTES + KNOCK_BYTES) * 4 / 3;

/// What a token is for.
const LABEL: &[u8] = b"culvert carrier 1";

/// Tokens that are opened in a second, at two operations of X25519 each: 2 % of a core.
const OPENED_PER_SECOND: u32 = 200;

/// Tokens that are opened at once: of a fleet's peers that come back.
const OPENED_AT_ONCE: u32 = 400;

/// The path by which the holder of `own` asks the holder of `server` for a carrier. `nonce` and `ephemeral` must be random and new.
///
/// # Errors
/// As [`knock::seal`].
pub fn path(
    own: &AgreementKey,
    server: &ServerKey,
    unix_seconds: u64,
    nonce: [u8; NONCE_BYTES],
    ephemeral: &[u8; 32],
) -> Result<String, KnockError> {
    let about = About { client_hello: LABEL, unix_seconds, fallback: false };
    let knock = knock::seal(own, server, &nonce, about, ephemeral)?;
    Ok(format!("/{}", BASE64URL_NOPAD.encode(&[&nonce[..], &knock].concat())))
}

/// Why a path opens no carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// It is a path of the site.
    #[error("the path is not a token for this agent")]
    Other,
    /// More tokens came than are opened at once.
    #[error("too many tokens came at once")]
    Budget,
    /// It is sealed to another key, damaged, or for something else.
    #[error("the token does not open")]
    Sealed,
    /// Its time differs from ours by more than `access.clock_window`.
    #[error("the clocks differ by {0} s")]
    Clock(i64),
    /// Its client is no peer, or broke the protocol a moment ago.
    #[error("the token's client is not admitted")]
    Client,
    /// It was used before, or may have been, before this process began.
    #[error("the token was used before")]
    Used,
}

/// The tokens of an exit: opens each once.
pub struct Tokens {
    own: Arc<Own>,
    allowlist: Arc<dyn Allowlist>,
    used: SingleUse,
    budget: Allowance,
}

impl Tokens {
    /// The tokens of the agent with these keys, which remembers nothing of an earlier process: what was made before it began opens
    /// nothing.
    #[must_use]
    pub fn new(own: Arc<Own>, allowlist: Arc<dyn Allowlist>, now: Instant, unix_seconds: u64) -> Self {
        let used = SingleUse::new(Box::new(MemoryReplayLog::default()), 1, now, unix_seconds);
        let budget = Allowance::new(Pace { per_second: OPENED_PER_SECOND, at_once: OPENED_AT_ONCE }, now);
        Self { own, allowlist, used, budget }
    }

    /// Takes the token in `path`, after which it is used.
    ///
    /// # Errors
    /// Every variant of [`TokenError`]; the checks stand in its order.
    pub fn take(
        &mut self,
        path: &str,
        window: Duration,
        now: Instant,
        unix_seconds: u64,
    ) -> Result<Admits, TokenError> {
        let bytes = Some(path)
            .filter(|path| path.len() == PATH_BYTES)
            .and_then(|path| path.strip_prefix('/'))
            .and_then(|text| BASE64URL_NOPAD.decode(text.as_bytes()).ok());
        let bytes = bytes.ok_or(TokenError::Other)?;
        let (nonce, token) = bytes.split_at(NONCE_BYTES);
        let knock: [u8; KNOCK_BYTES] = token.try_into().map_err(|_| TokenError::Other)?;
        let good = epochs(unix_seconds, window);
        let end = *good.end();
        let own = self.own.proven(nonce, &knock, good).ok_or(TokenError::Other)?;
        if !self.budget.take(1, now) {
            return Err(TokenError::Budget);
        }
        let opened = self.own.open(own, nonce, &knock).map_err(|_| TokenError::Sealed)?;
        if opened.hello_hash != knock::hello_hash(LABEL) {
            return Err(TokenError::Sealed);
        }
        let ahead =
            i64::try_from(opened.unix_seconds).unwrap_or(i64::MAX).saturating_sub_unsigned(unix_seconds);
        if ahead.unsigned_abs() > window.as_secs() {
            return Err(TokenError::Clock(ahead));
        }
        let admits = self.allowlist.admits(&opened.client, now);
        match admits {
            Admits::Peer(_) | Admits::Anyone => {}
            Admits::Paused(_) | Admits::Nobody => return Err(TokenError::Client),
        }
        if !self.used.remembers(opened.unix_seconds, window, now) {
            return Err(TokenError::Used);
        }
        let tag = *knock.last_chunk().expect("a knock is longer than its mac1");
        let expiry = end.saturating_add(1).saturating_mul(EPOCH_SECONDS) + MAX_CLOCK_WINDOW.as_secs();
        // Nobody asks for the source of a token that is done.
        let used = Used::new(([0, 0, 0, 0], 0).into(), expiry);
        self.used.insert(tag, used, now, unix_seconds).map_err(|_| TokenError::Used)?;
        self.used.done(&tag);
        Ok(admits)
    }
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokens({} used)", self.used.len())
    }
}

#[cfg(test)]
#[path = "carrier_tests.rs"]
mod tests;
