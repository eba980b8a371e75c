//! The binary as a user meets it before anything runs: help, wrong settings, and the words for them.
#![forbid(unsafe_code)]

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
    for command in ["up", "ask", "proxy", "encoder", "pd", "store"] {
        let output = triptych(&[command, "--help"]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(&format!("\n  triptych {command} ")), "{text}");
    }
}

#[test]
fn a_port_in_use_names_the_address_and_the_flag() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
    let address = taken.local_addr().expect("bound").to_string();
    refuses(&["up", "--http", &address], 1, &["error: ", &address, "in use", "--http"]);
    refuses(&["up", "--http", "127.0.0.1:0", "--grpc", &address], 1, &[&address, "--grpc"]);
}

#[test]
fn a_wrong_model_is_told_before_a_worker_starts() {
    let up = ["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model"];
    let with = |model: &'static str| [up.as_slice(), &[model]].concat();
    refuses(&with("./no-such-model"), 2, &["./no-such-model", "no such directory"]);
    refuses(&with("Cargo.toml"), 2, &["Cargo.toml is a file"]);
    refuses(&with("src"), 2, &["no config.json"]);
    refuses(&with("nobody/nothing"), 1, &["nobody/nothing", "--model DIR"]);
}

#[test]
fn a_wrong_store_says_what_is_allowed() {
    refuses(&["up", "--ec", "s3://bucket"], 2, &["`memory`", "`disk:DIR`"]);
    let up = ["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--ec"];
    refuses(&[up.as_slice(), &["redis://127.0.0.1:9"]].concat(), 1, &["redis://127.0.0.1:9", "--ec"]);
    refuses(&[up.as_slice(), &["disk:Cargo.toml"]].concat(), 2, &["Cargo.toml"]);
    let encoder = ["encoder", "--grpc", "127.0.0.1:0", "--model", "."];
    refuses(&[encoder.as_slice(), &["--ec", "memory"]].concat(), 2, &["triptych store"]);
    refuses(&encoder, 2, &["--ec"]);
}

#[test]
fn asking_nobody_says_how_to_start_somebody() {
    refuses(&["ask", "hello", "--grpc", "127.0.0.1:9"], 1, &["127.0.0.1:9", "triptych up"]);
}

#[test]
fn a_missing_file_is_named_before_anybody_is_asked() {
    refuses(&["ask", "what?", "--image", "no-such.png"], 2, &["no-such.png"]);
    refuses(&["ask", "what?", "--image", "Cargo.toml", "--grpc", "127.0.0.1:9"], 1, &["triptych up"]);
    refuses(&["ask"], 2, &["nothing to ask"]);
}

#[test]
fn a_child_without_its_supervisor_ends_at_once() {
    // No Linux has so many processes.
    let output = triptych(&["store", "--grpc", "127.0.0.1:0", "--supervised-by", "999999999"]);
    assert_eq!(output.status.code(), Some(1));
}
