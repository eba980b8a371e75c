//! Arguments that an op cannot take give an error, never a panic; no rows give no rows.

use triptych_core::{DType, EncodedRows};
use triptych_kernels::KernelError;
use triptych_kernels::ops::{
    Activation, AttentionShape, Backend, BucketRule, BucketSides, ChosenHeads, Conv2d, FusedQkv, KvLayer,
    KvLayout, KvSlots, LinearPart, Mask, NormKind, PagedBatch, Qkv, RopePairs, RopeShape, Rotation,
    ScoreBias, StageBuilder, StoredBias, Unfold, Varlen, WeightView,
};

use crate::added::OnBackend;
use crate::conv::load_depthwise;
use crate::linear::layer;
use crate::rows::load_norm;
use crate::sequences::shape;
use crate::subject::{Stored, Subject, stage};

/// Asserts that the error is of the kind meant for shapes.
fn shape_error<T>(subject: &str, what: &str, result: Result<T, KernelError>) {
    match result {
        Err(KernelError::Shape { .. }) => {}
        Err(other) => panic!("{subject}: {what}: {other}"),
        Ok(_) => panic!("{subject}: {what} was accepted"),
    }
}

/// Asserts that the error is of the kind meant for indices.
fn index_error<T>(subject: &str, what: &str, result: Result<T, KernelError>) {
    match result {
        Err(KernelError::Index { .. }) => {}
        Err(other) => panic!("{subject}: {what}: {other}"),
        Ok(_) => panic!("{subject}: {what} was accepted"),
    }
}

fn view<'a>(shape: &'a [usize], data: &'a [u8]) -> WeightView<'a> {
    WeightView { dtype: DType::F32, shape, data }
}

pub fn weights_that_do_not_fit_are_refused<B: Backend>(subject: &Subject<B>) {
    let (b, name) = (&subject.backend, subject.name.as_str());
    let bytes = [0_u8; 24];
    let part = |shape, bias| LinearPart::new(view(shape, &bytes), bias);
    shape_error(name, "no part", b.load_linear(&[]));
    shape_error(name, "too few bytes", b.load_linear(&[part(&[2, 4], None)]));
    shape_error(name, "too many elements to count", b.load_linear(&[part(&[usize::MAX, 4], None)]));
    shape_error(name, "one dimension", b.load_linear(&[part(&[6], None)]));
    shape_error(
        name,
        "a bias of another length",
        b.load_linear(&[part(&[2, 3], Some(view(&[3], &bytes[..12])))]),
    );
    shape_error(name, "parts of other inputs", b.load_linear(&[part(&[2, 3], None), part(&[3, 2], None)]));
    shape_error(name, "a table of one dimension", b.load_table(view(&[6], &bytes), 1.0));
    shape_error(name, "a table of too few bytes", b.load_table(view(&[2, 4], &bytes), 1.0));
    shape_error(
        name,
        "a scale of two dimensions",
        b.load_norm(NormKind::Rms, view(&[2, 3], &bytes), None, 0.0),
    );
    let bias = Some(view(&[3], &bytes[..12]));
    shape_error(
        name,
        "a bias of another length",
        b.load_norm(NormKind::Layer, view(&[6], &bytes), bias, 0.0),
    );
}

