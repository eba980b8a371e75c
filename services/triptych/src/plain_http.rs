//! One GET in plain HTTP, for probes and looks at a process of ours: a client of a library would be more than all the
//! rest of those commands.

use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpAnswer {
    /// Its status; `None`: whoever answered does not speak HTTP/1.1.
    pub status: Option<u16>,
    /// Its body.
    pub body: String,
}

/// A question.
#[derive(Clone, Copy, Debug)]
pub struct HttpGet<'a> {
    /// Host and port.
    pub address: &'a str,
    /// Path.
    pub path: &'a str,
    /// The word of the header Authorization.
    pub token: Option<&'a str>,
    /// Most bytes that are read.
    pub max_bytes: u64,
}

impl HttpGet<'_> {
    /// Asks, and reads the answer to its end.
    ///
    /// # Errors
    /// [`io::Error`] of the connection.
    pub async fn send(self) -> io::Result<HttpAnswer> {
        let Self { address, path, token, max_bytes } = self;
        let mut stream = TcpStream::connect(address).await?;
        let authorization =
            token.map_or_else(String::new, |token| format!("Authorization: Bearer {token}\r\n"));
        let head =
            format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{authorization}Connection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(max_bytes).read_to_end(&mut answer).await?;
        let text = String::from_utf8_lossy(&answer);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        Ok(HttpAnswer { status, body: body.to_owned() })
    }

    /// As [`Self::send`], with a limit on its time.
    ///
    /// # Errors
    /// [`io::Error`], also when the time is over.
    pub async fn send_within(self, time: Duration) -> io::Result<HttpAnswer> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {time:?}"));
        timeout(time, self.send()).await.map_err(|_| late())?
    }
}
