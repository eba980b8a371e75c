//! Attention inside sequences, of prompts over pages, and of steps of decoding, against plain loops.

use cudarc::driver::CudaSlice;
use triptych_kernels::ops::{AttentionShape, Mask};

use crate::cache::{Cache, PAGE, Pages, STILL, address};
use crate::device::{Device, Plain};
use crate::element::{Bf16, Element, close, elements, values, widened};
use crate::launch;
use crate::oracle::{self, Score};

/// `RaggedKeys` of `keys.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct RaggedKeys {
    k: u64,
    v: u64,
    query_start: u64,
    key_start: u64,
    k_stride: u32,
    v_stride: u32,
    head_dim: u32,
    gap: u32,
}

impl Plain for RaggedKeys {}

/// `PagedSequences` of `pages.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PagedSequences {
    query_start: u64,
    seq_lens: u64,
    table_start: u64,
    block_tables: u64,
    min_queries: u32,
    max_queries: u32,
}

impl Plain for PagedSequences {}

/// `PagedKeys` of `keys.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PagedKeys {
    pages: Pages,
    sequences: PagedSequences,
    query_start: u64,
}

impl Plain for PagedKeys {}

/// `Bias` of `scores.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Bias {
    values: u64,
    offsets: u64,
    kind: u32,
    max_distance: u32,
}

impl Plain for Bias {}

/// `Heads` of `scores.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Heads {
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    scale: f32,
    ahead: u64,
    is_causal: u32,
    window: u32,
    softcap: f32,
    quotient: f32,
}

impl Plain for Heads {}

/// `Parts` of `decode.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Parts {
    largest: u64,
    sum: u64,
    out: u64,
    n_splits: u32,
    gap: u32,
}

impl Plain for Parts {}

/// Kinds of bias, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum BiasKind {
    None,
    /// From `-max` to `max`.
    Distance(usize),
    Alibi,
    Matrix,
}

/// An attention to compute.
#[derive(Clone, Debug)]
struct Case {
    /// `(queries, keys)` of each sequence.
    lens: Vec<(usize, usize)>,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    mask: Mask,
    window: usize,
    bias: BiasKind,
}

/// A case with its data on a device.
struct Data<T> {
    case: Case,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    bias: Vec<f32>,
    bias_offsets: Vec<u64>,
}

fn starts(lens: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut out = vec![0];
    out.extend(lens.scan(0, |sum, n| {
        *sum += n as u32;
        Some(*sum)
    }));
    out
}

impl Case {
    fn new(
        lens: &[(usize, usize)],
        (n_heads, n_kv_heads, head_dim): (usize, usize, usize),
        mask: Mask,
    ) -> Self {
        Self { lens: lens.to_vec(), n_heads, n_kv_heads, head_dim, mask, window: 0, bias: BiasKind::None }
    }

    fn shape(&self) -> AttentionShape {
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        AttentionShape {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            scale,
            softcap: None,
        }
    }

    fn heads(&self) -> Heads {
        Heads {
            n_heads: self.n_heads as u32,
            n_kv_heads: self.n_kv_heads as u32,
            head_dim: self.head_dim as u32,
            scale: self.shape().scale,
            ahead: 0,
            is_causal: u32::from(matches!(self.mask, Mask::Causal)),
            window: self.window as u32,
            softcap: self.shape().softcap.unwrap_or(0.0),
            quotient: self.shape().softcap.map_or(0.0, |c| 2.0 / c),
        }
    }

    fn data<T: Element>(&self) -> Data<T> {
        let (n_q, n_k) = self.lens.iter().fold((0, 0), |sum, len| (sum.0 + len.0, sum.1 + len.1));
        let (q_width, kv_width) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let mut bias_offsets = Vec::new();
        let mut n_bias = 0;
        for (q, k) in &self.lens {
            bias_offsets.push(n_bias as u64);
            n_bias += self.n_heads * q * k;
        }
        let n_bias = match self.bias {
            BiasKind::None => 0,
            BiasKind::Distance(max) => self.n_heads * (2 * max + 1),
            BiasKind::Alibi => self.n_heads,
            BiasKind::Matrix => n_bias,
        };
        let mut bias = values(4, n_bias);
        if self.bias == BiasKind::Matrix {
            // A key that is hidden, now and then.
            bias.iter_mut().step_by(7).for_each(|b| *b = f32::NEG_INFINITY);
        }
        let case = self.clone();
        Data {
            case,
            q: elements(1, n_q * q_width),
            k: elements(2, n_k * kv_width),
            v: elements(3, n_k * kv_width),
            bias,
            bias_offsets,
        }
    }
}

