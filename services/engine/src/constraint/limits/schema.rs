//! Limits on a JSON schema.

use super::{Counted, exceeded};
use serde_json::{Map, Value};
use std::collections::HashSet;
use triptych_core::Failure;

/// Most JSON values.
const MAX_VALUES: usize = 50_000;
/// Deepest nesting of JSON values, counted on through each `$ref` where it is first met.
const MAX_DEPTH: usize = 750;
/// Most definitions.
const MAX_DEFINITIONS: usize = 1_000;
/// Most regular expressions: `pattern`, and keys of `patternProperties`.
const MAX_PATTERNS: usize = 64;
/// Most `patternProperties` of one object, each compared with every other.
const MAX_PATTERN_PROPERTIES: usize = 16;
/// Most properties, required ones included, of one object.
const MAX_PROPERTIES: usize = 1_000;
/// Most members of one `anyOf`, `oneOf` or `allOf`.
const MAX_MEMBERS: usize = 500;
/// Largest `multipleOf`, in units of its last decimal place; for several on one number, their least common multiple.
const MAX_MULTIPLE: usize = 10_000;
/// Schemas looked at for the `multipleOf` of numbers, in all; with more, the rest is left to the trial.
const MAX_COMBINED: usize = 20_000;
/// Members within one another that are looked at for one number.
const MAX_COMBINED_DEPTH: usize = 64;

/// Refuses a schema that exceeds a limit.
pub(crate) fn check_schema(schema: &Value, field: &'static str) -> Result<(), Failure> {
    let measured = Measured::of(schema);
    for counted in measured.counts() {
        counted.check(field)?;
    }
    let what = "as the least common multiple of one number's multipleOf";
    match measured.multiple <= MAX_MULTIPLE as u128 {
        true => Ok(()),
        false => Err(exceeded(field, what, measured.multiple, MAX_MULTIPLE)),
    }
}

/// Sizes of a schema.
#[derive(Debug, Default, PartialEq)]
struct Measured {
    values: usize,
    depth: usize,
    definitions: usize,
    patterns: usize,
    pattern_properties: usize,
    properties: usize,
    members: usize,
    multiple: u128,
}

impl Measured {
    /// Measures a schema in the order in which the library reads it, without recursion.
    fn of(root: &Value) -> Self {
        let mut measured = Self::default();
        let mut seen = HashSet::from([std::ptr::from_ref(root)]);
        let mut left = MAX_COMBINED;
        let mut stack = vec![(root, 1)];
        while let Some((value, depth)) = stack.pop() {
            measured.values += 1;
            measured.depth = measured.depth.max(depth);
            match value {
                Value::Array(values) => stack.extend(values.iter().rev().map(|value| (value, depth + 1))),
                Value::Object(schema) => {
                    measured.take(schema);
                    let multiple = combined(schema, root, MAX_COMBINED_DEPTH, &mut left)
                        .map_or(0, |multiple| multiple.0);
                    measured.multiple = measured.multiple.max(multiple);
                    let read = schema.iter().rev().filter(|(key, _)| !is_definitions(key));
                    stack.extend(read.map(|(_, value)| (value, depth + 1)));
                    if let Some(target) = target(schema, root).filter(|t| seen.insert(std::ptr::from_ref(*t)))
                    {
                        stack.push((target, depth + 1));
                    }
                }
                _ => {}
            }
        }
        measured
    }

    fn take(&mut self, schema: &Map<String, Value>) {
        let n = |key: &str| match schema.get(key) {
            Some(Value::Array(values)) => values.len(),
            Some(Value::Object(values)) => values.len(),
            _ => 0,
        };
        self.definitions = self.definitions.max(n("$defs")).max(n("definitions"));
        self.patterns +=
            n("patternProperties") + usize::from(schema.get("pattern").is_some_and(Value::is_string));
        self.pattern_properties = self.pattern_properties.max(n("patternProperties"));
        self.properties = self.properties.max(n("properties")).max(n("required"));
        self.members = self.members.max(n("anyOf")).max(n("oneOf")).max(n("allOf"));
    }

