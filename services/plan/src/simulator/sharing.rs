//! Something that several share: the cores of a worker, the bandwidth of a store. Each task gets its share, as
//! the kernel's scheduler gives it: tasks that want no more than there is run at full speed, otherwise all are slowed
//! down alike. A task may be slower still, by what runs elsewhere.

use super::event_queue::Nanos;

/// Ends less than this apart are one: times are whole nanoseconds, and shares are not.
const EPSILON: f64 = 0.5;

/// A shared resource, and the tasks that share it.
#[derive(Clone, Debug)]
pub(super) struct Sharing<T> {
    /// Of which `width` of a task is a part.
    capacity: f64,
    tasks: Vec<Task<T>>,
    at: Nanos,
    /// Capacity that was used, in nanoseconds.
    used: f64,
    version: u64,
}

#[derive(Clone, Debug)]
struct Task<T> {
    name: T,
    /// Time left at full speed, in nanoseconds.
    left: f64,
    width: f64,
    /// Factor on its time, beside what its share makes of it.
    slowdown: f64,
    /// Capacity that it used, in nanoseconds.
    used: f64,
}

/// A task that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ended<T> {
    /// Its name.
    pub(super) name: T,
    /// Capacity that it used, in nanoseconds: of cores, its processor time.
    pub(super) used: f64,
}

impl<T> Sharing<T> {
    /// Nobody is there.
    pub(super) fn new(capacity: f64) -> Self {
        Self { capacity, tasks: Vec::new(), at: 0, used: 0.0, version: 0 }
    }

    /// A task that takes so long at full speed, and then wants so much.
    pub(super) fn start(&mut self, now: Nanos, name: T, (work, width): (Nanos, f64)) {
        self.advance(now);
        self.tasks.push(Task { name, left: work as f64, width, slowdown: 1.0, used: 0.0 });
    }

    /// Time at which the first of them ends if nobody comes, and the number under which that holds: any change gives another.
    pub(super) fn next(&mut self) -> Option<(Nanos, u64)> {
        let least = self.tasks.iter().map(|task| task.left * task.slowdown).min_by(f64::total_cmp)?;
        self.version += 1;
        let pause = (least / self.rate()).ceil().max(0.0);
        Some((self.at.saturating_add(pause as Nanos), self.version))
    }

    /// True if nothing has changed since [`Self::next`] gave this number.
    pub(super) fn is_current(&self, version: u64) -> bool {
        self.version == version
    }

    /// Sets each task's slowdown from now on. True if any has changed.
    pub(super) fn slow_down(&mut self, now: Nanos, factor: impl Fn(&T) -> f64) -> bool {
        self.advance(now);
        let mut has_changed = false;
        for task in &mut self.tasks {
            let slowdown = factor(&task.name).max(1.0);
            has_changed |= (slowdown - task.slowdown).abs() > 1e-9;
            task.slowdown = slowdown;
        }
        has_changed
    }

    /// Tasks, and the part of the capacity that each uses.
    pub(super) fn shares(&self) -> impl Iterator<Item = (&T, f64)> {
        let rate = self.rate();
        self.tasks.iter().map(move |task| (&task.name, task.width * rate))
    }

    /// Takes out the tasks that have ended by now.
    pub(super) fn ended(&mut self, now: Nanos) -> Vec<Ended<T>> {
        self.advance(now);
        let (mut ended, mut rest) = (Vec::new(), Vec::with_capacity(self.tasks.len()));
        for task in self.tasks.drain(..) {
            match task.left <= EPSILON {
                true => ended.push(Ended { name: task.name, used: task.used }),
                false => rest.push(task),
            }
        }
        self.tasks = rest;
        ended
    }

    /// Capacity that was used until now, in nanoseconds.
    pub(super) fn used(&mut self, now: Nanos) -> f64 {
        self.advance(now);
        self.used
    }

    /// Width that all tasks want together.
    pub(super) fn width(&self) -> f64 {
        self.tasks.iter().map(|task| task.width).sum()
    }

    fn rate(&self) -> f64 {
        let width = self.width();
        if width > self.capacity { self.capacity / width } else { 1.0 }
    }

    fn advance(&mut self, now: Nanos) {
        let passed = now.saturating_sub(self.at) as f64;
        if passed > 0.0 && !self.tasks.is_empty() {
            let rate = self.rate();
            self.used += self.width() * rate * passed;
            for task in &mut self.tasks {
                task.left -= rate * passed / task.slowdown;
                task.used += task.width * rate * passed;
            }
        }
        self.at = self.at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<T>(ended: Vec<Ended<T>>) -> Vec<T> {
        ended.into_iter().map(|task| task.name).collect()
    }

    #[test]
    fn tasks_run_alone_at_full_speed_and_together_at_their_share() {
        let mut cores = Sharing::new(2.0);
        cores.start(0, 'a', (100, 2.0));
        let (at, version) = cores.next().unwrap();
        assert_eq!(at, 100);
        cores.start(50, 'b', (30, 1.0));
        cores.start(50, 'c', (30, 1.0));
        // Four want two cores: half speed, so both of them end after 60.
        let (at, newer) = cores.next().unwrap();
        assert_eq!(at, 110);
        assert!(!cores.is_current(version) && cores.is_current(newer));
        assert_eq!(names(cores.ended(110)), ['b', 'c']);
        let (at, _) = cores.next().unwrap();
        assert_eq!(at, 130);
        // Alone for 50, half of its width for 60, alone for 20.
        let [ended] = cores.ended(at)[..] else { panic!("one task is left") };
        assert!(ended.name == 'a' && (ended.used - 200.0).abs() < 1.0, "{ended:?}");
        assert!(cores.width() == 0.0 && cores.next().is_none());
        assert!((cores.used(1000) - 2.0 * 130.0).abs() < 1.0);
    }

    #[test]
    fn a_task_is_slowed_for_as_long_as_something_runs_elsewhere() {
        let mut cores = Sharing::new(1.0);
        cores.start(0, 'a', (100, 1.0));
        assert!(cores.slow_down(0, |_| 2.0) && !cores.slow_down(0, |_| 2.0));
        assert_eq!(cores.next().unwrap().0, 200);
        // A quarter of the work is done; the rest takes its own time.
        assert!(cores.slow_down(50, |_| 1.0));
        assert_eq!(cores.next().unwrap().0, 125);
        assert_eq!(cores.shares().collect::<Vec<_>>(), [(&'a', 1.0)]);
        assert_eq!(names(cores.ended(125)), ['a']);
        assert!((cores.used(125) - 125.0).abs() < 1.0, "its core is held all the while");
    }

    #[test]
    fn an_endless_capacity_slows_nobody() {
        let mut store = Sharing::new(f64::INFINITY);
        for (name, work) in [('a', 10), ('b', 20)] {
            store.start(0, name, (work, 1.0));
        }
        assert_eq!(store.next().unwrap().0, 10);
        assert_eq!(names(store.ended(10)), ['a']);
        assert_eq!(names(store.ended(20)), ['b']);
    }
}
