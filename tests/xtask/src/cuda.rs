//! `cargo xtask cuda`: builds the CUDA kernels with NVIDIA's compiler, which comes from PyPI, and writes what the product embeds.
//!
//! Nobody needs the compiler to build or run the product: what is embedded is in the repository, one fat binary for each source,
//! and a test below says when it is older than the sources. A
//! kernel that spills registers is refused.

use crate::shell::{command, root, run as run_shown};
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The compiler and what it needs, all of CUDA 13.0: newer PTX does not load on drivers of that version.
const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// Machine code for A100, L4 and L40, and H100 and H200; for later ones PTX that the driver compiles.
const TARGETS: [&str; 4] = [
    "arch=compute_80,code=sm_80",
    "arch=compute_89,code=sm_89",
    "arch=compute_90,code=sm_90",
    "arch=compute_90,code=compute_90",
];

/// The target whose registers are listed.
const LISTED: &str = "sm_90";

/// Most bytes of all fat binaries together: they are in the repository and in the product.
const MOST_BYTES: usize = 2 << 20;

const SOURCES: &str = "kernels/src/cuda";
const BUILT: &str = "kernels/src/cuda/built";
/// The hash of the sources of what is embedded.
const STAMP: &str = "kernels/src/cuda/built/sources.txt";
/// The page that lists the registers, between two marks.
const README: &str = "kernels/src/cuda/README.md";
const MARKS: [&str; 2] = ["<!-- registers: written by cargo xtask cuda -->", "<!-- end of registers -->"];

/// Report of `ptxas` on a kernel on one target.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Usage {
    kernel: String,
    target: String,
    registers: u32,
    /// Stores and loads, in bytes.
    spills: [u32; 2],
}

/// Builds every source and writes fat binaries, their stamp, and the list of registers.
///
/// # Errors
/// If the compiler cannot be had, refuses a source, or spills registers where it may not.
pub fn run() -> Result<()> {
    let nvcc = nvcc()?;
    let built = root().join(BUILT);
    fs::create_dir_all(&built)?;
    // The longest first. Targets of one source one after another, since what the assembler says of them must not mix.
    let mut sources = sources("cu")?;
    sources.sort_by_key(|path| std::cmp::Reverse(fs::metadata(path).map_or(0, |file| file.len())));
    let next = AtomicUsize::new(0);
    let worker = || -> Result<Vec<Built>> {
        let mut all = Vec::new();
        while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
            all.push(compile(&nvcc, source, &built)?);
        }
        Ok(all)
    };
    let n_workers = thread::available_parallelism().map_or(1, usize::from);
    let done: Result<Vec<Vec<Built>>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..n_workers).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().map(|w| w.join().map_err(|_| anyhow!("a worker panicked"))?).collect()
    });
    let mut images = done?.concat();
    images.sort_by(|a, b| a.name.cmp(&b.name));
    let bytes: usize = images.iter().map(|image| image.bytes).sum();
    let usages: Vec<(String, Usage)> = images
        .into_iter()
        .flat_map(|image| image.usages.into_iter().map(move |usage| (image.name.clone(), usage)))
        .collect();
    println!("all: {bytes} bytes");
    ensure!(bytes <= MOST_BYTES, "{bytes} bytes of fat binaries are more than {MOST_BYTES}");
    let spilling: Vec<_> =
        usages.iter().map(|(_, usage)| usage).filter(|usage| usage.spills != [0, 0]).collect();
    ensure!(spilling.is_empty(), "registers are spilled: {spilling:#?}");
    list(&usages)?;
    fs::write(root().join(STAMP), stamp()?)?;
    Ok(())
}

/// The compiler, in `.cache`.
fn nvcc() -> Result<PathBuf> {
    let place = root().join(".cache/cuda");
    let (nvcc, wanted) = (place.join("nvidia/cu13/bin/nvcc"), PACKAGES.join("\n"));
    if nvcc.is_file() && fs::read_to_string(place.join("packages.txt")).is_ok_and(|there| there == wanted) {
        return Ok(nvcc);
    }
    if place.exists() {
        fs::remove_dir_all(&place)?;
    }
    let pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target"];
    let mut pip = command("python3", &pip);
    run_shown(pip.arg(&place).args(PACKAGES)).context("nvcc comes from PyPI; is there a network?")?;
    fs::write(place.join("packages.txt"), wanted)?;
    ensure!(nvcc.is_file(), "no nvcc in {}", place.display());
    Ok(nvcc)
}

/// Sources with an extension, in order.
fn sources(extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(root().join(SOURCES))?.collect::<Result<Vec<_>, _>>()?;
    let paths = entries.into_iter().map(|entry| entry.path());
    let mut found: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    found.sort();
    Ok(found)
}

/// A fat binary that was written.
#[derive(Clone)]
struct Built {
    name: String,
    bytes: usize,
    usages: Vec<Usage>,
}

