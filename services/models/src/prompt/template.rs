//! A model's chat template, rendered as transformers renders it
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/utils/chat_template_utils.py>).
//!
//! It knows no tokens: messages go in, one string comes out.

mod tekken;
mod time;

use crate::error::{ModelError, PromptError};
use crate::files::JsonFile;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use std::path::Path;
use std::time::SystemTime;
use triptych_core::Modality;

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const NAME: &str = "chat_template";
const SOURCES: &str = "a template, or a list of {name, template}";

/// A compiled chat template, with the special tokens that it may refer to.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and the like, by key.
    specials: Vec<(&'static str, String)>,
    format: ContentFormat,
}

/// Form of a message's content that a template reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// A list of parts, as templates of models with items expect.
    Parts,
    /// One string, as templates of text models expect: texts of a message, a line each.
    String,
}

/// A message: its role and its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateMessage<'a> {
    /// Role of the author, such as `user`.
    pub role: &'a str,
    /// Parts of the message, in order.
    pub content: Vec<TemplatePart>,
}

/// A part of a message as templates see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplatePart {
    /// `{type: "text", text}`.
    Text(String),
    /// `{type: "image"}`, or of another kind.
    Item(Modality),
}

impl ChatTemplate {
    /// Reads the template of a model directory: `chat_template.jinja`, or `chat_template.json`, or the key
    /// `chat_template` of `tokenizer_config.json`; of several by name, the one called `default`. A directory with
    /// `tekken.json` and none of these has the template that goes with it.
    ///
    /// # Errors
    /// [`ModelError`] if there is none, or it does not compile.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let config = JsonFile::read_or_empty(dir, TOKENIZER_CONFIG)?;
        let missing = || config.wrong(NAME, SOURCES);
        Self::find(dir, ContentFormat::Parts)?.ok_or_else(missing)
    }

    /// The same, where contents have `format`; `None` if the directory has no template.
    ///
    /// # Errors
    /// [`ModelError`] if it does not compile, or is neither a template nor a list of them.
    pub fn find(dir: &Path, format: ContentFormat) -> Result<Option<Self>, ModelError> {
        let config = JsonFile::read_or_empty(dir, TOKENIZER_CONFIG)?;
        let Some(source) = find_source(dir, &config)? else { return Ok(None) };
        let specials = ["bos_token", "eos_token", "pad_token", "unk_token"]
            .into_iter()
            .filter_map(|key| {
                let token = config.get(key)?;
                let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
                Some((key, text.to_owned()))
            })
            .collect();
        let template = Self::new(source, specials, SystemTime::now)
            .map_err(|e| ModelError::Format { path: dir.join(NAME), message: format!("{e:#}") })?;
        Ok(Some(Self { format, ..template }))
    }

    /// Compiles a template. `now` is the clock of `strftime_now`.
    fn new(
        source: String,
        specials: Vec<(&'static str, String)>,
        now: fn() -> SystemTime,
    ) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", move |format: String| time::format(&format, now()));
        environment.add_template_owned(NAME, without_generation(&source))?;
        Ok(Self { environment, specials, format: ContentFormat::Parts })
    }

    /// Renders messages up to where the assistant begins to write.
    ///
    /// # Errors
    /// [`PromptError::Template`] if the template refuses them.
    pub fn render(&self, messages: &[TemplateMessage<'_>]) -> Result<String, PromptError> {
        let mut context: Vec<(&str, Value)> = vec![
            ("messages", messages.iter().map(|message| self.message_value(message)).collect()),
            ("add_generation_prompt", Value::from(true)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ];
        context.extend(self.specials.iter().map(|(key, text)| (*key, Value::from(text.as_str()))));
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from_pairs(context)))
            .map_err(|e| PromptError::Template(e.detail().map_or_else(|| e.to_string(), str::to_owned)))
    }

    fn message_value(&self, message: &TemplateMessage<'_>) -> Value {
        let part = |part: &TemplatePart| match part {
            TemplatePart::Text(text) => Value::from_pairs([("type", "text"), ("text", text.as_str())]),
            TemplatePart::Item(modality) => Value::from_pairs([("type", modality.as_str())]),
        };
        let text = |part: &TemplatePart| match part {
            TemplatePart::Text(text) => Some(text.clone()),
            TemplatePart::Item(_) => None,
        };
        let content: Value = match self.format {
            ContentFormat::Parts => message.content.iter().map(part).collect(),
            ContentFormat::String => {
                Value::from(message.content.iter().filter_map(text).collect::<Vec<_>>().join("\n"))
            }
        };
        Value::from_pairs([("role", Value::from(message.role)), ("content", content)])
    }
}

