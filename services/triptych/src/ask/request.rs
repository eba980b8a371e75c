//! The question as a `Generate` request.

use super::args::AskArgs;
use super::items::Item;
use crate::error::CliError;
use triptych_proto::v1;
use triptych_proto::v1::item::Source;
use triptych_proto::v1::part;
use triptych_proto::v1::prompt::{Chat, Kind};

/// Builds it: a conversation of one message with the items before the words, or a speech task.
///
/// # Errors
/// [`CliError::Setting`] if there is nothing to ask.
pub fn build(args: &AskArgs, items: Vec<Item>) -> Result<v1::GenerateRequest, CliError> {
    let kind = match args.text.as_deref().map(str::trim) {
        Some(text) if !text.is_empty() => Kind::Chat(chat(text, items.len())),
        _ if args.audio.is_some() && args.images.is_empty() && args.videos.is_empty() => {
            Kind::Speech(speech(args))
        }
        _ if items.is_empty() => {
            return Err(CliError::Setting(
                "nothing to ask: give a question, and files with --image, --video or --audio".into(),
            ));
        }
        _ => {
            return Err(CliError::Setting(
                "an image needs a question, as in `triptych ask \"What is this?\"`".into(),
            ));
        }
    };
    let item = |item: Item| v1::Item {
        modality: v1::Modality::from(item.modality).into(),
        source: Some(Source::Data(item.data)),
        options: None,
    };
    Ok(v1::GenerateRequest {
        model: args.model.clone(),
        prompt: Some(v1::Prompt { kind: Some(kind) }),
        items: items.into_iter().map(item).collect(),
        sampling: Some(v1::Sampling {
            max_tokens: args.max_tokens,
            temperature: args.temperature,
            seed: args.seed,
            ..Default::default()
        }),
        ..v1::GenerateRequest::default()
    })
}

fn chat(text: &str, n_items: usize) -> Chat {
    let n_items = u32::try_from(n_items).unwrap_or(u32::MAX);
    let mut parts: Vec<_> = (0..n_items).map(|i| v1::Part { kind: Some(part::Kind::Item(i)) }).collect();
    parts.push(v1::Part { kind: Some(part::Kind::Text(text.to_owned())) });
    Chat { messages: vec![v1::Message { role: v1::Role::User.into(), parts }], ..Chat::default() }
}

fn speech(args: &AskArgs) -> v1::SpeechTask {
    let kind = if args.translate { v1::SpeechKind::Translate } else { v1::SpeechKind::Transcribe };
    v1::SpeechTask { kind: kind.into(), language: args.language.clone(), ..v1::SpeechTask::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use bytes::Bytes;
    use clap::Parser;
    use triptych_core::Modality;

    fn ask(flags: &[&str], items: &[Modality]) -> Result<v1::GenerateRequest, CliError> {
        let Command::Ask(args) = Cli::parse_from([&["triptych", "ask"], flags].concat()).command else {
            panic!()
        };
        let item = |&modality| Item { name: "f".into(), modality, data: Bytes::from_static(b"x") };
        build(&args, items.iter().map(item).collect())
    }

    #[test]
    fn images_come_before_the_question() {
        let request =
            ask(&["why?", "--image", "a", "--image", "b"], &[Modality::Image, Modality::Image]).unwrap();
        let Some(Kind::Chat(chat)) = request.prompt.unwrap().kind else { panic!() };
        let parts: Vec<_> = chat.messages[0].parts.iter().map(|p| p.kind.clone().unwrap()).collect();
        assert_eq!(parts, [part::Kind::Item(0), part::Kind::Item(1), part::Kind::Text("why?".into())]);
    }

    #[test]
    fn audio_without_a_question_is_transcribed() {
        let request = ask(&["--audio", "a", "--translate", "--language", "de"], &[Modality::Audio]).unwrap();
        let Some(Kind::Speech(task)) = request.prompt.unwrap().kind else { panic!() };
        assert_eq!(task.kind(), v1::SpeechKind::Translate);
        assert_eq!(task.language.as_deref(), Some("de"));
    }

    #[test]
    fn nothing_to_ask_is_told_before_anybody_is_asked() {
        assert!(matches!(ask(&[], &[]), Err(CliError::Setting(_))));
        assert!(matches!(ask(&[" "], &[]), Err(CliError::Setting(_))));
        assert!(matches!(ask(&["--image", "a"], &[Modality::Image]), Err(CliError::Setting(_))));
    }
}
