//! A summary as text for a terminal.

use super::summary::{Quantiles, Summary};
use std::fmt::Write;

/// The page.
pub fn text(summary: &Summary) -> String {
    let mut text = String::new();
    let ok = summary.requests_per_s.get("ok").copied().unwrap_or_default();
    let failed: Vec<_> = summary.requests_per_s.iter().filter(|(outcome, _)| *outcome != "ok").collect();
    let _ = writeln!(text, "requests    {:.0} in progress, {ok:.1}/s answered", summary.running);
    for (outcome, rate) in failed {
        let _ = writeln!(text, "            {rate:.1}/s {outcome}");
    }
    if let Some(goodput) = summary.goodput_per_s {
        let _ = writeln!(text, "goodput     at most {goodput:.1}/s within the SLO");
    }
    let (prompt, generated) = (summary.prompt_tokens_per_s, summary.generation_tokens_per_s);
    let _ = writeln!(text, "tokens      {prompt:.0}/s of prompts, {generated:.0}/s generated");
    let _ =
        writeln!(text, "latency     first token {}, per token {}", times(summary.ttft), times(summary.tpot));
    let items: Vec<_> = summary.items.iter().map(|(source, n)| format!("{n:.0} {source}")).collect();
    let hits = summary.hit_rate.map_or_else(String::new, |rate| format!("; hit rate {:.0} %", rate * 1e2));
    let items = if items.is_empty() { "none".to_owned() } else { items.join(", ") };
    let _ = writeln!(text, "items       {items}{hits}");
    for (role, states) in &summary.pools {
        let states: Vec<_> = states.iter().map(|(state, n)| format!("{n:.0} {state}")).collect();
        let _ = writeln!(text, "{role:<11} {}", states.join(", "));
    }
    if let Some(workers) = &summary.workers {
        let _ = writeln!(
            text,
            "\n{:<32} {:<9} {:>7} {:>7} {:>9} {:>5}",
            "worker", "health", "running", "waiting", "encoding", "KV"
        );
        for worker in workers {
            let _ = writeln!(
                text,
                "{:<32} {:<9} {:>7} {:>7} {:>6} ms {:>3.0} %",
                worker.id,
                worker.health,
                worker.running,
                worker.waiting,
                worker.queued_ms,
                worker.kv_usage * 1e2
            );
        }
    }
    text
}

fn times(quantiles: Quantiles) -> String {
    let ms = |ms: Option<f64>| ms.map_or_else(|| "–".to_owned(), |ms| format!("{ms:.0} ms"));
    format!("p50 {} p95 {}", ms(quantiles.p50_ms), ms(quantiles.p95_ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::summary::Worker;
    use std::collections::BTreeMap;

    #[test]
    fn pools_queues_rates_and_goodput_are_on_the_page() {
        let of = |pairs: &[(&str, f64)]| {
            pairs.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect::<BTreeMap<_, _>>()
        };
        let page = text(&Summary {
            seconds: 2.0,
            running: 3.0,
            requests_per_s: of(&[("ok", 4.0), ("overloaded", 0.5)]),
            goodput_per_s: Some(3.5),
            prompt_tokens_per_s: 100.0,
            generation_tokens_per_s: 50.0,
            ttft: Quantiles { p50_ms: Some(20.0), p95_ms: None },
            tpot: Quantiles::default(),
            items: of(&[("cached", 3.0), ("encoded", 1.0)]),
            hit_rate: Some(0.75),
            pools: BTreeMap::from([("pd".to_owned(), of(&[("ready", 2.0)]))]),
            workers: Some(vec![Worker {
                id: "pd@h:1".into(),
                kv_usage: 0.5,
                waiting: 7,
                ..Worker::default()
            }]),
        });
        for part in [
            "3 in progress, 4.0/s answered",
            "0.5/s overloaded",
            "at most 3.5/s",
            "p50 20 ms p95 –",
            "3 cached, 1 encoded; hit rate 75 %",
            "pd          2 ready",
            "pd@h:1",
            " 50 %",
        ] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
    }
}
