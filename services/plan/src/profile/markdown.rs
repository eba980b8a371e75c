//! Cost curves as a page of Markdown.

use super::busy::Busy;
use crate::curves::{CostCurves, Costs, Point};
use std::fmt::Write as _;

/// The page; times are milliseconds.
pub fn page(curves: &CostCurves) -> String {
    let mut page = String::new();
    // Writing to a String cannot fail.
    let _ = head(&mut page, curves);
    let _ = compute(&mut page, curves);
    let _ = transfers(&mut page, curves);
    let _ = beside(&mut page, curves);
    let _ = api(&mut page, curves);
    page
}

/// Warning that other processes ran during the measurement.
pub fn warning(busy: Busy) -> String {
    format!(
        "\n**The machine was busy:** {:.0} % of its time went to other processes and {:.0} % to the hypervisor's \
         other guests. These curves are too high; measure again on a quiet machine.\n",
        busy.others * 1e2,
        busy.steal * 1e2
    )
}

/// A tower's name behind a stage; nothing where there are no others.
fn of_tower(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!(" by {name}") }
}

fn ms(us: f64) -> String {
    let ms = us / 1e3;
    if ms < 10.0 { format!("{ms:.3}") } else { format!("{ms:.1}") }
}

fn head(page: &mut String, curves: &CostCurves) -> std::fmt::Result {
    let measured = &curves.measured;
    let bound = match &measured.cores[..] {
        [] => "not bound to cores".to_owned(),
        cores => format!("bound to cores {cores:?}"),
    };
    writeln!(page, "# Cost curves of {}\n", curves.model)?;
    writeln!(
        page,
        "{} threads, {}, {bound}; {} ({} cores), commit {}, {} rounds, {:.1} % of the machine's time to others.\n",
        curves.threads,
        curves.precision,
        measured.host,
        measured.n_cores,
        measured.commit,
        measured.rounds,
        measured.busy * 1e2
    )
}

fn compute(page: &mut String, curves: &CostCurves) -> std::fmt::Result {
    for encoder in curves.encoders() {
        let name = of_tower(encoder.name);
        writeln!(
            page,
            "| encode{name}: items | output tokens | p50 ms | p95 ms | tokens/s |\n|---|---|---|---|---|"
        )?;
        for p in encoder.encode {
            let rate = p.tokens as f64 / p.p50_us.max(1e-3) * 1e6;
            let (p50, p95) = (ms(p.p50_us), ms(p.p95_us));
            writeln!(page, "| {} | {} | {p50} | {p95} | {rate:.0} |", p.items, p.tokens)?;
        }
        page.push('\n');
    }
    page.push_str("| step: prompt tokens | keys they attend to | decodes | keys they attend to | projected rows | p50 ms | p95 ms |\n|---|---|---|---|---|---|---|\n");
    for p in &curves.step {
        writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {} |",
            p.prefill_tokens,
            p.prefill_context,
            p.decodes,
            p.decode_context,
            p.projected_rows,
            ms(p.p50_us),
            ms(p.p95_us)
        )?;
    }
    let (encode, step) = Costs::new(curves).quality();
    writeln!(
        page,
        "\nSums of terms describe encodes to {:.1} % in the median and {:.1} % at worst, steps to {:.1} % and {:.1} %; the \
         simulator's costs pass through the measured points.",
        encode.median * 1e2,
        encode.worst * 1e2,
        step.median * 1e2,
        step.worst * 1e2
    )?;
    let colocated = curves.colocated;
    writeln!(
        page,
        "\nColocated in one process, on the same threads: an encode takes {:.2} times as long, a step {:.2} times.",
        colocated.encode, colocated.step
    )
}

