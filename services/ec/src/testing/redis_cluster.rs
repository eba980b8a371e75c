//! A Redis cluster of three primaries, each with a replica.

use super::process::{AGREE_LIMIT, Folder, becomes, free_port_with};
use super::redis_server::{RedisOptions, RedisServer, ask, query};
use redis::Value;
use std::ops::RangeInclusive;

const N_PRIMARIES: usize = 3;
const N_SLOTS: usize = 16384;
/// A node is failed over when it was silent for so long.
const NODE_TIMEOUT_MS: &str = "1000";
/// The bus of a node is at its port and this.
const BUS_OFFSET: u16 = 10_000;

/// A cluster on free ports of 127.0.0.1: three primaries and three replicas. A killed primary is replaced by its
/// replica within a few seconds; meanwhile the whole cluster is down, as it is by default. Dropping it kills all.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    _folder: Folder,
}

/// A slot on its way from one primary to another.
#[derive(Debug)]
pub struct SlotMove {
    slot: u64,
    from: u16,
    to: u16,
}

impl SlotMove {
    fn set(&self, node: u16, state: &[&str]) {
        let slot = self.slot.to_string();
        let command = [&["CLUSTER", "SETSLOT", &slot], state].concat();
        let _: String = query(node, &command).expect("the primary takes the slot's state");
    }
}

impl RedisCluster {
    /// Starts the nodes and waits until they agree, which takes a second or two.
    ///
    /// # Panics
    /// If `redis-server` is not installed, or they do not agree.
    pub fn start() -> Self {
        let folder = Folder::new();
        let place = folder.path().display().to_string();
        let node = |i: usize| {
            let options = RedisOptions::default()
                .with("dir", &[&place])
                .with("cluster-enabled", &["yes"])
                .with("cluster-config-file", &[&format!("nodes-{i}.conf")])
                .with("cluster-node-timeout", &[NODE_TIMEOUT_MS])
                .with("cluster-replica-validity-factor", &["0"])
                .with("cluster-allow-replica-migration", &["no"])
                .with("repl-diskless-sync-delay", &["0"]);
            RedisServer::start_at(&options, || free_port_with(BUS_OFFSET))
        };
        let cluster = Self { nodes: (0..2 * N_PRIMARIES).map(node).collect(), _folder: folder };
        cluster.form();
        cluster
    }

    /// The setting of an EC store in it; names every node.
    pub fn url(&self) -> String {
        let nodes: Vec<_> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+cluster://{}", nodes.join(","))
    }

