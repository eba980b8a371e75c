//! Order of the jobs that wait at an encoder worker, for a thread that preprocesses them and for a forward: a request's items
//! together, the request with the least work left first.
//!
//! Jobs are ranked by request: the smaller priority, then the earlier due time. A request is due at its arrival plus
//! [`WORK_WEIGHT`] times the work of its waiting jobs. That is shortest remaining work first, with ageing: of requests that
//! arrive together the one that can be done soonest goes first, and one that has begun stays ahead, since it has less left.
//! A request is overtaken only by those that arrive within [`WORK_WEIGHT`] times its own work, so none starves.
//! The first half is that of Harchol-Balter et al., "Size-based Scheduling to Improve Web Performance" (2003).
//!
//! Pure: the worker's threads and the planner's simulator hand in what waits. It knows no clock and no queue.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use triptych_core::RequestId;

/// Weight of a request's work against its age: others overtake it for that many times its own work. Larger values favour
/// short requests and make the longest wait; with 4 the 99th percentile stays as it is in arrival order
/// (`services/plan/tests/plan/first_images.rs`).
pub const WORK_WEIGHT: u32 = 4;

/// Order in which waiting jobs are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JobOrder {
    /// By request, the least work left first.
    #[default]
    LeastWorkLeft,
    /// In order of arrival, as vLLM's encoder does.
    Arrival,
}

/// The request that a job belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobOwner {
    /// The request that asked first; `None`: the job is a request of its own.
    pub request: Option<RequestId>,
    /// Its priority: smaller is more urgent.
    pub priority: i32,
    /// Arrival of the job, since a fixed point that all jobs of a worker share.
    pub arrived: Duration,
}

/// A job that waits.
#[derive(Clone, Copy, Debug)]
pub struct WaitingJob {
    /// Its number, in order of arrival.
    pub id: u64,
    /// Its request.
    pub owner: JobOwner,
    /// Its predicted work.
    pub work: Duration,
}

/// Place of a job in the order: the smallest is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobRank {
    priority: i32,
    due: Duration,
    /// The request's first job here, so that jobs of two requests that are due at once do not mix.
    first: u64,
    id: u64,
}

/// A request's waiting jobs.
#[derive(Clone, Copy)]
struct RequestWork {
    priority: i32,
    arrived: Duration,
    left: Duration,
    first: u64,
}

impl RequestWork {
    fn of(job: &WaitingJob) -> Self {
        let JobOwner { priority, arrived, .. } = job.owner;
        Self { priority, arrived, left: job.work, first: job.id }
    }

    fn with(self, job: &WaitingJob) -> Self {
        let JobOwner { priority, arrived, .. } = job.owner;
        Self {
            priority: self.priority.min(priority),
            arrived: self.arrived.min(arrived),
            left: self.left.saturating_add(job.work),
            first: self.first.min(job.id),
        }
    }

    fn rank(self, id: u64) -> JobRank {
        let due = self.arrived.saturating_add(self.left.saturating_mul(WORK_WEIGHT));
        JobRank { priority: self.priority, due, first: self.first, id }
    }
}

/// Ranks of all waiting jobs, by their numbers.
pub fn ranks(order: JobOrder, waiting: &[WaitingJob]) -> HashMap<u64, JobRank> {
    if order == JobOrder::Arrival {
        let alone =
            |job: &WaitingJob| JobRank { priority: 0, due: Duration::ZERO, first: job.id, id: job.id };
        return waiting.iter().map(|job| (job.id, alone(job))).collect();
    }
    let mut requests: HashMap<RequestId, RequestWork> = HashMap::new();
    for job in waiting {
        if let Some(request) = job.owner.request {
            let work = requests.get(&request).map_or_else(|| RequestWork::of(job), |work| work.with(job));
            requests.insert(request, work);
        }
    }
    let rank = |job: &WaitingJob| {
        let of_request = job.owner.request.and_then(|request| requests.get(&request).copied());
        (job.id, of_request.unwrap_or_else(|| RequestWork::of(job)).rank(job.id))
    };
    waiting.iter().map(rank).collect()
}

