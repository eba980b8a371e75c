//! Workloads and topologies of the suite.

/// Default topologies: the disaggregated one of the claim, then its rivals.
pub const TOPOLOGIES: [&str; 3] = ["1e1pd", "dp2", "colocated"];

/// Workloads of the claim: both of the EPD blog's with one to four images, repeated images, and mixes of requests with and
/// without images.
pub fn workloads() -> Vec<String> {
    let blog = ["epd-short", "epd-long"].into_iter();
    let blog = blog.flat_map(|name| (1..=4).map(move |n| format!("{name}:images={n}")));
    let reuse = [50, 90].map(|percent| format!("epd-short:images=2,share={}", f64::from(percent) / 100.0));
    let mixes = [25, 50, 75].map(|percent| format!("mixed:with={},images=1-4", f64::from(percent) / 100.0));
    blog.chain(reuse).chain(mixes).collect()
}

/// Workloads of a quick run.
pub fn quick_workloads() -> Vec<String> {
    ["epd-short:images=1", "epd-short:images=4", "epd-short:images=2,share=0.9", "mixed:with=0.25,images=1-4"]
        .map(str::to_owned)
        .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Topology;
    use crate::workload::Workload;

    #[test]
    fn every_workload_and_topology_of_the_suite_can_be_read() {
        for workload in workloads().into_iter().chain(quick_workloads()) {
            Workload::parse(&workload).unwrap_or_else(|e| panic!("{workload}: {e}"));
        }
        for name in TOPOLOGIES {
            name.parse::<Topology>().unwrap();
        }
        assert!(quick_workloads().iter().all(|quick| workloads().contains(quick)));
        assert_eq!(workloads().len(), 13);
    }
}
