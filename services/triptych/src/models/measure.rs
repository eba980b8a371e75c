//! Memory of this process that a loaded stage takes.

use triptych_models::compute::{Compute, ComputeConfig};
use triptych_models::{Model, ModelError};

/// Growth of this process's own memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Precision of the weights.
    pub precision: &'static str,
    /// Growth while the encoder was loaded; `None` if the system does not report it.
    pub encoder: Option<u64>,
    /// Growth while the decoder was loaded, without blocks of KV.
    pub decoder: Option<u64>,
}

/// Loads one stage, then the other beside it: memory that the first gave back would otherwise serve the second.
pub fn stages(model: &Model, config: ComputeConfig) -> Result<Measured, ModelError> {
    let compute = Compute::new(config)?;
    let grown = |from: Option<u64>| Some(own_memory()?.saturating_sub(from?));
    let start = own_memory();
    // Each tower of the first kind of items; towers are shared by the kinds.
    let first = model.modalities().first();
    let towers = model.encoders().filter(|(id, _)| Some(&id.modality) == first);
    let loaded = towers.map(|(id, _)| compute.load_encoder(model, id)).collect::<Result<Vec<_>, _>>()?;
    let encoder = grown(start);
    let middle = own_memory();
    let decoder = compute.load_decoder(model)?;
    let measured = Measured { precision: config.precision.as_str(), encoder, decoder: grown(middle) };
    drop((loaded, decoder));
    Ok(measured)
}

/// Resident memory that is no file's; mapped weights are not counted. `None` where there is no `/proc`.
fn own_memory() -> Option<u64> {
    anonymous(&std::fs::read_to_string("/proc/self/status").ok()?)
}

/// `RssAnon:     1234 kB`.
fn anonymous(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let n: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    n.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_own_memory_is_found_or_nothing() {
        assert_eq!(anonymous("VmRSS:\t  9 kB\nRssAnon:\t  12 kB\nRssFile:\t 3 kB\n"), Some(12 << 10));
        for bad in ["", "RssAnon: x kB", "RssAnon: 12", "RssAnon: 99999999999999999999 kB"] {
            assert_eq!(anonymous(bad), None, "{bad}");
        }
        #[cfg(target_os = "linux")]
        assert!(own_memory().is_some_and(|n| n > 0));
    }
}