fn transfers(page: &mut String, curves: &CostCurves) -> std::fmt::Result {
    let store = &curves.measured.store;
    for encoder in curves.encoders() {
        let what = format!("preprocess{}: pixels, milliseconds or token ids", of_tower(encoder.name));
        points(page, &what, encoder.preprocess)?;
    }
    points(page, &format!("publish to {store}: bytes"), &curves.publish)?;
    points(page, &format!("load from {store}: bytes"), &curves.load)?;
    if curves.api.is_some() {
        return Ok(());
    }
    let proxy = curves.proxy;
    writeln!(
        page,
        "\nThe proxy adds {} ms to a request, {} ms for an item, {} ms for a MiB of it, and {} ms for an output token.",
        ms(proxy.request_us),
        ms(proxy.item_us),
        ms(proxy.item_byte_us * f64::from(1 << 20)),
        ms(proxy.token_us)
    )?;
    let frontend = curves.front;
    writeln!(
        page,
        "\nClient, proxy and the workers' network side take {} ms of processor time for a request, {} ms for an item, {} ms for a \
         MiB of it, {} ms for a step that gives tokens, {} ms for messages that leave together, and {} ms for each of them.",
        ms(frontend.request_us),
        ms(frontend.item_us),
        ms(frontend.item_byte_us * f64::from(1 << 20)),
        ms(frontend.wake_us),
        ms(frontend.write_us),
        ms(frontend.message_us)
    )
}

/// Stages alone and beside neighbours.
fn beside(page: &mut String, curves: &CostCurves) -> std::fmt::Result {
    let frontend = curves.front;
    writeln!(
        page,
        "\n{:.0} % of what client and proxy take is taken from cores that compute while one is free. Between two steps \
         {} ms pass.",
        frontend.misplaced * 1e2,
        ms(curves.between_steps_us)
    )?;
    if let Some(saves) = curves.pipelining {
        let (fixed, each) = (ms(saves.fixed_us), ms(saves.each_us));
        writeln!(
            page,
            "\nPipelined, a step is {fixed} ms shorter, and {each} ms for each sequence that chooses a token."
        )?;
    }
    let Some(interference) = &curves.interference else {
        return writeln!(page, "\nNothing was measured beside neighbours.");
    };
    writeln!(
        page,
        "\n| stage, {} other cores busy | alone ms | beside compute | beside copies | its own traffic | one thread too many |\n\
         |---|---|---|---|---|---|",
        interference.neighbour_cores
    )?;
    for (stage, times) in interference.stages() {
        let over = |us: Option<f64>| us.map_or("–".to_owned(), |us| format!("{:.2}", us / times.alone_us));
        let tower = stage.tower().and_then(|tower| curves.encoders().nth(tower.0.into()));
        writeln!(
            page,
            "| {}{} | {} | {} | {} | {:.2} | {:.2} |",
            stage.as_str(),
            tower.map_or_else(String::new, |tower| of_tower(tower.name)),
            ms(times.alone_us),
            over(times.beside_compute_us),
            over(times.beside_copies_us),
            times.traffic,
            times.shared_us / times.alone_us
        )?;
    }
    Ok(())
}

/// A paragraph on curves that were measured through an API.
fn api(page: &mut String, curves: &CostCurves) -> std::fmt::Result {
    let Some(api) = &curves.api else { return Ok(()) };
    let unmeasured: Vec<_> = api.unmeasured.iter().map(|one| one.text()).collect();
    writeln!(
        page,
        "\nMeasured through the API of {} at {}, whose requests take {} ms beside their steps. It does not show: {}.",
        api.name(),
        api.url,
        ms(curves.proxy.request_us),
        unmeasured.join(", ")
    )?;
    match api.max_sequences {
        Some(n) => writeln!(page, "\nMore than {n} streams did not decode at once."),
        None => Ok(()),
    }
}

fn points(page: &mut String, what: &str, points: &[Point]) -> std::fmt::Result {
    if points.is_empty() {
        return Ok(());
    }
    writeln!(page, "\n| {what} | p50 ms | p95 ms |\n|---|---|---|")?;
    points.iter().try_for_each(|p| writeln!(page, "| {} | {} | {} |", p.of, ms(p.p50_us), ms(p.p95_us)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::PipeliningSaves;
    use crate::curves::sample::curves;

    #[test]
    fn what_pipelining_saves_is_told_where_it_was_measured() {
        let pipelining = Some(PipeliningSaves { fixed_us: 181.0, each_us: 4.0 });
        let told = page(&CostCurves { pipelining, ..curves() });
        assert!(told.contains("Pipelined, a step is 0.181 ms shorter, and 0.004 ms for each"), "{told}");
        assert!(!page(&curves()).contains("Pipelined"));
    }
}
