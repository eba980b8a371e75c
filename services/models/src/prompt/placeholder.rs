//! Places of items among the tokens of a prompt, as data: a value for each family.

use super::{TranscriptionChat, TranscriptionSpec, TranscriptionTokens};
use triptych_core::Modality;

/// Place of an item's rows in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceholderSpec {
    /// The kind of items.
    pub modality: Modality,
    /// The token of an image row.
    pub image: TokenName,
    /// The token that a template writes for each image; `None`: that of a row.
    pub written: Option<TokenName>,
    /// Tokens around it, where a prompt without a template has no placeholder.
    pub around: Option<[TokenName; 2]>,
    /// Positions of the rows.
    pub positions: RowPositions,
    /// Prompt of a transcript of one audio; `None`: the model has none of its own.
    pub transcription: Option<TranscriptionSpec>,
    /// Place of a video's rows; `None`: the model reads no videos.
    pub video: Option<VideoPlaceholder>,
}

/// Place of a video's rows, between the tokens around an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoPlaceholder {
    /// The token of a row, which also stands for a whole video.
    pub row: TokenName,
    /// Part that times have in positions or text.
    pub times: FrameTimes,
}

/// Part that the times of a video's frames have in positions or text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameTimes {
    /// None: frames are counted. Qwen2-VL.
    Counted,
    /// Temporal positions, so many of each second as `tokens_per_second` says. Qwen2.5-VL.
    PerSecond,
    /// A text before each frame, which has tokens around it as an image has. Qwen3-VL.
    Written,
}

/// A token by the keys of `config.json` that hold its id, and by its spelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenName {
    /// Keys, in the order they are tried.
    pub keys: &'static [&'static str],
    /// Spelling in the tokenizer, where no key is there.
    pub text: &'static str,
}

/// Positions of an image's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPositions {
    /// By frame, line and column of a grid of merged patches (M-RoPE).
    Grid,
    /// One after another, as those of text.
    Text,
    /// As those of text, between two texts that templates leave out.
    Between([&'static str; 2]),
    /// As those of text; an image that is cut into tiles is written tile by tile.
    Tiles(TileLayout),
    /// As those of text; parts of an image, then the whole of it.
    Parts(PartsLayout),
    /// As those of text, line by line.
    Lines(LineLayout),
}

/// Lines of an image's rows, each with a token behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineLayout {
    /// Patches on a side of the square that becomes one row.
    pub merge_size: u32,
    /// Token behind a line.
    pub end_of_line: &'static str,
    /// Token behind the last line, in the place of the other.
    pub end_of_image: &'static str,
}

/// Layout of an image's parts, line by line, and behind them the whole image. All texts are single tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartsLayout {
    /// Patches of a part, down and across.
    pub grid: [u32; 2],
    /// Rows of a part, and of the whole image.
    pub n_rows: [u32; 2],
    /// Before and behind the rows of a part.
    pub around_part: [&'static str; 2],
    /// Behind a line of parts that is not the last.
    pub end_of_line: &'static str,
    /// Before and behind the rows of the whole image.
    pub around_whole: [&'static str; 2],
}

impl PartsLayout {
    /// Spellings of its tokens.
    pub(super) fn tokens(&self) -> [&'static str; 5] {
        let ([a, b], [c, d]) = (self.around_part, self.around_whole);
        [a, b, self.end_of_line, c, d]
    }

    /// Text of `[lines, columns]` parts and the whole image; `rows` stands for the rows of each.
    pub(super) fn text(&self, [lines, columns]: [u32; 2], rows: &str) -> String {
        let between = |[before, after]: [&str; 2]| format!("{before}{rows}{after}");
        let line = between(self.around_part).repeat(columns as usize);
        vec![line; lines as usize].join(self.end_of_line) + &between(self.around_whole)
    }
}

/// Layout of an image that is cut into tiles. Each has as many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileLayout {
    /// Text around them.
    pub text: TileText,
    /// Patches of a tile, down and across.
    pub grid: [u32; 2],
    /// Rows of a tile.
    pub n_rows: u32,
}

/// Text around the tiles of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileText {
    /// Lines of tiles, each behind its place, then the whole image.
    Lines {
        /// Before each tile and behind the whole image.
        around: &'static str,
        /// Before the rows of the whole image.
        whole: &'static str,
    },
    /// The whole image, then its parts.
    Parts {
        /// Before and behind the rows of each.
        around: [&'static str; 2],
        /// Before the whole image, where there are parts.
        whole: &'static str,
        /// Between the whole image and its parts.
        parts: &'static str,
    },
}

