//! The catalog: the workers' descriptions of themselves, the models that they serve together, and their disagreements.
//!
//! Pure data and functions. A model is ready when a PD worker and, for each modality, an encoder with the *same*
//! fingerprint are ready: rows of another encoder would be read without complaint and answered wrongly.

use super::foreign::Foreign;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use triptych_core::prompt::ChatFormat;
use triptych_core::{
    AdapterId, EncoderId, Failure, FailureClass, Fingerprint, Modality, ModelName, Tower, TowerIdx, WorkerId,
};
use triptych_proto::convert::{self, WireError};
use triptych_proto::v1;
use triptych_runtime::discovery::Role;

/// The encoders that a model is served with: of towers that read the same item each.
pub type Edition = BTreeMap<EncoderId, Fingerprint>;

/// True if a worker takes work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It answered when it was last asked.
    Ready,
    /// It was ejected, and takes one piece of work to show what it can do.
    Probing,
    /// It answers, and fails so often that it is left alone for a while.
    Ejected,
    /// It ends what it has and takes nothing new.
    Draining,
    /// It did not answer, or never has.
    Down,
}

impl Health {
    /// Every state.
    pub const ALL: [Self; 5] = [Self::Ready, Self::Probing, Self::Ejected, Self::Draining, Self::Down];

    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Probing => "probing",
            Self::Ejected => "ejected",
            Self::Draining => "draining",
            Self::Down => "down",
        }
    }

    /// True if it may be given work.
    pub const fn takes_work(self) -> bool {
        matches!(self, Self::Ready | Self::Probing)
    }
}

/// A model as one worker serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The name clients use.
    pub name: ModelName,
    /// Hugging Face's `model_type`.
    pub family: String,
    /// Its encoders, of a PD worker those that it is paired with (`pairing.rs`).
    pub edition: Edition,
    /// Names of its towers, where several read the same item.
    pub tower_names: BTreeMap<EncoderId, String>,
    /// Encoders that the worker announces.
    pub own: Edition,
    /// Their towers, of families whose outputs are taken from vLLM too.
    pub towers: BTreeMap<Modality, Tower>,
    /// The kinds of items whose encoder reads text together with the item.
    pub prompted: BTreeSet<Modality>,
    /// Tokens the context holds; 0 where the worker does not say.
    pub max_context: u32,
    /// Most items of a request; `None` where the worker does not say.
    pub max_items: Option<u32>,
    /// Time of loading, in seconds since 1970.
    pub created_s: u64,
    /// True if the model's own logits processors read the encoder's text.
    pub reads_encoder_prompt: bool,
    /// Format of its conversations; `None`: it has no chat template.
    pub chat: Option<ChatFormat>,
    /// Its base model, and its identity, if it is a LoRA adapter.
    pub adapter: Option<(ModelName, AdapterId)>,
    /// True of an adapter of the encoder too: encoder workers announce it.
    pub adapts_encoder: bool,
    /// Encoders of a worker of another engine; `None`: it is one of ours.
    pub foreign: Option<Foreign>,
    /// True if another worker can go on with an answer that one began.
    pub is_resumable: bool,
}

impl Served {
    /// The model that encoders are asked for: its own name, or its base model's. The fingerprint tells encoders of adapters apart.
    pub fn encoder_model(&self) -> &ModelName {
        self.adapter.as_ref().map_or(&self.name, |(base, _)| base)
    }

    /// The kinds of items that it reads.
    pub fn modalities(&self) -> impl Iterator<Item = &Modality> {
        let firsts = self.edition.keys().filter(|id| id.tower == TowerIdx::default());
        firsts.map(|id| &id.modality)
    }

    /// True if it reads items of a kind.
    pub fn reads_kind(&self, modality: Modality) -> bool {
        self.modalities().any(|known| *known == modality)
    }

    /// The name under which encoder workers announce its encoders: of an adapter that has some, its own.
    fn encoders_name(&self) -> &ModelName {
        if self.adapts_encoder { &self.name } else { self.encoder_model() }
    }