pub fn shapes_that_do_not_agree_are_refused<B: Backend>(subject: &Subject<B>) {
    let (b, name) = (&subject.backend, subject.name.as_str());
    let x = subject.tensor(&[1.0; 12], 3, 4);
    let y = subject.tensor(&[1.0; 12], 4, 3);
    let w = layer(subject, &[1.0; 15], None, 3, 5);
    let norm = load_norm(subject, NormKind::Rms, &[1.0; 3], None);
    shape_error(name, "too few values", b.upload(vec![0.0; 3], 2, 2));
    shape_error(name, "values past counting", b.upload(vec![], usize::MAX, 2));
    let stored = |width| EncodedRows::new(DType::Bf16, width, &[0; 12]).expect("whole rows");
    shape_error(name, "rows of two widths", b.upload_rows(&[stored(2), stored(3)]));
    shape_error(name, "width of x", b.linear(&x, &w, Activation::None, None));
    shape_error(name, "residual", b.linear(&y, &w, Activation::None, Some(&x)));
    shape_error(name, "width of a norm", b.norm(&x, &norm));
    shape_error(name, "sum", b.add(&mut x.clone(), &y));
    shape_error(name, "odd gate", b.gate(&y, Activation::None));
    shape_error(name, "group of rows", b.merge_rows(x.clone(), 2));
    shape_error(name, "group of no rows", b.merge_rows(x.clone(), 0));
    shape_error(name, "parts of a row", b.split_rows(x.clone(), 3));
    shape_error(name, "sequences to turn", b.transpose(&x, 2));
    shape_error(name, "no sequences to turn", b.transpose(&x, 0));
    shape_error(name, "no parts of a row", b.split_rows(x.clone(), 0));
    let (step, (seqs, row)) = stage(b, |builder| Ok((builder.offsets(&[0, 3])?, builder.indices(&[0])?)));
    shape_error(name, "width of a sequence", b.group_norm(&step, &x, &norm, seqs));
    shape_error(name, "rows of a sequence", b.group_norm(&step, &y, &norm, seqs));
    shape_error(name, "rows to scatter", b.scatter_rows(&step, &mut x.clone(), row, &x));
    // Head and rotated width, rows and pairs of the angles.
    let turns = [
        (0, 0, 0, 0),
        (1, 1, 1, 1),
        (3, 3, 3, 1),
        (4, 4, 5, 2),
        (4, 4, 2, 3),
        (2, 4, 3, 2),
        (4, 3, 3, 1),
        (usize::MAX - 1, 0, 0, 0),
    ];
    for (head_dim, rotary_dim, n, n_pairs) in turns {
        let shape = RopeShape { head_dim, rotary_dim, pairs: RopePairs::Halves };
        let angles = vec![0.0; n * n_pairs];
        let (step, angles) = stage(b, |builder| builder.angles(&angles, &angles, n_pairs));
        shape_error(name, "heads to turn", b.rope(&step, &mut x.clone(), shape, angles));
    }
    let fits = Unfold { n_seqs: 1, kernel: 1, stride: 1, padding: 0 };
    for conv in [
        Unfold { n_seqs: 2, ..fits },
        Unfold { n_seqs: 0, ..fits },
        Unfold { kernel: 0, ..fits },
        Unfold { stride: 0, ..fits },
        Unfold { padding: usize::MAX, ..fits },
        Unfold { padding: usize::MAX / 8, ..fits },
        Unfold { kernel: usize::MAX, ..fits },
    ] {
        shape_error(name, &format!("{conv:?}"), b.unfold(&x, conv));
    }
}

pub fn indices_past_the_end_are_refused<B: Backend>(subject: &Subject<B>) {
    let (b, name) = (&subject.backend, subject.name.as_str());
    let x = subject.tensor(&[1.0; 12], 3, 4);
    let bytes = [0_u8; 24];
    let table = b.load_table(view(&[2, 3], &bytes), 1.0).expect("a table");
    let (step, ids) = subject.indices(&[0, 2]);
    index_error(name, "id", b.embed(&step, &table, ids));
    let (step, rows) = stage(b, |builder| builder.weighted_rows(&[0, 2], &[0.5, 0.5], 2));
    index_error(name, "weighted row", b.embed_weighted(&step, &table, rows));
    let (step, rows) = subject.indices(&[3]);
    index_error(name, "row to gather", b.gather_rows(&step, &x, rows));
    let (step, rows) = subject.indices(&[0, u32::MAX, 1]);
    index_error(name, "row to scatter", b.scatter_rows(&step, &mut x.clone(), rows, &x));
    index_error(name, "columns", b.columns(&x, 2, 3));
    index_error(name, "columns past counting", b.columns(&x, 2, usize::MAX));
}

