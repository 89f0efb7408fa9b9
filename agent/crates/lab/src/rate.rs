//! Rates as operators write them.

/// Why a text is not a rate.
const NOT_A_RATE: &str = "write bits per second with a unit, 1k to 1000G, as in 200M";

/// "500k", "200M", "1.5G": decimal units, as network rates have.
///
/// # Errors
/// What to write instead.
pub fn bits_per_second(text: &str) -> Result<u64, &'static str> {
    let (number, exponent) = match text.split_at_checked(text.len().saturating_sub(1)) {
        Some((number, "k" | "K")) => (number, 3),
        Some((number, "M")) => (number, 6),
        Some((number, "G")) => (number, 9),
        Some(_) | None => return Err(NOT_A_RATE),
    };
    // Digits after the point are moved before it, so that no rate is rounded.
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || fraction.len() > exponent || !digits(whole) || !digits(fraction) {
        return Err(NOT_A_RATE);
    }
    let text = format!("{whole}{fraction:0<exponent$}");
    text.parse().ok().filter(|rate| (1_000..=1_000_000_000_000).contains(rate)).ok_or(NOT_A_RATE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_decimal_units() {
        assert_eq!(bits_per_second("1k"), Ok(1_000));
        assert_eq!(bits_per_second("200M"), Ok(200_000_000));
        assert_eq!(bits_per_second("1.25G"), Ok(1_250_000_000));
        for bad in [
            "",
            "M",
            "200",
            "200m",
            "-1M",
            "0M",
            "1.M.",
            ".5G",
            "1.0001k",
            "1001G",
            "99999999999999999999G",
            "é",
        ] {
            assert_eq!(bits_per_second(bad), Err(NOT_A_RATE), "{bad:?}");
        }
    }
}
