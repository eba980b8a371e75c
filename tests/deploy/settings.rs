//! Settings of the compose file, checked by the product: commands, variables, timeouts, addresses.

use crate::compose::{ComposeInput, OFFERED, WITH_VLLM, config, roles, services, text, texts, variables};
use crate::container::image_variables;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Output};
use triptych_tests::process::binary;
use triptych_tests::tools::root;

/// Runs the product with a service's command, variables and no others.
fn ask(service: &Value, flag: &str, change: &[(&str, &str)]) -> Output {
    let mut command = Command::new(binary());
    command.args(texts(&service["command"])).arg(flag);
    command.env_clear().envs(image_variables()).envs(variables(service)).envs(change.iter().copied());
    // The folder that is mounted there.
    command.env("TRIPTYCH_CONFIG", root().join("deploy/compose/config/triptych.toml"));
    command.output().expect("the binary runs")
}

#[test]
fn every_role_can_start_with_its_command_and_its_variables() {
    for input in OFFERED {
        let config = config(input);
        let mut n = 0;
        for (name, role) in roles(&config) {
            let asked = ask(role, "--check", &[]);
            assert!(asked.status.success(), "{input:?} {name}: {}", String::from_utf8_lossy(&asked.stderr));
            n += 1;
        }
        let expected = if input.over == WITH_VLLM.over { 2 } else { 3 };
        assert_eq!(n, expected, "{input:?}: proxy, encoder, and pd unless vLLM takes its place");
    }
}

#[test]
fn invalid_settings_of_a_role_are_detected() {
    let config = config(ComposeInput::default());
    for (name, variable, value, expected) in [
        ("encoder", "TRIPTYCH_INSECURE_PLAINTEXT", "false", "--insecure-plaintext"),
        ("encoder", "TRIPTYCH_EC", "ftp://h", "ftp://h"),
        ("pd", "TRIPTYCH_KV_MIB", "0", "--kv-mib"),
        ("pd", "TRIPTYCH_PRECISION", "f64", "--precision"),
        ("proxy", "TRIPTYCH_PDS", "k8s:", "--pd"),
        ("proxy", "TRIPTYCH_EC", "memory", "memory"),
    ] {
        let asked = ask(&config["services"][name], "--check", &[(variable, value)]);
        let wrong = String::from_utf8_lossy(&asked.stderr);
        assert_eq!(asked.status.code(), Some(2), "{name} with {variable}={value}: {wrong}");
        assert!(wrong.contains(expected), "{name} with {variable}={value}: {wrong}");
    }
}

#[test]
fn every_variable_is_one_that_the_role_reads() {
    for input in OFFERED {
        for (name, role) in roles(&config(input)) {
            let help = String::from_utf8(ask(role, "--help", &[]).stdout).expect("UTF-8");
            let named = role["environment"].as_object().expect("variables").keys().cloned();
            let image = image_variables().into_iter().map(|(name, _)| name);
            for variable in named.chain(image).filter(|name| name.starts_with("TRIPTYCH_")) {
                let read = [format!("[env: {variable}="), format!("[env: {variable}]")];
                assert!(read.iter().any(|text| help.contains(text)), "{name} does not read {variable}");
            }
        }
    }
}

#[test]
fn docker_s_stop_timeout_is_longer_than_a_role_s_drain() {
    for (name, role) in roles(&config(ComposeInput::default())) {
        let variables = variables(role);
        let number = |wanted: &str| {
            let (_, value) =
                variables.iter().find(|(name, _)| name == wanted).unwrap_or_else(|| panic!("{wanted}"));
            value.parse::<u64>().expect("a number")
        };
        let takes = number("TRIPTYCH_LAME_DUCK") / 1000 + number("TRIPTYCH_DRAIN_GRACE") + 5;
        let waits = seconds(text(&role["stop_grace_period"]));
        assert!(waits >= takes, "{name}: {waits} s for {takes} s");
    }
}

/// Seconds of a duration such as `1m15s`.
fn seconds(text: &str) -> u64 {
    let (minutes, rest) = text.split_once('m').unwrap_or(("0", text));
    let number = |text: &str| text.trim_end_matches('s').parse::<u64>().expect("a time");
    number(minutes) * 60 + number(rest)
}

#[test]
fn published_ports_are_the_proxy_s_and_no_other_role_s() {
    let config = config(ComposeInput { env_file: Some("full.env"), ..ComposeInput::default() });
    for (name, role) in roles(&config) {
        let variables = variables(role);
        let listens: BTreeSet<_> = variables
            .iter()
            .filter(|(name, _)| name == "TRIPTYCH_HTTP" || name == "TRIPTYCH_GRPC")
            .filter_map(|(_, address)| Some(address.rsplit_once(':')?.1.to_owned()))
            .collect();
        let ports = role["ports"].as_array().into_iter().flatten();
        let ports: BTreeSet<_> = ports.map(|port| port["target"].to_string()).collect();
        match name {
            "proxy" => assert_eq!(ports, listens),
            _ => assert!(ports.is_empty(), "{name} is not for others"),
        }
    }
    for (name, service) in services(&config) {
        for port in service["ports"].as_array().into_iter().flatten() {
            assert_eq!(port["host_ip"], "127.0.0.1", "{name}: others have to be let in");
        }
    }
}

/// Names after a marker, as in `${NAME:-…}`.
fn names_after<'a>(text: &'a str, mark: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(mark).skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        &rest[..end]
    })
}

#[test]
fn the_env_files_have_every_variable_of_the_compose_file_and_no_other() {
    let read = |name: &str| fs::read_to_string(root().join("deploy").join(name)).expect("a file");
    let compose = read("compose.yaml");
    let mut asked: BTreeSet<_> = names_after(&compose, "${").collect();
    // Without a value: taken from the environment.
    asked.extend(
        compose
            .lines()
            .filter_map(|line| line.trim().strip_suffix(':'))
            .filter(|n| n.starts_with("TRIPTYCH_")),
    );
    let files = read("compose/small.env") + &read("compose/full.env");
    let set: BTreeSet<_> =
        files.lines().filter(|l| !l.starts_with('#')).filter_map(|l| Some(l.split_once('=')?.0)).collect();
    let shown: BTreeSet<_> = files
        .lines()
        .filter_map(|l| l.strip_prefix("# ")?.split_once('='))
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("TRIPTYCH_"))
        .collect();
    // A variable of Docker.
    let input: BTreeSet<_> = set.union(&shown).copied().filter(|name| *name != "COMPOSE_PROFILES").collect();
    assert_eq!(asked, input);
}

#[test]
fn the_file_of_defaults_has_the_defaults() {
    let [bare, small, ..] = OFFERED;
    assert_eq!(config(bare), config(small));
}
