//! Errors of JSON bodies in the words of the API: the field, what it is, and what is expected. Rust's names of types stay
//! out of them.

use super::error::quoted;
use serde_path_to_error::Error;
use triptych_core::Failure;

/// Refuses a body that is no JSON object. An array would otherwise be read as the fields of an object in their order.
pub(super) fn check_object(body: &[u8]) -> Result<(), Failure> {
    let is = match body.iter().find(|byte| !byte.is_ascii_whitespace()) {
        Some(b'{') => return Ok(()),
        None => {
            return Err(Failure::invalid(
                "the body is empty, expected is a JSON object with the fields of the request",
            ));
        }
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b'0'..=b'9' | b'-') => "a number",
        Some(b't' | b'f' | b'n') => "a single word",
        Some(_) => "not JSON",
    };
    Err(Failure::invalid(format!(
        "the body is {is}, expected is a JSON object with the fields of the request"
    )))
}

/// The failure of a body that cannot be read.
pub(super) fn failure(error: &Error<serde_json::Error>) -> Failure {
    let (path, cause) = (error.path().to_string(), error.inner());
    let place = format!(" at line {} column {}", cause.line(), cause.column());
    let text = cause.to_string();
    let text = text.strip_suffix(&place).unwrap_or(&text);
    if let Some((name, allowed)) = unknown_field(text) {
        let message = format!("{} is no field of this request, which has {allowed}{place}", quoted(name));
        return Failure::invalid(message).with_param(quoted(name).trim_matches('"'));
    }
    // A single dot is the path of the body itself, a question mark one that is not known.
    let param = Some(path).filter(|path| path != "." && path != "?");
    let message = if cause.is_eof() {
        format!("the body is not valid JSON: it ends too early{place}")
    } else if cause.is_data() {
        format!("{}{place}", wrong_value(param.as_deref().unwrap_or("the body"), text))
    } else {
        format!("the body is not valid JSON: {text}{place}")
    };
    let failure = Failure::invalid(message);
    match param {
        Some(param) => failure.with_param(param),
        None => failure,
    }
}

/// Name of a field that is not known, and those that are, from serde's words.
fn unknown_field(text: &str) -> Option<(&str, String)> {
    let (name, allowed) = text.strip_prefix("unknown field `")?.rsplit_once("`, expected ")?;
    let allowed = allowed.strip_prefix("one of ").unwrap_or(allowed);
    Some((name, allowed.replace('`', "")))
}

/// The text for a value of the wrong type, from serde's.
fn wrong_value(at: &str, text: &str) -> String {
    let given = ["invalid type: ", "invalid value: "].iter().find_map(|prefix| text.strip_prefix(prefix));
    if let Some((is, expected)) = given.and_then(|given| given.rsplit_once(", expected ")) {
        return format!("{at} is {}, expected is {}", value(is), kind(expected));
    }
    // An array is read as the fields of an object in their order.
    if text.starts_with("invalid length ") && text.contains("struct ") {
        return format!("{at} is an array, expected is an object");
    }
    if ["a ", "an ", "true"].iter().any(|start| text.starts_with(start)) {
        return format!("{at} is of another type, expected is {text}");
    }
    format!("{at}: {text}")
}

/// A value, from serde's words for it.
fn value(is: &str) -> String {
    let plain = |kind: &str| is.strip_prefix(kind).map(|rest| rest.trim_matches('`').to_owned());
    match is {
        "sequence" => "an array".into(),
        "map" => "an object".into(),
        _ => match is.strip_prefix("string \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(text) => format!("the string {}", quoted(text)),
            None => ["integer ", "floating point ", "boolean "]
                .into_iter()
                .find_map(plain)
                .unwrap_or_else(|| is.into()),
        },
    }
}

/// A type, from serde's words for it.
fn kind(expected: &str) -> String {
    match expected {
        "f32" | "f64" => "a number".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "an array".into(),
        "a map" => "an object".into(),
        "u32" => format!("an integer from 0 to {}", u32::MAX),
        "i32" => format!("an integer from {} to {}", i32::MIN, i32::MAX),
        "u64" | "usize" => "an integer from 0".into(),
        "i64" => "an integer".into(),
        other if other.starts_with("struct ") => "an object".into(),
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "parsed for the errors")]
    struct Body {
        temperature: Option<f32>,
        n: Option<u32>,
        stream: Option<bool>,
        messages: Option<Vec<Message>>,
        bias: Option<std::collections::BTreeMap<String, f32>>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "parsed for the errors")]
    struct Message {
        role: Option<String>,
        name: Option<String>,
    }

    fn refused(body: &str) -> Failure {
        let read = || {
            check_object(body.as_bytes())?;
            let mut reader = serde_json::Deserializer::from_str(body);
            serde_path_to_error::deserialize::<_, Body>(&mut reader).map_err(|e| failure(&e))
        };
        read().expect_err(body)
    }

    #[test]
    fn a_wrong_value_is_told_in_the_words_of_json() {
        for (body, param, message) in [
            (
                r#"{"temperature": "hot"}"#,
                "temperature",
                "temperature is the string \"hot\", expected is a number at line 1",
            ),
            (r#"{"n": -1}"#, "n", "n is -1, expected is an integer from 0 to 4294967295 at"),
            (r#"{"n": 1.5}"#, "n", "n is 1.5, expected is an integer from 0 to 4294967295"),
            (r#"{"stream": 1}"#, "stream", "stream is 1, expected is true or false"),
            (r#"{"messages": {}}"#, "messages", "messages is an object, expected is an array"),
            (r#"{"messages": "hi"}"#, "messages", "messages is the string \"hi\", expected is an array"),
            (r#"{"messages": [null]}"#, "messages[0]", "messages[0] is null, expected is an object"),
            (r#"{"messages": [[]]}"#, "messages[0]", "messages[0] is an array, expected is an object"),
            (
                r#"{"messages": [{"role": true}]}"#,
                "messages[0].role",
                "messages[0].role is true, expected is a string",
            ),
            (
                r#"{"messages": [{"rolle": "user"}]}"#,
                "rolle",
                "\"rolle\" is no field of this request, which has role or name at line 1",
            ),
            (r#"{"bias": []}"#, "bias", "bias is an array, expected is an object"),
            (
                r#"{"bias": {"5": "x, expected y"}}"#,
                "bias.5",
                "bias.5 is the string \"x, expected y\", expected is a number",
            ),
        ] {
            let failure = refused(body);
            assert_eq!(failure.param.as_deref(), Some(param), "{body}");
            assert!(failure.message.starts_with(message), "{body}: {}", failure.message);
        }
    }

    #[test]
    fn a_body_that_is_no_object_or_no_json_is_told_as_such() {
        for (body, message) in [
            ("", "the body is empty, expected is a JSON object"),
            (" \n", "the body is empty"),
            ("[]", "the body is an array, expected is a JSON object with the fields of the request"),
            ("\"hi\"", "the body is a string"),
            ("-5", "the body is a number"),
            ("null", "the body is a single word"),
            ("model=vl", "the body is not JSON"),
            ("{", "the body is not valid JSON: it ends too early at line 1 column 1"),
            ("{\"n\" 1}", "the body is not valid JSON: expected `:` at line 1 column 6"),
        ] {
            let failure = refused(body);
            assert!(failure.message.starts_with(message), "{body}: {}", failure.message);
            assert_eq!(failure.param, None, "{body}");
        }
        let long = refused(&format!("{{\"temperature\": \"{}\"}}", "x".repeat(100_000)));
        assert!(long.message.len() < 300, "{}", long.message.len());
    }
}
