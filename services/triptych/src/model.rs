//! Models of `--model`, as directories that can be served.
//!
//! A directory is taken as it is, a hub id is fetched once, and the sample models in this binary are unpacked: one by
//! `sample:NAME`, all of them if a cluster is started without `--model`. Every directory is opened here, its weights
//! looked for but not read, so that a wrong one is an error before a worker starts.

mod hub;
mod location;
mod samples;

use crate::args::{ComputeArgs, ModelArgs, NO_MODEL};
use crate::error::{CliError, chain};
use location::{ModelLocation, cache_root};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use tokio::task::spawn_blocking;
use triptych_core::{Modality, ModelName};
use triptych_models::{LoadFormat, Model, ModelError, ModelSource, PackedFolder};

/// Prefix of the sample models of this binary: `sample:NAME`.
const SAMPLE: &str = "sample:";

/// Bytes of weight files from which on their packed form is cached: less is packed as fast as it is read.
const WORTH_KEEPING: u64 = 16 << 20;

/// A model that was opened and can be served.
#[derive(Clone, Debug)]
pub struct CheckedModel {
    /// The name clients use.
    pub name: ModelName,
    /// Modalities of its items; none of a decoder by itself.
    pub modalities: Vec<Modality>,
    /// Names of its towers; empty if no two read the same item.
    pub towers: Vec<&'static str>,
    /// Its directory, absolute.
    pub dir: PathBuf,
}

impl CheckedModel {
    /// True if encoder workers serve it.
    pub fn has_encoder(&self) -> bool {
        !self.modalities.is_empty()
    }
}

/// Fetches, unpacks and opens the models of the flags.
///
/// # Errors
/// [`CliError`] that names the model at fault.
pub async fn check_all(args: &ModelArgs) -> Result<Vec<CheckedModel>, CliError> {
    let sources = sources(args, Fallback::Samples).await?;
    let opened = spawn_blocking(move || sources.iter().map(check).collect::<Result<Vec<_>, _>>());
    let models = joined(opened.await)?;
    let mut names = HashSet::new();
    match models.iter().find(|m| !names.insert(m.name.clone())) {
        Some(twice) => Err(CliError::Setting(format!(
            "two models are called {}; give one another name, as in --model NAME=DIR",
            twice.name
        ))),
        None => Ok(models),
    }
}

/// The only model of clusters that are compared, fetched, unpacked and opened.
///
/// # Errors
/// [`CliError`] that names the model at fault, and for several models.
pub async fn check_one(args: &ModelArgs) -> Result<CheckedModel, CliError> {
    let mut models = check_all(args).await?;
    match (models.pop(), models.is_empty()) {
        (Some(model), true) => Ok(model),
        _ => Err(CliError::Setting("clusters are compared with one model; name it with --model DIR".into())),
    }
}

/// The models of a role that was started by hand. The role's library opens the directories.
///
/// # Errors
/// [`CliError`] that names the model at fault, or says that there is none.
pub async fn resolve_all(args: &ModelArgs) -> Result<Vec<ModelSource>, CliError> {
    sources(args, Fallback::Nothing).await
}

/// The draft models of a PD worker, each under the name of the model it helps.
///
/// # Errors
/// [`CliError`] for one without a name, or that cannot be found.
pub async fn resolve_drafts(texts: &[String], args: &ModelArgs) -> Result<Vec<ModelSource>, CliError> {
    if texts.is_empty() {
        return Ok(Vec::new());
    }
    let drafts = located(texts.to_vec(), Loading::of(args), Fallback::Nothing).await?;
    match drafts.iter().find(|draft| draft.name.is_none()) {
        Some(draft) => Err(CliError::Setting(format!(
            "--draft {}: say which model it helps, as in --draft NAME=DIR",
            draft.dir.display()
        ))),
        None => Ok(drafts),
    }
}

/// The directories that `texts` name; the sample models if there are none.
///
/// # Errors
/// [`CliError`] that names the model at fault.
pub async fn find(texts: &[String]) -> Result<Vec<ModelSource>, CliError> {
    located(texts.to_vec(), Loading::default(), Fallback::Samples).await
}

/// Models without `--model`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fallback {
    Samples,
    Nothing,
}

async fn sources(args: &ModelArgs, fallback: Fallback) -> Result<Vec<ModelSource>, CliError> {
    located(args.models.clone(), Loading::of(args), fallback).await
}

/// Loading of weights.
#[derive(Clone, Debug, Default)]
struct Loading {
    format: LoadFormat,
    packed: Option<PackedFolder>,
}

impl Loading {
    fn of(args: &ModelArgs) -> Self {
        let ComputeArgs { load_format, packed_mib, .. } = args.compute;
        let packed = PackedFolder {
            dir: cache_root().join("packed"),
            min_bytes: WORTH_KEEPING,
            max_bytes: packed_mib.saturating_mul(1 << 20),
        };
        Self { format: load_format.into(), packed: (packed_mib > 0).then_some(packed) }
    }
}

async fn located(
    texts: Vec<String>,
    Loading { format, packed }: Loading,
    fallback: Fallback,
) -> Result<Vec<ModelSource>, CliError> {
    let found = spawn_blocking(move || match (texts.is_empty(), fallback) {
        (true, Fallback::Samples) => samples::unpack(),
        (true, Fallback::Nothing) => Err(CliError::Setting(NO_MODEL.into())),
        (false, _) => texts.iter().map(|t| resolve(t)).collect(),
    });
    let found = joined(found.await)?;
    let source = |ModelLocation { name, dir }| ModelSource { dir, name, format, packed: packed.clone() };
    Ok(found.into_iter().map(source).collect())
}