impl TileText {
    /// Text of `[lines, columns]` tiles and the whole image, or of that alone for `[0, 0]`; `rows` stands for the rows of each.
    pub(super) fn of(self, [lines, columns]: [u32; 2], rows: &str) -> String {
        match self {
            Self::Lines { around, whole } => {
                let mut text = String::new();
                for line in 1..=lines {
                    for column in 1..=columns {
                        text.push_str(&format!("{around}<row_{line}_col_{column}>{rows}"));
                    }
                    text.push('\n');
                }
                if lines > 0 {
                    text.push('\n');
                }
                text + &format!("{around}{whole}{rows}{around}")
            }
            Self::Parts { around: [before, after], whole, parts } => {
                let one = format!("{before}{rows}{after}");
                match lines * columns {
                    0 => one,
                    n => format!("{whole}{one}{parts}{}", vec![one.as_str(); n as usize].join(" ")),
                }
            }
        }
    }
}

/// Languages of Qwen3-ASR, by the names that it writes.
const QWEN_ASR_LANGUAGES: [[&str; 2]; 30] = [
    ["ar", "Arabic"],
    ["cs", "Czech"],
    ["da", "Danish"],
    ["de", "German"],
    ["el", "Greek"],
    ["en", "English"],
    ["es", "Spanish"],
    ["fa", "Persian"],
    ["fi", "Finnish"],
    ["fil", "Filipino"],
    ["fr", "French"],
    ["hi", "Hindi"],
    ["hu", "Hungarian"],
    ["id", "Indonesian"],
    ["it", "Italian"],
    ["ja", "Japanese"],
    ["ko", "Korean"],
    ["mk", "Macedonian"],
    ["ms", "Malay"],
    ["nl", "Dutch"],
    ["pl", "Polish"],
    ["pt", "Portuguese"],
    ["ro", "Romanian"],
    ["ru", "Russian"],
    ["sv", "Swedish"],
    ["th", "Thai"],
    ["tr", "Turkish"],
    ["vi", "Vietnamese"],
    ["yue", "Cantonese"],
    ["zh", "Chinese"],
];

impl PlaceholderSpec {
    /// Qwen2-VL, Qwen2.5-VL, Qwen3-VL, by the part that times have.
    pub const fn qwen(times: FrameTimes) -> Self {
        let row = TokenName { keys: &["video_token_id"], text: "<|video_pad|>" };
        Self {
            modality: Modality::Image,
            image: TokenName { keys: &["image_token_id"], text: "<|image_pad|>" },
            written: None,
            around: Some([
                TokenName { keys: &["vision_start_token_id"], text: "<|vision_start|>" },
                TokenName { keys: &["vision_end_token_id"], text: "<|vision_end|>" },
            ]),
            positions: RowPositions::Grid,
            transcription: None,
            video: Some(VideoPlaceholder { row, times }),
        }
    }

    /// GLM-OCR.
    pub const GLM: Self = Self {
        modality: Modality::Image,
        image: TokenName { keys: &["image_token_id"], text: "<|image|>" },
        written: None,
        around: Some([
            TokenName { keys: &["image_start_token_id"], text: "<|begin_of_image|>" },
            TokenName { keys: &["image_end_token_id"], text: "<|end_of_image|>" },
        ]),
        positions: RowPositions::Grid,
        transcription: None,
        video: None,
    };
    /// LLaVA-1.5, LLaVA-NeXT, DeepSeek-OCR-2.
    pub const LLAVA: Self = Self {
        modality: Modality::Image,
        image: TokenName { keys: &["image_token_index", "image_token_id"], text: "<image>" },
        written: None,
        around: None,
        positions: RowPositions::Text,
        transcription: None,
        video: None,
    };

    /// LightOnOCR.
    pub const LIGHTON_OCR: Self =
        Self { image: TokenName { keys: &["image_token_id"], text: "<|image_pad|>" }, ..Self::LLAVA };

