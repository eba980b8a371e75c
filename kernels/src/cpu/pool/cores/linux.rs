//! Cores of threads by the calls of Linux.

use std::cell::Cell;
use std::hint::spin_loop;
use std::time::Duration;

use rustix::process::{Pid, getpid};
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// A thread, by its number in the system.
pub type ThreadId = Pid;

/// Turns of an idle loop, 10 to 30 µs, in which the clock of a thread that has a core moves on.
const LOOK: usize = 600;

/// The calling thread.
pub fn current_thread() -> ThreadId {
    thread_local!(static ID: Cell<Option<Pid>> = const { Cell::new(None) });
    let id = ID.get().unwrap_or_else(gettid);
    ID.set(Some(id));
    id
}

/// Number of the core that the calling thread is on.
pub fn current_core() -> usize {
    sched_getcpu()
}

/// Times that the system put the calling thread off, since it began.
pub fn preemptions() -> u64 {
    // SAFETY: all bytes zero are a value of the type.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes one value of the type.
    let rc = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    if rc == 0 { u64::try_from(usage.ru_nivcsw).unwrap_or(0) } else { 0 }
}

/// Moves the first of these threads of this process that has no core to that of the caller, which then has to sleep.
pub fn pull(threads: impl IntoIterator<Item = ThreadId>) {
    let main = getpid();
    // Cores of the process are those of its first thread, which is never moved.
    let Some(cores) = sched_getaffinity(Some(main)).ok().filter(|cores| cores.count() > 1) else {
        return;
    };
    let movable = threads.into_iter().filter(|thread| *thread != main);
    let before: Vec<_> = movable.map(|thread| (thread, processor_time(thread))).collect();
    for _ in 0..LOOK {
        spin_loop();
    }
    let has_no_core = |(thread, time): &&(ThreadId, Option<Duration>)| {
        time.is_some_and(|time| processor_time(*thread) == Some(time))
    };
    if let Some((thread, _)) = before.iter().find(has_no_core) {
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        move_to(Some(*thread), &here, &cores);
    }
}

/// Moves the calling thread to another core if it is on this one; `true` if it was, and there is another.
pub fn leave(core: usize) -> bool {
    if sched_getcpu() != core {
        return false;
    }
    let Ok(cores) = sched_getaffinity(Some(getpid())) else { return false };
    let mut others = cores;
    others.unset(core);
    others.count() > 0 && move_to(None, &others, &cores)
}

/// Lets the calling thread be on all cores of the process but these, or on all if no other is left.
pub fn avoid(avoided: &[usize]) {
    let Ok(all) = sched_getaffinity(Some(getpid())) else { return };
    let mut some = all;
    avoided.iter().filter(|core| **core < CpuSet::MAX_CPU).for_each(|core| some.unset(*core));
    let allowed = if some.count() > 0 { some } else { all };
    // A system that does not let it changes nothing.
    let _ = sched_setaffinity(None, &allowed);
}

/// Moves a thread, the calling one if `None`, to one of `some` cores; then it has `all`. A thread that ended meanwhile, or a
/// system that does not let it, changes nothing.
fn move_to(thread: Option<ThreadId>, some: &CpuSet, all: &CpuSet) -> bool {
    sched_setaffinity(thread, some).is_ok() && sched_setaffinity(thread, all).is_ok()
}

/// Processor time of all threads of this process, since it began.
pub fn processor_time_of_process() -> Duration {
    time_of(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or_default()
}

/// Processor time of a thread of this process; `None` if it has ended.
fn processor_time(thread: ThreadId) -> Option<Duration> {
    /// The clock of a thread, not of a process, and of the scheduler (`CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED`).
    const KIND: libc::clockid_t = 6;
    time_of((!thread.as_raw_nonzero().get() << 3) | KIND)
}

/// Time of a clock; `None` if there is no such clock.
fn time_of(clock: libc::clockid_t) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one value of the type.
    let rc = unsafe { libc::clock_gettime(clock, &raw mut time) };
    let (seconds, nanos) = (u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?);
    (rc == 0).then(|| Duration::new(seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    /// Keeps the calling thread on a core.
    fn stay_on(core: usize) {
        let mut cores = CpuSet::new();
        cores.set(core);
        sched_setaffinity(None, &cores).expect("a core of the process");
    }

    #[test]
    fn the_time_of_a_thread_is_in_that_of_its_process() {
        let thread_time = || processor_time(current_thread()).expect("a thread that runs");
        let (of_process, of_thread) = (processor_time_of_process(), thread_time());
        while thread_time() < of_thread + Duration::from_millis(2) {
            spin_loop();
        }
        assert!(processor_time_of_process() >= of_process + Duration::from_millis(2));
    }

    #[test]
    fn a_thread_without_a_core_is_pulled_from_those_that_it_may_not_leave() {
        let all = sched_getaffinity(Some(getpid())).expect("cores of the process");
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core)).collect();
        let [first, .., last] = cores[..] else { return };
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let (send, receive) = mpsc::channel();
            // Two share a core, so that each is without one half of the time.
            for _ in 0..2 {
                let (send, stop) = (send.clone(), &stop);
                scope.spawn(move || {
                    stay_on(first);
                    send.send(current_thread()).expect("a receiver");
                    while !stop.load(Ordering::Relaxed) {
                        spin_loop();
                    }
                });
            }
            let threads = [receive.recv().expect("a thread"), receive.recv().expect("a thread")];
            let puller = scope.spawn(move || {
                stay_on(last);
                let is_free =
                    |thread: &ThreadId| sched_getaffinity(Some(*thread)).is_ok_and(|own| own == all);
                // Each time finds one without a core or does not; all of them take seconds.
                (0..100_000).any(|_| {
                    pull(threads);
                    thread::yield_now();
                    threads.iter().any(is_free)
                })
            });
            let is_pulled = puller.join().expect("no panic");
            stop.store(true, Ordering::Relaxed);
            assert!(is_pulled);
        });
    }

    #[test]
    fn a_thread_leaves_a_core_and_may_have_all_again() {
        thread::spawn(|| {
            let all = sched_getaffinity(Some(getpid())).expect("cores of the process");
            assert!(!leave(CpuSet::MAX_CPU), "it is on another one");
            // Where there are two cores it leaves one; the system may move it while this looks.
            let has_left = (0..1000).any(|_| leave(current_core()));
            assert_eq!(has_left, all.count() > 1);
            assert!(sched_getaffinity(None).expect("its cores") == all);
        })
        .join()
        .expect("no panic");
    }
}
