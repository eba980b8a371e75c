//! Cells of a map: who is ahead where it can be told beforehand.

use std::sync::Arc;
use std::time::Duration;
use triptych_plan::curves::sample::{Costs, curves_of};
use triptych_plan::maps::{Map, MapAxes, MapSettings};
use triptych_plan::planner::WorkerSettings;

fn settings(costs: Costs) -> MapSettings {
    let worker = WorkerSettings { batch_tokens: 1024, ..WorkerSettings::default() };
    MapSettings {
        curves: Arc::new(curves_of(&costs)),
        worker,
        size: "448x448".into(),
        output: 8,
        span: Duration::from_secs(8),
        seeds: 1,
    }
}

#[test]
fn encoders_of_their_own_win_where_images_stop_answers_and_lose_where_they_idle() {
    let slo = "ttft=4s,tpot=60ms".parse().expect("an SLO");
    let axes =
        MapAxes { workers: vec![2], slos: vec![slo], reuse: vec![0.0], text: vec![50], images: vec![1] };
    let place = axes.places().remove(0);
    let cell = |costs| settings(costs).cell(&place, slo).expect("a cell");
    // Images take next to nothing: a worker that only encodes is one less that answers.
    let light = Costs { encode_fixed: 10.0, encode_token: 1.0, prefill_token: 20.0, ..Costs::default() };
    let idle = cell(light);
    assert!(idle.ratio().expect("both serve") < 0.9, "{idle:?}");
    assert_eq!(idle.disaggregated, "1e1pd");
    let map = Map { cells: vec![idle.clone()] };
    assert_eq!(map.cell(&place), Some(&idle));
    let read: Map = serde_json::from_str(&serde_json::to_string(&map).expect("JSON")).expect("its own");
    let read = read.cell(&place).expect("the same place");
    assert_eq!(read.disaggregated, idle.disaggregated);
    // A number read from JSON may differ in its last bit.
    for (read, written) in [(read.goodput, idle.goodput), (read.colocated, idle.colocated)] {
        assert!((read / written - 1.0).abs() < 1e-12, "{read} {written}");
    }
}

#[test]
fn a_map_has_a_place_for_each_combination() {
    let slos = vec!["ttft=1s".parse().expect("an SLO"), "ttft=2s".parse().expect("an SLO")];
    let axes =
        MapAxes { workers: vec![8, 64], slos, reuse: vec![0.0, 0.5], text: vec![1, 2, 3], images: vec![1] };
    let places = axes.places();
    assert_eq!(places.len(), 2 * 2 * 2 * 3);
    assert!(places.windows(2).all(|two| two[0] != two[1] && two[0].workers <= two[1].workers));
}
