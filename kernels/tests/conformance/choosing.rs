//! Choices by rows of logits: those of the host's sampler on every back end, whatever else is asked for beside them.

use std::sync::Arc;

use triptych_kernels::KernelError;
use triptych_kernels::ops::{
    Backend, CarriedToken, Choice, Choices, ChooseBatch, ChooseRow, Edit, PendingChoices, SampleError,
    Sampling, StageBuilder, Submitted, mask_of,
};
use triptych_kernels::sampling::choose_rows;

use crate::subject::{Stored, Subject, values};

const NO: f32 = f32::NEG_INFINITY;
const VOCABS: [usize; 8] = [1, 2, 31, 33, 255, 256, 257, 1000];
const N_ROWS: usize = 5;

/// Logits with equals and tokens that are ruled out, as the back end keeps them: on the host, and there.
fn logits<B: Backend>(subject: &Subject<B>, vocab: usize) -> (Vec<f32>, B::Tensor) {
    let value =
        |(i, v): (usize, f32)| if i % 11 == 5 && i % vocab != 0 { NO } else { (v * 40.0).round() / 4.0 };
    let values: Vec<f32> = values(vocab as u64, N_ROWS * vocab).into_iter().enumerate().map(value).collect();
    let tensor = subject.tensor(&values, N_ROWS, vocab);
    (subject.backend.download(&tensor).expect("a download"), tensor)
}

/// Changes of a row: each kind, of tokens inside the vocabulary and past it, several of one token.
fn edits(row: u32, vocab: usize) -> Vec<Edit> {
    let token = |n: u32| (row * 7 + n) % (vocab as u32 + 1);
    let mut edits: Vec<Edit> = (0..20).map(|n| Edit::bias(token(n), 0.25 * n as f32 - 2.0)).collect();
    edits.extend((0..9).map(|n| Edit::penalty(token(3 * n), 1.5, 0.5)));
    edits.extend((1..4).map(|n| Edit::forbid(token(11 * n) + 1)));
    edits.push(Edit::penalty(u32::MAX, 2.0, 1.0));
    edits
}

fn ask<B: Backend>(subject: &Subject<B>, logits: B::Tensor, batch: &ChooseBatch) -> Choices {
    subject.backend.choose(logits, batch).unwrap_or_else(|error| panic!("{}: {error}", subject.name))
}

/// Fails unless two answers agree; sums of log-probabilities may be rounded differently.
#[track_caller]
fn same(what: &str, actual: &Result<Choice, SampleError>, expect: &Result<Choice, SampleError>) {
    let (Ok(a), Ok(e)) = (actual, expect) else {
        // NaN is not equal to itself.
        return assert_eq!(format!("{actual:?}"), format!("{expect:?}"), "{what}");
    };
    assert_eq!(a.token, e.token, "{what}");
    let (a, e) = match (&a.logprobs, &e.logprobs) {
        (None, None) => return,
        (Some(a), Some(e)) => (a, e),
        other => panic!("{what}: {other:?}"),
    };
    let tokens = |top: &[(u32, f32)]| top.iter().map(|t| t.0).collect::<Vec<_>>();
    assert_eq!(tokens(&a.top), tokens(&e.top), "{what}");
    let values = |one: &triptych_kernels::ops::TokenLogprobs| -> Vec<f32> {
        [one.chosen].into_iter().chain(one.top.iter().map(|t| t.1)).collect()
    };
    for (a, e) in values(a).into_iter().zip(values(e)) {
        assert!((a - e).abs() < 1e-5 * (1.0 + e.abs()), "{what}: {a} for {e}");
    }
}

