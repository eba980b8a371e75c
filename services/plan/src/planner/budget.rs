//! The budget of a plan.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Cores, or workers of whatever size was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// Cores of all workers together.
    Cores(usize),
    /// Workers of both kinds together.
    Workers(usize),
}

/// Text that is no budget.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "{found:?} is no budget, allowed are a number of cores or of workers, as in 8cores or 6workers, up to 65536"
)]
pub struct NotABudget {
    found: String,
}

/// More than any cluster has.
const MOST: usize = 65_536;

impl FromStr for Budget {
    type Err = NotABudget;

    fn from_str(text: &str) -> Result<Self, NotABudget> {
        let wrong = || NotABudget { found: text.to_owned() };
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let n: usize = number.parse().ok().filter(|n| (1..=MOST).contains(n)).ok_or_else(wrong)?;
        match unit.trim() {
            "cores" | "core" => Ok(Self::Cores(n)),
            "workers" | "worker" => Ok(Self::Workers(n)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cores(n) => write!(f, "{n} cores"),
            Self::Workers(n) => write!(f, "{n} workers"),
        }
    }
}

impl Budget {
    /// Workers of so many threads.
    pub fn workers(self, threads: usize) -> usize {
        match self {
            Self::Cores(n) => n / threads.max(1),
            Self::Workers(n) => n,
        }
    }

    /// True if one worker of so many threads uses all of it.
    pub fn is_one(self, threads: usize) -> bool {
        self.workers(threads) == 1
    }

    /// So many times as much.
    pub fn times(self, n: usize) -> Self {
        match self {
            Self::Cores(cores) => Self::Cores(cores * n),
            Self::Workers(workers) => Self::Workers(workers * n),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_read_and_what_is_none_is_told_what_is_allowed() {
        assert_eq!("8cores".parse(), Ok(Budget::Cores(8)));
        assert_eq!("1 worker".parse(), Ok(Budget::Workers(1)));
        assert_eq!((Budget::Cores(9).workers(2), Budget::Workers(9).workers(2)), (4, 9));
        for bad in ["", "8", "0cores", "-1cores", "8gpus", "99999999999999999999cores", "cores"] {
            let error = bad.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains("8cores"), "{error}");
        }
    }
}
