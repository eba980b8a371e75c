//! Encoder forwards captured as graphs, on the stand-in for the CUDA driver: rows are those without graphs to the bit,
//! whatever is in the batch and whatever was replayed before.
//!
//! In this build inputs, results and all memory of a graph are NaN before each replay (`poison` in
//! `kernels/src/cuda/graph.rs`).

use crate::case::{Case, cpu, cuda};
use crate::pipeline::wav;
use image::{DynamicImage, ImageFormat, RgbImage};
use std::io::Cursor;
use triptych_core::graph_stats::GraphStats;
use triptych_core::limits::Limits;
use triptych_core::{EncoderId, ItemOptions, Modality};
use triptych_cuda_standin::Standin;
use triptych_kernels::{Backend, Precision};
use triptych_models::encoder::{Encoder, EncoderGraphConfig};
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::spec::StemSpec;

/// A model of every kind of encoder that is captured.
const CASES: [(&str, Modality); 30] = [
    ("whisper_en_odd_heads", Modality::Audio),
    ("moonshine_small_f32", Modality::Audio),
    ("moonshine_narrow_rope_bf16", Modality::Audio),
    ("qwen2_audio_odd_heads", Modality::Audio),
    ("voxtral_odd_heads", Modality::Audio),
    ("qwen2_vl_odd_heads", Modality::Image),
    ("qwen2_5_vl_window56", Modality::Image),
    ("qwen2_5_vl_window112", Modality::Image),
    ("qwen2_5_vl_window56", Modality::Video),
    ("qwen3_vl_wide_heads", Modality::Image),
    ("qwen3_vl_one_level", Modality::Video),
    ("qwen3_5_tied", Modality::Image),
    ("llava_clip_llama", Modality::Image),
    ("llava_next_mistral", Modality::Image),
    ("smolvlm_split", Modality::Image),
    ("gemma3_pan_and_scan", Modality::Image),
    ("mistral3_merged", Modality::Image),
    ("glm_ocr_mrope", Modality::Image),
    ("trocr_vit", Modality::Image),
    ("trocr_beit", Modality::Image),
    ("vit_gpt2", Modality::Image),
    ("registers_larger", Modality::Image),
    ("donut_odd_padded", Modality::Image),
    ("mllama_small_f32", Modality::Image),
    ("cogagent_chat", Modality::Image),
    ("florence_windows", Modality::Image),
    ("florence_three_stages", Modality::Image),
    ("bart_odd_heads", Modality::Text),
    ("t5_odd_heads", Modality::Text),
    ("roberta2roberta_projected", Modality::Text),
];

/// Numbers of a seed.
fn random(seed: &mut u64, below: usize) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 11) as usize % below
}

/// An item of a modality; the size is in steps of a few output tokens.
fn item(modality: Modality, size: usize, seed: u64) -> Vec<u8> {
    let mut seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    match modality {
        Modality::Image => {
            let (width, height) = (40 + 28 * size as u32, 40 + 16 * (size as u32 % 3));
            let pixels = (0..3 * width * height).map(|_| random(&mut seed, 256) as u8).collect();
            let image = RgbImage::from_raw(width, height, pixels).expect("as many values as pixels");
            let mut file = Cursor::new(Vec::new());
            DynamicImage::ImageRgb8(image).write_to(&mut file, ImageFormat::Png).expect("a PNG");
            file.into_inner()
        }
        // A list of frames, as JPEGs.
        Modality::Video => {
            let (width, height) = (40 + 28 * size as u32, 56);
            let frame = |_| {
                let pixels = (0..3 * width * height).map(|_| random(&mut seed, 256) as u8).collect();
                let image = RgbImage::from_raw(width, height, pixels).expect("as many values as pixels");
                let mut file = Cursor::new(Vec::new());
                DynamicImage::ImageRgb8(image).write_to(&mut file, ImageFormat::Jpeg).expect("a JPEG");
                file.into_inner()
            };
            (0..2 + size).flat_map(frame).collect()
        }
        Modality::Audio => {
            let n_samples = 2_000 + 1_777 * size;
            let samples: Vec<f32> =
                (0..n_samples).map(|_| random(&mut seed, 2_000) as f32 / 2_000.0 - 0.5).collect();
            wav(&samples)
        }
        Modality::Text => {
            let words = ["a", "graph", "of", "tokens", "the", "padding"];
            let text: Vec<&str> = (0..=size).map(|_| words[random(&mut seed, words.len())]).collect();
            text.join(" ").into_bytes()
        }
    }
}

