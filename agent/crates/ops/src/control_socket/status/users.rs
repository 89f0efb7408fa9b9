//! What a status tells of users.

use engine::status::{Counts, Word};
use serde::{Deserialize, Serialize};
use users::account::UserFigures;

use super::{
    Status,
    page::{Page, age, bit_rate, or_dash},
};

/// A user and what it has had since the agent was started, or since it was added.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UserStatus {
    pub name: String,
    /// What may pass in each direction; `None`: as much as there is time for.
    #[serde(default)]
    pub rate_bits_per_second: Option<u64>,
    /// Sessions that are open: CONNECT, CONNECT-UDP and CONNECT-IP.
    pub sessions: usize,
    /// The inner addresses of those of CONNECT-IP, in order.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Sessions that there were.
    pub sessions_total: u64,
    /// The time since its credentials were good; `None`: they never were.
    pub seen_seconds: Option<u64>,
    /// Bytes by where they were counted.
    pub bytes: Counts,
    /// Datagrams likewise.
    pub datagrams: Counts,
    /// Datagrams from the user that were dropped, by reason.
    pub dropped_from_user: Counts,
    /// Datagrams to the user that were dropped, by reason.
    pub dropped_to_user: Counts,
    /// Requests that were refused, by reason.
    pub refused: Counts,
}

fn counts<'a>(values: impl Iterator<Item = (&'a str, u64)>) -> Counts {
    let not_zero = values.filter(|(_, count)| *count > 0);
    not_zero.map(|(label, count)| (Word::from(label.to_owned()), count)).collect()
}

impl UserStatus {
    /// What is told of `figures` at the wall clock's `now`.
    #[must_use]
    pub fn new(figures: &UserFigures, now: u64) -> Self {
        Self {
            name: figures.name.to_string(),
            rate_bits_per_second: figures.rate,
            sessions: figures.sessions,
            addresses: figures.addresses.iter().map(ToString::to_string).collect(),
            sessions_total: figures.opened,
            seen_seconds: (figures.last_seen > 0).then(|| now.saturating_sub(figures.last_seen)),
            bytes: counts(figures.bytes.by_label()),
            datagrams: counts(figures.datagrams.by_label()),
            dropped_from_user: counts(figures.dropped_from.by_label()),
            dropped_to_user: counts(figures.dropped_to.by_label()),
            refused: counts(figures.refused.by_label()),
        }
    }

    fn count(counts: &Counts, label: &str) -> String {
        counts.get(label).copied().unwrap_or(0).to_string()
    }
}

impl Status {
    /// The users, if there are any.
    pub(super) fn user_table(&self, page: &mut Page) {
        page.table_of(
            &self.users,
            [
                ("USER", |user| user.name.clone()),
                ("SEEN", |user| or_dash(user.seen_seconds.map(|seconds| age(seconds as f64)))),
                ("SESSIONS", |user| user.sessions.to_string()),
                ("RATE", |user| or_dash(user.rate_bits_per_second.map(bit_rate))),
                ("ADDRESS", |user| or_dash(user.addresses.first().cloned())),
                ("FROM IT", |user| UserStatus::count(&user.bytes, "from_user")),
                ("TO IT", |user| UserStatus::count(&user.bytes, "to_user")),
                ("DROPPED", |user| {
                    let all = user.dropped_from_user.values().chain(user.dropped_to_user.values());
                    all.sum::<u64>().to_string()
                }),
                ("REFUSED", |user| user.refused.values().sum::<u64>().to_string()),
            ],
        );
    }
}