    /// Qwen2-Audio.
    pub const QWEN_AUDIO: Self = Self {
        modality: Modality::Audio,
        image: TokenName { keys: &["audio_token_index", "audio_token_id"], text: "<|AUDIO|>" },
        written: None,
        around: Some([
            TokenName { keys: &[], text: "<|audio_bos|>" },
            TokenName { keys: &[], text: "<|audio_eos|>" },
        ]),
        positions: RowPositions::Text,
        transcription: None,
        video: None,
    };

    /// Qwen3-ASR.
    pub const QWEN_ASR: Self = Self {
        modality: Modality::Audio,
        image: TokenName { keys: &["audio_token_id"], text: "<|audio_pad|>" },
        written: None,
        around: Some([
            TokenName { keys: &[], text: "<|audio_start|>" },
            TokenName { keys: &[], text: "<|audio_end|>" },
        ]),
        positions: RowPositions::Text,
        transcription: Some(TranscriptionSpec::Chat(TranscriptionChat {
            around_language: ["language ", "<asr_text>"],
            languages: &QWEN_ASR_LANGUAGES,
        })),
        video: None,
    };

    /// Voxtral.
    pub const VOXTRAL: Self = Self {
        modality: Modality::Audio,
        image: TokenName { keys: &["audio_token_id"], text: "[AUDIO]" },
        written: None,
        around: None,
        positions: RowPositions::Text,
        transcription: Some(TranscriptionSpec::Tokens(TranscriptionTokens {
            before: "<s>[INST][BEGIN_AUDIO]",
            after: "[/INST]",
            language: "lang:",
            end: "[TRANSCRIBE]",
        })),
        video: None,
    };

    /// InternVL.
    pub const INTERNVL: Self = Self {
        modality: Modality::Image,
        image: TokenName { keys: &["image_token_id"], text: "<IMG_CONTEXT>" },
        written: None,
        around: None,
        positions: RowPositions::Between(["<img>", "</img>"]),
        transcription: None,
        video: None,
    };

    /// Pixtral and Mistral Small 3.1, whose rows are squares of `merge_size` patches a side.
    pub const fn pixtral(merge_size: u32) -> Self {
        let lines = LineLayout { merge_size, end_of_line: "[IMG_BREAK]", end_of_image: "[IMG_END]" };
        Self {
            modality: Modality::Image,
            image: TokenName { keys: &["image_token_index", "image_token_id"], text: "[IMG]" },
            written: None,
            around: None,
            positions: RowPositions::Lines(lines),
            transcription: None,
            video: None,
        }
    }

    /// Idefics3 and SmolVLM: tiles of `grid` patches and `n_rows` rows.
    pub const fn idefics(grid: [u32; 2], n_rows: u32) -> Self {
        let text = TileText::Lines { around: "<fake_token_around_image>", whole: "<global-img>" };
        Self {
            modality: Modality::Image,
            image: TokenName { keys: &["image_token_id"], text: "<image>" },
            written: None,
            around: None,
            positions: RowPositions::Tiles(TileLayout { text, grid, n_rows }),
            transcription: None,
            video: None,
        }
    }

    /// Step3: parts of `grid` patches, and rows of a part and of the whole image.
    pub const fn step3(grid: [u32; 2], n_rows: [u32; 2]) -> Self {
        let parts = PartsLayout {
            grid,
            n_rows,
            around_part: ["<patch_start>", "<patch_end>"],
            end_of_line: "<patch_newline>",
            around_whole: ["<im_start>", "<im_end>"],
        };
        Self {
            modality: Modality::Image,
            image: TokenName { keys: &["image_token_id"], text: "<im_patch>" },
            written: None,
            around: None,
            positions: RowPositions::Parts(parts),
            transcription: None,
            video: None,
        }
    }

    /// Gemma 3: tiles of `grid` patches and `n_rows` rows.
    pub const fn gemma(grid: [u32; 2], n_rows: u32) -> Self {
        let text = TileText::Parts {
            around: ["\n\n<start_of_image>", "<end_of_image>\n\n"],
            whole: "Here is the original image ",
            parts: " and here are some crops to help you see better ",
        };
        Self {
            modality: Modality::Image,
            image: TokenName { keys: &["image_token_index", "image_token_id"], text: "<image_soft_token>" },
            written: Some(TokenName { keys: &["boi_token_index", "boi_token_id"], text: "<start_of_image>" }),
            around: None,
            positions: RowPositions::Tiles(TileLayout { text, grid, n_rows }),
            transcription: None,
            video: None,
        }
    }
}
