//! The binary as a user meets it before anything runs: help, wrong settings, and the words for them.
#![forbid(unsafe_code)]

#[path = "cli/bench.rs"]
mod bench;
#[path = "cli/config.rs"]
mod config;
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
    for command in
        ["up", "ask", "models", "ec", "profile", "plan", "config", "top", "proxy", "encoder", "pd", "store"]
    {
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

#[test]
fn each_option_of_a_bench_is_under_its_heading() {
    let help = String::from_utf8_lossy(&triptych(&["bench", "run", "--help"]).stdout).into_owned();
    let of = |heading: &str| help.split(&format!("\n{heading}:\n")).nth(1).expect(heading).to_owned();
    assert!(!of("Size").split("\nResult:\n").next().expect("its options").contains("--json"), "{help}");
    assert!(of("Result").contains("--json") && of("Result").contains("--report"), "{help}");
    let page = String::from_utf8_lossy(&triptych(&["bench", "report", "--help"]).stdout).into_owned();
    assert!(page.contains("Examples:\n  triptych bench report"), "{page}");
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
    refuses(&["up", "--ec", "nfs://bucket"], 2, &["`memory[:MIB]`", "`disk:DIR[?mib=N]`"]);
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
fn a_cluster_that_is_silent_is_not_waited_for_longer_than_was_said() {
    // Connections wait in its queue, as at a process that is stopped.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
    let address = silent.local_addr().expect("bound").to_string();
    let ask = |more: &[&str]| triptych(&[&["ask", "hello", "--grpc", &address], more].concat());
    for more in [&["--timeout", "300ms"][..], &["--timeout", "300ms", "--json"]] {
        let output = ask(more);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(124), "{text}");
        // Nothing of the spinner on a pipe.
        let expect =
            format!("error: no whole answer within 300ms: waiting for {address} to admit the request\n");
        assert_eq!(text, expect);
    }
    refuses(&["ask", "hello", "--timeout", "soon"], 2, &["--timeout", "soon"]);
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

/// A directory of the source tree.
fn tree(relative: &str) -> String {
    format!("{}/../../{relative}", env!("CARGO_MANIFEST_DIR"))
}

/// Output of `triptych models --json` for a directory.
#[track_caller]
fn facts(args: &[&str]) -> serde_json::Value {
    let output = triptych(&[&["models", "--json"], args].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_model_is_shown_with_its_stages_and_what_they_take() {
    let whisper = &facts(&[&tree("tests/golden/whisper_en_odd_heads/model")])[0];
    assert_eq!(whisper["family"], "whisper");
    assert_eq!(whisper["modalities"], serde_json::json!(["audio"]));
    assert_eq!(whisper["architecture"], "WhisperForConditionalGeneration");
    // One layer, 3 heads of 12, keys and values, four bytes; value pages are filled up to 32 columns.
    assert_eq!(whisper["kv_bytes_per_token"]["f32"], 3 * (12 + 32) * 4);
    assert_eq!(whisper["cross_kv_bytes_per_row"], whisper["kv_bytes_per_token"]);
    // 30 windows of a second, 50 rows of 36 values each.
    assert_eq!(whisper["example"]["rows"], 1500);
    assert_eq!(whisper["example"]["output_bytes"]["f32"], 1500 * 36 * 4);
    // The residual stream, and what a layer has beside it.
    let activations = |precision: &str| whisper["example"]["activation_bytes"][precision].as_u64();
    assert!(activations("f32") > Some(2 * 1500 * 36 * 4) && activations("int8") > Some(2 * 1500 * 36 * 4));
    let file = std::fs::metadata(tree("tests/golden/whisper_en_odd_heads/model/model.safetensors"));
    let stored = |stage: &str| whisper["stages"][stage]["stored_bytes"].as_u64().expect("a number");
    let n_bytes = file.expect("golden weights").len();
    let (encoder, decoder) = (stored("encoder"), stored("decoder"));
    assert!(encoder + decoder < n_bytes && encoder + decoder > n_bytes - 20_000, "all but the header");
    assert_eq!(whisper["unused_tensors"], serde_json::json!([]));
}

#[test]
fn towers_are_shown_with_the_activations_of_each_and_a_worker_within_less_memory_says_what_it_needs() {
    let dir = tree("tests/golden/cogagent_chat/model");
    let model = &facts(&[&dir])[0];
    let of = |tower: usize| model["towers"][tower]["activation_bytes"]["f32"].as_u64().expect("a number");
    assert_eq!(model["example"]["activation_bytes"]["f32"], of(0).max(of(1)));
    let output = triptych(&["models", &dir]);
    let page = String::from_utf8_lossy(&output.stdout);
    for tower in ["in low", "in high"] {
        assert!(page.contains(&format!("at most for an image of 1024 x 768 {tower}")), "{page}");
    }
    let ec = format!("disk:{}", tempfile::tempdir().expect("a folder").path().join("ec").display());
    let worker = ["encoder", "--grpc", "127.0.0.1:0", "--ec", &ec, "--model", &dir, "--memory-mib", "50"];
    refuses(
        &worker,
        2,
        &["--memory-mib 50: weights take", "cached outputs (--rows-mib) 256", "or more are needed"],
    );
}

#[test]
fn tensors_that_both_stages_read_are_named() {
    let bart = &facts(&[&tree("tests/golden/bart_large_cnn/model")])[0];
    assert_eq!(bart["shared_tensors"], serde_json::json!(["model.shared.weight"]));
    assert_eq!(bart["endpoints"][0], "POST /v1/completions");
    let cross = |n: &str| bart[n]["f32"].as_u64().expect("a number");
    let rows = bart["example"]["rows"].as_u64().expect("a number");
    assert_eq!(bart["example"]["cross_kv_bytes"]["f32"], rows * cross("cross_kv_bytes_per_row"));
}

#[test]
fn a_decoder_by_itself_has_no_encoder_to_show_or_to_serve() {
    let dir = tree("tests/golden/llama_tied/model");
    let llama = &facts(&[&dir])[0];
    assert_eq!(llama["architecture"], "LlamaForCausalLM");
    assert_eq!(llama["modalities"], serde_json::json!([]));
    assert_eq!(
        llama["endpoints"],
        serde_json::json!([
            "POST /v1/chat/completions",
            "POST /v1/responses",
            "POST /v1/completions",
            "gRPC triptych.v1.Triptych/Generate"
        ])
    );
    // Its template shows tools and has no mark that tells the syntax of calls.
    assert_eq!((&llama["tools"], &llama["tool_parser"]), (&true.into(), &serde_json::Value::Null));
    assert!(llama["stages"]["encoder"].is_null() && llama["example"].is_null());
    assert_eq!(llama["unused_tensors"], serde_json::json!([]));
    let page = triptych(&["models", &dir, "--measure"]).stdout;
    let page = String::from_utf8_lossy(&page);
    for line in ["reads       its prompt alone", "prompts     chat messages, or text or tokens"] {
        assert!(page.contains(line), "{line:?} is not in {page}");
    }
    assert!(!page.contains("from the encoder"), "{page}");

    let store = tempfile::tempdir().expect("a temporary directory");
    let ec = format!("disk:{}?mib=16", store.path().display());
    let encoder =
        ["encoder", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ec", &ec, "--model", &dir];
    refuses(&encoder, 2, &["has no encoder: a model of type llama", "serve it with PD workers"]);
    let up = ["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--encoders", "0", "--model"];
    let eyes = tree("tests/golden/llava_clip_llama/model");
    let (text, eyes) = (format!("text={dir}"), format!("eyes={eyes}"));
    let both = [up.as_slice(), &[&text, "--model", &eyes]].concat();
    refuses(&both, 2, &["--encoders 0", "for model eyes", "--with-encoder"]);
}

#[test]
fn the_format_of_weights_and_their_quantization_are_shown() {
    let with_weights = |case: &str, weights: &str, settings: Option<&str>| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for entry in
            std::fs::read_dir(tree(&format!("tests/golden/{case}/model"))).expect("a golden directory")
        {
            let from = entry.expect("an entry").path();
            if from.extension().is_some_and(|ending| ending == "json") {
                std::fs::copy(&from, dir.path().join(from.file_name().expect("a file"))).expect("a copy");
            }
        }
        let weights = std::path::PathBuf::from(tree(weights));
        std::fs::copy(&weights, dir.path().join(weights.file_name().expect("a file"))).expect("a copy");
        if let Some(settings) = settings {
            let read = |path: &std::path::Path| -> serde_json::Value {
                serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON")
            };
            let config = dir.path().join("config.json");
            let mut changed = read(&config);
            let settings = read(tree(settings).as_ref());
            changed["quantization_config"] = settings["quantization_config"].clone();
            std::fs::write(config, changed.to_string()).expect("written");
        }
        dir
    };
    let torch = with_weights("t5_odd_heads", "tests/golden/pickled/pytorch_model.bin", None);
    let torch = torch.path().to_str().expect("a plain path");
    let quantized = "tests/golden/quantized/t5_gptq";
    let gptq = with_weights(
        "t5_v1_1",
        &format!("{quantized}/model.safetensors"),
        Some(&format!("{quantized}/config.json")),
    );
    let gptq = gptq.path().to_str().expect("a plain path");
    let found = facts(&[torch, gptq]);
    assert_eq!(found[0]["weights"], serde_json::json!({ "format": "torch", "quantization": null }));
    let method = "gptq, 4 bits, groups of 16";
    assert_eq!(found[1]["weights"], serde_json::json!({ "format": "safetensors", "quantization": method }));
    let page = triptych(&["models", gptq]).stdout;
    let page = String::from_utf8_lossy(&page);
    assert!(page.contains("safetensors, quantized by gptq, 4 bits, groups of 16; dequantized"), "{page}");
}

#[test]
fn the_sample_models_are_shown_on_a_page_and_measured() {
    let both = [tree("tests/models/digits-whisper"), tree("tests/models/shapes-qwen2-vl")];
    let output = triptych(&["models", &both[0], &both[1], "--measure", "--precision", "bf16"]);
    let page = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for part in [
        "digits-whisper",
        "POST /v1/audio/transcriptions",
        "shapes-qwen2-vl",
        "POST /v1/chat/completions",
        "cross-KV",
        "an image of 1024 x 768",
        "once loaded as bf16",
    ] {
        assert!(page.contains(part), "{part:?} is not in: {page}");
    }
    let measured = &facts(&[&both[0], "--measure"])[0]["measured"];
    assert_eq!(measured["precision"], "f32");
    assert_eq!(measured["encoder_bytes"].is_u64(), cfg!(target_os = "linux"));
}

#[test]
fn a_directory_that_cannot_be_served_says_what_is_missing() {
    let golden = tree("tests/golden/whisper_multilingual/model");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let at = dir.path().to_str().expect("a plain path");
    for entry in std::fs::read_dir(&golden).expect("a golden directory") {
        let from = entry.expect("an entry").path();
        std::fs::copy(&from, dir.path().join(from.file_name().expect("a file"))).expect("a copy");
    }
    let weights = dir.path().join("model.safetensors");
    let whole = std::fs::read(&weights).expect("weights");
    let name = "model.decoder.layer_norm.weight";
    let at_name =
        whole.windows(name.len()).position(|w| w == name.as_bytes()).expect("the name in the header");
    // As long as before, so that nothing else changes.
    let mut renamed = whole.clone();
    renamed[at_name] = b'n';
    std::fs::write(&weights, renamed).expect("written");
    refuses(&["models", at], 1, &[at, "cannot be served", &format!("{name} is missing")]);

    std::fs::remove_file(&weights).expect("removed");
    refuses(&["models", at], 1, &[at, "model.safetensors"]);
    std::fs::write(&weights, whole).expect("written");
    std::fs::remove_file(dir.path().join("tokenizer.json")).expect("removed");
    refuses(&["models", at], 1, &["holds no tokenizer; looked for tokenizer.json"]);
    std::fs::write(dir.path().join("config.json"), b"{\"model_type\": \"gpt9\"}").expect("written");
    refuses(&["models", at], 1, &["model_type", "gpt9", "whisper"]);
    refuses(&["models", "./no-such-model"], 1, &["./no-such-model", "no such directory"]);
}