pub fn offsets_that_are_not_offsets_are_refused<B: Backend>(subject: &Subject<B>) {
    let name = subject.name.as_str();
    let x = subject.tensor(&[1.0; 12], 3, 4);
    // Refused as they are staged, or with the rows that they do not fit.
    let attend = |q: &[u32], k: &[u32], shape: AttentionShape, mask| {
        let mut builder = StageBuilder::new();
        let seqs = Varlen { seqs: builder.sequences(q, k)?, mask, bias: ScoreBias::None };
        let step = subject.backend.stage(builder)?;
        subject.backend.attention(&step, Qkv { q: &x, k: &x, v: &x }, shape, seqs)
    };
    let fits = shape(2, 2, 2);
    assert!(attend(&[0, 1, 3], &[0, 1, 3], fits, Mask::Causal).is_ok());
    let fused = |cu_seqlens: &[u32], shape| {
        let (step, seqs) = stage(&subject.backend, |builder| builder.self_sequences(cu_seqlens));
        let seqs = Varlen { seqs, mask: Mask::Full, bias: ScoreBias::None };
        subject.backend.fused_attention(&step, &x, shape, seqs)
    };
    shape_error(name, "a width of three", fused(&[0, 3], fits));
    shape_error(name, "a row of no sequence", fused(&[0, 2], shape(2, 1, 1)));
    for cu in [&[][..], &[0], &[0, 2], &[1, 3], &[0, 4], &[0, 2, 1, 3]] {
        shape_error(name, "offsets of queries", attend(cu, &[0, 3], fits, Mask::Full));
        shape_error(name, "offsets of keys", attend(&[0, 3], cu, fits, Mask::Full));
    }
    let weights = |q: &[u32], heads: &[u32], mask| {
        let (step, (seqs, heads)) =
            stage(&subject.backend, |builder| Ok((builder.sequences(q, &[0, 3])?, builder.indices(heads)?)));
        let seqs = Varlen { seqs, mask, bias: ScoreBias::None };
        subject.backend.attention_weights(&step, [&x, &x], ChosenHeads { shape: fits, heads }, seqs)
    };
    assert!(weights(&[0, 3], &[1, 0, 1], Mask::Causal).is_ok());
    index_error(name, "head to weigh with", weights(&[0, 3], &[0, 2], Mask::Full));
    shape_error(name, "queries to weigh with", weights(&[0, 2], &[0], Mask::Full));
    shape_error(name, "numbers of sequences", attend(&[0, 3], &[0, 1, 3], fits, Mask::Full));
    shape_error(name, "causal with too few keys", attend(&[0, 3, 3], &[0, 2, 3], fits, Mask::Causal));
    for (n_heads, n_kv_heads, head_dim) in [(2, 0, 2), (3, 2, 2), (4, 2, 1), (2, 1, 2), (1, 1, 0)] {
        let odd = AttentionShape { n_heads, n_kv_heads, head_dim, scale: 1.0, softcap: None };
        shape_error(name, &format!("{odd:?}"), attend(&[0, 3], &[0, 3], odd, Mask::Full));
    }
}

