//! Choosing on the device: rows of logits in f32, their changes, the choices, log-probabilities. One upload, one download.

use std::sync::Arc;

use super::element::Element;
use super::memory::Piece;
use super::queue::{Argument, Launch, Queue};
use super::staging::Download;
use super::tensor::{CudaStep, CudaTensor};
use crate::check;
use crate::ops::{
    CarriedToken, Choice, Choices, ChooseBatch, ChooseRow, Indices, PendingChoices, Result, SampleError,
    TokenLogprobs, WholeRows,
};

/// Name of the op, for errors.
const OP: &str = "choose";

/// Threads of a block of these kernels.
const THREADS: u32 = 256;

/// Words of `Sampling`, `Edit` and `Choice` of `choose.cu`.
const SAMPLING_WORDS: usize = 6;
const EDIT_WORDS: usize = 4;
const CHOICE_WORDS: usize = 2;

/// `Status` of `choose.cu`.
const CHOSEN: u32 = 0;
const NOT_FINITE: u32 = 1;

/// Most bytes of whole rows that come down beside later work; more are fetched when they are waited for.
const MAX_BEGUN: usize = 16 << 20;

/// Choices under way.
#[derive(Debug)]
pub struct CudaPending {
    queue: Arc<Queue>,
    vocab: usize,
    /// Log-probabilities that each choice asks for.
    n_tops: Vec<Option<u32>>,
    /// Rows of choices and their results, if there are any.
    choices: Option<ChosenRows>,
    whole: Vec<u32>,
    rows: PendingRows,
}

/// Rows that choices were made from, and the results on their way.
#[derive(Debug)]
struct ChosenRows {
    /// In f32, after changes, `[n, vocab]`.
    logits: CudaTensor,
    /// `Choice` of each, then log-probabilities: of the chosen `[n]`, tokens and values of the top, `[n, n_top]` each.
    results: Piece,
    /// Top log-probabilities of a row, `None` without any.
    n_top: Option<usize>,
    download: Download,
}

/// Whole rows.
#[derive(Debug)]
enum PendingRows {
    /// One copy for each run of rows.
    Begun(Vec<Download>),
    /// Logits of all rows.
    Kept(CudaTensor),
}

/// Begins to answer a checked batch.
pub(super) fn submit(queue: &Arc<Queue>, mut logits: CudaTensor, batch: &ChooseBatch) -> Result<CudaPending> {
    let vocab = logits.dims().1;
    let choices = match &batch.choices[..] {
        [] => None,
        asked => {
            let arrays = Arrays::new(asked);
            let words = queue.upload(OP, &arrays.words)?;
            let word = |first: usize| words.address() + (first * size_of::<u32>()) as u64;
            let may_change = batch.whole.is_empty() || !arrays.is_changed;
            if arrays.is_changed && may_change {
                // A clone keeps its values.
                logits.write(OP, queue)?;
            }
            let rows = f32_rows(queue, &logits, asked, word(arrays.rows), may_change)?;
            let device = DeviceRows { queue, logits: rows };
            if arrays.is_changed {
                device.edit([arrays.edits, arrays.edit_start, arrays.masks, arrays.mask_start].map(word))?;
            }
            Some(device.choose(word(0), asked)?)
        }
    };
    let n_tops = batch.choices.iter().map(|one| one.n_top).collect();
    let rows = match (&choices, &batch.whole[..]) {
        // Nothing comes down; the end of the work is waited for nevertheless.
        (None, []) => PendingRows::Begun(vec![queue.begin_download(OP, logits.address(), 0)?]),
        (_, whole) => begin_rows(queue, logits, whole)?,
    };
    Ok(CudaPending { queue: Arc::clone(queue), vocab, n_tops, choices, whole: batch.whole.clone(), rows })
}

