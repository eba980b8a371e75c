//! A golden case: its model, its encoder outputs, and its requests with the reference's completions.

use safetensors::SafeTensors;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use triptych_core::item::from_f32;
use triptych_core::sampling::{BeamParams, EarlyStopping, SamplingParams};
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, ItemIdx, Modality, TenantId,
};
use triptych_engine::{SequenceId, SequenceRequest};
use triptych_models::decoder::DecoderInfo;
use triptych_models::prompt::{CrossInput, ItemSpan, OutputKind, PreparedSequence};
use triptych_models::rules::LogitRules;
use triptych_models::{LoadFormat, Model, ModelSource};

/// `matrix.json`.
#[derive(Deserialize)]
struct Matrix {
    rows: Vec<String>,
    requests: Vec<Request>,
}

/// One way to ask.
#[derive(Clone, Deserialize)]
pub struct Request {
    /// Encoder output that it cross-attends to.
    pub rows: Option<usize>,
    pub prompt: Vec<u32>,
    /// First token that sees the encoder output.
    #[serde(default)]
    pub first_token: u32,
    /// Of several encoder outputs that it cross-attends to the index and the first token of each, in the place of `rows`.
    #[serde(default)]
    pub images: Vec<(usize, u32)>,
    /// Encoder outputs among the tokens.
    #[serde(default)]
    pub spans: Vec<Span>,
    /// Tensor of positions; without it they count up.
    pub positions: Option<String>,
    pub next_position: Option<u32>,
    pub end_tokens: Vec<u32>,
    #[serde(default)]
    pub forced: Vec<(i32, u32)>,
    #[serde(default)]
    pub suppress: Vec<u32>,
    #[serde(default)]
    pub begin_suppress: Vec<u32>,
    pub max_new_tokens: u32,
    pub greedy: Vec<u32>,
    pub beam4: Beam4,
    pub next_logits: String,
}

#[derive(Clone, Deserialize)]
pub struct Span {
    pub rows: usize,
    pub first_token: u32,
    #[serde(default)]
    pub first_row: u32,
    pub n_rows: Option<u32>,
}

#[derive(Clone, Deserialize)]
pub struct Beam4 {
    pub length_penalty: f32,
    pub early_stopping: serde_json::Value,
    pub max_new_tokens: u32,
    pub answers: Vec<BeamCompletion>,
}

#[derive(Clone, Deserialize)]
pub struct BeamCompletion {
    pub tokens: Vec<u32>,
}

pub struct Case {
    pub name: String,
    pub model: Model,
    pub outputs: Vec<EncoderOutput>,
    pub requests: Vec<Request>,
    tensors: Vec<u8>,
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Names of all golden cases that have a model, in order.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(golden()).expect("the golden files");
    let dirs = entries.map(|e| e.expect("an entry").path()).filter(|p| p.join("model/config.json").exists());
    let mut names: Vec<String> =
        dirs.filter_map(|p| p.file_name().map(|n| n.to_string_lossy().into_owned())).collect();
    names.sort();
    names
}

/// Every golden case.
pub fn cases() -> Vec<Case> {
    let cases: Vec<Case> = names().iter().map(|name| Case::open(name)).collect();
    assert!(cases.len() >= 6, "{} cases", cases.len());
    cases
}

impl Case {
    /// The case of a name.
    pub fn open(name: &str) -> Self {
        let dir = golden().join(name);
        let matrix: Matrix = serde_json::from_slice(&read(&dir.join("matrix.json")))
            .unwrap_or_else(|e| panic!("{name}/matrix.json: {e}"));
        let source =
            ModelSource { dir: dir.join("model"), name: None, format: LoadFormat::Safetensors, packed: None };
        let model = Model::open(&source).unwrap_or_else(|e| panic!("{name}: {e}"));
        let tensors = read(&dir.join("expected.safetensors"));
        let mut case =
            Self { name: name.to_owned(), model, outputs: Vec::new(), requests: matrix.requests, tensors };
        case.outputs = matrix.rows.iter().enumerate().map(|(i, rows)| case.output(i as u8, rows)).collect();
        assert!(case.requests.len() >= 5, "{name} has {} requests", case.requests.len());
        case
    }

