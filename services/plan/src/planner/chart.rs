//! A plan as what an operator types: command lines, and the `pools` of the Helm chart's values.

mod vllm;

use super::candidate::{Candidate, Shape, WorkerSettings};
use crate::curves::ApiEncoders;
use std::fmt::Write as _;
use std::time::Duration;
use vllm::{Flag, Job};

/// Ports of the workers of a cluster on one host.
const FIRST_PORT: usize = 7001;
/// Flag of the KV cache's element type.
const KV_FLAG: &str = "--kv-cache-dtype";
/// Most workers that are listed one by one.
const LISTED: usize = 16;

/// A worker's command line and its flag of the proxy.
struct Kind {
    line: String,
    flag: &'static str,
    /// True if it is a vLLM server.
    is_vllm: bool,
    n: usize,
}

impl Kind {
    /// The line with an address, and the flag with it.
    fn at(&self, host: &str, port: usize) -> (String, String) {
        let (line, flag) = (&self.line, self.flag);
        match self.is_vllm {
            true => (format!("{line} --port {port}"), format!("{flag} vllm+http://{host}:{port}")),
            false => (format!("{line} --grpc {host}:{port}"), format!("{flag} {host}:{port}")),
        }
    }
}

/// Encoders and PD workers that are vLLM servers.
fn foreign(candidate: &Candidate) -> (bool, bool) {
    let encoders = candidate.curves.api.as_ref().map(|api| api.encoders);
    (encoders.is_some_and(|encoders| encoders != ApiEncoders::Ours), encoders.is_some())
}

