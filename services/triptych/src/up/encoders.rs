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

impl EncoderWorkers {
    /// The mistake for a model with these towers, if there is one: a tower that it has not, or one that no worker would hold.
    pub fn fault_of(&self, towers: &[&str]) -> Option<String> {
        let Self::ByTower(given) = self else { return None };
        let is_given = |tower: &str| given.iter().any(|(name, _)| name == tower);
        let unknown = given.iter().find(|(name, _)| !towers.contains(&name.as_str()));
        let lacking = towers.iter().find(|tower| !is_given(tower));
        let of = towers.join(" and ");
        match (towers, unknown, lacking) {
            ([], ..) | (_, None, None) => None,
            (_, Some((name, _)), _) => Some(format!("no tower is named {name:?}, its towers are {of}")),
            (_, None, Some(tower)) => {
                Some(format!("no worker would hold tower {tower}, its towers are {of}"))
            }
        }
    }
}

/// Text that names no encoder workers.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "{found:?}: allowed are 0 to {most}, or a number of at least 1 for each tower, {most} in all, as in low:2,high:1"
)]
pub struct NotEncoderWorkers {
    found: String,
    most: u16,
}

impl FromStr for EncoderWorkers {
    type Err = NotEncoderWorkers;

    fn from_str(text: &str) -> Result<Self, NotEncoderWorkers> {
        Self::within(MOST, text)
    }
}

impl EncoderWorkers {
    /// Reads at most so many workers.
    ///
    /// # Errors
    /// [`NotEncoderWorkers`].
    pub fn within(most: u16, text: &str) -> Result<Self, NotEncoderWorkers> {
        let wrong = || NotEncoderWorkers { found: text.to_owned(), most };
        if let Ok(n) = text.parse::<u16>() {
            return if n <= most { Ok(Self::Alike(n)) } else { Err(wrong()) };
        }
        let tower = |part: &str| {
            let (name, n) = part.split_once(':')?;
            let n = n.parse::<u16>().ok().filter(|n| (1..=most).contains(n))?;
            (!name.is_empty()).then(|| (name.to_owned(), n))
        };
        let towers: Vec<_> = text.split(',').map(tower).collect::<Option<_>>().ok_or_else(wrong)?;
        let names: BTreeSet<_> = towers.iter().map(|(name, _)| name).collect();
        let total: usize = towers.iter().map(|(_, n)| usize::from(*n)).sum();
        if names.len() < towers.len() || total > usize::from(most) {
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
    fn each_tower_of_a_model_needs_a_worker() {
        let fault = |text: &str, towers: &[&str]| {
            text.parse::<EncoderWorkers>().expect("encoder workers").fault_of(towers).unwrap_or_default()
        };
        assert_eq!(fault("low:2,high:1", &["low", "high"]), "");
        assert_eq!(fault("3", &["low", "high"]), "");
        assert_eq!(fault("low:1", &[]), "", "a model with one tower is held by each worker");
        assert_eq!(
            fault("low:1", &["low", "high"]),
            "no worker would hold tower high, its towers are low and high"
        );
        let unknown = fault("low:1,high:1,deep:1", &["low", "high"]);
        assert_eq!(unknown, "no tower is named \"deep\", its towers are low and high");
    }

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
