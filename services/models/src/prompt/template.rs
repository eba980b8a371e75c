//! A model's chat template, rendered as transformers renders it
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/utils/chat_template_utils.py>).
//!
//! It knows no tokens: messages go in, one string comes out.

mod format;
mod json;
mod tekken;
mod time;

use crate::error::{ModelError, PromptError};
use crate::files::JsonFile;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use std::path::Path;
use std::time::SystemTime;
use triptych_core::Modality;
use triptych_core::prompt::{ChatEnding, ChatFormat};

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const NAME: &str = "chat_template";
/// Name of the template that is used where there are tools, beside the default one.
const TOOL_USE: &str = "tool_use";
const SOURCES: &str = "a template, or a list of {name, template}";

/// Instructions that a template of a request may run; published ones run some hundreds for each message.
const MAX_INSTRUCTIONS: u64 = 1_000_000;

/// A compiled chat template, with the special tokens that it may refer to.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and the like, by key.
    specials: Vec<(&'static str, String)>,
    content: ContentFormat,
    format: ChatFormat,
    /// True if there is a template for conversations with tools.
    has_tool_use: bool,
}

/// Form of a message's content that a template reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// A list of parts, as templates of models with items expect.
    Parts,
    /// One string, as templates of text models expect: texts of a message, a line each.
    String,
    /// The same with a line for each item before them, the text that stands for one: what clients of vLLM send to a model
    /// with items whose template is that of a text model.
    StringWithItems(&'static str),
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
    /// `reasoning_content` of the message.
    Reasoning(String),
    /// One of the message's `tool_calls`.
    ToolCall {
        /// Its id; empty without one.
        id: String,
        /// Name of the tool.
        name: String,
        /// Arguments.
        arguments: serde_json::Value,
    },
    /// `tool_call_id` and `name` of the message; each empty without one.
    ResultOf {
        /// The call.
        id: String,
        /// Name of the tool.
        name: String,
    },
}

