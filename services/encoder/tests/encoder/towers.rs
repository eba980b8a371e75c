//! A worker that holds one of a model's towers: it announces it by number and name, and does no job for another.

use crate::support::{TowersOf, start_towers};
use tonic::Code;
use triptych_encoder::EncoderError;
use triptych_proto::v1;

#[tokio::test]
async fn a_worker_announces_and_encodes_the_towers_that_it_holds() {
    let mut announced = Vec::new();
    for (towers, expect) in
        [("low", &[(0, "low")][..]), ("high", &[(1, "high")]), ("", &[(0, "low"), (1, "high")])]
    {
        let worker = start_towers(TowersOf::named(towers)).await;
        let models = worker.describe().await.models;
        let encoders = &models[0].encoders;
        let found: Vec<_> = encoders.iter().map(|e| (e.tower_index, e.tower_name.as_str())).collect();
        assert_eq!(found, expect);
        announced.push(encoders.clone());
        // Its own towers are encoded, each with rows of its own width.
        let mut widths = Vec::new();
        for (seed, encoder) in (1..).zip(encoders) {
            let fingerprint = encoder.fingerprint.clone();
            let job = worker.job("towers", seed).await;
            let job = v1::EncodeRequest { tower_index: encoder.tower_index, fingerprint, ..job };
            let made = worker.encode(job.clone()).await.expect("encoded").item.expect("an item");
            assert_eq!(made.fingerprint, job.fingerprint);
            widths.push(made.hidden);
        }
        let job = worker.job("towers", 9).await;
        let others = [0, 1].into_iter().filter(|tower| !expect.iter().any(|(own, _)| own == tower));
        for tower in others {
            let refused = worker.encode(v1::EncodeRequest { tower_index: tower, ..job.clone() }).await;
            let refused = refused.expect_err("it does not hold it");
            assert!(refused.message().contains("does not hold the tower of model \"towers\""), "{refused}");
        }
        let none =
            worker.encode(v1::EncodeRequest { tower_index: 9, ..job.clone() }).await.expect_err("no tower");
        assert_eq!(none.code(), Code::InvalidArgument, "{none}");
        let rows = worker.encode(v1::EncodeRequest { item_is_embeddings: true, ..job }).await;
        let rows = rows.expect_err("rows of which tower");
        assert!(rows.message().contains("images of one tower, this model has low and high"), "{rows}");
    }
    // The same towers, wherever they are.
    assert_eq!([&announced[0][..], &announced[1][..]].concat(), announced[2]);
}

#[tokio::test]
async fn a_tower_that_the_model_has_not_is_refused_at_the_start() {
    let error = start_towers(TowersOf::named("middle")).await.running.await.expect("no panic");
    let Err(EncoderError::Model { source, .. }) = error else { panic!("refused") };
    assert!(source.to_string().contains("has the towers low and high, not \"middle\""), "{source}");
}
