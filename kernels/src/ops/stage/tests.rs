//! Arrays as they are read back, rooms, bounds, and what is refused.

use super::*;
use crate::ops::PADDING_SLOT;

const PAGED: PagedBatch<'_> = PagedBatch {
    query_start_loc: &[0, 2, 3],
    table_start_loc: &[0, 1, 3],
    block_tables: &[7, 0, 9],
    seq_lens: &[32, 33],
};

#[test]
fn arrays_are_read_as_they_were_added() {
    let mut builder = StageBuilder::new();
    let ids = builder.indices(&[5, 0, 5]).expect("ids");
    let none = builder.indices(&[]).expect("no ids");
    let seqs = builder.sequences(&[0, 2, 2], &[0, 1, 4]).expect("sequences");
    let paged = builder.paged(PAGED).expect("pages");
    let angles = builder.angles(&[1.0, f32::NAN], &[-0.0, 2.0], 2).expect("angles");
    let step = builder.finish();
    assert_eq!(step.indices("op", ids).expect("ids"), [5, 0, 5]);
    assert_eq!([ids.bound(), none.bound(), none.len()], [6, 0, 0]);
    let [queries, keys] = seqs.offsets();
    assert_eq!(step.offsets("op", queries).expect("queries"), [0, 2, 2]);
    assert_eq!(step.offsets("op", keys).expect("keys"), [0, 1, 4]);
    assert_eq!((seqs.lens.short, seqs.lens.other, seqs.lens.n_scores), (Some((2, 1)), Some((0, 3)), 2));
    let read = step.paged("op", paged).expect("pages");
    assert_eq!((read.query_start_loc, read.table_start_loc), (PAGED.query_start_loc, PAGED.table_start_loc));
    assert_eq!((read.block_tables, read.seq_lens), (PAGED.block_tables, PAGED.seq_lens));
    let [cos, sin] = step.angles("op", angles).expect("angles");
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(cos), bits(&[1.0, f32::NAN]));
    assert_eq!(bits(sin), bits(&[-0.0, 2.0]));
}

#[test]
fn a_handle_of_another_step_is_refused() {
    let mut other = StageBuilder::new();
    let ids = other.indices(&[1]).expect("ids");
    let paged = other.paged(PAGED).expect("pages");
    let angles = other.angles(&[1.0], &[0.0], 1).expect("angles");
    let mut builder = StageBuilder::new();
    builder.indices(&[0; 100]).expect("words enough");
    let step = builder.finish();
    assert_eq!(step.indices("op", ids), Err(KernelError::Step { op: "op" }));
    assert_eq!(step.angles("op", angles), Err(KernelError::Step { op: "op" }));
    assert!(matches!(step.paged("op", paged), Err(KernelError::Step { op: "op" })));
}

#[test]
fn arrays_with_rooms_start_at_the_same_word_in_every_step() {
    let stage = |ids: &[u32], batch| -> Result<_> {
        let mut builder = StageBuilder::with_rooms(vec![6, 5, 5, 9, 4]);
        let (ids, paged) = (builder.indices(ids)?, builder.paged(batch)?);
        let starts = paged.words().map(|words| words.start);
        Ok((ids.words().start, starts, builder.finish().words().len()))
    };
    let one =
        PagedBatch { query_start_loc: &[0, 1], table_start_loc: &[0, 1], block_tables: &[3], seq_lens: &[1] };
    assert_eq!(stage(&[1, 2, 3, 4, 5, 6], PAGED), stage(&[1], one));
    assert_eq!(stage(&[1], one), Ok((0, [8, 16, 24, 36], 40)));
    assert!(matches!(stage(&[0; 7], one), Err(KernelError::Shape { what: "words of an array", .. })));
}

#[test]
fn bounded_sequences_have_the_bound_of_every_batch() {
    let stage = |q: &[u32], bound| {
        let mut builder = StageBuilder::new();
        let seqs = builder.bounded_sequences(q, &[0, 2, 6], bound)?;
        Ok((seqs.lens.max_seqlen_q, builder.finish().arrays().to_vec()))
    };
    let (bound, arrays) = stage(&[0, 4, 6], 5).expect("short enough");
    assert_eq!(bound, 5);
    assert_eq!(stage(&[0, 1, 6], 5), Ok((5, arrays)));
    assert!(matches!(stage(&[0, 0, 6], 5), Err(KernelError::Shape { .. })));
}