    /// True if its worker reads the outputs of these encoders. Those that it is paired with come and go; what it was asked for
    /// before, it still reads.
    fn reads(&self, edition: &Edition) -> bool {
        let of_vllm = |modality: Modality, fingerprint: &Fingerprint| {
            self.towers.get(&modality).is_some_and(|tower| tower.is_of_vllm(modality, fingerprint))
        };
        let reads = |(id, fingerprint): (&EncoderId, &Fingerprint)| {
            self.own.get(id) == Some(fingerprint) || of_vllm(id.modality, fingerprint)
        };
        self.edition == *edition
            || self.own == *edition && self.foreign.is_some()
            || self.foreign.is_none() && !self.towers.is_empty() && edition.iter().all(reads)
    }

    /// The PD workers that serve the same.
    pub fn decoder(&self) -> Want {
        let adapter = self.adapter.as_ref().map(|(_, id)| *id);
        Want::Pd {
            model: self.name.clone(),
            edition: self.edition.clone(),
            adapter,
            is_foreign: self.foreign.is_some(),
        }
    }
}

impl TryFrom<v1::WorkerModel> for Served {
    type Error = WireError;

    fn try_from(m: v1::WorkerModel) -> Result<Self, WireError> {
        let encoder = |e: &v1::worker_model::Encoder| {
            let id = convert::encoder_id(e.modality, e.tower_index)?;
            Ok((id, convert::fingerprint(&e.fingerprint, "fingerprint")?))
        };
        let named = m.encoders.iter().filter(|e| !e.tower_name.is_empty());
        let named =
            named.map(|e| Ok((convert::encoder_id(e.modality, e.tower_index)?, e.tower_name.clone())));
        let tower_names = named.collect::<Result<_, WireError>>()?;
        let prompted = m.encoders.iter().filter(|e| e.takes_prompt);
        let edition = m.encoders.iter().map(encoder).collect::<Result<Edition, WireError>>()?;
        let foreign = m.foreign_encoders.map(Foreign::read).transpose()?;
        let towers = m.encoders.iter().filter_map(|e| Some((e.modality, e.tower.as_ref()?)));
        let towers = towers.map(|(m, tower)| Ok((convert::modality(m)?, convert::tower(tower)?)));
        Ok(Self {
            towers: towers.collect::<Result<_, WireError>>()?,
            own: edition.clone(),
            prompted: prompted.map(|e| convert::modality(e.modality)).collect::<Result<_, WireError>>()?,
            name: ModelName::new(m.name),
            family: m.family,
            edition,
            tower_names,
            foreign,
            is_resumable: !m.not_resumable,
            max_context: m.max_context,
            max_items: Some(m.max_items).filter(|n| *n > 0),
            created_s: m.created_s,
            reads_encoder_prompt: m.reads_encoder_prompt,
            chat: m.chat.map(Into::into),
            adapts_encoder: m.adapts_encoder,
            adapter: match m.parent.is_empty() {
                true => None,
                false => Some((ModelName::new(m.parent), convert::adapter(&m.adapter, "adapter")?)),
            },
        })
    }
}

/// A worker as the proxy knows it. What it serves is remembered while it is down: it may come back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its name.
    pub id: WorkerId,
    /// Its role.
    pub role: Role,
    /// It is a PD worker that holds the encoders too.
    pub encodes: bool,
    /// Its health.
    pub health: Health,
    /// Name of its process; empty: it has none, or none is known.
    pub instance: Bytes,
    /// Its models.
    pub models: Vec<Served>,
}

/// An encoder and a PD worker that serve one model with different encoders.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Disagreement {
    /// The model.
    pub model: ModelName,
    /// The kind of item.
    pub modality: Modality,
    /// The encoder worker and the fingerprint it announces.
    pub encoder: (WorkerId, Fingerprint),
    /// The PD worker and the fingerprint it announces.
    pub pd: (WorkerId, Fingerprint),
    /// Parts in which their towers differ, where both announce them.
    pub differences: Vec<&'static str>,
}

/// The model that answers a request, and what must agree with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// As the PD worker announces it.
    pub served: Served,
}

