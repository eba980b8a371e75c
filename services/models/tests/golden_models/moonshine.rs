//! Moonshine cases.

use crate::case::{
    Case, assert_bf16_close, assert_logits_close, assert_rows_close, assert_within, cpu, cuda, max_error,
};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, greedy, teacher_forced};
use crate::pipeline::{encoded, wav};
use triptych_core::limits::Limits;
use triptych_core::prompt::{LongForm, Prompt, SpeechFallback, SpeechKind, SpeechTask, TextOrTokens};
use triptych_core::{Extent, ItemOptions, Modality};
use triptych_kernels::Backend;
use triptych_kernels::Precision;
use triptych_models::ItemError;
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::prompt::OutputKind;

const CASES: [&str; 3] = ["moonshine_small_f32", "moonshine_deep_f16", "moonshine_narrow_rope_bf16"];

/// Waveforms of a case.
fn waveforms(case: &Case) -> Vec<Vec<f32>> {
    let (_, values) = case.values("waveforms_u8");
    let mut rest = values.as_slice();
    numbers(case, "n_samples")
        .into_iter()
        .map(|n| {
            let (own, after) = rest.split_at(n);
            rest = after;
            own.iter().map(|q| (q - 128.0) / 128.0).collect()
        })
        .collect()
}

fn numbers(case: &Case, key: &str) -> Vec<usize> {
    serde_json::from_value(case.json[key].clone()).expect("integers")
}

fn prepare(case: &Case, samples: &[f32]) -> Result<EncoderInput, ItemError> {
    let options = ItemOptions::default();
    let limits = Limits::default();
    case.model().preprocess().preprocess(Modality::Audio, &wav(samples), &options, &limits)
}

/// Encoder inputs of a case, by the processor.
fn inputs(case: &Case) -> Vec<EncoderInput> {
    waveforms(case).iter().map(|samples| prepare(case, samples).expect("a WAV")).collect()
}

fn sequence(prompt: &[u32], cross: Vec<f32>, hidden: usize) -> Sequence {
    Sequence {
        positions: (0..prompt.len() as u32).map(|i| [i; 3]).collect(),
        next_position: prompt.len() as u32,
        prompt: prompt.to_vec(),
        cross,
        hidden,
        adapter: None,
        embeds: vec![],
    }
}

fn encode(encoder: &mut dyn Encoder, input: &EncoderInput) -> Vec<f32> {
    encoder.encode(&[input]).expect("golden audio fits").remove(0)
}

/// Encoder states of inputs 0 and 5, and teacher-forced logits over the first.
fn states_and_logits<B: Backend>(case: &Case, backend: &B) -> ([Vec<f32>; 2], Vec<f32>) {
    let model = case.model();
    let mut encoder = model.load_encoder(Modality::Audio, backend).expect("encoder weights");
    let mut decoder = model.load_decoder(backend).expect("decoder weights");
    let inputs = inputs(case);
    let states = [0, 5].map(|i: usize| encode(&mut *encoder, &inputs[i]));
    let (_, tokens) = case.ids("decoder_input_ids");
    let logits = teacher_forced(&mut *decoder, &sequence(&tokens, states[0].clone(), encoder.hidden()));
    (states, logits)
}

fn matches_reference<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        let (states, logits) = states_and_logits(&case, backend);
        let what = |part: &str| format!("{name} {} {part}", backend.name());
        assert_rows_close(&what("states"), &states[0], &case.values("encoder_last_hidden_state").1);
        assert_rows_close(&what("longer states"), &states[1], &case.values("encoder_last_hidden_state.5").1);
        assert_logits_close(&what("logits"), &logits, &case.values("logits").1);
    }
}

fn bf16_is_as_near_as_the_references<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        let (_, logits) = states_and_logits(&case, backend);
        let [exact, bf16] = ["logits", "logits_bf16"].map(|t| case.values(t).1);
        assert_bf16_close(&format!("{name} logits"), &logits, &exact, &bf16);
    }
}

