//! Libraries that stand in for the CUDA driver and cublasLt where there is no GPU: built once from the sources in
//! `kernels/tests/cuda/`, whose README says what they check, and loaded before cudarc looks for the real ones.
//!
//! They run the very kernels of `kernels/src/cuda/`, on the CPU. Tests need g++ for them, and no CUDA.
//!
//! [`DEVICE`] makes tests run on a device that is there. A test that needs the stand-in itself then panics with [`LEFT_OUT`]:
//! it did not run, so it is not green, and `cargo xtask cuda-check` lists it by name.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::Library;

/// Set to the number of a device that tests shall run on, with the driver that is there in place of the stand-in.
pub const DEVICE: &str = "TRIPTYCH_TEST_CUDA_DEVICE";

/// Opens the panic of a test that only the stand-in can run.
pub const LEFT_OUT: &str = "left out on a device, only the stand-in can";

/// The stand-in of this process, or the device in its place.
pub struct Standin {
    /// `None` on a device.
    controls: Option<Controls>,
}

/// Controls of the stand-in beside the driver's entry points.
struct Controls {
    new_device: unsafe extern "C" fn(u64) -> c_int,
    fail: unsafe extern "C" fn(c_int, *const c_char, u32, c_int),
    calls: unsafe extern "C" fn(c_int, *const c_char) -> u32,
    left: unsafe extern "C" fn(c_int, *mut usize),
    fault: unsafe extern "C" fn(c_int, *mut c_char, usize),
    strict_columns: unsafe extern "C" fn(u64),
    /// Loaded until the process ends.
    _libraries: [Library; 2],
}

/// Things of a device that nobody has given back.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Allocations of device memory.
    pub allocations: usize,
    /// Allocations of pinned host memory.
    pub pinned: usize,
    /// Streams.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Loaded modules.
    pub modules: usize,
    /// Graphs.
    pub graphs: usize,
    /// Instantiated graphs.
    pub executables: usize,
}

/// Checks of a kernel's loads and stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checks {
    /// Bounds, alignment and races of each, before it is done.
    All,
    /// Bounds and alignment of vectors and of copies to shared memory alone, in a small part of the time.
    Vectors,
}

/// The device that tests run on in place of the stand-in.
///
/// # Panics
/// If [`DEVICE`] is set and no number.
pub fn device() -> Option<usize> {
    let number = std::env::var_os(DEVICE)?;
    Some(number.to_str().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{DEVICE} is {number:?}")))
}

/// The one of this process.
static ONE: OnceLock<Standin> = OnceLock::new();

impl Standin {
    /// The one of this process, which checks every load and store: for tests of kernels.
    pub fn get() -> &'static Self {
        ONE.get_or_init(|| Self::load(Checks::All))
    }

    /// The one of this process, faster and with fewer checks unless [`Self::get`] came first: for tests of what is built on
    /// the kernels.
    pub fn fast() -> &'static Self {
        ONE.get_or_init(|| Self::load(Checks::Vectors))
    }

    fn load(checks: Checks) -> Self {
        Self { controls: device().is_none().then(|| Controls::load(checks)) }
    }

    /// Leaves the calling test out on a device: `what` only the stand-in can do.
    ///
    /// # Panics
    /// On a device.
    pub fn needed_to(&self, what: &str) {
        self.controls(what);
    }

    fn controls(&self, what: &str) -> &Controls {
        self.controls.as_ref().unwrap_or_else(|| panic!("{LEFT_OUT} {what}"))
    }

    /// The folders of the faster `libcuda.so` and `libcublasLt.so`, for `LD_LIBRARY_PATH` of another process.
    pub fn folders() -> [PathBuf; 2] {
        static BUILT: OnceLock<[PathBuf; 2]> = OnceLock::new();
        let libraries = BUILT.get_or_init(|| build(Checks::Vectors)).clone();
        libraries.map(|library| library.parent().map(Path::to_owned).unwrap_or_default())
    }

    /// A device that no test has had before; the seed decides the order of everything on it. In its place, the device that is
    /// there.
    pub fn new_device(&self, seed: u64) -> usize {
        let Some(controls) = &self.controls else { return device().unwrap_or_default() };
        // SAFETY: any seed is allowed.
        let ordinal = unsafe { (controls.new_device)(seed) };
        usize::try_from(ordinal).expect("fewer devices than the stand-in has")
    }

    /// Makes the `nth` call of an entry point from now, counted from 1, give `code`.
    pub fn fail(&self, device: usize, entry: &str, nth: u32, code: i32) {
        let entry = CString::new(entry).expect("a name");
        // SAFETY: the device is one that `new_device` gave, the name ends with a zero.
        unsafe { (self.controls("make calls fail").fail)(device as c_int, entry.as_ptr(), nth, code) }
    }

    /// Calls of an entry point so far.
    pub fn calls(&self, device: usize, entry: &str) -> u32 {
        let entry = CString::new(entry).expect("a name");
        // SAFETY: the device is one that `new_device` gave, the name ends with a zero.
        unsafe { (self.controls("count calls").calls)(device as c_int, entry.as_ptr()) }
    }

    /// Makes cublasLt refuse algorithms of other numbers of rows for products of so many.
    pub fn refuse_algorithms_of_others(&self, rows: u64) {
        // SAFETY: any number is allowed.
        unsafe { (self.controls("refuse algorithms").strict_columns)(rows) }
    }

    /// Allocations that are left on a device of the stand-in. Nobody counts them on another: none.
    pub fn left(&self, device: usize) -> Left {
        let Some(controls) = &self.controls else { return Left::default() };
        let mut out = [0; 7];
        // SAFETY: the stand-in writes seven numbers.
        unsafe { (controls.left)(device as c_int, out.as_mut_ptr()) }
        let [allocations, pinned, streams, events, modules, graphs, executables] = out;
        Left { allocations, pinned, streams, events, modules, graphs, executables }
    }

    /// The cause of a device's error; empty if it has none, and on a device that is not the stand-in's.
    pub fn fault(&self, device: usize) -> String {
        let Some(controls) = &self.controls else { return String::new() };
        let mut text = [0; 1024];
        // SAFETY: the stand-in writes at most as many bytes, the last a zero.
        unsafe { (controls.fault)(device as c_int, text.as_mut_ptr(), text.len()) }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
    }
}

