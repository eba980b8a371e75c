//! The chart, rendered with every values file in its `ci/`, and checked by helm, Kubernetes' schemas, and the definitions
//! of the custom kinds.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use triptych_tests::tools::{passed, root, tool};

/// Kubernetes versions: the oldest that the chart allows, and the newest.
const KUBERNETES: &str = "1.30,1.37";
/// API versions of custom kinds.
const CUSTOM: [&str; 3] = ["monitoring.coreos.com/v1", "cert-manager.io/v1", "keda.sh/v1alpha1"];
/// Namespace of the rendering.
pub const NAMESPACE: &str = "ai";
/// Name of the release.
pub const RELEASE: &str = "r";

/// Folder of the chart.
pub fn chart() -> PathBuf {
    root().join("deploy/helm/triptych")
}

/// Values files, by name.
pub fn values() -> BTreeMap<String, PathBuf> {
    let files = fs::read_dir(chart().join("ci")).expect("the chart has values to try").flatten();
    let named = files.map(|f| f.path()).filter_map(|path| {
        let name = path.file_name()?.to_str()?.strip_suffix("-values.yaml")?.to_owned();
        Some((name, path))
    });
    named.collect()
}

/// `helm template`, for a cluster with or without the custom kinds.
pub fn template(values: Option<&Path>, knows_custom: bool) -> Command {
    let mut helm = tool("helm");
    helm.args(["template", RELEASE]).arg(chart()).args(["--namespace", NAMESPACE]);
    if let Some(values) = values {
        helm.arg("--values").arg(values);
    }
    for api in CUSTOM.iter().filter(|_| knows_custom) {
        helm.args(["--api-versions", api]);
    }
    helm
}

/// Documents of every rendering, validated. `default` is without values.
pub fn rendered() -> &'static BTreeMap<String, Vec<Value>> {
    static RENDERED: OnceLock<BTreeMap<String, Vec<Value>>> = OnceLock::new();
    RENDERED.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a folder");
        let render = |name: &str, values: Option<&Path>, knows_custom| {
            let file = dir.path().join(name);
            fs::write(&file, passed(&mut template(values, knows_custom))).expect("own folder");
            file
        };
        let mut files = vec![render("default", None, false)];
        files.extend(values().iter().map(|(name, path)| render(name, Some(path), true)));
        let validated = validated(&files);
        let name = |file: &PathBuf| file.file_name().expect("a name").to_string_lossy().into_owned();
        let documents = |file: &PathBuf| validated[file.to_str().expect("UTF-8")].as_array().cloned();
        files.iter().map(|file| (name(file), documents(file).expect("a list of documents"))).collect()
    })
}

/// Validates the files, and parses their documents.
fn validated(files: &[PathBuf]) -> Value {
    let mut python = Command::new("python3");
    python.arg(root().join("tests/deploy/kubernetes.py")).arg(KUBERNETES).args(files);
    let text = passed(python.env("PYTHONPATH", root().join(".cache/tools/python")));
    serde_json::from_str(&text).expect("JSON")
}

/// The documents of a kind.
pub fn of_kind<'a>(documents: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    documents.iter().filter(move |d| d["kind"] == kind)
}

/// The string at a JSON pointer.
pub fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_else(|| panic!("no text at {pointer} of {value}"))
}

/// The notes that `helm install` shows with these settings.
fn notes(set: &[&str]) -> String {
    let dir = tempfile::tempdir().expect("a folder");
    let copy = dir.path().join("triptych");
    passed(Command::new("cp").args(["-rL", "--"]).arg(chart()).arg(&copy));
    // `helm template` leaves the notes out; a template that includes them does not.
    let shown = "notes: {{ include (print $.Template.BasePath \"/NOTES.txt\") . | toJson }}\n";
    fs::write(copy.join("templates/shown.yaml"), shown).expect("own folder");
    let mut helm = tool("helm");
    helm.args(["template", RELEASE]).arg(&copy).args(["--namespace", NAMESPACE]);
    let text = passed(helm.args(["--show-only", "templates/shown.yaml"]).args(set));
    let json = text.lines().find_map(|line| line.strip_prefix("notes: ")).expect("notes");
    serde_json::from_str(json).expect("a string")
}

#[test]
fn the_notes_say_that_the_default_image_is_in_no_registry() {
    let default = notes(&[]);
    for part in ["triptych:0.1.0 is in no registry", "docker build", "--set image.repository=", "kind load"] {
        assert!(default.contains(part), "{part:?} is not in {default}");
    }
    let own = notes(&["--set", "image.repository=registry.example.com/triptych"]);
    assert!(!own.contains("is in no registry"), "{own}");
}

