//! Whisper's task tokens: from `generation_config.json` where it names them, else by their spelling.

mod language_names;

use crate::error::ModelError;
use crate::files::JsonFile;
use crate::prompt::generation::GenerationFiles;
use crate::tokenization::{LanguageTokens, Tokenizer};

/// The vocabulary of the first published multilingual models; English-only ones are smaller.
const MULTILINGUAL_VOCAB: u32 = 51_865;

/// Tokens that make up a task.
#[derive(Clone, Debug)]
pub(super) struct WhisperTokens {
    /// `<|startoftranscript|>`.
    pub(super) start: u32,
    /// `<|startofprev|>`.
    pub(super) start_of_previous: Option<u32>,
    /// `<|transcribe|>`.
    pub(super) transcribe: Option<u32>,
    /// `<|translate|>`.
    pub(super) translate: Option<u32>,
    /// `<|notimestamps|>`; 0.00 s is the token after it.
    pub(super) no_timestamps: Option<u32>,
    /// `<|nospeech|>`, which older vocabularies spell `<|nocaptions|>`.
    pub(super) no_speech: Option<u32>,
    /// None for English-only models, whose vocabulary names languages all the same.
    pub(super) languages: LanguageTokens,
    /// The language of requests that name none; `None`: the model finds it.
    pub(super) default_language: Option<u32>,
}

impl WhisperTokens {
    pub(super) fn read(
        files: &GenerationFiles,
        tokenizer: &Tokenizer,
        vocab: u32,
    ) -> Result<Self, ModelError> {
        let config = &files.config;
        let generation = &files.generation;
        let spelled = |name: &str| tokenizer.token_id(name);
        const START: &str = "decoder_start_token_id";
        let start = match generation.u32(START)? {
            Some(id) => Some(id),
            None => config.u32(START)?.or_else(|| spelled("<|startoftranscript|>")),
        };
        let named = generation.named_ids("lang_to_id")?;
        let multilingual = match generation.bool("is_multilingual")? {
            Some(stated) => stated,
            None => named.is_some() || vocab >= MULTILINGUAL_VOCAB,
        };
        let tasks = generation.named_ids("task_to_id")?.unwrap_or_default();
        let task = |name: &str| {
            let stated = tasks.iter().find(|(task, _)| task == name).map(|(_, id)| *id);
            stated.or_else(|| spelled(&format!("<|{name}|>")))
        };
        let mut words = Self {
            start: start.ok_or_else(|| generation.wrong(START, "a token id"))?,
            start_of_previous: match generation.u32("prev_sot_token_id")? {
                Some(id) => Some(id),
                None => spelled("<|startofprev|>"),
            },
            transcribe: task("transcribe"),
            translate: task("translate"),
            no_timestamps: match generation.u32("no_timestamps_token_id")? {
                Some(id) => Some(id),
                None => spelled("<|notimestamps|>"),
            },
            no_speech: spelled("<|nospeech|>").or_else(|| spelled("<|nocaptions|>")),
            languages: match (multilingual, named) {
                (false, _) => LanguageTokens::default(),
                (true, Some(named)) => {
                    LanguageTokens::new(named.iter().map(|(name, id)| (bare(name).to_owned(), *id)).collect())
                }
                (true, None) => spelled_languages(tokenizer),
            },
            default_language: None,
        };
        words.default_language = default_language(generation, &words.languages)?;
        if multilingual
            && (words.languages.is_empty() || words.transcribe.is_none() || words.translate.is_none())
        {
            return Err(generation.wrong("lang_to_id", "languages and tasks, here or in the tokenizer"));
        }
        // A decoder's table ends where its vocabulary does: ids past it would index nothing.
        let most =
            [Some(words.start), words.start_of_previous, words.no_timestamps].into_iter().flatten().max();
        if most.is_some_and(|id| id >= vocab) || words.languages.tokens().any(|id| id >= vocab) {
            return Err(generation.wrong(START, &format!("task tokens below vocab_size {vocab}")));
        }
        Ok(words)
    }
}

/// The token of `language`, which some directories name for requests that name none: a code, or a language in English.
fn default_language(file: &JsonFile, languages: &LanguageTokens) -> Result<Option<u32>, ModelError> {
    const KEY: &str = "language";
    let Some(value) = file.get(KEY).filter(|_| !languages.is_empty()) else {
        return Ok(None);
    };
    let named = value.as_str().unwrap_or_default().to_ascii_lowercase();
    let code = language_names::code(&named).unwrap_or_else(|| bare(&named));
    languages
        .token(code)
        .map(Some)
        .ok_or_else(|| file.wrong(KEY, "a language of this model, by its code (de) or its name (german)"))
}

/// `<|en|>` to `en`.
fn bare(name: &str) -> &str {
    name.trim_start_matches("<|").trim_end_matches("|>")
}

/// Languages by spelling: `<|xx|>` or `<|xxx|>` between the start token and the tasks.
fn spelled_languages(tokenizer: &Tokenizer) -> LanguageTokens {
    let between = tokenizer.token_id("<|startoftranscript|>").zip(tokenizer.token_id("<|translate|>"));
    let Some((start, translate)) = between else { return LanguageTokens::default() };
    let code = |id: u32| {
        let token = tokenizer.token(id)?;
        let code = token.strip_prefix("<|")?.strip_suffix("|>")?;
        let is_code = (2..=3).contains(&code.len()) && code.bytes().all(|b| b.is_ascii_lowercase());
        is_code.then(|| (code.to_owned(), id))
    };
    LanguageTokens::new((start.saturating_add(1)..translate).filter_map(code).collect())
}
