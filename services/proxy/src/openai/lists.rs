//! Lists and objects of a JSON body that stop at a limit while they are read, so that a long one costs no memory.

use serde::de::{DeserializeOwned, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::marker::PhantomData;

/// Most values of a list or object of settings that is read. What a setting allows is checked later, by name.
pub(super) const MAX_READ: usize = 2048;

/// A list of at most [`MAX_READ`] values.
#[derive(Debug)]
pub(super) struct ShortList<T>(pub(super) Vec<T>);

impl<'de, T: DeserializeOwned> Deserialize<'de> for ShortList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for ListVisitor<T> {
    type Value = ShortList<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, values: A) -> Result<Self::Value, A::Error> {
        read_at_most(MAX_READ, values, Vec::new()).map(ShortList)
    }
}

/// Reads the rest of a list, whose first values are `read`.
pub(super) fn read_at_most<'de, T: DeserializeOwned, A: SeqAccess<'de>>(
    limit: usize,
    mut values: A,
    mut read: Vec<T>,
) -> Result<Vec<T>, A::Error> {
    while let Some(value) = values.next_element()? {
        if read.len() == limit {
            return Err(A::Error::custom(format_args!("the list has more than {limit} values, its limit")));
        }
        read.push(value);
    }
    Ok(read)
}

/// An object of at most [`MAX_READ`] fields, in their order.
#[derive(Debug)]
pub(super) struct ShortMap<T>(pub(super) Vec<(String, T)>);

impl<'de, T: DeserializeOwned> Deserialize<'de> for ShortMap<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor(PhantomData))
    }
}

struct FieldsVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for FieldsVisitor<T> {
    type Value = ShortMap<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut read = Vec::new();
        while let Some(field) = fields.next_entry()? {
            if read.len() == MAX_READ {
                let message = format_args!("the object has more than {MAX_READ} fields, its limit");
                return Err(A::Error::custom(message));
            }
            read.push(field);
        }
        Ok(ShortMap(read))
    }
}

/// True for a value that says something: neither null nor an empty list or object. The value itself is not kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct IsSet(pub(super) bool);

impl<'de> Deserialize<'de> for IsSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(IsSetVisitor { neutral_words: false })
    }
}

/// True for a value that asks for something: what [`IsSet`] says, and neither `false` nor an empty text.
#[derive(Clone, Copy, Debug)]
pub(super) struct IsWanted(pub(super) bool);

impl<'de> Deserialize<'de> for IsWanted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(IsSetVisitor { neutral_words: true }).map(|set| Self(set.0))
    }
}

struct IsSetVisitor {
    /// True if `false` and an empty text say nothing.
    neutral_words: bool,
}

impl<'de> Visitor<'de> for IsSetVisitor {
    type Value = IsSet;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: Error>(self) -> Result<IsSet, E> {
        Ok(IsSet(false))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<IsSet, E> {
        Ok(IsSet(value || !self.neutral_words))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<IsSet, E> {
        Ok(IsSet(true))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<IsSet, E> {
        Ok(IsSet(true))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<IsSet, E> {
        Ok(IsSet(true))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<IsSet, E> {
        Ok(IsSet(!(text.is_empty() && self.neutral_words)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<IsSet, A::Error> {
        let mut is_set = false;
        while values.next_element::<IgnoredAny>()?.is_some() {
            is_set = true;
        }
        Ok(IsSet(is_set))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<IsSet, A::Error> {
        let mut is_set = false;
        while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            is_set = true;
        }
        Ok(IsSet(is_set))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::from_str;

    #[test]
    fn a_list_ends_at_its_limit() {
        let list = |n: usize, end: &str| format!("[{}{end}]", vec!["1"; n].join(","));
        assert_eq!(from_str::<ShortList<u8>>(&list(MAX_READ, "")).unwrap().0.len(), MAX_READ);
        // What comes after the limit is not read: it is no number.
        let refused = from_str::<ShortList<u8>>(&list(MAX_READ + 1, ",\"x\"")).unwrap_err().to_string();
        assert!(refused.starts_with("the list has more than 2048 values, its limit"), "{refused}");
        let object = |n: usize| format!("{{{}}}", vec!["\"a\":1"; n].join(","));
        assert_eq!(from_str::<ShortMap<u8>>(&object(MAX_READ)).unwrap().0.len(), MAX_READ);
        let refused = from_str::<ShortMap<u8>>(&object(10 * MAX_READ)).unwrap_err().to_string();
        assert!(refused.starts_with("the object has more than 2048 fields, its limit"), "{refused}");
    }

    #[test]
    fn a_value_is_set_unless_it_is_empty() {
        for (text, expect) in [
            ("null", false),
            ("[]", false),
            ("{}", false),
            ("[null]", true),
            ("{\"a\":[]}", true),
            ("0", true),
            ("\"\"", true),
            ("false", true),
            ("1.5", true),
            ("-1", true),
        ] {
            assert_eq!(from_str::<IsSet>(text).unwrap().0, expect, "{text}");
        }
    }
}