/// A template whose blocks `generation`, by which transformers marks the assistant's words for training, are plain blocks.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, after)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        let Some((tag, behind)) = after.split_once("%}") else {
            rest = after;
            break;
        };
        // With its marks of whitespace control.
        let name = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match name {
            "generation" => out.push_str(&tag.replace(name, "if true")),
            "endgeneration" => out.push_str(&tag.replace(name, "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = behind;
    }
    out.push_str(rest);
    out
}

/// The text of a directory's template; `None` without one.
fn find_source(dir: &Path, config: &JsonFile) -> Result<Option<String>, ModelError> {
    let path = dir.join("chat_template.jinja");
    match std::fs::read_to_string(&path) {
        Ok(source) => return Ok(Some(source)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(source) => return Err(ModelError::File { path, source }),
    }
    let own = JsonFile::read_or_empty(dir, "chat_template.json")?;
    let Some(found) = own.get(NAME).or_else(|| config.get(NAME)) else {
        return Ok(dir.join(tekken::FILE).is_file().then(|| tekken::TEMPLATE.to_owned()));
    };
    let by_name = |list: &[serde_json::Value]| {
        let default = list.iter().find(|t| t["name"] == "default").or_else(|| list.first())?;
        default["template"].as_str().map(str::to_owned)
    };
    let source = found.as_str().map(str::to_owned).or_else(|| by_name(found.as_array()?));
    source.map(Some).ok_or_else(|| config.wrong(NAME, SOURCES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn render(source: &str, texts: &[(&str, &str)]) -> Result<String, PromptError> {
        let then = || SystemTime::UNIX_EPOCH + Duration::from_secs(1_721_952_000);
        let template =
            ChatTemplate::new(source.to_owned(), vec![("eos_token", "</s>".into())], then).unwrap();
        let messages: Vec<_> = texts
            .iter()
            .map(|(role, text)| TemplateMessage {
                role,
                content: vec![TemplatePart::Text((*text).to_owned()), TemplatePart::Item(Modality::Image)],
            })
            .collect();
        template.render(&messages)
    }

    #[test]
    fn blocks_trim_and_methods_work_as_in_python() {
        let source = "  {% for m in messages %}\n{{ m['role'].upper() }}: {{ m.content[0].text.strip() }}\
            {{ eos_token }}{{ m.content[1]['type'] }}{{ 'text' in m.content[1] }}\n  {% endfor %}\n\
            {% if add_generation_prompt and not tools %}go{% endif %}\n";
        let got = render(source, &[("user", " hi "), ("assistant", "x")]);
        let expect = "USER: hi</s>imageFalse\nASSISTANT: x</s>imageFalse\ngo";
        assert_eq!(got.unwrap(), expect);
    }

    #[test]
    fn words_marked_for_training_are_words() {
        let source = "{% for m in messages %}[{% generation %}{{ m.role }}{% endgeneration %}]{% endfor %}\
            <{%- generation -%} x {%- endgeneration -%} >{{ '{% generation %}' }}{% if";
        let got = without_generation(source);
        assert_eq!(got.matches("if true").count(), 3, "{got}");
        let source = "{% for m in messages %}[{% generation %}{{ m.role }}{% endgeneration %}] {% endfor %}\
            <{%- generation -%} x {%- endgeneration -%} >";
        assert_eq!(render(source, &[("user", ""), ("assistant", "")]).unwrap(), "[user] [assistant] <x>");
    }

    #[test]
    fn a_template_can_refuse_and_print_the_date() {
        let refused = render("{{ raise_exception('roles must alternate') }}", &[]);
        assert_eq!(refused, Err(PromptError::Template("roles must alternate".into())));
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &[]).unwrap(), "26 Jul 2024");
    }
}