/// Writes the fat binary of a source.
fn compile(nvcc: &Path, source: &Path, built: &Path) -> Result<Built> {
    let name = source.file_stem().context("a source has a name")?.to_string_lossy().into_owned();
    let image = built.join(format!("{name}.fatbin"));
    let mut command = Command::new(nvcc);
    // No path of this machine gets into what is built.
    command.current_dir(root().join(SOURCES));
    command.args(["-std=c++17", "-O3", "-fatbin", "--compress-mode=size", "-Xptxas", "-v"]);
    command.args(["-Werror", "all-warnings"]);
    for target in TARGETS {
        command.args(["-gencode", target]);
    }
    command.arg("-o").arg(&image).arg(source.file_name().context("a source has a name")?);
    let output = command.output().with_context(|| format!("cannot start {}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("nvcc refuses {}:\n{text}", source.display());
    }
    let bytes = usize::try_from(fs::metadata(&image)?.len())?;
    println!("{name}: {bytes} bytes");
    Ok(Built { name, bytes, usages: usages(&text) })
}

/// The lines of `ptxas -v`, three for each kernel and target.
fn usages(text: &str) -> Vec<Usage> {
    let mut found = Vec::new();
    let (mut kernel, mut target, mut spills) = (String::new(), String::new(), [0, 0]);
    for line in text.lines() {
        let quoted: Vec<&str> = line.split('\'').collect();
        if let (true, [_, name, _, arch, ..]) = (line.contains("Compiling entry function"), &quoted[..]) {
            (kernel, target) = ((*name).to_owned(), (*arch).to_owned());
        } else if let Some((_, rest)) = line.split_once("stack frame, ") {
            let mut numbers = rest.split(", ").filter_map(|part| part.split(' ').next()?.parse().ok());
            spills = [numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)];
        } else if let Some((_, rest)) = line.split_once("Used ") {
            let registers = rest.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
            found.push(Usage { kernel: kernel.clone(), target: target.clone(), registers, spills });
        }
    }
    found
}

/// Writes the registers of each kernel into the README.
fn list(usages: &[(String, Usage)]) -> Result<()> {
    let mut by_source: BTreeMap<&str, Vec<&Usage>> = BTreeMap::new();
    for (source, usage) in usages.iter().filter(|(_, usage)| usage.target == LISTED) {
        by_source.entry(source).or_default().push(usage);
    }
    let mut table =
        format!("| source | kernel | registers on {LISTED} | spilled bytes |\n|---|---|---|---|\n");
    for (source, mut kernels) in by_source {
        kernels.sort_by(|a, b| a.kernel.cmp(&b.kernel));
        for Usage { kernel, registers, spills: [stores, loads], .. } in kernels {
            writeln!(table, "| `{source}.cu` | `{kernel}` | {registers} | {} |", stores + loads)?;
        }
    }
    let path = root().join(README);
    let text = fs::read_to_string(&path)?;
    let [begin, end] = MARKS;
    let (before, rest) = text.split_once(begin).context("the README has a place for registers")?;
    let (_, after) = rest.split_once(end).context("the README has a place for registers")?;
    fs::write(path, format!("{before}{begin}\n{table}{end}{after}"))?;
    Ok(())
}

/// Hash of the sources, the compiler and the targets of a build.
fn stamp() -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut frame = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    for path in [sources("cu")?, sources("cuh")?].concat() {
        frame(path.file_name().context("a source has a name")?.to_string_lossy().as_bytes());
        frame(&fs::read(&path)?);
    }
    PACKAGES.iter().chain(&TARGETS).for_each(|word| frame(word.as_bytes()));
    Ok(format!("{}\n", hasher.finalize().to_hex()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_embedded_is_as_new_as_its_sources() {
        let there = fs::read_to_string(root().join(STAMP)).unwrap_or_default();
        let wanted = stamp().expect("sources that can be read");
        assert_eq!(there, wanted, "the kernels have changed: run `cargo xtask cuda`");
        for source in sources("cu").expect("sources that can be read") {
            let name = source.file_stem().expect("a name").to_string_lossy().into_owned();
            let image =
                fs::read(root().join(BUILT).join(format!("{name}.fatbin"))).expect("an image of each source");
            // The magic number of a fat binary.
            assert_eq!(image.get(..4), Some(&0xba55_ed50_u32.to_le_bytes()[..]), "{name}");
        }
    }

    #[test]
    fn every_kernel_is_listed_with_its_registers() {
        let readme = fs::read_to_string(root().join(README)).expect("the README");
        for source in sources("cu").expect("sources that can be read") {
            let name = source.file_name().expect("a name").to_string_lossy().into_owned();
            assert!(readme.contains(&format!("| `{name}` | `")), "{name} is not in the list of registers");
        }
    }

    #[test]
    fn registers_and_spills_are_read_from_what_the_assembler_says() {
        let text = "ptxas info    : Compiling entry function 'add_f32' for 'sm_90'\n\
                    ptxas info    : Function properties for add_f32\n    \
                    32 bytes stack frame, 28 bytes spill stores, 24 bytes spill loads\n\
                    ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem\n";
        let expect = Usage {
            kernel: "add_f32".to_owned(),
            target: "sm_90".to_owned(),
            registers: 40,
            spills: [28, 24],
        };
        assert_eq!(usages(text), [expect]);
    }
}