/// Everything that a template is rendered with.
#[derive(Clone, Debug, Default)]
pub struct TemplateInput<'a> {
    /// The messages.
    pub messages: Vec<TemplateMessage<'a>>,
    /// Tools as `{type: "function", function}`; empty: none.
    pub tools: Vec<serde_json::Value>,
    /// Documents; `None`: none.
    pub documents: Option<serde_json::Value>,
    /// Variables by name; those of the template itself come before them.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// End of the text.
    pub ending: ChatEnding,
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
        let Some(sources) = TemplateSources::find(dir, &config)? else { return Ok(None) };
        let specials = ["bos_token", "eos_token", "pad_token", "unk_token"]
            .into_iter()
            .filter_map(|key| {
                let token = config.get(key)?;
                let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
                Some((key, text.to_owned()))
            })
            .collect();
        let template = Self::new(sources, specials, SystemTime::now)
            .map_err(|e| ModelError::Format { path: dir.join(NAME), message: format!("{e:#}") })?;
        Ok(Some(Self { content: format, ..template }))
    }

    /// A template that code has where no file of `dir` says it.
    ///
    /// # Errors
    /// [`ModelError::Format`] if it does not compile.
    pub(super) fn of_code(source: &str, dir: &Path) -> Result<Self, ModelError> {
        Self::new(source.to_owned().into(), Vec::new(), SystemTime::now)
            .map_err(|e| ModelError::Format { path: dir.join(NAME), message: format!("{e:#}") })
    }

    /// Compiles a template. `now` is the clock of `strftime_now`.
    fn new(
        sources: TemplateSources,
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
        environment.add_filter("tojson", json::tojson);
        let format_source = sources.tool_use.as_ref().unwrap_or(&sources.default).clone();
        let has_tool_use = sources.tool_use.is_some();
        environment.add_template_owned(NAME, without_generation(&sources.default))?;
        if let Some(source) = &sources.tool_use {
            environment.add_template_owned(TOOL_USE, without_generation(source))?;
        }
        let of_format = environment.get_template(if has_tool_use { TOOL_USE } else { NAME })?;
        let variables = of_format.undeclared_variables(false);
        let format = format::format_of(&format_source, |name| variables.contains(name));
        Ok(Self { environment, specials, content: ContentFormat::Parts, format, has_tool_use })
    }

    /// The same template, for contents of another format.
    #[must_use]
    pub fn with_contents(self, content: ContentFormat) -> Self {
        Self { content, ..self }
    }

    /// A template of a request, with this one's special tokens and form of contents.
    ///
    /// Its instructions are bounded, its memory is not: who may send one is trusted so far.
    ///
    /// # Errors
    /// [`PromptError::Template`] if it does not compile.
    pub fn replaced_by(&self, source: &str) -> Result<Self, PromptError> {
        let refused = |e: Error| PromptError::Template(format!("chat_template: {e}"));
        let own = Self::new(source.to_owned().into(), self.specials.clone(), SystemTime::now);
        let mut own = own.map_err(refused)?;
        own.environment.set_fuel(Some(MAX_INSTRUCTIONS));
        Ok(own.with_contents(self.content))
    }

    /// The format of its conversations.
    pub fn format(&self) -> ChatFormat {
        self.format
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`PromptError::Template`] if the template refuses it; [`PromptError::Invalid`] if it is to end with an open message
    /// that the template does not show.
    pub fn render(&self, input: &TemplateInput<'_>) -> Result<String, PromptError> {
        let none = || Value::from(());
        let tools = Some(&input.tools).filter(|tools| !tools.is_empty());
        let mut context: Vec<(&str, Value)> = input
            .variables
            .iter()
            .map(|(name, value)| (name.as_str(), json::template_value(value)))
            .collect();
        context.extend([
            ("messages", input.messages.iter().map(|message| self.message_value(message)).collect()),
            ("add_generation_prompt", Value::from(input.ending == ChatEnding::GenerationPrompt)),
            ("tools", tools.map_or_else(none, |tools| tools.iter().map(json::template_value).collect())),
            ("documents", input.documents.as_ref().map_or_else(none, json::template_value)),
        ]);
        context.extend(self.specials.iter().map(|(key, text)| (*key, Value::from(text.as_str()))));
        let name = if self.has_tool_use && tools.is_some() { TOOL_USE } else { NAME };
        let text = self
            .environment
            .get_template(name)
            .and_then(|template| template.render(Value::from_pairs(context)))
            .map_err(|e| PromptError::Template(e.detail().map_or_else(|| e.to_string(), str::to_owned)))?;
        match input.ending {
            ChatEnding::OpenMessage => open(text, input.messages.last()),
            ChatEnding::GenerationPrompt | ChatEnding::LastMessage => Ok(text),
        }
    }

    fn message_value(&self, message: &TemplateMessage<'_>) -> Value {
        let text = |part: &TemplatePart| match part {
            TemplatePart::Text(text) => Some(text.clone()),
            _ => None,
        };
        let content: Value = match self.content {
            ContentFormat::Parts => message.content.iter().filter_map(content_value).collect(),
            ContentFormat::String => {
                Value::from(message.content.iter().filter_map(text).collect::<Vec<_>>().join("\n"))
            }
            ContentFormat::StringWithItems(item) => {
                let items = message.content.iter().filter(|part| matches!(part, TemplatePart::Item(_)));
                let lines = items.map(|_| item.to_owned()).chain(message.content.iter().filter_map(text));
                Value::from(lines.collect::<Vec<_>>().join("\n"))
            }
        };
        let mut fields = vec![("role", Value::from(message.role)), ("content", content)];
        let mut calls = Vec::new();
        for part in &message.content {
            match part {
                TemplatePart::Text(_) | TemplatePart::Item(_) => {}
                TemplatePart::Reasoning(text) => {
                    fields.push(("reasoning_content", Value::from(text.as_str())));
                }
                TemplatePart::ToolCall { id, name, arguments } => calls.push(call_value(id, name, arguments)),
                TemplatePart::ResultOf { id, name } => {
                    let named = [("tool_call_id", id), ("name", name)];
                    let given = named.into_iter().filter(|(_, text)| !text.is_empty());
                    fields.extend(given.map(|(key, text)| (key, Value::from(text.as_str()))));
                }
            }
        }
        if !calls.is_empty() {
            fields.push(("tool_calls", Value::from(calls)));
        }
        Value::from_pairs(fields)
    }
}

/// A part of a message's content; `None` for what is another field of the message.
fn content_value(part: &TemplatePart) -> Option<Value> {
    match part {
        TemplatePart::Text(text) => Some(Value::from_pairs([("type", "text"), ("text", text.as_str())])),
        TemplatePart::Item(modality) => Some(Value::from_pairs([("type", modality.as_str())])),
        _ => None,
    }
}

/// A call as OpenAI's clients write it, with arguments that are an object.
fn call_value(id: &str, name: &str, arguments: &serde_json::Value) -> Value {
    let function = [("name", Value::from(name)), ("arguments", json::template_value(arguments))];
    let call = [("type", Value::from("function")), ("function", Value::from_pairs(function))];
    let id = Some(("id", Value::from(id))).filter(|_| !id.is_empty());
    Value::from_pairs(id.into_iter().chain(call))
}