pub fn caches_refuse_what_they_do_not_hold<B: Backend>(subject: &Subject<B>) {
    let (b, name) = (&subject.backend, subject.name.as_str());
    let layout = KvLayout { n_layers: 2, n_blocks: 3, n_kv_heads: 2, head_dim: 2 };
    for head_dim in [0, usize::MAX, usize::MAX / 64] {
        shape_error(name, "an endless cache", b.kv_cache(KvLayout { head_dim, ..layout }));
    }
    let mut cache = b.kv_cache(layout).expect("a cache");
    let (x, narrow) = (subject.tensor(&[1.0; 12], 3, 4), subject.tensor(&[1.0; 6], 3, 2));
    let mut write = |layer, kv: [&B::Tensor; 2], slots: &[u32]| {
        let (step, slots) = subject.indices(slots);
        b.write_kv(&step, KvSlots { cache: &mut cache, layer, slots }, kv)
    };
    index_error(name, "layer", write(2, [&x, &x], &[0, 1, 2]));
    index_error(name, "slot", write(0, [&x, &x], &[0, 96, 1]));
    shape_error(name, "slots", write(0, [&x, &x], &[0, 1]));
    shape_error(name, "width", write(0, [&x, &narrow], &[0, 1, 2]));
    let mut write = |layer, kv: &B::Tensor, slots: &[u32]| {
        let (step, slots) = subject.indices(slots);
        b.write_fused_kv(&step, KvSlots { cache: &mut cache, layer, slots }, kv)
    };
    let fused = subject.tensor(&[1.0; 24], 3, 8);
    index_error(name, "layer", write(2, &fused, &[0, 1, 2]));
    index_error(name, "slot", write(0, &fused, &[0, 1, 96]));
    shape_error(name, "slots", write(0, &fused, &[0, 1]));
    for n_columns in [4, 7, 9] {
        let odd = subject.tensor(&vec![1.0; 3 * n_columns], 3, n_columns);
        shape_error(name, "width", write(0, &odd, &[0, 1, 2]));
    }
    index_error(name, "block from", b.copy_blocks(&mut cache, &[(3, 0)]));
    index_error(name, "block to", b.copy_blocks(&mut cache, &[(0, 1), (0, 3)]));

    let mut host = b.host_kv_cache(KvLayout { n_blocks: 5, ..layout }).expect("a cache");
    index_error(name, "block out", b.swap_out(&cache, &mut host, &[(0, 4), (3, 0)]));
    index_error(name, "block out to", b.swap_out(&cache, &mut host, &[(0, 5)]));
    index_error(name, "block in", b.swap_in(&host, &mut cache, &[(5, 0)]));
    index_error(name, "block in to", b.swap_in(&host, &mut cache, &[(4, 3)]));
    let mut other = b.host_kv_cache(KvLayout { head_dim: 3, ..layout }).expect("a cache");
    shape_error(name, "another layout", b.swap_out(&cache, &mut other, &[]));
    shape_error(name, "another layout", b.swap_in(&other, &mut cache, &[]));

    let fits = PagedBatch {
        query_start_loc: &[0, 3],
        table_start_loc: &[0, 2],
        block_tables: &[2, 0],
        seq_lens: &[64],
    };
    // Refused as they are staged, or with what they do not fit.
    let attend = |layer, shape, mask, batch: PagedBatch<'_>| {
        let mut builder = StageBuilder::new();
        let seqs = builder.paged(batch)?;
        let step = b.stage(builder)?;
        let kv = KvLayer { cache: &cache, layer, seqs, mask, bias: ScoreBias::None };
        b.paged_attention(&step, &x, kv, shape)
    };
    let heads = shape(2, 2, 2);
    assert!(attend(1, heads, Mask::Full, fits).is_ok());
    index_error(name, "layer", attend(2, heads, Mask::Full, fits));
    index_error(name, "block", attend(0, heads, Mask::Full, PagedBatch { block_tables: &[2, 3], ..fits }));
    index_error(name, "keys", attend(0, heads, Mask::Full, PagedBatch { seq_lens: &[65], ..fits }));
    let batches = [
        PagedBatch { query_start_loc: &[0, 2], ..fits },
        PagedBatch { table_start_loc: &[0, 1], ..fits },
        PagedBatch { table_start_loc: &[0, 1, 2], ..fits },
        PagedBatch { seq_lens: &[], ..fits },
        PagedBatch { seq_lens: &[2], ..fits },
    ];
    for batch in batches {
        shape_error(name, &format!("{batch:?}"), attend(0, heads, Mask::Causal, batch));
    }
    shape_error(name, "heads of the cache", attend(0, shape(2, 1, 2), Mask::Full, fits));
}

