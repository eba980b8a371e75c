//! Steps: handles are of one step, and where an array lies does not matter.

use triptych_kernels::KernelError;
use triptych_kernels::ops::{
    Backend, ChosenHeads, FusedQkv, KvLayer, KvLayout, KvSlots, Mask, NormKind, PagedBatch, Qkv, RopeShape,
    Rotation, ScoreBias, StageBuilder, Varlen,
};

use crate::rows::load_norm;
use crate::sequences::{Sequences, shape};
use crate::subject::{Stored, Subject, stage};

pub fn a_handle_of_another_step_is_refused<B: Backend>(subject: &Subject<B>) {
    let b = &subject.backend;
    let batch =
        PagedBatch { query_start_loc: &[0, 1], table_start_loc: &[0, 1], block_tables: &[0], seq_lens: &[1] };
    let both = |builder: &mut StageBuilder| {
        let (rows, seqs) = (builder.indices(&[0])?, builder.self_sequences(&[0, 1])?);
        Ok((rows, seqs, builder.angles(&[1.0; 2], &[0.0; 2], 2)?, builder.paged(batch)?))
    };
    // The same arrays, so that nothing else is wrong.
    let (step, (.., own_angles, _)) = stage(b, both);
    let (other, (rows, seqs, angles, paged)) = stage(b, both);
    let refused = |what: &str, result: Result<(), KernelError>| {
        let is_refused = matches!(result, Err(KernelError::Step { .. }));
        assert!(is_refused, "{}: {what}: {result:?}", subject.name);
    };
    let mut x = subject.tensor(&[1.0; 4], 1, 4);
    let y = x.clone();
    let qkv = subject.tensor(&[1.0; 12], 1, 12);
    let stored = Stored::f32(&[1.0; 4], &[1, 4]);
    let table = b.load_table(stored.view(), 1.0).expect("a table");
    let norm = load_norm(subject, NormKind::Layer, &[1.0; 4], None);
    let layout = KvLayout { n_layers: 1, n_blocks: 1, n_kv_heads: 1, head_dim: 4 };
    let mut cache = b.kv_cache(layout).expect("a cache");
    let heads = shape(1, 1, 4);
    let of = |seqs| Varlen { seqs, mask: Mask::Causal, bias: ScoreBias::None };
    refused("embed", b.embed(&step, &table, rows).map(drop));
    refused("gather", b.gather_rows(&step, &x, rows).map(drop));
    refused("scatter", b.scatter_rows(&step, &mut x, rows, &y));
    refused("rope", b.rope(&step, &mut x, RopeShape::whole(4), angles));
    refused("group norm", b.group_norm(&step, &x, &norm, seqs.offsets()[0]).map(drop));
    refused("attention", b.attention(&step, Qkv { q: &x, k: &x, v: &x }, heads, of(seqs)).map(drop));
    let chosen = ChosenHeads { shape: heads, heads: rows };
    refused("weights", b.attention_weights(&step, [&x, &x], chosen, of(seqs)).map(drop));
    let to = KvSlots { cache: &mut cache, layer: 0, slots: rows };
    refused("keys and values", b.write_kv(&step, to, [&x, &x]));
    let mut fused = |step: &B::Step, angles| {
        let rotation = Some(Rotation { shape: RopeShape::whole(4), angles });
        let to = KvSlots { cache: &mut cache, layer: 0, slots: rows };
        b.write_fused_qkv(step, to, FusedQkv { rows: &qkv, shape: heads, rotation }).map(drop)
    };
    refused("slots of one projection", fused(&step, own_angles));
    refused("angles of one projection", fused(&other, own_angles));
    let kv = KvLayer { cache: &cache, layer: 0, seqs: paged, mask: Mask::Causal, bias: ScoreBias::None };
    refused("pages", b.paged_attention(&step, &x, kv, heads).map(drop));
    assert_eq!(subject.bits(&x), subject.bits(&y), "{}: nothing was written", subject.name);
}

pub fn where_an_array_lies_does_not_matter<B: Backend>(subject: &Subject<B>) {
    let seqs = Sequences::new(&[(3, 40), (0, 2), (5, 5)], shape(4, 2, 20), Mask::Causal);
    let packed = subject.bits(&seqs.attend(subject, &subject.backend));
    let mut builder = StageBuilder::with_rooms(vec![10, 100, 7]);
    builder.indices(&[u32::MAX; 9]).expect("room");
    let staged = seqs.stage(&mut builder).expect("room");
    let step = subject.backend.stage(builder).expect("a step");
    let q = subject.tensor(&seqs.q, seqs.n_queries(), seqs.q_width());
    let [k, v] = [&seqs.k, &seqs.v].map(|x| subject.tensor(x, seqs.n_keys(), seqs.kv_width()));
    let (qkv, bias) = (Qkv { q: &q, k: &k, v: &v }, seqs.load_bias(&subject.backend));
    let roomy = subject.backend.attention(&step, qkv, seqs.shape, seqs.varlen(staged, &bias));
    let roomy = roomy.expect("attention");
    assert_eq!(subject.bits(&roomy), packed, "{}", subject.name);
}
