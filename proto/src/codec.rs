//! The codec of all services: prost's, behind a bound on the memory of a message's lists ([`crate::bounded`]).
//!
//! What exceeds it is `OUT_OF_RANGE`, as a message is that has too many bytes. Bytes that are no message are
//! `INTERNAL`, as with tonic's own codec.

use crate::bounded::{MessageError, Shaped, check};
use bytes::Buf;
use prost::Message;
use std::marker::PhantomData;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic::{Code, Status};
use tonic_prost::{ProstCodec, ProstEncoder};

/// Codec of messages `T` that are sent and `U` that are received.
#[derive(Debug)]
pub struct BoundedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Shaped + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(PhantomData)
    }
}

/// Decoder of messages `U`.
#[derive(Debug)]
pub struct BoundedDecoder<U>(PhantomData<U>);

impl<U: Message + Shaped + Default> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // The message is one piece, so this copies nothing.
        let bytes = source.copy_to_bytes(source.remaining());
        check(&bytes, U::shape()).map_err(|e| {
            let code = match e {
                MessageError::TooLarge { .. } => Code::OutOfRange,
                MessageError::Malformed(_) => Code::Internal,
            };
            Status::new(code, e.to_string())
        })?;
        U::decode(bytes).map(Some).map_err(|e| Status::internal(e.to_string()))
    }
}