pub fn rows_of_one_projection_that_do_not_fit_are_refused<B: Backend>(subject: &Subject<B>) {
    let (b, name) = (&subject.backend, subject.name.as_str());
    let layout = KvLayout { n_layers: 2, n_blocks: 3, n_kv_heads: 2, head_dim: 2 };
    let mut cache = b.kv_cache(layout).expect("a cache");
    let mut write = |layer, shape, qkv: &B::Tensor, slots: &[u32], head_dim| {
        let (step, (slots, angles)) =
            stage(b, |builder| Ok((builder.indices(slots)?, builder.angles(&[1.0; 3], &[0.0; 3], 1)?)));
        let rotation =
            Some(Rotation { shape: RopeShape { rotary_dim: 2, ..RopeShape::whole(head_dim) }, angles });
        let to = KvSlots { cache: &mut cache, layer, slots };
        b.write_fused_qkv(&step, to, FusedQkv { rows: qkv, shape, rotation })
    };
    let (qkv, of_qkv) = (subject.tensor(&[1.0; 48], 3, 16), shape(4, 2, 2));
    assert!(write(0, of_qkv, &qkv, &[0, 1, 2], 2).is_ok(), "{name}");
    index_error(name, "layer", write(2, of_qkv, &qkv, &[0, 1, 2], 2));
    index_error(name, "slot", write(0, of_qkv, &qkv, &[0, 1, 96], 2));
    shape_error(name, "slots", write(0, of_qkv, &qkv, &[0, 1], 2));
    shape_error(name, "heads", write(0, shape(3, 2, 2), &qkv, &[0, 1, 2], 2));
    shape_error(name, "heads of the rotation", write(0, of_qkv, &qkv, &[0, 1, 2], 4));
    let two = subject.tensor(&[1.0; 32], 2, 16);
    shape_error(name, "angles", write(0, of_qkv, &two, &[0, 1], 2));
}

pub fn biases_that_do_not_fit_are_refused<B: Backend>(subject: &Subject<B>) {
    let name = subject.name.as_str();
    let x = subject.tensor(&[1.0; 12], 3, 4);
    let b = &subject.backend;
    let attend = |cu_seqlens: &[u32], bias: &OnBackend<B>, table_of: Option<&[u32]>| {
        let (step, (seqs, table_of)) = stage(b, |builder| {
            let seqs = builder.self_sequences(cu_seqlens)?;
            Ok((seqs, table_of.map(|table_of| builder.indices(table_of)).transpose()?))
        });
        let seqs = Varlen { seqs, mask: Mask::Full, bias: bias.view(table_of) };
        b.attention(&step, Qkv { q: &x, k: &x, v: &x }, shape(2, 2, 2), seqs)
    };
    let layout = KvLayout { n_layers: 1, n_blocks: 1, n_kv_heads: 2, head_dim: 2 };
    let cache = b.kv_cache(layout).expect("a cache");
    let paged = |bias: &OnBackend<B>, table_of: Option<&[u32]>| {
        let batch = PagedBatch {
            query_start_loc: &[0, 3],
            table_start_loc: &[0, 1],
            block_tables: &[0],
            seq_lens: &[5],
        };
        let (step, (seqs, table_of)) = stage(b, |builder| {
            Ok((builder.paged(batch)?, table_of.map(|table_of| builder.indices(table_of)).transpose()?))
        });
        let bias = bias.view(table_of);
        let kv = KvLayer { cache: &cache, layer: 0, seqs, mask: Mask::Full, bias };
        b.paged_attention(&step, &x, kv, shape(2, 2, 2))
    };
    let loaded = |bias: StoredBias<'_>| OnBackend::<B>::Loaded(b.load_bias(bias).expect("a bias"));
    let values = |n: usize| OnBackend::<B>::Materialized(subject.tensor(&vec![0.0; n], n, 1));
    let rule = BucketRule { max_distance: 20, sides: BucketSides::Both };
    for n in [1, 3] {
        let table = Stored::f32(&vec![0.0; 8 * n], &[8, n]);
        let relative = loaded(StoredBias::Relative { table: table.view(), rule });
        shape_error(name, "heads of a relative bias", attend(&[0, 3], &relative, None));
        let slopes = loaded(StoredBias::Alibi(&[0.0; 3][..n]));
        shape_error(name, "slopes", attend(&[0, 3], &slopes, None));
        shape_error(name, "slopes over pages", paged(&slopes, None));
        shape_error(name, "values", attend(&[0, 1, 3], &values(10 + n), None));
        shape_error(name, "values over pages", paged(&values(28 + n), None));
    }
    assert!(attend(&[0, 1, 3], &values(10), None).is_ok(), "{name}");
    assert!(paged(&values(30), None).is_ok(), "{name}");
    let slopes = loaded(StoredBias::Alibi(&[0.0; 2]));
    assert!(attend(&[0, 3], &slopes, None).is_ok(), "{name}");
    shape_error(name, "tables of slopes", attend(&[0, 3], &slopes, Some(&[0])));

    let tables = |dims: [usize; 4]| StoredBias::Tables { values: vec![0.0; dims.iter().product()], dims };
    let (one, two) = (loaded(tables([1, 2, 3, 5])), loaded(tables([2, 2, 3, 5])));
    assert!(paged(&two, Some(&[1])).is_ok() && paged(&one, None).is_ok(), "{name}");
    shape_error(name, "one of two tables", paged(&two, None));
    index_error(name, "number of a table over pages", paged(&two, Some(&[2])));
    let square = loaded(tables([1, 2, 3, 3]));
    assert!(attend(&[0, 3], &square, Some(&[0])).is_ok(), "{name}");
    shape_error(name, "tables of sequences", attend(&[0, 3], &square, Some(&[0, 0])));
    index_error(name, "number of a table", attend(&[0, 3], &square, Some(&[1])));
    shape_error(name, "sequences of two sizes", attend(&[0, 1, 3], &loaded(tables([1, 2, 1, 1])), None));
    shape_error(name, "another size", attend(&[0, 3], &loaded(tables([1, 2, 3, 2])), None));
    shape_error(name, "heads of tables", attend(&[0, 3], &loaded(tables([1, 1, 3, 3])), None));
    for dims in [[1, 2, 3, 4], [usize::MAX, 2, 2, 2]] {
        shape_error(name, "part of a table", b.load_bias(StoredBias::Tables { values: vec![0.0; 19], dims }));
    }
    let table = Stored::f32(&[0.0; 4], &[2, 2]);
    shape_error(name, "few buckets", b.load_bias(StoredBias::Relative { table: table.view(), rule }));
}

