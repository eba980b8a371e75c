//! Items of the cases at published widths, as `tests/golden/wide.py` draws them.

use crate::drawn::uniform;
use crate::planes::{patches, tile_patches};
use serde_json::Value;
use triptych_core::Extent;
use triptych_models::preprocess::{EncoderInput, Features, TileRows};
use triptych_models::spec::{EncoderSpec, MelWindows, StemSpec};

/// Values of variance 1, as many as a shape has.
fn values(shape: &[usize]) -> Vec<f32> {
    uniform("features", shape.iter().product()).map(|value| value * 3_f64.sqrt() as f32).collect()
}

fn list(value: &Value) -> Vec<usize> {
    serde_json::from_value(value.clone()).expect("a shape")
}

fn square(side: usize) -> Extent {
    Extent::Grid { t: 1, h: side as u32, w: side as u32 }
}

/// The item of a case for each of its towers.
pub fn inputs(json: &Value, encoder: &EncoderSpec) -> Vec<EncoderInput> {
    match json["input"]["towers"].as_array() {
        Some(shapes) => {
            shapes.iter().zip(encoder.towers()).map(|(shape, tower)| of_tower(tower, &list(shape))).collect()
        }
        None => vec![input(json, encoder)],
    }
}

/// An image for one of several towers.
fn of_tower(encoder: &EncoderSpec, shape: &[usize]) -> EncoderInput {
    let side = encoder.stem.patch_side().expect("patches");
    let [h, w] = [shape[2] / side, shape[3] / side].map(|n| n as u32);
    let patches = patches(&(shape.to_vec(), values(shape)), encoder);
    let n = h * w;
    let (n_tokens, features) = match encoder.extras.learned_rows.len() {
        // Learned rows are counted behind the patches, and stand on either side of them.
        2 => {
            let places = std::iter::once(n).chain(0..n).chain([n + 1]).collect();
            (n + 2, Features::Tiles { patches, rows: TileRows { places, weights: Vec::new() } })
        }
        _ => (n, Features::Patches(patches)),
    };
    EncoderInput { extent: Extent::Grid { t: 1, h, w }, n_tokens, features }
}

/// The item of a case with one tower.
fn input(json: &Value, encoder: &EncoderSpec) -> EncoderInput {
    let given = json["input"].as_object().expect("an input");
    let n_rows = json["item"][1].as_u64().or(json["n_rows"].as_u64()).map(|n| n as u32);
    let [kind, ref shape] =
        ["tokens", "mel", "chunks", "samples", "patches", "planes", "views", "tile", "tiles", "captioned"]
            .iter()
            .find_map(|kind| given.get(*kind).map(|shape| [Value::from(*kind), shape.clone()]))
            .expect("a kind of input");
    let shape = list(shape);
    let known = || n_rows.expect("a number of rows");
    let (extent, n_tokens, features) = match kind.as_str().unwrap_or_default() {
        "tokens" => {
            let ids: Vec<u32> = shape.iter().map(|id| *id as u32).collect();
            (Extent::Tokens, ids.len() as u32, Features::Tokens(ids))
        }
        "mel" => {
            let n_frames = shape[1] as u32;
            let features = log_mel(encoder, values(&shape), n_frames);
            (Extent::windows(1, 0), n_rows.unwrap_or(n_frames / 2), features)
        }
        "chunks" => {
            let n_valid = (shape[0] * shape[2]) as u32;
            (Extent::windows(1, 0), known(), Features::MaskedMel { mel: values(&shape), n_valid })
        }
        "samples" => (Extent::windows(1, 0), known(), Features::Samples(values(&shape))),
        "patches" => {
            let [t, h, w] = list(&given["grid"])[..] else { panic!("a grid") };
            let extent = Extent::Grid { t: t as u32, h: h as u32, w: w as u32 };
            (extent, known(), Features::Patches(values(&shape)))
        }
        "tile" => {
            let StemSpec::Tiles(tiles) = &encoder.stem else { panic!("tiles") };
            let patches = tile_patches(&values(&shape), [shape[2], tiles.patch[1]]);
            (square(tiles.side), known(), Features::Patches(patches))
        }
        "tiles" => {
            let [down, across] = list(&given["grid"])[..] else { panic!("a grid") };
            return tiles(encoder, shape, [down, across]);
        }
        "captioned" => {
            let tokens = list(&given["text"]).into_iter().map(|id| id as u32).collect();
            let extent = Extent::Grid { t: 1, h: shape[2] as u32, w: shape[3] as u32 };
            let values = values(&shape);
            let patches = patches(&(shape, values), encoder);
            (extent, known(), Features::Captioned { patches, tokens })
        }
        kind => image(encoder, kind, shape, known()),
    };
    EncoderInput { extent, n_tokens, features }
}

/// A window of log-mel, as the stem reads it.
fn log_mel(encoder: &EncoderSpec, mel: Vec<f32>, n_frames: u32) -> Features {
    match encoder.stem {
        StemSpec::Mel { windows: MelWindows::Masked, .. } => Features::MaskedMel { mel, n_valid: n_frames },
        _ => Features::Mel(mel),
    }
}

/// A whole image and `down` by `across` tiles of it, which it fills: rows of the whole, then lines over all tiles, each with the
/// learned row at its end.
fn tiles(encoder: &EncoderSpec, shape: Vec<usize>, [down, across]: [usize; 2]) -> EncoderInput {
    let StemSpec::PrefixedPatches { grid: [grid, _], .. } = encoder.stem else { panic!("a tower of tiles") };
    let n_of_tile = grid * grid;
    let place = |y: usize, x: usize| {
        let tile = 1 + y / grid * across + x / grid;
        (tile * n_of_tile + y % grid * grid + x % grid) as u32
    };
    let newline = (shape[0] * n_of_tile) as u32;
    let line = |y| (0..across * grid).map(move |x| place(y, x)).chain([newline]);
    let places: Vec<u32> = (0..n_of_tile as u32).chain((0..down * grid).flat_map(line)).collect();
    let values = values(&shape);
    let patches = patches(&(shape, values), encoder);
    EncoderInput {
        extent: Extent::Grid { t: 1, h: (down * grid) as u32, w: (across * grid) as u32 },
        n_tokens: places.len() as u32,
        features: Features::Tiles { patches, rows: TileRows { places, weights: Vec::new() } },
    }
}

/// An image in planes.
fn image(encoder: &EncoderSpec, kind: &str, shape: Vec<usize>, n_rows: u32) -> (Extent, u32, Features) {
    let side = encoder.stem.patch_side().expect("patches");
    let [h, w] = [shape[2] / side, shape[3] / side].map(|n| n as u32);
    let values = values(&shape);
    let patches = patches(&(shape, values), encoder);
    let rows = TileRows::whole(n_rows);
    let features = match encoder.stem {
        _ if kind == "views" => Features::Views { patches, sides: vec![w], rows },
        StemSpec::PrefixedPatches { .. } => Features::Tiles { patches, rows },
        _ => Features::Patches(patches),
    };
    (Extent::Grid { t: 1, h, w }, n_rows, features)
}
