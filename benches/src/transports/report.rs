//! The table, for people and for programs, with the host, the commit and the command that made it.

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// One transport at one size.
#[derive(Debug)]
pub struct TransportRow {
    /// The transport.
    pub name: &'static str,
    /// Bytes of the object's rows.
    pub size: usize,
    /// Objects that were counted.
    pub n: usize,
    /// Times of the puts.
    pub put: Times,
    /// Times of the gets.
    pub get: Times,
}

/// Of many operations.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Half of them took no longer.
    pub p50_ns: u64,
    /// All but one of a hundred took no longer.
    pub p99_ns: u64,
}

impl Times {
    /// From a histogram of nanoseconds.
    pub fn of(histogram: &Histogram<u64>) -> Self {
        Self { p50_ns: histogram.value_at_quantile(0.5), p99_ns: histogram.value_at_quantile(0.99) }
    }

    /// Throughput of one client at the median: 10⁹ bytes a second.
    fn gb_s(&self, size: usize) -> f64 {
        size as f64 / self.p50_ns as f64
    }
}

/// A length in the words of the table.
pub fn shown(size: usize) -> String {
    match size >> 20 {
        0 => format!("{} KiB", size >> 10),
        mib => format!("{mib} MiB"),
    }
}

/// Prints the table, and stores it in `out`.
///
/// # Errors
/// If the folder cannot be written.
pub fn give(rows: &[TransportRow], out: Option<&Path>) -> Result<()> {
    let run = Run::here();
    let table = markdown(rows, &run);
    println!("{table}");
    let Some(out) = out else { return Ok(()) };
    let json = serde_json::to_string_pretty(&numbers(rows, &run))? + "\n";
    for (name, text) in [("transports.md", table), ("transports.json", json)] {
        let path = out.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Host, build and command of the run.
struct Run {
    host: String,
    commit: String,
    date: String,
    build: &'static str,
    command: String,
}

impl Run {
    fn here() -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpu.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": ").map(|(_, m)| m));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or("unknown").to_owned();
        let arguments: Vec<_> = env::args().skip(1).collect();
        Self {
            host: format!("{}, {cores} cores, load {load} at the end", model.unwrap_or("unknown processor")),
            commit: output_of("git", &["rev-parse", "--short", "HEAD"]),
            date: output_of("date", &["+%Y-%m-%d"]),
            build: if cfg!(debug_assertions) { "dev" } else { "release" },
            command: format!("transports {}", arguments.join(" ")),
        }
    }
}

fn output_of(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().ok().filter(|o| o.status.success());
    output.map_or_else(|| "unknown".into(), |o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
}

fn markdown(rows: &[TransportRow], run: &Run) -> String {
    let Run { host, commit, date, build, command } = run;
    let mut text = format!(
        "# Transports, one client, servers on the same machine\n\n\
         {host}; {build} build, commit {commit}, {date}; `{command}`. GB/s at the median. The memory store hands \
         out what it holds without a copy.\n\n\
         | rows | transport | put p50, ms | p99 | GB/s | get p50, ms | p99 | GB/s | objects |\n\
         |---|---|---|---|---|---|---|---|---|\n"
    );
    let mut sizes: Vec<_> = rows.iter().map(|r| r.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let ms = |ns: u64| ns as f64 / 1e6;
    for size in sizes {
        for TransportRow { name, n, put, get, .. } in rows.iter().filter(|r| r.size == size) {
            let put_gb_s = put.gb_s(size);
            let get_gb_s = get.gb_s(size);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "| {} | {name} | {:.3} | {:.3} | {put_gb_s:.2} | {:.3} | {:.3} | {get_gb_s:.2} | {n} |",
                shown(size),
                ms(put.p50_ns),
                ms(put.p99_ns),
                ms(get.p50_ns),
                ms(get.p99_ns),
            );
        }
    }
    text
}

fn numbers(rows: &[TransportRow], run: &Run) -> serde_json::Value {
    let times = |times: &Times, size| json!({ "p50_ns": times.p50_ns, "p99_ns": times.p99_ns, "gb_s": times.gb_s(size) });
    let row = |r: &TransportRow| {
        let put = times(&r.put, r.size);
        let get = times(&r.get, r.size);
        json!({ "transport": r.name, "bytes": r.size, "objects": r.n, "put": put, "get": get })
    };
    let rows: Vec<_> = rows.iter().map(row).collect();
    let Run { host, commit, date, build, command } = run;
    json!({ "host": host, "commit": commit, "date": date, "build": build, "command": command, "rows": rows })
}
