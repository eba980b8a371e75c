//! A workload whose mix changes: several workloads in turn, each for the same time, and then from the first again.
//!
//! `changing:EVERY|WEIGHT*WORKLOAD|WEIGHT*WORKLOAD@SLO…`: EVERY is a time (`120s`), WEIGHT the rate of that workload over the
//! others' (a mix of heavy requests has a small one), WORKLOAD one of the others, SLO the latency limits of its requests, as in
//! `ttft=3s,tpot=5ms`, instead of the run's. The rate of the whole is the mean.

use crate::offered::Offered;
use crate::seed::mix;
use crate::slo::Slo;
use crate::text::{TextError, bad, duration};
use std::time::Duration;

/// Before the workloads.
pub(super) const PREFIX: &str = "changing:";
/// Before the latency limits of a workload.
const LIMITS: char = '@';
/// Between two parts.
const SEPARATOR: char = '|';
/// The shortest time of a mix: below, a mix has no request at usual rates.
const LEAST: Duration = Duration::from_secs(1);
/// Largest weight, and one over the least.
const MOST_WEIGHT: f64 = 1e6;

/// Requests of one of the workloads: by its place, at a rate and with a seed.
pub(super) type OfPlace = Box<dyn Fn(usize, f64, u64) -> Box<dyn Iterator<Item = Offered> + Send> + Send>;

/// Turns of workloads, each named by its place.
#[derive(Clone, Debug)]
pub(super) struct Changing {
    turns: Vec<Turn>,
    every: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Rate over the mean of all.
    weight: f64,
    /// Latency limits of its requests; `None`: those of the run.
    slo: Option<Slo>,
}

impl Changing {
    /// Reads what is behind the prefix; with the texts of the workloads.
    ///
    /// # Errors
    /// [`TextError`] with the mistake.
    pub(super) fn read(rest: &str) -> Result<(Self, Vec<&str>), TextError> {
        let mut parts = rest.split(SEPARATOR);
        let text = parts.next().unwrap_or_default().trim();
        let every = duration("changing", text)?;
        if every < LEAST {
            return Err(bad("changing", text, "the time of each mix is a second at least, as in 120s"));
        }
        let (mut turns, texts): (Vec<Turn>, Vec<&str>) =
            parts.map(read_turn).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        if turns.is_empty() {
            let allowed =
                "is a time and workloads with weights, as in changing:120s|3*text|1*epd-short:images=4";
            return Err(bad("changing", rest, allowed));
        }
        let mean = turns.iter().map(|turn| turn.weight).sum::<f64>() / turns.len() as f64;
        turns.iter_mut().for_each(|turn| turn.weight /= mean);
        Ok((Self { turns, every }, texts))
    }

    /// Time until the first mix comes again.
    pub(super) fn cycle(&self) -> Duration {
        self.every.saturating_mul(u32::try_from(self.turns.len()).unwrap_or(u32::MAX))
    }

    pub(super) fn requests(
        &self,
        rate: f64,
        seed: u64,
        of_place: OfPlace,
    ) -> impl Iterator<Item = Offered> + Send + use<> {
        let every = self.every;
        let places = self.turns.clone().into_iter().enumerate().collect::<Vec<_>>().into_iter().cycle();
        (0_u32..).zip(places).flat_map(move |(turn, (place, Turn { weight, slo }))| {
            let content = mix(u64::from(turn));
            let offered = of_place(place, rate * weight, mix(seed ^ content));
            offered.take_while(move |offered| offered.at < every).map(move |mut offered| {
                offered.slo = slo;
                offered.at = offered.at.saturating_add(every.saturating_mul(turn));
                // Items of one turn are not those of another.
                offered.items.iter_mut().for_each(|item| item.content ^= content);
                offered
            })
        })
    }
}

/// A turn, and the text of a workload that does not change itself.
fn read_turn(text: &str) -> Result<(Turn, &str), TextError> {
    let wrong = || bad("changing", text, "is WEIGHT*WORKLOAD, with a weight from 0.000001 to 1000000");
    let (weight, workload) = text.split_once('*').ok_or_else(wrong)?;
    let weight = weight.trim().parse::<f64>().ok();
    let weight = weight.filter(|w| (1.0 / MOST_WEIGHT..=MOST_WEIGHT).contains(w)).ok_or_else(wrong)?;
    if workload.trim_start().starts_with(PREFIX) {
        return Err(bad("changing", workload, "is a workload that does not change itself"));
    }
    let (workload, slo) = match workload.split_once(LIMITS) {
        Some((workload, slo)) => (workload, Some(slo.trim().parse()?)),
        None => (workload, None),
    };
    Ok((Turn { weight, slo }, workload.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrivals::Arrivals;
    use crate::workload::Workload;

    fn read(text: &str) -> Workload {
        Workload::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn mixes_take_turns_at_rates_by_their_weights() {
        let day = read("changing:10s|3*text|1*epd-short:images=2");
        assert_eq!(day.cycle(), Some(Duration::from_secs(20)));
        let all = |n| day.requests(4.0, Arrivals::Constant, 1).take(n).collect::<Vec<_>>();
        let requests = all(160);
        assert!(requests.windows(2).all(|two| two[0].at <= two[1].at && two[0].index + 1 == two[1].index));
        for (turn, rate, items) in [(0, 6, 0), (1, 2, 2), (2, 6, 0), (3, 2, 2)] {
            let found: Vec<_> = requests.iter().filter(|r| r.at.as_secs() / 10 == turn).collect();
            assert!(found.len().abs_diff(rate * 10) <= 1, "turn {turn}: {}", found.len());
            assert!(found.iter().all(|r| r.items.len() == items), "turn {turn}");
        }
        let mut contents: Vec<_> = requests.iter().flat_map(|r| &r.items).map(|item| item.content).collect();
        let n = contents.len();
        contents.sort_unstable();
        contents.dedup();
        assert_eq!(contents.len(), n, "nothing is repeated");
        assert_eq!(all(99), requests[..99]);
    }

    #[test]
    fn requests_of_a_mix_have_its_latency_limits() {
        let day = read("changing:10s|1*text@ttft=300ms,tpot=5ms|1*epd-short:images=2");
        for request in day.requests(4.0, Arrivals::Constant, 1).take(160) {
            let expect = request.items.is_empty().then(|| "ttft=300ms,tpot=5ms".parse().unwrap());
            assert_eq!(request.slo, expect, "{:?}", request.at);
        }
    }

    #[test]
    fn what_cannot_take_turns_is_refused() {
        for (text, expect) in [
            ("changing:", "changing"),
            ("changing:2s", "3*text"),
            ("changing:0.5s|1*text", "a second at least"),
            ("changing:9s|text", "WEIGHT*WORKLOAD"),
            ("changing:9s|0*text", "WEIGHT*WORKLOAD"),
            ("changing:9s|1*text@fast", "slo"),
            ("changing:9s|1*text@", "slo"),
            ("changing:9s|nan*text", "WEIGHT*WORKLOAD"),
            ("changing:9s|1*nothing", "random-mm"),
            ("changing:9s|1*changing:9s|1*text", "does not change itself"),
        ] {
            let found = Workload::parse(text).expect_err(text).to_string();
            assert!(found.contains(expect), "{text}: {found}");
        }
    }
}
