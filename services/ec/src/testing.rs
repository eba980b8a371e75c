//! Real servers for tests of any crate. Plain `std::process`; not for serving.
//!
//! A guard kills its servers when it is dropped. A server that is not installed fails the test that needs it, and says
//! how to get it: a test must not be skipped.

mod azurite;
mod process;
mod redis_cluster;
mod redis_sentinel;
mod redis_server;
mod s3;

pub use azurite::Azurite;
pub use process::free_port;
pub use redis_cluster::{RedisCluster, SlotMove};
pub use redis_sentinel::RedisSentinel;
pub use redis_server::{RedisOptions, RedisServer, TlsClients};
pub use s3::S3Server;
