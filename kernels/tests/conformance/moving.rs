//! Ops that move values and compute nothing: what comes out is bit for bit what went in.

use triptych_core::item::rows_from_f32;
use triptych_core::{DType, EncodedRows};
use triptych_kernels::ops::{Activation, Backend, LinearPart};

use crate::subject::{Stored, Subject, stage, through, values};

const WIDTHS: [usize; 4] = [1, 12, 33, 80];

pub fn upload_and_download_are_inverse<B: Backend>(subject: &Subject<B>) {
    for (n, width) in [(0, 4), (1, 1), (3, 33), (4, 0)] {
        let x = values(1, n * width);
        subject.close("an upload", &subject.tensor(&x, n, width), (&x, n, width), 0.0);
    }
}

pub fn stored_rows_are_widened_from_every_dtype<B: Backend>(subject: &Subject<B>) {
    for dtype in [DType::F32, DType::Bf16, DType::F16, DType::I8, DType::F8] {
        for width in WIDTHS {
            let stored = [0, 1, 300].map(|n| rows_from_f32(&values(n as u64 + 1, n * width), width, dtype));
            let rows: Vec<_> = stored
                .iter()
                .map(|bytes| EncodedRows::new(dtype, width, bytes).expect("whole rows"))
                .collect();
            let x = subject.backend.upload_rows(&rows).expect("rows of one width");
            let expect: Vec<f32> = rows.iter().flat_map(|rows| rows.to_f32()).collect();
            subject.close(&format!("{dtype} rows of {width}"), &x, (&expect, 301, width), 0.0);
        }
    }
    let zeros = subject.backend.zeros(3, 5).expect("zeros");
    subject.close("zeros", &zeros, (&[0.0; 15], 3, 5), 0.0);
    subject.close("no rows", &subject.backend.upload_rows(&[]).expect("none"), (&[], 0, 0), 0.0);
}

pub fn tables_give_their_rows_in_every_dtype<B: Backend>(subject: &Subject<B>) {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for width in WIDTHS {
            let table = values(1, 7 * width);
            let stored = Stored::new(dtype, &table, &[7, width]);
            let scale = if width == 12 { 3.5 } else { 1.0 };
            let loaded = subject.backend.load_table(stored.view(), scale).expect("a table");
            let kept = if dtype == DType::F32 { subject.tables } else { dtype };
            let table: Vec<f32> = through(kept, &table).into_iter().map(|value| value * scale).collect();
            for ids in [&[][..], &[6], &[0, 3, 3, 1]] {
                let (step, handle) = subject.indices(ids);
                let y = subject.backend.embed(&step, &loaded, handle).expect("embed");
                let expect: Vec<f32> =
                    ids.iter().flat_map(|&id| &table[id as usize * width..][..width]).copied().collect();
                subject.close("rows of a table", &y, (&expect, ids.len(), width), 0.0);
            }
        }
    }
}

pub fn a_large_table_gives_its_rows_within_the_step_of_a_byte<B: Backend>(subject: &Subject<B>) {
    // As many values as are worth narrowing, in a width that is no multiple of anything.
    const DIMS: [usize; 2] = [41_200, 51];
    let mut table = values(1, DIMS[0] * DIMS[1]);
    let width = DIMS[1];
    table[..width].fill(0.0);
    table[2 * width] = f32::INFINITY;
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let stored = Stored::new(dtype, &table, &DIMS);
        let loaded = subject.backend.load_table(stored.view(), 3.5).expect("a table");
        let (step, ids) = subject.indices(&[0, 1, 2, 41_199]);
        let y = subject.backend.embed(&step, &loaded, ids).expect("embed");
        let y = subject.backend.download(&y).expect("download");
        assert_eq!(y[..width], table[..width], "{}: zeros", subject.name);
        assert!(!y[2 * width].is_finite(), "{}: what is not a number", subject.name);
        for (id, row) in [(1, &y[width..2 * width]), (41_199, &y[3 * width..])] {
            let expect = through(dtype, &table[id * width..][..width]);
            let largest = expect.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            for (value, expect) in row.iter().zip(expect) {
                let error = (value / 3.5 - expect).abs();
                assert!(error <= 0.51 / 127.0 * largest, "{}: {value} of {expect}", subject.name);
            }
        }
    }
}

/// One weight that is table and layer both: each does what it would alone, whether or not there are two of them.
pub fn a_tied_table_gives_the_rows_of_one_of_its_own<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    // A small one, and one of as many values as are worth narrowing.
    for dims in [[37, 51], [41_200, 51]] {
        let ([n_rows, width], values) = (dims, values(1, dims[0] * dims[1]));
        let (step, ids) = subject.indices(&[0, 1, 36, n_rows as u32 - 1]);
        for (dtype, scale) in [(DType::F32, 1.0), (DType::Bf16, 1.0), (DType::F16, 1.0), (DType::F32, 0.3)] {
            let stored = Stored::new(dtype, &values, &dims);
            let part = LinearPart { scale, ..LinearPart::new(stored.view(), None) };
            let (layer, table) = backend.load_tied(part, 3.5).expect("both");
            let own = backend.load_table(stored.view(), 3.5).expect("a table");
            let rows = |table| {
                backend.download(&backend.embed(&step, table, ids).expect("embed")).expect("download")
            };
            // Where values were scaled and became bytes, one may lie a byte further.
            let step = if scale == 1.0 { 0.0 } else { 3.5 * 1.01 / 127.0 };
            let differ =
                rows(&table).into_iter().zip(rows(&own)).any(|(tied, own)| (tied - own).abs() > step);
            assert!(!differ, "{}: rows of {dims:?} {dtype:?} times {scale}", subject.name);
            let x = subject.tensor(&values[..width], 1, width);
            let alone = backend.load_logits(&[part]).expect("a layer");
            let [tied, alone] = [&layer, &alone].map(|layer| {
                subject.bits(&backend.linear(&x, layer, Activation::None, None).expect("linear"))
            });
            assert_eq!(tied, alone, "{}: logits of {dims:?} {dtype:?}", subject.name);
        }
    }
}