impl<T: Element> Data<T> {
    fn expect(&self) -> Vec<f32> {
        let case = &self.case;
        let (q_width, kv_width) = (case.n_heads * case.head_dim, case.n_kv_heads * case.head_dim);
        let (mut q_at, mut k_at, mut out) = (0, 0, Vec::new());
        for (seq, &(n_q, n_k)) in case.lens.iter().enumerate() {
            let q = widened(&self.q[q_at * q_width..][..n_q * q_width]);
            let [k, v] = [&self.k, &self.v].map(|x| widened(&x[k_at * kv_width..][..n_k * kv_width]));
            let bias = |score: Score| {
                let distance = score.distance();
                if case.window > 0 && distance <= -(case.window as i64) {
                    return f64::NEG_INFINITY;
                }
                f64::from(match case.bias {
                    BiasKind::None => 0.0,
                    BiasKind::Distance(max) => {
                        let max = max as i64;
                        self.bias
                            [score.head * (2 * max as usize + 1) + (distance.clamp(-max, max) + max) as usize]
                    }
                    BiasKind::Alibi => -self.bias[score.head] * distance.abs() as f32,
                    BiasKind::Matrix => {
                        self.bias[self.bias_offsets[seq] as usize
                            + (score.head * n_q + score.query) * n_k
                            + score.key]
                    }
                })
            };
            out.extend(oracle::attention([&q, &k, &v], case.shape(), case.mask.into(), bias));
            (q_at, k_at) = (q_at + n_q, k_at + n_k);
        }
        out
    }

    /// The bias on the device, and what keeps it there.
    fn bias(&self, device: &Device) -> (Bias, CudaSlice<f32>, CudaSlice<u64>) {
        let (values, offsets) = (device.upload(&self.bias), device.upload(&self.bias_offsets));
        let (kind, max_distance) = match self.case.bias {
            BiasKind::None => (0, 0),
            BiasKind::Distance(max) => (1, max as u32),
            BiasKind::Alibi => (2, 0),
            BiasKind::Matrix => (3, 0),
        };
        let bias =
            Bias { values: address(device, &values), offsets: address(device, &offsets), kind, max_distance };
        (bias, values, offsets)
    }
}

/// The width of a kernel that takes a head of this one.
fn padded(head_dim: usize) -> usize {
    [32, 64, 80, 96, 128, 256].into_iter().find(|width| *width >= head_dim).expect("a head that is not wider")
}

/// Bytes of shared memory, as `attention.cuh`, `decode.cu` and `attention_f32.cu` say.
fn shared_bytes<T: Element>(head_dim: usize, is_decode: bool) -> u32 {
    let width = padded(head_dim);
    let pitch = width + 8;
    // The widest queries do not stay in registers.
    let queries = if width > 128 { 64 } else { 0 };
    (match (T::NAME, is_decode) {
        ("f32", _) => (2 * 32 * 257 + 8 * (256 + 32)) * 4,
        (_, true) => (4 * 2 * (if width > 128 { 16 } else { 32 }) + queries) * pitch * 2,
        _ => (4 * (if width > 128 { 32 } else { 64 }) + queries) * pitch * 2,
    }) as u32
}

fn kernel<T: Element>(name: &str, head_dim: usize) -> String {
    if T::NAME == "f32" { format!("{name}_f32") } else { format!("{name}_{}_{}", T::NAME, padded(head_dim)) }
}

/// Blocks of a launch over tiles of queries.
fn grid<T: Element>(case: &Case) -> [u32; 3] {
    let most = case.lens.iter().map(|len| len.0).max().unwrap_or(0);
    let tile = if T::NAME == "f32" { 8 } else { 64 };
    [most.div_ceil(tile) as u32, case.n_heads as u32, case.lens.len() as u32]
}

fn threads<T: Element>() -> u32 {
    if T::NAME == "f32" { 256 } else { 128 }
}

