//! Result of a run for the document.

use super::{Ran, RequestRecord, RunPlan};
use crate::client::StageTimes;
use crate::judge::{Ends, Rule, judge};
use crate::outcome::{End, Outcome};
use crate::result::{Distribution, Generator, ItemSources, RunResult, Stages, Throughput, VERSION};
use crate::slo::Slo;
use std::collections::BTreeMap;
use std::time::Duration;

/// The least lateness of the bench itself that makes a run void.
const LEAST_LATE: Duration = Duration::from_millis(20);
/// Allowed lateness, as a share of the TTFT limit.
const LATE_SHARE: f64 = 0.1;
/// Most kinds of failures that are counted separately.
const MAX_ERRORS: usize = 30;

/// The result of a run.
pub fn run_result(ran: &Ran, plan: &RunPlan, slo: &Slo, rule: &Rule) -> RunResult {
    let judged: Vec<&Outcome> = ran.outcomes.iter().filter(|o| ran.window.has(o.due)).collect();
    let whole: Vec<&Outcome> = judged.iter().copied().filter(|o| o.is_whole()).collect();
    let asked = whole_asked(ran);
    let ms = |t: Duration| t.as_secs_f64() * 1e3;
    let gaps = whole.iter().flat_map(|o| o.tokens.windows(2).map(|w| ms(w[1].saturating_sub(w[0]))));
    let prompts = Distribution::of(asked.iter().filter_map(|a| a.reply.prompt_tokens).map(f64::from));
    RunResult {
        version: VERSION,
        rate: plan.rate,
        seed: plan.seed,
        block: None,
        warm_up_s: ran.window.from.as_secs_f64(),
        window_s: ran.window.seconds(),
        n_sent: ran.outcomes.len() as u64,
        verdict: judge(&ran.outcomes, ran.window, slo, rule),
        ttft_ms: Distribution::of(whole.iter().filter_map(|o| o.ttft()).map(ms)),
        tpot_ms: Distribution::of(whole.iter().filter_map(|o| o.tpot()).map(ms)),
        itl_ms: Distribution::of(gaps),
        e2el_ms: Distribution::of(whole.iter().map(|o| ms(o.e2el()))),
        throughput: throughput(ran, slo),
        generator: generator(&judged, slo, plan.max_late),
        prompt_tokens: (prompts.n > 0).then_some(prompts),
        stages: stages(&asked, &whole),
        item_sources: sources(&asked),
        server: ran.scraped.1.since(&ran.scraped.0),
        all_ends: Ends::of(&ran.outcomes),
        errors: errors(&judged),
        timeline: ran.timeline.clone(),
    }
}

/// Responses to the judged requests that ended whole. Both lists are by index.
fn whole_asked(ran: &Ran) -> Vec<&RequestRecord> {
    let both = ran.outcomes.iter().zip(&ran.asked);
    both.filter(|(o, _)| ran.window.has(o.due) && o.is_whole()).map(|(_, a)| a).collect()
}

fn throughput(ran: &Ran, slo: &Slo) -> Throughput {
    let s = ran.window.seconds().max(1e-9);
    let ended = || {
        let both = ran.outcomes.iter().zip(&ran.asked);
        both.filter(|(o, _)| o.is_whole() && ran.window.has(o.ended))
    };
    let due = || ran.outcomes.iter().filter(|o| ran.window.has(o.due));
    let tokens = ran.outcomes.iter().flat_map(|o| &o.tokens).filter(|t| ran.window.has(**t));
    Throughput {
        offered_per_s: due().count() as f64 / s,
        requests_per_s: ended().count() as f64 / s,
        good_per_s: due().filter(|o| o.meets(slo)).count() as f64 / s,
        output_tokens_per_s: tokens.count() as f64 / s,
        images_per_s: ended().map(|(_, a)| f64::from(a.n_images)).sum::<f64>() / s,
        audio_s_per_s: ended().map(|(_, a)| a.audio.as_secs_f64()).sum::<f64>() / s,
    }
}

fn generator(judged: &[&Outcome], slo: &Slo, max_late: Option<Duration>) -> Generator {
    let usual = || slo.ttft.map_or(Duration::ZERO, |t| t.mul_f64(LATE_SHARE)).max(LEAST_LATE);
    let allowed = max_late.unwrap_or_else(usual);
    let late_ms = Distribution::of(judged.iter().map(|o| o.sent.saturating_sub(o.due).as_secs_f64() * 1e3));
    let allowed_ms = allowed.as_secs_f64() * 1e3;
    Generator { void: late_ms.p99.is_some_and(|late| late > allowed_ms), late_ms, allowed_ms }
}

fn stages(asked: &[&RequestRecord], whole: &[&Outcome]) -> Option<Stages> {
    let times: Vec<StageTimes> = asked.iter().filter_map(|a| a.reply.stages).collect();
    let spread = |stage: fn(&StageTimes) -> Duration| {
        Distribution::of(times.iter().map(|t| stage(t).as_secs_f64() * 1e3))
    };
    let decode = whole.iter().filter_map(|o| Some((o.tokens.first()?, o.tokens.last()?)));
    (!times.is_empty()).then(|| Stages {
        queue: spread(|t| t.queue),
        encode: spread(|t| t.encode),
        publish: spread(|t| t.publish),
        load: spread(|t| t.load),
        prefill: spread(|t| t.prefill),
        decode: Distribution::of(decode.map(|(first, last)| last.saturating_sub(*first).as_secs_f64() * 1e3)),
    })
}

fn sources(asked: &[&RequestRecord]) -> Option<ItemSources> {
    let said = asked.iter().filter_map(|a| a.reply.sources);
    said.reduce(|a, b| ItemSources {
        encoded: a.encoded + b.encoded,
        shared: a.shared + b.shared,
        cached: a.cached + b.cached,
    })
}

fn errors(judged: &[&Outcome]) -> BTreeMap<String, u64> {
    let mut errors = BTreeMap::new();
    for outcome in judged {
        let text = match &outcome.end {
            End::Whole => continue,
            End::Short => "fewer tokens than were asked for".to_owned(),
            End::Refused => "refused for lack of room".to_owned(),
            End::Failed(text) => text.clone(),
            End::Unended => "not ended when the run stopped waiting".to_owned(),
        };
        let known = errors.len() < MAX_ERRORS || errors.contains_key(&text);
        *errors.entry(if known { text } else { "others".to_owned() }).or_insert(0) += 1;
    }
    errors
}