impl Controls {
    fn load(checks: Checks) -> Self {
        let [cuda, cublas] = build(checks);
        // SAFETY: the libraries are built from this repository; their constructors only register kernels.
        let open = |path: &Path| unsafe { Library::new(path) }.expect("the stand-in loads");
        let (cuda, cublas) = (open(&cuda), open(&cublas));
        // SAFETY: the types are those of `driver/control.cpp`.
        unsafe {
            let new_device = *cuda.get(b"standin_new_device").expect("a symbol of the stand-in");
            let fail = *cuda.get(b"standin_fail").expect("a symbol of the stand-in");
            let calls = *cuda.get(b"standin_calls").expect("a symbol of the stand-in");
            let left = *cuda.get(b"standin_left").expect("a symbol of the stand-in");
            let fault = *cuda.get(b"standin_fault").expect("a symbol of the stand-in");
            let strict_columns = *cublas.get(b"standin_strict_columns").expect("a symbol of the stand-in");
            Self { new_device, fail, calls, left, fault, strict_columns, _libraries: [cuda, cublas] }
        }
    }
}

impl Checks {
    /// Flags of the host runtime and of the driver.
    fn runtime_flags(self) -> &'static [&'static str] {
        match self {
            Self::All => &["-O3"],
            Self::Vectors => &["-O3", "-DWITHOUT_RACES"],
        }
    }

    /// Flags of the kernels.
    fn kernel_flags(self) -> &'static [&'static str] {
        match self {
            // Every load and store calls the host runtime first (`host/hooks.cpp`).
            Self::All => &[
                "-x",
                "c++",
                "-O1",
                "-fsanitize=thread,bounds",
                "-fno-sanitize-recover=all",
                "--param",
                "tsan-instrument-func-entry-exit=0",
                "-fno-strict-aliasing",
            ],
            Self::Vectors => &["-x", "c++", "-O2", "-DWITHOUT_RACES", "-fno-strict-aliasing"],
        }
    }
}

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Folder of what is built: `tmp` of the target folder that the test's executable lies in.
fn built() -> PathBuf {
    let own = std::env::current_exe().expect("an executable has a path");
    let target = own.ancestors().find(|path| path.join("CACHEDIR.TAG").is_file());
    target.expect("tests lie in cargo's target folder").join("tmp/cuda-standin")
}

/// Set by `mutants.py`: a folder of kernels with a fault in one of them.
const PLANTED: &str = "TRIPTYCH_CUDA_SOURCES";

/// The kernels.
fn kernels() -> PathBuf {
    std::env::var_os(PLANTED).map_or_else(|| folder("src/cuda"), PathBuf::from)
}

