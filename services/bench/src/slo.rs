//! Service level objectives: latency limits that a request has to meet, all of them at once.

use crate::outcome::{End, Outcome};
use crate::text::{Settings, TextError, bad};
use std::str::FromStr;
use std::time::Duration;

/// Latency limits, of which there is at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slo {
    /// Time to the first token, counted from when the request was due.
    pub ttft: Option<Duration>,
    /// Mean time of each further token.
    pub tpot: Option<Duration>,
    /// Time to the end.
    pub e2el: Option<Duration>,
}

impl FromStr for Slo {
    type Err = TextError;

    /// Parses `ttft=500ms,tpot=50ms`, with `e2el=10s` for a limit of the whole answer.
    fn from_str(text: &str) -> Result<Self, TextError> {
        let (_, mut settings) = Settings::parse(&format!("slo:{text}"))?;
        let slo =
            Self { ttft: settings.time("ttft")?, tpot: settings.time("tpot")?, e2el: settings.time("e2el")? };
        settings.end()?;
        if slo.ttft.is_none() && slo.tpot.is_none() && slo.e2el.is_none() {
            return Err(bad("slo", text, "has at least one limit: ttft=500ms,tpot=50ms, or e2el=10s"));
        }
        Ok(slo)
    }
}

impl std::fmt::Display for Slo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = [("ttft", self.ttft), ("tpot", self.tpot), ("e2el", self.e2el)];
        let parts = parts.into_iter().filter_map(|(name, t)| Some((name, t?)));
        let parts: Vec<_> = parts.map(|(name, t)| format!("{name}={}ms", t.as_secs_f64() * 1e3)).collect();
        f.write_str(&parts.join(","))
    }
}

impl Outcome {
    /// True if it ended with all tokens.
    pub fn is_whole(&self) -> bool {
        self.end == End::Whole && !self.tokens.is_empty()
    }

    /// Time from when it was due to its first token.
    pub fn ttft(&self) -> Option<Duration> {
        Some(self.tokens.first()?.saturating_sub(self.due))
    }

    /// Time from when it was due to its end.
    pub fn e2el(&self) -> Duration {
        self.ended.saturating_sub(self.due)
    }

    /// Mean time of the tokens after the first: (last - first) / (n - 1). None for fewer than two.
    pub fn tpot(&self) -> Option<Duration> {
        let first = self.tokens.first()?;
        let last = self.tokens.last()?;
        let n = u32::try_from(self.tokens.len()).ok()?.checked_sub(1).filter(|n| *n > 0)?;
        Some(last.saturating_sub(*first) / n)
    }

    /// Its latency limits in a run with these: its own, if it has some, of the latencies that the run limits.
    pub fn limits(&self, run: &Slo) -> Slo {
        let Some(own) = self.slo else { return *run };
        Slo { ttft: run.ttft.and(own.ttft), tpot: run.tpot.and(own.tpot), e2el: run.e2el.and(own.e2el) }
    }

    /// True if it met every limit ([`Self::limits`]). Refused, failed, short and unanswered requests meet none. A whole
    /// answer of one token has no TPOT to meet.
    pub fn meets(&self, slo: &Slo) -> bool {
        let within = |found: Option<Duration>, wanted: Option<Duration>| match wanted {
            None => true,
            Some(wanted) => found.is_some_and(|found| found <= wanted),
        };
        let slo = self.limits(slo);
        self.is_whole()
            && within(self.ttft(), slo.ttft)
            && (self.tokens.len() == 1 || within(self.tpot(), slo.tpot))
            && within(Some(self.e2el()), slo.e2el)
    }
}
