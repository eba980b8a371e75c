//! Requests as a cloud sees them, composed of clients that each have a rate, a burstiness and habits of their own,
//! after ServeGen (<https://arxiv.org/abs/2505.09999>): few clients make most of the load, so the burstiness of the
//! whole is theirs, and what a client sends (lengths, images, their size) changes little from request to request.

use super::content::{Content, Contents};
use super::draw::{Length, Shapes, log_normal, sizes};
use super::spec::{Draws, Spec};
use crate::arrivals::{Arrivals, Times, at};
use crate::offered::{ItemShape, Offered};
use crate::seed::{BenchRng, Purpose, rng, unit};
use crate::text::{Settings, TextError};
use rand_distr::Distribution;

/// Most images of one request.
const MAX_IMAGES: f64 = 16.0;

/// Distribution of clients.
#[derive(Clone, Debug)]
pub(super) struct Clients {
    n: u32,
    /// The k-th client's rate goes with k^-skew.
    skew: f64,
    /// The rate-weighted mean of the clients' CVs, and their spread.
    cv: f64,
    text: u32,
    output: u32,
    /// Images of a request, in the mean over all requests.
    images: f64,
    sizes: Vec<(ItemShape, f64)>,
    content: Content,
}

impl Clients {
    pub(super) fn read(settings: &mut Settings) -> Result<Self, TextError> {
        let size = settings.take("size");
        let size = size.as_deref().unwrap_or("320x240@0.3+640x480@0.4+640x640@0.2+1280x720@0.1");
        Ok(Self {
            n: settings.number("clients", 50, (1, 10_000))?,
            skew: settings.number("skew", 1.2, (0.0, 5.0))?,
            cv: settings.number("cv", 1.8, (0.1, 20.0))?,
            text: settings.number("text", 400, (1, 1 << 18))?,
            output: settings.number("output", 150, (1, 1 << 18))?,
            images: settings.number("images", 1.59, (0.0, MAX_IMAGES))?,
            sizes: sizes("size", size)?,
            content: Content::read(settings, Content::Fresh)?,
        })
    }

    /// The clients of a run. Who they are is the same for every seed, so that seeds differ in chance alone.
    fn draw(&self) -> Vec<Client> {
        let mut rng = rng(0, Purpose::Clients, u64::from(self.n));
        let weights: Vec<f64> = (1..=self.n).map(|k| f64::from(k).powf(-self.skew)).collect();
        let total: f64 = weights.iter().sum();
        let cvs = rescaled(&weights, self.cv, || log_normal(0.6).sample(&mut rng), (0.3, 8.0));
        let images = rescaled(&weights, self.images, || habit(&mut rng), (0.0, MAX_IMAGES));
        let shapes = Shapes::Buckets(self.sizes.clone());
        let clients = weights.iter().zip(cvs).zip(images).map(|((w, cv), images)| Client {
            share: w / total,
            cv,
            images,
            shape: shapes.draw(&mut rng, |_| false),
            text: f64::from(self.text) * log_normal(0.8).sample(&mut rng),
            output: f64::from(self.output) * log_normal(0.4).sample(&mut rng),
        });
        clients.collect()
    }

    /// All clients' requests; `arrivals` other than their own are used for the sum of them.
    pub(super) fn requests(
        &self,
        rate: f64,
        arrivals: Arrivals,
        seed: u64,
    ) -> impl Iterator<Item = Offered> + Send + use<> {
        let sources = self.draw().into_iter().enumerate().map(|(i, client)| {
            let gaps = Arrivals::Gamma { cv: client.cv };
            let mut times = gaps.times(rate * client.share, seed, i as u64 + 1);
            Source { next: times.next().unwrap_or(f64::INFINITY), times, client }
        });
        let merged_times = (arrivals != Arrivals::Own).then(|| arrivals.times(rate, seed, 0));
        let mut merged = Merged {
            sources: sources.collect(),
            merged_times,
            rng: rng(seed, Purpose::Requests, 0),
            contents: self.content.start(seed),
        };
        std::iter::from_fn(move || merged.next_request())
    }
}

/// Numbers whose mean, weighted and within bounds, is `mean`.
fn rescaled(weights: &[f64], mean: f64, draw: impl FnMut() -> f64, bounds: (f64, f64)) -> Vec<f64> {
    let total: f64 = weights.iter().sum();
    let mut values: Vec<f64> = std::iter::repeat_with(draw).take(weights.len()).collect();
    // Cutting moves the mean, so scaling is repeated; it settles quickly, and bounds hold in any case.
    for _ in 0..64 {
        let found = values.iter().zip(weights).map(|(v, w)| v * w).sum::<f64>() / total;
        if found <= 0.0 {
            break;
        }
        values.iter_mut().for_each(|v| *v = (*v * mean / found).clamp(bounds.0, bounds.1));
    }
    values
}

/// Mean images of a client's requests, before scaling: most send one, some a few, some many, some none.
fn habit(rng: &mut BenchRng) -> f64 {
    match unit(rng) {
        u if u < 0.15 => 0.0,
        u if u < 0.75 => 1.0,
        u if u < 0.93 => 2.5,
        _ => 6.0,
    }
}

#[derive(Clone, Debug)]
struct Client {
    /// Share of all requests.
    share: f64,
    cv: f64,
    images: f64,
    shape: Option<ItemShape>,
    text: f64,
    output: f64,
}

struct Source {
    next: f64,
    times: Times,
    client: Client,
}

struct Merged {
    sources: Vec<Source>,
    /// Arrival times of the merged clients, instead of their own.
    merged_times: Option<Times>,
    rng: BenchRng,
    contents: Contents,
}

impl Merged {
    fn next_request(&mut self) -> Option<Offered> {
        // A few dozen clients: looking at each is cheaper than a heap.
        let next = self.sources.iter_mut().min_by(|a, b| a.next.total_cmp(&b.next))?;
        let own = std::mem::replace(&mut next.next, next.times.next()?);
        let t = match &mut self.merged_times {
            Some(times) => times.next()?,
            None => own,
        };
        let client = &next.client;
        let base = client.images.floor() as u32;
        let n = base + u32::from(unit(&mut self.rng) < client.images.fract());
        let spec = Spec {
            text: Length::LogNormal { mean: client.text.max(1.0) as u32, cv: 0.5 },
            output: Length::Exponential { mean: client.output.max(1.0) as u32 },
            with_items: 1.0,
            n_items: (n, n),
            limits: (256, 0),
            shapes: Shapes::Buckets(client.shape.map(|shape| (shape, 1.0)).into_iter().collect()),
            content: Content::Fresh,
        };
        let mut draws = Draws::new(spec, self.rng.clone(), self.contents.clone());
        let offered = Offered { at: at(t), ..draws.request(t) };
        (self.rng, self.contents) = draws.end();
        Some(offered)
    }
}
