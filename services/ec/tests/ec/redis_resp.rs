//! A server that answers everything with the same bytes: errors of every kind, and what is no answer at all. Each
//! operation ends in time with a retryable error, and works as soon as the server does.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;
use tokio::time::timeout;
use triptych_ec::conformance::{limits, sample_output};
use triptych_ec::error::chain;
use triptych_ec::object::encode;
use triptych_ec::store::redis::{RedisStore, RedisTuning};
use triptych_ec::testing::RedisServer;
use triptych_ec::{EcError, EcStore, PutOutcome};

use crate::{LIMIT, key};

/// Answers each command with `answer`, until its listener is gone. `None`: closes instead.
fn server(answer: Option<&'static [u8]>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve(stream, answer));
        }
    });
    port
}

fn serve(mut stream: TcpStream, answer: Option<&[u8]>) {
    let (mut asked, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        asked.extend_from_slice(&buffer[..n]);
        while let Some(len) = command_len(&asked) {
            asked.drain(..len);
            if answer.is_none_or(|answer| stream.write_all(answer).is_err()) {
                return;
            }
        }
    }
}

/// Length of the first command, if all of it is here.
fn command_len(asked: &[u8]) -> Option<usize> {
    let number = |at: usize| {
        let end = at + asked.get(at..)?.iter().position(|b| *b == b'\r')?;
        let n: usize = std::str::from_utf8(&asked[at + 1..end]).ok()?.parse().ok()?;
        Some((n, end + 2))
    };
    let (n_args, mut at) = number(0)?;
    for _ in 0..n_args {
        let (len, from) = number(at)?;
        at = from + len + 2;
    }
    (at <= asked.len()).then_some(at)
}

fn store(url: &str) -> RedisStore {
    let tuning = RedisTuning { response_timeout: Duration::from_millis(300), ..RedisTuning::default() };
    RedisStore::new(url, tuning, &limits()).unwrap()
}

fn check<T: std::fmt::Debug>(what: &str, op: &str, outcome: Result<T, EcError>) {
    match outcome {
        // A reader of such a server gets bytes that are no object.
        Err(EcError::Corrupt { .. }) => {}
        Err(e) => assert!(e.is_retryable(), "{what}: {op}: {}", chain(&e)),
        Ok(answer) => panic!("{what}: {op}: {answer:?}"),
    }
}

#[tokio::test]
async fn whatever_a_server_answers_every_operation_ends_in_time() {
    let answers: [(&str, Option<&'static [u8]>); 14] = [
        ("loading", Some(b"-LOADING Redis is loading the dataset in memory\r\n")),
        ("no cluster", Some(b"-CLUSTERDOWN The cluster is down\r\n")),
        ("no master", Some(b"-MASTERDOWN Link with MASTER is down\r\n")),
        ("a replica", Some(b"-READONLY You can't write against a read only replica.\r\n")),
        ("moved", Some(b"-MOVED 1 127.0.0.1:1\r\n")),
        ("ask", Some(b"-ASK 1 127.0.0.1:1\r\n")),
        ("unstable", Some(b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n")),
        ("full", Some(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")),
        ("too many", Some(b"-ERR max number of clients reached\r\n")),
        ("no rights", Some(b"-NOPERM this user has no permissions\r\n")),
        ("no protocol", Some(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
        ("a length that no machine has", Some(b"$9223372036854775807\r\n")),
        ("a list that never ends", Some(b"*1000000000\r\n")),
        ("goodbye", None),
    ];
    for (what, answer) in answers {
        let store = store(&format!("redis://127.0.0.1:{}", server(answer)));
        let all = async {
            check(what, "get", store.get(&key(1)).await);
            check(what, "heads", store.heads(&[key(1), key(2)]).await);
            check(what, "put", store.put_if_absent(&key(1), encode(&sample_output(key(1), 64))).await);
            check(what, "delete", store.delete(&key(1)).await);
            check(what, "acquire", store.acquire(&key(1), LIMIT).await);
            check(what, "wait", store.wait(&key(1), LIMIT).await);
            check(what, "list", store.list(None, 10).await);
            check(what, "ping", store.ping().await);
        };
        timeout(LIMIT, all).await.unwrap_or_else(|_| panic!("{what}: does not end"));
    }
}

#[tokio::test]
async fn a_server_that_loads_is_used_as_soon_as_it_is_ready() {
    let server = RedisServer::start();
    let store = store(&server.url());
    let by_hand = |command: &[&str]| {
        let mut redis = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        redis::cmd(command[0]).arg(&command[1..]).exec(&mut redis).unwrap();
    };
    // A replica of a server that is not there, which may not show old data: MASTERDOWN for reads.
    by_hand(&["CONFIG", "SET", "replica-serve-stale-data", "no"]);
    by_hand(&["REPLICAOF", "127.0.0.1", "1"]);
    let e = store.get(&key(1)).await.unwrap_err();
    assert!(
        matches!(e, EcError::Unavailable { .. }) && chain(&e).contains("Link with MASTER is down"),
        "{}",
        chain(&e)
    );
    by_hand(&["REPLICAOF", "NO", "ONE"]);
    let object = encode(&sample_output(key(1), 64));
    assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object));
}