#[test]
fn helm_lint_passes_for_all_values() {
    for path in std::iter::once(None).chain(values().into_values().map(Some)) {
        let mut helm = tool("helm");
        helm.args(["lint", "--strict", "--quiet"]).arg(chart());
        passed(helm.args(path.iter().flat_map(|p| [Path::new("--values"), p])));
    }
}

#[test]
fn manifests_match_the_schemas_of_kubernetes_and_the_custom_kinds() {
    let kinds = |name: &str| rendered()[name].iter().map(|d| text(d, "/kind")).collect::<Vec<_>>();
    for (name, kind) in [
        ("default", "Deployment"),
        ("full", "HorizontalPodAutoscaler"),
        ("full", "PodMonitor"),
        ("full", "PrometheusRule"),
        ("keda", "ScaledObject"),
        ("tls", "Certificate"),
        ("tls", "NetworkPolicy"),
        ("tls-secret", "PodDisruptionBudget"),
        ("vllm", "InferencePool"),
    ] {
        assert!(kinds(name).contains(&kind), "{name} has no {kind}: {:?}", kinds(name));
    }
    let custom = |d: &&Value| CUSTOM.contains(&text(d, "/apiVersion"));
    assert_eq!(
        rendered()["default"].iter().filter(custom).count(),
        0,
        "no custom kinds without their definitions"
    );
}

#[test]
fn names_are_unique_and_everything_is_in_the_release_s_namespace() {
    for (name, documents) in rendered() {
        let mut seen = Vec::new();
        for document in documents {
            let id = (text(document, "/kind"), text(document, "/metadata/name"));
            assert!(!seen.contains(&id), "{name}: {id:?} twice");
            seen.push(id);
            assert_eq!(text(document, "/metadata/namespace"), NAMESPACE, "{name}: {id:?}");
        }
    }
}

#[test]
fn workers_of_a_pool_with_gpus_compute_on_cuda() {
    let mut n_with = 0;
    for (name, documents) in rendered() {
        for deployment in of_kind(documents, "Deployment").chain(of_kind(documents, "StatefulSet")) {
            let container = &deployment["spec"]["template"]["spec"]["containers"][0];
            if container["name"] == "vllm" {
                continue;
            }
            let limits = container["resources"]["limits"].as_object();
            let has_gpu =
                limits.is_some_and(|limits| limits.keys().any(|name| name.starts_with("nvidia.com/")));
            let variables = container["env"].as_array().map_or(&[][..], Vec::as_slice);
            let device = variables.iter().find(|one| one["name"] == "TRIPTYCH_DEVICE");
            let device = device.map(|one| text(one, "/value"));
            assert_eq!(device, has_gpu.then_some("cuda"), "{name}: {}", text(deployment, "/metadata/name"));
            n_with += usize::from(has_gpu);
        }
    }
    assert!(n_with > 0, "no values in `ci/` ask for a GPU");
}

#[test]
fn encoder_pools_of_a_tower_hold_it_alone_and_others_hold_all() {
    let towers = |name: &str| {
        let documents = &rendered()["planned"];
        let mut pools = of_kind(documents, "Deployment").chain(of_kind(documents, "StatefulSet"));
        let is_pool = |one: &&Value| text(one, "/metadata/name").ends_with(name);
        let pool = pools.find(is_pool).unwrap_or_else(|| panic!("no pool {name}"));
        let variables = pool["spec"]["template"]["spec"]["containers"][0]["env"].as_array();
        let variable = variables.into_iter().flatten().find(|one| one["name"] == "TRIPTYCH_TOWERS");
        variable.map(|one| text(one, "/value").to_owned())
    };
    assert_eq!(towers("my-cogagent-low").as_deref(), Some("low"));
    assert_eq!(towers("my-cogagent-high").as_deref(), Some("high"));
    assert_eq!((towers("my-cogagent-pd"), towers("my-qwen2-vl-encoder")), (None, None));
}

