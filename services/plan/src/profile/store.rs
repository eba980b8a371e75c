//! Cost of publishing and loading by bytes: one connector publishes outputs, another loads them, over the real store.

use super::progress::Progress;
use crate::curves::{Point, Spread};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;
use triptych_bench::error::MeasureError;
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};
use triptych_ec::connector::{
    Completions, ConnectorSettings, EcConnectorMeta, Loaded, Publish, WorkerRole, connect,
};
use triptych_ec::metered::NoObserver;
use triptych_ec::store::EcStore;

/// Rows of the measured outputs.
const ROWS: [u32; 6] = [16, 64, 256, 512, 1024, 2048];
/// Rows of a quick measurement.
const FEW_ROWS: [u32; 2] = [16, 256];
/// Limit for one load.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Format of the outputs.
pub struct OutputFormat {
    /// Width of a row.
    pub hidden: usize,
    /// Element type.
    pub dtype: DType,
    /// Measure few sizes.
    pub quick: bool,
}

/// Times of publishing and of loading.
pub async fn measure(
    store: Arc<dyn EcStore>,
    sizes: &OutputFormat,
    rounds: u32,
    progress: Progress<'_>,
) -> Result<(Vec<Point>, Vec<Point>), MeasureError> {
    let rows: &[u32] = if sizes.quick { &FEW_ROWS } else { &ROWS };
    let mut pair = TransferPair::new(&store);
    let mut times = vec![(Vec::new(), Vec::new()); rows.len()];
    let mut bytes = vec![0; rows.len()];
    let n_rounds = usize::try_from(rounds).unwrap_or(usize::MAX - 1);
    for round in 0..=n_rounds {
        for (i, &n_rows) in rows.iter().enumerate() {
            progress("store", round * rows.len() + i, (n_rounds + 1) * rows.len());
            let output = output(sizes, n_rows)?;
            bytes[i] = output.item().payload_len().unwrap_or(0);
            let (publish, load) = pair.once(output).await?;
            // The first round touches memory and opens connections.
            if round > 0 {
                times[i].0.push(publish.as_secs_f64() * 1e6);
                times[i].1.push(load.as_secs_f64() * 1e6);
            }
        }
    }
    let point = |of: usize, times: Vec<f64>| {
        let Spread { p50_us, p95_us } = Spread::of(times);
        Point { of: of as f64, p50_us, p95_us }
    };
    Ok(bytes.into_iter().zip(times).map(|(n, (p, l))| (point(n, p), point(n, l))).unzip())
}

/// Both sides of a transfer.
struct TransferPair {
    publisher: WorkerRole,
    loader: WorkerRole,
    loaded: mpsc::UnboundedReceiver<Loaded>,
    store: Arc<dyn EcStore>,
}

impl TransferPair {
    fn new(store: &Arc<dyn EcStore>) -> Self {
        let (sender, loaded) = mpsc::unbounded_channel();
        // The receiver is gone when the measurement was given up.
        let completions = Completions::Callback(Arc::new(move |one| drop(sender.send(one))));
        // Every output is new, so a local cache would never hit.
        let settings = |completions| ConnectorSettings {
            local_budget_bytes: 0,
            publish: Publish::WriteThrough,
            completions,
            ..ConnectorSettings::default()
        };
        let role = |completions| connect(store.clone(), Arc::new(NoObserver), settings(completions)).1;
        Self {
            publisher: role(Completions::Collected),
            loader: role(completions),
            loaded,
            store: store.clone(),
        }
    }

    /// Publishes, loads and removes one output.
    async fn once(&mut self, output: EncoderOutput) -> Result<(Duration, Duration), MeasureError> {
        let key = output.item().key;
        let published = self.publisher.save_caches(output).await;
        let published = published.map_err(|e| MeasureError::failed("cannot publish to the store", &e))?;
        let order = EcConnectorMeta { loads: vec![published.item.into()] };
        self.loader.start_load_caches(order);
        let loaded = timeout(LOAD_TIMEOUT, self.loaded.recv()).await;
        let loaded = loaded.map_err(|e| MeasureError::failed("the store does not answer", &e))?;
        let loaded = loaded.ok_or_else(|| MeasureError::Failed("the loader ended early".into()))?;
        loaded.result.map_err(|e| MeasureError::failed("cannot load from the store", &e))?;
        // What cannot be removed goes when the store is full.
        let _ = self.store.delete(&key).await;
        Ok((published.took, loaded.took))
    }
}

/// A new output.
fn output(sizes: &OutputFormat, n_rows: u32) -> Result<EncoderOutput, MeasureError> {
    let seed: [u8; 32] = rand::random();
    let rows: Vec<f32> =
        (0..n_rows as usize * sizes.hidden).map(|i| f32::from(seed[i % 32]) / 256.0).collect();
    let item = EncodedItem {
        key: ContentKey::from_bytes(seed),
        fingerprint: Fingerprint::of([b"triptych profile".as_slice()]),
        modality: Modality::Image,
        n_tokens: n_rows,
        hidden: u32::try_from(sizes.hidden).unwrap_or(u32::MAX),
        dtype: sizes.dtype,
        extent: Extent::Grid { t: 1, h: 1, w: n_rows },
        checksum: [0; 32],
    };
    EncoderOutput::seal(item, from_f32(&rows, sizes.dtype))
        .map_err(|e| MeasureError::failed("cannot make an encoder output", &e))
}
