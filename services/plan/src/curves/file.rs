//! Reading a file of curves: whatever it holds, the simulator then finds numbers that mean something.

use super::{CostCurves, OLDEST_VERSION, VERSION};
use thiserror::Error;

/// A text without usable curves.
#[derive(Debug, Error)]
pub enum CurvesError {
    /// Not JSON, or JSON of another file.
    #[error("not a file of cost curves: {0}")]
    Format(#[from] serde_json::Error),
    /// Another version.
    #[error(
        "version {found} of the file, this program reads {OLDEST_VERSION} to {VERSION}; measure again with `triptych profile`"
    )]
    Version {
        /// Version of the file.
        found: u64,
    },
    /// Impossible values.
    #[error("{}", mistakes.join("; "))]
    Wrong {
        /// Every mistake.
        mistakes: Vec<String>,
    },
}

impl CostCurves {
    /// Reads a file's text.
    ///
    /// # Errors
    /// [`CurvesError`] names what is wrong with it.
    pub fn read(text: &str) -> Result<Self, CurvesError> {
        // Another version may have other fields, so it is read first.
        let value: serde_json::Value = serde_json::from_str(text)?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(found) if !(u64::from(OLDEST_VERSION)..=u64::from(VERSION)).contains(&found) => {
                return Err(CurvesError::Version { found });
            }
            _ => {}
        }
        let curves: Self = serde_json::from_value(value)?;
        curves.check()?;
        Ok(curves)
    }

    /// Checks the curves.
    ///
    /// # Errors
    /// [`CurvesError`] with everything that cannot be.
    pub fn check(&self) -> Result<(), CurvesError> {
        match self.mistakes() {
            mistakes if mistakes.is_empty() => Ok(()),
            mistakes => Err(CurvesError::Wrong { mistakes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{curves, two_towers};
    use super::super::{Interference, StageInterference};
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
    fn a_file_of_the_version_before_is_read_without_times_beside_neighbours() {
        let mut value = serde_json::to_value(curves()).unwrap();
        value["version"] = 4.into();
        let fields = value.as_object_mut().unwrap();
        fields.remove("interference");
        fields.remove("between_steps_us");
        fields["frontend"].as_object_mut().unwrap().remove("misplaced");
        let read = CostCurves::read(&value.to_string()).unwrap();
        assert_eq!((read.version, read.interference, read.between_steps_us), (4, None, 0.0));
        assert_eq!(read.front.misplaced, 0.0);
    }

    #[test]
    fn towers_are_read_back_and_their_mistakes_are_named() {
        let text = serde_json::to_string(&two_towers()).unwrap();
        assert_eq!(CostCurves::read(&text).unwrap(), two_towers());
        // A file of the version before has one encoder.
        let mut value = serde_json::to_value(curves()).unwrap();
        value["version"] = 5.into();
        let read = CostCurves::read(&value.to_string()).unwrap();
        assert_eq!((read.version, read.n_towers(), read.tower.as_str()), (5, 1, ""));
        let wrong = |change: fn(&mut CostCurves)| {
            let mut curves = two_towers();
            change(&mut curves);
            CostCurves::read(&serde_json::to_string(&curves).unwrap()).unwrap_err().to_string()
        };
        type Change = fn(&mut CostCurves);
        let cases: [(Change, &str); 5] = [
            (|c| c.more_towers[0].name.clear(), "more_towers[0].name is \"\""),
            (|c| c.tower = "high".into(), "more_towers[0].name is \"high\", towers need names of their own"),
            (|c| c.more_towers[0].row_bytes = 0, "more_towers[0].row_bytes is 0"),
            (|c| c.more_towers[0].encode[0].items = 0, "more_towers[0].encode[0] has 0 items"),
            (
                |c| c.more_towers = vec![c.more_towers[0].clone(); 8],
                "more_towers has 8, allowed is at most 7",
            ),
        ];
        for (change, part) in cases {
            let text = wrong(change);
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    }

    #[test]
    fn what_cannot_be_planned_by_is_named() {
        let wrong = |c: &mut CostCurves| {
            let times = StageInterference { traffic: 2.0, ..StageInterference::of_alone(1.0) };
            c.interference = Some(Interference { encode: Some(times), ..Interference::default() });
        };
        let cases: [(String, &str); 11] = [
            (refused(wrong), "interference.encode: traffic is 2"),
            (refused(|c| c.front.misplaced = -1.0), "frontend.misplaced is -1"),
            (refused(|c| c.encode.clear()), "items and encode: one has points and the other none"),
            (refused(|c| c.step.clear()), "step has no point"),
            (refused(|c| c.version = VERSION + 1), &format!("version {}", VERSION + 1)),
            (refused(|c| c.load[0].p95_us = -1.0), "load[0]: p95_us is -1"),
            (refused(|c| c.publish.reverse()), "publish[1]: of is"),
            (refused(|c| c.threads = 0), "threads is 0"),
            (refused(|c| c.colocated.step = 0.5), "colocated.step is 0.5"),
            (refused(|c| c.items[0].tokens = 0), "items[0]: size"),
            (refused(|c| c.encode[0].items = 0), "encode[0] has 0 items"),
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
