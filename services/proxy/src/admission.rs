//! Admission: the bound on requests that are worked on at once, and the refusal of items that would not be encoded in
//! time. A refusal is immediate, and names the pause after which to try again.
//!
//! The last of the places are for requests that need no encoder: while more requests with items come than encoders can serve,
//! those that wait would have all places, and requests of text alone none (trunk reservation).

use crate::fleet::Forecast;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use triptych_core::{Failure, FailureClass};

/// The bound on requests in flight. Taken before a body is read, so that it bounds memory too. It may change meanwhile:
/// requests over a lower bound end as they would have.
#[derive(Clone, Debug)]
pub struct Admission(Arc<Places>);

#[derive(Debug)]
struct Places {
    limit: AtomicUsize,
    n_inside: AtomicUsize,
}

/// A request's place; given back when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Permit(Arc<Place>);

#[derive(Debug)]
struct Place {
    places: Arc<Places>,
    /// True once its request may have items, as it then may to its end: a session is asked for each of its items.
    may_have_items: AtomicBool,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.n_inside.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Part of the places that requests with items leave to those without: an eighth.
const LEFT_FOR_TEXT: usize = 8;

impl Permit {
    /// Asks whether its request may have items, which an encoder has to read. To be asked before they cost anything.
    ///
    /// # Errors
    /// Overloaded, when only the places of requests without items are left.
    pub fn with_items(&self) -> Result<(), Failure> {
        let Place { places, may_have_items } = &*self.0;
        let limit = places.limit.load(Ordering::Acquire);
        let most = limit - limit / LEFT_FOR_TEXT;
        if !may_have_items.load(Ordering::Acquire) && places.n_inside.load(Ordering::Acquire) > most {
            return Err(Failure::new(
                FailureClass::Overloaded,
                format!(
                    "the server works on {most} requests already; the rest of its limit of {limit} is for requests \
                     without images, audio or video; try again"
                ),
            ));
        }
        may_have_items.store(true, Ordering::Release);
        Ok(())
    }
}

impl Admission {
    /// Admission of this many requests at once; at least one.
    pub fn new(n_places: usize) -> Self {
        Self(Arc::new(Places { limit: AtomicUsize::new(n_places.max(1)), n_inside: AtomicUsize::new(0) }))
    }

    /// Takes a place.
    ///
    /// # Errors
    /// Overloaded, with the number of places.
    pub fn enter(&self) -> Result<Permit, Failure> {
        let limit = self.limit();
        let taken =
            self.0.n_inside.try_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < limit).then(|| n + 1));
        match taken {
            Ok(_) => Ok(Permit(Arc::new(Place {
                places: Arc::clone(&self.0),
                may_have_items: AtomicBool::new(false),
            }))),
            Err(_) => Err(Failure::new(
                FailureClass::Overloaded,
                format!("the server works on {limit} requests already, its limit; try again"),
            )),
        }
    }

    /// Requests that are worked on.
    pub fn n_inside(&self) -> usize {
        self.0.n_inside.load(Ordering::Acquire)
    }

    /// The bound.
    pub fn limit(&self) -> usize {
        self.0.limit.load(Ordering::Acquire)
    }

    /// Changes the bound, for requests that are still to come; at least one.
    pub fn set_limit(&self, n_places: usize) {
        self.0.limit.store(n_places.max(1), Ordering::Release);
    }
}

/// The shortest and the longest pause that is asked for.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

/// Refuses an item whose encoder output would come too late to be of use: the work on it would only keep others waiting.
/// An encode that nobody can foresee is admitted.
///
/// # Errors
/// Overloaded, with the pause after which the queue should be short enough.
pub fn in_time(forecast: Option<Forecast>, left: Duration) -> Result<(), Failure> {
    let Some(late) = forecast.and_then(|f| f.end().checked_sub(left)).filter(|late| !late.is_zero()) else {
        return Ok(());
    };
    let pause = late.clamp(PAUSES.0, PAUSES.1);
    let message = format!(
        "an item would be encoded in {:.1} s and has {:.1} s; try again in {:.1} s",
        (left + late).as_secs_f32(),
        left.as_secs_f32(),
        pause.as_secs_f32()
    );
    Err(Failure::new(FailureClass::Overloaded, message).with_retry_after(pause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_that_would_be_late_is_refused_until_the_queue_is_short_enough() {
        let ms = Duration::from_millis;
        let forecast = |queue, cost| {
            Some(Forecast { cold: Duration::ZERO, queue: ms(queue), cost: ms(cost), p95: ms(cost) })
        };
        for (forecast, left, pause) in [
            (None, 0, None),
            (forecast(0, 500), 500, None),
            (forecast(9000, 1000), 12_000, None),
            (forecast(9000, 1000), 6000, Some(4000)),
            (forecast(0, 501), 500, Some(100)),
            (forecast(900_000, 1000), 500, Some(60_000)),
        ] {
            let refused = in_time(forecast, ms(left)).err();
            assert_eq!(refused.as_ref().and_then(|f| f.retry_after), pause.map(ms), "{forecast:?} {left}");
            assert!(refused.is_none_or(|f| f.class == FailureClass::Overloaded && f.message.contains("try again in")));
        }
    }

    #[test]
    fn a_place_is_free_again_when_its_permit_is_dropped() {
        let admission = Admission::new(1);
        let permit = admission.enter().unwrap();
        let failure = admission.enter().unwrap_err();
        assert_eq!(failure.class, FailureClass::Overloaded);
        assert!(failure.message.contains("1 requests"), "{failure}");
        drop(permit);
        assert!(admission.enter().is_ok());
    }

    #[test]
    fn the_last_eighth_of_the_places_is_for_requests_without_items() {
        let admission = Admission::new(16);
        let mut permits: Vec<_> = (0..14).map(|_| admission.enter().unwrap()).collect();
        assert!(permits[13].with_items().is_ok());
        permits.extend([admission.enter().unwrap(), admission.enter().unwrap()]);
        let failure = permits[15].with_items().unwrap_err();
        assert_eq!(failure.class, FailureClass::Overloaded);
        assert!(
            failure.message.contains("14 requests") && failure.message.contains("limit of 16"),
            "{failure}"
        );
        assert!(permits[13].with_items().is_ok(), "what it was allowed it stays allowed");
        permits.drain(..2);
        assert!(permits[13].with_items().is_ok(), "there is room again");
        let few = Admission::new(7);
        let permits: Vec<_> = (0..7).map(|_| few.enter().unwrap()).collect();
        assert!(permits[6].with_items().is_ok(), "an eighth of these is none");
    }

    #[test]
    fn a_lower_limit_ends_nothing_and_a_higher_one_holds_at_once() {
        let admission = Admission::new(2);
        let permits = [admission.enter().unwrap(), admission.enter().unwrap()];
        admission.set_limit(1);
        assert!(admission.enter().unwrap_err().message.contains("1 requests"));
        assert_eq!(admission.n_inside(), 2);
        admission.set_limit(3);
        let third = admission.enter().unwrap();
        assert!(admission.enter().is_err());
        drop((permits, third));
        assert_eq!((admission.n_inside(), admission.limit()), (0, 3));
    }
}