pub fn convolutions_that_do_not_fit_are_refused<B: Backend>(subject: &Subject<B>) {
    let (b, name) = (&subject.backend, subject.name.as_str());
    let bytes = [0_u8; 4 * 36];
    let taps = |shape, bias| b.load_depthwise(view(shape, &bytes), bias);
    shape_error(name, "dimensions of taps", taps(&[4, 3, 3], None));
    shape_error(name, "taps over channels", taps(&[2, 2, 3, 3], None));
    shape_error(name, "bytes of taps", taps(&[4, 1, 3, 2], None));
    shape_error(name, "taps past counting", taps(&[0, 1, usize::MAX, usize::MAX], None));
    shape_error(name, "bias of taps", taps(&[4, 1, 3, 3], Some(view(&[3], &bytes[..12]))));
    let w = taps(&[4, 1, 3, 3], None).expect("taps");
    let x = subject.tensor(&[1.0; 48], 12, 4);
    let fits = Conv2d { n_images: 1, size: [3, 4], kernel: [3, 3], stride: [1, 1], padding: [1, 1] };
    assert!(b.depthwise2d(&x, &w, fits).is_ok() && b.unfold2d(&x, fits).is_ok(), "{name}");
    let convs = [
        Conv2d { n_images: 2, ..fits },
        Conv2d { n_images: 0, ..fits },
        Conv2d { size: [4, 4], ..fits },
        Conv2d { size: [usize::MAX, 2], ..fits },
        Conv2d { kernel: [0, 3], ..fits },
        Conv2d { kernel: [3, usize::MAX], ..fits },
        Conv2d { stride: [1, 0], ..fits },
        Conv2d { padding: [usize::MAX, 0], ..fits },
        Conv2d { padding: [usize::MAX / 8, usize::MAX / 8], ..fits },
    ];
    for conv in convs {
        shape_error(name, &format!("windows of {conv:?}"), b.unfold2d(&x, conv));
        shape_error(name, &format!("depthwise {conv:?}"), b.depthwise2d(&x, &w, conv));
    }
    shape_error(name, "another kernel", b.depthwise2d(&x, &w, Conv2d { kernel: [3, 1], ..fits }));
    shape_error(name, "channels", b.depthwise2d(&subject.tensor(&[1.0; 36], 12, 3), &w, fits));
}