fn inputs(case: &Case, id: impl Into<EncoderId>, seed: u64) -> Vec<EncoderInput> {
    let (model, limits) = (case.model(), Limits::default());
    let id = id.into();
    let modality = id.modality;
    let (_, processor) = model.encoders().find(|(known, _)| *known == id).expect("an encoder");
    let prepare = |size: usize| {
        let bytes = item(modality, size, seed + size as u64);
        // Texts of three lengths.
        let prompt = processor.takes_prompt().then(|| "a graph ".repeat(1 + size / 2));
        let options = ItemOptions { prompt, ..ItemOptions::default() };
        processor.preprocess(modality, &bytes, &options, &limits).expect("an item")
    };
    (0..6).map(prepare).collect()
}

fn encoder<B: Backend>(case: &Case, id: impl Into<EncoderId>, backend: &B) -> Box<dyn Encoder> {
    case.model().load_encoder(id, backend).expect("encoder weights")
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|rows| rows.iter().map(|value| value.to_bits()).collect()).collect()
}

/// Budgets that the smaller items fit, and the largest alone does not.
fn budgets(inputs: &[EncoderInput]) -> Vec<usize> {
    let mut sizes: Vec<usize> = inputs.iter().map(|input| input.n_tokens as usize).collect();
    sizes.sort_unstable();
    let (smallest, below_largest) = (sizes[1], sizes[sizes.len() - 2]);
    let mut budgets = vec![smallest];
    while budgets[budgets.len() - 1] < below_largest {
        budgets.push(2 * budgets[budgets.len() - 1]);
    }
    if let Some(last) = budgets.last_mut() {
        *last = (*last).min(below_largest.max(smallest));
    }
    budgets
}

/// Output tokens that are computed of an item: of tiles all, learned rows not.
fn n_computed(case: &Case, input: &EncoderInput) -> usize {
    let Features::Tiles { patches, .. } = &input.features else { return input.n_tokens as usize };
    let model = case.model();
    let encoder = model.spec().encoder.as_ref().expect("an encoder");
    let StemSpec::PrefixedPatches { grid, .. } = encoder.stem else { panic!("tiles of another stem") };
    let of_tile = grid[0] * grid[1];
    patches.len() / (of_tile * encoder.stem.patch_values()) * encoder.image_tokens(grid).expect("a tile")
}

fn replays_are_eager(precision: Precision, cases: &[(&str, Modality)]) {
    for &(name, modality) in cases {
        let case = Case::open(name);
        for (id, _) in case.model().encoders().filter(|(id, _)| id.modality == modality) {
            replays_of_an_encoder_are_eager(precision, name, (&case, id));
        }
    }
}

