//! Spans of a store's operations: what they say, and where there are none.

use crate::key;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Instrument, Subscriber, info_span};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use triptych_core::timeline::STORE;
use triptych_ec::EcStore;
use triptych_ec::conformance::{self, sample_output};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::object::encode;
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::{Op, StoreKind};
use triptych_ec::traced::{Place, Traced};

/// Above the numbers of open spans.
const CLOSED: u64 = 1 << 63;

type Fields = BTreeMap<&'static str, String>;

/// Keeps the fields of the store's spans.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<BTreeMap<u64, Fields>>>);

struct Reader<'a>(&'a mut Fields);

impl Visit for Reader<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

impl<S: Subscriber> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        if attributes.metadata().target() == STORE {
            let mut fields = Fields::new();
            attributes.record(&mut Reader(&mut fields));
            self.0.lock().insert(id.into_u64(), fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        if let Some(fields) = self.0.lock().get_mut(&id.into_u64()) {
            values.record(&mut Reader(fields));
        }
    }

    /// The registry gives numbers again.
    fn on_close(&self, id: Id, _: Context<'_, S>) {
        let mut spans = self.0.lock();
        if let Some(fields) = spans.remove(&id.into_u64()) {
            let place = CLOSED + spans.len() as u64;
            spans.insert(place, fields);
        }
    }
}

impl Spans {
    /// Those that ended, in their order.
    fn closed(&self) -> Vec<Fields> {
        self.0.lock().range(CLOSED..).map(|(_, fields)| fields.clone()).collect()
    }
}

fn memory() -> Arc<dyn EcStore> {
    Arc::new(MemoryStore::new(64 << 20, &conformance::limits()))
}

fn field<'a>(fields: &'a Fields, name: &str) -> Option<&'a str> {
    fields.get(name).map(String::as_str)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_traced_store_conforms() {
    conformance::run(Arc::new(Traced::new(memory(), Place::local(StoreKind::Memory)))).await;
}

#[tokio::test]
async fn operations_within_a_trace_say_what_came_of_them_and_others_have_no_span() {
    let spans = Spans::default();
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(spans.clone()));
    let faults = Faults::default();
    let faulty = Arc::new(Faulty::new(memory(), faults.clone()));
    let place = Place::at(StoreKind::Redis, "cache:6379");
    let store = Traced::new(faulty, place);
    let (key, object) = (key(1), encode(&sample_output(key(1), 64)));
    let len = object.len().to_string();
    store.heads(&[key]).await.unwrap();
    assert_eq!(spans.closed(), [], "no request, no span");
    async {
        store.get(&key).await.unwrap();
        store.put_if_absent(&key, object).await.unwrap();
        store.get(&key).await.unwrap();
        store.heads(&[key]).await.unwrap();
        faults.queue(Op::Get, Fault::Error);
        store.get(&key).await.unwrap_err();
        store.ping().await.unwrap();
    }
    .instrument(info_span!("request"))
    .await;
    let seen = spans.closed();
    let of = |name: &str| seen.iter().map(|fields| field(fields, name)).collect::<Vec<_>>();
    let names = ["ec get", "ec put", "ec get", "ec exists", "ec get"].map(Some);
    assert_eq!(of("otel.name"), names);
    assert_eq!(of("triptych.ec.outcome"), ["miss", "ok", "ok", "ok", "unavailable"].map(Some));
    assert_eq!(of("triptych.ec.bytes"), [None, Some(len.as_str()), Some(len.as_str()), None, None]);
    assert_eq!(of("error.type"), [None, None, None, None, Some("unavailable")]);
    assert_eq!(of("otel.status_code"), [None, None, None, None, Some("ERROR")]);
    for (name, value) in [
        ("otel.kind", "client"),
        ("db.system.name", "redis"),
        ("server.address", "cache"),
        ("server.port", "6379"),
    ] {
        assert_eq!(of(name), [Some(value); 5]);
    }
    let whole = key.to_string();
    assert_eq!(of("triptych.item"), [Some(&whole[..12]); 5]);
    assert!(!format!("{seen:?}").contains(&whole), "a whole key is nowhere");
}
