//! Packed weights between starts: their identity, their files, and their removal.
//!
//! A file is named by its sources: the names, sizes, inode numbers and times of the weight files, the method by which they
//! are quantized, the stage, the precision and the instruction set. Its contents belong to the kernels ([`PackedWeights`]). Beside it lie the hashes that a
//! fingerprint is made of, so that a PD worker need not read an encoder's weights. Nothing here fails a load: if packed
//! weights cannot be read or kept, weights are packed again, and the log says why.

use crate::error::ModelError;
use crate::quantization::Quantization;
use crate::source::{LoadFormat, ModelSource, PackedFolder};
use crate::weights;
use blake3::{Hasher, OUT_LEN};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use triptych_kernels::cpu::{CpuBackend, PackedWeights, Packing};

/// Extension of complete files.
const SUFFIX: &str = "packed";

/// Age at which a file without that extension counts as abandoned.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// One file may take one part in this many of the free space of its disk.
const SHARE_OF_FREE: u64 = 2;

/// Loads a stage. Quantized weights are restored from an earlier start, or kept for the next one.
pub(crate) fn load<T>(
    source: &ModelSource,
    stage: &str,
    backend: &CpuBackend,
    load: impl FnOnce(&CpuBackend) -> Result<T, ModelError>,
) -> Result<T, ModelError> {
    let (Some(folder), LoadFormat::Safetensors) = (&source.packed, source.format) else {
        return load(backend);
    };
    // Other precisions are packed about as fast as they are read, and are no smaller than the stored weights.
    if !backend.precision().is_quantized() {
        return load(backend);
    }
    let files = weights::files(&source.dir)?;
    let quantized = Quantization::of(&source.dir)?.map_or_else(String::new, |method| method.to_string());
    let way = [stage, backend.precision().as_str(), backend.isa().as_str(), &quantized];
    let (place, packed) = match folder.begin(&files, way) {
        Ok(Some((place, packed))) => (place, Arc::new(packed)),
        Ok(None) => return load(backend),
        Err(e) => {
            tracing::info!(dir = %folder.dir.display(), error = %e, "packed weights are not kept");
            return load(backend);
        }
    };
    let loaded = load(&backend.with_packed(packed.clone()))?;
    folder.finish(&place, &packed);
    Ok(loaded)
}

/// Hashes of the tensors in `described`, from an earlier start on the same files, or else from `hash`.
pub(crate) fn hashes(
    source: &ModelSource,
    described: &[String],
    hash: impl FnOnce() -> Vec<[u8; OUT_LEN]>,
) -> Vec<[u8; OUT_LEN]> {
    let place = source.packed.as_ref().and_then(|folder| {
        // Of the bytes as they are stored.
        let files = folder.id(&weights::files(&source.dir).ok()?, "").ok()??;
        let mut hasher = Hasher::new();
        described.iter().for_each(|text| _ = hasher.update(text.as_bytes()).update(b"\n"));
        let tensors = &hasher.finalize().to_hex()[..16];
        Some((folder, folder.dir.join(format!("hashes-{tensors}-{files}.{SUFFIX}"))))
    });
    let Some((folder, place)) = place else { return hash() };
    // The last one is the hash of the others.
    let is_whole = |kept: &[[u8; OUT_LEN]]| {
        kept.split_last().is_some_and(|(last, of)| {
            of.len() == described.len() && blake3::hash(of.as_flattened()).as_bytes() == last
        })
    };
    if let Ok(kept) = fs::read(&place)
        && let (kept, []) = kept.as_chunks()
        && is_whole(kept)
    {
        touch(&place);
        return kept[..described.len()].to_vec();
    }
    let hashes = hash();
    let own = blake3::hash(hashes.as_flattened());
    let kept = [hashes.as_flattened(), own.as_bytes()].concat();
    let unfinished = place.with_extension(std::process::id().to_string());
    let written = fs::create_dir_all(&folder.dir).and_then(|()| fs::write(&unfinished, kept));
    if let Err(e) = written.and_then(|()| fs::rename(&unfinished, &place)) {
        tracing::info!(path = %place.display(), error = %e, "hashes of weights are not kept");
    }
    hashes
}

