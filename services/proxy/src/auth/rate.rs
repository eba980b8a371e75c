//! A rate limit: governor's token bucket over tokio's clock, which a test or a simulation moves by hand.

use governor::clock::Clock;
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;
use tokio::time::Instant;

/// A bucket that refills at a steady rate.
pub struct RateBucket {
    bucket: RateLimiter<NotKeyed, InMemoryState, SinceStart, NoOpMiddleware<Duration>>,
    clock: SinceStart,
}

#[derive(Clone, Copy, Debug)]
struct SinceStart(Instant);

impl Clock for SinceStart {
    type Instant = Duration;

    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// A refusal by the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateExceeded {
    /// There is room after this time.
    RetryAfter(Duration),
    /// The full bucket holds less.
    NeverFits,
}

impl RateBucket {
    /// `per_second` units a second, and at most `burst` at once. Full at the start.
    pub fn new(per_second: NonZeroU32, burst: NonZeroU32) -> Self {
        let clock = SinceStart(Instant::now());
        let quota = Quota::per_second(per_second).allow_burst(burst);
        Self { bucket: RateLimiter::direct_with_clock(quota, clock), clock }
    }

    /// Takes `n` units.
    ///
    /// # Errors
    /// [`RateExceeded`]; then nothing was taken.
    pub fn take(&self, n: u32) -> Result<(), RateExceeded> {
        let Some(n) = NonZeroU32::new(n) else { return Ok(()) };
        match self.bucket.check_n(n) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(until)) => Err(RateExceeded::RetryAfter(until.wait_time_from(self.clock.now()))),
            Err(_) => Err(RateExceeded::NeverFits),
        }
    }
}

impl fmt::Debug for RateBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RateBucket")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_second: u32, burst: u32) -> RateBucket {
        RateBucket::new(NonZeroU32::new(per_second).unwrap(), NonZeroU32::new(burst).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn the_reported_wait_is_enough() {
        let rate = rate(10, 10);
        assert_eq!(rate.take(10), Ok(()));
        let Err(RateExceeded::RetryAfter(wait)) = rate.take(5) else { panic!("the bucket is empty") };
        assert_eq!(wait, Duration::from_millis(500));
        tokio::time::advance(wait - Duration::from_millis(1)).await;
        assert!(rate.take(5).is_err());
        tokio::time::advance(Duration::from_millis(2)).await;
        assert_eq!(rate.take(5), Ok(()));
        assert_eq!(rate.take(11), Err(RateExceeded::NeverFits));
    }
}