fn joined<T>(ended: Result<Result<T, CliError>, tokio::task::JoinError>) -> Result<T, CliError> {
    ended.map_err(|e| CliError::failed("looking for the models ended early", &e))?
}

fn resolve(text: &str) -> Result<ModelLocation, CliError> {
    if Path::new(text).exists() {
        return directory(text).map(|dir| ModelLocation { name: None, dir });
    }
    let (name, place) = match text.split_once('=') {
        Some((name, place)) if is_name(name) => (Some(name), place),
        _ => (None, text),
    };
    let named = name.map(ModelName::new);
    if Path::new(place).exists() {
        return directory(place).map(|dir| ModelLocation { name: named, dir });
    }
    if let Some(sample) = place.strip_prefix(SAMPLE) {
        return samples::unpack_named(sample).map(|dir| ModelLocation { name: named, dir });
    }
    if !hub::is_id(place) {
        return Err(CliError::Setting(format!(
            "--model {text}: there is no such directory, and a hub id looks like OWNER/NAME"
        )));
    }
    let dir = hub::fetch(place)?;
    Ok(ModelLocation { name: Some(named.unwrap_or_else(|| ModelName::new(place))), dir })
}

/// A word, or a hub id, which is the name of a model that came from there.
fn is_name(text: &str) -> bool {
    !text.is_empty() && (!text.contains('/') || hub::is_id(text))
}

fn directory(place: &str) -> Result<PathBuf, CliError> {
    let dir = Path::new(place)
        .canonicalize()
        .map_err(|e| CliError::setting(format!("--model {place}: cannot open it"), &e))?;
    if dir.is_dir() {
        return Ok(dir);
    }
    let gguf = Path::new(place).extension().is_some_and(|ending| ending == "gguf");
    let file = if gguf { "a GGUF file, the format of llama.cpp" } else { "a file" };
    Err(CliError::Setting(format!(
        "--model {place} is {file}; a model is a Hugging Face directory with config.json, a tokenizer and \
         weights (model.safetensors or pytorch_model.bin)"
    )))
}

/// Opens a directory, and looks for its weights without reading them.
///
/// # Errors
/// [`CliError::Setting`] that names the directory and what is wrong with it.
pub fn check(source: &ModelSource) -> Result<CheckedModel, CliError> {
    let dir = source.dir.clone();
    let opened = Model::open(source).and_then(|model| model.check_weights().map(|()| model));
    let model = opened.map_err(|e| match e {
        ModelError::File { path, source }
            if path.ends_with("config.json") && source.kind() == std::io::ErrorKind::NotFound =>
        {
            CliError::Setting(format!(
                "--model {}: no config.json there; a model is a Hugging Face directory with config.json, \
                 a tokenizer and weights (model.safetensors or pytorch_model.bin)",
                dir.display()
            ))
        }
        e => CliError::Setting(format!("--model {} cannot be served: {}", dir.display(), chain(&e))),
    })?;
    let mut towers: Vec<_> = model.towers().map(|(_, name)| name).collect();
    if towers.len() == 1 {
        towers.clear();
    }
    Ok(CheckedModel { name: model.name().clone(), modalities: model.modalities().to_vec(), towers, dir })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_a_named_directory_and_what_is_neither() {
        let parent = tempfile::tempdir().unwrap();
        let odd = parent.path().join("a=b");
        std::fs::create_dir(&odd).unwrap();
        let odd_text = odd.to_str().unwrap();
        let canonical = odd.canonicalize().unwrap();
        assert_eq!(resolve(odd_text).unwrap(), ModelLocation { name: None, dir: canonical.clone() });
        for name in ["eyes", "tiny.en", "owner/name"] {
            let named = resolve(&format!("{name}={odd_text}")).unwrap();
            assert_eq!(named, ModelLocation { name: Some(ModelName::new(name)), dir: canonical.clone() });
        }
    }

    #[test]
    fn weights_are_looked_for_before_a_worker_starts() {
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/whisper_en_odd_heads/model");
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(golden).unwrap() {
            let from = entry.unwrap().path();
            if from.extension().is_some_and(|ending| ending == "json") {
                std::fs::copy(&from, dir.path().join(from.file_name().unwrap())).unwrap();
            }
        }
        std::fs::write(dir.path().join("pytorch_model.bin"), "x").unwrap();
        let source = |format| ModelSource { dir: dir.path().into(), name: None, format, packed: None };
        let error = check(&source(LoadFormat::Safetensors)).unwrap_err().to_string();
        let place = format!("--model {} cannot be served", dir.path().display());
        assert!(
            error.starts_with(&place) && error.contains("pickle") && error.contains("save_pretrained"),
            "{error}"
        );
        assert!(check(&source(LoadFormat::Dummy { seed: 1 })).is_ok());
    }

    #[test]
    fn what_cannot_be_a_model_is_told_with_its_name() {
        let parent = tempfile::tempdir().unwrap();
        let file = parent.path().join("model.bin");
        std::fs::write(&file, "x").unwrap();
        let missing = parent.path().join("missing");
        for (text, part) in [
            (missing.to_str().unwrap(), "no such directory"),
            ("whisper", "no such directory"),
            ("./a/b", "no such directory"),
            ("", "no such directory"),
            ("sample:nobody", "this build carries"),
            (file.to_str().unwrap(), "is a file"),
        ] {
            let e = resolve(text).unwrap_err();
            assert!(matches!(e, CliError::Setting(_)));
            assert!(e.to_string().contains(part) && e.to_string().contains(text), "{e}");
        }
        let empty = ModelSource {
            dir: parent.path().into(),
            name: None,
            format: triptych_models::LoadFormat::Safetensors,
            packed: None,
        };
        assert!(check(&empty).unwrap_err().to_string().contains("no config.json"));
    }
}
