//! Channels to vLLM servers: gRPC over a pipe in this process, whose other end speaks HTTP to the server.

use crate::address::VllmAddress;
use crate::client::HttpClient;
use crate::server::VllmServer;
use futures::stream;
use hyper_util::rt::TokioIo;
use std::io;
use std::sync::Arc;
use tokio::io::DuplexStream;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tower::service_fn;
use triptych_ec::EcStore;
use triptych_proto::v1::encoder_worker_server::EncoderWorkerServer;
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorkerServer;
use triptych_runtime::grpc::{Dialer, channel};

/// Bytes that may be in the pipe in each direction.
const PIPE: usize = 256 << 10;
/// Room for what is in a message beside the items.
const MESSAGE_ROOM: usize = 32 << 20;
/// A text that no address is: tonic's error for it is the dialer's.
const NO_ADDRESS: &str = " ";

/// Settings for vLLM servers.
pub struct VllmSettings {
    /// Key that the servers ask for (vLLM's `--api-key`).
    pub api_key: Option<String>,
    /// Store of the encoder outputs that the servers load.
    pub store: Arc<dyn EcStore>,
    /// Bytes that the items of a request may have together.
    pub max_item_bytes: usize,
}

/// A dialer that reaches vLLM servers by their addresses, and others as `inner` does.
///
/// # Errors
/// If TLS cannot be set up.
pub fn dialer(inner: Dialer, settings: VllmSettings) -> Result<Dialer, reqwest::Error> {
    let VllmSettings { api_key, store, max_item_bytes } = settings;
    let http = HttpClient::new(api_key.as_deref())?;
    let max_message = max_item_bytes.saturating_add(MESSAGE_ROOM);
    Ok(Dialer::new(move |address| match address.parse::<VllmAddress>() {
        Ok(address) => Ok(pipe(VllmServer::new(address, http.clone(), Arc::clone(&store)), max_message)),
        Err(e) if VllmAddress::is_meant(address) => {
            tracing::warn!(error = %e, "address of a vLLM server");
            channel(NO_ADDRESS)
        }
        Err(_) => inner.dial(address),
    }))
}

/// A channel whose other end is served here. Its tasks end with it.
fn pipe(server: VllmServer, max_message: usize) -> Channel {
    let connector = service_fn(move |_: Uri| {
        let (near, far) = tokio::io::duplex(PIPE);
        tokio::spawn(serve(far, server.clone(), max_message));
        async move { Ok::<_, io::Error>(TokioIo::new(near)) }
    });
    Endpoint::from_static("http://vllm.invalid").connect_with_connector_lazy(connector)
}

async fn serve(far: DuplexStream, server: VllmServer, max_message: usize) {
    let pd = PrefillDecodeWorkerServer::new(server.clone()).max_decoding_message_size(max_message);
    let encoder = EncoderWorkerServer::new(server).max_decoding_message_size(max_message);
    let connection = stream::iter([Ok::<_, io::Error>(far)]);
    let served = Server::builder().add_service(pd).add_service(encoder).serve_with_incoming(connection).await;
    if let Err(e) = served {
        tracing::error!(error = %e, "the pipe to a vLLM server ended");
    }
}
