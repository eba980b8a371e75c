//! Bombs through real processes. Decompression bombs: each is refused or decoded. Grammar bombs: each is refused or
//! followed. No process dies, or takes more memory than for a large legitimate item.

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
    let cluster = Cluster::start(&["--ec", "memory"]).await;
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

/// A schema of `n` definitions, each an `allOf` with one `$ref` to the next.
fn chain(n: usize) -> Value {
    let next = |i: usize| (format!("d{i}"), json!({"allOf": [{"$ref": format!("#/$defs/d{}", i + 1)}]}));
    let mut defs: serde_json::Map<String, Value> = (0..n).map(next).collect();
    defs.insert(format!("d{n}"), json!({"type": "string"}));
    json!({"$ref": "#/$defs/d0", "$defs": defs})
}

fn within(schema: &Value) -> Value {
    json!({"model": SHAPES, "max_tokens": 8, "messages": [{"role": "user", "content": "say something"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}})
}

/// Schemas with the limit that each exceeds; the last ones take the trial itself to a limit, or fit.
fn schemas() -> Vec<(Value, &'static str)> {
    let multiples = |a: u32, b: u32| json!({"allOf": [{"multipleOf": a}, {"multipleOf": b}]});
    let names: Vec<String> = (0..10_000).map(|i| format!("p{i}")).collect();
    let patterns = |n: usize| -> Vec<Value> {
        (0..n).map(|i| json!({"pattern": format!("(a|b{i})*c.{{{i}}}(x|y)")})).collect()
    };
    vec![
        (chain(500), "levels of nesting with its $refs followed, the limit is 750"),
        (chain(5_000), "definitions, the limit is 1000"),
        (multiples(9973, 9967), "99400891 as the least common multiple"),
        (multiples(99_730, 99_670), "the limit is 10000"),
        (json!({"type": "object", "required": names}), "properties in one object, the limit is 1000"),
        (json!({"allOf": patterns(360)}), "360 patterns, the limit is 64"),
        (json!({"allOf": patterns(36)}), ""),
        (json!({"type": "array", "minItems": 10_000_000, "items": {"multipleOf": 9973}}), ""),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_query_of_death_is_refused_and_the_streams_beside_it_go_on() {
    let cluster = Cluster::start(&["--pds", "2"]).await;
    let pds = cluster.pids("pd");
    let before: Vec<_> = pds.iter().map(|pid| peak_bytes(*pid)).collect();
    let honest = json!({"model": SHAPES, "max_tokens": 64, "ignore_eos": true,
        "messages": [{"role": "user", "content": "go on"}]});
    let schemas = schemas();
    let attacks = async {
        for (schema, expect) in &schemas {
            // Twice at the same time, and once more after it was refused.
            let (one, other) = tokio::join!(cluster.chat(within(schema)), cluster.chat(within(schema)));
            for (status, answer) in [one, other, cluster.chat(within(schema)).await] {
                let message = answer["error"]["message"].as_str().unwrap_or_default();
                assert!(expect.is_empty() && status == 200 || status == 400, "{expect}: {status} {answer}");
                assert!(message.contains(expect), "{expect}: {answer}");
            }
        }
    };
    let streams = futures::future::join_all((0..8).map(|_| async {
        for _ in 0..4 {
            let (status, answer) = cluster.chat(honest.clone()).await;
            assert_eq!((status, answer["usage"]["completion_tokens"].as_u64()), (200, Some(64)), "{answer}");
        }
    }));
    tokio::join!(attacks, streams);
    assert_eq!(cluster.pids("pd"), pds, "a PD worker died");
    for (pid, before) in pds.iter().zip(before) {
        let grown = peak_bytes(*pid).saturating_sub(before);
        assert!(grown < MAX_GROWTH / 4, "a PD worker's peak grew by {} MiB", grown >> 20);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_within_a_schema_ends_before_max_tokens() {
    let cluster = Cluster::start(&[]).await;
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["ok", "n"], "additionalProperties": false});
    for seed in 0..4 {
        let mut body = within(&schema);
        for (key, value) in [("max_tokens", json!(400)), ("temperature", json!(2.0)), ("seed", json!(seed))] {
            body[key] = value;
        }
        let (status, answer) = cluster.chat(body.clone()).await;
        assert_eq!(status, 200, "{answer}");
        let parsed: Value = serde_json::from_str(text_of(&answer)).expect("JSON");
        assert!(parsed["ok"].is_boolean() && parsed["n"].is_u64(), "{answer}");
        body["structured_outputs"] = json!({"disable_any_whitespace": true});
        let (status, answer) = cluster.chat(body).await;
        assert_eq!(status, 200, "{answer}");
        assert!(!text_of(&answer).contains(char::is_whitespace), "{answer}");
    }
}
