//! The most encoder rows that a processor promises: reached, and never exceeded. Caches are sized by it.

use super::{audio, golden, images};
use image::{DynamicImage, RgbImage};
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemForm, ItemOptions, Modality};
use triptych_models::preprocess::EncoderInput;
use triptych_models::{LoadFormat, Model, ModelSource};

fn models() -> Vec<(String, Model)> {
    let entries = std::fs::read_dir(golden::path("")).expect("the golden files");
    let dirs = entries.map(|e| e.expect("an entry").path()).filter(|p| p.join("model/config.json").exists());
    let open = |dir: std::path::PathBuf| {
        let name = dir.file_name().expect("a name").to_string_lossy().into_owned();
        let format = LoadFormat::Dummy { seed: 0 };
        let source = ModelSource { dir: dir.join("model"), name: None, format, packed: None };
        let model = Model::open(&source).unwrap_or_else(|e| panic!("{name}: {e}"));
        (name, model)
    };
    dirs.map(open).collect()
}

/// Items that use a processor to the full: long texts, images of every shape, audio of more than a window.
fn items(modality: Modality, max_rows: usize) -> Vec<Vec<u8>> {
    let image =
        |[width, height]: [u32; 2]| images::png(&DynamicImage::ImageRgb8(RgbImage::new(width, height)));
    match modality {
        Modality::Text => vec![[7_u8, 0, 0, 0].repeat(max_rows)],
        Modality::Image => [[40, 40], [900, 90], [90, 900], [700, 700]].map(image).into(),
        // No model cross-attends to them.
        Modality::Video => Vec::new(),
        Modality::Audio => vec![audio::wav(16_000, 1, (0..70 * 16_000).map(|i| (i % 97) as i16))],
    }
}

/// Rows of the largest sequence over an item.
fn rows_of_sequence(input: &EncoderInput, max_rows: usize) -> usize {
    match input.extent {
        Extent::Windows { n_windows, .. } => {
            let mean = (input.n_tokens as usize).div_ceil(n_windows as usize);
            assert!(n_windows > 1 && mean <= max_rows);
            // All but the last are full.
            (input.n_tokens as usize).min(max_rows)
        }
        _ => input.n_tokens as usize,
    }
}

#[test]
fn the_most_rows_of_a_sequence_are_reached_and_not_exceeded() {
    let mut n_checked = 0;
    for (name, model) in models() {
        let Some(max_rows) = model.max_cross_rows() else { continue };
        let modality = model.modalities()[0];
        // Of several towers the last one's rows are cross-attended.
        let processor =
            model.encoders().last().map(|(_, processor)| Arc::clone(processor)).expect("an encoder");
        let form = if modality == Modality::Text { ItemForm::TokenIds } else { ItemForm::Plain };
        // An encoder that reads a text with the image takes as much of it as there is room.
        let takes_prompt = processor.takes_prompt();
        let options = ItemOptions { form, prompt: takes_prompt.then(String::new), ..ItemOptions::default() };
        let inputs = items(modality, max_rows)
            .iter()
            .filter_map(|item| processor.preprocess(modality, item, &options, &Limits::default()).ok())
            .collect::<Vec<_>>();
        let most = inputs.iter().map(|input| rows_of_sequence(input, max_rows)).max();
        match takes_prompt {
            true => assert!(most.is_some_and(|n| n <= max_rows), "{name}: {most:?} rows, {max_rows} at most"),
            false => assert_eq!(most, Some(max_rows), "{name}"),
        }
        n_checked += 1;
    }
    assert!(n_checked >= 20, "{n_checked} models");
}
