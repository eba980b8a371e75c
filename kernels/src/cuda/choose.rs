//! Choosing on the device: rows of logits in f32, their changes, the choices, log-probabilities. One upload, one download.

use super::element::Element;
use super::queue::{Argument, Launch, Queue};
use super::tensor::CudaTensor;
use crate::ops::{Choice, Choices, ChooseBatch, ChooseRow, Result, SampleError, TokenLogprobs, WholeRows};

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

/// Answers a checked batch.
pub(super) fn choose(queue: &Queue, mut logits: CudaTensor, batch: &ChooseBatch) -> Result<Choices> {
    let vocab = logits.dims().1;
    let choices = match &batch.choices[..] {
        [] => Vec::new(),
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
            let device = DeviceRows { queue, logits: rows.address(), n_rows: asked.len(), vocab };
            if arrays.is_changed {
                device.edit([arrays.edits, arrays.edit_start, arrays.masks, arrays.mask_start].map(word))?;
            }
            device.choose(word(0), asked)?
        }
    };
    Ok(Choices { choices, rows: whole_rows(queue, &logits, &batch.whole)? })
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

/// Rows of logits on the device, one for each choice.
struct DeviceRows<'a> {
    queue: &'a Queue,
    logits: u64,
    n_rows: usize,
    vocab: usize,
}

impl DeviceRows<'_> {
    fn launch(&self) -> Launch {
        Launch { grid: [self.n_rows, 1, 1], threads: THREADS, shared_bytes: 0 }
    }

    /// Changes rows by the arrays at these addresses: changes, their starts, masks, their starts.
    fn edit(&self, [edits, edit_start, masks, mask_start]: [u64; 4]) -> Result<()> {
        let vocab = self.vocab as u32;
        let arguments: [&dyn Argument; 6] = [&self.logits, &edits, &edit_start, &masks, &mask_start, &vocab];
        self.queue.launch(OP, self.queue.device().kernels.edit_logits, self.launch(), arguments)
    }

    /// Chooses by the settings at an address; log-probabilities where a choice asks for them.
    fn choose(&self, sampling: u64, asked: &[ChooseRow]) -> Result<Vec<Result<Choice, SampleError>>> {
        let queue = self.queue;
        let kernels = &queue.device().kernels;
        let n = self.n_rows;
        let vocab = self.vocab as u32;
        let n_top = asked.iter().filter_map(|one| one.n_top).max().map(|n_top| n_top.min(vocab) as usize);
        let n_words = n * n_top.map_or(CHOICE_WORDS, |n_top| CHOICE_WORDS + 1 + 2 * n_top);
        let results = queue.take(OP, n_words * size_of::<u32>())?;
        let at = |word: usize| results.address() + (word * size_of::<u32>()) as u64;
        let chosen = n * CHOICE_WORDS;
        let top = n * (CHOICE_WORDS + 1);
        let arguments: [&dyn Argument; 4] = [&at(0), &self.logits, &sampling, &vocab];
        queue.launch(OP, kernels.choose, self.launch(), arguments)?;
        if let Some(n_top) = n_top {
            let tokens = at(top);
            let logprobs = at(top + n * n_top);
            let count = n_top as u32;
            let arguments: [&dyn Argument; 7] =
                [&at(chosen), &tokens, &logprobs, &self.logits, &at(0), &count, &vocab];
            queue.launch(OP, kernels.log_probabilities, self.launch(), arguments)?;
        }
        let words = download_words(queue, results.address(), n_words)?;
        let n_top = n_top.unwrap_or(0);
        let answer = |(i, one): (usize, &ChooseRow)| {
            let [token, status] = [words[CHOICE_WORDS * i], words[CHOICE_WORDS * i + 1]];
            let error = match status {
                CHOSEN => None,
                NOT_FINITE => Some(self.not_finite(i, token as usize)?),
                _ => Some(SampleError::NothingAllowed { vocab: self.vocab }),
            };
            let logprobs = || TokenLogprobs {
                chosen: f32::from_bits(words[chosen + i]),
                top: (0..n_top.min(one.n_top.unwrap_or(0) as usize))
                    .map(|place| top + i * n_top + place)
                    .map(|at| (words[at], f32::from_bits(words[at + n * n_top])))
                    .filter(|(token, _)| *token < vocab)
                    .collect(),
            };
            Ok(match error {
                Some(error) => Err(error),
                None => Ok(Choice { token, logprobs: one.n_top.map(|_| logprobs()) }),
            })
        };
        asked.iter().enumerate().map(answer).collect()
    }

    /// The error for a logit of row `i`, whose value is read.
    fn not_finite(&self, i: usize, token: usize) -> Result<SampleError> {
        let at = self.logits + ((i * self.vocab + token) * size_of::<f32>()) as u64;
        let words = download_words(self.queue, at, 1)?;
        let value = words.first().map_or(f32::NAN, |word| f32::from_bits(*word));
        Ok(SampleError::NotFinite { token, value })
    }
}

/// Words of the device.
fn download_words(queue: &Queue, from: u64, n_words: usize) -> Result<Vec<u32>> {
    let mut words = Vec::with_capacity(n_words);
    queue.download(OP, from, n_words * size_of::<u32>(), |part| {
        words.extend(part.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)));
    })?;
    Ok(words)
}

/// Rows of logits as they are, one download for each run of them.
fn whole_rows(queue: &Queue, logits: &CudaTensor, asked: &[u32]) -> Result<WholeRows> {
    let vocab = logits.dims().1;
    let size = queue.element().size();
    let mut values = Vec::with_capacity(asked.len() * vocab);
    for run in asked.chunk_by(|a, b| a + 1 == *b) {
        let from = logits.address() + (run[0] as usize * vocab * size) as u64;
        queue
            .download(OP, from, run.len() * vocab * size, |part| queue.element().decode(part, &mut values))?;
    }
    Ok(WholeRows::alone(values, vocab, asked))
}