impl Route {
    /// The encoder of a modality; of several towers the first.
    pub fn fingerprint(&self, modality: Modality) -> Option<Fingerprint> {
        self.served.edition.get(&modality.into()).copied()
    }

    /// The towers that read items of a modality, in their order; one, where there are no others.
    pub fn towers(&self, modality: Modality) -> impl Iterator<Item = (TowerIdx, Fingerprint)> {
        let all = self.served.edition.range(EncoderId::all_of(modality));
        all.map(|(id, fingerprint)| (id.tower, *fingerprint))
    }

    /// Name of a tower; empty: there are no others.
    pub fn tower_name(&self, encoder: EncoderId) -> &str {
        self.served.tower_names.get(&encoder).map_or("", String::as_str)
    }
}

/// A worker that can do a piece of work.
#[derive(Clone, Debug)]
pub enum Want {
    /// An encoder of this model with this fingerprint.
    Encoder {
        /// The model.
        model: ModelName,
        /// The encoder.
        encoder: EncoderId,
        /// The fingerprint the key was made with.
        fingerprint: Fingerprint,
    },
    /// A PD worker that serves the model with these encoders.
    Pd {
        /// The model.
        model: ModelName,
        /// Its encoders.
        edition: Edition,
        /// Its identity, if it is an adapter.
        adapter: Option<AdapterId>,
        /// True for workers of another engine: theirs are other requests.
        is_foreign: bool,
    },
}

/// All workers, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Catalog {
    /// In the order of their names.
    pub workers: Vec<Known>,
}

impl Known {
    /// True if items may be encoded here: by an encoder worker, or by a PD worker that holds the encoders.
    pub fn is_encoder(&self) -> bool {
        self.role == Role::Encoder || self.encodes
    }

    /// True if it serves what the work needs, well or not.
    pub fn serves(&self, want: &Want) -> bool {
        self.models.iter().any(|served| match want {
            Want::Encoder { model, encoder, fingerprint } => {
                self.is_encoder()
                    && served.encoder_model() == model
                    && served.own.get(encoder) == Some(fingerprint)
            }
            Want::Pd { model, edition, adapter, is_foreign } => {
                self.role == Role::Pd
                    && served.name == *model
                    && served.reads(edition)
                    && served.foreign.is_some() == *is_foreign
                    && served.adapter.as_ref().map(|(_, id)| id) == adapter.as_ref()
            }
        })
    }

    /// True if it can do the work now.
    pub fn can_do(&self, want: &Want) -> bool {
        self.health.takes_work() && self.serves(want)
    }
}

impl Catalog {
    fn pds(&self) -> impl Iterator<Item = (&Known, &Served)> {
        let workers = self.workers.iter().filter(|w| w.role == Role::Pd);
        workers.flat_map(|w| w.models.iter().map(move |m| (w, m)))
    }

    /// Encoder workers, and PD workers that hold the encoders.
    fn encoders(&self) -> impl Iterator<Item = (&Known, &Served)> {
        let workers = self.workers.iter().filter(|w| w.is_encoder());
        workers.flat_map(|w| w.models.iter().map(move |m| (w, m)))
    }

    /// The models that PD workers serve, each once, by name.
    pub fn models(&self) -> BTreeMap<&ModelName, &Served> {
        self.pds().map(|(_, m)| (&m.name, m)).collect()
    }

    /// True if every model that any worker serves can be used with every kind of item it reads. Adapters do not count: they come
    /// and go, worker by worker.
    pub fn is_ready(&self) -> bool {
        let models = self.workers.iter().flat_map(|w| &w.models).filter(|m| m.adapter.is_none());
        let names: BTreeSet<_> = models.map(|m| &m.name).collect();
        !names.is_empty() && names.into_iter().all(|name| self.is_model_ready(name))
    }

    fn is_model_ready(&self, name: &ModelName) -> bool {
        self.pds().any(|(pd, served)| {
            served.name == *name
                && pd.health.takes_work()
                && self.fit(served, served.modalities()) == Fit::Ready
        })
    }

