//! Models that a server lists, and the first of them that takes a workload's items.

use std::collections::BTreeSet;
use triptych_core::Modality;

/// A model of a server's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedModel {
    /// The name that requests give.
    pub name: String,
    /// Kinds of items that it takes; `None`: the server does not say.
    pub modalities: Option<BTreeSet<Modality>>,
}

/// The chosen model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenModel {
    /// Its name.
    pub name: String,
    /// Reason for the choice, for the person who gave no name.
    pub why: String,
}

/// No model of a list can be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoModel {
    /// The list is empty.
    #[error("no model is listed")]
    Empty,
    /// None takes the items.
    #[error("no listed model takes {needs}; listed are {listed}")]
    NoneFits {
        /// Items of the workload.
        needs: String,
        /// Every model with the items that it takes.
        listed: String,
    },
}

impl ListedModel {
    /// `None`: unknown.
    fn takes(&self, needs: &BTreeSet<Modality>) -> Option<bool> {
        let modalities = self.modalities.as_ref()?;
        // Text alone is hardly meant for a model that takes nothing but audio.
        let is_deaf_to_text = needs.is_empty() && modalities.iter().eq([&Modality::Audio]);
        Some(needs.is_subset(modalities) && !is_deaf_to_text)
    }

    fn described(&self) -> String {
        let items = match &self.modalities {
            None => "which does not say what it takes".to_owned(),
            Some(modalities) => format!("which takes {}", words(modalities)),
        };
        format!("{}, {items}", self.name)
    }
}

/// Chooses the first model that takes the items, or else the first of which it is not known.
///
/// # Errors
/// [`NoModel`] with the list.
pub fn choose(listed: &[ListedModel], needs: &BTreeSet<Modality>) -> Result<ChosenModel, NoModel> {
    let first = |takes: Option<bool>| listed.iter().find(|model| model.takes(needs) == takes);
    let why = match (listed, first(Some(true)), first(None)) {
        ([], ..) => return Err(NoModel::Empty),
        ([only], ..) if only.takes(needs) != Some(false) => (only, "the only one that is listed".to_owned()),
        (all, Some(fits), _) => {
            (fits, format!("the first of {} listed that takes {}", all.len(), words(needs)))
        }
        (all, None, Some(unknown)) => {
            (unknown, format!("the first of {} listed; the server does not say what they take", all.len()))
        }
        (all, None, None) => {
            let listed = all.iter().map(ListedModel::described).collect::<Vec<_>>().join("; ");
            return Err(NoModel::NoneFits { needs: words(needs), listed });
        }
    };
    Ok(ChosenModel { name: why.0.name.clone(), why: why.1 })
}

/// Items in words.
fn words(modalities: &BTreeSet<Modality>) -> String {
    let word = |modality: &Modality| match modality {
        Modality::Image => "images",
        Modality::Audio => "audio",
        Modality::Text => "text for its encoder",
        Modality::Video => "videos",
    };
    let words: Vec<_> = modalities.iter().map(word).collect();
    if words.is_empty() { "text alone".to_owned() } else { words.join(" and ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, modalities: Option<&[Modality]>) -> ListedModel {
        ListedModel { name: name.into(), modalities: modalities.map(|m| m.iter().copied().collect()) }
    }

    #[test]
    fn the_first_model_that_takes_the_items_is_chosen_and_the_reason_said() {
        let ears = model("ears", Some(&[Modality::Audio]));
        let eyes = model("eyes", Some(&[Modality::Image]));
        let more = model("more-eyes", Some(&[Modality::Image]));
        let other = model("other", None);
        let check = |listed: &[&ListedModel], needs: &[Modality], name: &str, why: &str| {
            let listed: Vec<_> = listed.iter().map(|m| (*m).clone()).collect();
            let found = choose(&listed, &needs.iter().copied().collect()).expect("a model");
            assert!(found.name == name && found.why.contains(why), "{found:?}");
        };
        check(&[&ears, &eyes, &more], &[Modality::Image], "eyes", "the first of 3 listed that takes images");
        check(&[&eyes, &ears], &[Modality::Audio], "ears", "takes audio");
        check(&[&ears, &eyes], &[], "eyes", "text alone");
        check(&[&ears], &[Modality::Audio], "ears", "only one");
        check(&[&other, &eyes], &[Modality::Image], "eyes", "takes images");
        check(&[&other, &model("b", None)], &[Modality::Image], "other", "does not say");
    }

    #[test]
    fn where_none_fits_the_list_is_told() {
        let ears = model("ears", Some(&[Modality::Audio]));
        let both = [Modality::Audio, Modality::Image].into();
        let refused =
            choose(&[ears.clone(), model("eyes", Some(&[Modality::Image]))], &both).expect_err("none");
        let text = refused.to_string();
        for part in ["images and audio", "ears, which takes audio", "eyes, which takes images"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(matches!(choose(&[ears], &[].into()), Err(NoModel::NoneFits { .. })));
        assert_eq!(choose(&[], &[].into()), Err(NoModel::Empty));
    }
}
