//! Service level objectives: latency limits that a request has to meet, all of them at once.

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
