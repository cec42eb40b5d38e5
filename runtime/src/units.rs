//! Durations (`10m`) and sizes (`1GiB`) as people write them in the config and on the command line.

use std::{fmt, str::FromStr, time::Duration};

/// A duration such as `90s`, `10m`, `6h`, `14d`, `1h30m`; never without a unit, never negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

/// A size such as `512MiB`, `1GiB`, `10GB` or `1024B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Why a text is no duration or size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUnit {
    /// Not a duration.
    #[error(
        "{0:?} is not a duration: write a whole number and a unit (ms, s, m, h, d), such as \"90s\", \"10m\" or \"1h30m\""
    )]
    Span(String),
    /// Not a size.
    #[error(
        "{0:?} is not a size: write a whole number and a unit (B, KB, KiB, MB, MiB, GB, GiB, TB, TiB), such as \"1GiB\""
    )]
    Size(String),
}

impl FromStr for Span {
    type Err = BadUnit;
    fn from_str(text: &str) -> Result<Self, BadUnit> {
        let bad = || BadUnit::Span(text.to_owned());
        let mut total = Duration::ZERO;
        let mut rest = text.trim();
        if rest.is_empty() {
            return Err(bad());
        }
        while !rest.is_empty() {
            let (number, after) = digits(rest).ok_or_else(bad)?;
            let unit_len = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
            let (unit, next) = after.split_at(unit_len);
            let millis = match unit {
                "ms" => 1,
                "s" => 1000,
                "m" => 60_000,
                "h" => 3_600_000,
                "d" => 86_400_000,
                _ => return Err(bad()),
            };
            let part = number.checked_mul(millis).map(Duration::from_millis).ok_or_else(bad)?;
            total = total.checked_add(part).ok_or_else(bad)?;
            rest = next;
        }
        // A century keeps every sum of times representable.
        if total > Duration::from_secs(100 * 366 * 86_400) { Err(bad()) } else { Ok(Self(total)) }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        if millis < 1000 {
            return write!(f, "{millis}ms");
        }
        let mut seconds = self.0.as_secs();
        let mut written = 0;
        for (unit, size) in [("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)] {
            let count = seconds / size;
            seconds %= size;
            if count > 0 && written < 2 {
                write!(f, "{count}{unit}")?;
                written += 1;
            }
        }
        Ok(())
    }
}

impl FromStr for Size {
    type Err = BadUnit;
    fn from_str(text: &str) -> Result<Self, BadUnit> {
        let bad = || BadUnit::Size(text.to_owned());
        let (number, unit) = digits(text.trim()).ok_or_else(bad)?;
        let factor: u64 = match unit.trim_start() {
            "B" => 1,
            "KB" => 1000,
            "MB" => 1000 * 1000,
            "GB" => 1000 * 1000 * 1000,
            "TB" => 1000 * 1000 * 1000 * 1000,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "TiB" => 1 << 40,
            _ => return Err(bad()),
        };
        number.checked_mul(factor).map(Self).ok_or_else(bad)
    }
}

impl fmt::Display for Size {
    #[expect(clippy::cast_precision_loss, reason = "printed with one decimal")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, size) in [("TiB", 1_u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
            if self.0 >= size {
                return write!(f, "{:.1} {unit}", self.0 as f64 / size as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}

fn digits(text: &str) -> Option<(u64, &str)> {
    let len = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((text.get(..len)?.parse().ok()?, text.get(len..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans() {
        for (text, seconds) in [("90s", 90), ("10m", 600), ("1h30m", 5400), ("14d", 1_209_600), ("0s", 0)] {
            assert_eq!(text.parse::<Span>().unwrap().0, Duration::from_secs(seconds), "{text}");
        }
        assert_eq!("250ms".parse::<Span>().unwrap().0, Duration::from_millis(250));
        for bad in ["", "10", "-5m", "5 m", "5x", "m", "1.5h", "99999999999999999999s", "9999999d"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
        assert_eq!(Span(Duration::from_secs(93_784)).to_string(), "1d2h");
        assert_eq!(Span(Duration::from_millis(80)).to_string(), "80ms");
    }

    #[test]
    fn sizes() {
        assert_eq!("1GiB".parse::<Size>().unwrap().0, 1 << 30);
        assert_eq!("10 MB".parse::<Size>().unwrap().0, 10_000_000);
        for bad in ["", "1", "GiB", "-1GiB", "1gib", "99999999999TiB"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
        assert_eq!(Size(1_610_612_736).to_string(), "1.5 GiB");
    }
}
