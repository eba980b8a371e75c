//! The bytes of items: deterministic pictures and sounds of a given shape, cheap to make and real work to decode.

mod png;
mod wav;

use crate::offered::{ItemShape, OfferedItem};
use bytes::Bytes;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that are kept for items that come again.
const KEPT_BYTES: usize = 256 << 20;

/// Makes items, and keeps the last ones: what a workload repeats is made once. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Media {
    /// Runs with different salts share no bytes, whatever their seeds: what one run left in the server's caches is
    /// nothing to the next.
    salt: u64,
    bands: png::Bands,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    items: HashMap<OfferedItem, Bytes>,
    order: VecDeque<OfferedItem>,
    n_bytes: usize,
}

impl Media {
    /// Nothing made yet.
    pub fn new(salt: u64) -> Self {
        Self { salt, bands: png::Bands::default(), kept: Arc::default() }
    }

    /// The same parts of pictures, for a run with another salt: they are what costs.
    pub fn with_salt(&self, salt: u64) -> Self {
        Self { salt, bands: self.bands.clone(), kept: Arc::default() }
    }

    /// An item's file: PNG or WAV.
    pub fn file(&self, item: &OfferedItem) -> Bytes {
        if let Some(file) = self.kept().items.get(item) {
            return file.clone();
        }
        let content = crate::seed::mix(self.salt) ^ item.content;
        let file: Bytes = match item.shape {
            ItemShape::Image { width, height } => self.bands.picture(width, height, content),
            ItemShape::Audio { millis } => wav::sound(millis, content),
        }
        .into();
        self.kept().keep(*item, file.clone());
        file
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        // Files are put in whole, so a panic elsewhere leaves nothing half done.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn keep(&mut self, item: OfferedItem, file: Bytes) {
        self.n_bytes += file.len();
        if self.items.insert(item, file.clone()).is_some() {
            self.n_bytes -= file.len();
            return;
        }
        self.order.push_back(item);
        while self.n_bytes > KEPT_BYTES {
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
    fn pictures_are_real_and_each_content_is_another_one() {
        let media = Media::new(1);
        for (width, height) in [(1, 1), (17, 16), (640, 640), (33, 100), (5, 15)] {
            let file = media.file(&image(1, width, height));
            let decoded = image::load_from_memory(&file).expect("a PNG").to_rgb8();
            assert_eq!((decoded.width(), decoded.height()), (width, height));
            assert_eq!(file, Media::new(1).file(&image(1, width, height)), "the same again");
            assert_ne!(file, media.file(&image(2, width, height)));
            assert_ne!(file, Media::new(2).file(&image(1, width, height)));
        }
    }

    #[test]
    fn a_picture_is_not_cheap_to_decode() {
        let file = Media::new(1).file(&image(9, 640, 640));
        let decoded = image::load_from_memory(&file).expect("a PNG").to_rgb8();
        let n_different = decoded.pixels().collect::<std::collections::HashSet<_>>().len();
        assert!(n_different > 10_000, "{n_different} colours");
        assert!((100_000..1_000_000).contains(&file.len()), "{} bytes", file.len());
    }

    #[test]
    fn sounds_have_their_length_in_their_header() {
        let item = |content| OfferedItem { content, shape: ItemShape::Audio { millis: 1500 } };
        let media = Media::new(1);
        let file = media.file(&item(1));
        assert_eq!((&file[..4], &file[8..16], file.len()), (&b"RIFF"[..], &b"WAVEfmt "[..], 44 + 2 * 24_000));
        assert_eq!(u32::from_le_bytes([file[40], file[41], file[42], file[43]]), 48_000);
        assert_ne!(file, media.file(&item(2)));
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let mut kept = Kept::default();
        for i in 0..100 {
            kept.keep(image(i, 1, 1), Bytes::from(vec![0; 8 << 20]));
        }
        assert!(kept.n_bytes <= KEPT_BYTES && kept.items.len() == 32 && kept.order.len() == 32);
    }
}