    fn counts(&self) -> [Counted; 7] {
        let counted = |what, value, limit| Counted { what, value, limit };
        [
            counted("JSON values", self.values, MAX_VALUES),
            counted("definitions", self.definitions, MAX_DEFINITIONS),
            counted("levels of nesting with its $refs followed", self.depth, MAX_DEPTH),
            counted("patterns", self.patterns, MAX_PATTERNS),
            counted("patternProperties in one object", self.pattern_properties, MAX_PATTERN_PROPERTIES),
            counted("properties in one object", self.properties, MAX_PROPERTIES),
            counted("schemas in one anyOf, oneOf or allOf", self.members, MAX_MEMBERS),
        ]
    }
}

fn is_definitions(key: &str) -> bool {
    ["$defs", "definitions", "default", "examples"].contains(&key)
}

/// The schema that `$ref` names, if it is in the same document.
fn target<'a>(schema: &Map<String, Value>, root: &'a Value) -> Option<&'a Value> {
    let path = schema.get("$ref")?.as_str()?.strip_prefix('#')?;
    // As the library reads it: no escapes.
    path.split('/').filter(|part| !part.is_empty()).try_fold(root, |value, part| match value {
        Value::Array(values) => values.get(part.parse::<usize>().ok()?),
        value => value.get(part),
    })
}

/// A multiple in units of its last decimal place, and the number of decimal places.
type Multiple = (u128, u32);

/// Least common multiple of all `multipleOf` that hold for one number. `None`: there is none, or `depth` or `left`, the
/// schemas that may be looked at, is used up.
fn combined(schema: &Map<String, Value>, root: &Value, depth: usize, left: &mut usize) -> Option<Multiple> {
    *left = left.checked_sub(1)?;
    let depth = depth.checked_sub(1)?;
    let mut found = schema.get("multipleOf").and_then(decimal);
    let members = |key: &str| schema.get(key).and_then(Value::as_array).into_iter().flatten();
    for member in members("allOf").chain(target(schema, root)).filter_map(Value::as_object) {
        found = both(found, combined(member, root, depth, left));
    }
    let any = members("anyOf").chain(members("oneOf")).filter_map(Value::as_object);
    both(found, any.filter_map(|member| combined(member, root, depth, left)).max())
}

