//! `deploy/compose.yaml`, resolved by `docker-compose`.

use serde_json::Value;
use triptych_tests::tools::{passed, tool};

/// Settings that are combined with the compose file.
#[derive(Clone, Copy, Debug, Default)]
pub struct ComposeInput {
    /// File of variables in `deploy/compose/`.
    pub env_file: Option<&'static str>,
    /// Second file of services in `deploy/compose/`.
    pub over: Option<&'static str>,
    /// Environment variables.
    pub variables: &'static [(&'static str, &'static str)],
}

/// Combinations that the documentation offers.
pub const OFFERED: [ComposeInput; 5] = [
    ComposeInput { env_file: None, over: None, variables: &[] },
    ComposeInput { env_file: Some("small.env"), over: None, variables: &[] },
    ComposeInput { env_file: Some("full.env"), over: None, variables: &[] },
    ComposeInput { env_file: Some("full.env"), over: Some("tls.yaml"), variables: &[("TLS_DIR", "/tls")] },
    WITH_VLLM,
];

/// vLLM in place of our PD worker.
pub const WITH_VLLM: ComposeInput = ComposeInput { env_file: None, over: Some("vllm.yaml"), variables: &[] };

/// The output of `docker-compose config`.
pub fn config(input: ComposeInput) -> Value {
    let mut compose = tool("docker-compose");
    // The environment of the tests must not matter.
    compose.env_clear().env("HOME", "/nonexistent").envs(input.variables.iter().copied());
    compose.args(["-f", "deploy/compose.yaml"]);
    if let Some(file) = input.over {
        compose.arg("-f").arg(format!("deploy/compose/{file}"));
    }
    if let Some(file) = input.env_file {
        compose.arg("--env-file").arg(format!("deploy/compose/{file}"));
    }
    let json = passed(compose.args(["config", "--format", "json"]));
    serde_json::from_str(&json).expect("docker-compose writes JSON")
}

/// The services by name.
pub fn services(config: &Value) -> impl Iterator<Item = (&str, &Value)> {
    config["services"].as_object().expect("services").iter().map(|(name, service)| (name.as_str(), service))
}

/// Services that run the product.
pub fn roles(config: &Value) -> impl Iterator<Item = (&str, &Value)> {
    services(config).filter(|(_, service)| text(&service["image"]).starts_with("triptych:"))
}

/// The string of a value.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

/// The strings of a list.
pub fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|v| text(v).to_owned()).collect()
}

/// Environment variables of a service's container.
pub fn variables(service: &Value) -> Vec<(String, String)> {
    let all = service["environment"].as_object().into_iter().flatten();
    // `null`: declared without a value.
    all.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}
