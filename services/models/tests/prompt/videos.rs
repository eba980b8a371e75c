//! Videos in prompts: their places, times, and what does not fit.

use super::*;
use triptych_core::Seconds;

fn builder(case: &str, times: FrameTimes) -> ChatVl {
    let spec = PlaceholderSpec::qwen(times);
    ChatVl::from_dir(&golden::path(&format!("{case}/model")), tokenizer(case), &spec, LIMITS).unwrap()
}

fn video_item([t, h, w]: [u32; 3], interval: f64, times: &[f64]) -> EncodedItem {
    let seconds = |s: f64| Seconds::new(s).unwrap();
    let extent = Extent::Video {
        t,
        h,
        w,
        interval: seconds(interval),
        times: times.iter().map(|time| seconds(*time)).collect(),
    };
    item(Modality::Video, extent, t * h * w / 4)
}

fn ids(case: &str, text: &str) -> Vec<u32> {
    tokenizer(case).encode(text).unwrap()
}

#[test]
fn frames_are_counted_or_as_far_apart_as_their_times() {
    let video = video_item([3, 2, 4], 0.8, &[0.0, 0.8, 1.6]);
    for (case, times, expect) in [
        ("qwen2_vl_two_images", FrameTimes::Counted, [0, 1, 2]),
        // Two positions a second.
        ("qwen2_5_vl_window112", FrameTimes::PerSecond, [0, 1, 3]),
    ] {
        let got = one(&builder(case, times), &user(vec![image(0), text("x")]), std::slice::from_ref(&video));
        let row = ids(case, "<|video_pad|>")[0];
        let first = got.tokens.iter().position(|id| *id == row).unwrap();
        assert_eq!(got.tokens[first..first + 6], [row; 6]);
        let start = got.positions[first][0];
        let frames: Vec<u32> =
            got.positions[first..first + 6].iter().step_by(2).map(|position| position[0] - start).collect();
        assert_eq!(frames, expect, "{case}");
        assert_eq!(got.positions[first + 6], [start + expect[2].max(1) + 1; 3], "{case}");
        let span = ItemSpan { item: ItemIdx(0), first_row: 0, first_token: first as u32, n_tokens: 6 };
        assert_eq!(got.spans, [span]);
    }
}

#[test]
fn times_are_written_before_frames_in_the_place_of_the_whole_video() {
    const CASE: &str = "qwen3_vl_wide_heads";
    let builder = builder(CASE, FrameTimes::Written);
    // A tie of decimals is exact in binary, and rounds to even as in Python.
    let video = video_item([2, 2, 4], 0.5, &[0.25, 10.75]);
    let frames = |times: [&str; 2]| {
        times
            .map(|time| format!("<{time} seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>"))
            .concat()
    };
    let still = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>";
    let chat = |inner: &str| format!("<|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n");
    let items = [image_item(2, 4), video.clone()];
    let got = one(&builder, &user(vec![image(1), text("a"), image(0), text("b")]), &items);
    let expect = chat(&format!("{}a{still}b", frames(["0.2", "10.8"])));
    assert_eq!(got.tokens, ids(CASE, &expect));
    let spans: Vec<(u32, u32, u32)> = got.spans.iter().map(|s| (s.item.0, s.first_row, s.n_tokens)).collect();
    assert_eq!(spans, [(1, 0, 2), (1, 2, 2), (0, 0, 2)]);
    // A prompt without a template, with the placeholder and without.
    let raw = |text: &str| Prompt::Singleton(TextOrTokens::Text(text.into()));
    for prompt in ["see <|vision_start|><|video_pad|><|vision_end|>", "see <|video_pad|>"] {
        let got = one(&builder, &raw(prompt), std::slice::from_ref(&video));
        assert_eq!(got.tokens, ids(CASE, &format!("see {}", frames(["0.2", "10.8"]))), "{prompt}");
    }
    let got = one(&builder, &raw("see"), std::slice::from_ref(&video));
    assert_eq!(got.tokens, ids(CASE, &format!("{}see", frames(["0.2", "10.8"]))));
}

#[test]
fn what_is_no_video_of_the_model_is_refused() {
    let times = FrameTimes::PerSecond;
    let builder = builder("qwen2_5_vl_window112", times);
    let prompt = user(vec![image(0)]);
    let check = |item: EncodedItem, expect: &str| refused(&builder, &prompt, &[item], expect);
    let video = video_item([2, 2, 4], 1.0, &[0.0, 1.0]);
    check(EncodedItem { n_tokens: 5, ..video.clone() }, "5 rows, which is not what a grid of 2x2x4");
    check(
        EncodedItem { modality: Modality::Image, ..video.clone() },
        "not the extent of an item of kind image",
    );
    check(
        EncodedItem { modality: Modality::Video, ..image_item(2, 4) },
        "not the extent of an item of kind video",
    );
    check(video_item([2, 2, 4], 1e9, &[0.0, 1e9]), "which is not what");
    check(speech(1, 1000), "is audio, this model reads image and video items");
    let raw = |text: &str| Prompt::Singleton(TextOrTokens::Text(text.into()));
    refused(&builder, &raw("<|image_pad|>"), &[video], "a placeholder of kind image where item 0 is video");
    let glm = tokenizer("glm_ocr_mrope");
    let dir = golden::path("glm_ocr_mrope/model");
    let glm = ChatVl::from_dir(&dir, glm, &PlaceholderSpec::GLM, LIMITS).unwrap();
    let video = video_item([1, 2, 4], 1.0, &[0.0]);
    refused(&glm, &prompt, &[video], "item 0 is video, this model reads image items");
}
