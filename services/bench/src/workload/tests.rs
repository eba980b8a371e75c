//! Workloads with fixed seeds, and the moments of their distributions.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

fn offered(workload: &str, n: usize) -> Vec<Offered> {
    let workload = Workload::parse(workload).expect("a known workload");
    workload.requests(10.0, Arrivals::Own, 42).take(n).collect()
}

fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    values.iter().sum::<f64>() / values.len() as f64
}

fn items(all: &[Offered]) -> impl Iterator<Item = OfferedItem> + '_ {
    all.iter().flat_map(|o| o.items.iter().copied())
}

/// The share of items that were offered before.
fn reuse(all: &[Offered]) -> f64 {
    let mut seen = HashSet::new();
    let n = items(all).count() as f64;
    items(all).filter(|item| !seen.insert(item.content)).count() as f64 / n
}

const EVERY: [&str; 13] = [
    "changing:9s|2*text|1*epd-short:images=2",
    "text",
    "random-mm:items=2,items-range=0.5,range=0.3",
    "epd-short",
    "epd-long:images=2",
    "epd-short:share=0.9",
    "reuse",
    "mixed:with=0.25",
    "audio",
    "audio:share=0.5",
    "multi-turn",
    "servegen",
    "servegen:clients=3,cv=4",
];

#[test]
fn a_seed_offers_the_same_again_and_another_seed_something_else() {
    for text in EVERY {
        let workload = Workload::parse(text).expect("a known workload");
        let run = |seed| workload.requests(5.0, Arrivals::Own, seed).take(200).collect::<Vec<_>>();
        assert_eq!(run(1), run(1), "{text}");
        assert_ne!(run(1), run(2), "{text}");
    }
}

#[test]
fn another_rate_changes_when_and_not_what() {
    for text in EVERY.iter().filter(|t| !t.starts_with("multi-turn") && !t.starts_with("changing")) {
        let workload = Workload::parse(text).expect("a known workload");
        let run = |rate| workload.requests(rate, Arrivals::Own, 3).take(100);
        for (slow, fast) in run(2.0).zip(run(8.0)) {
            let gap = slow.at.as_secs_f64() - 4.0 * fast.at.as_secs_f64();
            assert!(gap.abs() < 1e-6, "{text}");
            assert_eq!(Offered { at: fast.at, ..slow }, fast, "{text}");
        }
    }
}

#[test]
fn requests_come_in_order_and_at_their_rate() {
    for text in EVERY {
        let all = offered(text, 20_000);
        assert!(all.windows(2).all(|w| w[0].at <= w[1].at && w[0].index + 1 == w[1].index), "{text}");
        let rate = all.len() as f64 / all.last().expect("some").at.as_secs_f64();
        assert!((rate / 10.0 - 1.0).abs() < 0.12, "{text}: {rate} requests a second");
        assert!(
            all.iter().all(|o| o.output_tokens > 0 && o.text_tokens + o.items.len() as u32 > 0),
            "{text}"
        );
    }
}

#[test]
fn two_seeds_share_no_content() {
    for text in EVERY {
        let workload = Workload::parse(text).expect("a known workload");
        let run = |seed| -> HashSet<u64> {
            workload
                .requests(5.0, Arrivals::Own, seed)
                .take(300)
                .flat_map(|o| o.items)
                .map(|i| i.content)
                .collect()
        };
        assert!(run(1).is_disjoint(&run(2)), "{text}");
    }
}