pub fn rows_are_gathered_and_scattered_by_number<B: Backend>(subject: &Subject<B>) {
    for width in WIDTHS {
        let (x, src) = (values(1, 5 * width), values(2, 2 * width));
        let mut t = subject.tensor(&x, 5, width);
        let (step, (three, two)) =
            stage(&subject.backend, |builder| Ok((builder.indices(&[4, 0, 4])?, builder.indices(&[3, 1])?)));
        let gathered = subject.backend.gather_rows(&step, &t, three).expect("gather");
        let row = |i: usize| &x[i * width..][..width];
        subject.close("gathered rows", &gathered, (&[row(4), row(0), row(4)].concat(), 3, width), 0.0);

        subject.backend.scatter_rows(&step, &mut t, two, &subject.tensor(&src, 2, width)).expect("scatter");
        let (first, second) = src.split_at(width);
        let expect = [row(0), second, row(2), first, row(4)].concat();
        subject.close("scattered rows", &t, (&expect, 5, width), 0.0);
    }
}

pub fn rows_of_a_table_are_summed_by_weights<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for width in WIDTHS {
        let x = values(1, 5 * width);
        let table = backend.load_table(Stored::f32(&x, &[5, width]).view(), 1.0).expect("a table");
        let x = through(subject.tables, &x);
        let rows = [4, 0, 4, 1, 1, 2];
        let weights = [0.25, -1.0, 2.0, 0.0, 0.5, 0.5];
        let (step, sums) = stage(backend, |builder| builder.weighted_rows(&rows, &weights, 3));
        let y = backend.embed_weighted(&step, &table, sums).expect("sums");
        let row = |i: u32| &x[i as usize * width..][..width];
        let sum = |i: usize, column: usize| {
            (3 * i..3 * i + 3).map(|term| weights[term] * row(rows[term])[column]).sum::<f32>()
        };
        let expect: Vec<f32> =
            (0..2).flat_map(|i| (0..width).map(move |c| (i, c))).map(|(i, c)| sum(i, c)).collect();
        subject.close("weighted rows", &y, (&expect, 2, width), 1e-6);
    }
}

pub fn a_clone_keeps_its_values_when_the_other_is_written<B: Backend>(subject: &Subject<B>) {
    let x = values(1, 6);
    let mut written = subject.tensor(&x, 2, 3);
    let kept = written.clone();
    subject.backend.add(&mut written, &kept).expect("add");
    subject.close("the clone", &kept, (&x, 2, 3), 0.0);
}

pub fn columns_merged_and_split_rows_keep_the_order_of_values<B: Backend>(subject: &Subject<B>) {
    let x = values(1, 6 * 33);
    let t = subject.tensor(&x, 6, 33);
    for (start, width) in [(0, 33), (1, 1), (20, 13), (33, 0)] {
        let y = subject.backend.columns(&t, start, width).expect("columns");
        let expect: Vec<f32> = x.chunks(33).flat_map(|row| &row[start..][..width]).copied().collect();
        subject.close("columns", &y, (&expect, 6, width), 0.0);
    }
    for group in [1, 2, 3, 6] {
        let y = subject.backend.merge_rows(t.clone(), group).expect("merge");
        subject.close("merged rows", &y, (&x, 6 / group, 33 * group), 0.0);
    }
    for parts in [1, 3, 11, 33] {
        let y = subject.backend.split_rows(t.clone(), parts).expect("split");
        subject.close("split rows", &y, (&x, 6 * parts, 33 / parts), 0.0);
    }
}

pub fn sequences_are_transposed_each_by_itself<B: Backend>(subject: &Subject<B>) {
    for (n_seqs, t, width) in
        [(1, 1, 1), (3, 5, 7), (2, 64, 33), (1, 130, 65), (2, 3, 0), (2, 0, 3), (0, 0, 5)]
    {
        let x = values(1, n_seqs * t * width);
        let y = subject.backend.transpose(&subject.tensor(&x, n_seqs * t, width), n_seqs).expect("transpose");
        let at = |seq: usize, column: usize, row: usize| x[(seq * t + row) * width + column];
        let column = |i: usize| (0..t).map(move |row| (i / width, i % width, row));
        let places = (0..n_seqs * width).flat_map(column);
        let expect: Vec<f32> = places.map(|(seq, column, row)| at(seq, column, row)).collect();
        subject.close("turned sequences", &y, (&expect, n_seqs * width, t), 0.0);
    }
}