pub fn greedy_choices_are_the_hosts_after_every_change<B: Backend>(subject: &Subject<B>) {
    for vocab in VOCABS {
        let (host, _) = logits(subject, vocab);
        let third: Vec<u32> = (0..vocab as u32).step_by(3).collect();
        let mask = mask_of(&third, vocab);
        for changes in 0..4 {
            let choices = (0..N_ROWS as u32).map(|row| ChooseRow {
                edits: if changes & 1 == 1 { edits(row, vocab) } else { Vec::new() },
                // One row has none, the others share it.
                mask: (changes & 2 == 2 && row != 1).then(|| Arc::clone(&mask)),
                n_top: (row != 2).then_some(row * 2),
                ..ChooseRow::greedy(row)
            });
            let batch = ChooseBatch { choices: choices.collect(), whole: Vec::new() };
            let chosen = ask(subject, logits(subject, vocab).1, &batch);
            let expect = choose_rows(host.clone(), vocab, &batch);
            for (row, (a, e)) in chosen.choices.iter().zip(&expect.choices).enumerate() {
                same(&format!("{}: {vocab}, changes {changes}, row {row}", subject.name), a, e);
            }
            assert_eq!(chosen.choices.len(), N_ROWS);
        }
    }
}

pub fn draws_are_the_hosts_within_rounding<B: Backend>(subject: &Subject<B>) {
    let all = Sampling { temperature: 1.0, ..Sampling::GREEDY };
    let settings = [
        all,
        Sampling { temperature: 0.3, ..all },
        Sampling { top_k: Some(1), ..all },
        Sampling { temperature: 1.5, top_k: Some(2), ..all },
        Sampling { top_k: Some(40), ..all },
        Sampling { top_p: 0.01, ..all },
        Sampling { temperature: 2.0, top_p: 0.9, ..all },
        Sampling { temperature: 0.7, min_p: 0.05, ..all },
        Sampling { top_k: Some(50), top_p: 0.8, min_p: 0.1, ..all },
    ];
    const LAST: u64 = (1 << 53) - 1;
    for vocab in VOCABS {
        for how in settings {
            let draws = values(vocab as u64 + 1, N_ROWS)
                .into_iter()
                .map(|v| (f64::from(v + 1.0) / 2.0 * LAST as f64) as u64);
            let draws: Vec<u64> = draws.collect();
            let asked = |moved: i64| {
                let row = |(row, draw): (u32, &u64)| {
                    let draw = draw.saturating_add_signed(moved).min(LAST);
                    ChooseRow { sampling: Sampling { draw, ..how }, ..ChooseRow::greedy(row) }
                };
                ChooseBatch { choices: (0..).zip(&draws).map(row).collect(), whole: Vec::new() }
            };
            let (host, tensor) = logits(subject, vocab);
            let chosen = ask(subject, tensor, &asked(0));
            // A draw within rounding of the edge between two tokens may fall on either side.
            let slack = 1 << 33;
            let near =
                [-slack, 0, slack].map(|moved| choose_rows(host.clone(), vocab, &asked(moved)).choices);
            for (row, choice) in chosen.choices.iter().enumerate() {
                let expect = [0, 1, 2].map(|i| &near[i][row]);
                assert!(
                    expect.contains(&choice),
                    "{}: {vocab} {how:?}: {choice:?} for {expect:?}",
                    subject.name
                );
            }
        }
    }
}

pub fn choices_of_one_row_and_whole_rows_do_not_see_changes<B: Backend>(subject: &Subject<B>) {
    let vocab = 33;
    let (host, tensor) = logits(subject, vocab);
    let changed = |row| ChooseRow { edits: edits(row, vocab), n_top: Some(3), ..ChooseRow::greedy(row) };
    let choices = vec![changed(4), ChooseRow::greedy(4), changed(0), changed(0), ChooseRow::greedy(0)];
    for whole in [vec![], vec![0], vec![1, 2, 4], (0..N_ROWS as u32).collect()] {
        let batch = ChooseBatch { choices: choices.clone(), whole };
        let mut chosen = ask(subject, tensor.clone(), &batch);
        let expect = choose_rows(host.clone(), vocab, &batch);
        for (i, (a, e)) in chosen.choices.iter().zip(&expect.choices).enumerate() {
            same(&format!("{}: choice {i}", subject.name), a, e);
        }
        for row in 0..N_ROWS {
            let got = chosen.rows.get_mut(row, 1).map(|row| row.to_vec());
            let expect = batch.whole.contains(&(row as u32)).then(|| host[row * vocab..][..vocab].to_vec());
            assert_eq!(got, expect, "{}: row {row} of {:?}", subject.name, batch.whole);
        }
    }
    assert_eq!(
        subject.backend.download(&tensor).expect("a download"),
        host,
        "{}: a clone is changed",
        subject.name
    );
}

