//! A model of the Hugging Face hub, fetched into the hub's own cache folder, where other tools find it too.
//!
//! Only what is served is fetched: configuration, tokenizer, processor and weights, as safetensors where there are any.
//! Without a network a copy that was fetched before is used.

use crate::error::{CliError, chain};
use hf_hub::Cache;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";

/// Weight files that a repository has: those which are fetched, in the order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WeightFiles {
    Safetensors,
    SafetensorsShards,
    Torch,
    TorchShards,
}

impl WeightFiles {
    const ALL: [Self; 4] = [Self::Safetensors, Self::SafetensorsShards, Self::Torch, Self::TorchShards];

    /// The weight files of a repository, by the names of all its files.
    fn of(listed: &[String]) -> Option<Self> {
        Self::ALL.into_iter().find(|files| listed.iter().any(|file| files.has(file)))
    }

    /// True for a file with weights.
    fn has(self, file: &str) -> bool {
        let shard = |start, end| file.starts_with(start) && file.ends_with(end) && !file.contains('/');
        match self {
            Self::Safetensors => file == "model.safetensors",
            Self::SafetensorsShards => shard("model-", ".safetensors"),
            Self::Torch => file == "pytorch_model.bin",
            Self::TorchShards => shard("pytorch_model-", ".bin"),
        }
    }

    /// Name of the file that lists shards.
    fn index(self) -> Option<&'static str> {
        match self {
            Self::Safetensors | Self::Torch => None,
            Self::SafetensorsShards => Some("model.safetensors.index.json"),
            Self::TorchShards => Some("pytorch_model.bin.index.json"),
        }
    }
}

