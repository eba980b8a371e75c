//! The product's rules at work in the simulator.

use crate::made::{FAST, Load, Prices, SLOW, apart, curves, image, one, pool};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::outcome::{End, Outcome};
use triptych_plan::curves::{CostCurves, Point};
use triptych_plan::simulator::simulate;
use triptych_plan::simulator::spec::{ClusterSpec, EncoderSpec, ItemsAt, PdSpec, PoolRole, SpecError};
use triptych_proxy::Roles;
use triptych_runtime::compute_arbiter::EncoderBudget;

fn ttft(outcome: &Outcome) -> f64 {
    (*outcome.tokens.first().expect("an answer") - outcome.due).as_secs_f64()
}

#[test]
fn an_item_that_many_ask_for_at_once_is_encoded_once() {
    let requests = (0..8).map(|i| one(i, i, 20, vec![image(1, 500), image(1, 500)]));
    let run = simulate(&apart(4, 2, SLOW), requests, 1).unwrap();
    assert_eq!((run.items.encoded, run.items.shared), (1, 15), "{:?}", run.items);
    assert_eq!(run.pools[0].n_encoded, 1);
    assert_eq!(run.outcomes.iter().map(|o| o.items.n_found).sum::<u32>(), 15);
    // Another shape is another item.
    let requests = (0..2).map(|i| one(i, 0, 20, vec![image(1, 500 + i as u32)]));
    let run = simulate(&apart(1, 1, SLOW), requests, 1).unwrap();
    assert_eq!(run.items.encoded, 2);
}

#[test]
fn an_output_is_remembered_then_looked_for_in_the_store_and_encoded_no_second_time() {
    let requests = [0, 5_000, 60_000].into_iter().zip(0..).map(|(at, i)| one(i, at, 20, vec![image(1, 500)]));
    let mut cluster = apart(1, 1, SLOW);
    if let PoolRole::Pd(pd) = &mut cluster.pools[1].role {
        pd.rows_budget_bytes = 0;
    }
    let run = simulate(&cluster, requests, 1).unwrap();
    assert_eq!((run.items.encoded, run.items.remembered, run.items.stored), (1, 1, 1), "{:?}", run.items);
    // Where rows stay on the PD worker, the store is not asked.
    let requests = [0, 60_000].into_iter().zip(0..).map(|(at, i)| one(i, at, 20, vec![image(1, 500)]));
    let run = simulate(&apart(1, 1, SLOW), requests, 1).unwrap();
    assert_eq!((run.items.resident, run.items.loads, run.items.loads_saved), (1, 1, 1), "{:?}", run.items);
}

#[test]
fn preprocessing_takes_no_time_of_a_device() {
    // Eight images, each 50 ms to preprocess and 50 ms to encode.
    let prices = Prices { spread: 1.0, ..FAST };
    let last = |on_device| {
        let mut cluster = apart(1, 1, prices);
        let preprocess = [1e4, 1e6].map(|of| Point { of, p50_us: 5e4, p95_us: 5e4 }).to_vec();
        cluster.pools[0].curves = Arc::new(CostCurves { on_device, preprocess, ..curves(prices) });
        let requests = (0..8).map(|i| one(i, 0, 20, vec![image(i, 500)]));
        let run = simulate(&cluster, requests, 1).unwrap();
        (run.outcomes.iter().map(ttft).fold(0.0, f64::max), run.pools[0].preprocess_s)
    };
    let ((on_cores, computed), (on_device, beside)) = (last(false), last(true));
    assert!((on_cores - 0.86).abs() < 0.03 && (computed - 0.4).abs() < 0.001, "{on_cores}, {computed}");
    assert!((on_device - 0.55).abs() < 0.03 && beside == 0.0, "{on_device}, {beside}");
}

#[test]
fn a_prompt_is_read_up_to_the_first_item_that_is_not_there_yet() {
    // A second of text before a image that takes a second to encode: together they take little more than one.
    let mut cluster = apart(1, 1, SLOW);
    let at = |items, cluster: &mut ClusterSpec| {
        cluster.prompt.items = items;
        let requests = std::iter::once(one(0, 0, 1000, vec![image(1, 1000)]));
        ttft(&simulate(cluster, requests, 1).unwrap().outcomes[0])
    };
    let (front, back) = (at(ItemsAt::Front, &mut cluster), at(ItemsAt::Back, &mut cluster));
    assert!((front - 3.0).abs() < 0.15, "{front}");
    assert!(
        (back - 2.0).abs() < 0.15,
        "text that stands before the image is read while it is encoded: {back}"
    );
}