    /// The same cluster, where a node may be silent for as long as it likes: for tests without failovers, so that a
    /// busy machine makes none.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn without_failover(self) -> Self {
        for node in self.running() {
            let set = ask(node, &["CONFIG", "SET", "cluster-node-timeout", "600000"]);
            assert_eq!(set, "OK", "a node does not take the timeout");
        }
        self
    }

    /// The port of the primary that has a key now.
    ///
    /// # Panics
    /// If no node knows one.
    pub fn primary_of(&self, key: &str) -> u16 {
        let known = self.running().find_map(|node| {
            let slot: u64 = query(node.port(), &["CLUSTER", "KEYSLOT", key])?;
            slots_of(node)?.into_iter().find(|(slots, _)| slots.contains(&slot)).map(|(_, port)| port)
        });
        known.expect("some node of the cluster knows the slot's primary")
    }

    /// Kills the primary that has a key now. Its port.
    pub fn kill_primary_of(&mut self, key: &str) -> u16 {
        let port = self.primary_of(key);
        self.node(port).kill();
        port
    }

    /// Kills a primary. Its port.
    pub fn kill_primary(&mut self) -> u16 {
        self.kill_primary_of("")
    }

    /// Kills the primary that has a key now and its replica: their keys are lost, and nobody takes over.
    pub fn kill_with_replica(&mut self, key: &str) {
        let primary = self.primary_of(key);
        let follows = format!("master_port:{primary}\r\n");
        for node in &mut self.nodes {
            if node.port() == primary || ask(node, &["INFO", "replication"]).contains(&follows) {
                node.kill();
            }
        }
    }

    /// Waits until the nodes that answer name another primary than the one at `port`, for every slot.
    ///
    /// # Panics
    /// If they do not within a minute.
    pub fn wait_for_another_than(&self, port: u16) {
        let replaced = || {
            let others = || self.running().filter(|node| node.port() != port);
            others().all(|node| {
                slots_of(node).is_some_and(|slots| slots.iter().all(|(_, primary)| *primary != port))
                    && ask(node, &["CLUSTER", "INFO"]).contains("cluster_state:ok")
            })
        };
        assert!(becomes(AGREE_LIMIT, replaced), "nobody takes over from the dead primary");
    }

    /// The node at a port, to kill, pause or restart it.
    ///
    /// # Panics
    /// If no node was started there.
    pub fn node(&mut self, port: u16) -> &mut RedisServer {
        self.nodes.iter_mut().find(|node| node.port() == port).expect("a node was started at the port")
    }

    /// Begins to move the slot of a key to another primary: what is new there goes to that one, what was there is still
    /// where it was. [`Self::finish_move`] ends it.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn begin_move(&self, key: &str) -> SlotMove {
        let from = self.primary_of(key);
        let is_other = |node: &&RedisServer| {
            node.port() != from && ask(node, &["INFO", "replication"]).contains("role:master")
        };
        let to = self.running().find(is_other).expect("there is another primary").port();
        let slot: u64 = query(from, &["CLUSTER", "KEYSLOT", key]).expect("the primary answers");
        let moved = SlotMove { slot, from, to };
        for (node, state, other) in [(to, "IMPORTING", from), (from, "MIGRATING", to)] {
            let id: String = query(other, &["CLUSTER", "MYID"]).expect("the primary answers");
            moved.set(node, &[state, &id]);
        }
        moved
    }

    /// Moves the keys, and tells every primary whose the slot is.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn finish_move(&self, moved: &SlotMove) {
        let (slot, to) = (moved.slot.to_string(), moved.to.to_string());
        loop {
            let get = ["CLUSTER", "GETKEYSINSLOT", slot.as_str(), "100"];
            let keys: Vec<String> = query(moved.from, &get).expect("the primary answers");
            if keys.is_empty() {
                break;
            }
            let mut migrate = vec!["MIGRATE", "127.0.0.1", &to, "", "0", "5000", "KEYS"];
            migrate.extend(keys.iter().map(String::as_str));
            let _: String = query(moved.from, &migrate).expect("the keys can be moved");
        }
        let id: String = query(moved.to, &["CLUSTER", "MYID"]).expect("the primary answers");
        for node in [moved.to, moved.from] {
            moved.set(node, &["NODE", &id]);
        }
    }

    /// Waits until every running node says that the cluster works.
    ///
    /// # Panics
    /// If it does not within a minute.
    pub fn wait_until_whole(&self) {
        let whole =
            || self.running().all(|node| ask(node, &["CLUSTER", "INFO"]).contains("cluster_state:ok"));
        assert!(becomes(AGREE_LIMIT, whole), "the cluster does not come to work");
    }

    fn running(&self) -> impl Iterator<Item = &RedisServer> {
        self.nodes.iter().filter(|node| node.is_running() && !node.is_paused())
    }

    fn form(&self) {
        let (primaries, replicas) = self.nodes.split_at(N_PRIMARIES);
        for (i, node) in primaries.iter().enumerate() {
            let (from, to) = (i * N_SLOTS / N_PRIMARIES, (i + 1) * N_SLOTS / N_PRIMARIES - 1);
            ask(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(i + 1).to_string()]);
            ask(node, &["CLUSTER", "ADDSLOTSRANGE", &from.to_string(), &to.to_string()]);
        }
        for a in &self.nodes {
            for b in &self.nodes {
                ask(a, &["CLUSTER", "MEET", "127.0.0.1", &b.port().to_string()]);
            }
        }
        let n = format!("cluster_known_nodes:{}", self.nodes.len());
        let all_met = || self.nodes.iter().all(|node| ask(node, &["CLUSTER", "INFO"]).contains(&n));
        assert!(becomes(AGREE_LIMIT, all_met), "the nodes of the cluster do not meet");
        for (primary, replica) in primaries.iter().zip(replicas) {
            let id = ask(primary, &["CLUSTER", "MYID"]);
            let follows = || ask(replica, &["CLUSTER", "REPLICATE", &id]) == "OK";
            assert!(becomes(AGREE_LIMIT, follows), "a replica does not follow its primary");
        }
        let in_step = || {
            replicas.iter().all(|node| ask(node, &["INFO", "replication"]).contains("master_link_status:up"))
                && primaries
                    .iter()
                    .all(|node| ask(node, &["INFO", "replication"]).contains("connected_slaves:1"))
        };
        assert!(becomes(AGREE_LIMIT, in_step), "the replicas do not come into step");
        self.wait_until_whole();
    }
}

/// Slot ranges and their primaries' ports.
fn slots_of(server: &RedisServer) -> Option<Vec<(RangeInclusive<u64>, u16)>> {
    let ranges: Vec<Vec<Value>> = query(server.port(), &["CLUSTER", "SLOTS"])?;
    let read = |range: Vec<Value>| match range.as_slice() {
        [Value::Int(from), Value::Int(to), Value::Array(primary), ..] => match primary.as_slice() {
            [_, Value::Int(port), ..] => {
                Some((from.unsigned_abs()..=to.unsigned_abs(), u16::try_from(*port).ok()?))
            }
            _ => None,
        },
        _ => None,
    };
    Some(ranges.into_iter().filter_map(read).collect())
}