impl PendingChoices<CudaStep> for CudaPending {
    fn wait(self) -> Result<Choices> {
        let Self { queue, vocab, n_tops, choices, whole, rows } = self;
        let choices = choices.map_or(Ok(Vec::new()), |chosen| chosen.wait(&queue, &n_tops))?;
        let values = match rows {
            PendingRows::Begun(downloads) => {
                let mut values = Vec::with_capacity(whole.len() * vocab);
                for download in downloads {
                    download.wait(OP, |part| queue.element().decode(part, &mut values))?;
                }
                values
            }
            PendingRows::Kept(logits) => whole_rows(&queue, &logits, &whole)?,
        };
        Ok(Choices { choices, rows: WholeRows::alone(values, vocab, &whole) })
    }

    fn carry_tokens(&self, step: &CudaStep, ids: Indices, carried: &[CarriedToken]) -> Result<()> {
        let op = "carry_tokens";
        check::carry_tokens(ids, carried, self.n_tops.len())?;
        let ids = step.indices(op, ids)?;
        let Some(chosen) = &self.choices else { return Ok(()) };
        let queue = &self.queue;
        let rows = carried.iter().map(|one| one.row).chain(carried.iter().map(|one| one.choice));
        let words = queue.upload(op, &rows.collect::<Vec<u32>>())?;
        let from = words.address() + size_of_val(carried) as u64 / 2;
        let n = carried.len() as u32;
        let arguments: [&dyn Argument; 5] = [&ids, &words.address(), &from, &chosen.results.address(), &n];
        let grid = [carried.len().div_ceil(THREADS as usize), 1, 1];
        let launch = Launch { grid, threads: THREADS, shared_bytes: 0 };
        queue.launch(op, queue.device().kernels.carry_tokens, launch, arguments)
    }
}

/// The arrays that kernels read, as the words of one upload; settings of sampling come first.
struct Arrays {
    words: Vec<u32>,
    /// First words of the rows, `[n]`.
    rows: usize,
    /// Of the changes of all rows, and of where those of each begin, `[n + 1]`.
    edits: usize,
    edit_start: usize,
    /// Of the masks, and of where that of each row begins, plus 1, `[n]`.
    masks: usize,
    mask_start: usize,
    /// True if a row is changed.
    is_changed: bool,
}

impl Arrays {
    fn new(asked: &[ChooseRow]) -> Self {
        let mut words = Vec::with_capacity(asked.len() * (SAMPLING_WORDS + 3) + 1);
        for ChooseRow { sampling, .. } in asked {
            let [low, high] = [sampling.draw as u32, (sampling.draw >> 32) as u32];
            let [temperature, top_p, min_p] =
                [sampling.temperature, sampling.top_p, sampling.min_p].map(f32::to_bits);
            words.extend([low, high, temperature, top_p, min_p, sampling.top_k.unwrap_or(0)]);
        }
        let rows = words.len();
        words.extend(asked.iter().map(|one| one.row));
        let edit_start = words.len();
        words.push(0);
        let mut n_edits = 0;
        for one in asked {
            n_edits += one.edits.len() as u32;
            words.push(n_edits);
        }
        let mask_start = words.len();
        let masks = mask_start + asked.len();
        let mut of_masks: Vec<u32> = Vec::new();
        let mut known: Vec<(*const u32, u32)> = Vec::new();
        for mask in asked.iter().map(|one| one.mask.as_ref()) {
            // Rows may share a mask, which then goes up once.
            let start = mask.map_or(0, |mask| match known.iter().find(|(of, _)| *of == mask.as_ptr()) {
                Some((_, start)) => *start,
                None => {
                    let start = of_masks.len() as u32 + 1;
                    of_masks.extend(mask.iter());
                    known.push((mask.as_ptr(), start));
                    start
                }
            });
            words.push(start);
        }
        words.extend(of_masks);
        let edits = words.len();
        words.reserve(n_edits as usize * EDIT_WORDS);
        for one in asked {
            let mut sorted = one.edits.clone();
            // A token's changes lie side by side, in their order.
            sorted.sort_by_key(|edit| edit.token);
            for edit in sorted {
                let [bias, repetition, subtract] =
                    [edit.bias, edit.repetition, edit.subtract].map(f32::to_bits);
                words.extend([edit.token, bias, repetition, subtract]);
            }
        }
        let is_changed = asked.iter().any(ChooseRow::is_changed);
        Self { words, rows, edits, edit_start, masks, mask_start, is_changed }
    }
}

