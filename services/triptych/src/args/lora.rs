//! Flags about LoRA adapters.

use crate::error::CliError;
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use triptych_models::lora::{LoraSettings, LoraSource};

/// LoRA adapters of the models of a PD worker.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "LoRA adapters")]
pub struct LoraArgs {
    /// The adapters
    #[command(flatten)]
    pub loaded: AdapterArgs,
    /// Distinct adapters among the sequences that run at once; sequences of others wait
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_LORAS", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_loras: u32,
}

/// LoRA adapters of the models of any worker.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "LoRA adapters")]
pub struct AdapterArgs {
    /// A LoRA adapter, as PEFT saves one, that requests name as their model; repeat, or part by commas. With several models say
    /// whose it is
    #[arg(long = "lora", value_name = "[MODEL:]NAME=DIR", env = "TRIPTYCH_LORA", value_delimiter = ',')]
    pub adapters: Vec<String>,
    /// Highest rank of an adapter
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_LORA_RANK", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=512))]
    pub max_lora_rank: u32,
    /// Adapters of a model that are loaded at once
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_LOADED_LORAS", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_loaded_loras: u32,
    /// Lets requests load adapters from directories below this one, and unload them: /v1/load_lora_adapter and
    /// /v1/unload_lora_adapter. Default: they are refused
    #[arg(long, value_name = "DIR", env = "TRIPTYCH_LORA_UPDATES")]
    pub lora_updates: Option<PathBuf>,
}

impl LoraArgs {
    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let mut flags = self.loaded.to_flags();
        flags.extend(["--max-loras".into(), self.max_loras.to_string().into()]);
        flags
    }
}

impl AdapterArgs {
    /// Settings of a worker.
    ///
    /// # Errors
    /// [`CliError::Setting`] for an adapter without a name or a directory.
    pub fn settings(&self) -> Result<LoraSettings, CliError> {
        let size = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        Ok(LoraSettings {
            adapters: self.adapters.iter().map(|text| source(text)).collect::<Result<_, _>>()?,
            max_rank: size(self.max_lora_rank),
            max_loaded: size(self.max_loaded_loras),
            updates: self.lora_updates.clone(),
        })
    }

    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let mut flags: Vec<OsString> =
            [("--max-lora-rank", self.max_lora_rank), ("--max-loaded-loras", self.max_loaded_loras)]
                .into_iter()
                .flat_map(|(flag, value)| [flag.into(), value.to_string().into()])
                .collect();
        for adapter in &self.adapters {
            flags.extend(["--lora".into(), adapter.into()]);
        }
        if let Some(dir) = &self.lora_updates {
            flags.extend(["--lora-updates".into(), dir.into()]);
        }
        flags
    }
}

/// Reads `[MODEL:]NAME=DIR`.
fn source(text: &str) -> Result<LoraSource, CliError> {
    let wrong = || CliError::Setting(format!("--lora {text}: expected [MODEL:]NAME=DIR"));
    let (names, dir) = text.split_once('=').ok_or_else(wrong)?;
    let (model, name) = match names.rsplit_once(':') {
        Some((model, name)) => (Some(model), name),
        None => (None, names),
    };
    if name.is_empty() || dir.is_empty() || model.is_some_and(str::is_empty) {
        return Err(wrong());
    }
    Ok(LoraSource { name: name.into(), model: model.map(Into::into), dir: dir.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        lora: LoraArgs,
    }

    #[test]
    fn an_adapter_has_a_name_a_directory_and_perhaps_a_model() {
        let of = |name: &str, model: Option<&str>, dir: &str| LoraSource {
            name: name.into(),
            model: model.map(Into::into),
            dir: dir.into(),
        };
        assert_eq!(source("sql=/a/b").unwrap(), of("sql", None, "/a/b"));
        assert_eq!(source("m:sql=a=b").unwrap(), of("sql", Some("m"), "a=b"));
        for wrong in ["sql", "=/a", "sql=", ":sql=/a", "m:=/a"] {
            assert!(source(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn flags_written_for_a_child_read_back_the_same() {
        let line = "x --lora a=/1 --lora m:b=/2 --max-loras 2 --max-lora-rank 64 --max-loaded-loras 7 --lora-updates /d";
        let first = Flags::parse_from(line.split(' '));
        let second = Flags::parse_from(std::iter::once(OsString::from("x")).chain(first.lora.to_flags()));
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
    }
}