#[test]
fn random_mm_draws_as_vllm_defines_it() {
    let all = offered("random-mm:input=1000,output=100,range=0.2,items=2,items-range=0.5", 30_000);
    let lengths: HashSet<u32> = all.iter().map(|o| o.text_tokens).collect();
    assert_eq!((lengths.iter().min(), lengths.iter().max()), (Some(&800), Some(&1200)));
    assert_eq!(lengths.len(), 401, "every integer of the range");
    let outputs: HashSet<u32> = all.iter().map(|o| o.output_tokens).collect();
    assert_eq!((outputs.iter().min(), outputs.iter().max()), (Some(&80), Some(&120)));
    let counts: HashSet<usize> = all.iter().map(|o| o.items.len()).collect();
    assert_eq!(counts, HashSet::from([1, 2, 3]));
    let small = ItemShape::Image { width: 256, height: 256 };
    let wide = ItemShape::Image { width: 1280, height: 720 };
    let share = mean(items(&all).map(|i| f64::from(u8::from(i.shape == small))));
    assert!((share - 0.5).abs() < 0.02, "{share}");
    assert!(items(&all).all(|i| i.shape == small || i.shape == wide));
    assert!(reuse(&all) == 0.0, "random-mm never repeats an image");
}

#[test]
fn a_modality_at_its_limit_leaves_the_draw() {
    let text = "random-mm:items=4,limit-images=3,limit-audio=1,buckets=64x64x1@0.9+0x2x1@0.1";
    for o in offered(text, 500) {
        let n_images = o.items.iter().filter(|i| matches!(i.shape, ItemShape::Image { .. })).count();
        assert_eq!((o.items.len(), n_images), (4, 3), "the fourth can only be an audio clip");
    }
    assert!(Workload::parse("random-mm:items=4,limit-images=2").is_err(), "4 items with room for 3");
}

#[test]
fn the_blog_workloads_are_the_blogs() {
    for (name, tokens) in [("epd-short", 400), ("epd-long", 2000)] {
        let all = offered(name, 4000);
        assert!(all.iter().all(|o| o.text_tokens == tokens && o.output_tokens == 150), "{name}");
        let counts: HashSet<usize> = all.iter().map(|o| o.items.len()).collect();
        assert_eq!(counts, HashSet::from([1, 2, 3, 4]), "{name}");
        assert!(items(&all).all(|i| i.shape == ItemShape::Image { width: 640, height: 640 }), "{name}");
    }
}

#[test]
fn the_share_of_repeated_items_is_what_was_asked_for() {
    for share in [0.0, 0.5, 0.9] {
        let found = reuse(&offered(&format!("reuse:share={share}"), 20_000));
        assert!((found - share).abs() < 0.01, "{share}: {found}");
    }
    let found = reuse(&offered("reuse:pool=50,zipf=1.2", 400));
    let expected = expected_reuse(50, 1.2, 400);
    assert!((found - expected).abs() < 0.02, "{found} for {expected}");
}

#[test]
fn a_repeated_item_is_the_same_bytes() {
    for text in ["reuse:size=320x240+640x480", "reuse:share=0.8,size=320x240+640x480", "audio:share=0.5"] {
        let mut shapes = std::collections::HashMap::new();
        for item in items(&offered(text, 3000)) {
            assert_eq!(*shapes.entry(item.content).or_insert(item.shape), item.shape, "{text}");
        }
    }
}

#[test]
fn a_mix_has_its_share_of_requests_with_images() {
    let all = offered("mixed:with=0.3", 20_000);
    let share = mean(all.iter().map(|o| f64::from(u8::from(!o.items.is_empty()))));
    assert!((share - 0.3).abs() < 0.01, "{share}");
}

#[test]
fn clips_have_their_mean_and_their_longest() {
    let all = offered("audio:seconds=6,cv=0.5,max=600", 20_000);
    let seconds = |i: OfferedItem| match i.shape {
        ItemShape::Audio { millis } => f64::from(millis) / 1e3,
        ItemShape::Image { .. } => panic!("an image among the clips"),
    };
    let found = mean(items(&all).map(seconds));
    assert!((found / 6.0 - 1.0).abs() < 0.02, "{found}");
    assert!(items(&offered("audio:seconds=6,max=8", 2000)).all(|i| seconds(i) <= 8.0));
}

