//! The pods of the chart: their commands are checked by the product, their privileges against Kubernetes' restricted
//! standard, and every selector selects some pods.

use crate::chart::{of_kind, rendered, text};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Output};
use triptych_tests::process::binary;

/// A container of the product, and its pod.
struct Container<'a> {
    /// Its rendering and pod, for messages.
    of: String,
    pod: &'a Value,
    container: &'a Value,
}

/// Pod templates with their labels, of Deployments and bare pods.
fn pods(documents: &[Value]) -> Vec<(String, &Value, &Value)> {
    let deployments = of_kind(documents, "Deployment").map(|d| {
        (
            text(d, "/metadata/name").to_owned(),
            &d["spec"]["template"]["metadata"],
            &d["spec"]["template"]["spec"],
        )
    });
    let bare =
        of_kind(documents, "Pod").map(|p| (text(p, "/metadata/name").to_owned(), &p["metadata"], &p["spec"]));
    deployments.chain(bare).collect()
}

fn ours() -> Vec<Container<'static>> {
    let mut found = Vec::new();
    for (name, documents) in rendered() {
        for (pod_name, _, pod) in pods(documents) {
            let lists = ["containers", "initContainers"].iter().filter_map(|list| pod[list].as_array());
            for container in lists.flatten().filter(|c| text(c, "/image").contains("triptych")) {
                found.push(Container { of: format!("{name}: {pod_name}"), pod, container });
            }
        }
    }
    found
}

/// A container's variables, as the kubelet expands them: `$(NAME)` is an earlier variable.
fn variables(container: &Value) -> BTreeMap<String, String> {
    let mut known = BTreeMap::from([("KUBERNETES_SERVICE_HOST".to_owned(), "10.96.0.1".to_owned())]);
    for variable in container["env"].as_array().into_iter().flatten() {
        let name = text(variable, "/name");
        let value = match (&variable["value"], &variable["valueFrom"]) {
            (Value::String(value), _) => known
                .iter()
                .fold(value.clone(), |value, (name, known)| value.replace(&format!("$({name})"), known)),
            (_, from) if from["fieldRef"]["fieldPath"] == "status.podIP" => "10.1.2.3".into(),
            (_, from) if from["fieldRef"].is_object() => "pod-0".into(),
            (_, from) if from["resourceFieldRef"].is_object() => "2".into(),
            (_, from) if from["secretKeyRef"].is_object() && name == "EC_STORE" => {
                "redis://:secret@h:6379".into()
            }
            (_, from) if from["secretKeyRef"].is_object() => "secret".into(),
            other => panic!("{name}: {other:?}"),
        };
        known.insert(name.to_owned(), value);
    }
    known
}

fn run(container: &Value, more: &[&str], change: &[(&str, &str)]) -> Output {
    let args = container["args"].as_array().expect("what to run").iter().map(|a| a.as_str().expect("text"));
    let mut command = Command::new(binary());
    command.args(args).args(more).env_clear().envs(variables(container)).envs(change.iter().copied());
    command.output().expect("the binary runs")
}

#[test]
fn every_container_starts_with_its_settings() {
    let mut n = 0;
    // The secret that a pod has mounted.
    let mut token = tempfile::NamedTempFile::new().expect("a file");
    token.write_all(b"0123456789abcdef0123456789abcdef").expect("written");
    let token = ("TRIPTYCH_ADMIN_TOKEN_FILE", token.path().to_str().expect("plain"));
    for Container { of, container, .. } in ours() {
        let is_role = ["proxy", "encoder", "pd", "store"].contains(&text(container, "/args/0"));
        let mounted = variables(container).contains_key(token.0).then_some(token);
        let asked = run(container, if is_role { &["--check"] } else { &[] }, mounted.as_slice());
        let said = String::from_utf8_lossy(&asked.stderr);
        if is_role {
            assert!(asked.status.success(), "{of}: {said}");
        } else {
            // It has nobody to ask here; flags that it does not have would be told with the way to its help.
            assert!(!said.contains("--help"), "{of}: {said}");
        }
        n += 1;
    }
    assert!(n > 30, "{n}");
}