pub fn a_row_that_allows_no_choice_fails_alone<B: Backend>(subject: &Subject<B>) {
    let rows =
        [[1.0, 2.0, 3.0], [0.0, f32::NAN, f32::NAN], [f32::INFINITY, 0.0, 0.0], [NO; 3], [3.0, 2.0, NO]];
    let tensor = subject.tensor(&rows.concat(), N_ROWS, 3);
    let mut batch = ChooseBatch::greedy(N_ROWS);
    batch.choices.iter_mut().for_each(|asked| asked.n_top = Some(3));
    batch.choices.push(ChooseRow { edits: vec![Edit::forbid(1), Edit::forbid(2)], ..ChooseRow::greedy(1) });
    batch.choices.push(ChooseRow { mask: Some(mask_of(&[2], 3)), ..ChooseRow::greedy(4) });
    let expect = choose_rows(rows.concat(), 3, &batch);
    let chosen = ask(subject, tensor, &batch);
    for (i, (a, e)) in chosen.choices.iter().zip(&expect.choices).enumerate() {
        same(&format!("{}: choice {i}", subject.name), a, e);
    }
    let kinds: Vec<bool> = chosen.choices.iter().map(Result::is_ok).collect();
    assert_eq!(kinds, [true, false, false, false, true, true, false], "{}", subject.name);
}

pub fn a_choice_is_the_same_alone<B: Backend>(subject: &Subject<B>) {
    let vocab = 257;
    let (host, tensor) = logits(subject, vocab);
    let row = |row: u32| ChooseRow {
        sampling: Sampling { temperature: 5.0, top_p: 0.9, draw: u64::from(row) << 49, ..Sampling::GREEDY },
        edits: edits(row, vocab),
        n_top: Some(row),
        ..ChooseRow::greedy(row)
    };
    let batch = ChooseBatch { choices: (0..N_ROWS as u32).map(row).collect(), whole: Vec::new() };
    let together = ask(subject, tensor, &batch);
    for (i, asked) in batch.choices.iter().enumerate() {
        let alone = subject.tensor(&host[i * vocab..][..vocab], 1, vocab);
        let batch = ChooseBatch { choices: vec![ChooseRow { row: 0, ..asked.clone() }], whole: Vec::new() };
        assert_eq!(ask(subject, alone, &batch).choices[0], together.choices[i], "{}: row {i}", subject.name);
    }
}

pub fn batches_that_do_not_fit_are_refused<B: Backend>(subject: &Subject<B>) {
    let refused = |batch: &ChooseBatch| {
        let logits = subject.tensor(&[0.0; 80], 2, 40);
        subject.backend.choose(logits, batch).expect_err("a batch that does not fit")
    };
    let one = |asked: ChooseRow| ChooseBatch { choices: vec![asked], whole: Vec::new() };
    let whole = |whole: &[u32]| ChooseBatch { choices: Vec::new(), whole: whole.to_vec() };
    for batch in [one(ChooseRow::greedy(2)), whole(&[0, 2])] {
        let error = refused(&batch);
        assert!(matches!(error, KernelError::Index { index: 2, len: 2, .. }), "{}: {error}", subject.name);
    }
    let short = ChooseRow { mask: Some([u32::MAX].into()), ..ChooseRow::greedy(0) };
    for batch in [one(short), whole(&[0, 0]), whole(&[1, 0])] {
        let error = refused(&batch);
        assert!(matches!(error, KernelError::Shape { .. }), "{}: {error}", subject.name);
    }
    for n_rows in [0, 1] {
        let logits = subject.tensor(&vec![0.0; 40 * n_rows], n_rows, 40);
        assert_eq!(ask(subject, logits, &ChooseBatch::default()).choices, [], "{}", subject.name);
    }
}

