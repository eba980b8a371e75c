//! The bench of the transports runs: every transport, small objects.

use std::process::Command;

#[test]
fn every_transport_gives_back_what_it_was_given() {
    let output = Command::new(env!("CARGO_BIN_EXE_transports")).arg("--smoke").output().unwrap();
    let (table, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    for name in [
        "memcpy",
        "TCP loopback",
        "memory",
        "shm",
        "disk",
        "redis, one value",
        "redis, chunked",
        "gRPC store",
        "S3",
    ] {
        assert_eq!(table.matches(&format!("| {name} |")).count(), 2, "{name}: {table}");
    }
}