#[test]
fn of_several_items_the_first_is_read_while_the_next_is_encoded() {
    let items = || vec![image(1, 1000), image(2, 1000)];
    let alone = simulate(&apart(1, 1, SLOW), std::iter::once(one(0, 0, 10, items())), 1).unwrap();
    // Two seconds of encoding, two of reading, and one of them at the same time. One batch of both would be read after it.
    let mut by_one = apart(1, 1, SLOW);
    if let PoolRole::Encoder(encoder) = &mut by_one.pools[0].role {
        encoder.batch.max_items = 1;
    }
    let apart = simulate(&by_one, std::iter::once(one(0, 0, 10, items())), 1).unwrap();
    assert!(ttft(&apart.outcomes[0]) < 3.3, "{}", ttft(&apart.outcomes[0]));
    assert!(ttft(&alone.outcomes[0]) >= ttft(&apart.outcomes[0]));
}

#[test]
fn on_shared_cores_no_more_is_encoded_between_two_tokens_than_the_budget_allows() {
    let gap = |encoder_budget| {
        let (pd, encoder) = (PdSpec::default(), EncoderSpec::default());
        let role = PoolRole::Both { pd, encoder, encoder_budget };
        let cluster = ClusterSpec::new(vec![pool("both", 1, role, SLOW)]);
        // A text that is being written when a image of a second comes.
        let mut text = one(0, 0, 10, Vec::new());
        text.output_tokens = 100;
        let image_request = one(1, 500, 10, vec![image(1, 1000)]);
        let run = simulate(&cluster, [text, image_request].into_iter(), 1).unwrap();
        assert!(run.outcomes.iter().all(|o| o.end == End::Whole));
        let tokens = &run.outcomes[0].tokens;
        // Before the image itself is read, whose step takes half a second.
        let until = Duration::from_millis(1600);
        let gaps = tokens
            .windows(2)
            .filter(|t| t[0] < until && (t[1] < until || encoder_budget == EncoderBudget::Unlimited));
        let gap = gaps.map(|t| t[1] - t[0]).max().unwrap();
        let meanwhile = |t: &&Duration| **t > Duration::from_millis(510) && **t < Duration::from_millis(1500);
        (gap, tokens.iter().filter(meanwhile).count(), run.stages[1].encode)
    };
    let (unlimited, _, at_once) = gap(EncoderBudget::Unlimited);
    let (bounded, written, in_parts) = gap(EncoderBudget::Tokens(100));
    // A part is a tenth of the forward: a hundred tokens, a tenth of a second.
    assert!(bounded < Duration::from_millis(130), "{bounded:?}");
    assert!(unlimited > Duration::from_millis(900), "{unlimited:?}");
    assert!(
        in_parts > at_once && written >= 8,
        "the text goes on, and the image waits for it: {in_parts:?} {at_once:?}"
    );
}

#[test]
fn on_shared_cores_decodes_that_are_ahead_of_their_slo_wait_for_an_image() {
    let run = |tpot_slo| {
        let mut pd = PdSpec::default();
        pd.engine.tpot_slo = tpot_slo;
        let encoder_budget = EncoderBudget::Automatic;
        let role = PoolRole::Both { pd, encoder: EncoderSpec::default(), encoder_budget };
        let cluster = ClusterSpec::new(vec![pool("both", 1, role, SLOW)]);
        // A text whose tokens take 12 ms each, when an image of a second comes.
        let mut text = one(0, 0, 10, Vec::new());
        text.output_tokens = 100;
        let image_request = one(1, 500, 10, vec![image(1, 1000)]);
        let run = simulate(&cluster, [text, image_request].into_iter(), 1).unwrap();
        (run.stages[1].encode.as_secs_f64(), run.outcomes[0].tpot().unwrap())
    };
    let (untold, _) = run(None);
    let (tight, _) = run(Some(Duration::from_millis(13)));
    let (loose, tpot) = run(Some(Duration::from_millis(100)));
    assert!(untold > 1.5 && tight > 1.5, "half of the time: {untold} s, {tight} s");
    assert!((0.99..1.15).contains(&loose), "nearly all of the time: {loose} s");
    assert!(tpot < Duration::from_millis(90), "{tpot:?}");
}

