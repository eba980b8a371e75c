//! The cases about lists.

use super::samples::{fresh_key, put, sample_output};
use crate::error::EcError;
use crate::object::encode;
use crate::store::{EcStore, Listed, Op};
use std::sync::Arc;
use triptych_core::{ContentKey, EncoderOutput};

pub(super) async fn unsupported(store: Arc<dyn EcStore>) {
    let e = store.list(None, 10).await.expect_err("it does not know what it has");
    assert!(matches!(e, EcError::Unsupported { op: Op::List, .. }), "{e:?}");
}

/// Keys with a prefix of their own, so that what else is in the store lies before or behind them.
pub(super) async fn pages(store: Arc<dyn EcStore>) {
    let prefix = *fresh_key().as_bytes();
    let key = |last: u8| {
        let mut bytes = prefix;
        bytes[31] = last;
        ContentKey::from_bytes(bytes)
    };
    // Stored in another order than they are listed in.
    let outputs: Vec<EncoderOutput> =
        [4, 1, 5, 3, 2].map(|n| sample_output(key(n), usize::from(n) * 16)).into();
    for output in &outputs {
        put(&*store, output).await;
    }
    let page = |after: u8, limit: usize| {
        let (store, after) = (store.clone(), key(after));
        async move {
            let page = store.list(Some(&after), limit).await.expect("a store with lists answers");
            assert!(page.len() <= limit, "{} of {limit}", page.len());
            page.into_iter().filter(|l| l.key.as_bytes()[..31] == prefix[..31]).collect::<Vec<Listed>>()
        }
    };
    let last = |page: &[Listed]| page.iter().map(|l| l.key.as_bytes()[31]).collect::<Vec<_>>();
    assert_eq!(last(&page(0, 2).await), [1, 2]);
    assert_eq!(last(&page(2, 2).await), [3, 4]);
    assert_eq!(last(&page(4, 1).await), [5]);
    assert_eq!(last(&page(5, 100).await), [] as [u8; 0]);
    store.delete(&key(3)).await.unwrap();
    let all = page(0, 100).await;
    assert_eq!(last(&all), [1, 2, 4, 5]);
    for listed in all {
        let output = outputs.iter().find(|o| o.item().key == listed.key).expect("it is one of ours");
        assert_eq!(listed.len, encode(output).len() as u64);
    }
    let first = store.list(None, 1000).await.unwrap();
    assert!(first.is_sorted_by(|a, b| a.key < b.key), "a page is in order, and no key comes twice");
    for n in [1, 2, 4, 5] {
        store.delete(&key(n)).await.unwrap();
    }
}