fn replays_of_an_encoder_are_eager(precision: Precision, name: &str, (case, id): (&Case, EncoderId)) {
    let backend = cuda(precision);
    let mut eager = encoder(case, id, &backend);
    let mut graphed = encoder(case, id, &backend);
    let items = inputs(case, id, 1);
    let config =
        EncoderGraphConfig { budgets: budgets(&items), max_items: 3, ..EncoderGraphConfig::default() };
    graphed.use_graphs(&config);
    let mut seed = 0x5eed;
    for round in 0..3 {
        let n_items = 1 + random(&mut seed, 4);
        // Other values in each round, and other sizes in each place.
        let items = inputs(case, id, 100 * round);
        let batch: Vec<&EncoderInput> = (0..n_items).map(|_| &items[random(&mut seed, 6)]).collect();
        let expected = eager.encode(&batch).expect("a batch");
        let mut shares = 0;
        let rows = graphed.encode_in_parts(&batch, &mut |tokens| shares += tokens).expect("a batch");
        let sizes: Vec<u32> = batch.iter().map(|input| input.n_tokens).collect();
        assert!(rows.iter().flatten().all(|value| value.is_finite()), "{name} {sizes:?}");
        assert_eq!(bits(&rows), bits(&expected), "{name} {precision:?} {sizes:?} in {:?}", config.budgets);
        let computed: usize = batch.iter().map(|input| n_computed(case, input)).sum();
        assert_eq!(shares, computed, "{name}: shares of {sizes:?}");
    }
    let stats = graphed.graph_stats();
    assert!(stats.replays > 0 && stats.graphs > 0 && stats.n_bytes > 0, "{name}: {stats:?}");
    assert!(stats.padding_tokens < stats.tokens, "{name}: {stats:?}");
    assert_eq!(eager.graph_stats(), GraphStats::default());
}

/// Every case of a modality.
fn replays_of(modality: Modality) {
    let cases: Vec<_> = CASES.into_iter().filter(|case| case.1 == modality).collect();
    replays_are_eager(Precision::F32, &cases);
}

#[test]
fn replays_of_images_give_the_rows_of_eager_forwards() {
    replays_of(Modality::Image);
}

#[test]
fn replays_of_audio_give_the_rows_of_eager_forwards() {
    replays_of(Modality::Audio);
}

#[test]
fn replays_of_texts_give_the_rows_of_eager_forwards() {
    replays_of(Modality::Text);
}

#[test]
fn replays_in_bf16_give_the_rows_of_eager_forwards() {
    let cases = [
        "whisper_en_odd_heads",
        "moonshine_small_f32",
        "qwen2_5_vl_window56",
        "qwen3_vl_wide_heads",
        "trocr_beit",
        "florence_windows",
    ];
    let cases: Vec<_> = CASES.into_iter().filter(|(name, _)| cases.contains(name)).collect();
    replays_are_eager(Precision::Bf16, &cases);
}

#[test]
fn batches_between_budgets_are_padded_and_others_run_without_a_graph() {
    let case = Case::open("qwen2_vl_odd_heads");
    let backend = cuda(Precision::F32);
    let mut encoder = encoder(&case, Modality::Image, &backend);
    let items = inputs(&case, Modality::Image, 3);
    let size = |i: usize| items[i].n_tokens as usize;
    let budget = size(0) + size(1);
    encoder.use_graphs(&EncoderGraphConfig {
        budgets: vec![budget],
        max_items: 2,
        ..EncoderGraphConfig::default()
    });
    encoder.encode(&[&items[0], &items[1]]).expect("a batch that fills the budget");
    let full = encoder.graph_stats();
    assert_eq!((full.replays, full.eager, full.padding_tokens, full.graphs), (1, 0, 0, 1));
    encoder.encode(&[&items[0]]).expect("a batch that does not");
    let padded = encoder.graph_stats();
    assert_eq!((padded.replays, padded.tokens), (2, 2 * budget as u64));
    assert_eq!(padded.padding_tokens, size(1) as u64);
    // Three items are one more than a graph takes; the largest is larger than the budget.
    encoder.encode(&[&items[0], &items[0], &items[0], &items[5]]).expect("a batch");
    let last = encoder.graph_stats();
    assert!(size(5) > budget);
    assert_eq!((last.replays, last.eager, last.graphs), (4, 1, 1));
    assert_eq!(last.n_bytes, full.n_bytes, "a graph's memory does not grow");
}