    /// True if layers keep recurrent states.
    pub fn is_recurrent(&self) -> bool {
        self.model.spec().decoder.stack.recurrent().is_some()
    }

    fn output(&self, key: u8, rows: &str) -> EncoderOutput {
        let (shape, values) = self.values(rows);
        let item = EncodedItem {
            key: ContentKey::from_bytes([key; 32]),
            fingerprint: Fingerprint::from_bytes([1; 32]),
            modality: Modality::Image,
            n_tokens: shape[0] as u32,
            hidden: shape[1] as u32,
            dtype: DType::F32,
            extent: Extent::Tokens,
            checksum: [0; 32],
        };
        EncoderOutput::seal(item, from_f32(&values, DType::F32)).expect("as many bytes as its metadata say")
    }

    /// Shape and values of an f32 tensor.
    pub fn values(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let file = SafeTensors::deserialize(&self.tensors).expect("expected.safetensors is whole");
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{}: {name}: {e}", self.name));
        let values = tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (tensor.shape().to_vec(), values)
    }

    fn positions(&self, name: &str) -> Vec<[u32; 3]> {
        let file = SafeTensors::deserialize(&self.tensors).expect("expected.safetensors is whole");
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{}: {name}: {e}", self.name));
        let n = tensor.shape()[1];
        let ids: Vec<u32> =
            tensor.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect();
        (0..n).map(|i| [ids[i], ids[n + i], ids[2 * n + i]]).collect()
    }

    /// Logits after the prompt of `request`, as the family's rules leave them.
    pub fn next_logits(&self, request: &Request) -> Vec<f32> {
        let mut logits = self.values(&request.next_logits).1;
        request.rules().apply(&[], &mut logits);
        logits
    }

    /// A request whose first completion is called `id`.
    pub fn arrival(&self, request: &Request, id: u64, sampling: SamplingParams) -> SequenceRequest {
        let n_prompt = request.prompt.len() as u32;
        let positions = match &request.positions {
            Some(name) => {
                let known = self.positions(name);
                // A prompt that goes on past the golden one counts up to where its completion begins.
                let n_rest = n_prompt - known.len() as u32;
                let next = request.next_position.expect("it comes with the positions");
                let rest = (next - n_rest..next).map(|p| [p; 3]);
                known.iter().copied().chain(rest).collect()
            }
            None => (0..n_prompt).map(|p| [p; 3]).collect(),
        };
        // A span that begins with a later row goes on with the item of the span before.
        let firsts: Vec<usize> = request.spans.iter().filter(|s| s.first_row == 0).map(|s| s.rows).collect();
        let mut n_items = 0;
        let spans = request.spans.iter().map(|span| {
            n_items += u32::from(span.first_row == 0);
            ItemSpan {
                item: ItemIdx(n_items - 1),
                first_row: span.first_row,
                first_token: span.first_token,
                n_tokens: span.n_rows.unwrap_or_else(|| self.outputs[span.rows].item().n_tokens),
            }
        });
        let spans: Vec<ItemSpan> = spans.collect();
        let seen: Vec<(usize, u32)> = request.cross().collect();
        // Rows of an item that is among the tokens too are not another's.
        let shared = |rows: usize| firsts.iter().position(|first| *first == rows);
        let more: Vec<usize> =
            seen.iter().map(|(rows, _)| *rows).filter(|rows| shared(*rows).is_none()).collect();
        let n_spanned = firsts.len();
        let place = |rows: usize| {
            let further = || more.iter().position(|other| *other == rows).map(|i| n_spanned + i);
            ItemIdx(shared(rows).or_else(further).unwrap_or_default() as u32)
        };
        let items: Vec<usize> = firsts.iter().chain(&more).copied().collect();
        SequenceRequest {
            ids: (id..id + u64::from(sampling.n)).map(SequenceId).collect(),
            prepared: PreparedSequence {
                tokens: request.prompt.clone(),
                positions,
                next_position: request.next_position.unwrap_or(n_prompt),
                spans,
                cross: seen
                    .iter()
                    .map(|(rows, first_token)| CrossInput {
                        item: place(*rows),
                        first_row: 0,
                        n_rows: self.outputs[*rows].item().n_tokens,
                        first_token: *first_token,
                    })
                    .collect(),
                rules: request.rules(),
                end_tokens: request.end_tokens.clone(),
                output: OutputKind::Text,
            },
            encoder_tokens: [].into(),
            items: items.iter().map(|i| self.outputs[*i].item().clone()).collect(),
            sampling,
            constraint: None,
            priority: 0,
            tenant: TenantId::SHARED,
            adapter: None,
            deadline: Instant::now() + Duration::from_secs(3600),
            resumed: None,
        }
    }

