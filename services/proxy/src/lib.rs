//! The front door: OpenAI HTTP and gRPC in, encoder jobs and hashes out.
