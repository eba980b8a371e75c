//! The admin API: what an operator sees and changes of a proxy while it runs. JSON over HTTP, on the admin port alone.
//!
//! It serves whoever has the admin token; without one, callers on this machine if the port is on its loopback address
//! ([`access`]). What is changed holds for this proxy, until it ends. Contents of requests, keys and tokens are in no
//! answer; tenants are hashes, as in the request log.

pub mod access;
mod api;
mod caches;
mod changes;
mod limits;
mod log;
mod models;
mod requests;
pub mod token;
mod workers;

pub use api::AdminApi;
pub use changes::ModelChanges;

use access::Access;
use axum::routing::{delete, get, post, put};
use axum::{Router, middleware};

/// The routes, for callers that `access` lets in.
pub fn routes(api: AdminApi, access: Access) -> Router {
    Router::new()
        .route("/admin/workers", get(workers::list))
        .route("/admin/workers/{id}/drain", post(workers::drain).delete(workers::resume))
        .route("/admin/workers/{id}/role", put(workers::assign))
        .route("/admin/workers/{id}/log", put(log::of_worker))
        .route("/admin/models", get(models::list))
        .route("/admin/models/load", post(models::load))
        .route("/admin/models/unload", post(models::unload))
        .route("/admin/requests", get(requests::list))
        .route("/admin/requests/{id}", get(requests::find).delete(requests::abort))
        .route("/admin/limits", get(limits::show).patch(limits::change))
        .route("/admin/caches/encoder/{key}", delete(caches::forget))
        .route("/admin/caches/reset", post(caches::reset))
        .route("/admin/log", get(log::show).put(log::change))
        .layer(middleware::from_fn_with_state(access, access::check))
        .with_state(api)
}
