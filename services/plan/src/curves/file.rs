//! Reading a file of curves: whatever it holds, the simulator then finds numbers that mean something.

use super::{CostCurves, VERSION};
use thiserror::Error;

/// Why a text holds no curves to plan by.
#[derive(Debug, Error)]
pub enum CurvesError {
    /// Not JSON, or not this file's.
    #[error("not a file of cost curves: {0}")]
    Format(#[from] serde_json::Error),
    /// Of another version.
    #[error(
        "version {found} of the file, this program reads {VERSION}; measure again with `triptych profile`"
    )]
    Version {
        /// As it says.
        found: u64,
    },
    /// A curve with too few places.
    #[error("`{curve}` has {found} places, {needed} are needed")]
    Few {
        /// Its name.
        curve: &'static str,
        /// Places it has.
        found: usize,
        /// Places it must have.
        needed: usize,
    },
    /// A number that cannot be.
    #[error("`{curve}` has {found}, allowed are {allowed}")]
    Number {
        /// Where.
        curve: &'static str,
        /// As it says.
        found: String,
        /// What would do.
        allowed: &'static str,
    },
}

impl CostCurves {
    /// Reads a file's text.
    ///
    /// # Errors
    /// [`CurvesError`] names what is wrong with it.
    pub fn read(text: &str) -> Result<Self, CurvesError> {
        let value: serde_json::Value = serde_json::from_str(text)?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(found) if found != u64::from(VERSION) => return Err(CurvesError::Version { found }),
            _ => {}
        }
        let curves: Self = serde_json::from_value(value)?;
        curves.check()?;
        Ok(curves)
    }

    /// Whether it can be planned by.
    ///
    /// # Errors
    /// [`CurvesError`] for the first thing that cannot be.
    pub fn check(&self) -> Result<(), CurvesError> {
        let few = |curve, found: usize, needed: usize| match found < needed {
            true => Err(CurvesError::Few { curve, found, needed }),
            false => Ok(()),
        };
        few("encode", self.encode.len(), 1)?;
        few("preprocess", self.preprocess.len(), 1)?;
        few("items", self.items.len(), 1)?;
        few("step", self.step.len(), 2)?;
        few("publish", self.publish.len(), 1)?;
        few("load", self.load.len(), 1)?;
        spreads("encode", self.encode.iter().map(|p| (p.p50_us, p.p95_us)))?;
        spreads("step", self.step.iter().map(|p| (p.p50_us, p.p95_us)))?;
        for (curve, points) in
            [("preprocess", &self.preprocess), ("publish", &self.publish), ("load", &self.load)]
        {
            spreads(curve, points.iter().map(|p| (p.p50_us, p.p95_us)))?;
            points.iter().try_for_each(|p| time(curve, p.of))?;
            ascending(curve, points.iter().map(|p| p.of))?;
        }
        self.items.iter().try_for_each(|p| time("items", p.size))?;
        ascending("items", self.items.iter().map(|p| p.size))?;
        let proxy = self.proxy;
        for us in [proxy.request_us, proxy.item_us, proxy.item_byte_us, proxy.token_us] {
            time("proxy", us)?;
        }
        self.check_sizes()
    }

    fn check_sizes(&self) -> Result<(), CurvesError> {
        let number = |curve, found: String, allowed| Err(CurvesError::Number { curve, found, allowed });
        for (curve, n) in [
            ("threads", self.threads),
            ("row_bytes", self.row_bytes),
            ("kv.token_bytes", self.kv.token_bytes),
        ] {
            if n == 0 {
                return number(curve, "0".into(), "1 and more");
            }
        }
        for ratio in [self.together.encode, self.together.step] {
            if !(ratio.is_finite() && ratio >= 1.0) {
                return number("together", ratio.to_string(), "1.0 and more");
            }
        }
        if let Some(empty) = self.encode.iter().find(|p| p.items == 0 || p.tokens == 0) {
            return number("encode", format!("{empty:?}"), "one item and one token and more");
        }
        match self.items.iter().find(|p| p.tokens == 0) {
            Some(empty) => number("items", format!("{empty:?}"), "one token and more"),
            None => Ok(()),
        }
    }
}

fn time(curve: &'static str, us: f64) -> Result<(), CurvesError> {
    if us.is_finite() && us >= 0.0 {
        return Ok(());
    }
    Err(CurvesError::Number { curve, found: us.to_string(), allowed: "finite numbers from 0 on" })
}

fn spreads(curve: &'static str, mut all: impl Iterator<Item = (f64, f64)>) -> Result<(), CurvesError> {
    all.try_for_each(|(p50, p95)| {
        time(curve, p50)?;
        time(curve, p95)
    })
}

fn ascending(curve: &'static str, mut of: impl Iterator<Item = f64>) -> Result<(), CurvesError> {
    let mut last = f64::NEG_INFINITY;
    of.try_for_each(|next| {
        if next <= last {
            let found = format!("{next} after {last}");
            return Err(CurvesError::Number { curve, found, allowed: "places in ascending order" });
        }
        last = next;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::super::sample::curves;
    use super::*;
    use proptest::prelude::*;

    fn refused(change: impl FnOnce(&mut CostCurves)) -> String {
        let mut curves = curves();
        change(&mut curves);
        let text = serde_json::to_string(&curves).unwrap();
        CostCurves::read(&text).unwrap_err().to_string()
    }

    #[test]
    fn what_was_written_reads_back() {
        let text = serde_json::to_string(&curves()).unwrap();
        assert_eq!(CostCurves::read(&text).unwrap(), curves());
    }

    #[test]
    fn what_cannot_be_planned_by_is_named() {
        let cases: [(String, &str); 9] = [
            (refused(|c| c.encode.clear()), "`encode` has 0 places"),
            (refused(|c| c.step.truncate(1)), "`step` has 1 places, 2"),
            (refused(|c| c.version = 9), "version 9"),
            (refused(|c| c.load[0].p95_us = -1.0), "`load` has -1"),
            (refused(|c| c.publish.reverse()), "`publish` has"),
            (refused(|c| c.threads = 0), "`threads` has 0"),
            (refused(|c| c.together.step = 0.5), "`together` has 0.5"),
            (refused(|c| c.items[0].tokens = 0), "`items` has"),
            (refused(|c| c.encode[0].items = 0), "`encode` has"),
        ];
        for (text, part) in cases {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(CostCurves::read("{}").unwrap_err().to_string().contains("version"));
        assert!(CostCurves::read("x").unwrap_err().to_string().contains("not a file of cost curves"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = CostCurves::read(&text);
        }
    }
}
