//! A minimal name server like Docker's: all addresses of a service's containers, over UDP.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

const PORT: u16 = 53;
/// Interval between two checks whether the server is still in use.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
const HEADER_BYTES: usize = 12;
const TYPE_A: [u8; 2] = [0, 1];

type Names = Mutex<BTreeMap<String, Vec<Ipv4Addr>>>;

/// A running server. Drop stops it.
pub struct Dns {
    names: Arc<Names>,
}

impl Dns {
    /// Listens on port 53 of a local address.
    pub fn start(address: &str) -> Self {
        let socket =
            UdpSocket::bind((address, PORT)).expect("port 53 of this address is free, and this is root");
        socket.set_read_timeout(Some(POLL_INTERVAL)).expect("a time");
        let names = Arc::default();
        let known = Arc::downgrade(&names);
        thread::spawn(move || serve(&socket, &known));
        Self { names }
    }

    /// Adds an address to a name.
    pub fn add(&self, name: &str, address: &str) {
        let address = address.parse().expect("an address");
        self.locked(|names| names.entry(name.to_owned()).or_default().push(address));
    }

    /// Removes an address from a name.
    pub fn remove(&self, name: &str, address: &str) {
        let address: Ipv4Addr = address.parse().expect("an address");
        self.locked(|names| names.entry(name.to_owned()).or_default().retain(|a| *a != address));
    }

    fn locked(&self, change: impl FnOnce(&mut BTreeMap<String, Vec<Ipv4Addr>>)) {
        change(&mut self.names.lock());
    }
}

fn serve(socket: &UdpSocket, known: &Weak<Names>) {
    let mut packet = [0; 512];
    while let Some(names) = known.upgrade() {
        if let Ok((n, from)) = socket.recv_from(&mut packet) {
            let names = names.lock();
            if let Some(answer) = answer(&packet[..n], &names) {
                // A client that is gone needs no answer.
                let _ = socket.send_to(&answer, from);
            }
        }
    }
}

/// The answer to a packet with one question (RFC 1035, section 4).
fn answer(packet: &[u8], names: &BTreeMap<String, Vec<Ipv4Addr>>) -> Option<Vec<u8>> {
    let mut name = String::new();
    let mut at = HEADER_BYTES;
    loop {
        let length = usize::from(*packet.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        if !name.is_empty() {
            name.push('.');
        }
        name.push_str(std::str::from_utf8(packet.get(at..at + length)?).ok()?);
        at += length;
    }
    let question = packet.get(HEADER_BYTES..at + 4)?;
    let found = names.get(&name.to_lowercase()).filter(|addresses| !addresses.is_empty());
    let asks_a = packet.get(at..at + 2)? == TYPE_A;
    let addresses: &[Ipv4Addr] = found.filter(|_| asks_a).map_or(&[], Vec::as_slice);
    let code = if found.is_some() { 0 } else { 3 };
    let n = u16::try_from(addresses.len()).ok()?;
    // The same id; flags of an answer with recursion; one question; the number of answers.
    let mut out = packet.get(..2)?.to_vec();
    out.extend([0x81, 0x80 | code, 0, 1]);
    out.extend(n.to_be_bytes());
    out.extend([0; 4]);
    out.extend(question);
    for address in addresses {
        // Pointer to the question's name; type A, class IN; TTL 0; four bytes.
        out.extend([0xc0, HEADER_BYTES as u8, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        out.extend(address.octets());
    }
    Some(out)
}