/// Removes the next of those that wait: the one with the smallest rank, of equal ones the one in front. One without a rank
/// does not wait any more, and is out of the way first.
pub fn take_next<T>(waiting: &mut VecDeque<T>, rank: impl Fn(&T) -> Option<JobRank>) -> Option<T> {
    let (next, _) = waiting.iter().enumerate().min_by_key(|(_, one)| rank(one))?;
    waiting.remove(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A job: request (0: none), priority, arrival and work in milliseconds. Its number is its place in the list.
    type Job = (u128, i32, u32, u32);

    fn waiting(jobs: &[Job]) -> Vec<WaitingJob> {
        let job = |(id, (request, priority, arrived, work)): (usize, &Job)| WaitingJob {
            id: id as u64,
            owner: JobOwner {
                request: (*request > 0).then(|| RequestId::from_bits(*request)),
                priority: *priority,
                arrived: *arrived * MS,
            },
            work: *work * MS,
        };
        jobs.iter().enumerate().map(job).collect()
    }

    fn in_order(order: JobOrder, jobs: &[Job]) -> Vec<u64> {
        let mut all: Vec<_> = ranks(order, &waiting(jobs)).into_iter().collect();
        all.sort_by_key(|(_, rank)| *rank);
        all.into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn jobs_go_by_request_the_least_work_left_first() {
        let cases: [(&str, &[Job], &[u64]); 8] = [
            ("nothing waits", &[], &[]),
            ("alike, in order of arrival", &[(1, 0, 0, 9), (2, 0, 1, 9), (3, 0, 2, 9)], &[0, 1, 2]),
            ("the short request first", &[(1, 0, 0, 90), (2, 0, 0, 10)], &[1, 0]),
            ("items together", &[(1, 0, 0, 9), (2, 0, 0, 9), (1, 0, 0, 9), (2, 0, 0, 9)], &[0, 2, 1, 3]),
            ("one item before two", &[(1, 0, 0, 9), (1, 0, 0, 9), (2, 0, 0, 9)], &[2, 0, 1]),
            (
                "the one that has begun",
                &[(1, 0, 0, 9), (1, 0, 0, 9), (2, 0, 1, 9), (2, 0, 1, 9)],
                &[0, 1, 2, 3],
            ),
            ("the more urgent priority", &[(1, 0, 0, 1), (2, -1, 5, 99)], &[1, 0]),
            ("without a request, alone", &[(0, 0, 0, 9), (0, 0, 0, 3)], &[1, 0]),
        ];
        for (what, jobs, expect) in cases {
            assert_eq!(in_order(JobOrder::LeastWorkLeft, jobs), expect, "{what}");
        }
    }

    #[test]
    fn the_next_is_taken_out_and_the_others_stay_in_their_places() {
        let ranks = ranks(JobOrder::LeastWorkLeft, &waiting(&[(1, 0, 0, 90), (2, 0, 0, 10), (3, 0, 0, 50)]));
        let mut queue: VecDeque<u64> = [0, 9, 1, 2].into();
        let mut taken = Vec::new();
        while let Some(id) = take_next(&mut queue, |id| ranks.get(id).copied()) {
            taken.push(id);
        }
        assert_eq!(taken, [9, 1, 2, 0], "9 has no rank");
    }

    #[test]
    fn arrival_ignores_work_and_priority() {
        assert_eq!(in_order(JobOrder::Arrival, &[(1, 0, 0, 90), (2, -1, 0, 10), (1, 0, 0, 1)]), [0, 1, 2]);
    }

    /// A long request is passed by short ones for `WORK_WEIGHT` times its own work, and then by none.
    #[test]
    fn a_long_request_ages_to_the_front() {
        let (long, short) = (100, 10);
        let end = WORK_WEIGHT * (long - short);
        let goes_first =
            |arrived: u32| in_order(JobOrder::LeastWorkLeft, &[(1, 0, 0, long), (2, 0, arrived, short)])[0];
        assert_eq!([0, end - 1, end, end + 1].map(goes_first), [1, 1, 0, 0]);
    }

    /// A request whose first item was encoded has less left and is not left behind by one of equal size.
    #[test]
    fn a_request_that_has_begun_is_finished_first() {
        let jobs: &[Job] = &[(1, 0, 30, 9), (2, 0, 0, 9), (2, 0, 0, 9), (2, 0, 0, 9)];
        assert_eq!(in_order(JobOrder::LeastWorkLeft, jobs)[0], 0, "one item left of request 1");
    }
}