fn both(a: Option<Multiple>, b: Option<Multiple>) -> Option<Multiple> {
    let (Some(a), Some(b)) = (a, b) else { return a.or(b) };
    let places = a.1.max(b.1);
    let scaled = |m: Multiple| m.0.saturating_mul(10_u128.saturating_pow(places - m.1));
    let (x, y) = (scaled(a), scaled(b));
    Some(((x / gcd(x, y).max(1)).saturating_mul(y), places))
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn decimal(value: &Value) -> Option<Multiple> {
    let text = value.as_f64()?.abs().to_string();
    let (whole, places) = text.split_once('.').unwrap_or((&text, ""));
    let digits = format!("{whole}{places}");
    Some((digits.parse().unwrap_or(u128::MAX), u32::try_from(places.len()).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refusal(schema: &Value) -> String {
        check_schema(schema, "json_schema").expect_err("a refusal").message
    }

    fn chain(n: usize, link: impl Fn(Value) -> Value) -> Value {
        let next = |i: usize| (format!("d{i}"), link(json!({"$ref": format!("#/$defs/d{}", i + 1)})));
        let mut defs: Map<String, Value> = (0..n - 1).map(next).collect();
        defs.insert(format!("d{}", n - 1), json!({"type": "string"}));
        json!({"$ref": "#/$defs/d0", "$defs": defs})
    }

    #[test]
    fn chains_of_references_are_refused_by_value_and_limit() {
        let links: [fn(Value) -> Value; 4] = [
            |next| json!({"allOf": [next]}),
            |next| json!({"anyOf": [next, {"type": "null"}]}),
            |next| json!({"type": "array", "items": next}),
            |next| json!({"type": "object", "properties": {"next": next}}),
        ];
        for link in links {
            assert_eq!(check_schema(&chain(100, link), "json_schema"), Ok(()));
            assert!(refusal(&chain(500, link)).ends_with("with its $refs followed, the limit is 750"));
            assert_eq!(refusal(&chain(5_000, link)), "json_schema has 5000 definitions, the limit is 1000");
        }
        let deep = refusal(&chain(500, links[0]));
        assert!(deep.starts_with("json_schema has 1"), "the value is named: {deep}");
    }

    #[test]
    fn a_recursive_schema_is_as_deep_as_its_definitions() {
        let list = json!({"$ref": "#/$defs/list", "$defs": {"list": {"type": "object", "properties":
            {"value": {"type": "integer"}, "rest": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]}}}}});
        assert_eq!(check_schema(&list, "json_schema"), Ok(()));
        assert_eq!(check_schema(&json!({"properties": {"a": {"$ref": "#"}}}), "json_schema"), Ok(()));
    }

    #[test]
    fn multiples_combine_over_what_holds_for_one_number() {
        let check = |schema: Value, expect: Option<u128>| {
            let mut left = 1_000;
            let found = combined(schema.as_object().unwrap(), &schema, 64, &mut left);
            assert_eq!(found.map(|m| m.0), expect, "{schema}");
        };
        check(json!({"type": "number"}), None);
        check(json!({"multipleOf": 0.01}), Some(1));
        check(json!({"multipleOf": 12, "allOf": [{"multipleOf": 0.5}, {"multipleOf": 18}]}), Some(360));
        check(json!({"anyOf": [{"multipleOf": 7}, {"multipleOf": 11}]}), Some(11));
        check(json!({"$ref": "#/$defs/a", "multipleOf": 3, "$defs": {"a": {"multipleOf": 5}}}), Some(15));
        check(json!({"properties": {"a": {"multipleOf": 3}}}), None);
        // Exponentially many paths, and circles.
        check(json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}), None);
        let text = refusal(&json!({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}));
        assert!(text.contains("99400891") && text.ends_with("the limit is 10000"), "{text}");
        assert!(refusal(&json!({"items": {"multipleOf": 99_730}})).contains("99730"));
        assert!(refusal(&json!({"multipleOf": 1e300})).contains("the limit is 10000"));
    }

    #[test]
    fn counts_are_refused_by_value_and_limit() {
        let names: Vec<String> = (0..1_001).map(|i| format!("p{i}")).collect();
        let text = refusal(&json!({"type": "object", "required": names}));
        assert_eq!(text, "json_schema has 1001 properties in one object, the limit is 1000");
        let patterns: Vec<Value> = (0..65).map(|i| json!({"pattern": format!("a{i}")})).collect();
        assert_eq!(refusal(&json!({"allOf": patterns})), "json_schema has 65 patterns, the limit is 64");
        let keys: Map<String, Value> = (0..17).map(|i| (format!("^a{i}"), json!({}))).collect();
        assert!(refusal(&json!({"patternProperties": keys})).contains("17 patternProperties in one object"));
        let members: Vec<Value> = (0..501).map(|i| json!({"const": i})).collect();
        assert!(refusal(&json!({"anyOf": members})).contains("501 schemas"));
        let values: Vec<Value> = (0..50_000).map(|i| json!(i)).collect();
        assert!(refusal(&json!({"enum": values})).contains("JSON values"));
        // A property may have any name.
        let named = json!({"properties": {"pattern": {}, "required": {}, "$ref": {}, "multipleOf": {}}});
        assert_eq!(check_schema(&named, "json_schema"), Ok(()));
    }
}