#[test]
fn invalid_settings_of_a_container_are_detected() {
    let pd = ours().into_iter().find(|c| text(c.container, "/name") == "pd").expect("a PD worker");
    for (variable, value) in
        [("TRIPTYCH_INSECURE_PLAINTEXT", "false"), ("TRIPTYCH_EC", "ftp://h"), ("TRIPTYCH_PRECISION", "f64")]
    {
        assert_eq!(
            run(pd.container, &["--check"], &[(variable, value)]).status.code(),
            Some(2),
            "{variable}"
        );
    }
}

#[test]
fn every_variable_is_one_that_the_role_reads() {
    let mut helps = BTreeMap::new();
    for Container { of, container, .. } in ours() {
        let role = text(container, "/args/0");
        let help = helps.entry(role).or_insert_with(|| {
            let asked = Command::new(binary()).args([role, "--help"]).output().expect("the binary runs");
            // Help text may break lines between any two words.
            let help = String::from_utf8(asked.stdout).expect("UTF-8");
            help.split_whitespace().collect::<Vec<_>>().join(" ")
        });
        for name in variables(container).into_keys().filter(|name| name.starts_with("TRIPTYCH_")) {
            let read = [format!("[env: {name}="), format!("[env: {name}]")];
            assert!(read.iter().any(|r| help.contains(r)), "{of}: `triptych {role}` does not read {name}");
        }
    }
}

#[test]
fn pods_keep_to_the_restricted_standard() {
    for (name, documents) in rendered() {
        for (pod_name, _, pod) in pods(documents) {
            let at = format!("{name}: {pod_name}");
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{at}");
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{at}");
            for forbidden in ["hostNetwork", "hostPID", "hostIPC"] {
                assert!(pod[forbidden].is_null(), "{at}: {forbidden}");
            }
            let volumes = pod["volumes"].as_array().into_iter().flatten();
            for volume in volumes {
                let kinds = ["emptyDir", "secret", "persistentVolumeClaim", "configMap", "projected"];
                assert!(kinds.iter().any(|k| volume[k].is_object()), "{at}: {volume}");
            }
            for container in pod["containers"].as_array().expect("containers") {
                let may = &container["securityContext"];
                assert_eq!(may["allowPrivilegeEscalation"], false, "{at}");
                assert_eq!(may["readOnlyRootFilesystem"], true, "{at}");
                assert_eq!(may["capabilities"]["drop"][0], "ALL", "{at}");
                assert!(container["resources"]["limits"]["memory"].is_string(), "{at}: memory has a limit");
            }
            let asks = pod_name.ends_with("-proxy") || pod_name.ends_with("-planner");
            assert_eq!(
                pod["automountServiceAccountToken"], asks,
                "{at}: only proxies and the planner ask Kubernetes"
            );
        }
    }
}

