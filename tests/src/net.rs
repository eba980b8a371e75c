//! Network namespaces on a bridge, one per process, so that any pair can be partitioned for real.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A bridge with three host addresses, and the namespaces on it. Drop removes all of them.
pub struct Net {
    id: u32,
    names: Vec<String>,
}

/// Runs `ip`, and panics with its error.
fn ip(args: &str) {
    let ended = Command::new("ip").args(args.split(' ')).stdin(Stdio::null()).output();
    let output = ended.unwrap_or_else(|e| panic!("`ip` of iproute2 is needed for network namespaces: {e}"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "`ip {args}`: {error} (namespaces need root)");
}

fn try_ip(args: &str) {
    let _ = Command::new("ip").args(args.split(' ')).stderr(Stdio::null()).status();
}

impl Net {
    /// A bridge with a name that is unique in this process, and most likely on this machine.
    ///
    /// # Panics
    /// Without root and iproute2.
    pub fn start() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let id = (std::process::id() * 8 + MADE.fetch_add(1, Ordering::Relaxed)) % 250;
        let net = Self { id, names: Vec::new() };
        try_ip(&format!("link del {}", net.bridge()));
        ip(&format!("link add {} type bridge", net.bridge()));
        for host in 1..=3 {
            ip(&format!("addr add {}/24 dev {}", net.host(host), net.bridge()));
        }
        ip(&format!("link set {} up", net.bridge()));
        net
    }

    fn bridge(&self) -> String {
        format!("tpbr{}", self.id)
    }

    /// Host address `n` of the bridge, from 1.
    pub fn host(&self, n: usize) -> String {
        format!("10.213.{}.{n}", self.id)
    }

    /// The address of a namespace.
    pub fn address(&self, name: &str) -> String {
        let idx = self.names.iter().position(|n| n == name);
        self.host(idx.unwrap_or_else(|| panic!("{name} has no namespace")) + 10)
    }

    /// Its name for `ip netns`.
    pub fn namespace(&self, name: &str) -> String {
        format!("tp{}-{name}", self.id)
    }

    /// Adds a namespace.
    pub fn add(&mut self, name: &str) {
        self.names.push(name.to_owned());
        let space = self.namespace(name);
        let address = self.address(name);
        let n = self.names.len();
        let outside = format!("tpa{}x{n}", self.id);
        let inside = format!("tpb{}x{n}", self.id);
        try_ip(&format!("netns del {space}"));
        try_ip(&format!("link del {outside}"));
        ip(&format!("netns add {space}"));
        ip(&format!("link add {outside} type veth peer name {inside}"));
        ip(&format!("link set {outside} master {} up", self.bridge()));
        ip(&format!("link set {inside} netns {space}"));
        ip(&format!("-n {space} addr add {address}/24 dev {inside}"));
        ip(&format!("-n {space} link set {inside} up"));
        ip(&format!("-n {space} link set lo up"));
    }

    /// Sets the name server of a namespace. `ip netns exec` mounts this file over the machine's own.
    ///
    /// # Panics
    /// Without root.
    pub fn name_server(&self, name: &str, address: &str) {
        let folder = self.files(name);
        fs::create_dir_all(&folder).expect("root may");
        fs::write(folder.join("resolv.conf"), format!("nameserver {address}\n")).expect("root may");
    }

    /// Folder of the namespace's own files.
    fn files(&self, name: &str) -> PathBuf {
        Path::new("/etc/netns").join(self.namespace(name))
    }

    /// Partitions `name` from an address: what it sends there is silently dropped.
    pub fn partition(&self, name: &str, from: &str) {
        try_ip(&format!("-n {} route add blackhole {from}/32", self.namespace(name)));
    }

    /// Ends a partition.
    pub fn heal(&self, name: &str, with: &str) {
        try_ip(&format!("-n {} route del blackhole {with}/32", self.namespace(name)));
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in &self.names {
            try_ip(&format!("netns del {}", self.namespace(name)));
            // Most have none.
            let _ = fs::remove_dir_all(self.files(name));
        }
        try_ip(&format!("link del {}", self.bridge()));
    }
}
