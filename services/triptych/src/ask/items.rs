//! The files of a question, read and looked at before anybody is asked.

use super::args::AskArgs;
use crate::error::CliError;
use bytes::Bytes;
use std::io::ErrorKind;
use std::path::Path;
use triptych_core::Modality;
use triptych_core::limits::Limits;

/// A file to send.
#[derive(Clone, Debug)]
pub struct Item {
    /// The file's name, for the report.
    pub name: String,
    /// Its kind.
    pub modality: Modality,
    /// Its bytes.
    pub data: Bytes,
}

/// Reads the images, then the videos, then the audio file.
///
/// # Errors
/// [`CliError::Setting`] that names the file at fault.
pub fn read_all(args: &AskArgs) -> Result<Vec<Item>, CliError> {
    let images = args.images.iter().map(|file| (file, Modality::Image));
    let videos = args.videos.iter().map(|file| (file, Modality::Video));
    let clips = args.audio.iter().map(|file| (file, Modality::Audio));
    images.chain(videos).chain(clips).map(|(file, modality)| read(file, modality)).collect()
}

fn read(file: &Path, modality: Modality) -> Result<Item, CliError> {
    let shown = file.display();
    let wrong = |text: String| Err(CliError::Setting(text));
    let limit = Limits::default().max_item_bytes as u64;
    match std::fs::metadata(file) {
        Err(e) if e.kind() == ErrorKind::NotFound => return wrong(format!("there is no file {shown}")),
        Err(e) => return wrong(format!("cannot read {shown}: {e}")),
        Ok(m) if m.is_dir() => return wrong(format!("{shown} is a directory, --{modality} takes a file")),
        Ok(m) if m.len() == 0 => return wrong(format!("{shown} is empty")),
        Ok(m) if m.len() > limit => {
            return wrong(format!("{shown} has {} bytes, the limit is {limit}", m.len()));
        }
        Ok(_) => {}
    }
    let data = match std::fs::read(file) {
        Ok(data) => Bytes::from(data),
        Err(e) => return wrong(format!("cannot read {shown}: {e}")),
    };
    match looks_like(&data) {
        // An image may move.
        Some(other) if other != modality && (other, modality) != (Modality::Image, Modality::Video) => {
            wrong(format!("{shown} is {}; pass it with --{other}", article(other)))
        }
        _ => {
            let name =
                file.file_name().map_or_else(|| shown.to_string(), |n| n.to_string_lossy().into_owned());
            Ok(Item { name, modality, data })
        }
    }
}

fn article(modality: Modality) -> &'static str {
    match modality {
        Modality::Image => "an image",
        Modality::Audio => "audio",
        Modality::Text => "text",
        Modality::Video => "a video",
    }
}

/// By its first bytes, where they leave no doubt. The cluster decides about everything else.
fn looks_like(data: &[u8]) -> Option<Modality> {
    const IMAGE_MAGICS: [&[u8]; 4] = [b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM"];
    const AUDIO_MAGICS: [&[u8]; 3] = [b"fLaC", b"OggS", b"ID3"];
    let starts = |magics: &[&[u8]]| magics.iter().any(|m| data.starts_with(m));
    match data.get(8..12) {
        Some(b"WAVE") if data.starts_with(b"RIFF") => Some(Modality::Audio),
        Some(b"WEBP") if data.starts_with(b"RIFF") => Some(Modality::Image),
        _ if starts(&IMAGE_MAGICS) => Some(Modality::Image),
        _ if starts(&AUDIO_MAGICS) => Some(Modality::Audio),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: &[u8], modality: Modality, part: &str) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.bin");
        std::fs::write(&file, bytes).unwrap();
        let e = read(&file, modality).unwrap_err().to_string();
        assert!(e.contains("a.bin") && e.contains(part), "{e}");
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told_with_its_name() {
        check(b"", Modality::Image, "is empty");
        check(b"RIFF\0\0\0\0WAVEfmt ", Modality::Image, "--audio");
        check(b"\x89PNG\r\n\x1a\n", Modality::Audio, "--image");
        let dir = tempfile::tempdir().unwrap();
        for (file, part) in
            [(dir.path().join("none.png"), "no file"), (dir.path().to_owned(), "is a directory")]
        {
            let e = read(&file, Modality::Image).unwrap_err().to_string();
            assert!(e.contains(&file.display().to_string()) && e.contains(part), "{e}");
        }
    }

    #[test]
    fn what_is_not_known_is_left_to_the_cluster() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.tiff");
        std::fs::write(&file, b"II*\0").unwrap();
        assert_eq!(read(&file, Modality::Image).unwrap().name, "a.tiff");
    }
}
