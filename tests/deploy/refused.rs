//! Invalid values, which helm refuses before anything is installed.

use crate::chart::template;
use std::fs;

/// Renders with these values; helm's error.
fn refusal(values: &str) -> String {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("values.yaml");
    fs::write(&file, values).expect("own folder");
    let output = template(Some(&file), false).output().expect("helm runs");
    assert!(!output.status.success(), "taken: {values}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A planner with these settings, an encoder pool `e`, a PD pool `p`, and `a` with autoscaling.
fn planner(rest: &str) -> String {
    let model = "model: {sample: digits-whisper}";
    format!(
        "planner: {{enabled: true, {rest}}}\npools:\n  - {{name: e, role: encoder, {model}}}\n  \
         - {{name: p, role: pd, {model}}}\n  \
         - {{name: a, role: pd, {model}, autoscaling: {{kind: hpa, runningRequests: 4}}}}"
    )
}

#[test]
fn invalid_values_are_refused_with_the_name_of_the_field() {
    let pool =
        |rest: &str| format!("pools: [{{name: a, role: pd, model: {{sample: digits-whisper}}{rest}}}]");
    let cases: Vec<(String, &str)> = vec![
        ("replicas: 3".into(), "replicas"),
        ("proxy: {replica: 3}".into(), "replica"),
        ("proxy: {replicas: three}".into(), "proxy.replicas"),
        ("proxy: {fetch: everything}".into(), "proxy.fetch"),
        ("proxy: {service: {httpPort: 70000}}".into(), "httpPort"),
        ("proxy: {env: {PATH: /}}".into(), "PATH"),
        ("image: {digest: sha256:12}".into(), "image.digest"),
        ("ipFamily: both".into(), "ipFamily"),
        ("otel: {endpoint: collector}".into(), "otel.endpoint"),
        ("ec: {tiers: ['redis://:secret@h:6379']}".into(), "ec.tiers.0"),
        ("ec: {tiers: [shm]}".into(), "ec.tiers.0"),
        ("ec: {rows: f64}".into(), "ec.rows"),
        ("tls: {mode: on}".into(), "tls.mode"),
        ("tls: {mode: secret}".into(), "tls.existingSecret"),
        ("tls: {mode: certManager}".into(), "cert-manager"),
        ("auth: {jwt: {existingSecret: k}}".into(), "auth.jwt.issuer"),
        ("store: {enabled: false}".into(), "redis.enabled"),
        ("ec: {existingSecret: s}".into(), "networkPolicy.ec"),
        ("monitoring: {rules: {ttftSeconds: '2'}}".into(), "ttftSeconds"),
        ("monitoring: {rules: {objective: 99}}".into(), "objective"),
        ("networkPolicy: {clients: [{cidr: 10.0.0.0/8}]}".into(), "networkPolicy.clients.0"),
        ("pools: []".into(), "pools"),
        ("pools: [{name: a, role: encoder, model: {sample: digits-whisper}}]".into(), "pools"),
        ("pools: [{name: a, role: pd}]".into(), "model"),
        ("pools: [{name: a, role: pd, model: {}}]".into(), "model"),
        ("pools: [{name: a, role: pd, model: {sample: digits-whisper, path: b}}]".into(), "model"),
        ("pools: [{name: a, role: pd, model: {path: b}}]".into(), "models.existingClaim"),
        ("pools: [{name: A_b, role: pd, model: {sample: digits-whisper}}]".into(), "pools.0.name"),
        ("pools: [{name: proxy, role: pd, model: {sample: digits-whisper}}]".into(), "pools.0.name"),
        (pool(", towers: low"), "pools.0.towers"),
        (pool(", towers: [low, low]"), "pools.0.towers"),
        ("pools: [{name: a, role: decoder, model: {sample: digits-whisper}}]".into(), "pools.0.role"),
        (pool(", replica: 2"), "replica"),
        (pool(", precision: f64"), "precision"),
        ("pools: [{name: planner, role: pd, model: {sample: digits-whisper}}]".into(), "pools.0.name"),
        (planner("encoderPool: e, pdPool: p"), "planner.curves.existingConfigMap"),
        (planner("encoderPool: p, pdPool: p, curves: {existingConfigMap: c}"), "planner.encoderPool"),
        (planner("pdPool: p, curves: {existingConfigMap: c}"), "planner.encoderPool"),
        (pool(", withEncoder: true, encoderWeights: sometimes"), "encoderWeights"),
        (planner("encoderPool: e, pdPool: a, curves: {existingConfigMap: c}"), "pool a"),
        (planner("encoderPools: [e], pdPool: p, curves: {existingConfigMap: c}"), "one of the model's towers"),
        (planner("encoderPools: [p], pdPool: p, curves: {existingConfigMap: c}"), "planner.encoderPools"),
        ("planner: {interval: 5}".into(), "interval"),
        (pool(", engine: {kvMib: 0}"), "kvMib"),
        (pool(", resources: {limits: {memory: 4GB}}"), "memory"),
        (pool(", gpu: {count: 1, resource: gpu}"), "resource"),
        (pool(", pdb: {maxUnavailable: 0}"), "maxUnavailable"),
        (pool(", autoscaling: {kind: vpa}"), "kind"),
        (pool(", autoscaling: {kind: hpa}"), "no target"),
        (pool(", autoscaling: {kind: keda, runningRequests: 4, minReplicas: 9}"), "minReplicas"),
        (format!("{}\nmonitoring: {{keda: {{serverAddress: prometheus}}}}", pool("")), "serverAddress"),
        (
            "pools: [{name: e, role: encoder, model: {sample: digits-whisper}, sharedMemoryMib: 4}, \
             {name: a, role: pd, model: {sample: digits-whisper}}]"
                .into(),
            "sharedMemoryMib",
        ),
        (
            "pools: [{name: a, role: pd, model: {sample: digits-whisper}}, {name: a, role: pd, model: {sample: digits-whisper}}]"
                .into(),
            "twice",
        ),
    ];
    for (values, says) in cases {
        let refused = refusal(&values);
        assert!(refused.contains(says), "{values}: does not name {says}:\n{refused}");
    }
}
