//! A text, or a list: the content of a message, the input of a response.

use serde::de::value::SeqAccessDeserializer;
use serde::de::{DeserializeOwned, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::marker::PhantomData;

/// A text, or a list of values.
#[derive(Debug)]
pub(super) enum TextOrList<T> {
    Text(String),
    List(Vec<T>),
}

/// By hand, so that an error inside a value says where it is; `untagged` would only say that no variant fits.
impl<'de, T: DeserializeOwned> Deserialize<'de> for TextOrList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrListVisitor(PhantomData))
    }
}

struct TextOrListVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for TextOrListVisitor<T> {
    type Value = TextOrList<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of parts")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(TextOrList::Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Self::Value, E> {
        Ok(TextOrList::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, values: A) -> Result<Self::Value, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(values)).map(TextOrList::List)
    }
}