/// The rows of choices in f32, `[n, vocab]`; `rows` is the address of their numbers. Those of `logits` themselves where they
/// are all of them, in order, and may be changed.
fn f32_rows(
    queue: &Queue,
    logits: &CudaTensor,
    asked: &[ChooseRow],
    rows: u64,
    may_change: bool,
) -> Result<CudaTensor> {
    let vocab = logits.dims().1;
    let is_in_order = asked.iter().enumerate().all(|(i, one)| one.row as usize == i);
    let dims = (asked.len(), vocab);
    let chosen = match is_in_order && (may_change || queue.element() != Element::F32) {
        true => logits.clone().first_rows(asked.len()),
        false => super::rows::gather(OP, queue, logits.address(), rows, dims)?,
    };
    if queue.element() == Element::F32 {
        return Ok(chosen);
    }
    let wide = CudaTensor::of(OP, queue, Element::F32, dims)?;
    let [n_rows, width] = [dims.0, dims.1].map(|n| n as u32);
    let arguments: [&dyn Argument; 4] = [&wide.address(), &chosen.address(), &n_rows, &width];
    let launch = super::rows::shared_work(wide.n_values());
    queue.launch(OP, queue.device().kernels.widen_bf16, launch, arguments)?;
    Ok(wide)
}

/// Rows of logits on the device in f32, one for each choice, `[n, vocab]`.
struct DeviceRows<'a> {
    queue: &'a Queue,
    logits: CudaTensor,
}

impl DeviceRows<'_> {
    fn launch(&self) -> Launch {
        Launch { grid: [self.logits.dims().0, 1, 1], threads: THREADS, shared_bytes: 0 }
    }

    /// Changes rows by the arrays at these addresses: changes, their starts, masks, their starts.
    fn edit(&self, [edits, edit_start, masks, mask_start]: [u64; 4]) -> Result<()> {
        let vocab = self.logits.dims().1 as u32;
        let arguments: [&dyn Argument; 6] =
            [&self.logits.address(), &edits, &edit_start, &masks, &mask_start, &vocab];
        self.queue.launch(OP, self.queue.device().kernels.edit_logits, self.launch(), arguments)
    }

    /// Chooses by the settings at an address; log-probabilities where a choice asks for them.
    fn choose(self, sampling: u64, asked: &[ChooseRow]) -> Result<ChosenRows> {
        let queue = self.queue;
        let kernels = &queue.device().kernels;
        let logits = self.logits.address();
        let n = self.logits.dims().0;
        let vocab = self.logits.dims().1 as u32;
        let n_top = asked.iter().filter_map(|one| one.n_top).max().map(|n_top| n_top.min(vocab) as usize);
        let n_bytes = ResultPlaces::new(n, n_top).n_words * size_of::<u32>();
        let results = queue.take(OP, n_bytes)?;
        let at = |word: usize| results.address() + (word * size_of::<u32>()) as u64;
        let arguments: [&dyn Argument; 4] = [&at(0), &logits, &sampling, &vocab];
        queue.launch(OP, kernels.choose, self.launch(), arguments)?;
        if let Some(n_top) = n_top {
            let places = ResultPlaces::new(n, Some(n_top));
            let [chosen, tokens, logprobs] = [places.chosen, places.tokens, places.logprobs].map(at);
            let count = n_top as u32;
            let arguments: [&dyn Argument; 7] =
                [&chosen, &tokens, &logprobs, &logits, &at(0), &count, &vocab];
            queue.launch(OP, kernels.log_probabilities, self.launch(), arguments)?;
        }
        let download = queue.begin_download(OP, results.address(), n_bytes)?;
        Ok(ChosenRows { logits: self.logits, results, n_top, download })
    }
}