    /// Requests as the test numbers them.
    pub fn numbered(&self) -> impl Iterator<Item = (u64, &Request)> {
        (0..).zip(&self.requests)
    }
}

impl Request {
    /// Encoder outputs that it cross-attends to, with their first tokens.
    pub fn cross(&self) -> impl Iterator<Item = (usize, u32)> {
        self.rows.map(|rows| (rows, self.first_token)).into_iter().chain(self.images.iter().copied())
    }

    fn rules(&self) -> LogitRules {
        let steps = self.forced.iter().filter(|f| f.0 >= 0);
        let last = self.forced.iter().filter(|f| f.0 < 0).map(|f| f.1);
        LogitRules {
            suppress: self.suppress.as_slice().into(),
            begin_suppress: self.begin_suppress.as_slice().into(),
            steps: steps.map(|f| [f.1].into()).collect(),
            last: last.collect(),
            ..LogitRules::default()
        }
    }

    /// The reference's greedy completion without its end token, and whether there was one.
    pub fn completion(&self) -> (&[u32], bool) {
        without_end(&self.greedy, &self.end_tokens)
    }

    /// Greedy, as the reference was asked.
    pub fn greedy(&self) -> SamplingParams {
        SamplingParams {
            temperature: 0.0,
            max_tokens: Some(self.max_new_tokens),
            ..SamplingParams::default()
        }
    }

    /// Greedy past every end, for runs that are compared with one another.
    pub fn long(&self, info: &DecoderInfo) -> SamplingParams {
        let room = (info.max_context - self.prompt.len()).min(LONG);
        SamplingParams { ignore_eos: true, max_tokens: Some(room as u32), ..self.greedy() }
    }

    /// Beam search, as the reference was asked.
    pub fn beams(&self) -> SamplingParams {
        let early_stopping = match &self.beam4.early_stopping {
            serde_json::Value::Bool(true) => EarlyStopping::Immediately,
            serde_json::Value::Bool(false) => EarlyStopping::Heuristic,
            _ => EarlyStopping::Never,
        };
        let params = BeamParams { width: 4, length_penalty: self.beam4.length_penalty, early_stopping };
        SamplingParams {
            beams: Some(params),
            n: self.beam4.answers.len() as u32,
            max_tokens: Some(self.beam4.max_new_tokens),
            ..self.greedy()
        }
    }

    /// Without rules that depend on the place in the completion.
    pub fn is_plain(&self) -> bool {
        self.forced.is_empty() && self.begin_suppress.is_empty()
    }

    /// The request whose prompt goes on with `tokens`.
    pub fn continued(&self, tokens: &[u32]) -> Self {
        let next = self.next_position.unwrap_or(self.prompt.len() as u32) + tokens.len() as u32;
        let prompt = [self.prompt.as_slice(), tokens].concat();
        Self { prompt, next_position: Some(next), ..self.clone() }
    }
}

/// Tokens of a long completion: enough for three blocks.
pub const LONG: usize = 70;

/// Tokens without the end token, and whether there was one.
pub fn without_end<'a>(tokens: &'a [u32], ends: &[u32]) -> (&'a [u32], bool) {
    match tokens.split_last() {
        Some((last, rest)) if ends.contains(last) => (rest, true),
        _ => (tokens, false),
    }
}
