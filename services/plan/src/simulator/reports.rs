//! The workers' reports to the proxy, and the samples of the timeline.

use super::event_queue::Nanos;
use super::request::ns;
use super::result::Moment;
use super::worker::{Reports, Worker};
use super::world::{Event, World, nanos};
use std::collections::BTreeSet;
use std::time::Duration;
use triptych_core::ContentKey;
use triptych_encoder::load;
use triptych_pd::watch;
use triptych_proto::v1;

impl World<'_> {
    /// Something has changed at a worker: soon it will look whether that is worth telling.
    pub(super) fn report_soon(&mut self, w: usize) {
        let reports = &mut self.workers[w].reports;
        if std::mem::replace(&mut reports.is_due, true) {
            return;
        }
        let reported = reports.reported.as_ref().map(|(_, at)| *at);
        let pause = if self.workers[w].pd.is_some() { watch::MIN_INTERVAL } else { load::MIN_INTERVAL };
        let at = reported.map_or(0, |at| at.saturating_add(nanos(pause)));
        self.queue.at(at, Event::Report(w));
    }

    /// A worker looks whether there is news.
    pub(super) fn report(&mut self, w: usize) {
        let (now, hop) = (self.queue.now(), self.hop());
        let worker = &mut self.workers[w];
        worker.reports.is_due = false;
        let (state, is_news) = match worker.pd {
            Some(_) => pd_state(self.proxy.model.as_str(), worker),
            None => encoder_state(worker, now),
        };
        if worker.pd.is_none() && state.load.is_some() && load::is_busy(&state) {
            // A sign of life while there is work.
            let at = now.saturating_add(nanos(load::BUSY_INTERVAL));
            if is_news {
                worker.reports.is_due = false;
                self.queue.at(at, Event::Report(w));
            }
        }
        if is_news {
            let worker = &mut self.workers[w];
            worker.reports.reported = Some((state.clone(), now));
            self.queue.after(hop, Event::Reported { worker: w, state: Box::new(state) });
        }
    }

    /// A place of the timeline.
    pub(super) fn sample(&mut self) {
        let pds = self.workers.iter().filter_map(|worker| worker.pd.as_ref());
        let mut moment = Moment {
            at: ns(self.queue.now()),
            in_flight: self.in_flight,
            encode_items: self.encode_items,
            ..Moment::default()
        };
        let mut n = 0;
        for pd in pds {
            let stats = &pd.stats;
            let usage = stats.self_used as f64 / stats.self_total.max(1) as f64;
            moment.running += stats.running;
            moment.waiting += stats.waiting;
            moment.waiting_tokens += stats.waiting_tokens;
            moment.kv_usage += usage;
            moment.kv_peak = moment.kv_peak.max(usage);
            n += 1;
        }
        moment.kv_usage /= f64::from(n.max(1));
        self.timeline.push(moment);
        let pause = self.spec.sample_every.max(Duration::from_millis(1));
        if self.proxy.is_offering || self.in_flight > 0 {
            self.queue.after(nanos(pause), Event::Sample);
        }
    }
}

/// An encoder's report, and whether it is worth sending.
fn encoder_state(worker: &Worker, now: Nanos) -> (v1::WorkerState, bool) {
    let Some(encoder) = &worker.encoder else { return Default::default() };
    let state = encoder.load.state(false);
    let reported = worker.reports.reported.as_ref();
    let is_news =
        reported.is_none_or(|(reported, at)| load::is_worth_reporting(reported, &state, ns(now - at)));
    (state, is_news)
}

/// A PD worker's report, and whether it is worth sending.
fn pd_state(model: &str, worker: &mut Worker) -> (v1::WorkerState, bool) {
    let Worker { pd: Some(pd), encoder, reports, .. } = worker else { return Default::default() };
    let beside = encoder.as_ref().map(|encoder| encoder.load.report()).unwrap_or_default();
    let load = watch::load(
        watch::RequestSlots { used: pd.n_requests, total: pd.spec.engine.max_requests },
        &[(model, pd.stats)],
        beside,
    );
    let Reports { reported, rows_changed, keys, .. } = reports;
    let wire = |key: &ContentKey| key.as_bytes().to_vec().into();
    let (mut added, mut removed) = (Vec::new(), Vec::new());
    if std::mem::take(rows_changed) {
        let held: BTreeSet<ContentKey> = pd.rows.recent(watch::MAX_KEYS).into_iter().collect();
        added = held.difference(keys).map(wire).collect();
        removed = keys.difference(&held).map(wire).collect();
        *keys = held;
    }
    let same = reported.as_ref().is_some_and(|(reported, _)| reported.load.as_ref() == Some(&load));
    let is_news = !same || !added.is_empty() || !removed.is_empty();
    let state = v1::WorkerState {
        load: Some(load),
        draining: false,
        resident_added: added,
        resident_removed: removed,
    };
    (state, is_news)
}
