//! A TCP relay from an address of the bridge to a server on loopback, with a delay that can be set, and a cut.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Largest number of bytes that are forwarded at once.
const PIECE: usize = 64 << 10;

/// A relay. Drop stops it.
pub struct FaultyLink {
    delay_us: Arc<AtomicU64>,
    is_cut: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl FaultyLink {
    /// From `address:port` to the same port of loopback.
    pub async fn start(address: &str, port: u16) -> Self {
        let listener = TcpListener::bind((address, port)).await.expect("the bridge's address is free");
        let delay_us = Arc::new(AtomicU64::new(0));
        let delay = Arc::clone(&delay_us);
        let (is_cut, cut) = watch::channel(false);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let work = connection(client, port, Arc::clone(&delay));
                let mut cut = cut.clone();
                tokio::spawn(async move {
                    // A cut closes open connections, and new ones at once.
                    tokio::select! { () = work => {}, _ = cut.wait_for(|cut| *cut) => {} }
                });
            }
        });
        Self { delay_us, is_cut, task }
    }

    /// Cuts the link, or restores it.
    pub fn cut(&self, is_cut: bool) {
        self.is_cut.send_replace(is_cut);
    }

    /// Delays every chunk by this much.
    pub fn slow(&self, by: Duration) {
        self.delay_us.store(by.as_micros() as u64, Ordering::Relaxed);
    }
}

impl Drop for FaultyLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn connection(client: TcpStream, port: u16, delay: Arc<AtomicU64>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let there = async { copy(&mut from_client, &mut to_server, &delay).await };
    let back = async { copy(&mut from_server, &mut to_client, &delay).await };
    // The first side to close ends both directions.
    tokio::select! { () = there => {}, () = back => {} }
}

async fn copy(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    delay: &AtomicU64,
) {
    let mut piece = vec![0; PIECE];
    while let Ok(n @ 1..) = from.read(&mut piece).await {
        let wait = Duration::from_micros(delay.load(Ordering::Relaxed));
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        if to.write_all(&piece[..n]).await.is_err() {
            return;
        }
    }
}