/// True for a hub id: `OWNER/NAME`.
pub fn is_id(text: &str) -> bool {
    let part_ok = |part: &str| {
        !part.is_empty()
            && part.len() <= 96
            && !part.starts_with(['.', '-'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    text.split_once('/').is_some_and(|(owner, name)| part_ok(owner) && part_ok(name))
}

/// The directory with the model's files. Blocks, for as long as the files take.
///
/// # Errors
/// [`CliError::Failed`] if the hub cannot be reached, or does not have the model or a file of it.
pub fn fetch(id: &str) -> Result<PathBuf, CliError> {
    if std::env::var_os("HF_HOME").is_none() && std::env::var_os("HOME").is_none() {
        return Err(CliError::Setting("to keep a model of the hub, set HOME or HF_HOME".into()));
    }
    match fetch_all(id) {
        Ok(fetched) => fetched,
        Err(e) => match fetched_before(id) {
            Some(dir) => {
                say(&format!("the hub cannot be used ({}); taking {}", chain(&e), dir.display()));
                Ok(dir)
            }
            None => Err(CliError::Failed(format!(
                "cannot get {id} from the Hugging Face hub: {}. Check the id and the network (a private model \
                 needs a token, see HF_HOME); or fetch it elsewhere and pass the directory: --model DIR",
                chain(&e)
            ))),
        },
    }
}

/// The outer error is the hub's, the inner one says why the model cannot be served.
fn fetch_all(id: &str) -> Result<Result<PathBuf, CliError>, ApiError> {
    let api = ApiBuilder::from_env().with_progress(std::io::stderr().is_terminal()).build()?;
    let repo = api.model(id.to_owned());
    let listed = repo.info()?.siblings.into_iter().map(|s| s.rfilename).collect::<Vec<_>>();
    if let Some(reason) = unservable(&listed) {
        return Ok(Err(CliError::Setting(format!("--model {id} cannot be served: {reason}"))));
    }
    let weights = WeightFiles::of(&listed);
    let has_weights = |f: &str| weights.is_some_and(|weights| weights.has(f));
    let mut wanted = listed.iter().filter(|f| is_served(f, weights)).collect::<Vec<_>>();
    // Configuration first: a model that is none is known before its weights are fetched.
    wanted.sort_by_key(|f| (has_weights(f), f.as_str() != CONFIG));
    say(&format!("fetching {id}: {} files", wanted.len()));
    for file in wanted {
        get(&repo, file)?;
    }
    let config = repo.get(CONFIG)?;
    Ok(Ok(config.parent().unwrap_or(Path::new("")).to_owned()))
}

/// Cause and cure for a repository without a model that can be served, by the names of its files.
fn unservable(listed: &[String]) -> Option<String> {
    let has = |name: &str| listed.iter().any(|file| file == name);
    let ending = |end: &str| listed.iter().find(|file| file.ends_with(end) && !file.contains('/'));
    if !has(CONFIG) && has("adapter_config.json") {
        return Some(
            "it is an adapter, not a model; merge it into its base model (PEFT: merge_and_unload(), then \
             save_pretrained(DIR)) and serve that directory"
                .into(),
        );
    }
    if WeightFiles::of(listed).is_some() {
        return None;
    }
    let others = [".gguf", ".bin", ".h5", ".msgpack"].into_iter().find_map(ending);
    let found = others.map_or_else(String::new, |file| format!(" (but {file})"));
    Some(format!(
        "it has neither model.safetensors nor pytorch_model.bin{found}, and other formats are not read; take a revision or a copy of the model that \
         has, or convert it with transformers' save_pretrained and pass the directory: --model DIR"
    ))
}

fn get(repo: &ApiRepo, file: &str) -> Result<(), ApiError> {
    if !std::io::stderr().is_terminal() {
        say(&format!("fetching {file}"));
    }
    repo.get(file).map(drop)
}

/// Files in the root of the repository that a worker reads.
fn is_served(file: &str, weights: Option<WeightFiles>) -> bool {
    if file.contains('/') {
        return false;
    }
    if let Some(weights) = weights
        && (weights.has(file) || weights.index() == Some(file))
    {
        return true;
    }
    match file.rsplit_once('.') {
        Some((stem, "json")) => !stem.ends_with(".index"),
        Some((_, "jinja")) => true,
        _ => false,
    }
}

fn fetched_before(id: &str) -> Option<PathBuf> {
    let cached = Cache::from_env().model(id.to_owned());
    let dir = cached.get(CONFIG)?.parent()?.to_owned();
    let entries = std::fs::read_dir(&dir).ok()?.flatten();
    let names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    WeightFiles::of(&names).map(|_| dir)
}

fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_an_owner_and_a_name() {
        for id in ["openai/whisper-tiny.en", "Qwen/Qwen2.5-VL-3B-Instruct", "a/b"] {
            assert!(is_id(id), "{id}");
        }
        for other in ["", "whisper", "/models/a", "./a/b", "../a", "a/b/c", "a/", "a b/c", "-a/b"] {
            assert!(!is_id(other), "{other}");
        }
    }

    #[test]
    fn a_repository_without_a_servable_model_is_refused_before_it_is_fetched() {
        let check = |files: &[&str], expect: Option<&str>| {
            let listed: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
            let reason = unservable(&listed);
            match (&reason, expect) {
                (None, None) => {}
                (Some(reason), Some(part)) if reason.contains(part) => {}
                _ => panic!("{files:?}: {reason:?}, expected {expect:?}"),
            }
        };
        check(&["config.json", "model.safetensors", "pytorch_model.bin"], None);
        check(&["config.json", "model-00001-of-00002.safetensors"], None);
        check(&["config.json", "pytorch_model.bin"], None);
        check(&["config.json", "pytorch_model-00001-of-00002.bin"], None);
        check(&["config.json", "consolidated.bin"], Some("nor pytorch_model.bin (but consolidated.bin)"));
        check(&["README.md", "model-q4.gguf"], Some("(but model-q4.gguf)"));
        check(&["config.json", "onnx/model.safetensors"], Some("nor pytorch_model.bin, and"));
        check(&["adapter_config.json", "adapter_model.safetensors"], Some("merge_and_unload"));
    }

    #[test]
    fn only_what_is_served_is_fetched() {
        let torch = "pytorch_model.bin";
        let torch_index = "pytorch_model.bin.index.json";
        let torch_shard = "pytorch_model-00001-of-00002.bin";
        let one = "model.safetensors";
        let index = "model.safetensors.index.json";
        let shard = "model-00001-of-00002.safetensors";
        let weights = [one, index, shard, torch, torch_index, torch_shard];
        for (from, fetched) in [
            (&weights[..], &[one][..]),
            (&weights[1..], &[index, shard]),
            (&weights[3..], &[torch]),
            (&weights[4..], &[torch_index, torch_shard]),
        ] {
            let always = ["config.json", "chat_template.jinja", "model.safetensors.index.fp32.json"];
            let never = ["onnx/config.json", "README.md", "training_args.bin", "onnx/model.safetensors"];
            let listed: Vec<String> = [from, &always, &never].concat().iter().map(|f| (*f).into()).collect();
            let files = WeightFiles::of(&listed);
            let served: Vec<&str> =
                listed.iter().map(String::as_str).filter(|f| is_served(f, files)).collect();
            assert_eq!(served, [fetched, &always].concat());
        }
    }
}
