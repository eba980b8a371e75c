//! The bytes of items: deterministic images and audio clips of a given shape, cheap to make and real work to decode.

mod png;
mod wav;

use crate::offered::{ItemShape, OfferedItem};
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Capacity of the cache of files, in bytes.
const CACHE_BYTES: usize = 256 << 20;
/// Most items of which it is known that they were made once.
const MOST_MADE: usize = 1 << 16;

/// Makes items, and caches the last of those that a workload repeats. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Media {
    /// Runs with different salts share no bytes, whatever their seeds: what one run left in the server's caches is
    /// nothing to the next.
    salt: u64,
    bands: png::Bands,
    cache: Arc<Mutex<FileCache>>,
}

#[derive(Debug, Default)]
struct FileCache {
    items: HashMap<OfferedItem, Bytes>,
    order: VecDeque<OfferedItem>,
    n_bytes: usize,
    /// Items that were made once. A file is kept from the second time on: a workload without repeats would fill the cache with fresh
    /// memory, which costs a client more time than to make the files.
    made: HashSet<OfferedItem>,
}

impl Media {
    /// A source with an empty cache.
    pub fn new(salt: u64) -> Self {
        Self { salt, bands: png::Bands::default(), cache: Arc::default() }
    }

    /// A source with another salt that shares the compressed bands, which are expensive to make.
    pub fn with_salt(&self, salt: u64) -> Self {
        Self { salt, bands: self.bands.clone(), cache: Arc::default() }
    }

    /// An item's file: PNG or WAV.
    pub fn file(&self, item: &OfferedItem) -> Bytes {
        if let Some(file) = self.cache().items.get(item) {
            return file.clone();
        }
        let content = crate::seed::mix(self.salt) ^ item.content;
        let file: Bytes = match item.shape {
            ItemShape::Image { width, height } => self.bands.image(width, height, content),
            ItemShape::Audio { millis } => wav::audio_clip(millis, content),
        }
        .into();
        self.cache().made(*item, &file);
        file
    }

    fn cache(&self) -> MutexGuard<'_, FileCache> {
        // Files are put in whole, so a panic elsewhere leaves nothing half done.
        self.cache.lock()
    }
}

impl FileCache {
    /// Keeps a file that was made, if it was made before.
    fn made(&mut self, item: OfferedItem, file: &Bytes) {
        if self.made.remove(&item) {
            self.insert(item, file.clone());
            return;
        }
        if self.made.len() >= MOST_MADE {
            self.made.clear();
        }
        self.made.insert(item);
    }

    fn insert(&mut self, item: OfferedItem, file: Bytes) {
        self.n_bytes += file.len();
        if self.items.insert(item, file.clone()).is_some() {
            self.n_bytes -= file.len();
            return;
        }
        self.order.push_back(item);
        while self.n_bytes > CACHE_BYTES {
            let Some(oldest) = self.order.pop_front() else { break };
            self.n_bytes -= self.items.remove(&oldest).map_or(0, |file| file.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(content: u64, width: u32, height: u32) -> OfferedItem {
        OfferedItem { content, shape: ItemShape::Image { width, height } }
    }

    #[test]
    fn images_are_real_and_each_content_is_another_one() {
        let media = Media::new(1);
        for (width, height) in [(1, 1), (17, 16), (640, 640), (33, 100), (5, 15), (15_000, 3)] {
            let file = media.file(&image(1, width, height));
            let decoded = image::load_from_memory(&file).expect("a PNG").to_rgb8();
            assert_eq!((decoded.width(), decoded.height()), (width, height));
            assert_eq!(file, Media::new(1).file(&image(1, width, height)), "the same again");
            assert_ne!(file, media.file(&image(2, width, height)));
            assert_ne!(file, Media::new(2).file(&image(1, width, height)));
        }
    }

    #[test]
    fn an_image_is_not_cheap_to_decode() {
        let file = Media::new(1).file(&image(9, 640, 640));
        let decoded = image::load_from_memory(&file).expect("a PNG").to_rgb8();
        let n_different = decoded.pixels().collect::<std::collections::HashSet<_>>().len();
        assert!(n_different > 10_000, "{n_different} colours");
        assert!((100_000..1_000_000).contains(&file.len()), "{} bytes", file.len());
    }

    #[test]
    fn audio_clips_have_their_length_in_their_header() {
        let item = |content| OfferedItem { content, shape: ItemShape::Audio { millis: 1500 } };
        let media = Media::new(1);
        let file = media.file(&item(1));
        assert_eq!((&file[..4], &file[8..16], file.len()), (&b"RIFF"[..], &b"WAVEfmt "[..], 44 + 2 * 24_000));
        assert_eq!(u32::from_le_bytes([file[40], file[41], file[42], file[43]]), 48_000);
        assert_ne!(file, media.file(&item(2)));
    }

    #[test]
    fn files_are_kept_from_the_second_time_on() {
        let media = Media::new(1);
        let file = media.file(&image(1, 20, 20));
        assert_eq!(media.cache().n_bytes, 0);
        for _ in 0..3 {
            assert_eq!(media.file(&image(1, 20, 20)), file);
            let cache = media.cache();
            assert_eq!((cache.n_bytes, cache.made.len()), (file.len(), 0));
        }
        let mut cache = FileCache::default();
        for i in 0..=MOST_MADE as u64 {
            cache.made(image(i, 1, 1), &file);
        }
        assert_eq!((cache.made.len(), cache.n_bytes), (1, 0));
    }

    #[test]
    fn an_image_is_made_in_one_allocation() {
        for (width, height) in [(1, 1), (640, 640), (15_000, 3)] {
            let file = png::Bands::default().image(width, height, 3);
            assert!(file.capacity() == file.len(), "{} of {} bytes", file.len(), file.capacity());
        }
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let mut cache = FileCache::default();
        for i in 0..100 {
            cache.insert(image(i, 1, 1), Bytes::from(vec![0; 8 << 20]));
        }
        assert!(cache.n_bytes <= CACHE_BYTES && cache.items.len() == 32 && cache.order.len() == 32);
    }
}
