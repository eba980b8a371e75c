//! Flags of the cores that the workers of a host share.

use crate::error::CliError;
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use triptych_models::compute::Device;
use triptych_runtime::core_share::{CoreShare, MAX_PLACES};

/// Cores shared with the other workers of the host.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Cores shared with other workers of the host")]
pub struct CoreShareArgs {
    /// File through which workers of a host divide its cores: those that compute at a time have equal parts, idle ones lend
    /// theirs; --threads is the most. For the CPU; `triptych up` sets it. Default: every worker computes with all of --threads
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_CORE_SHARE_FILE", requires = "core_share_place")]
    pub core_share_file: Option<PathBuf>,
    /// This worker's place in the file, each worker's its own
    #[arg(long, value_name = "N", env = "TRIPTYCH_CORE_SHARE_PLACE", requires = "core_share_file",
          value_parser = clap::value_parser!(u32).range(..i64::from(MAX_PLACES)))]
    pub core_share_place: Option<u32>,
}

impl CoreShareArgs {
    /// The flags of a worker at a place.
    pub fn flags_of(file: PathBuf, place: u32) -> [OsString; 4] {
        [
            "--core-share-file".into(),
            file.into_os_string(),
            "--core-share-place".into(),
            place.to_string().into(),
        ]
    }

    /// This process's share; `None` if none is set, or if a GPU computes.
    ///
    /// # Errors
    /// [`CliError::Setting`] if the file cannot be used.
    pub fn open(&self, device: Device) -> Result<Option<CoreShare>, CliError> {
        let (Some(file), Some(place)) = (&self.core_share_file, self.core_share_place) else {
            return Ok(None);
        };
        if !device.is_cpu() {
            return Ok(None);
        }
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = CoreShare::open(file, place, n_cores);
        share.map(Some).map_err(|e| CliError::Setting(format!("--core-share-file {}: {e}", file.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        cores: CoreShareArgs,
    }

    fn parse(flags: &[&str]) -> Result<CoreShareArgs, clap::Error> {
        Flags::try_parse_from([&["x"], flags].concat()).map(|flags| flags.cores)
    }

    #[test]
    fn a_file_and_a_place_go_together_and_are_for_the_cpu() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cores");
        let flags = CoreShareArgs::flags_of(file.clone(), 3).map(|flag| flag.into_string().unwrap());
        let given = parse(&flags.each_ref().map(String::as_str)).unwrap();
        assert!(given.open(Device::Cpu).unwrap().is_some());
        assert!(given.open(Device::Cuda(0)).unwrap().is_none());
        assert!(parse(&[]).unwrap().open(Device::Cpu).unwrap().is_none());
        assert!(parse(&["--core-share-place", "0"]).is_err());
        assert!(parse(&["--core-share-file", "f", "--core-share-place", "256"]).is_err());
        let nowhere = CoreShareArgs { core_share_file: Some(file.join("under")), ..given };
        assert!(nowhere.open(Device::Cpu).unwrap_err().to_string().contains("--core-share-file"));
    }
}
