//! Published figures: the files of this repository, one made by hand, and ones that are wrong.

use std::path::{Path, PathBuf};
use triptych_plan::curves::sample::{Costs, curves_of};
use triptych_plan::papers::file::{Metric, ReadPaper};
use triptych_plan::papers::page::page;
use triptych_plan::papers::simulated::simulated;
use triptych_proxy::Roles;

fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/papers")
}

/// A file of one load with two clusters, whose curves lie beside it.
fn made(dir: &Path, change: impl FnOnce(&mut serde_json::Value)) -> PathBuf {
    let costs = Costs { encode_token: 100.0, ..Costs::default() };
    let curves = serde_json::to_string(&curves_of(&costs)).expect("JSON");
    std::fs::write(dir.join("curves.json"), curves).expect("a file");
    let mut paper = serde_json::json!({
        "title": "Made up", "source": "https://example.org", "lead": "Nobody measured this.",
        "slo": "ttft=500ms,tpot=100ms", "n_requests": 60, "rates": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0],
        "server": {"token_budget": 512, "max_sequences": 64, "kv_gib": 1, "decode_share": 0, "batch_tokens": 512},
        "clusters": [
            {"name": "1e1pd", "topology": "1e1pd", "curves": "curves.json"},
            {"name": "dp2", "topology": "dp2:budget=none", "curves": "curves.json"}
        ],
        "workloads": [{
            "workload": "epd-short:images=1,text=50,output=8,size=448x448",
            "figures": [
                {"metric": "goodput", "published": {"1e1pd": 16, "dp2": 8}},
                {"metric": "ttft_p99_ms", "rate": 2.0, "published": {"1e1pd": 100.0}},
                {"metric": "throughput", "rate": 2.0, "published": {}, "ratio": [0.9, 1.1]}
            ]
        }],
        "untold": ["the weather"], "reading": ["none"]
    });
    change(&mut paper);
    let file = dir.join("paper.json");
    std::fs::write(&file, paper.to_string()).expect("a file");
    file
}

#[test]
fn the_published_tables_of_this_repository_can_be_read() {
    let mut n = 0;
    for name in ["vllm-epd.json", "sglang-epd.json"] {
        let read = ReadPaper::read(&files().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(read.paper.source.starts_with("https://"));
        assert!(!read.paper.untold.is_empty() && !read.paper.reading.is_empty(), "{name}");
        assert!(read.paper.clusters.iter().all(|cluster| cluster.roles() == Roles::Fixed), "{name}");
        n += read.paper.workloads.iter().map(|load| load.figures.len()).sum::<usize>();
    }
    assert!(n > 40, "{n} figures");
}

#[test]
fn a_page_has_each_figure_beside_its_simulation() {
    let dir = tempfile::tempdir().expect("a folder");
    let read = ReadPaper::read(&made(dir.path(), |_| ())).expect("a good file");
    let found = simulated(read, &|_| ()).expect("a simulation");
    let [goodput, ttft, throughput] = &found.values[0][..] else { panic!("{:?}", found.values) };
    // An encode takes 27 ms, a prompt of 320 tokens about 20: half a second is not kept for 60 requests at 128 a second.
    for cluster in ["1e1pd", "dp2"] {
        assert!((8.0..=64.0).contains(&goodput[cluster]), "{goodput:?}");
        assert!((40.0..500.0).contains(&ttft[cluster]), "{ttft:?}");
        assert!((1.0..3.0).contains(&throughput[cluster]), "{throughput:?}");
    }
    let text = page(&[found]).to_markdown();
    for part in ["Made up", "https://example.org", "2.00", "TTFT p99, ms", "0.90 to 1.10 → ", "- the weather"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn clusters_have_the_roles_of_their_topology() {
    let dir = tempfile::tempdir().expect("a folder");
    let both = serde_json::json!([
        {"name": "1e1pd", "topology": "dp2:budget=none", "curves": "curves.json"},
        {"name": "dp2", "topology": "elastic2:budget=none", "curves": "curves.json"}
    ]);
    let changed = made(dir.path(), |paper| {
        paper["clusters"] = both;
        paper["workloads"][0]["workload"] = "epd-short:images=4,text=50,output=8,size=448x448".into();
    });
    let read = ReadPaper::read(&changed).expect("a good file");
    let roles: Vec<_> = read.paper.clusters.iter().map(|cluster| cluster.roles()).collect();
    assert_eq!(roles, [Roles::Fixed, Roles::Auto]);
    let found = simulated(read, &|_| ()).expect("a simulation");
    let ttft = &found.values[0][1];
    assert!(ttft["1e1pd"] != ttft["dp2"], "encodes go elsewhere: {ttft:?}");
}

/// A change of a paper's file.
type Change = fn(&mut serde_json::Value);

#[test]
fn wrong_files_are_refused_by_what_is_wrong() {
    let dir = tempfile::tempdir().expect("a folder");
    let refused =
        |change: Change| ReadPaper::read(&made(dir.path(), change)).expect_err("a bad file").to_string();
    let cases: [(Change, &str); 8] = [
        (|p| p["clusters"] = serde_json::json!([]), "fewer than two"),
        (|p| p["rates"] = serde_json::json!([2.0, 1.0]), "do not ascend"),
        (|p| p["n_requests"] = 0.into(), "n_requests is 0"),
        (|p| p["slo"] = "soon".into(), "soon"),
        (|p| p["clusters"][0]["topology"] = "9x".into(), "9x"),
        (|p| p["clusters"][0]["curves"] = "none.json".into(), "none.json"),
        (|p| p["workloads"][0]["workload"] = "nope".into(), "nope"),
        (|p| p["workloads"][0]["figures"][1]["published"]["dp3"] = 1.into(), "no cluster \"dp3\""),
    ];
    for (change, part) in cases {
        let error = refused(change);
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
    assert_eq!(Metric::Goodput.as_str(), "goodput, requests/s");
}
