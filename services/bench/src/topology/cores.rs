//! Cores, and how they are shared out.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Some cores of a machine, by number; written as in `0-3,8`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CoreList(Vec<usize>);

/// Cores of one worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreShare {
    /// The cores it runs on.
    pub cores: CoreList,
    /// The part of them that is its own, where it shares them with others: a CPU quota.
    pub quota: Option<f64>,
}

impl CoreShare {
    /// Cores it has the time of.
    pub fn n_cores(&self) -> f64 {
        self.cores.len() as f64 * self.quota.unwrap_or(1.0)
    }

    /// Compute threads that fit it.
    pub fn threads(&self) -> usize {
        // At most a few hundred.
        (self.n_cores().round() as usize).max(1)
    }
}

impl fmt::Display for CoreShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.quota {
            None => write!(f, "{}", self.cores),
            Some(quota) => write!(f, "{:.0} % of {}", quota * 100.0, self.cores),
        }
    }
}

/// The cores cannot be divided among the workers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoShare {
    /// Whole cores are too few.
    #[error(
        "{n_workers} workers do not fit {n_cores} cores: parts of a core take a CPU quota, and no cgroup with a cpu controller may be written here; name fewer workers, or more cores with --cores"
    )]
    TooFew {
        /// Workers.
        n_workers: usize,
        /// Available cores.
        n_cores: usize,
    },
}

impl CoreList {
    /// A list of cores.
    ///
    /// # Errors
    /// [`NotCores`] if there are none.
    pub fn new(cores: impl IntoIterator<Item = usize>) -> Result<Self, NotCores> {
        let cores: BTreeSet<_> = cores.into_iter().collect();
        if cores.is_empty() { Err(NotCores(String::new())) } else { Ok(Self(cores.into_iter().collect())) }
    }

    /// Number of cores.
    #[allow(clippy::len_without_is_empty, reason = "there is at least one")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Their numbers.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// Shares them out among `n_workers`: whole cores, of which the last workers get one more if it does not come out
    /// even, so that decoders have what is left over. With more workers than cores each gets the same part of all.
    ///
    /// # Errors
    /// [`NoShare`] if there are more workers than cores and cores are not `divisible`.
    pub fn share(&self, n_workers: usize, divisible: bool) -> Result<Vec<CoreShare>, NoShare> {
        let n_cores = self.len();
        if n_workers > n_cores {
            if !divisible {
                return Err(NoShare::TooFew { n_workers, n_cores });
            }
            let quota = Some(1.0 / n_workers as f64);
            return Ok(vec![CoreShare { cores: self.clone(), quota }; n_workers]);
        }
        let n_workers = n_workers.max(1);
        let each = n_cores / n_workers;
        let n_more = n_cores % n_workers;
        let mut left = self.0.iter().copied();
        let share = |i: usize| {
            let n = each + usize::from(i + n_more >= n_workers);
            CoreShare { cores: Self(left.by_ref().take(n).collect()), quota: None }
        };
        Ok((0..n_workers).map(share).collect())
    }
}

impl fmt::Display for CoreList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        let mut comma = "";
        while let [first, ..] = rest {
            let run = rest.iter().zip(*first..).take_while(|(core, expect)| *core == expect).count();
            let (now, later) = rest.split_at(run);
            match now {
                [.., last] if run > 1 => write!(f, "{comma}{first}-{last}")?,
                _ => write!(f, "{comma}{first}")?,
            }
            (comma, rest) = (",", later);
        }
        Ok(())
    }
}

/// Text that names no cores.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no cores, as 0-3 or 0,2,4 do")]
pub struct NotCores(String);

impl FromStr for CoreList {
    type Err = NotCores;

    fn from_str(text: &str) -> Result<Self, NotCores> {
        /// Most cores that Linux supports.
        const MOST: usize = 8192;
        let mut cores = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.trim().parse::<usize>(), last.trim().parse::<usize>()) {
                (Ok(first), Ok(last)) if first <= last && last < MOST => cores.extend(first..=last),
                _ => return Err(NotCores(text.to_owned())),
            }
        }
        Self::new(cores).map_err(|_| NotCores(text.to_owned()))
    }
}

impl TryFrom<String> for CoreList {
    type Error = NotCores;

    fn try_from(text: String) -> Result<Self, NotCores> {
        text.parse()
    }
}

impl From<CoreList> for String {
    fn from(cores: CoreList) -> Self {
        cores.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_written_as_runs() {
        for (text, expect) in
            [("0", "0"), ("0-1", "0-1"), ("3,0,1,2,8", "0-3,8"), ("1, 3", "1,3"), ("2-2", "2")]
        {
            assert_eq!(text.parse::<CoreList>().unwrap().to_string(), expect);
        }
        for text in ["", "a", "3-1", "-", "0-99999", "1,,2"] {
            assert!(text.parse::<CoreList>().is_err(), "{text}");
        }
    }

    #[test]
    fn whole_cores_first_and_parts_only_where_they_can_be_had() {
        let cores: CoreList = "0-4".parse().unwrap();
        let shown = |n| cores.share(n, true).unwrap().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown(1), ["0-4"]);
        assert_eq!(shown(2), ["0-1", "2-4"]);
        assert_eq!(shown(5), ["0", "1", "2", "3", "4"]);
        assert_eq!(shown(10), ["10 % of 0-4"; 10]);
        let error = cores.share(6, false).unwrap_err();
        assert_eq!(error, NoShare::TooFew { n_workers: 6, n_cores: 5 });
        assert_eq!(cores.share(10, true).unwrap()[0].threads(), 1);
        assert_eq!(cores.share(2, true).unwrap()[1].threads(), 3);
    }
}
