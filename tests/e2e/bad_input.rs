//! Bad input through the whole cluster: a clear error that names limit and value, and never a dead process.

use serde_json::{Value, json};
use tonic::Code;
use triptych_proto::v1;
use triptych_tests::client::{about_audio, about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::samples::{ask_images, heldout, text_of, wav_16k};

const SHAPES: &str = "shapes-qwen2-vl";

/// A PNG that declares `side` × `side` pixels and has hardly any data.
fn png_header(side: u32) -> Vec<u8> {
    let mut ihdr = side.to_be_bytes().to_vec();
    ihdr.extend_from_slice(&side.to_be_bytes());
    ihdr.extend_from_slice(&[8, 2, 0, 0, 0]);
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    png.extend(png_chunk(b"IHDR", &ihdr));
    png.extend(png_chunk(b"IDAT", &[0x78, 0x9c, 0x63, 0x00, 0x00]));
    png
}

fn png_chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let checked = [kind, data].concat();
    let len = u32::try_from(data.len()).expect("short").to_be_bytes();
    [&len, checked.as_slice(), &crc32(&checked).to_be_bytes()].concat()
}

/// CRC-32 of PNG, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| (c >> 1) ^ (0xedb8_8320 & (c & 1).wrapping_neg()))
    };
    !bytes.iter().fold(!0, step)
}

/// A WAV header that declares two hours and the first second of it.
fn two_hours() -> Vec<u8> {
    let mut wav = wav_16k(&vec![0; 16_000]);
    let data_len: u32 = 2 * 3600 * 32_000;
    wav[4..8].copy_from_slice(&(36 + data_len).to_le_bytes());
    wav[40..44].copy_from_slice(&data_len.to_le_bytes());
    wav
}

fn all_pids(cluster: &Cluster) -> Vec<u32> {
    ["proxy", "encoder", "pd", "store"].iter().flat_map(|role| cluster.pids(role)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_items_get_an_error_with_the_cause_and_no_process_dies() {
    let cluster = Cluster::start(&[]).await;
    let before = all_pids(&cluster);
    let mut client = connect(&cluster.grpc).await;
    let scene = heldout("scene.png");
    let image = |bytes: &[u8]| v1::GenerateRequest {
        model: SHAPES.into(),
        ..about_images("What is it?", vec![bytes.to_vec()])
    };
    let audio = |bytes: Vec<u8>| about_audio(bytes, v1::SpeechTask::default());
    let cases: Vec<(&str, v1::GenerateRequest, &[&str])> = vec![
        ("a truncated PNG", image(&scene[..scene.len() / 2]), &[]),
        ("a truncated JPEG", image(&[0xff, 0xd8, 0xff, 0xe0, 0, 16, b'J', b'F', b'I', b'F', 0]), &[]),
        ("a header of 60000 x 60000", image(&png_header(60_000)), &["60000", "50000000"]),
        ("text as an image", image(b"just some text"), &["PNG", "JPEG"]),
        ("an empty image", image(b""), &[]),
        ("an empty clip", audio(Vec::new()), &[]),
        ("a clip of no samples", audio(wav_16k(&[])), &[]),
        ("a clip of two hours", audio(two_hours()), &[]),
        ("an image as a clip", audio(scene.clone()), &[]),
        ("too many images", about_images("What?", vec![scene.clone(); 17]), &["17", "16"]),
    ];
    for (what, mut request, names) in cases {
        if request.model.is_empty() {
            request.model = if what.contains("clip") { "digits-whisper" } else { SHAPES }.into();
        }
        let status = generate(&mut client, request).await.expect_err(what);
        assert_eq!(status.code(), Code::InvalidArgument, "{what}: {status:?}");
        for name in names {
            assert!(status.message().contains(name), "{what}: {:?} does not say {name}", status.message());
        }
    }
    assert_eq!(all_pids(&cluster), before, "a process died");
    let answer = generate(&mut client, image(&scene)).await.expect("the cluster is well");
    assert!(!answer.text.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_get_openais_error_with_the_right_status() {
    let cluster = Cluster::start(&[]).await;
    let before = all_pids(&cluster);
    let say = |content: Value| json!({"model": SHAPES, "messages": [{"role": "user", "content": content}]});
    let url = |u: &str| say(json!([{"type": "image_url", "image_url": {"url": u}}]));
    let long = "red ".repeat(20_000);
    let mut cases: Vec<(&str, Value, u16)> = vec![
        ("an unknown model", json!({"model": "gpt-9", "messages": [{"role": "user", "content": "hi"}]}), 404),
        ("no messages", json!({"model": SHAPES, "messages": []}), 400),
        ("an empty prompt", say(json!("")), 400),
        ("a prompt beyond the context", say(json!(long)), 400),
        (
            "a temperature of 9",
            json!({"model": SHAPES, "temperature": 9, "messages": [{"role": "user", "content": "hi"}]}),
            400,
        ),
        ("text as an image", ask_images(SHAPES, "What?", &[b"text"]), 400),
        (
            "audio for a model of images",
            say(json!([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}])),
            400,
        ),
        ("a file URL", url("file:///etc/passwd"), 400),
    ];
    for host in [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "127.1",
        "0.0.0.0",
        "169.254.169.254",
    ] {
        cases.push(("an internal URL", url(&format!("http://{host}/x.png")), 400));
    }
    for (what, body, expect) in cases {
        let (status, answer) = cluster.chat(body).await;
        assert_eq!(status, expect, "{what}: {answer}");
        let error = &answer["error"];
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{what}: {answer}");
        assert!(
            error["type"].is_string() && (error["code"].is_string() || error["code"].is_null()),
            "{what}: {answer}"
        );
        assert_eq!(
            error["code"] == "context_length_exceeded",
            what.contains("beyond the context"),
            "{answer}"
        );
    }
    assert_eq!(all_pids(&cluster), before, "a process died");
    let (status, answer) =
        cluster.chat(ask_images(SHAPES, "What is in this picture?", &[&heldout("scene.png")])).await;
    assert_eq!(status, 200, "{answer}");
    assert!(!text_of(&answer).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_enum_values_are_refused_by_every_process() {
    let cluster = Cluster::start(&[]).await;
    let before = all_pids(&cluster);
    let mut client = connect(&cluster.grpc).await;
    let mut wrong_role = about_images("hi", Vec::new());
    wrong_role.model = SHAPES.into();
    if let Some(v1::prompt::Kind::Chat(chat)) = wrong_role.prompt.as_mut().and_then(|p| p.kind.as_mut()) {
        chat.messages[0].role = 77;
    }
    let mut wrong_modality = about_images("hi", vec![heldout("scene.png")]);
    wrong_modality.items[0].modality = -5;
    for (request, names) in [(wrong_role, "role"), (wrong_modality, "modality")] {
        let status = generate(&mut client, request).await.expect_err("refused");
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(names), "{status:?}");
    }
    assert_eq!(all_pids(&cluster), before, "a process died");
}
