//! Addresses of vLLM servers: `vllm+http://HOST:PORT`, or `vllm+https://`, and what the server does not tell of itself.

use std::collections::BTreeSet;
use std::str::FromStr;
use thiserror::Error;
use triptych_core::Modality;
use triptych_core::prompt::{ReasoningSyntax, ToolSyntax};
use url::Url;

/// Start of every address.
const PREFIX: &str = "vllm+";
/// Requests that a server is given at once unless its address says otherwise: vLLM queues them.
const CAPACITY: u32 = 1024;

const ITEMS: &[(&str, Modality)] =
    &[("image", Modality::Image), ("audio", Modality::Audio), ("video", Modality::Video)];
const TOOLS: &[(&str, ToolSyntax)] = &[
    ("hermes", ToolSyntax::Hermes),
    ("llama3_json", ToolSyntax::Llama3Json),
    ("mistral", ToolSyntax::Mistral),
    ("qwen3_coder", ToolSyntax::Qwen3Coder),
    ("glm45", ToolSyntax::Glm45),
];
const REASONING: &[(&str, ReasoningSyntax)] =
    &[("think", ReasoningSyntax::ThinkTags), ("mistral", ReasoningSyntax::Mistral)];

/// Address of a vLLM server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VllmAddress {
    /// Its URL, without path and query.
    pub(crate) url: Url,
    /// Items that its models read.
    pub(crate) items: BTreeSet<Modality>,
    /// Syntax in which its models call tools; `None`: they are shown none.
    pub(crate) tools: Option<ToolSyntax>,
    /// Marks around its models' reasoning; `None`: there are none, or the server reads them.
    pub(crate) reasoning: Option<ReasoningSyntax>,
    /// Requests that it is given at once.
    pub(crate) capacity: u32,
    /// True if it schedules by priority.
    pub(crate) has_priorities: bool,
}

/// A text that is no address of a vLLM server.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AddressError {
    /// Not a URL of the form.
    #[error("{0:?} is not vllm+http://HOST:PORT or vllm+https://HOST:PORT, with options behind ?")]
    Form(String),
    /// An option that there is not.
    #[error(
        "{0:?} is no option of a vLLM server; allowed are items, tools, reasoning, capacity and priorities"
    )]
    Option(String),
    /// A value that an option does not take.
    #[error("{value:?} is not allowed for {option}; allowed are {allowed}")]
    Value {
        /// Name of the option.
        option: &'static str,
        /// As given.
        value: String,
        /// The allowed values.
        allowed: String,
    },
}

impl VllmAddress {
    /// True if a text is meant as the address of a vLLM server.
    pub fn is_meant(text: &str) -> bool {
        text.starts_with(PREFIX)
    }

    fn set(&mut self, option: &str, value: &str) -> Result<(), AddressError> {
        match option {
            "items" if value == "none" => self.items.clear(),
            "items" => {
                self.items = value
                    .split(['+', ' '])
                    .map(|item| one_of("items", item, ITEMS))
                    .collect::<Result<_, _>>()?;
            }
            "tools" => self.tools = Some(one_of("tools", value, TOOLS)?),
            "reasoning" => self.reasoning = Some(one_of("reasoning", value, REASONING)?),
            "capacity" => {
                let wrong = || wrong("capacity", value, "1 to 1000000".into());
                self.capacity =
                    value.parse().ok().filter(|n| (1..=1_000_000).contains(n)).ok_or_else(wrong)?;
            }
            "priorities" => {
                self.has_priorities = one_of("priorities", value, &[("true", true), ("false", false)])?;
            }
            other => return Err(AddressError::Option(other.to_owned())),
        }
        Ok(())
    }
}

impl FromStr for VllmAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let form = || AddressError::Form(text.to_owned());
        let mut url = Url::parse(text.strip_prefix(PREFIX).ok_or_else(form)?).map_err(|_| form())?;
        let is_plain = matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.path() == "/"
            && url.username().is_empty()
            && url.password().is_none()
            && url.fragment().is_none();
        if !is_plain {
            return Err(form());
        }
        let options: Vec<(String, String)> = url.query_pairs().into_owned().collect();
        url.set_query(None);
        let mut address = Self {
            url,
            items: BTreeSet::from([Modality::Image]),
            tools: None,
            reasoning: None,
            capacity: CAPACITY,
            has_priorities: false,
        };
        options.iter().try_for_each(|(option, value)| address.set(option, value))?;
        Ok(address)
    }
}

fn one_of<T: Copy>(option: &'static str, value: &str, allowed: &[(&str, T)]) -> Result<T, AddressError> {
    let found = allowed.iter().find(|(name, _)| *name == value);
    let names = || allowed.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    found.map(|(_, one)| *one).ok_or_else(|| wrong(option, value, names()))
}

fn wrong(option: &'static str, value: &str, allowed: String) -> AddressError {
    AddressError::Value { option, value: value.to_owned(), allowed }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<VllmAddress, String> {
        text.parse().map_err(|e: AddressError| e.to_string())
    }

    #[test]
    fn options_of_an_address_are_read() {
        let plain = read("vllm+http://10.0.0.7:8200").unwrap();
        assert_eq!(plain.url.as_str(), "http://10.0.0.7:8200/");
        assert_eq!((plain.items, plain.tools), (BTreeSet::from([Modality::Image]), None));
        let all =
            "vllm+https://gpu:8200?items=image+video&tools=hermes&reasoning=think&capacity=7&priorities=true";
        let all = read(all).unwrap();
        assert_eq!(all.items, BTreeSet::from([Modality::Image, Modality::Video]));
        assert_eq!((all.tools, all.reasoning), (Some(ToolSyntax::Hermes), Some(ReasoningSyntax::ThinkTags)));
        assert_eq!((all.capacity, all.has_priorities, all.url.scheme()), (7, true, "https"));
        assert!(read("vllm+http://gpu:1?items=none").unwrap().items.is_empty());
    }

    #[test]
    fn what_is_no_address_is_refused_with_what_is_allowed() {
        for (text, says) in [
            ("http://gpu:8200", "vllm+http://"),
            ("vllm+ftp://gpu:8200", "vllm+http://"),
            ("vllm+http://gpu:8200/v1", "vllm+http://"),
            ("vllm+http://user:secret@gpu:8200", "vllm+http://"),
            ("vllm+http://", "vllm+http://"),
            ("vllm+http://gpu:1?model=x", "items, tools, reasoning, capacity and priorities"),
            ("vllm+http://gpu:1?items=smell", "image, audio, video"),
            ("vllm+http://gpu:1?tools=x", "hermes"),
            ("vllm+http://gpu:1?capacity=0", "1 to 1000000"),
            ("vllm+http://gpu:1?priorities=1", "true, false"),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.contains(says), "{text}: {refused}");
        }
    }
}
