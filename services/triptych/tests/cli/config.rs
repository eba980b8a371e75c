//! `--config` and `triptych config`, as an operator meets them.

use super::{refuses, triptych};
use std::process::Command;

const FILE: &str = "log = \"debug\"\n[proxy]\npd = \"127.0.0.1:1\"\nec = \"redis://:s3cret@127.0.0.1:9\"\n\
                    max-in-flight = 7\nencode-slo-ms = 9\nhttp = \"127.0.0.1:2\"\n[store]\nbudget-mib = 64\n";

fn with_file(text: &str, run: impl FnOnce(&str)) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("triptych.toml");
    std::fs::write(&path, text).expect("a file");
    run(path.to_str().expect("UTF-8"));
}

#[test]
fn a_setting_is_from_its_flag_or_its_variable_or_the_file_or_the_default_in_this_order() {
    with_file(FILE, |file| {
        let output = Command::new(env!("CARGO_BIN_EXE_triptych"))
            .args(["config", "show", "proxy", "--http", "127.0.0.1:3"])
            .env("TRIPTYCH_CONFIG", file)
            .env("TRIPTYCH_MAX_IN_FLIGHT", "8")
            .output()
            .expect("the binary starts");
        let text = String::from_utf8_lossy(&output.stdout);
        for line in [
            "http = \"127.0.0.1:3\" # flag",
            "max-in-flight = 8 # environment, TRIPTYCH_MAX_IN_FLIGHT",
            "encode-slo-ms = 9 # file",
            "log = \"debug\" # file",
            "lame-duck = 200 # default",
            "# ec is set and not shown # file",
        ] {
            assert!(
                text.contains(line),
                "{line:?} is not in {text}{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        assert!(!text.contains("s3cret"));
        let shown = text.into_owned();
        with_file(&shown, |again| assert!(triptych(&["config", "check", again]).status.success()));
    });
}

#[test]
fn a_role_starts_from_a_file_alone_and_a_wrong_file_is_refused_before_it_starts() {
    with_file(FILE, |file| {
        assert!(triptych(&["proxy", "--config", file, "--check"]).status.success());
        assert!(triptych(&["config", "check", file]).status.success());
    });
    with_file("[proxy]\nmax-inflight = 3\nfoo = 1\n", |file| {
        let parts =
            [file, "[proxy] max-inflight: no such key; the nearest is `max-in-flight`", "[proxy] foo"];
        refuses(&["config", "check", file], 2, &parts);
        refuses(&["proxy", "--config", file], 2, &parts);
    });
    with_file("[proxy]\ntls-cert = \"x\"\n", |file| {
        refuses(&["config", "check", file], 2, &["[proxy]", "--tls-key"]);
    });
    refuses(&["proxy", "--config", "no-such.toml"], 2, &["no-such.toml", "No such file"]);
    refuses(&["config", "show", "nobody"], 2, &["nobody", "up, proxy, encoder, pd, store"]);
}

#[test]
fn the_page_of_all_keys_is_a_file_that_sets_nothing() {
    let page = triptych(&["config"]).stdout;
    let page = String::from_utf8(page).expect("UTF-8");
    assert!(page.contains("#max-in-flight = 512") && page.contains("# Variable: TRIPTYCH_HTTP"), "{page}");
    with_file(&page, |file| assert!(triptych(&["config", "check", file]).status.success()));
}
