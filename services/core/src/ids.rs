//! Identifiers. Newtypes, so that two of them cannot be swapped and still compile.

use std::fmt;
use std::sync::Arc;

/// Names one request in every log line, span and answer, for its whole life.
///
/// The text is `req-` and 32 hex digits; a client's own id is kept beside it, never instead of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u128);

impl RequestId {
    /// An id from 128 random bits; the caller brings the randomness.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The 128 bits.
    pub const fn to_bits(self) -> u128 {
        self.0
    }

    /// Reads the text form. `None` if it is anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let hex = text.strip_prefix("req-")?;
        if hex.len() != 32 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        u128::from_str_radix(hex, 16).ok().map(Self)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "req-{:032x}", self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The position of an item (image, audio clip, encoder text) among the items of its request, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ItemIdx(pub u32);

macro_rules! name {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $type(Arc<str>);

        impl $type {
            /// Wraps the text as it is.
            pub fn new(text: impl Into<Arc<str>>) -> Self {
                Self(text.into())
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &self.0)
            }
        }
    };
}

name! {
    /// The name under which a model is served, as a client writes it in `model`.
    ModelName
}
name! {
    /// Names a worker process: its role and address, or what its operator called it.
    WorkerId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_id_reads_back_what_it_prints() {
        for bits in [0, 1, u128::MAX, 0x1234_5678] {
            let id = RequestId::from_bits(bits);
            assert_eq!(RequestId::parse(&id.to_string()), Some(id));
        }
        for bad in [
            "",
            "req-",
            "req-zz",
            "chat-00000000000000000000000000000000",
            "req-+0000000000000000000000000000000",
        ] {
            assert_eq!(RequestId::parse(bad), None, "{bad}");
        }
    }
}
