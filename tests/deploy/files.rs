//! Files of other programs, checked by those programs; and the privileges of containers.

use crate::compose::{OFFERED, config, roles, services, text, texts};
use serde_json::Value;
use std::fs;
use std::process::Command;
use triptych_tests::tools::{passed, root, tool};

fn read(name: &str) -> String {
    fs::read_to_string(root().join("deploy").join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn dockerfiles_pass_hadolint() {
    for file in ["deploy/Dockerfile", "deploy/Dockerfile.cuda", "deploy/Dockerfile.vllm"] {
        passed(tool("hadolint").args(["--no-color", "--failure-threshold", "style", file]));
    }
}

#[test]
fn prometheus_accepts_its_configuration_and_rules() {
    let dir = tempfile::tempdir().expect("a folder");
    // Rules are next to it in the repository, and elsewhere in the container.
    let rules = root().join("deploy/prometheus");
    let text = read("compose/prometheus.yml");
    assert!(text.contains("/etc/prometheus/rules/"));
    let here = text.replace("/etc/prometheus/rules", rules.to_str().expect("a plain path"));
    let file = dir.path().join("prometheus.yml");
    fs::write(&file, here).expect("own folder");
    passed(tool("promtool").args(["check", "config"]).arg(&file));
}

#[test]
fn mounted_files_exist() {
    for input in OFFERED {
        for (name, service) in services(&config(input)) {
            let binds = service["volumes"].as_array().into_iter().flatten().filter(|v| v["type"] == "bind");
            for bind in binds.filter(|v| v["target"] != "/tls") {
                let source = text(&bind["source"]);
                assert!(fs::exists(source).is_ok_and(|there| there), "{name}: {source}");
                assert_eq!(bind["read_only"], true, "{name}: {source}");
            }
        }
    }
}

#[test]
fn prometheus_scrapes_every_role() {
    let scraped = read("compose/prometheus.yml");
    for input in OFFERED {
        for (name, role) in roles(&config(input)) {
            assert_eq!(role["environment"]["TRIPTYCH_ADMIN"], "0.0.0.0:9090");
            let names = scraped.lines().find_map(|l| l.trim().strip_prefix("- names: [")).expect("names");
            assert!(names.trim_end_matches(']').split(", ").any(|n| n == name), "{name} is scraped");
        }
    }
    assert!(scraped.contains("port: 9090\n"));
}

#[test]
fn containers_have_minimal_privileges() {
    for input in OFFERED {
        let config = config(input);
        for (name, service) in services(&config) {
            let has = |key: &str, value: &str| texts(&service[key]).iter().any(|v| v == value);
            assert!(has("cap_drop", "ALL"), "{name}");
            assert!(has("security_opt", "no-new-privileges:true"), "{name}");
            assert_ne!(service["privileged"], true, "{name}");
            assert!(service["deploy"]["resources"]["limits"]["memory"].is_string(), "{name} has a limit");
            assert!(service["logging"]["options"]["max-size"].is_string(), "{name} fills no disk");
            assert_eq!(service["restart"], "unless-stopped", "{name}");
            let (_, tag) = text(&service["image"]).rsplit_once(':').expect("a tag");
            assert!(
                tag.contains('.') && tag.contains(|c: char| c.is_ascii_digit()),
                "{name}: {tag} is a version"
            );
        }
        let image = last_stage("Dockerfile");
        for (name, role) in roles(&config) {
            assert_eq!(role["read_only"], true, "{name}");
            assert!(
                image.contains(&format!("\nUSER {}\n", text(&role["user"]))),
                "{name} has the user of the image"
            );
            let test = &texts(&role["healthcheck"]["test"])[1..];
            let test = Value::from(test).to_string().replace(',', ", ");
            assert!(
                image.contains(&format!("CMD {test}\n")),
                "{name} has the healthcheck of the image: {test}"
            );
        }
    }
}

fn last_stage(file: &str) -> String {
    let text = read(file);
    text.rsplit("\nFROM ").next().expect("a stage").to_owned()
}

#[test]
fn both_images_have_the_same_metadata() {
    let metadata = |file: &str| {
        let stage = last_stage(file);
        let from = stage.find("\nEXPOSE").expect("ports");
        let lines = stage[from..].lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(metadata("Dockerfile"), metadata("Dockerfile.cuda"));
    assert!(last_stage("Dockerfile").starts_with("scratch\n"));
    let version = format!("ARG VERSION={}\n", env!("CARGO_PKG_VERSION"));
    assert!(last_stage("Dockerfile").contains(&version) && last_stage("Dockerfile.cuda").contains(&version));
    let toolchain = "FROM rust:1.95.0-bookworm AS build\n";
    assert!(read("Dockerfile").contains(toolchain) && read("Dockerfile.cuda").contains(toolchain));
}

#[test]
fn the_build_context_is_the_whole_workspace_and_no_more() {
    let rules = fs::read_to_string(root().join(".dockerignore")).expect("a file");
    let listed = passed(Command::new("git").arg("ls-files").current_dir(root()));
    let sent: Vec<_> = listed.lines().filter(|path| is_sent(&rules, path)).collect();
    assert!(
        sent.contains(&"tests/models/digits-whisper/config.json"),
        "the binary carries the sample models"
    );
    for path in &sent {
        let first = path.split('/').next().unwrap_or_default();
        assert!(!["deploy", ".ci", "README.md"].contains(&first), "{path} changes no binary");
    }
    let dir = tempfile::tempdir().expect("a folder");
    for path in sent {
        let to = dir.path().join(path);
        fs::create_dir_all(to.parent().expect("a folder")).expect("own folder");
        fs::copy(root().join(path), to).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // For the host's platform, whose packages are present; those of other platforms may be missing.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut metadata = Command::new(cargo);
    metadata.args([
        "metadata",
        "--locked",
        "--offline",
        "--format-version",
        "1",
        "--filter-platform",
        &platform,
    ]);
    passed(metadata.current_dir(dir.path()));
}

/// Docker's ignore rules, as far as they are used: the last that matches a path or its folder decides.
fn is_sent(rules: &str, path: &str) -> bool {
    let below =
        |folder: &str| path == folder || path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
    let matches = |pattern: &str| match pattern.strip_prefix("**/") {
        Some(name) => path.split('/').any(|part| part == name),
        None => pattern == "*" || below(pattern),
    };
    let rules = rules.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut decided = rules.filter_map(|rule| match rule.strip_prefix('!') {
        Some(pattern) => matches(pattern).then_some(true),
        None => matches(rule).then_some(false),
    });
    decided.next_back().unwrap_or(true)
}
