//! The encoder workers of `triptych up`: a number, or a number for each tower of a model in which several read the same item.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Most encoder workers.
const MOST: u16 = 64;

/// Encoder workers to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EncoderWorkers {
    /// So many, each with all towers.
    Alike(u16),
    /// So many of each tower, by its name.
    ByTower(Vec<(String, u16)>),
}

impl EncoderWorkers {
    /// The tower of each worker; `None`: it holds all.
    pub fn towers(&self) -> Vec<Option<&str>> {
        match self {
            Self::Alike(n) => vec![None; usize::from(*n)],
            Self::ByTower(towers) => {
                towers.iter().flat_map(|(name, n)| vec![Some(name.as_str()); usize::from(*n)]).collect()
            }
        }
    }
}

/// Text that names no encoder workers.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "{found:?}: allowed are 0 to {MOST}, or a number of at least 1 for each tower, {MOST} in all, as in low:2,high:1"
)]
pub struct NotEncoderWorkers {
    found: String,
}

impl FromStr for EncoderWorkers {
    type Err = NotEncoderWorkers;

    fn from_str(text: &str) -> Result<Self, NotEncoderWorkers> {
        let wrong = || NotEncoderWorkers { found: text.to_owned() };
        if let Ok(n) = text.parse::<u16>() {
            return if n <= MOST { Ok(Self::Alike(n)) } else { Err(wrong()) };
        }
        let tower = |part: &str| {
            let (name, n) = part.split_once(':')?;
            let n = n.parse::<u16>().ok().filter(|n| (1..=MOST).contains(n))?;
            (!name.is_empty()).then(|| (name.to_owned(), n))
        };
        let towers: Vec<_> = text.split(',').map(tower).collect::<Option<_>>().ok_or_else(wrong)?;
        let names: BTreeSet<_> = towers.iter().map(|(name, _)| name).collect();
        let total: usize = towers.iter().map(|(_, n)| usize::from(*n)).sum();
        if names.len() < towers.len() || total > usize::from(MOST) {
            return Err(wrong());
        }
        Ok(Self::ByTower(towers))
    }
}

impl fmt::Display for EncoderWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alike(n) => write!(f, "{n}"),
            Self::ByTower(towers) => {
                let each: Vec<_> = towers.iter().map(|(name, n)| format!("{name}:{n}")).collect();
                f.write_str(&each.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_or_one_for_each_tower_is_read_and_what_is_neither_is_refused() {
        let towers = |text: &str| {
            let workers: EncoderWorkers = text.parse().expect(text);
            assert_eq!(workers.to_string(), text);
            workers.towers().iter().map(|tower| tower.unwrap_or("all").to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(towers("2"), ["all", "all"]);
        assert_eq!(towers("0"), Vec::<String>::new());
        assert_eq!(towers("low:2,high:1"), ["low", "low", "high"]);
        for bad in ["65", "-1", "", "low", "low:0", "low:1,low:2", ":1", "low:60,high:60", "low:1,"] {
            let error = bad.parse::<EncoderWorkers>().expect_err(bad).to_string();
            assert!(error.contains("low:2,high:1"), "{error}");
        }
    }
}
