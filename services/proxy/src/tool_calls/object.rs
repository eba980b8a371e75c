//! One call as a JSON object, character by character: where its arguments begin and end, and the name of its tool.

use serde::Deserialize;
use serde_json::value::RawValue;

/// The nesting of a JSON text so far. It sees brackets and strings alone, so that what is no JSON has an end too.
#[derive(Clone, Debug, Default)]
pub(super) struct Nesting {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
}

/// Effect of a character on the nesting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// None.
    Inside,
    /// An object began; its depth, from 1.
    Object(usize),
    /// An object or a list ended; the depth that is left.
    Closed(usize),
}

impl Nesting {
    pub(super) fn step(&mut self, c: char) -> Step {
        if self.in_string {
            match c {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return Step::Inside;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => {
                self.depth += 1;
                if c == '{' {
                    return Step::Object(self.depth);
                }
            }
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                return Step::Closed(self.depth);
            }
            _ => {}
        }
        Step::Inside
    }
}

/// A call as an object.
#[derive(Deserialize)]
struct CallObject<'a> {
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

/// Name and arguments of a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CallHead {
    pub(super) name: String,
    /// The text of an object; `None`: there are none.
    pub(super) arguments: Option<String>,
}

/// Reads a whole object as a call; `None`: it is none.
pub(super) fn whole(text: &str) -> Option<CallHead> {
    let call: CallObject<'_> = serde_json::from_str(text).ok()?;
    let arguments = match (call.arguments, call.parameters) {
        (Some(arguments), None) | (None, Some(arguments)) => Some(arguments.get()),
        (None, None) => None,
        (Some(_), Some(_)) => return None,
    };
    if arguments.is_some_and(|text| !text.starts_with('{')) {
        return None;
    }
    let name = call.name.filter(|name| !name.is_empty())?;
    Some(CallHead { name, arguments: arguments.map(str::to_owned) })
}

/// Reads the beginning of an object, up to and with the `{` of a value in it: the name, if that value is the arguments.
pub(super) fn begun(text: &str) -> Option<String> {
    let call = whole(&format!("{text}}}}}"))?;
    call.arguments.map(|_| call.name)
}

/// True if an object may end with this text behind its arguments.
pub(super) fn ends(tail: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(&format!("{{\"\":0{tail}")).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_known_as_soon_as_the_arguments_begin() {
        assert_eq!(begun(r#"{"name": "f", "arguments": {"#).as_deref(), Some("f"));
        assert_eq!(begun(r#"{"id": 7, "name": "f", "parameters":{"#).as_deref(), Some("f"));
        for text in
            [r#"{"arguments": {"#, r#"{"name": "f", "other": {"#, r#"{"name": "", "arguments": {"#, "{{"]
        {
            assert_eq!(begun(text), None, "{text}");
        }
    }

    #[test]
    fn a_whole_call_has_a_name_and_arguments_that_are_an_object() {
        let head = |arguments: Option<&str>| {
            Some(CallHead { name: "f".into(), arguments: arguments.map(str::to_owned) })
        };
        assert_eq!(whole(r#"{"arguments": {"a": 1.0}, "name": "f"}"#), head(Some(r#"{"a": 1.0}"#)));
        assert_eq!(whole(r#"{"name": "f"}"#), head(None));
        for text in
            [r#"{"name": "f", "arguments": "{}"}"#, r#"{"name": "f", "arguments": 1}"#, "{}", "[]", "{"]
        {
            assert_eq!(whole(text), None, "{text}");
        }
        assert!(ends("}") && ends(r#" , "id": "x"} "#));
        assert!(!ends(" x}") && !ends("}}"));
    }
}
