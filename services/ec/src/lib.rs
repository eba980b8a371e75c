//! The encoder-cache connector and its stores.
