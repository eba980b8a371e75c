//! The prefill/decode worker: load encoder outputs, run the engine, stream tokens.