/// The text up to the end of its last message's own text, as transformers cuts it.
fn open(mut text: String, last: Option<&TemplateMessage<'_>>) -> Result<String, PromptError> {
    let texts = last.into_iter().flat_map(|message| message.content.iter().rev());
    let content = texts.into_iter().find_map(|part| match part {
        TemplatePart::Text(text) => Some(text.as_str()),
        _ => None,
    });
    let content = content
        .ok_or_else(|| PromptError::Invalid("the last message has no text that could go on".into()))?;
    let at = text.rfind(content.trim()).ok_or_else(|| {
        PromptError::Invalid("the chat template does not show the last message as it is".into())
    })?;
    // White space at its end stays if the template keeps it.
    let whole = content.trim_start();
    let len = if text[at..].starts_with(whole) { whole.len() } else { content.trim().len() };
    text.truncate(at + len);
    Ok(text)
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

/// The texts of a directory's templates.
struct TemplateSources {
    default: String,
    /// The one for conversations with tools, where there are two.
    tool_use: Option<String>,
}

impl From<String> for TemplateSources {
    fn from(default: String) -> Self {
        Self { default, tool_use: None }
    }
}

impl TemplateSources {
    /// Those of a directory; `None` without any.
    fn find(dir: &Path, config: &JsonFile) -> Result<Option<Self>, ModelError> {
        let path = dir.join("chat_template.jinja");
        match std::fs::read_to_string(&path) {
            Ok(source) => return Ok(Some(source.into())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(ModelError::File { path, source }),
        }
        let own = JsonFile::read_or_empty(dir, "chat_template.json")?;
        let Some(found) = own.get(NAME).or_else(|| config.get(NAME)) else {
            return Ok(dir.join(tekken::FILE).is_file().then(|| tekken::TEMPLATE.to_owned().into()));
        };
        let by_name = |list: &[serde_json::Value]| {
            let named = |name: &str| list.iter().find(|t| t["name"] == name);
            let text = |t: &serde_json::Value| t["template"].as_str().map(str::to_owned);
            let default = text(named("default").or_else(|| list.first())?)?;
            Some(Self { default, tool_use: named(TOOL_USE).and_then(text) })
        };
        let one = found.as_str().map(|source| source.to_owned().into());
        let sources = one.or_else(|| by_name(found.as_array()?));
        sources.map(Some).ok_or_else(|| config.wrong(NAME, SOURCES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn render(source: &str, texts: &[(&str, &str)]) -> Result<String, PromptError> {
        let then = || SystemTime::UNIX_EPOCH + Duration::from_secs(1_721_952_000);
        let template =
            ChatTemplate::new(source.to_owned().into(), vec![("eos_token", "</s>".into())], then).unwrap();
        let messages: Vec<_> = texts
            .iter()
            .map(|(role, text)| TemplateMessage {
                role,
                content: vec![TemplatePart::Text((*text).to_owned()), TemplatePart::Item(Modality::Image)],
            })
            .collect();
        template.render(&TemplateInput { messages, ..TemplateInput::default() })
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
    fn items_are_lines_before_the_texts_of_a_string() {
        let source = "{% for m in messages %}{{ m.content + '|' }}{% endfor %}".to_owned();
        let template = ChatTemplate::new(source.into(), Vec::new(), SystemTime::now).unwrap();
        let [text, item] =
            [TemplatePart::Text("two".into()), TemplatePart::Item(Modality::Image)].map(|part| vec![part]);
        let of = |content: &[Vec<TemplatePart>]| TemplateMessage { role: "user", content: content.concat() };
        let messages = [of(&[text.clone(), item.clone(), item]), of(&[text.clone(), text])];
        let got = template
            .with_contents(ContentFormat::StringWithItems("<x>"))
            .render(&TemplateInput { messages: messages.into(), ..TemplateInput::default() });
        assert_eq!(got.unwrap(), "<x>\n<x>\ntwo|two\ntwo|");
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
    fn a_template_of_a_request_is_bounded_and_keeps_the_special_tokens() {
        let specials = vec![("eos_token", "</s>".to_owned())];
        let own = ChatTemplate::new("x".to_owned().into(), specials, SystemTime::now).unwrap();
        let render = |source: &str| {
            own.replaced_by(source).and_then(|template| template.render(&TemplateInput::default()))
        };
        assert_eq!(render("hi{{ eos_token }}").unwrap(), "hi</s>");
        let loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}";
        for (source, expect) in [("{% if", "chat_template: syntax error"), (loops, "fuel")] {
            let refused = render(source).unwrap_err().to_string();
            assert!(refused.contains(expect), "{refused}");
        }
    }

    #[test]
    fn a_template_can_refuse_and_print_the_date() {
        let refused = render("{{ raise_exception('roles must alternate') }}", &[]);
        assert_eq!(refused, Err(PromptError::Template("roles must alternate".into())));
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &[]).unwrap(), "26 Jul 2024");
    }
}