#[test]
fn a_pod_s_grace_period_is_long_enough_for_its_drain() {
    for Container { of, pod, container } in ours() {
        let variables = variables(container);
        let (Some(duck), Some(grace)) =
            (variables.get("TRIPTYCH_LAME_DUCK"), variables.get("TRIPTYCH_DRAIN_GRACE"))
        else {
            continue;
        };
        let number = |text: &str| text.parse::<u64>().expect("a number");
        let before = container["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap_or(0);
        let takes = before + number(duck).div_ceil(1000) + number(grace);
        let has = pod["terminationGracePeriodSeconds"].as_u64().expect("a time to stop");
        assert!((takes + 3..takes + 10).contains(&has), "{of}: takes {takes} s, has {has} s");
    }
}

#[test]
fn shared_memory_fits_the_slab_within_the_pod_s_limit() {
    let with_slab = ours()
        .into_iter()
        .filter(|c| variables(c.container).get("TRIPTYCH_EC").is_some_and(|ec| ec.contains("shm:")));
    let mut n = 0;
    for Container { of, pod, container } in with_slab {
        let ec = &variables(container)["TRIPTYCH_EC"];
        let mib: u64 = ec
            .split("mib=")
            .nth(1)
            .and_then(|t| t.split(' ').next())
            .expect("a size")
            .parse()
            .expect("a number");
        let slab =
            pod["volumes"].as_array().expect("volumes").iter().find(|v| v["name"] == "slab").expect("a slab");
        assert_eq!(slab["emptyDir"]["medium"], "Memory", "{of}");
        let room: u64 = text(slab, "/emptyDir/sizeLimit").trim_end_matches("Mi").parse().expect("MiB");
        assert!(room > mib, "{of}: {room} MiB for a slab of {mib}");
        n += 1;
    }
    assert_eq!(n, 1);
}

/// True if a selector matches labels. Expressions are `In` only.
fn matches_labels(selector: &Value, labels: &Value) -> bool {
    let all = |wanted: &Value| {
        wanted.as_object().is_none_or(|wanted| wanted.iter().all(|(name, value)| labels[name] == *value))
    };
    let expressions = selector["matchExpressions"].as_array().into_iter().flatten();
    let mut expressions = expressions.map(|e| {
        let values = e["values"].as_array().expect("values");
        values.contains(&labels[text(e, "/key")])
    });
    all(&selector["matchLabels"]) && expressions.all(|holds| holds)
}

#[test]
fn every_selector_selects_pods_and_every_named_port_exists() {
    for (name, documents) in rendered() {
        let pods = pods(documents);
        let selected = |selector: &Value| {
            pods.iter().filter(|(_, meta, _)| matches_labels(selector, &meta["labels"])).count()
        };
        for service in of_kind(documents, "Service") {
            let selector = serde_json::json!({"matchLabels": service["spec"]["selector"]});
            assert!(selected(&selector) > 0, "{name}: {}", text(service, "/metadata/name"));
            for port in service["spec"]["ports"].as_array().expect("ports") {
                for (pod_name, _, pod) in
                    pods.iter().filter(|(_, meta, _)| matches_labels(&selector, &meta["labels"]))
                {
                    let ports = pod["containers"][0]["ports"].as_array().expect("ports");
                    assert!(
                        ports.iter().any(|p| p["name"] == port["targetPort"]),
                        "{name}: {pod_name}: {port}"
                    );
                }
            }
        }
        for kind in ["PodDisruptionBudget", "Deployment"] {
            for document in of_kind(documents, kind) {
                let n = selected(&document["spec"]["selector"]);
                assert_eq!(n, 1, "{name}: {kind} {}", text(document, "/metadata/name"));
            }
        }
        for policy in of_kind(documents, "NetworkPolicy") {
            let policy_name = text(policy, "/metadata/name");
            // There may be no encoders, or none but vLLM to prefill and decode.
            let may_be_empty = ["-encoder", "-pd"].iter().any(|end| policy_name.ends_with(end));
            assert!(may_be_empty || selected(&policy["spec"]["podSelector"]) > 0, "{name}: {policy_name}");
        }
    }
}

#[test]
fn only_proxies_may_reach_the_internet_and_everything_else_is_denied() {
    let documents = &rendered()["default"];
    let mut denied = false;
    for policy in of_kind(documents, "NetworkPolicy") {
        let name = text(policy, "/metadata/name");
        let egress = policy["spec"]["egress"].as_array();
        let outside = egress.into_iter().flatten().flat_map(|e| e["to"].as_array().into_iter().flatten());
        let reaches_out = outside.into_iter().any(|to| to["ipBlock"].is_object());
        assert_eq!(reaches_out, name.ends_with("-proxy"), "{name}");
        if name.ends_with("-default-deny") {
            denied = policy["spec"]["ingress"].is_null() && policy["spec"]["egress"].is_null();
            for (pod_name, meta, _) in pods(documents) {
                assert!(matches_labels(&policy["spec"]["podSelector"], &meta["labels"]), "{pod_name}");
            }
        }
    }
    assert!(denied);
}
