//! `deploy/compose.yaml` as `docker-compose` understands it.

use serde_json::Value;
use triptych_tests::tools::{passed, tool};

/// A file, and what is given beside it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Given {
    /// Of `deploy/compose/`: a file of variables.
    pub env_file: Option<&'static str>,
    /// Of `deploy/compose/`: a second file of services.
    pub over: Option<&'static str>,
    /// Variables.
    pub variables: &'static [(&'static str, &'static str)],
}

/// The combinations that the repository offers.
pub const OFFERED: [Given; 4] = [
    Given { env_file: None, over: None, variables: &[] },
    Given { env_file: Some("small.env"), over: None, variables: &[] },
    Given { env_file: Some("full.env"), over: None, variables: &[] },
    Given { env_file: Some("full.env"), over: Some("tls.yaml"), variables: &[("TLS_DIR", "/tls")] },
];

/// What `docker-compose config` makes of it.
pub fn config(given: Given) -> Value {
    let mut compose = tool("docker-compose");
    // What is set where the tests run must not matter.
    compose.env_clear().env("HOME", "/nonexistent").envs(given.variables.iter().copied());
    compose.args(["-f", "deploy/compose.yaml"]);
    if let Some(file) = given.over {
        compose.arg("-f").arg(format!("deploy/compose/{file}"));
    }
    if let Some(file) = given.env_file {
        compose.arg("--env-file").arg(format!("deploy/compose/{file}"));
    }
    let json = passed(compose.args(["config", "--format", "json"]));
    serde_json::from_str(&json).expect("docker-compose writes JSON")
}

/// The services by name.
pub fn services(config: &Value) -> impl Iterator<Item = (&str, &Value)> {
    config["services"].as_object().expect("services").iter().map(|(name, service)| (name.as_str(), service))
}

/// Those that run the product.
pub fn roles(config: &Value) -> impl Iterator<Item = (&str, &Value)> {
    services(config).filter(|(_, service)| text(&service["image"]).starts_with("triptych:"))
}

/// A text.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

/// A list of texts.
pub fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|v| text(v).to_owned()).collect()
}

/// The variables that a container of the service has.
pub fn variables(service: &Value) -> Vec<(String, String)> {
    let all = service["environment"].as_object().into_iter().flatten();
    // `null`: named, and not set.
    all.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}
