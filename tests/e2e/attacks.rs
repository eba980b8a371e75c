//! Decompression bombs through real processes: each is refused or decoded, and no process dies or takes more memory than
//! for a large legitimate item.

use base64::Engine;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use serde_json::{Value, json};
use std::io::Write;
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::process::peak_bytes;
use triptych_tests::samples::{ask_images, heldout, text_of};

const SHAPES: &str = "shapes-qwen2-vl";
/// Limit on the growth of a process's peak memory in bytes, over all bombs. A legitimate image of 50 megapixels and a clip
/// of 30 minutes take that much; any one of these bombs, if decoded, would take more.
const MAX_GROWTH: u64 = 1 << 30;

fn zeros(mib: usize) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    let block = vec![0; 1 << 20];
    for _ in 0..mib {
        encoder.write_all(&block).expect("into memory");
    }
    encoder.finish().expect("into memory")
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

fn png(side: u32, chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
    let header = [&side.to_be_bytes()[..], &side.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    let head = [(b"IHDR", header.as_slice())];
    for (kind, data) in head.iter().chain(chunks).chain(&[(b"IEND", &[][..])]) {
        bytes.extend((data.len() as u32).to_be_bytes());
        let body = [kind.as_slice(), data].concat();
        bytes.extend(&body);
        bytes.extend(crc32(&body).to_be_bytes());
    }
    bytes
}

fn images() -> Vec<(&'static str, Vec<u8>)> {
    // Two GiB of zeros are two MiB of zlib.
    let bomb = zeros(2048);
    let profile = [b"x\0\0".as_slice(), &bomb].concat();
    let text = [b"Comment\0\0".as_slice(), &bomb].concat();
    let few = zeros(1);
    let mut gif = b"GIF89a\x40\0\x40\0\x80\0\0\0\0\0\xff\xff\xff".to_vec();
    gif.extend([0x2c, 0, 0, 0, 0, 1, 0, 1, 0, 0, 2, 2, 0x44, 0x01, 0].repeat(1_000_000));
    gif.push(0x3b);
    vec![
        ("a PNG of 10^10 pixels", png(100_000, &[(b"IDAT", &few)])),
        ("a PNG whose pixels inflate to 2 GiB", png(64, &[(b"IDAT", &bomb)])),
        ("a PNG whose profile inflates to 2 GiB", png(64, &[(b"iCCP", &profile), (b"IDAT", &few)])),
        ("a PNG whose text inflates to 2 GiB", png(64, &[(b"zTXt", &text), (b"IDAT", &few)])),
        ("a GIF of a million frames", gif),
        ("a GIF of 65535 x 65535", b"GIF89a\xff\xff\xff\xff\x80\0\0\0\0\0\xff\xff\xff\x3b".to_vec()),
        (
            "a WebP of 2^24 x 2^24",
            b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\xff\xff\xff\xff\xff\xff".to_vec(),
        ),
    ]
}

fn crc(bytes: &[u8], bits: u32, polynomial: u32) -> u32 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte) << (bits - 8), |c, _| {
            let next = c << 1;
            (if c >> (bits - 1) & 1 == 1 { next ^ polynomial } else { next }) & ((1 << bits) - 1)
        })
    })
}

/// FLAC of 16 kHz, one channel, in constant frames: 4096 samples in 11 bytes each.
fn flac_of_hours() -> Vec<u8> {
    let mut bytes = b"fLaC\x80\0\0\x22\x10\0\x10\0\0\0\0\0\0\0".to_vec();
    bytes.extend((16_000_u64 << 44 | 15 << 36).to_be_bytes());
    bytes.extend([0; 16]);
    let frames = (0..128_u8).map(|i| {
        let mut frame = vec![0xff, 0xf8, 0xc5, 0x08, i];
        frame.push(crc(&frame, 8, 0x07) as u8);
        frame.extend([0x00, 0x00, 0x07]);
        frame.extend((crc(&frame, 16, 0x8005) as u16).to_be_bytes());
        frame
    });
    // 16000 frames are 68 minutes.
    bytes.extend(frames.collect::<Vec<_>>().concat().repeat(125));
    bytes
}

fn audio_clips() -> Vec<(&'static str, Vec<u8>)> {
    let wav = |channels: u16, rate: u32, bits: u16| {
        let mut bytes = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0".to_vec();
        bytes.extend(channels.to_le_bytes());
        bytes.extend(rate.to_le_bytes());
        bytes.extend(rate.to_le_bytes());
        bytes.extend((bits / 8).to_le_bytes());
        bytes.extend(bits.to_le_bytes());
        bytes.extend(b"data\xf0\xff\xff\xff");
        bytes.extend([0; 1 << 16]);
        bytes
    };
    let long = [
        b"\x1a\x45\xdf\xa3".as_slice(),
        &[0x01, 0x08, 0, 0, 0, 0, 0, 0],
        b"\x42\x82",
        &[0x01, 0x04, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    vec![
        ("a FLAC of an hour in 176 kB", flac_of_hours()),
        ("a WAV of 4 GiB that is not there", wav(1, 16_000, 16)),
        ("a WAV of 65535 channels", wav(u16::MAX, 16_000, 16)),
        ("a WAV of 4 GHz", wav(1, u32::MAX, 16)),
        ("a WAV of 65535 bits", wav(1, 16_000, u16::MAX)),
        ("a Matroska text of 2^50 bytes", long),
    ]
}

/// Posts an audio file; status and body of the response.
async fn transcribe(cluster: &Cluster, audio: &[u8]) -> (u16, String) {
    let mut body = b"--x\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n".to_vec();
    body.extend(audio);
    body.extend(b"\r\n--x--\r\n");
    let request = reqwest_client()
        .post(format!("{}/v1/audio/transcriptions", cluster.http))
        .header("content-type", "multipart/form-data; boundary=x")
        .body(body);
    let response = request.send().await.expect("the proxy answers");
    (response.status().as_u16(), response.text().await.expect("a body"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bombs_get_an_answer_and_cost_no_more_than_legitimate_items() {
    let cluster = Cluster::start(&[]).await;
    let pids: Vec<_> = ["proxy", "encoder", "pd", "store"].map(|role| cluster.pid(role)).to_vec();
    let before: Vec<_> = pids.iter().map(|pid| peak_bytes(*pid)).collect();
    for (what, image) in images() {
        let url =
            format!("data:image/png;base64,{}", base64::engine::general_purpose::STANDARD.encode(&image));
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        let body: Value = json!({"model": SHAPES, "max_tokens": 1, "messages": [
            {"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}
        ]});
        let (status, answer) = cluster.chat(body).await;
        assert!([200, 400, 413].contains(&status), "{what}: {status} {answer}");
    }
    for (what, audio) in audio_clips() {
        let (status, answer) = transcribe(&cluster, &audio).await;
        assert!([400, 413].contains(&status), "{what}: {status} {answer}");
    }
    for ((pid, before), role) in pids.iter().zip(before).zip(["proxy", "encoder", "pd", "store"]) {
        assert_eq!(cluster.pid(role), *pid, "the {role} died");
        let grown = peak_bytes(*pid).saturating_sub(before);
        println!("{role}: the peak grew by {} MiB", grown >> 20);
        assert!(grown < MAX_GROWTH, "{role}: the peak grew by {} MiB", grown >> 20);
    }
    let (status, answer) =
        cluster.chat(ask_images(SHAPES, "What is in this picture?", &[&heldout("scene.png")])).await;
    assert_eq!(status, 200, "{answer}");
    assert!(!text_of(&answer).is_empty());
}