pub fn nothing_in_gives_nothing_out<B: Backend>(subject: &Subject<B>) {
    let b = &subject.backend;
    let none = subject.tensor(&[], 0, 4);
    let empty = |what: &str, x: &B::Tensor, width| subject.close(what, x, (&[], 0, width), 0.0);
    let w = layer(subject, &[1.0; 20], Some(&[1.0; 5]), 4, 5);
    empty("linear", &b.linear(&none, &w, Activation::Gelu, None).expect("linear"), 5);
    let norm = load_norm(subject, NormKind::Layer, &[1.0; 4], None);
    empty("norm", &b.norm(&none, &norm).expect("norm"), 4);
    empty("gate", &b.gate(&none, Activation::Silu).expect("gate"), 2);
    empty("columns", &b.columns(&none, 1, 2).expect("columns"), 2);
    let batch = PagedBatch { query_start_loc: &[0], table_start_loc: &[0], block_tables: &[], seq_lens: &[] };
    let (step, (rows, offsets, angles, paged)) = stage(b, |builder| {
        let rows = builder.indices(&[])?;
        Ok((rows, builder.offsets(&[0])?, builder.angles(&[], &[], 1)?, builder.paged(batch)?))
    });
    empty("gathered", &b.gather_rows(&step, &none, rows).expect("gather"), 4);
    empty("group norm", &b.group_norm(&step, &none, &norm, offsets).expect("group norm"), 4);
    empty("split", &b.split_rows(none.clone(), 2).expect("split"), 2);
    let none_at_all = Conv2d { n_images: 0, size: [3, 2], kernel: [2, 2], stride: [1, 1], padding: [0, 0] };
    empty("unfolded images", &b.unfold2d(&none, none_at_all).expect("unfold"), 16);
    let taps = load_depthwise(subject, &[1.0; 16], None, [2, 2]);
    empty("convolved", &b.depthwise2d(&none, &taps, none_at_all).expect("depthwise"), 4);
    empty("merged", &b.merge_rows(none.clone(), 2).expect("merge"), 8);
    let mut x = none.clone();
    b.scatter_rows(&step, &mut x, rows, &none).expect("scatter");
    b.add(&mut x, &none).expect("add");
    b.rope(&step, &mut x, RopeShape::whole(2), angles).expect("rope");
    empty("in place", &x, 4);
    let conv = Unfold { n_seqs: 0, kernel: 3, stride: 1, padding: 1 };
    empty("unfolded", &b.unfold(&none, conv).expect("unfold"), 12);
    let heads = shape(2, 2, 2);
    for cu in [&[0][..], &[0, 0]] {
        let (step, seqs) = stage(b, |builder| builder.self_sequences(cu));
        let seqs = Varlen { seqs, mask: Mask::Causal, bias: ScoreBias::None };
        let out = b.attention(&step, Qkv { q: &none, k: &none, v: &none }, heads, seqs);
        empty("attention", &out.expect("attention"), 4);
    }
    let layout = KvLayout { n_layers: 1, n_blocks: 0, n_kv_heads: 2, head_dim: 2 };
    let mut cache = b.kv_cache(layout).expect("a cache");
    let to = KvSlots { cache: &mut cache, layer: 0, slots: rows };
    b.write_kv(&step, to, [&none, &none]).expect("write");
    b.copy_blocks(&mut cache, &[]).expect("copy");
    let kv = KvLayer { cache: &cache, layer: 0, seqs: paged, mask: Mask::Causal, bias: ScoreBias::None };
    empty("paged", &b.paged_attention(&step, &none, kv, heads).expect("paged"), 4);
}