    /// Encoder and PD pairs that must not work together.
    pub fn disagreements(&self) -> BTreeSet<Disagreement> {
        let mut found = BTreeSet::new();
        for (pd, needs) in self.pds() {
            let ours = self.encoders().filter(|(_, has)| has.foreign.is_none());
            for (encoder, has) in ours.filter(|(_, has)| has.name == *needs.encoders_name()) {
                for (id, wanted) in &needs.edition {
                    let other = has.own.get(id).filter(|f| *f != wanted);
                    // Of two encoders with one tower, the one that is paired is asked.
                    let towers = (has.towers.get(&id.modality), needs.towers.get(&id.modality));
                    let Some(other) = other.filter(|_| towers.0.is_none() || towers.0 != towers.1) else {
                        continue;
                    };
                    found.insert(Disagreement {
                        model: needs.name.clone(),
                        modality: id.modality,
                        encoder: (encoder.id.clone(), *other),
                        pd: (pd.id.clone(), *wanted),
                        differences: match towers {
                            (Some(has), Some(needs)) => has.differences(needs),
                            _ => Vec::new(),
                        },
                    });
                }
            }
        }
        found
    }

    /// Chooses the model for a request with items of these kinds.
    ///
    /// # Errors
    /// NotFound that lists what is served; InvalidArgument if no model, or more than one, fits, or if the one that
    /// is asked for does not read such items; Mismatch and Unavailable if its workers do not agree, or are not there.
    pub fn choose(&self, asked: Option<&ModelName>, needs: &BTreeSet<Modality>) -> Result<Route, Failure> {
        let name = match asked {
            Some(name) => &self.unaliased(name),
            None => self.only_fitting(needs)?,
        };
        let editions: Vec<_> = self.pds().filter(|(_, m)| m.name == *name).collect();
        if editions.is_empty() {
            return Err(self.not_served(name));
        }
        if !editions.iter().any(|(_, m)| reads_all(m, needs)) {
            return Err(does_not_read(editions[0].1, needs));
        }
        let editions = editions.into_iter().filter(|(_, m)| reads_all(m, needs));
        let rank = |(pd, m): &(&Known, &Served)| (self.fit(m, needs), pd.health.takes_work());
        match editions.max_by_key(rank) {
            Some((_, served)) if self.fit(served, needs) == Fit::Disagrees => Err(self.disagreement(served)),
            Some((_, served)) => Ok(Route { served: served.clone() }),
            None => Err(self.not_served(name)),
        }
    }

    /// The name of an adapter that is named with its base model, `BASE:ADAPTER`; any other name as it is.
    fn unaliased(&self, name: &ModelName) -> ModelName {
        let is_served = self.pds().any(|(_, m)| m.name == *name);
        let is_it = |m: &Served| {
            let base = m.adapter.as_ref().map(|(base, _)| base.as_str());
            base.is_some_and(|base| {
                let rest = name.as_str().strip_prefix(base).and_then(|rest| rest.strip_prefix(':'));
                rest == Some(m.name.as_str())
            })
        };
        let found = self.pds().find(|(_, m)| !is_served && is_it(m));
        found.map_or_else(|| name.clone(), |(_, m)| m.name.clone())
    }