/// Sets the time of a file's last use, which decides the order of removal.
fn touch(place: &Path) {
    let _ = fs::File::open(place).and_then(|file| file.set_modified(SystemTime::now()));
}

impl PackedFolder {
    /// Path and file of the packed form of weight files, of an earlier start or new; `None` below `min_bytes`.
    fn begin(&self, files: &[PathBuf], way: [&str; 4]) -> io::Result<Option<(PathBuf, PackedWeights)>> {
        let [stage, precision, isa, quantized] = way;
        let Some(id) = self.id(files, quantized)? else { return Ok(None) };
        let place = self.dir.join(format!("{stage}-{precision}-{isa}-{id}.{SUFFIX}"));
        let packed = self.open(&place)?;
        Ok(Some((place, packed)))
    }

    /// Identity of weight files and of the method by which they are quantized (empty: none), without reading them; `None`
    /// below `min_bytes`.
    fn id(&self, files: &[PathBuf], quantized: &str) -> io::Result<Option<String>> {
        let mut hasher = Hasher::new();
        hasher.update(quantized.as_bytes());
        let mut n_bytes = 0;
        for path in files {
            let metadata = fs::metadata(path)?;
            n_bytes += metadata.len();
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            hasher.update(&(name.len() as u64).to_le_bytes()).update(name);
            hasher.update(&metadata.len().to_le_bytes()).update(&metadata.ino().to_le_bytes());
            for time in [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()] {
                hasher.update(&time.to_le_bytes());
            }
        }
        Ok((n_bytes >= self.min_bytes).then(|| hasher.finalize().to_hex()[..32].to_owned()))
    }

    /// The file of an earlier start, or a new one.
    fn open(&self, place: &Path) -> io::Result<PackedWeights> {
        match PackedWeights::open(place) {
            Ok(packed) => return Ok(packed),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            // Damaged; a new file replaces it.
            Err(e) => {
                tracing::warn!(path = %place.display(), error = %e, "packed weights cannot be read; packing again");
            }
        }
        fs::create_dir_all(&self.dir)?;
        let disk = rustix::fs::statvfs(&self.dir)?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        PackedWeights::create(place, self.max_bytes.min(free / SHARE_OF_FREE))
    }

    /// Ends the use of a file after its stage was loaded.
    fn finish(&self, place: &Path, packed: &PackedWeights) {
        match packed.finish() {
            Packing::Restored => {
                touch(place);
                tracing::info!(path = %place.display(), "weights were packed already");
            }
            Packing::Stale => {
                let _ = fs::remove_file(place);
                tracing::info!(path = %place.display(), "packed weights were of no use, and are removed");
            }
            Packing::Kept(n_bytes) => {
                tracing::info!(path = %place.display(), n_bytes, "packed weights are kept for the next start");
                self.tidy(place);
            }
            Packing::NotKept(e) => {
                tracing::info!(path = %place.display(), error = %e, "packed weights are not kept");
            }
        }
    }

    /// Removes files over the limit, `newest` last, and abandoned ones.
    fn tidy(&self, newest: &Path) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        let mut files = Vec::new();
        for entry in entries.flatten() {
            let (path, Ok(metadata)) = (entry.path(), entry.metadata()) else { continue };
            let Ok(modified) = metadata.modified() else { continue };
            let is_whole = path.extension().is_some_and(|e| e == SUFFIX);
            let age = SystemTime::now().duration_since(modified).unwrap_or_default();
            if is_whole {
                files.push((path == newest, modified, metadata.len(), path));
            } else if age > ABANDONED_AFTER && metadata.is_file() {
                let _ = fs::remove_file(path);
            }
        }
        files.sort();
        let mut total: u64 = files.iter().map(|(_, _, len, _)| len).sum();
        for (_, _, len, path) in files {
            if total <= self.max_bytes {
                break;
            }
            // Its readers have it open and keep reading.
            if fs::remove_file(&path).is_ok() {
                total -= len;
                tracing::info!(path = %path.display(), "packed weights were longest not used, and are removed");
            }
        }
    }
}