/// First words of the parts of the results of `n` choices; those of `Choice` come first.
struct ResultPlaces {
    chosen: usize,
    tokens: usize,
    logprobs: usize,
    n_words: usize,
}

impl ResultPlaces {
    fn new(n: usize, n_top: Option<usize>) -> Self {
        let chosen = n * CHOICE_WORDS;
        let tokens = chosen + n_top.map_or(0, |_| n);
        let of_top = n * n_top.unwrap_or(0);
        Self { chosen, tokens, logprobs: tokens + of_top, n_words: tokens + 2 * of_top }
    }
}

impl ChosenRows {
    /// The choices, each with as many log-probabilities as it asked for.
    fn wait(self, queue: &Queue, n_tops: &[Option<u32>]) -> Result<Vec<Result<Choice, SampleError>>> {
        let Self { logits, n_top, download, .. } = self;
        let mut words: Vec<u32> = Vec::new();
        download.wait(OP, |part| words.extend(part.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b))))?;
        let vocab = logits.dims().1;
        let (places, n_top) = (ResultPlaces::new(n_tops.len(), n_top), n_top.unwrap_or(0));
        let logprobs = |i: usize, n: u32| TokenLogprobs {
            chosen: f32::from_bits(words[places.chosen + i]),
            top: (i * n_top..i * n_top + n_top.min(n as usize))
                .map(|at| (words[places.tokens + at], f32::from_bits(words[places.logprobs + at])))
                .filter(|(token, _)| (*token as usize) < vocab)
                .collect(),
        };
        let answer = |(i, n): (usize, &Option<u32>)| {
            let [token, status] = [words[CHOICE_WORDS * i], words[CHOICE_WORDS * i + 1]];
            Ok(match status {
                CHOSEN => Ok(Choice { token, logprobs: n.map(|n| logprobs(i, n)) }),
                NOT_FINITE => Err(not_finite(queue, &logits, i, token as usize)?),
                _ => Err(SampleError::NothingAllowed { vocab }),
            })
        };
        n_tops.iter().enumerate().map(answer).collect()
    }
}

/// The error for a logit of row `i`, whose value is read.
fn not_finite(queue: &Queue, logits: &CudaTensor, i: usize, token: usize) -> Result<SampleError> {
    let at = logits.address() + ((i * logits.dims().1 + token) * size_of::<f32>()) as u64;
    let mut value = f32::NAN;
    queue.download(OP, at, size_of::<f32>(), |part| {
        value = part.first_chunk().map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes));
    })?;
    Ok(SampleError::NotFinite { token, value })
}

/// Runs of whole rows: their addresses and bytes.
fn runs(queue: &Queue, logits: &CudaTensor, asked: &[u32]) -> Vec<(u64, usize)> {
    let row_bytes = logits.dims().1 * queue.element().size();
    let run = |run: &[u32]| (logits.address() + (run[0] as usize * row_bytes) as u64, run.len() * row_bytes);
    asked.chunk_by(|a, b| a + 1 == *b).map(run).collect()
}

/// Begins to fetch rows of logits, unless they are too many.
fn begin_rows(queue: &Queue, logits: CudaTensor, asked: &[u32]) -> Result<PendingRows> {
    let runs = runs(queue, &logits, asked);
    if runs.iter().map(|run| run.1).sum::<usize>() > MAX_BEGUN {
        return Ok(PendingRows::Kept(logits));
    }
    let begun = runs.into_iter().map(|(from, n_bytes)| queue.begin_download(OP, from, n_bytes));
    Ok(PendingRows::Begun(begun.collect::<Result<_>>()?))
}

/// Rows of logits as they are, one download for each run of them.
fn whole_rows(queue: &Queue, logits: &CudaTensor, asked: &[u32]) -> Result<Vec<f32>> {
    let mut values = Vec::with_capacity(asked.len() * logits.dims().1);
    for (from, n_bytes) in runs(queue, logits, asked) {
        queue.download(OP, from, n_bytes, |part| queue.element().decode(part, &mut values))?;
    }
    Ok(values)
}
