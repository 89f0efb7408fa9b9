//! `peer.quota`: what a peer may have carried in a month, and the calendar that says when a month begins.

use crate::{
    kinds::{Given, Kind, Shown, one_of, size, whole},
    section::Table,
    spelled::spelled,
    value::{Bad, bad, bit_rate, bit_rate_text},
};

/// The bytes that a peer may have carried in a month, both directions together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The bytes of a period.
    pub bytes: u64,
    pub per: Period,
    /// The day, 1 to 31, on which a month begins, at 00:00 UTC. A month without that day begins on its last one.
    pub from: u8,
    /// What becomes of the peer's traffic at the quota, until the next month.
    pub then: Then,
}

spelled! {
    /// What a quota is counted over.
    #[derive(Default)]
    pub enum Period {
        /// A month of the calendar.
        #[default]
        Month => "month",
    }
}

/// What becomes of a peer's traffic at its quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Then {
    /// Nothing is carried.
    #[default]
    Stop,
    /// A rate limits each direction, in bits a second.
    Rate(u64),
}

/// Seconds of a day.
const DAY: u64 = 24 * 60 * 60;

impl Quota {
    /// The first second of the month that `unix` seconds are in, and the first one of the next month.
    #[must_use]
    pub fn month_of(&self, unix: u64) -> (u64, u64) {
        let (year, month, _) = date(unix / DAY);
        let begins = |months: i64| first_day(year * 12 + i64::from(month) - 1 + months, self.from) * DAY;
        let this = begins(0);
        if unix >= this { (this, begins(1)) } else { (begins(-1), this) }
    }
}

/// The day on which a month begins, counted from 1970-01-01; `months` is counted from January of year 0.
fn first_day(months: i64, from: u8) -> u64 {
    let (year, month) = (months.div_euclid(12), months.rem_euclid(12) as u8 + 1);
    days(year, month, from.min(days_of(year, month)))
}

fn days_of(year: i64, month: u8) -> u8 {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01 to a date of the Gregorian calendar; 0 for dates before it.
///
/// Years are counted from March, so that the leap day is a year's last: an era is 400 of them.
fn days(year: i64, month: u8, day: u8) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let from_march = (i64::from(month) + 9) % 12;
    let of_year = (153 * from_march + 2) / 5 + i64::from(day) - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    u64::try_from(days).unwrap_or(0)
}

/// Year, month and day of a day counted from 1970-01-01: the inverse of [`days`].
fn date(day: u64) -> (i64, u8, u8) {
    let day = i64::try_from(day).unwrap_or(0) + 719_468;
    let (era, of_era) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month as u8, day as u8)
}

/// The day of `unix` seconds, as in "2026-03-01".
#[must_use]
pub fn date_text(unix: u64) -> String {
    let (year, month, day) = date(unix / DAY);
    format!("{year:04}-{month:02}-{day:02}")
}

const REMEDY: &str = "write a table, as in { bytes = \"500GB\", per = \"month\", from = 1, then = \"stop\" }, or leave the key out";

fn bytes() -> Kind<u64> {
    // A few seconds of a fast link pass before anybody counts; a petabyte is a month at 3 Gbit/s.
    size(1_000_000..=1 << 60)
}

fn then() -> Kind<Then> {
    let read = |given: Given<'_>| match given.value.as_str() {
        Some("stop") => Ok(Then::Stop),
        Some(text) => bit_rate(text).map(Then::Rate),
        None => Err(bad("is no text", "write \"stop\", or a rate as in \"1Mbit\"")),
    };
    Kind::new("`\"stop\"`, 64kbit to 100Gbit", read, |then, _| Shown::text(then_text(*then)))
}

fn then_text(then: Then) -> String {
    match then {
        Then::Stop => "stop".to_owned(),
        Then::Rate(bits) => bit_rate_text(&bits),
    }
}

pub(super) fn quota() -> Kind<Quota> {
    Kind::new("table: `bytes`, `per`, `from`, `then`", read, |quota: &Quota, _| {
        let Quota { bytes, per, from, then } = quota;
        Shown::bare(format!(
            "{{ bytes = \"{}\", per = \"{}\", from = {from}, then = \"{}\" }}",
            bytes_text(*bytes),
            per.label(),
            then_text(*then)
        ))
    })
}

fn read(given: Given<'_>) -> Result<Quota, Bad> {
    let Some(entries) = given.value.as_table() else { return Err(bad("is no table", REMEDY)) };
    let Given { at, checks, .. } = given;
    let mut table = Table::new(at.clone(), Some(entries));
    let bytes = table.value("bytes", &bytes(), checks);
    let quota = Quota {
        bytes: bytes.unwrap_or(u64::MAX),
        per: table.value("per", &one_of(), checks).unwrap_or_default(),
        from: table.value("from", &whole(1..=31), checks).unwrap_or(1),
        then: table.value("then", &then(), checks).unwrap_or_default(),
    };
    table.end(&mut checks.report);
    if bytes.is_none() && !entries.contains_key("bytes") {
        return Err(bad("has no bytes", REMEDY));
    }
    Ok(quota)
}

