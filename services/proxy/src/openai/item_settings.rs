//! Settings of processors that a request has for its items, as vLLM's `mm_processor_kwargs`: of videos alone.

use crate::request::Item;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use triptych_core::{Failure, Modality};
use triptych_proto::convert;

const FIELD: &str = "mm_processor_kwargs";

/// The settings, as parsed.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ProcessorSettings {
    fps: Option<f64>,
    num_frames: Option<u32>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

impl ProcessorSettings {
    /// Sets them as options of the videos among the items.
    ///
    /// # Errors
    /// [`Failure`] for a setting that is not supported, out of range, or that no item takes.
    pub(super) fn apply(self, items: &mut [Item]) -> Result<(), Failure> {
        if let Some((name, _)) = self.others.iter().find(|(_, value)| !value.is_null()) {
            let message = format!("{FIELD} has {name}, allowed are fps and num_frames");
            return Err(Failure::invalid(message).with_param(FIELD));
        }
        let frames = convert::frames(self.fps, self.num_frames).map_err(|e| {
            let field = e.field();
            Failure::from(e).with_param(format!("{FIELD}.{field}"))
        })?;
        if frames.is_none() {
            return Ok(());
        }
        let mut videos = items.iter_mut().filter(|item| item.modality == Modality::Video).peekable();
        if videos.peek().is_none() {
            let message = format!("{FIELD} is of videos, and the request has none");
            return Err(Failure::invalid(message).with_param(FIELD));
        }
        videos.for_each(|video| video.options.frames = frames);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Source;
    use serde_json::json;
    use triptych_core::{FrameSampling, ItemOptions};

    fn applied(settings: Value, kinds: &[Modality]) -> Result<Vec<Option<FrameSampling>>, Failure> {
        let item = |modality: &Modality| Item {
            modality: *modality,
            source: Source::Url("http://a".into()),
            options: ItemOptions::default(),
            param: String::new(),
        };
        let mut items: Vec<Item> = kinds.iter().map(item).collect();
        let settings: ProcessorSettings = serde_json::from_value(settings).unwrap();
        settings.apply(&mut items)?;
        Ok(items.into_iter().map(|item| item.options.frames).collect())
    }

    #[test]
    fn settings_are_those_of_the_videos() {
        use Modality::{Image, Video};
        let rate = Some(FrameSampling::Rate { thousandths: 500 });
        assert_eq!(applied(json!({"fps": 0.5}), &[Image, Video, Video]).unwrap(), [None, rate, rate]);
        assert_eq!(applied(json!({"num_frames": 8}), &[Video]).unwrap(), [Some(FrameSampling::Count(8))]);
        assert_eq!(applied(json!({"fps": null, "x": null}), &[Image]).unwrap(), [None]);
        for (settings, kinds, param, expect) in [
            (json!({"fps": 0}), Video, "mm_processor_kwargs.fps", "is 0, allowed is 0.001"),
            (json!({"fps": 1, "num_frames": 2}), Video, "mm_processor_kwargs.num_frames", "beside fps"),
            (json!({"num_frames": 0}), Video, "mm_processor_kwargs.num_frames", "1 or more"),
            (json!({"max_pixels": 9}), Video, "mm_processor_kwargs", "allowed are fps and"),
            (json!({"fps": 1}), Image, "mm_processor_kwargs", "has none"),
        ] {
            let failure = applied(settings, &[kinds]).unwrap_err();
            assert_eq!(failure.param.as_deref(), Some(param));
            assert!(failure.message.contains(expect), "{failure}");
        }
    }
}