#[test]
fn a_turn_has_everything_that_was_before_it() {
    let all = offered("multi-turn:turns=2-4,more=0.5,think=1s", 5000);
    let mut last: std::collections::HashMap<u64, Offered> = Default::default();
    let mut n_later = 0;
    for o in all {
        let session = o.session.clone().expect("a conversation");
        let answers: u32 = session.turns.iter().rev().skip(1).map(|t| t.answer_tokens).sum();
        assert_eq!(session.turns.iter().map(|t| t.text_tokens).sum::<u32>() + answers, o.text_tokens);
        assert_eq!(session.turns.iter().map(|t| t.n_items as usize).sum::<usize>(), o.items.len());
        if let Some(before) = last.insert(session.id, o.clone()) {
            n_later += 1;
            let turns = before.session.expect("a conversation").turns;
            assert_eq!(session.turns[..turns.len()], turns[..]);
            assert_eq!(session.turns.len(), turns.len() + 1);
            assert_eq!(o.items[..before.items.len()], before.items[..]);
        }
    }
    assert!(n_later > 2500, "{n_later}");
}

#[test]
fn conversations_are_in_their_midst_when_the_run_starts() {
    let all = offered("multi-turn:turns=4", 4000);
    let turn = |o: &Offered| o.session.as_ref().expect("a conversation").turns.len() as f64;
    let early = mean(all[..400].iter().map(turn));
    let late = mean(all[3600..].iter().map(turn));
    assert!((early - late).abs() < 0.4 && (early - 2.5).abs() < 0.4, "{early} then {late}");
}

#[test]
fn servegen_has_its_images_per_request_and_comes_in_bursts() {
    let all = offered("servegen", 60_000);
    let found = mean(all.iter().map(|o| o.items.len() as f64));
    assert!((found - 1.59).abs() < 0.1, "{found}");
    // Counts of a second: a Poisson process has a variance of its mean.
    let spread = |all: &[Offered]| {
        let n = all.last().expect("some").at.as_secs() as usize;
        let mut counts = vec![0.0; n];
        all.iter()
            .filter(|o| (o.at.as_secs() as usize) < n)
            .for_each(|o| counts[o.at.as_secs() as usize] += 1.0);
        let m = mean(counts.iter().copied());
        mean(counts.iter().map(|c| (c - m).powi(2))) / m
    };
    let smooth = Workload::parse("servegen").expect("known").requests(10.0, Arrivals::Poisson, 42);
    let smooth = spread(&smooth.take(60_000).collect::<Vec<_>>());
    assert!((smooth - 1.0).abs() < 0.1, "{smooth}");
    assert!(spread(&all) > 1.5, "{}", spread(&all));
}

#[test]
fn what_is_not_known_is_refused_with_what_is() {
    let check = |text: &str, expect: &str| {
        let found = Workload::parse(text).expect_err(text).to_string();
        assert!(found.contains(expect), "{text}: {found}");
    };
    check("nothing", "random-mm");
    check("epd-short:photos=2", "images");
    check("epd-short:images=4-1", "1-4");
    check("epd-short:size=0x5", "WIDTHxHEIGHT");
    check("random-mm:buckets=720x1280x16@1", "videos");
    check("random-mm:range=2", "from 0 to 1");
    check("reuse:share=1.5", "from 0 to 1");
    check("trace:no-such-file.csv", "no-such-file.csv");
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "(text|random-mm|epd-short|audio|servegen|multi-turn):[a-z]{1,6}=[0-9a-z.@+x-]{0,12}") {
        if let Ok(workload) = Workload::parse(&text) {
            prop_assert_eq!(workload.requests(1.0, Arrivals::Own, 0).take(3).count(), 3);
        }
    }
}

#[test]
fn a_workload_knows_the_kinds_of_its_items() {
    let kinds = |text: &str| Workload::parse(text).expect(text).modalities().into_iter().collect::<Vec<_>>();
    assert_eq!(kinds("text"), []);
    assert_eq!(kinds("epd-short"), [Modality::Image]);
    assert_eq!(kinds("mixed:with=0.01"), [Modality::Image]);
    assert_eq!(kinds("multi-turn"), [Modality::Image]);
    assert_eq!(kinds("audio"), [Modality::Audio]);
    assert_eq!(kinds("random-mm:items=2,buckets=64x64x1@0.5+0x2x1@0.5"), [Modality::Image, Modality::Audio]);
}
