//! The recommendation as a page of Markdown.

use super::answer::{Advice, Recommendation, RecommendedCluster};
use super::candidate::Candidate;
use super::chart;
use std::fmt::Write as _;

/// The page.
pub fn markdown(answer: &Recommendation) -> String {
    let mut page = String::new();
    // Writing to a String cannot fail.
    let _ = head(&mut page, answer);
    if answer.advice != Advice::NothingHelps {
        let _ = choice(&mut page, &answer.best);
        let _ = error(&mut page, answer);
        let _ = beside(&mut page, answer);
    }
    page
}

fn head(page: &mut String, answer: &Recommendation) -> std::fmt::Result {
    let advice = match answer.advice {
        Advice::Disaggregate => format!("disaggregate: {}", answer.best.topology),
        Advice::DoNotDisaggregate => format!("do not disaggregate: {}", answer.best.topology),
        Advice::NothingHelps => "no cluster of this budget meets the SLO".to_owned(),
    };
    writeln!(page, "# Plan for {}: {advice}\n\n{}.\n", answer.model, upper(&answer.why))?;
    let means = answer.means;
    writeln!(
        page,
        "Inputs: {}; {}; {}. A request has {:.2} items of {:.0} tokens in all, {:.0} tokens of text, and {:.0} output tokens.\n",
        answer.demand,
        answer.slo,
        answer.budget,
        means.items,
        means.item_tokens,
        means.text_tokens,
        means.output_tokens
    )
}

fn choice(page: &mut String, choice: &RecommendedCluster) -> std::fmt::Result {
    let goodput = choice.goodput;
    writeln!(
        page,
        "**{:.2} requests/s** (95 % interval {:.2} to {:.2}), {:.3} a core; the upper bound without waiting is {:.2}.",
        goodput.mean, goodput.low, goodput.high, choice.goodput_per_core, choice.bound.rate
    )?;
    let full = &choice.bottleneck;
    writeln!(
        page,
        "Busiest: pool `{}`, {:.0} % of its time, {:.0} % of that encoding.{}\n",
        full.pool,
        full.utilisation * 1e2,
        full.encoding * 1e2,
        match full.breaks.is_empty() {
            true => String::new(),
            false => format!(" Above that rate: {}.", full.breaks.join("; ")),
        }
    )?;
    settings(page, &choice.found.candidate)?;
    writeln!(page, "\n```console\n$ {}\n```\n", choice.commands.join("\n$ "))?;
    writeln!(page, "Values for the Helm chart:\n\n```yaml\n{}```", choice.values)
}

/// The range of a measurement, and its basis.
fn error(page: &mut String, answer: &Recommendation) -> std::fmt::Result {
    let (found, error) = (answer.best.measurable, answer.error);
    writeln!(
        page,
        "\nThat interval is of chance in arrivals and lengths. With the model's own error 95 % of measurements lie between \
         {:.2} and {:.2} requests/s; {}.",
        found.low,
        found.high,
        error.basis.as_str()
    )
}

fn settings(page: &mut String, candidate: &Candidate) -> std::fmt::Result {
    writeln!(page, "| setting | |\n|---|---|")?;
    chart::settings(candidate).iter().try_for_each(|(flag, value)| writeln!(page, "| `{flag}` | {value} |"))
}

fn beside(page: &mut String, answer: &Recommendation) -> std::fmt::Result {
    if let (Some(second), Some(margin)) = (&answer.runner_up, answer.margin) {
        let beside = match margin < 1.0 {
            true => format!("{:.2} times as much, which is within the interval", 1.0 / margin),
            false => format!("the best serves {margin:.2} times as much"),
        };
        writeln!(
            page,
            "\nRunner-up: {} with {:.2} requests/s ({:.2} to {:.2}); {beside}.",
            second.topology, second.goodput.mean, second.goodput.low, second.goodput.high
        )?;
    }
    simulated(page, answer)?;
    for what in &answer.sensitivity {
        writeln!(page, "\nIf {}: {}.", what.question, what.answer)?;
    }
    Ok(())
}

/// The table of all clusters, and which of its numbers decides.
fn simulated(page: &mut String, answer: &Recommendation) -> std::fmt::Result {
    writeln!(
        page,
        "\nGoodput decides, with its interval: it is over {} seeds, with the cluster's own best settings. The first search, \
         with one seed, shorter runs and default settings, only chooses whose goodput is found.\n\n\
         | cluster | goodput, requests/s | first search, requests/s |\n|---|---|---|",
        answer.seeds
    )?;
    for cluster in &answer.simulated {
        let name = match cluster.is_best {
            true => format!("**{}**, recommended", cluster.name),
            false => cluster.name.clone(),
        };
        let goodput = match cluster.goodput {
            Some(goodput) => format!("{:.2} ({:.2} to {:.2})", goodput.mean, goodput.low, goodput.high),
            None => "not found".to_owned(),
        };
        writeln!(page, "| {name} | {goodput} | {:.2} |", cluster.first_search)?;
    }
    for (name, bound) in &answer.pruned {
        writeln!(page, "| {name}, not simulated | below {bound:.2} | |")?;
    }
    Ok(())
}

fn upper(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