/// The host's answer is there at once; a device's is waited for, and beside later work is the same.
pub fn submitted_choices_are_those_that_are_waited_for<B: Backend>(subject: &Subject<B>) {
    let vocab = 33;
    let batch = ChooseBatch { whole: vec![1, 3], ..ChooseBatch::greedy(N_ROWS) };
    let expect = ask(subject, logits(subject, vocab).1, &batch);
    let submit = |batch: &ChooseBatch| {
        subject.backend.submit_choices(logits(subject, vocab).1, batch).expect("choices that are begun")
    };
    let [first, nothing] = [submit(&batch), submit(&ChooseBatch::default())];
    let second = submit(&batch);
    for submitted in [first, second] {
        assert_eq!(end(submitted), expect, "{}", subject.name);
    }
    assert_eq!(end(nothing).choices, [], "{}", subject.name);
}

fn end<S, P: PendingChoices<S>>(submitted: Submitted<P>) -> Choices {
    match submitted {
        Submitted::Done(choices) => choices,
        Submitted::UnderWay(pending) => pending.wait().expect("choices"),
    }
}

/// Ids of a step take the tokens that are being chosen before it; a row that nothing can be chosen from gives token 0.
pub fn tokens_that_are_being_chosen_are_carried_over<B: Backend>(subject: &Subject<B>) {
    let vocab = 129;
    let width = 3;
    let mut values = logits(subject, vocab).0;
    values[2 * vocab] = f32::NAN;
    let expect = choose_rows(values.clone(), vocab, &ChooseBatch::greedy(N_ROWS));
    let submitted = subject
        .backend
        .submit_choices(subject.tensor(&values, N_ROWS, vocab), &ChooseBatch::greedy(N_ROWS))
        .expect("choices that are begun");
    // Back ends that choose at once have nothing to carry.
    let Submitted::UnderWay(pending) = submitted else { return };
    let rows: Vec<f32> = (0..vocab * width).map(|i| (i / width) as f32 / 2.0).collect();
    let stored = Stored::f32(&rows, &[vocab, width]);
    let table = subject.backend.load_table(stored.view(), 1.0).expect("a table");
    let mut builder = StageBuilder::new();
    let ids = builder.indices(&[9, 8, 7, 6]).expect("ids");
    let step = subject.backend.stage(builder).expect("a step");
    let carried = [(3, 1), (0, 2), (1, 4)].map(|(row, choice)| CarriedToken { row, choice });
    pending.carry_tokens(&step, ids, &carried).expect("rows and choices that are there");
    let embedded = subject.backend.embed(&step, &table, ids).expect("rows");
    let read = subject.backend.download(&embedded).expect("a download");
    let token = |choice: usize| expect.choices[choice].as_ref().map_or(0, |choice| choice.token);
    let tokens = [token(2), token(4), 7, token(1)];
    let half = |value: &[f32]| (value[0] * 2.0) as u32;
    assert_eq!(read.chunks(width).map(half).collect::<Vec<_>>(), tokens, "{}", subject.name);
    for carried in [CarriedToken { row: 4, choice: 0 }, CarriedToken { row: 0, choice: N_ROWS as u32 }] {
        let refused = pending.carry_tokens(&step, ids, &[carried]);
        assert!(matches!(refused, Err(KernelError::Index { .. })), "{}: {refused:?}", subject.name);
    }
    assert_eq!(pending.wait().expect("choices").choices.len(), N_ROWS, "{}", subject.name);
}