/// Bytes with the largest decimal unit that shows them whole, as operators read them on bills.
#[must_use]
pub fn bytes_text(bytes: u64) -> String {
    let units = [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB")];
    let fits = units.into_iter().find(|(unit, _)| bytes.is_multiple_of(*unit));
    fits.map_or_else(|| format!("{bytes}B"), |(unit, name)| format!("{}{name}", bytes / unit))
}

/// Bytes of a count, as an operator writes them: "0", "12GB".
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    crate::value::size(text)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Config;

    const HEAD: &str = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n\
                        [[peer]]\nname = \"b\"\npublic_key = \"bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA\"\n";

    fn parse(quota: &str) -> Result<Option<Quota>, String> {
        let config = Config::parse(&format!("{HEAD}quota = {quota}\n"), Path::new("/"));
        config
            .map(|config| config.peers[0].quota)
            .map_err(|error| error.problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    }

    #[test]
    fn a_quota_is_a_table_with_bytes_and_defaults() {
        let full = "{ bytes = \"500GB\", per = \"month\", from = 31, then = \"1Mbit\" }";
        let all = Quota { bytes: 500_000_000_000, per: Period::Month, from: 31, then: Then::Rate(1_000_000) };
        assert_eq!(parse(full), Ok(Some(all)));
        let least = Quota { bytes: 2_000_000_000_000, per: Period::Month, from: 1, then: Then::Stop };
        assert_eq!(parse("{ bytes = \"2TB\" }"), Ok(Some(least)));
        assert_eq!(quota().show(&all, Default::default()).map(|shown| shown.toml()), Some(full.to_owned()));
        for (wrong, part) in [
            ("\"500GB\"", "is no table"),
            ("{ from = 1 }", "has no bytes"),
            ("{ bytes = \"many\" }", "is not a size"),
            ("{ bytes = 1 }", "is out of range"),
            ("{ bytes = \"1GB\", from = 32 }", "from"),
            ("{ bytes = \"1GB\", from = 0 }", "from"),
            ("{ bytes = \"1GB\", then = \"go\" }", "is not a rate"),
            ("{ bytes = \"1GB\", per = \"week\" }", "per"),
            ("{ bytes = \"1GB\", pre = \"month\" }", "pre"),
        ] {
            let found = parse(wrong).expect_err(wrong);
            assert!(found.contains(part) && found.contains("(remedy: "), "{wrong}: {found}");
        }
    }

    #[test]
    fn dates_follow_one_another_for_five_hundred_years() {
        let mut expected = (1970, 1, 1);
        for day in 0..200_000 {
            assert_eq!(date(day), expected, "day {day}");
            assert_eq!(days(expected.0, expected.1, expected.2), day);
            expected.2 += 1;
            if expected.2 > days_of(expected.0, expected.1) {
                expected = (expected.0, expected.1 + 1, 1);
            }
            if expected.1 > 12 {
                expected = (expected.0 + 1, 1, 1);
            }
        }
        // `date -u -d @…`
        assert_eq!(date_text(951_782_400), "2000-02-29");
        assert_eq!(date_text(4_107_542_399), "2100-02-28");
        assert_eq!(date_text(4_107_542_400), "2100-03-01");
    }

    #[test]
    fn a_month_begins_on_its_day_or_on_its_last_one() {
        let quota = |from| Quota { bytes: 1, per: Period::Month, from, then: Then::Stop };
        let at = |year, month, day| days(year, month, day) * DAY;
        for (from, now, (begins, ends)) in [
            (1, at(2026, 3, 1), (at(2026, 3, 1), at(2026, 4, 1))),
            (1, at(2026, 3, 1) - 1, (at(2026, 2, 1), at(2026, 3, 1))),
            (1, at(2027, 1, 1) - 1, (at(2026, 12, 1), at(2027, 1, 1))),
            (15, at(2026, 1, 14), (at(2025, 12, 15), at(2026, 1, 15))),
            (31, at(2026, 2, 28) - 1, (at(2026, 1, 31), at(2026, 2, 28))),
            (31, at(2026, 2, 28), (at(2026, 2, 28), at(2026, 3, 31))),
            (31, at(2028, 2, 28), (at(2028, 1, 31), at(2028, 2, 29))),
            (31, at(2028, 2, 29), (at(2028, 2, 29), at(2028, 3, 31))),
            (30, at(2028, 3, 29), (at(2028, 2, 29), at(2028, 3, 30))),
            (29, at(2100, 3, 1), (at(2100, 2, 28), at(2100, 3, 29))),
            (31, at(2026, 4, 30), (at(2026, 4, 30), at(2026, 5, 31))),
            (31, 0, (0, at(1970, 1, 31))),
        ] {
            assert_eq!(quota(from).month_of(now), (begins, ends), "from {from} at {}", date_text(now));
        }
    }

    #[test]
    fn each_second_is_in_one_month() {
        for from in [1, 15, 28, 29, 30, 31] {
            let quota = Quota { bytes: 1, per: Period::Month, from, then: Then::Stop };
            let (mut begins, last) = (days(2023, 12, 31) * DAY, days(2029, 1, 1) * DAY);
            let mut months = 0;
            while begins < last {
                let month = quota.month_of(begins);
                assert!(month.0 <= begins && begins < month.1, "{from} {begins}");
                assert_eq!(quota.month_of(month.1 - 1), month);
                (begins, months) = (month.1, months + 1);
            }
            assert!((60..=62).contains(&months), "{from}: {months}");
        }
    }
}