/// Attention of rows. `kv_gap`: elements between two rows of keys that belong to none.
fn ragged<T: Element>(device: &Device, data: &Data<T>) -> Vec<T> {
    let case = &data.case;
    let (q_width, kv_width) = (case.n_heads * case.head_dim, case.n_kv_heads * case.head_dim);
    // Keys and values side by side, as one projection gives them.
    let rows = data.k.chunks(kv_width).zip(data.v.chunks(kv_width));
    let kv = device.upload(&rows.flat_map(|(k, v)| [k, v].concat()).collect::<Vec<T>>());
    let q = device.upload(&data.q);
    let query_start = device.upload(&starts(case.lens.iter().map(|len| len.0)));
    let key_start = device.upload(&starts(case.lens.iter().map(|len| len.1)));
    let k = address(device, &kv);
    let keys = RaggedKeys {
        k,
        v: k + (kv_width * size_of::<T>()) as u64,
        query_start: address(device, &query_start),
        key_start: address(device, &key_start),
        k_stride: 2 * kv_width as u32,
        v_stride: 2 * kv_width as u32,
        head_dim: case.head_dim as u32,
        gap: 0,
    };
    let (bias, _values, _offsets) = data.bias(device);
    let out = device.poisoned::<T>(data.q.len());
    launch!(device, kernel::<T>("attention", case.head_dim), grid::<T>(case), threads::<T>(),
        shared_bytes::<T>(case.head_dim, false); out, q, keys, case.heads(), bias, q_width as u32, q_width as u32);
    device.download(&out, data.q.len())
}

/// The keys of a case in pages, and all that points to them.
struct Paged<T> {
    cache: Cache<T>,
    slices: [CudaSlice<u32>; 4],
}

impl<T: Element> Paged<T> {
    fn new(device: &Device, data: &Data<T>) -> Self {
        let case = &data.case;
        let needs: Vec<usize> = case.lens.iter().map(|len| len.1.div_ceil(PAGE)).collect();
        let n_pages = needs.iter().sum::<usize>().max(1) + 3;
        // Pages out of order, and some that belong to none.
        let mut pages = (0..n_pages).map(|i| ((i * 5 + 2) % n_pages) as u32).collect::<Vec<_>>();
        if n_pages.is_multiple_of(5) {
            pages = (0..n_pages as u32).rev().collect();
        }
        let tables: Vec<&[u32]> = needs
            .iter()
            .scan(&pages[..], |rest, n| {
                let (own, after) = rest.split_at(*n);
                *rest = after;
                Some(own)
            })
            .collect();
        let slots: Vec<u32> = case
            .lens
            .iter()
            .zip(&tables)
            .flat_map(|(len, table)| (0..len.1).map(|i| table[i / PAGE] * PAGE as u32 + (i % PAGE) as u32))
            .collect();
        let cache = Cache::new(device, n_pages, case.n_kv_heads, case.head_dim);
        cache.write(device, [&data.k, &data.v], &slots, STILL);
        let slices = [
            starts(case.lens.iter().map(|len| len.0)),
            case.lens.iter().map(|len| len.1 as u32).collect(),
            starts(needs.into_iter()),
            tables.concat(),
        ];
        Self { cache, slices: slices.map(|s| device.upload(&s)) }
    }

    fn keys(&self, device: &Device) -> PagedKeys {
        let [query_start, seq_lens, table_start, block_tables] =
            self.slices.each_ref().map(|s| address(device, s));
        let all = (0, u32::MAX);
        let sequences = PagedSequences {
            query_start,
            seq_lens,
            table_start,
            block_tables,
            min_queries: all.0,
            max_queries: all.1,
        };
        PagedKeys { pages: self.cache.pages, sequences, query_start }
    }
}

fn paged<T: Element>(device: &Device, data: &Data<T>) -> Vec<T> {
    let case = &data.case;
    let q_width = (case.n_heads * case.head_dim) as u32;
    let paged = Paged::new(device, data);
    let (bias, _values, _offsets) = data.bias(device);
    let (q, out) = (device.upload(&data.q), device.poisoned::<T>(data.q.len()));
    launch!(device, kernel::<T>("paged_attention", case.head_dim), grid::<T>(case), threads::<T>(),
        shared_bytes::<T>(case.head_dim, false); out, q, paged.keys(device), case.heads(), bias, q_width, q_width);
    device.download(&out, data.q.len())
}

