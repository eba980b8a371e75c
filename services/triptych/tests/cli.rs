//! The binary as a user meets it before anything runs: help, wrong settings, and the words for them.
#![forbid(unsafe_code)]

#[path = "cli/bench.rs"]
mod bench;
#[path = "cli/ec.rs"]
mod ec;
#[path = "cli/plan.rs"]
mod plan;

use std::process::{Command, Output};

fn triptych(args: &[&str]) -> Output {
    let cache = std::env::temp_dir();
    Command::new(env!("CARGO_BIN_EXE_triptych"))
        .args(args)
        .env("NO_COLOR", "1")
        .env("HF_HOME", cache)
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .output()
        .expect("the binary starts")
}

/// Ends with `code`, and stderr has every part.
#[track_caller]
fn refuses(args: &[&str], code: i32, parts: &[&str]) {
    let output = triptych(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    for part in parts {
        assert!(text.contains(part), "{args:?}: {part:?} is not in: {text}");
    }
    assert!(output.stdout.is_empty());
}

#[test]
fn help_of_every_command_has_an_example() {
    for command in ["up", "ask", "models", "ec", "profile", "plan", "proxy", "encoder", "pd", "store"] {
        let output = triptych(&[command, "--help"]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(&format!("\n  triptych {command} ")), "{text}");
    }
}

/// The options under each heading of a command's help, in order.
fn headings(command: &[&str]) -> Vec<(String, Vec<String>)> {
    let output = triptych(&[command, &["--help"]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for line in text.lines() {
        let option = line.trim_start().trim_start_matches("-o, ");
        // Deeper lines are the texts of options.
        let is_option = line.len() - line.trim_start().len() <= 6 && option.starts_with("--");
        match line.strip_suffix(':') {
            Some(heading) if !line.starts_with(' ') => found.push((heading.to_owned(), Vec::new())),
            _ if is_option => {
                let name = option.split([' ', '=']).next().expect("a word").to_owned();
                found.last_mut().expect("options have a heading").1.push(name);
            }
            _ => {}
        }
    }
    found
}

/// Heading of an option in a command's help.
#[track_caller]
fn heading_of(command: &str, option: &str) -> String {
    let all = headings(&[command]);
    let found = all.iter().find(|(_, options)| options.iter().any(|o| o == option));
    found.unwrap_or_else(|| panic!("{command} has no {option}: {all:?}")).0.clone()
}

#[test]
fn options_stand_under_the_heading_that_they_belong_to() {
    for (command, option, heading) in [
        ("pd", "--draft", "Models"),
        ("pd", "--with-encoder", "Encoders"),
        ("pd", "--encoder-token-budget", "Encoders"),
        ("pd", "--encoder-precision", "Encoders"),
        ("pd", "--draft-tokens", "Engine, for each model"),
        ("profile", "--cores", "Options"),
        ("profile", "--quick", "Options"),
        ("profile", "--output", "Options"),
        ("profile", "--ec", "Options"),
        ("profile", "--tls-ca", "TLS between the parts"),
        ("proxy", "--max-in-flight", "Options"),
        ("proxy", "--allowed-origins", "Options"),
        ("proxy", "--request-log", "Logs and traces"),
        ("up", "--request-log", "Logs and traces"),
        ("up", "--ec", "Options"),
    ] {
        assert_eq!(heading_of(command, option), heading, "{command} {option}");
    }
}

#[test]
fn only_roles_check_their_settings() {
    for role in ["proxy", "encoder", "pd", "store"] {
        assert_eq!(heading_of(role, "--check"), "Settings");
    }
    for command in ["up", "ask", "models", "ec", "bench", "profile", "plan", "keys", "health"] {
        let has = headings(&[command]).iter().any(|(_, options)| options.iter().any(|o| o == "--check"));
        assert!(!has, "{command} --check would do nothing");
    }
    refuses(&["proxy", "--check"], 2, &["--pd"]);
    assert!(triptych(&["store", "--check"]).status.success());
    refuses(&["health", "--check"], 2, &["unexpected argument '--check'"]);
}

#[test]
fn a_wrong_origin_or_request_log_says_what_is_allowed() {
    let proxy = ["proxy", "--check", "--pd", "127.0.0.1:1"];
    let with = |more: &[&'static str]| [proxy.as_slice(), more].concat();
    refuses(&with(&["--allowed-origins", "example.com"]), 2, &["https://app.example.com"]);
    refuses(&with(&["--request-log", "some"]), 2, &["all, errors, off", "0.01"]);
}
