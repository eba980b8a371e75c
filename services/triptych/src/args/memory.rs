//! Flags of the memory of a PD worker.

use clap::Args;
use std::ffi::OsString;

/// Memory of a PD worker.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Memory of a PD worker")]
pub struct MemoryArgs {
    /// MiB of memory that a PD worker divides among weights, activations, caches and encoder outputs, as its log says; what is
    /// set by --kv-mib and its like is kept. It does not start if one request of the model's length would not fit, and ends
    /// itself beyond it. For the CPU. Default: caches of the sizes that are set
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_MEMORY_MIB", value_parser = clap::value_parser!(u32).range(1..))]
    pub memory_mib: Option<u32>,
    /// MiB of encoder outputs in memory: those that requests wait for or read, and those kept for later requests. A request
    /// waits until there is room for its own; one that needs more is refused. Not read with --memory-mib
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_EC_CACHE_MIB", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub ec_cache_mib: u32,
}

impl MemoryArgs {
    /// The flags, for a child.
    pub fn to_flags(self) -> Vec<OsString> {
        let mut flags = vec!["--ec-cache-mib".into(), self.ec_cache_mib.to_string().into()];
        if let Some(mib) = self.memory_mib {
            flags.extend(["--memory-mib".into(), mib.to_string().into()]);
        }
        flags
    }
}