fn decoded(device: &Device, data: &Data<Bf16>) -> Vec<Bf16> {
    let case = &data.case;
    let (q_width, n_seqs) = ((case.n_heads * case.head_dim) as u32, case.lens.len() as u32);
    let paged = Paged::new(device, data);
    let (bias, _values, _offsets) = data.bias(device);
    let (q, out) = (device.upload(&data.q), device.poisoned::<Bf16>(data.q.len()));
    let most = |of: fn(&(usize, usize)) -> usize| case.lens.iter().map(of).max().unwrap_or(0);
    let (most_queries, most_keys) = (most(|len| len.0), most(|len| len.1));
    // More splits than there are: a captured graph has those of its longest sequence.
    let n_splits = most_keys.div_ceil(256) + 1;
    let n_rows = data.q.len() / q_width as usize * case.n_heads;
    let [largest, sum] = [(); 2].map(|()| device.poisoned::<f32>(n_rows * n_splits));
    let sums = device.poisoned::<f32>(n_rows * n_splits * case.head_dim);
    let parts = Parts {
        largest: address(device, &largest),
        sum: address(device, &sum),
        out: address(device, &sums),
        n_splits: n_splits as u32,
        gap: 0,
    };
    let tiles = (most_queries * case.n_heads / case.n_kv_heads).div_ceil(16);
    let keys = paged.keys(device);
    launch!(device, kernel::<Bf16>("decode", case.head_dim), [n_splits as u32, (case.n_kv_heads * tiles) as u32, n_seqs],
        128, shared_bytes::<Bf16>(case.head_dim, true); parts, q, keys, case.heads(), bias, q_width);
    launch!(device, "join_splits_bf16", [most_queries as u32, case.n_heads as u32, n_seqs], 128, 0;
        out, parts, keys.sequences, case.heads(), q_width);
    device.download(&out, data.q.len())
}

/// Error of attention, relative to one plus the value: weights are rounded to bf16.
fn tolerance<T: Element>() -> f32 {
    if T::NAME == "f32" { 1e-5 } else { 1.2e-2 }
}

fn check<T: Element>(seed: u64, case: &Case, run: impl Fn(&Device, &Data<T>) -> Vec<T>) {
    let device = Device::new(seed);
    let data = case.data::<T>();
    close(&format!("{case:?}"), &run(&device, &data), &data.expect(), tolerance::<T>());
    device.finish();
}

/// Sequences around the tiles of queries (64) and of keys (32, 64).
const SEQUENCES: [&[(usize, usize)]; 4] =
    [&[], &[(1, 1)], &[(3, 31), (0, 5), (5, 0), (2, 33)], &[(65, 130), (1, 64), (63, 65)]];

/// Every width that a kernel is made for, and widths between.
const HEAD_DIMS: [usize; 10] = [1, 20, 32, 33, 64, 80, 90, 128, 200, 256];

fn with_causal(lens: &[(usize, usize)], mask: Mask) -> Vec<(usize, usize)> {
    // The last query of a causal sequence stands at its last key.
    lens.iter()
        .map(|&(q, k)| if matches!(mask, Mask::Causal) && k < q { (q, q + k) } else { (q, k) })
        .collect()
}

fn attention_is_the_oracles_over_odd_sizes<T: Element>() {
    for (i, lens) in SEQUENCES.into_iter().enumerate() {
        for mask in [Mask::Full, Mask::Causal] {
            let case = Case::new(&with_causal(lens, mask), (2, 1, 64), mask);
            check::<T>(i as u64, &case, ragged);
            check::<T>(i as u64, &case, paged);
        }
    }
}

fn attention_has_every_width_of_head<T: Element>() {
    for (i, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        let case = Case::new(&[(5, 70), (2, 3)], (2, 2, head_dim), Mask::Full);
        check::<T>(i as u64, &case, ragged);
        check::<T>(i as u64, &case, paged);
    }
}

fn windows_hide_far_keys<T: Element>() {
    for window in [1, 2, 31, 64, 100, 500] {
        let mut case = Case::new(&[(70, 140), (3, 3), (1, 90)], (2, 1, 32), Mask::Causal);
        case.window = window;
        check::<T>(window as u64, &case, ragged);
        check::<T>(window as u64, &case, paged);
    }
}

const BIASES: [BiasKind; 4] =
    [BiasKind::Distance(3), BiasKind::Distance(90), BiasKind::Alibi, BiasKind::Matrix];