/// The flag that gives answers their time while prompts are read.
fn pacing(settings: WorkerSettings) -> Flag {
    match settings.tpot_slo {
        Some(slo) => ("--tpot-slo", ms(slo).to_string()),
        None => ("--decode-share", settings.decode_share.to_string()),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Settings of the workers that the plan chose, by the flags that they have.
pub fn settings(candidate: &Candidate) -> Vec<Flag> {
    let settings = candidate.settings;
    let (has_foreign_encoders, has_foreign_pds) = foreign(candidate);
    let mut flags = match has_foreign_pds {
        true => vllm::settings(settings),
        false => vec![
            ("--token-budget", settings.token_budget.to_string()),
            ("--max-sequences", settings.max_sequences.to_string()),
            pacing(settings),
        ],
    };
    match candidate.shape.is_split() {
        true if !has_foreign_encoders => flags.extend([
            ("--batch-tokens", settings.batch_tokens.to_string()),
            ("--batch-items", settings.batch_items.to_string()),
        ]),
        false if !has_foreign_pds => {
            flags.push(("--encoder-token-budget", settings.encoder_budget.to_string()));
        }
        _ => {}
    }
    flags
}

/// One line for each worker, with a proxy before them; of large clusters one line for each kind.
pub fn commands(model: &str, candidate: &Candidate) -> Vec<String> {
    let settings = candidate.settings;
    let threads = candidate.curves.threads;
    let common =
        format!("--model {model} --threads {threads} --precision {} --ec STORE", candidate.curves.precision);
    let (pacing, pace) = pacing(settings);
    let engine = format!(
        "--token-budget {} --max-sequences {} {pacing} {pace}",
        settings.token_budget, settings.max_sequences
    );
    let batch = format!("--batch-tokens {} --batch-items {}", settings.batch_tokens, settings.batch_items);
    let (has_foreign_encoders, has_foreign_pds) = foreign(candidate);
    let encoder = match has_foreign_encoders {
        true => vllm::command(model, candidate, Job::Encoder),
        false => format!("triptych encoder {common} {batch}"),
    };
    let of_tower = |tower: &str, n| Kind {
        line: format!("{encoder} --towers {tower}"),
        flag: "--encoder",
        is_vllm: false,
        n,
    };
    let kv = candidate.curves.kv_dtype.as_ref().map_or_else(String::new, |t| format!(" {KV_FLAG} {t}"));
    let own_pd = format!("triptych pd {common} {engine}{kv}");
    let own_both = format!("{own_pd} --with-encoder --encoder-token-budget {}", settings.encoder_budget);
    let (pd, both) = match has_foreign_pds {
        true => (vllm::command(model, candidate, Job::Pd), vllm::command(model, candidate, Job::Pd)),
        false => (own_pd, own_both),
    };
    let encoders = |n| Kind { line: encoder.clone(), flag: "--encoder", is_vllm: has_foreign_encoders, n };
    let decoders = |line, n| Kind { line, flag: "--pd", is_vllm: has_foreign_pds, n };
    let kinds = match candidate.shape {
        Shape::Split { encoders: n, pds } => vec![encoders(n), decoders(pd, pds)],
        Shape::Towers { encoders, pds } => {
            let of_towers = encoders.counts().iter().zip(candidate.curves.encoders());
            let of_towers = of_towers.map(|(n, curves)| of_tower(curves.name, *n));
            of_towers.chain([decoders(pd, pds)]).collect()
        }
        Shape::Replicated { workers } | Shape::Elastic { workers } => vec![decoders(both, workers)],
        Shape::Colocated => vec![decoders(both, 1)],
    };
    let mut lines = Vec::new();
    let mut proxy = "triptych proxy --ec STORE".to_owned();
    if !candidate.shape.is_split() {
        // Writing to a String cannot fail.
        let _ = write!(proxy, " --roles {}", candidate.shape.roles());
    }
    let is_listed = candidate.n_workers() <= LISTED;
    let mut port = FIRST_PORT;
    for kind in kinds {
        if !is_listed {
            let (line, _) = kind.at("0.0.0.0", FIRST_PORT);
            lines.push(format!("{line}    # on {} hosts or pods", kind.n));
            continue;
        }
        for _ in 0..kind.n {
            let (line, flag) = kind.at("127.0.0.1", port);
            lines.push(line);
            // Writing to a String cannot fail.
            let _ = write!(proxy, " {flag}");
            port += 1;
        }
    }
    let on = match candidate.n_proxies() {
        1 => String::new(),
        n => format!("    # on {n} hosts or pods"),
    };
    lines.push(if is_listed { proxy } else { format!("{proxy} --discover redis://HOST{on}") });
    lines
}

/// Characters of a pool's name before its kind: the chart allows 20 in all.
const NAME_LENGTH: usize = 12;
/// Characters of the kind: that of encoders is as long.
const SUFFIX_LENGTH: usize = 7;

/// Proxies that the chart starts where its values say nothing.
const CHART_PROXIES: usize = 2;

/// The chart's `pools`, and its proxies where they must be more than it has by itself; they go over its defaults with `-f`.
pub fn values(model: &str, candidate: &Candidate) -> String {
    let mut yaml = match candidate.n_proxies() {
        ..=CHART_PROXIES => String::new(),
        n => format!("proxy:\n  replicas: {n}\n"),
    };
    yaml.push_str("pools:\n");
    match candidate.shape {
        Shape::Split { encoders, pds } => {
            yaml.push_str(&pool(model, candidate, ("encoder", "encoder", encoders)));
            yaml.push_str(&pool(model, candidate, ("pd", "pd", pds)));
        }
        Shape::Towers { encoders, pds } => {
            for (n, curves) in encoders.counts().iter().zip(candidate.curves.encoders()) {
                yaml.push_str(&pool(model, candidate, (&suffix(curves.name), "encoder", *n)));
                // Writing to a String cannot fail.
                let _ = writeln!(yaml, "    towers: [{:?}]", curves.name);
            }
            yaml.push_str(&pool(model, candidate, ("pd", "pd", pds)));
        }
        Shape::Replicated { workers } | Shape::Elastic { workers } => {
            yaml.push_str(&pool(model, candidate, ("both", "pd", workers)));
        }
        Shape::Colocated => yaml.push_str(&pool(model, candidate, ("both", "pd", 1))),
    }
    yaml
}

fn pool(model: &str, candidate: &Candidate, (suffix, role, replicas): (&str, &str, usize)) -> String {
    let settings = candidate.settings;
    let curves = &candidate.curves;
    let name = name(model);
    let (has_foreign_encoders, has_foreign_pds) = foreign(candidate);
    let job = if role == "encoder" { Job::Encoder } else { Job::Pd };
    if (job == Job::Encoder && has_foreign_encoders) || (job == Job::Pd && has_foreign_pds) {
        return vllm::pool((&format!("{name}-{suffix}"), model), candidate, (job, replicas));
    }
    let mut yaml = format!(
        "  - name: {name}-{suffix}\n    role: {role}\n    model: {{path: {model:?}}}\n    replicas: {replicas}\n    \
         precision: {}\n    threads: {}\n",
        curves.precision, curves.threads
    );
    let cpu = format!("    resources:\n      requests: {{cpu: \"{}\"}}\n", curves.threads);
    let batch = ["--batch-tokens".to_owned(), settings.batch_tokens.to_string()]
        .into_iter()
        .chain(["--batch-items".to_owned(), settings.batch_items.to_string()]);
    let turns = ["--encoder-token-budget".to_owned(), settings.encoder_budget.to_string()];
    let kv = curves.kv_dtype.iter().flat_map(|dtype| [KV_FLAG.to_owned(), dtype.clone()]);
    let pacing = match settings.tpot_slo {
        Some(slo) => format!("tpotSloMs: {}", ms(slo)),
        None => format!("decodeShare: {}", settings.decode_share),
    };
    let engine = format!(
        "    engine: {{tokenBudget: {}, maxSequences: {}, {pacing}}}\n",
        settings.token_budget, settings.max_sequences
    );
    match (role, candidate.shape.is_split()) {
        ("encoder", _) => yaml.push_str(&args(batch)),
        (_, true) => yaml.push_str(&(engine + &args(kv))),
        (_, false) => {
            yaml.push_str(&engine);
            yaml.push_str("    withEncoder: true\n");
            yaml.push_str(&args(turns.into_iter().chain(kv)));
        }
    }
    yaml + &cpu
}

/// A pool's `args`; nothing if there are none.
fn args(args: impl Iterator<Item = String>) -> String {
    let quoted: Vec<String> = args.map(|arg| format!("{arg:?}")).collect();
    if quoted.is_empty() { String::new() } else { format!("    args: [{}]\n", quoted.join(", ")) }
}

/// A tower's name as the end of its pool's.
fn suffix(tower: &str) -> String {
    name(tower).chars().take(SUFFIX_LENGTH).collect()
}

/// A name as Kubernetes takes it.
fn name(model: &str) -> String {
    let plain: String =
        model.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect();
    let plain: String = plain.trim_matches('-').chars().take(NAME_LENGTH).collect();
    if plain.is_empty() { "model".to_owned() } else { plain.trim_matches('-').to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::CostCurves;
    use crate::curves::sample::{curves, two_towers};
    use crate::planner::candidate::WorkerSettings;
    use crate::planner::towers::TowerWorkers;
    use std::sync::Arc;

    fn candidate(shape: Shape) -> Candidate {
        Candidate { shape, curves: Arc::new(curves()), settings: WorkerSettings::default() }
    }

    #[test]
    fn every_worker_has_a_line_and_the_proxy_knows_them_all() {
        let lines = commands("m", &candidate(Shape::Split { encoders: 2, pds: 1 }));
        assert_eq!(lines.len(), 4);
        assert!(
            lines[0].starts_with("triptych encoder --model m --threads 1 --precision f32"),
            "{}",
            lines[0]
        );
        let proxy =
            "triptych proxy --ec STORE --encoder 127.0.0.1:7001 --encoder 127.0.0.1:7002 --pd 127.0.0.1:7003";
        assert_eq!(lines[3], proxy);
        let many = commands("m", &candidate(Shape::Replicated { workers: 64 }));
        assert_eq!(many.len(), 2);
        assert!(many[0].contains("--with-encoder") && many[0].contains("on 64 hosts"), "{}", many[0]);
        assert!(many[1].ends_with("--discover redis://HOST"), "one proxy is enough: {}", many[1]);
        let fleet = commands("m", &candidate(Shape::Split { encoders: 200, pds: 312 }));
        assert!(fleet[2].ends_with("# on 8 hosts or pods"), "{}", fleet[2]);
    }

    #[test]
    fn an_slo_of_tokens_is_told_instead_of_a_share() {
        let slo = "ttft=1s,tpot=2500us".parse().unwrap();
        let shape = Shape::Split { encoders: 1, pds: 1 };
        let told = WorkerSettings::with_slo(&slo, &curves());
        let told = Candidate { settings: told, ..candidate(shape) };
        assert!(
            commands("m", &told)[1].contains("--max-sequences 64 --tpot-slo 2.5 "),
            "{:?}",
            commands("m", &told)
        );
        assert!(values("m", &told).contains("maxSequences: 64, tpotSloMs: 2.5}"), "{}", values("m", &told));
        let flags = |candidate| settings(candidate).into_iter().map(|(flag, _)| flag).collect::<Vec<_>>();
        assert!(flags(&told).contains(&"--tpot-slo") && !flags(&told).contains(&"--decode-share"));
        let untold = candidate(shape);
        assert!(flags(&untold).contains(&"--decode-share"), "{:?}", flags(&untold));
    }

    #[test]
    fn values_are_pools_with_their_replicas_and_settings() {
        let yaml = values("Qwen/Qwen2-VL", &candidate(Shape::Split { encoders: 2, pds: 3 }));
        for part in [
            "  - name: qwen-qwen2-v-encoder\n    role: encoder\n",
            "    replicas: 2\n",
            "    replicas: 3\n",
            "    engine: {tokenBudget: 512, maxSequences: 64, decodeShare: 33}\n",
            "      requests: {cpu: \"1\"}\n",
        ] {
            assert!(yaml.contains(part), "{part:?} is not in\n{yaml}");
        }
        let fleet = values("m", &candidate(Shape::Replicated { workers: 512 }));
        assert!(fleet.starts_with("proxy:\n  replicas: 8\npools:\n"), "{fleet}");
        assert!(yaml.starts_with("pools:\n"), "the chart's own number: {yaml}");
        assert!(!yaml.contains("withEncoder") && !yaml.contains("--kv-cache-dtype"));
        assert!(yaml.contains("    args: [\"--batch-tokens\", "), "{yaml}");
        assert!(values("m", &candidate(Shape::Colocated)).contains("    withEncoder: true\n"));
        let shape = Shape::Towers { encoders: TowerWorkers::new(&[2, 1]), pds: 1 };
        let towers = Candidate { curves: Arc::new(two_towers()), ..candidate(shape) };
        let yaml = values("m", &towers);
        for part in [
            "  - name: m-low\n    role: encoder\n",
            "    towers: [\"low\"]\n",
            "  - name: m-high\n",
            "    towers: [\"high\"]\n",
            "  - name: m-pd\n",
        ] {
            assert!(yaml.contains(part), "{part:?} is not in\n{yaml}");
        }
        let lines = commands("m", &towers);
        let of = |tower: &str| lines.iter().filter(|line| line.contains(tower)).count();
        assert_eq!((of("--towers low"), of("--towers high"), lines.len()), (2, 1, 5), "{lines:?}");
        let curves = CostCurves { kv_dtype: Some("int8".into()), ..curves() };
        let kept = Candidate { curves: Arc::new(curves), ..candidate(Shape::Split { encoders: 1, pds: 1 }) };
        assert!(values("m", &kept).contains("    args: [\"--kv-cache-dtype\", \"int8\"]\n"));
        assert!(commands("m", &kept)[1].contains("--kv-cache-dtype int8"), "{:?}", commands("m", &kept));
    }
}
