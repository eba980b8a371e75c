//! The towers that a worker holds, of models in which several towers read the same item.
//!
//! Each tower has weights, an output and jobs of its own, so that workers can divide them. Models with one encoder are not
//! concerned.

use std::collections::BTreeSet;
use triptych_core::TowerIdx;
use triptych_models::{Model, ModelError};

/// Names of the towers to hold; `None`: all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TowerChoice(pub Option<BTreeSet<String>>);

impl TowerChoice {
    /// The towers of a model that are held, with their names.
    ///
    /// # Errors
    /// [`ModelError::Checkpoint`] for a name that the model has not, where it has several towers.
    pub fn of(&self, model: &Model) -> Result<Vec<(TowerIdx, &'static str)>, ModelError> {
        let all: Vec<_> = model.towers().collect();
        let Some(chosen) = self.0.as_ref().filter(|_| all.len() > 1) else { return Ok(all) };
        let known: Vec<_> = all.iter().map(|(_, name)| *name).collect();
        if let Some(unknown) = chosen.iter().find(|name| !known.contains(&name.as_str())) {
            return Err(ModelError::Checkpoint {
                path: model.source().dir.clone(),
                found: format!("has the towers {}, not {unknown:?}", known.join(" and ")),
                cure: "name some of them in --towers, or leave it out for all".into(),
            });
        }
        Ok(all.into_iter().filter(|(_, name)| chosen.contains(*name)).collect())
    }
}