fn a_bias_is_added_to_every_score<T: Element>() {
    for (i, bias) in BIASES.into_iter().enumerate() {
        for mask in [Mask::Full, Mask::Causal] {
            let mut case = Case::new(&[(66, 70), (2, 33)], (4, 2, 32), mask);
            case.bias = bias;
            check::<T>(i as u64, &case, ragged);
            check::<T>(i as u64, &case, paged);
        }
    }
}

fn a_query_that_sees_no_key_gives_zeros<T: Element>() {
    let device = Device::new(1);
    let mut case = Case::new(&[(2, 40)], (1, 1, 32), Mask::Full);
    case.bias = BiasKind::Matrix;
    let mut data = case.data::<T>();
    data.bias[..40].fill(f32::NEG_INFINITY);
    for out in [ragged(&device, &data), paged(&device, &data)] {
        assert!(out[..32].iter().all(|x| x.to_f32() == 0.0));
        assert!(out[32..].iter().all(|x| x.to_f32() != 0.0));
    }
}

fn a_sequence_is_the_same_alone<T: Element>() {
    let device = Device::new(2);
    let together = Case::new(&[(70, 100), (3, 40), (65, 65)], (2, 1, 32), Mask::Causal);
    let data = together.data::<T>();
    for run in [ragged::<T>, paged::<T>] {
        let out = run(&device, &data);
        let (q, k) = (70 * 64, 100 * 32);
        let alone = Data {
            case: Case { lens: vec![(3, 40)], ..together.clone() },
            q: data.q[q..q + 3 * 64].to_vec(),
            k: data.k[k..k + 40 * 32].to_vec(),
            v: data.v[k..k + 40 * 32].to_vec(),
            bias: Vec::new(),
            bias_offsets: vec![0],
        };
        assert_eq!(run(&device, &alone), out[q..q + 3 * 64]);
        // The last query of a prompt, asked for by itself.
        let last = Data {
            case: Case { lens: vec![(1, 40)], ..together.clone() },
            q: alone.q[128..].to_vec(),
            ..alone
        };
        assert_eq!(run(&device, &last), out[q + 128..q + 192]);
    }
}

for_each_element! {
    attention_is_the_oracles_over_odd_sizes,
    attention_has_every_width_of_head,
    windows_hide_far_keys,
    a_bias_is_added_to_every_score,
    a_query_that_sees_no_key_gives_zeros,
    a_sequence_is_the_same_alone,
}

#[test]
fn decoding_is_the_oracles_whatever_the_splits() {
    for (i, n_keys) in [0, 1, 31, 32, 33, 63, 65, 255, 256, 257, 600].into_iter().enumerate() {
        let case = Case::new(&[(1, n_keys), (1, 40), (0, 9)], (4, 2, 64), Mask::Causal);
        check(i as u64, &case, decoded);
    }
}

#[test]
fn decoding_has_every_width_and_group() {
    for (i, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        check(i as u64, &Case::new(&[(1, 70)], (2, 2, head_dim), Mask::Full), decoded);
    }
    for (n_heads, n_kv_heads) in [(1, 1), (5, 1), (16, 1), (17, 1), (14, 2)] {
        check(9, &Case::new(&[(1, 70), (3, 290)], (n_heads, n_kv_heads, 32), Mask::Causal), decoded);
    }
}

#[test]
fn decoding_has_windows_and_biases() {
    for (i, bias) in BIASES.into_iter().enumerate() {
        let case = Case { bias, ..Case::new(&[(2, 300), (1, 33)], (4, 2, 32), Mask::Causal) };
        check(i as u64, &case, decoded);
    }
    for window in [1, 40, 270] {
        let case = Case { window, ..Case::new(&[(2, 300), (1, 33)], (4, 2, 32), Mask::Causal) };
        check(window as u64, &case, decoded);
    }
}

#[test]
fn a_decoded_sequence_is_the_same_alone() {
    let device = Device::new(3);
    let together = Case::new(&[(1, 500), (1, 300), (1, 20)], (4, 2, 32), Mask::Causal);
    let data = together.data::<Bf16>();
    let out = decoded(&device, &data);
    let alone = Data {
        case: Case { lens: vec![(1, 300)], ..together },
        q: data.q[128..256].to_vec(),
        k: data.k[500 * 64..800 * 64].to_vec(),
        v: data.v[500 * 64..800 * 64].to_vec(),
        bias: Vec::new(),
        bias_offsets: vec![0],
    };
    assert_eq!(decoded(&device, &alone), out[128..256]);
}