/// Inputs of eight lengths, encoded alone and together, decoded alone and together.
fn greedy_tokens_match<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let case = Case::open(name);
        let model = case.model();
        let mut encoder = model.load_encoder(Modality::Audio, backend).expect("encoder weights");
        let mut decoder = model.load_decoder(backend).expect("decoder weights");
        let prompt: Vec<u32> = serde_json::from_value(case.json["prompt"].clone()).expect("a prompt");
        let inputs = inputs(&case);
        let together = encoder.encode(&inputs.iter().collect::<Vec<_>>()).expect("golden audio fits");
        for (input, rows) in inputs.iter().zip(&together) {
            assert_eq!(&encode(&mut *encoder, input), rows, "{name}: rows depend on the batch");
        }
        let sequences: Vec<Sequence> =
            together.into_iter().map(|rows| sequence(&prompt, rows, encoder.hidden())).collect();
        let expected = case.greedy_tokens();
        let mix = Mix { stagger: 3, chunk: 2 };
        let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone: usize::MAX, mix };
        assert_greedy(backend, &mut *decoder, name, check);
    }
}

crate::case::tests_on_every_back_end!();

#[test]
fn cpu_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&CASES, &cpu(Precision::F32));
}

#[test]
fn cuda_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&CASES[..1], &cuda(Precision::F32));
}

#[test]
fn audio_becomes_the_samples_of_the_reference() {
    for name in CASES {
        let case = Case::open(name);
        let inputs = inputs(&case);
        let rows = numbers(&case, "n_rows");
        assert_eq!(inputs.iter().map(|i| i.n_tokens as usize).collect::<Vec<_>>(), rows, "{name}");
        let Features::Samples(samples) = &inputs[0].features else { panic!("samples") };
        // Only the case that normalises changes the samples.
        let expected =
            if name == CASES[1] { case.values("input_values").1 } else { waveforms(&case).remove(0) };
        assert_within(name, max_error(samples, &expected), 1e-5);
    }
}

#[test]
fn a_task_becomes_the_tokens_of_the_reference() {
    let case = Case::open(CASES[0]);
    let model = case.model();
    let backend = cpu(Precision::F32);
    let mut encoder = model.load_encoder(Modality::Audio, &backend).expect("encoder weights");
    let mut decoder = model.load_decoder(&backend).expect("decoder weights");
    let input = inputs(&case).remove(5);
    let items = [encoded(&input, Modality::Audio, encoder.hidden())];
    let prepared = model.prompts().prepare(&Prompt::Speech(SpeechTask::default()), &items).expect("a task");
    let cross = prepared[0].cross[0];
    assert_eq!((prepared.len(), cross.first_row, cross.n_rows), (1, 0, input.n_tokens));
    let rows = encode(&mut *encoder, &input);
    let expected = case.greedy_tokens().swap_remove(5);
    let sequence = sequence(&prepared[0].tokens, rows, encoder.hidden());
    assert_eq!(greedy(&mut *decoder, &[sequence], expected.len(), Mix::PLAIN), [expected]);
}

#[test]
fn a_long_sound_is_windows_of_which_the_last_is_as_long_as_it_is() {
    let case = Case::open(CASES[0]);
    let waveform = waveforms(&case).swap_remove(5);
    let long = |n: usize| waveform.iter().copied().cycle().take(n).collect::<Vec<f32>>();
    let prompts = case.model().prompts();
    let check = |n_samples: usize, expect: &[(u32, u32)]| {
        let input = prepare(&case, &long(n_samples)).expect("a WAV");
        let items = [encoded(&input, Modality::Audio, 24)];
        let prepared = prompts.prepare(&Prompt::Speech(SpeechTask::default()), &items).expect("a task");
        let windows: Vec<(u32, u32)> =
            prepared.iter().flat_map(|p| &p.cross).map(|c| (c.first_row, c.n_rows)).collect();
        assert_eq!(windows, expect, "{n_samples} samples");
        assert_eq!(input.n_tokens, expect.iter().map(|(_, n)| n).sum::<u32>());
    };
    check(480_000, &[(0, 1248)]);
    // Too little for a row is the padding of a codec.
    check(480_800, &[(0, 1248)]);
    check(480_895, &[(0, 1248), (1248, 1)]);
    check(966_400, &[(0, 1248), (1248, 1248), (2496, 15)]);
}

