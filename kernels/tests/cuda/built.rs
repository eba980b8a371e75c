//! The embedded images: one of each source, and its kernels in the source's names.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use triptych_kernels::cuda::IMAGES;

#[test]
fn every_source_has_its_image() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
    let sources: BTreeSet<String> = fs::read_dir(folder)
        .expect("the sources")
        .map(|entry| entry.expect("a source").path())
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    let images: BTreeSet<String> = IMAGES.iter().map(|image| image.name.to_owned()).collect();
    assert_eq!(images, sources);
}

#[test]
fn images_are_fat_binaries() {
    for image in &IMAGES {
        assert_eq!(image.bytes.get(..4), Some(&0xba55_ed50_u32.to_le_bytes()[..]), "{}", image.name);
    }
}
