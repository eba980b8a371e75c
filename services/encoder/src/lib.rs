//! The encoder worker: preprocess, batch, encode, publish.