#[test]
fn less_than_a_row_is_refused_with_its_length() {
    let refused = prepare(&Case::open(CASES[0]), &[0.5; 894]).expect_err("too short").to_string();
    assert_eq!(refused, "the audio is 55.9 ms long, this model needs at least 55.9 ms");
    prepare(&Case::open(CASES[0]), &[0.5; 895]).expect("one row");
}

#[test]
fn unsupported_options_are_refused_by_name() {
    let case = Case::open(CASES[0]);
    let prompts = case.model().prompts();
    let input = inputs(&case).remove(0);
    let items = [encoded(&input, Modality::Audio, 24)];
    let check = |task: SpeechTask, expect: &str| {
        let text = prompts.prepare(&Prompt::Speech(task), &items).expect_err(expect).to_string();
        assert!(text.contains(expect), "{text}");
    };
    check(SpeechTask { kind: SpeechKind::Translate, ..Default::default() }, "does not translate");
    let german = SpeechTask { language: Some("de".into()), ..Default::default() };
    check(german, "language is \"de\", this model knows the one that it was trained on: allowed is \"en\"");
    check(SpeechTask { word_timestamps: true, ..Default::default() }, "no times of words");
    check(SpeechTask { long_form: LongForm::Sequential, ..Default::default() }, "independent windows");
    let before = Some(TextOrTokens::Text("before".into()));
    check(SpeechTask { prompt: before.clone(), ..Default::default() }, "no prompt");

    // A segment is a window, so segment times need nothing of the model.
    let told = SpeechTask { language: Some("en".into()), timestamps: true, ..Default::default() };
    let plain = prompts.prepare(&Prompt::Speech(SpeechTask::default()), &items).expect("a task");
    assert_eq!(prompts.prepare(&Prompt::Speech(told), &items).expect("a task"), plain);
    let OutputKind::Speech { offset_s, end_s, timestamps: false } = plain[0].output else {
        panic!("{:?}", plain[0].output)
    };
    assert_eq!(offset_s, 0.0);
    assert!((end_s - waveforms(&case)[0].len() as f64 / 16_000.0).abs() < 1e-3, "{end_s}");

    let judged = SpeechTask { fallback: Some(SpeechFallback::default()), ..Default::default() };
    prompts
        .prepare(&Prompt::Speech(judged), &items)
        .expect("a fallback over temperatures is no matter of the model");
    let facts = prompts.speech().expect("a speech model");
    assert_eq!((facts.row_ms, facts.window_ms, facts.first_time), (24, 30_000, None));
    let prefixed = SpeechTask { prefix: before, ..Default::default() };
    let prepared = prompts.prepare(&Prompt::Speech(prefixed), &items).expect("a prefix");
    assert!(prepared[0].tokens.len() > 1, "{:?}", prepared[0].tokens);
    let none = prompts.prepare(&Prompt::Speech(SpeechTask::default()), &[]).expect_err("no audio");
    assert!(none.to_string().contains("one audio item"), "{none}");
    let mut wrong = items[0].clone();
    wrong.extent = Extent::windows(2, 60_000);
    let wrong = prompts.prepare(&Prompt::Speech(SpeechTask::default()), &[wrong]).expect_err("wrong rows");
    assert!(wrong.to_string().contains("rows in 2 windows"), "{wrong}");
}