#[test]
fn bounded_pages_have_the_bounds_of_every_batch() {
    let bounds = PagedBounds { max_seqlen_q: 2, max_seqlen_k: 64 };
    let stage = |batch: PagedBatch<'_>| {
        assert_eq!(bounds.rooms(2), [3, 3, 4, 2]);
        let mut builder = StageBuilder::with_rooms(bounds.rooms(2).to_vec());
        let seqs = builder.bounded_paged(batch, bounds)?;
        let contents: Vec<_> = builder.finish().arrays().iter().map(|array| array.content).collect();
        Ok((seqs.lens.max_seqlen_q, seqs.lens.short, contents))
    };
    let contents = vec![
        ArrayContent::Offsets { n_rows: 3, max_seqlen_q: Some(2) },
        ArrayContent::Tables,
        ArrayContent::Blocks { bound: 10 },
        ArrayContent::SeqLens { max_seqlen_k: 64 },
    ];
    assert_eq!(stage(PAGED), Ok((2, None, contents.clone())));
    // A sequence of padding; one that lacks keys is none.
    let padded = PagedBatch { seq_lens: &[32, 0], ..PAGED };
    assert_eq!(stage(padded), Ok((2, None, contents.clone())));
    assert_eq!(stage(PagedBatch { seq_lens: &[0, 33], ..PAGED }), Ok((2, Some((2, 0)), contents)));
    let long = PagedBatch { query_start_loc: &[0, 0, 3], ..PAGED };
    assert!(matches!(stage(long), Err(KernelError::Shape { what: "queries of a sequence", .. })));
    let tight = StageBuilder::new().bounded_paged(PAGED, PagedBounds { max_seqlen_k: 32, ..bounds });
    assert!(matches!(tight, Err(KernelError::Shape { what: "keys of a sequence", .. })));
}

#[test]
fn sequences_with_states_have_slots_of_their_own_or_are_padding() {
    let stage = |offsets: &[u32], slots: &[u32]| {
        let mut builder = StageBuilder::with_rooms(RecurrentSequences::rooms(4).to_vec());
        let seqs = builder.bounded_recurrent(offsets, slots, 2)?;
        let step = builder.finish();
        let read = step.recurrent("op", seqs)?;
        assert_eq!((read.query_start_loc, read.slots), (offsets, slots));
        let contents: Vec<_> = step.arrays().iter().map(|array| array.content).collect();
        Ok((seqs.bound, seqs.max_seqlen_q, contents))
    };
    let contents = |n_rows, bound| {
        vec![ArrayContent::Offsets { n_rows, max_seqlen_q: Some(2) }, ArrayContent::StateSlots { bound }]
    };
    assert_eq!(stage(&[0, 1, 2, 4], &[9, 0, 3]), Ok((10, 2, contents(4, 10))));
    assert_eq!(stage(&[0, 1, 1, 2], &[PADDING_SLOT, 2, PADDING_SLOT]), Ok((3, 2, contents(2, 3))));
    assert_eq!(stage(&[0], &[]), Ok((0, 2, contents(0, 0))));
    for (offsets, slots) in [
        (&[0, 1, 2][..], &[4, 4][..]),
        (&[0, 1, 2], &[4]),
        (&[0, 1], &[4, 5]),
        (&[0, 3], &[4]),
        (&[1, 2], &[4]),
        (&[], &[]),
    ] {
        assert!(matches!(stage(offsets, slots), Err(KernelError::Shape { .. })), "{offsets:?} {slots:?}");
    }
    let long = StageBuilder::new().recurrent(&[0, 3, 8], &[1, 0]).expect("no bound");
    assert_eq!((long.max_seqlen_q, long.n_seqs()), (5, 2));
}

#[test]
fn arrays_that_do_not_fit_each_other_are_refused() {
    let paged = |batch| StageBuilder::new().paged(batch).map(|_| ());
    let batches = [
        PagedBatch { query_start_loc: &[0, 2], ..PAGED },
        PagedBatch { query_start_loc: &[0, 4, 3], ..PAGED },
        PagedBatch { query_start_loc: &[], ..PAGED },
        PagedBatch { table_start_loc: &[0, 1, 2], ..PAGED },
        PagedBatch { table_start_loc: &[0, 1, 2, 3], ..PAGED },
        PagedBatch { table_start_loc: &[1, 1, 3], ..PAGED },
        PagedBatch { seq_lens: &[32], ..PAGED },
    ];
    for batch in batches {
        assert!(matches!(paged(batch), Err(KernelError::Shape { .. })), "{batch:?}");
    }
    let long = paged(PagedBatch { seq_lens: &[33, 33], ..PAGED });
    assert!(matches!(long, Err(KernelError::Index { index: 33, len: 32, .. })));
    for offsets in [&[][..], &[1], &[0, 2, 1]] {
        assert!(StageBuilder::new().offsets(offsets).is_err(), "{offsets:?}");
        assert!(StageBuilder::new().sequences(offsets, &[0]).is_err(), "{offsets:?}");
    }
    assert!(StageBuilder::new().sequences(&[0, 1], &[0]).is_err());
    for (n_cos, n_sin, n_pairs) in [(2, 1, 1), (3, 3, 2), (1, 1, 0)] {
        let [cos, sin] = [n_cos, n_sin].map(|n| vec![0.0; n]);
        assert!(StageBuilder::new().angles(&cos, &sin, n_pairs).is_err(), "{n_cos} {n_sin} {n_pairs}");
    }
    assert!(StageBuilder::new().angles(&[], &[], 0).is_ok());
}