#[test]
fn a_capture_that_fails_leaves_its_batches_to_eager_forwards() {
    let case = Case::open("qwen2_vl_odd_heads");
    let items = inputs(&case, Modality::Image, 3);
    let config = EncoderGraphConfig { budgets: vec![64], max_items: 4, ..EncoderGraphConfig::default() };
    for (entry, nth) in [
        ("cuStreamBeginCapture_v2", 1),
        ("cuGraphInstantiateWithFlags", 1),
        ("cuGraphLaunch", 1),
        ("cuMemAlloc_v2", 3),
        ("cuLaunchKernel", 5),
    ] {
        let backend = cuda(Precision::F32);
        let mut plain = encoder(&case, Modality::Image, &backend);
        let mut graphed = encoder(&case, Modality::Image, &backend);
        graphed.use_graphs(&config);
        let expected = plain.encode(&[&items[0]]).expect("an image");
        // `CUDA_ERROR_INVALID_VALUE`
        Standin::fast().fail(backend.ordinal(), entry, nth, 1);
        for _ in 0..2 {
            let rows = graphed.encode(&[&items[0]]).expect("an image");
            assert_eq!(bits(&rows), bits(&expected), "{entry}");
        }
        let stats = graphed.graph_stats();
        assert_eq!((stats.replays, stats.eager, stats.graphs, stats.n_bytes), (0, 2, 0, 0), "{entry}");
    }
}

#[test]
fn graphs_make_room_for_a_forward_that_finds_none() {
    let case = Case::open("qwen2_vl_odd_heads");
    let items = inputs(&case, Modality::Image, 3);
    let backend = cuda(Precision::F32);
    let mut plain = encoder(&case, Modality::Image, &cuda(Precision::F32));
    let mut graphed = encoder(&case, Modality::Image, &backend);
    graphed.use_graphs(&EncoderGraphConfig {
        budgets: vec![items[0].n_tokens as usize],
        max_items: 4,
        ..EncoderGraphConfig::default()
    });
    let mut check = |item: &EncoderInput, graphs: usize| {
        let expected = plain.encode(&[item]).expect("an image");
        assert_eq!(bits(&graphed.encode(&[item]).expect("an image")), bits(&expected));
        assert_eq!(graphed.graph_stats().graphs, graphs);
    };
    check(&items[0], 1);
    // `CUDA_ERROR_OUT_OF_MEMORY` at the first allocation of the larger image, and when pieces of other sizes were freed.
    for nth in [1, 2] {
        Standin::fast().fail(backend.ordinal(), "cuMemAlloc_v2", nth, 2);
    }
    check(&items[5], 0);
    check(&items[0], 0);
}

#[test]
fn encoders_on_the_cpu_run_without_graphs() {
    let config = EncoderGraphConfig::default();
    let case = Case::open("qwen2_vl_odd_heads");
    let items = inputs(&case, Modality::Image, 3);
    let batch: Vec<&EncoderInput> = items.iter().collect();
    let backend = cpu(Precision::F32);
    let expected = encoder(&case, Modality::Image, &backend).encode(&batch).expect("a batch");
    let mut on_cpu = encoder(&case, Modality::Image, &backend);
    on_cpu.use_graphs(&config);
    assert_eq!(bits(&on_cpu.encode(&batch).expect("a batch")), bits(&expected));
    assert_eq!(on_cpu.graph_stats(), GraphStats::default());
}

#[test]
fn forwards_run_without_a_graph_once_the_memory_of_graphs_is_taken() {
    let case = Case::open("qwen2_vl_odd_heads");
    let mut encoder = encoder(&case, Modality::Image, &cuda(Precision::F32));
    let items = inputs(&case, Modality::Image, 3);
    let [small, large] = [0, 5].map(|i| items[i].n_tokens as usize);
    encoder.use_graphs(&EncoderGraphConfig { budgets: vec![small, large], max_items: 1, max_bytes: 1 });
    for item in [&items[0], &items[5], &items[0]] {
        encoder.encode(&[item]).expect("an image");
    }
    let stats = encoder.graph_stats();
    // The first was captured when nothing was taken.
    assert_eq!((stats.replays, stats.eager, stats.graphs), (2, 1, 1), "{stats:?}");
}
