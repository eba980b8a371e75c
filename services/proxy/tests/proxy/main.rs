//! The proxy over HTTP and gRPC, between clients and fake workers: in process, on free ports, without sleeps for ordering.

mod adapters;
mod admin;
mod attacks;
mod bad_input;
mod chat;
mod completions;
mod cors;
mod deaths;
mod drain;
mod early;
mod fakes;
mod faults;
mod fields;
mod fleet;
mod generate;
mod http_limits;
mod once;
mod operations;
mod quotas;
mod request_log;
mod responses;
mod resumed;
mod speech;
mod support;
mod tenants;
mod tools;
