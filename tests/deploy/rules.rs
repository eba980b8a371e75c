//! Alerts: promtool accepts them and their tests pass, each fires in a test, and each has a runbook entry.

use crate::chart::{of_kind, rendered, text};
use crate::page::{anchors, deploy, page};
use std::fs;
use std::process::Command;
use triptych_tests::tools::{passed, tool};

/// Tests of the alerts, over minutes and over days.
const TESTS: [&str; 2] = ["rules_test.yaml", "rules_days_test.yaml"];

/// Names of the alerts, in the order of the file.
fn alerts() -> Vec<String> {
    let rules = fs::read_to_string(deploy().join("prometheus/rules.yaml")).expect("there are rules");
    rules.lines().filter_map(|l| l.trim().strip_prefix("- alert: ")).map(str::to_owned).collect()
}

#[test]
fn promtool_accepts_the_rules_and_their_tests_pass() {
    let here = deploy().join("prometheus");
    passed(
        tool("promtool")
            .args(["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"])
            .current_dir(&here),
    );
    passed(tool("promtool").args(["test", "rules"]).args(TESTS).current_dir(&here));
}

#[test]
fn every_alert_fires_in_a_test() {
    let read = |name| fs::read_to_string(deploy().join("prometheus").join(name)).expect("there are tests");
    let tests = TESTS.map(read).concat();
    let cases: Vec<&str> = tests.split("\n  - name: ").skip(1).collect();
    let fires = |alert: &String| {
        cases
            .iter()
            .any(|case| case.contains(&format!("alertname: {alert}\n")) && case.contains("exp_labels"))
    };
    let unseen: Vec<_> = alerts().into_iter().filter(|alert| !fires(alert)).collect();
    assert!(unseen.is_empty(), "{unseen:?} fire in no test");
}

#[test]
fn every_alert_has_a_runbook_entry_and_every_entry_an_alert() {
    let page = page();
    let anchors = anchors(&page);
    let rules = fs::read_to_string(deploy().join("prometheus/rules.yaml")).expect("there are rules");
    for alert in alerts() {
        let anchor = alert.to_lowercase();
        assert!(anchors.contains(&anchor), "deploy/README.md has no entry for {alert}");
        assert!(
            rules.contains(&format!("runbook_url: deploy/README.md#{anchor}\n")),
            "{alert} does not name its entry"
        );
    }
    let stale: Vec<_> = page
        .lines()
        .filter_map(|l| l.strip_prefix("### Triptych"))
        .filter(|rest| !alerts().contains(&format!("Triptych{rest}")))
        .collect();
    assert!(stale.is_empty(), "entries without an alert: {stale:?}");
}

#[test]
fn the_chart_has_the_same_alerts_with_its_own_objective() {
    let rule = of_kind(&rendered()["full"], "PrometheusRule").next().expect("a rule");
    let groups = rule["spec"]["groups"].as_array().expect("groups");
    let carried: Vec<_> = groups
        .iter()
        .flat_map(|g| g["rules"].as_array().expect("rules"))
        .filter_map(|r| r["alert"].as_str())
        .collect();
    assert_eq!(carried, alerts());
    let whole = rule.to_string();
    assert!(
        whole.contains("vector(0.999)") && whole.contains("le=\\\"0.8192\\\"") && !whole.contains("1.6384")
    );
    assert!(whole.contains("https://runbooks.example.com/triptych#triptychnopdworkers"));
}

#[test]
fn an_alert_leads_to_its_entry_as_installed() {
    let documents = &rendered()["minimal"];
    let rule = of_kind(documents, "PrometheusRule").next().expect("a rule");
    let runbook = of_kind(documents, "ConfigMap")
        .find(|c| text(c, "/metadata/name").ends_with("-runbook"))
        .expect("the chart installs the runbook");
    let place = format!(
        "--namespace {} get configmap {} ",
        text(runbook, "/metadata/namespace"),
        text(runbook, "/metadata/name")
    );
    let rules = rule["spec"]["groups"].as_array().expect("groups").iter();
    let mut n = 0;
    for alert in rules.flat_map(|g| g["rules"].as_array().expect("rules")).filter(|r| r["alert"].is_string())
    {
        let (name, command) = (text(alert, "/alert"), text(alert, "/annotations/runbook"));
        assert!(command.starts_with("kubectl ") && command.contains(&place), "{command}");
        let key =
            command.split(['{', '}']).nth(1).and_then(|path| path.strip_prefix(".data.")).expect("a key");
        let entry = text(&runbook["data"], &format!("/{key}"));
        assert!(entry.starts_with(&format!("{name}\n")) && entry.lines().count() > 1, "{name}: {entry}");
        assert!(!entry.contains("\n## "), "{name} goes on into the next section");
        n += 1;
    }
    assert_eq!(n, alerts().len());
    assert!(!rule.to_string().contains("deploy/README.md"), "nothing of a cluster leads into a repository");
    let with_page = of_kind(&rendered()["full"], "ConfigMap").map(|c| text(c, "/metadata/name"));
    assert!(with_page.into_iter().all(|name| !name.ends_with("-runbook")), "it is published elsewhere");
}

#[test]
fn dashboards_match_their_script_and_the_chart_has_them() {
    passed(Command::new("python3").arg(deploy().join("grafana/generate.py")).arg("--check"));
    let carried: Vec<_> = of_kind(&rendered()["full"], "ConfigMap")
        .filter(|c| c["metadata"]["labels"]["grafana_dashboard"] == "1")
        .flat_map(|c| c["data"].as_object().expect("data").clone())
        .collect();
    assert_eq!(carried.len(), 4);
    for (name, data) in carried {
        let file = fs::read_to_string(deploy().join("grafana").join(&name)).expect("the dashboard is a file");
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
        assert_eq!(parse(data.as_str().expect("text")), parse(&file), "{name}");
    }
    let n = of_kind(&rendered()["default"], "ConfigMap").count();
    assert_eq!(n, 4, "without the operator's kinds too");
}
