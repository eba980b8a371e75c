//! The filter `tojson` as transformers defines it for chat templates: Python's `json.dumps` with `ensure_ascii=False`
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/utils/chat_template_utils.py>).
//!
//! The filter of Jinja itself escapes HTML, which models were not trained on.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Characters with which clients' texts are marked: they go away before tokens are made.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';
/// Most spaces of an indentation.
const MAX_INDENT: usize = 32;

/// `value|tojson(ensure_ascii=…, indent=…, separators=…, sort_keys=…)`.
pub(super) fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?.or(indent);
    let separators: Option<Vec<String>> = options.get("separators")?;
    let writer = JsonWriter {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent: indent.map(|n| " ".repeat(n.min(MAX_INDENT))),
        separators: match separators.as_deref() {
            Some([item, key]) => [item.clone(), key.clone()],
            _ => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
        },
    };
    options.assert_all_used()?;
    let mut out = String::new();
    writer.value(value, 0, &mut out)?;
    Ok(out)
}

/// JSON as a template sees it, its keys in their order.
pub(super) fn template_value(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            (None, None) => Value::from(number.as_f64().unwrap_or_default()),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(values) => values.iter().map(template_value).collect(),
        Json::Object(fields) => {
            Value::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), template_value(value))))
        }
    }
}

/// The form of a JSON text.
struct JsonWriter {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    /// Between items, and behind a key.
    separators: [String; 2],
}

impl JsonWriter {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.list(['[', ']'], items, depth, out)?;
            }
            ValueKind::Map => {
                let mut fields = Vec::new();
                for key in value.try_iter()? {
                    let field = value.get_item(&key)?;
                    fields.push((Some(key.to_string()), field));
                }
                if self.sorted {
                    fields.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list(['{', '}'], fields, depth, out)?;
            }
            other => {
                let text = format!("a value of kind {other} is no JSON");
                return Err(Error::new(ErrorKind::BadSerialization, text));
            }
        }
        Ok(())
    }

    fn list(
        &self,
        brackets: [char; 2],
        items: Vec<(Option<String>, Value)>,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        let is_empty = items.is_empty();
        out.push(brackets[0]);
        for (i, (key, item)) in items.into_iter().enumerate() {
            if i > 0 {
                out.push_str(&self.separators[0]);
            }
            self.line(depth + 1, out);
            if let Some(key) = key {
                self.string(&key, out);
                out.push_str(&self.separators[1]);
            }
            self.value(&item, depth + 1, out)?;
        }
        if !is_empty {
            self.line(depth, out);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        // A text is always JSON.
        let json = serde_json::to_string(text).unwrap_or_default();
        if !self.ascii {
            out.push_str(&json);
            return;
        }
        for c in json.chars() {
            if c.is_ascii() || MARKS.contains(&c) {
                out.push(c);
            } else {
                out.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }
}

/// A number as Python writes it: without an exponent from 1e-4 to below 1e16, and with two digits in it elsewhere.
fn float(number: f64) -> String {
    if !number.is_finite() {
        let name = if number.is_nan() { "NaN" } else { "Infinity" };
        return format!("{}{name}", if number < 0.0 { "-" } else { "" });
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..=15 => format!("{number:?}"),
        exponent => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.abs())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::Environment;

    fn render(expression: &str, value: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        let value: serde_json::Value = serde_json::from_str(value).unwrap();
        let context = Value::from_pairs([("v", template_value(&value))]);
        environment.render_str(&format!("{{{{ {expression} }}}}"), context).unwrap()
    }

    #[test]
    fn json_is_pythons() {
        // Each written by `json.dumps(v, ensure_ascii=False, …)`.
        let value = r#"{"z":"a<b>&'é\n\u0001\"","a":[1,2.5,true,null,{},[]],"n":-0.5}"#;
        let expect = r#"{"z": "a<b>&'é\n\u0001\"", "a": [1, 2.5, true, null, {}, []], "n": -0.5}"#;
        assert_eq!(render("v|tojson", value), expect);
        let expect = r#"{"a": [1, 2.5, true, null, {}, []], "n": -0.5, "z": "a<b>&'é\n\u0001\""}"#;
        assert_eq!(render("v|tojson(sort_keys=true)", value), expect);
        let expect = "{\n  \"a\": [\n    1,\n    []\n  ]\n}";
        assert_eq!(render("v|tojson(indent=2)", r#"{"a":[1,[]]}"#), expect);
        assert_eq!(render("v|tojson(2)", r#"{"a":[1,[]]}"#), expect);
        assert_eq!(render("v|tojson(separators=[',',':'])", r#"{"a":[1,2]}"#), r#"{"a":[1,2]}"#);
        assert_eq!(render("v|tojson(ensure_ascii=true)", r#""é🦀""#), r#""\u00e9\ud83e\udd80""#);
    }

    #[test]
    fn numbers_are_pythons() {
        for (value, expect) in [
            ("1.0", "1.0"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("-2.5e-7", "-2.5e-07"),
            ("18446744073709551615", "18446744073709551615"),
        ] {
            assert_eq!(render("v|tojson", value), expect);
        }
    }
}