/// Sources of a folder with an extension, in order.
fn sources(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder of this crate");
    let paths = entries.map(|entry| entry.expect("an entry of a folder").path());
    let mut found: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    found.sort();
    found
}

/// A source and what it includes of this repository, each once.
fn with_includes(source: &Path) -> Vec<PathBuf> {
    let mut all = vec![source.to_owned()];
    let mut next = 0;
    while let Some(path) = all.get(next).cloned() {
        let text = fs::read_to_string(&path).expect("a source");
        let own = path.parent().expect("a folder").to_owned();
        for name in text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"')) {
            let mut places = [own.clone(), folder("tests/cuda/host"), kernels()].into_iter();
            let found = places.find_map(|place| place.join(name).canonicalize().ok());
            let found = found.unwrap_or_else(|| panic!("{}: no {name}", path.display()));
            if !all.contains(&found) {
                all.push(found);
            }
        }
        next += 1;
    }
    all
}

/// Compiles what has changed and links both libraries: `[libcuda, libcublasLt]`.
fn build(checks: Checks) -> [PathBuf; 2] {
    let out = built();
    fs::create_dir_all(&out).expect("a folder for objects");
    let kernels = [sources(&kernels(), "cu"), sources(&folder("tests/cuda/misuse"), "cu")].concat();
    let runtime = ["tests/cuda/host", "tests/cuda/driver"].map(|path| sources(&folder(path), "cpp")).concat();
    let [of_kernels, of_runtime] = [checks.kernel_flags(), checks.runtime_flags()];
    let kernels = kernels.into_iter().map(|source| (source, of_kernels));
    let jobs: Vec<_> = kernels.chain(runtime.into_iter().map(|source| (source, of_runtime))).collect();
    let objects: Vec<OnceLock<PathBuf>> = jobs.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((source, flags)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let object = compile(source, flags, &out);
                    let index = jobs.iter().position(|job| job.0 == *source).expect("a job");
                    objects[index].set(object).expect("an object once");
                }
            });
        }
    });
    let objects: Vec<PathBuf> = objects.into_iter().map(|o| o.into_inner().expect("an object")).collect();
    let (cublas, cuda): (Vec<_>, Vec<_>) =
        objects.into_iter().partition(|object| object.to_string_lossy().contains("cublaslt-"));
    let cuda = link("libcuda.so", &cuda, &out);
    let cublas = link("libcublasLt.so", &[&cublas[..], std::slice::from_ref(&cuda)].concat(), &out);
    [cuda, cublas]
}

/// The object of a source, compiled unless it is there. Its name says what it was made of.
fn compile(source: &Path, flags: &[&str], out: &Path) -> PathBuf {
    let mut hasher = blake3::Hasher::new();
    for path in with_includes(source) {
        hasher.update(&fs::read(path).expect("a source"));
    }
    hasher.update(format!("{flags:?}").as_bytes());
    let stem = source.file_stem().expect("a file").to_string_lossy();
    let object = out.join(format!("{stem}-{}.o", &hasher.finalize().to_hex()[..16]));
    if object.exists() {
        return object;
    }
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-g1", "-Wall", "-Wextra", "-fPIC", "-c"]);
    if std::env::var_os(PLANTED).is_none() {
        // A planted fault may leave something unused.
        command.arg("-Werror");
    }
    command.args(flags).arg("-I").arg(folder("tests/cuda/host")).arg("-I").arg(kernels());
    finish(command.arg(source), &object);
    object
}

/// A shared library of some name, in a folder whose name says what it was made of.
fn link(name: &str, objects: &[PathBuf], out: &Path) -> PathBuf {
    let mut hasher = blake3::Hasher::new();
    for object in objects {
        hasher.update(object.to_string_lossy().as_bytes());
    }
    let folder = out.join(&hasher.finalize().to_hex()[..16]);
    fs::create_dir_all(&folder).expect("a folder for a library");
    let library = folder.join(name);
    if !library.exists() {
        let mut command = Command::new("g++");
        command.args(["-shared", &format!("-Wl,-soname,{name}"), "-Wl,-z,defs"]).args(objects);
        finish(command.args(["-ldl", "-lpthread"]), &library);
    }
    library
}

/// Runs g++ with an output that appears whole or not at all.
fn finish(command: &mut Command, output: &Path) {
    let partial = output.with_extension(format!("{}.partial", std::process::id()));
    let run = command.arg("-o").arg(&partial).output().expect("the tests of CUDA kernels need g++");
    let errors = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "g++ refuses {}:\n{errors}", output.display());
    fs::rename(&partial, output).expect("an output moves to its place");
}
