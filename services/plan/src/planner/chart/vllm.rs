//! Workers that are vLLM servers, as an operator types them (docs.vllm.ai, "Engine Arguments"; `deploy/vllm.md`).

use super::super::candidate::{Candidate, WorkerSettings};
use crate::curves::ApiEncoders;

/// Module of the EC connector.
const CONNECTOR: &str = "triptych_ec.vllm_connector";

/// A flag of a worker, and its value.
pub(super) type Flag = (&'static str, String);

/// Job of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Encodes only.
    Encoder,
    /// Prefills and decodes, and encodes where nobody else does.
    Pd,
}

/// Settings of a PD worker that a plan chooses, as flags of `vllm serve`.
pub(super) fn settings(settings: WorkerSettings) -> Vec<Flag> {
    vec![
        ("--max-num-batched-tokens", settings.token_budget.to_string()),
        ("--max-num-seqs", settings.max_sequences.to_string()),
    ]
}

/// Arguments of `vllm serve` behind the model.
fn args(candidate: &Candidate, job: Job) -> Vec<String> {
    let mut args = match job {
        Job::Encoder => Vec::new(),
        Job::Pd => settings(candidate.settings)
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value])
            .collect(),
    };
    let encoders = candidate.curves.api.as_ref().map(|api| api.encoders);
    if encoders == Some(ApiEncoders::Ours) {
        args.push("--enable-mm-embeds".to_owned());
    }
    if let Some(config) = encoders.and_then(|encoders| transfer(encoders, job)) {
        args.push("--ec-transfer-config".to_owned());
        args.push(config);
    }
    args
}

/// Configuration of the EC connector; `None`: nothing is transferred.
fn transfer(encoders: ApiEncoders, job: Job) -> Option<String> {
    let (role, accepts) = match (encoders, job) {
        (ApiEncoders::Colocated, _) => return None,
        (_, Job::Encoder) => ("ec_producer", ""),
        (ApiEncoders::Apart, Job::Pd) => ("ec_consumer", ""),
        (ApiEncoders::Ours, Job::Pd) => ("ec_consumer", ", \"accept_proxy_keys\": true"),
    };
    Some(format!(
        "{{\"ec_connector\": \"TriptychECConnector\", \"ec_connector_module_path\": \"{CONNECTOR}\", \
         \"ec_role\": \"{role}\", \"ec_connector_extra_config\": {{\"store\": \"STORE\"{accepts}}}}}"
    ))
}

/// The command line, without its port.
pub(super) fn command(model: &str, candidate: &Candidate, job: Job) -> String {
    let quoted = args(candidate, job)
        .into_iter()
        .map(|arg| if arg.starts_with('{') { format!(" '{arg}'") } else { format!(" {arg}") });
    format!("vllm serve {model}{}", quoted.collect::<String>())
}

/// A pool of the chart, whose connector is configured by the chart itself.
pub(super) fn pool(
    (name, model): (&str, &str),
    candidate: &Candidate,
    (job, replicas): (Job, usize),
) -> String {
    let role = if job == Job::Encoder { "encoder" } else { "pd" };
    let own: Vec<String> = match job {
        Job::Encoder => Vec::new(),
        Job::Pd => args(candidate, job).into_iter().take(4).map(|arg| format!("{arg:?}")).collect(),
    };
    let own =
        if own.is_empty() { String::new() } else { format!("    vllm:\n      args: [{}]\n", own.join(", ")) };
    let cpu = candidate.curves.threads;
    format!(
        "  - name: {name}\n    role: {role}\n    engine: vllm\n    model: {{path: {model:?}}}\n    \
         replicas: {replicas}\n{own}    resources:\n      requests: {{cpu: \"{cpu}\"}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::super::{commands, settings, values};
    use super::{ApiEncoders, Candidate};
    use crate::curves::sample::curves;
    use crate::curves::{ApiSource, CostCurves};
    use crate::planner::candidate::{Shape, WorkerSettings};
    use std::sync::Arc;

    fn candidate(encoders: ApiEncoders, shape: Shape) -> Candidate {
        let api = ApiSource {
            engine: Some("vLLM 0.32".into()),
            url: "http://gpu:8000".into(),
            encoders,
            kv_block_tokens: None,
            max_sequences: None,
            unmeasured: Vec::new(),
        };
        let curves = CostCurves { api: Some(api), ..curves() };
        Candidate { shape, curves: Arc::new(curves), settings: WorkerSettings::default() }
    }

    #[test]
    fn our_encoders_stand_before_vllm() {
        let mixed = candidate(ApiEncoders::Ours, Shape::Split { encoders: 1, pds: 1 });
        let lines = commands("m", &mixed);
        assert!(lines[0].starts_with("triptych encoder --model m"), "{lines:?}");
        assert!(lines[1].starts_with("vllm serve m --max-num-batched-tokens 512 --max-num-seqs 64"));
        assert!(lines[1].contains("\"accept_proxy_keys\": true") && lines[1].ends_with("--port 7002"));
        assert!(lines[2].ends_with("--encoder 127.0.0.1:7001 --pd vllm+http://127.0.0.1:7002"), "{lines:?}");
        let flags: Vec<_> = settings(&mixed).into_iter().map(|(flag, _)| flag).collect();
        let expected = ["--max-num-batched-tokens", "--max-num-seqs", "--batch-tokens", "--batch-items"];
        assert_eq!(flags, expected, "those that its workers have");
        let yaml = values("m", &mixed);
        assert!(yaml.contains("role: pd\n    engine: vllm\n") && yaml.contains("role: encoder\n    model"));
        assert_eq!(mixed.name(), "1e1pd (1 core each, our encoders before vLLM 0.32)");
    }

    #[test]
    fn vllm_alone_has_no_worker_of_ours() {
        let apart = commands("m", &candidate(ApiEncoders::Apart, Shape::Split { encoders: 1, pds: 1 }));
        assert!(apart[0].contains("ec_producer") && apart[1].contains("ec_consumer"), "{apart:?}");
        assert!(apart[2].contains("--encoder vllm+http://127.0.0.1:7001 --pd vllm+http://127.0.0.1:7002"));
        let alone = candidate(ApiEncoders::Colocated, Shape::Replicated { workers: 2 });
        let lines = commands("m", &alone);
        assert!(lines[0].ends_with("--max-num-seqs 64 --port 7001"), "no connector: {lines:?}");
        assert!(lines[2].ends_with("--pd vllm+http://127.0.0.1:7001 --pd vllm+http://127.0.0.1:7002"));
        assert!(!values("m", &alone).contains("withEncoder"), "{}", values("m", &alone));
        assert_eq!(settings(&alone).len(), 2, "{:?}", settings(&alone));
    }
}
