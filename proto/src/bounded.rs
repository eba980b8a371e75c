//! A bound on the memory that a message may take, checked over its bytes before they are decoded.
//!
//! Two bytes can become hundreds: an empty element of a repeated field takes its struct. The scan knows from
//! the schema which fields hold lists ([`Shape`], generated) and what an element takes, adds that up over all
//! lists of a message, and stops at the limit. It is one pass without allocation. Texts and bytes take what they take on
//! the wire, which the limit on the message bounds. What it accepts but prost refuses costs no more; what prost
//! accepts it accepts (`proto/tests/bounded.rs`).

use thiserror::Error;

/// Most bytes that the elements of all lists of a message may take once it is decoded. Two million token ids, or
/// eighty thousand items. A list that grows while it is decoded takes up to three times its elements for a moment.
pub const MAX_LIST_BYTES: usize = 8 << 20;

/// Deepest nesting of groups, which only unknown fields have. That of prost.
const MAX_GROUPS: u32 = 100;

/// Reasons to refuse the bytes of a message.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum MessageError {
    /// Its lists would take too much memory.
    #[error(
        "the lists of the message take more than {MAX_LIST_BYTES} bytes of memory, which is the limit; {field} is the one that exceeds it"
    )]
    TooLarge {
        /// Field whose element exceeds the limit.
        field: &'static str,
    },
    /// They are no protobuf.
    #[error("the bytes are no protobuf message: {0}")]
    Malformed(&'static str),
}

/// The fields of a message that are lists or messages with lists.
#[derive(Debug)]
pub struct Shape {
    /// Those fields, in any order.
    pub fields: &'static [Field],
}

/// A field that is a list, or a message with lists.
#[derive(Debug)]
pub struct Field {
    /// Its number.
    pub number: u32,
    /// Its name in the schema.
    pub name: &'static str,
    /// Bytes that an element takes in memory, without what it points to; 0 for a field that is no list.
    pub element_bytes: usize,
    /// Its elements on the wire.
    pub kind: Kind,
}

/// Elements of a field on the wire.
#[derive(Debug)]
pub enum Kind {
    /// Numbers of variable length; packed or not.
    Varints,
    /// Numbers of so many bytes; packed or not.
    Fixed(usize),
    /// Texts, bytes, or entries of a map.
    Opaque,
    /// Messages.
    Message(&'static Shape),
}

/// A message that a service takes or gives; generated from the schema.
pub trait Shaped {
    /// The lists that are bounded: all of a message that a service takes, none of one that it gives.
    fn shape() -> &'static Shape;
}

/// Checks the bytes of a message.
///
/// # Errors
/// [`MessageError`]: lists over the limit, or bytes that are no message.
pub fn check(bytes: &[u8], shape: &Shape) -> Result<(), MessageError> {
    Scan { left: MAX_LIST_BYTES }.message(bytes, shape)
}

/// Bytes that lists may still take.
struct Scan {
    left: usize,
}

/// Value of a field, as far as its length is concerned.
enum WireValue<'a> {
    Number,
    Bytes(&'a [u8]),
}

impl Scan {
    fn message(&mut self, mut bytes: &[u8], shape: &Shape) -> Result<(), MessageError> {
        while !bytes.is_empty() {
            let (number, wire) = key(&mut bytes)?;
            let value = value(&mut bytes, (number, wire), 0)?;
            if let Some(field) = shape.fields.iter().find(|field| field.number == number) {
                self.field(field, &value)?;
            }
        }
        Ok(())
    }

    fn field(&mut self, field: &Field, value: &WireValue<'_>) -> Result<(), MessageError> {
        let n = match (&field.kind, value) {
            (Kind::Varints, WireValue::Bytes(packed)) => packed.iter().filter(|byte| **byte < 0x80).count(),
            (Kind::Fixed(size), WireValue::Bytes(packed)) => packed.len() / size,
            _ => 1,
        };
        let taken = n.checked_mul(field.element_bytes).and_then(|bytes| self.left.checked_sub(bytes));
        self.left = taken.ok_or(MessageError::TooLarge { field: field.name })?;
        match (&field.kind, value) {
            (Kind::Message(shape), WireValue::Bytes(bytes)) if !shape.fields.is_empty() => {
                self.message(bytes, shape)
            }
            _ => Ok(()),
        }
    }
}

/// Reads a key: number and wire type of a field.
fn key(bytes: &mut &[u8]) -> Result<(u32, u8), MessageError> {
    let key = u32::try_from(varint(bytes)?).map_err(|_| MessageError::Malformed("a key is too large"))?;
    match key >> 3 {
        0 => Err(MessageError::Malformed("a field has number 0")),
        // Three bits.
        number => Ok((number, (key & 7) as u8)),
    }
}

/// Reads the value of a field with this number and wire type.
fn value<'a>(
    bytes: &mut &'a [u8],
    (number, wire): (u32, u8),
    n_groups: u32,
) -> Result<WireValue<'a>, MessageError> {
    match wire {
        0 => varint(bytes).map(|_| WireValue::Number),
        1 => take(bytes, 8).map(|_| WireValue::Number),
        2 => {
            let len = varint(bytes)?;
            let len = usize::try_from(len).map_err(|_| MessageError::Malformed("a length is too large"))?;
            take(bytes, len).map(WireValue::Bytes)
        }
        3 => group(bytes, number, n_groups).map(|()| WireValue::Number),
        5 => take(bytes, 4).map(|_| WireValue::Number),
        _ => Err(MessageError::Malformed("a field has a wire type that there is not")),
    }
}

/// Reads a group to its end.
fn group(bytes: &mut &[u8], number: u32, n_groups: u32) -> Result<(), MessageError> {
    if n_groups >= MAX_GROUPS {
        return Err(MessageError::Malformed("groups are nested too deep"));
    }
    loop {
        match key(bytes)? {
            (end, 4) if end == number => return Ok(()),
            (_, 4) => return Err(MessageError::Malformed("a group ends that did not begin")),
            inside => value(bytes, inside, n_groups + 1)?,
        };
    }
}

/// Reads a number of up to ten bytes.
fn varint(bytes: &mut &[u8]) -> Result<u64, MessageError> {
    let mut number = 0;
    for i in 0..10 {
        let byte = take(bytes, 1)?[0];
        number |= u64::from(byte & 0x7f) << (7 * i);
        if byte < 0x80 {
            let overflows = i == 9 && byte > 1;
            return if overflows {
                Err(MessageError::Malformed("a number has more than 64 bits"))
            } else {
                Ok(number)
            };
        }
    }
    Err(MessageError::Malformed("a number has more than 64 bits"))
}

/// Reads `n` bytes.
fn take<'a>(bytes: &mut &'a [u8], n: usize) -> Result<&'a [u8], MessageError> {
    let (taken, rest) = bytes.split_at_checked(n).ok_or(MessageError::Malformed("it breaks off"))?;
    *bytes = rest;
    Ok(taken)
}
