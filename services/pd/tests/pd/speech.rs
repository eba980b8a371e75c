//! Sounds of several windows.

use crate::support::{Pd, SPEECH, WINDOW, sampled, start, transcribe};
use std::sync::Arc;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput, Extent};

/// Window `k` of an output, as a sound of its own.
fn window(whole: &EncoderOutput, k: u32) -> EncoderOutput {
    let width = (whole.rows().len() / whole.item().n_tokens as usize) * WINDOW as usize;
    let rows: Arc<[u8]> = whole.rows()[k as usize * width..][..width].into();
    let item = EncodedItem {
        key: ContentKey::from_bytes([200 + k as u8; 32]),
        n_tokens: WINDOW,
        extent: Extent::windows(1, 1_000),
        ..whole.item().clone()
    };
    EncoderOutput::seal(item, rows).unwrap()
}

async fn tokens(pd: &Pd, output: &EncoderOutput) -> Vec<u32> {
    pd.put(output).await;
    pd.generate(transcribe(output.item(), 12)).await.unwrap().tokens.remove(0)
}

#[tokio::test]
async fn windows_are_told_in_order_for_each_answer() {
    let pd = start().await;
    let whole = pd.output(SPEECH, Extent::windows(3, 2_900), 3);
    pd.put(&whole).await;
    let mut expected = Vec::new();
    for k in 0..3 {
        expected.extend(tokens(&pd, &window(&whole, k)).await);
    }
    let answer = pd.generate(sampled(transcribe(whole.item(), 12), |s| s.n = Some(2))).await.unwrap();
    assert_eq!(answer.tokens, [expected.clone(), expected], "the windows alone, one after the other");
    assert_eq!(answer.n_ends, 2, "one end for each answer, not for each window");
    assert_eq!(answer.summary.usage.unwrap().completion_tokens, 2 * 3 * 12);
    let prompt = answer.summary.decoder_prompt.clone().expect("an encoder-decoder model tells it");
    assert!(prompt.text.starts_with("<|startoftranscript|><|en|>"), "{prompt:?}");
    assert_eq!(prompt.token_ids.len(), 3, "start, language, task");
    assert_eq!((answer.summary.duration_s, answer.summary.language.as_str()), (2.9, "en"));
    pd.until_idle(SPEECH).await;
}