#[test]
fn where_pd_workers_encode_an_item_is_encoded_where_its_request_is_answered() {
    let (pd, encoder) = (PdSpec::default(), EncoderSpec::default());
    let role = PoolRole::Both { pd, encoder, encoder_budget: EncoderBudget::Automatic };
    let mut cluster = ClusterSpec::new(vec![pool("both", 2, role, FAST)]);
    cluster.proxy.roles = Roles::Fixed;
    let load = Load { rate: 5.0, n: 60, text: 50, output: 8, images: 2, image_tokens: 200, pool: None };
    let run = simulate(&cluster, load.requests(1), 1).unwrap();
    assert_eq!(run.items.loads, 0, "nothing crosses: {:?}", run.items);
    assert_eq!(run.items.encoded, 120);
}

#[test]
fn an_slo_is_met_by_refusing_at_admission() {
    let load = Load { rate: 20.0, n: 200, text: 10, output: 2, images: 1, image_tokens: 500, pool: None };
    let mut cluster = apart(1, 1, FAST);
    let open = simulate(&cluster, load.requests(1), 1).unwrap();
    assert!(open.outcomes.iter().all(|o| o.end == End::Whole));
    cluster.proxy.encode_slo = Some(Duration::from_millis(500));
    let run = simulate(&cluster, Load { rate: 40.0, ..load }.requests(1), 1).unwrap();
    let refused = run.outcomes.iter().filter(|o| o.end == End::Refused).count();
    assert!(refused > 20 && refused < 150, "{refused}");
    let worst = run.stages.iter().map(|s| s.encode_queue + s.encode).max().unwrap();
    cluster.proxy.encode_slo = None;
    let without = simulate(&cluster, Load { rate: 40.0, ..load }.requests(1), 1).unwrap();
    let without = without.stages.iter().map(|s| s.encode_queue + s.encode).max().unwrap();
    assert!(worst < Duration::from_millis(1200) && without > worst * 3, "{worst:?} {without:?}");
}

#[test]
fn a_store_that_all_share_is_slower_for_each() {
    let load = Load { rate: 30.0, n: 200, text: 10, output: 2, images: 1, image_tokens: 100, pool: None };
    let mut cluster = apart(4, 4, FAST);
    let mut curves = (*cluster.pools[0].curves).clone();
    curves
        .publish
        .iter_mut()
        .chain(&mut curves.load)
        .for_each(|p| (p.p50_us, p.p95_us) = (15_000.0 + p.of, 15_000.0 + p.of));
    cluster.pools.iter_mut().for_each(|pool| pool.curves = curves.clone().into());
    let mean = |cluster: &ClusterSpec| {
        let run = simulate(cluster, load.requests(1), 1).unwrap();
        run.stages.iter().map(|s| (s.publish + s.load).as_secs_f64()).sum::<f64>() / 200.0
    };
    let alone = mean(&cluster);
    cluster.store.parallel = 6.0;
    let shared = mean(&cluster);
    assert!(shared > alone * 1.2, "{alone} {shared}");
}

#[test]
fn a_conversation_goes_on_where_it_was_read() {
    use triptych_bench::offered::{ConversationTurn, Session};
    let turn = ConversationTurn { text_tokens: 640, n_items: 0, answer_tokens: 4 };
    let request = |id: u64, n: u64| {
        let turns = vec![turn; n as usize];
        let mut offered = one(id * 3 + n, (id * 3 + n) * 4000, (640 * n + 4 * (n - 1)) as u32, Vec::new());
        offered.session = Some(Session { id, turns });
        offered
    };
    let requests = (0..3).flat_map(|id| (1..=2).map(move |n| request(id, n)));
    let run = simulate(&apart(1, 4, SLOW), requests, 1).unwrap();
    assert!(run.outcomes.iter().all(|o| o.end == End::Whole));
    let share = run.prefix.found as f64 / run.prefix.tokens as f64;
    assert!(share > 0.3, "a third of all was read before: {share}");
}

#[test]
fn a_cluster_without_a_decoder_is_refused() {
    let cluster = apart(1, 0, FAST);
    assert_eq!(simulate(&cluster, std::iter::empty(), 1).unwrap_err(), SpecError::NoPd);
    let mut wrong = apart(1, 1, FAST);
    let mut curves = (*wrong.pools[1].curves).clone();
    curves.threads = 0;
    wrong.pools[1].curves = curves.into();
    assert!(matches!(simulate(&wrong, std::iter::empty(), 1), Err(SpecError::Curves { .. })));
}
