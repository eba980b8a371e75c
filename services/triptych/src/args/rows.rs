//! Flags of encoder outputs: their element type, and the keys of writers.

use crate::error::CliError;
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use triptych_core::rows::NotARowType;
use triptych_core::{DType, RowType, RowTypes};
use triptych_ec::object::MacKeys;

/// Flags of encoder outputs in the store.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Encoder outputs")]
pub struct RowArgs {
    /// Element type of encoder outputs on the wire and in the store: f32, bf16, f16, int8, f8; `NAME=` for one model.
    /// Default: that of --precision. Encoders and PD workers must agree. int8 halves bf16 and costs some accuracy
    #[arg(long, value_name = "[NAME=]TYPE", env = "TRIPTYCH_EC_ROWS", value_delimiter = ',', value_parser = checked)]
    pub ec_rows: Vec<String>,
    /// File of keys (64 hex digits each) with which encoder outputs are signed, so that nobody else who can write to the
    /// store can make one. The first key signs, all are accepted
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_EC_MAC_KEYS")]
    pub ec_mac_keys: Option<PathBuf>,
}

/// The text of a setting, so that it can be written down again for a child.
fn checked(text: &str) -> Result<String, NotARowType> {
    text.parse::<RowType>().map(|_| text.to_owned())
}

impl RowArgs {
    /// The element types, where nothing else is said `default`.
    pub fn types(&self, default: DType) -> RowTypes {
        // Each text was checked when it was read.
        let settings: Vec<RowType> = self.ec_rows.iter().filter_map(|text| text.parse().ok()).collect();
        RowTypes::new(default, &settings)
    }

    /// The keys; none without a file.
    ///
    /// # Errors
    /// [`CliError::Setting`] for a file that cannot be read or has none.
    pub fn mac_keys(&self) -> Result<MacKeys, CliError> {
        let Some(path) = &self.ec_mac_keys else { return Ok(MacKeys::default()) };
        let wrong = |what: String| CliError::Setting(format!("--ec-mac-keys {}: {what}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
        let keys: MacKeys =
            text.parse().map_err(|e: triptych_ec::object::InvalidMacKey| wrong(e.to_string()))?;
        if keys.is_empty() {
            return Err(wrong("has no key, at least one is needed".into()));
        }
        Ok(keys)
    }

    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let mut flags = Vec::new();
        for text in &self.ec_rows {
            flags.extend(["--ec-rows".into(), text.into()]);
        }
        if let Some(path) = &self.ec_mac_keys {
            flags.extend(["--ec-mac-keys".into(), path.into()]);
        }
        flags
    }
}
