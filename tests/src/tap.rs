//! A wire-tap: a TCP relay that keeps every byte that went to its target, and can cut the line.

use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A relay in front of `target`. Dropped: closed.
pub struct Tap {
    pub address: String,
    seen: Arc<Mutex<Vec<u8>>>,
    task: JoinHandle<()>,
}

impl Tap {
    /// Listens on a free port.
    pub async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has ports");
        let address = listener.local_addr().expect("bound").to_string();
        let seen = Arc::<Mutex<Vec<u8>>>::default();
        let record = seen.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (target, record) = (target.clone(), record.clone());
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect(&target).await {
                        relay(client, server, &record).await;
                    }
                });
            }
        });
        Self { address, seen, task }
    }

    /// Every byte that went to the target so far, all connections together.
    pub fn seen(&self) -> Vec<u8> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
    let up = async {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n @ 1..) = from_client.read(&mut buffer).await {
            record.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&buffer[..n]);
            if to_server.write_all(&buffer[..n]).await.is_err() {
                break;
            }
        }
    };
    let down = tokio::io::copy(&mut from_server, &mut to_client);
    tokio::select! {
        () = up => {}
        _ = down => {}
    }
}
