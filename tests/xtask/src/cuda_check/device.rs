//! The device as its driver names it, and the rates that shares of its peak are of.

use serde_json::Value;
use std::fmt;
use std::process::Command;

/// Rates that large products of bf16 and large copies reach on a device, as they were measured: operations and bytes a second.
/// Other devices have theirs measured in the run.
const KNOWN: [(&str, [f64; 2]); 1] = [("H200", [788e12, 4.3e12])];

/// Rates of a device that shares are of.
#[derive(Clone, Debug, PartialEq)]
pub struct Peak {
    flops_per_s: f64,
    bytes_per_s: f64,
    source: String,
}

impl Peak {
    /// The rates that torch's side measured.
    pub fn measured(told: &Value) -> Option<Self> {
        let rate = |key: &str| told[key].as_f64();
        let source = "as torch measured them in this run".to_owned();
        Some(Self { flops_per_s: rate("flops_per_s")?, bytes_per_s: rate("bytes_per_s")?, source })
    }

    /// The rate that bounds a work, and our share of it: `(share, true if the bound is arithmetic)`.
    pub fn share(&self, [flops, bytes]: [f64; 2], ms: f64) -> (f64, bool) {
        let [of_flops, of_bytes] = [flops / self.flops_per_s, bytes / self.bytes_per_s].map(|s| s * 1e3 / ms);
        (of_flops.max(of_bytes), of_flops >= of_bytes)
    }
}

impl fmt::Display for Peak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { flops_per_s, bytes_per_s, source } = self;
        write!(f, "{:.0} TFLOP/s in bf16 and {:.1} TB/s, {source}", flops_per_s / 1e12, bytes_per_s / 1e12)
    }
}

/// The device, as its driver tells; `None`: no driver's tool tells.
pub struct Device(pub Option<String>);

impl Device {
    /// Asks the driver's tool.
    pub fn ask() -> Self {
        let query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"];
        let output = Command::new("nvidia-smi").args(query).output().ok().filter(|o| o.status.success());
        let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
        Self(text.and_then(|text| text.lines().next().map(str::to_owned)))
    }

    /// True if the driver's tool names it.
    pub fn is_named(&self) -> bool {
        self.0.is_some()
    }

    /// Rates of a device that has known ones.
    pub fn peak(&self) -> Option<Peak> {
        let name = self.0.as_ref()?;
        let (known, [flops_per_s, bytes_per_s]) =
            KNOWN.into_iter().find(|(known, _)| name.split([' ', ',']).any(|word| word == *known))?;
        Some(Peak { flops_per_s, bytes_per_s, source: format!("the practical peaks of an {known}") })
    }

    /// Name of the files of its results, as `h200`.
    pub fn slug(&self) -> String {
        let name = self.0.as_deref().and_then(|line| line.split(',').next()).unwrap_or("device");
        let words = name.split(' ').filter(|word| *word != "NVIDIA");
        words.take(1).collect::<String>().to_lowercase()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_deref().unwrap_or("a device that `nvidia-smi` does not name"))
    }
}