    /// Fit of the encoder pool to the needs of a PD worker.
    fn fit<'a>(&self, served: &Served, needs: impl IntoIterator<Item = &'a Modality>) -> Fit {
        let fit_of = |(id, wanted): (&EncoderId, &Fingerprint)| {
            let announced = self.encoders().filter(|(_, m)| m.name == *served.encoders_name());
            let announced = announced.filter_map(|(w, m)| Some((w.health, m.own.get(id)?)));
            let (mut best, mut others) = (Fit::Absent, false);
            for (health, fingerprint) in announced {
                match (fingerprint == wanted, health.takes_work()) {
                    (true, true) => best = Fit::Ready,
                    (true, false) => best = best.max(Fit::Down),
                    (false, _) => others = true,
                }
            }
            if best == Fit::Absent && others { Fit::Disagrees } else { best }
        };
        // A kind that it does not read is no fit; each tower of one that it reads must be there.
        let fit_of_kind = |modality: &Modality| {
            let towers = served.edition.range(EncoderId::all_of(*modality));
            towers.map(fit_of).min().unwrap_or(Fit::Absent)
        };
        needs.into_iter().map(fit_of_kind).min().unwrap_or(Fit::Ready)
    }

    fn only_fitting(&self, needs: &BTreeSet<Modality>) -> Result<&ModelName, Failure> {
        let models = self.models();
        if models.is_empty() {
            return Err(not_ready("no model is ready yet"));
        }
        let fits = |m: &&&Served| m.adapter.is_none() && reads_all(m, needs);
        let mut fitting: Vec<_> = models.values().filter(fits).collect();
        // A question without audio is hardly meant for a model that reads nothing but audio.
        if fitting.len() > 1 && !needs.contains(&Modality::Audio) {
            fitting.retain(|m| !m.modalities().eq([&Modality::Audio]));
        }
        match fitting[..] {
            [model] => Ok(&model.name),
            [] => Err(Failure::invalid(format!(
                "no model reads {}; served are {}",
                words(needs.iter()),
                self.list_models()
            ))
            .with_param("model")),
            _ => Err(Failure::invalid(format!(
                "more than one model fits, so `model` must name one of {}",
                self.list_models()
            ))
            .with_param("model")),
        }
    }

    fn not_served(&self, name: &ModelName) -> Failure {
        if self.encoders().any(|(_, m)| m.name == *name) {
            return not_ready(&format!("model {name:?} is not ready: none of its decoder workers is"));
        }
        let served = match self.models().is_empty() {
            true => return not_ready("no model is ready yet"),
            false => self.list_models(),
        };
        Failure::new(FailureClass::NotFound, format!("model {name:?} is not served; served are {served}"))
            .with_param("model")
    }

    /// Names both fingerprints to the client, who may be its operator; which workers have them only to the log.
    fn disagreement(&self, served: &Served) -> Failure {
        let details: Vec<_> = self.disagreements().into_iter().filter(|d| d.model == served.name).collect();
        let shown = details.first().map_or_else(String::new, |d| {
            let differ = match d.differences.is_empty() {
                true => String::new(),
                false => format!("; they differ in {}", d.differences.join(" and ")),
            };
            format!(
                ": for {}, encoders have {} and decoders expect {}{differ}",
                d.modality, d.encoder.1, d.pd.1
            )
        });
        Failure::new(
            FailureClass::Mismatch,
            format!(
                "model {:?} is not ready: its encoder and decoder workers do not agree{shown}",
                served.name
            ),
        )
        .with_detail(format!("{details:?}"))
    }

    fn list_models(&self) -> String {
        let models = self.models();
        let names: Vec<_> = models
            .values()
            .map(|m| match m.edition.is_empty() {
                true => format!("{:?} (reads text)", m.name),
                false => format!("{:?} (reads {})", m.name, words(m.modalities())),
            })
            .collect();
        names.join(", ")
    }
}

/// From worst to best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// Encoders announce other fingerprints, and none the right one.
    Disagrees,
    /// No encoder announces the model.
    Absent,
    /// One does, and is down.
    Down,
    /// One does, and is ready.
    Ready,
}

fn reads_all(model: &Served, needs: &BTreeSet<Modality>) -> bool {
    needs.iter().all(|m| model.reads_kind(*m))
}

fn does_not_read(model: &Served, needs: &BTreeSet<Modality>) -> Failure {
    let reads = match model.edition.is_empty() {
        true => "text only".to_owned(),
        false => words(model.modalities()),
    };
    let alien = words(needs.iter().filter(|m| !model.reads_kind(**m)));
    Failure::invalid(format!("model {:?} reads {reads}, the request has {alien}", model.name))
        .with_param("model")
}

fn not_ready(message: &str) -> Failure {
    Failure::unavailable(message)
}

fn words<'a>(modalities: impl Iterator<Item = &'a Modality>) -> String {
    modalities.map(|m| m.as_str()).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests;