#[test]
fn the_planner_of_towers_knows_the_pool_of_each() {
    let documents = &rendered()["planner-towers"];
    let planner = of_kind(documents, "Deployment").find(|d| text(d, "/metadata/name").ends_with("-planner"));
    let args = planner.expect("a planner")["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
    let pools = "\"--encoder-deployment\",\"low=r-triptych-cog-low,high=r-triptych-cog-high\"";
    assert!(args.contains(pools), "{args}");
    let low = of_kind(documents, "Deployment").find(|d| text(d, "/metadata/name").ends_with("-cog-low"));
    let env = &low.expect("a pool")["spec"]["template"]["spec"]["containers"][0]["env"];
    let memory = serde_json::json!({"name": "TRIPTYCH_MEMORY_MIB", "value": "12000"});
    assert!(env.as_array().is_some_and(|env| env.contains(&memory)), "{env}");
    let role = of_kind(documents, "Role").find(|role| text(role, "/metadata/name").ends_with("-planner"));
    let names = &role.expect("a role")["rules"][0]["resourceNames"];
    assert_eq!(names, &serde_json::json!(["r-triptych-cog-low", "r-triptych-cog-high", "r-triptych-cog-pd"]));
}

/// The file of values for vLLM, with settings over it: what helm says of them.
fn refused(set: &[&str]) -> String {
    let mut helm = template(values().get("vllm").map(PathBuf::as_path), true);
    let output = helm.args(set.iter().flat_map(|one| ["--set-json", one])).output().expect("helm runs");
    assert!(!output.status.success(), "{set:?} is accepted");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn proxies_reach_every_pod_with_vllm_and_it_reads_the_store_of_the_encoders() {
    let documents = &rendered()["vllm"];
    let variable = |container: &Value, name: &str| {
        let all = container["env"].as_array().expect("variables");
        all.iter().find(|one| one["name"] == name).map(|one| text(one, "/value").to_owned())
    };
    let container = |name: &str| {
        let found = of_kind(documents, "Deployment").find(|d| text(d, "/metadata/name") == name);
        &found.expect(name)["spec"]["template"]["spec"]["containers"][0]
    };
    let (proxy, vllm) = (container("r-triptych-proxy"), container("r-triptych-vl-vllm"));
    let by_name = "vllm+dns:r-triptych-vl-vllm.ai.svc:8000";
    assert_eq!(variable(proxy, "TRIPTYCH_PDS").as_deref(), Some(by_name));
    let service = of_kind(documents, "Service").find(|s| text(s, "/metadata/name") == "r-triptych-vl-vllm");
    let service = &service.expect("a Service")["spec"];
    assert_eq!((&service["clusterIP"], &service["ports"][0]["port"]), (&"None".into(), &8000.into()));
    assert_eq!(variable(proxy, "TRIPTYCH_ENCODERS").as_deref(), Some("k8s:ai/r-triptych-encoder:grpc"));

    assert_eq!(variable(vllm, "EC_STORE"), variable(proxy, "EC_STORE"));
    let args = vllm["args"].as_array().expect("flags");
    let at = args.iter().position(|arg| arg == "--ec-transfer-config").expect("a connector");
    let transfer: Value = serde_json::from_str(args[at + 1].as_str().expect("text")).expect("JSON");
    let extra = &transfer["ec_connector_extra_config"];
    assert_eq!((&transfer["ec_role"], &extra["store"]), (&"ec_consumer".into(), &"$(EC_STORE)".into()));
    assert_eq!(extra["accept_proxy_keys"], true);
    // Settings of the connector, by its own list.
    let settings = root().join("services/ec/python/src/triptych_ec/settings.py");
    let settings = fs::read_to_string(settings).expect("the connector's settings");
    for name in extra.as_object().expect("settings").keys() {
        assert!(settings.contains(&format!("    {name}: ")), "{name} is no setting of the connector");
    }

    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        assert_eq!(text(&vllm[probe], "/httpGet/path"), "/health", "{probe}");
    }

    let pool = of_kind(documents, "InferencePool").next().expect("a pool");
    let selected = &pool["spec"]["selector"]["matchLabels"];
    assert_eq!(selected["app.kubernetes.io/component"], "proxy");
}

#[test]
fn what_a_pool_with_vllm_cannot_be_is_refused_by_name() {
    for (set, named) in [
        (r#"tls.mode="certManager""#, "tls.mode none"),
        (r#"pools[1].model={"sample":"shapes-qwen2-vl"}"#, "no sample models"),
        (r#"pools[1].autoscaling.kind="keda""#, "autoscaling.kind none"),
        (r#"pools[1].engine="sglang""#, "engine"),
        (r#"inferencePool.endpointPicker.name="""#, "inferencePool.endpointPicker.name"),
    ] {
        let said = refused(&[set]);
        assert!(said.contains(named), "{set}: {said}");
    }
    let said = refused(&[r#"ec.tiers=["redis://a","redis://b"]"#, "networkPolicy.enabled=false"]);
    assert!(said.contains("reads one store"), "{said}");
}
