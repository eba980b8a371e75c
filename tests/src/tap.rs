//! A TCP relay that records every byte, in both directions.

use parking_lot::Mutex;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A relay in front of `target`. Drop closes it.
pub struct Tap {
    pub address: String,
    recorded: Arc<Mutex<Vec<u8>>>,
    task: JoinHandle<()>,
}

impl Tap {
    /// Listens on a free port.
    pub async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has ports");
        let address = listener.local_addr().expect("bound").to_string();
        let recorded = Arc::<Mutex<Vec<u8>>>::default();
        let record = recorded.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let target = target.clone();
                let record = record.clone();
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect(&target).await {
                        relay(client, server, &record).await;
                    }
                });
            }
        });
        Self { address, recorded, task }
    }

    /// Bytes recorded so far: all connections and both directions, interleaved as they arrived.
    pub fn recorded(&self) -> Vec<u8> {
        self.recorded.lock().clone()
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn relay(client: TcpStream, server: TcpStream, record: &Mutex<Vec<u8>>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let up = copy_recorded(&mut from_client, &mut to_server, record);
    let down = copy_recorded(&mut from_server, &mut to_client, record);
    tokio::select! {
        () = up => {}
        () = down => {}
    }
}

async fn copy_recorded(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    record: &Mutex<Vec<u8>>,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        record.lock().extend_from_slice(&buffer[..n]);
        if to.write_all(&buffer[..n]).await.is_err() {
            break;
        }
    }
}
