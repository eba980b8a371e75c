//! Baselines of the transports: a copy in memory, and bytes through a TCP connection to the same machine.

use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

/// Copies into memory that is there already.
#[derive(Debug, Default)]
pub struct Memcpy {
    held: Vec<u8>,
}

impl Memcpy {
    /// Copies in.
    pub fn put(&mut self, object: &[u8]) {
        // The warm-up makes it long enough, and touches it.
        self.held.resize(object.len(), 0);
        self.held.copy_from_slice(object);
    }

    /// Copies out.
    pub fn get(&self, into: &mut Vec<u8>) {
        into.resize(self.held.len(), 0);
        into.copy_from_slice(&self.held);
    }
}

/// A connection to a thread that keeps the last bytes it was sent. Blocking, no frames but a length.
#[derive(Debug)]
pub struct Tcp {
    stream: TcpStream,
}

const PUT: u8 = 1;
const GET: u8 = 2;

impl Tcp {
    /// Starts the thread and connects. The thread ends with the connection.
    ///
    /// # Errors
    /// If the loopback interface is not there.
    pub fn connect() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let (other, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        other.set_nodelay(true)?;
        std::thread::spawn(move || keep(other));
        Ok(Self { stream })
    }

    /// Sends, and waits for the word that it is there.
    ///
    /// # Errors
    /// If the connection breaks.
    pub fn put(&mut self, object: &[u8]) -> Result<()> {
        self.stream.write_all(&[PUT])?;
        self.stream.write_all(&(object.len() as u64).to_le_bytes())?;
        self.stream.write_all(object)?;
        let mut word = [0];
        self.stream.read_exact(&mut word).context("the other side went away")
    }

    /// Asks, and receives into memory that is there already.
    ///
    /// # Errors
    /// If the connection breaks.
    pub fn get(&mut self, into: &mut Vec<u8>) -> Result<()> {
        self.stream.write_all(&[GET])?;
        let len = read_len(&mut self.stream)?;
        into.resize(len, 0);
        self.stream.read_exact(into).context("the other side went away")
    }
}

fn read_len(stream: &mut TcpStream) -> Result<usize> {
    let mut len = [0; 8];
    stream.read_exact(&mut len)?;
    Ok(usize::try_from(u64::from_le_bytes(len))?)
}

/// Answers until the connection ends.
fn keep(mut stream: TcpStream) -> Result<()> {
    let mut held = Vec::new();
    let mut word = [0];
    loop {
        stream.read_exact(&mut word)?;
        if word[0] == PUT {
            let len = read_len(&mut stream)?;
            held.resize(len, 0);
            stream.read_exact(&mut held)?;
            stream.write_all(&[PUT])?;
        } else {
            stream.write_all(&(held.len() as u64).to_le_bytes())?;
            stream.write_all(&held)?;
        }
    }
}
