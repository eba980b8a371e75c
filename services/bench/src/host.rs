//! The machine that measures.

use crate::result::Host;
use std::time::{SystemTime, UNIX_EPOCH};

impl Host {
    /// This machine at this moment. What cannot be found out is left out.
    pub fn here(commit: Option<String>) -> Self {
        let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".to_owned()),
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            memory_mib: field(&read("/proc/meminfo"), "MemTotal")
                .and_then(|text| text.split(' ').next()?.parse::<u64>().ok())
                .map(|kib| kib / 1024),
            at_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            commit,
        }
    }
}

/// The first `name: value` of a text.
fn field(text: &str, name: &str) -> Option<String> {
    let named = text.lines().filter_map(|line| line.split_once(':'));
    let mut named = named.filter(|(key, _)| key.trim() == name);
    named.next().map(|(_, value)| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_a_processor_and_cores() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor\t: 1\n";
        assert_eq!(field(cpuinfo, "model name").as_deref(), Some("Some CPU @ 2 GHz"));
        let here = Host::here(None);
        assert!(here.cores >= 1 && here.at_unix_s > 1_700_000_000, "{here:?}");
    }
}
