//! Sizes of a decoder's caches, from which the simulator's engines account for blocks as real ones do: those of each KV cache group, and
//! slots of recurrent states.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::num::{NonZeroU32, NonZeroUsize};
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_models::decoder::{DecoderInfo, KvCacheGroups, MAX_KV_GROUPS};

/// Vocabulary of a decoder that computes nothing.
pub const VOCAB: usize = 1 << 16;

/// Sizes of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvSizes {
    /// Bytes of one token's keys and values, all layers.
    pub token_bytes: usize,
    /// Bytes of a cross-attended row of encoder output; 0 for a decoder-only model.
    pub cross_row_bytes: usize,
    /// Tokens a sequence may have.
    pub max_context: usize,
    /// Rows of encoder output whose projection costs as much as a prompt token.
    #[serde(default = "one_row")]
    pub cross_rows_per_token: usize,
    /// Bytes that weights leave free on a device with memory of its own; `None`: the caches are in the host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<usize>,
    /// Tokens that the KV cache of a worker holds, where the worker said so; before `device_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_tokens: Option<usize>,
    /// Rows of encoder output that a sequence may cross-attend to; `None`: not known, or not bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cross_rows: Option<usize>,
    /// KV cache groups: in a file the window of each, or null. Files without have one group that sees every key.
    #[serde(default = "one_group", with = "windows", skip_serializing_if = "is_one_group")]
    pub groups: KvCacheGroups,
    /// Bytes of the recurrent state of a sequence; `None`: no layer has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_slot_bytes: Option<NonZeroUsize>,
    /// True if rows of an item see each other, so that a step computes all of them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mutual_items: bool,
}

impl Default for KvSizes {
    fn default() -> Self {
        Self {
            token_bytes: 0,
            cross_row_bytes: 0,
            max_context: 0,
            cross_rows_per_token: 0,
            device_bytes: None,
            capacity_tokens: None,
            max_cross_rows: None,
            groups: KvCacheGroups::FULL,
            state_slot_bytes: None,
            mutual_items: false,
        }
    }
}

impl KvSizes {
    /// Those of a decoder; `max_cross_rows`: encoder rows that a sequence may cross-attend to.
    pub fn of(info: &DecoderInfo, max_cross_rows: Option<usize>) -> Self {
        Self {
            token_bytes: info.self_block_bytes.saturating_mul(info.kv_groups.n_groups()) / KV_BLOCK_TOKENS,
            cross_row_bytes: if info.cross_attention { info.cross_block_bytes / KV_BLOCK_TOKENS } else { 0 },
            max_context: info.max_context,
            cross_rows_per_token: info.cross_rows_per_token,
            device_bytes: None,
            capacity_tokens: None,
            max_cross_rows,
            groups: info.kv_groups,
            state_slot_bytes: info.state_slot_bytes,
            mutual_items: info.mutual_items,
        }
    }

    /// A decoder with these caches that computes nothing.
    pub fn decoder(&self) -> DecoderInfo {
        let self_bytes = self.token_bytes.saturating_mul(KV_BLOCK_TOKENS);
        DecoderInfo {
            vocab: VOCAB,
            n_readable: VOCAB,
            encoder_hidden: 1,
            embedded_hidden: 1,
            max_context: self.max_context,
            cross_attention: self.cross_row_bytes > 0,
            cross_optional: true,
            mutual_items: self.mutual_items,
            kv_groups: self.groups,
            // A block holds the layers of one group.
            self_block_bytes: self_bytes.div_ceil(self.groups.n_groups()),
            cross_block_bytes: self.cross_row_bytes.saturating_mul(KV_BLOCK_TOKENS),
            state_slot_bytes: self.state_slot_bytes,
            cross_rows_per_token: self.cross_rows_per_token,
        }
    }
}

/// Cost of rows in files that say none.
fn one_row() -> usize {
    1
}

fn one_group() -> KvCacheGroups {
    KvCacheGroups::FULL
}

fn is_one_group(groups: &KvCacheGroups) -> bool {
    *groups == KvCacheGroups::FULL
}

/// Groups as a list of windows.
mod windows {
    use super::*;

    pub(super) fn serialize<S: Serializer>(groups: &KvCacheGroups, to: S) -> Result<S::Ok, S::Error> {
        groups.windows().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<KvCacheGroups, D::Error> {
        let windows: Vec<Option<NonZeroU32>> = Vec::deserialize(from)?;
        KvCacheGroups::of(&windows).ok_or_else(|| {
            D::Error::custom(format!(
                "groups has {} windows, allowed are 1 to {MAX_KV_GROUPS}",
                windows.len()
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A decoder of six layers in three groups, one of which sees every key, and with states.
    fn info() -> DecoderInfo {
        let windows = [NonZeroU32::new(512), NonZeroU32::new(512), None];
        let groups = KvCacheGroups::of(&windows).expect("three groups");
        let sizes = KvSizes { token_bytes: 3000, max_context: 4096, groups, ..KvSizes::default() };
        DecoderInfo {
            state_slot_bytes: NonZeroUsize::new(7000),
            mutual_items: true,
            self_block_bytes: 1000 * KV_BLOCK_TOKENS,
            ..sizes.decoder()
        }
    }

    #[test]
    fn a_decoder_is_the_same_after_a_file() {
        let sizes = KvSizes::of(&info(), None);
        let text = serde_json::to_string(&sizes).expect("numbers");
        assert!(
            text.contains(r#""groups":[512,512,null],"state_slot_bytes":7000,"mutual_items":true"#),
            "{text}"
        );
        let read: KvSizes = serde_json::from_str(&text).expect("what was written");
        assert_eq!(read.decoder(), info());
        assert_eq!(read.token_bytes, 3000, "three blocks of each group for sixteen tokens");
    }

    #[test]
    fn what_a_file_does_not_say_is_one_group_without_states() {
        let text = r#"{"token_bytes": 10, "cross_row_bytes": 0, "max_context": 64}"#;
        let info = serde_json::from_str::<KvSizes>(text).expect("an older file").decoder();
        assert_eq!((info.kv_groups, info.state_slot_bytes), (KvCacheGroups::FULL, None));
        for (groups, part) in
            [("[]", "groups has 0 windows"), ("[0]", "nonzero"), ("[1,1,1,1,1,1,1,1,1]", "1 to 8")]
        {
            let text =
                format!(r#"{{"token_bytes":10,"cross_row_bytes":0,"max_context":64,"groups":{groups}}}"#);
            let error = serde_json::from_str::<KvSizes>(&text).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
