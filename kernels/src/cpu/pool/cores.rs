//! Cores of threads beside neighbours.
//!
//! A thread that the system puts off in the middle of a task holds up its op for milliseconds, while the threads that wait for
//! it leave their cores idle: the system moves it there late, as it has just run. [`pull`] does at once. And where others
//! compute too, the system leaves two threads of a process on one core for as long as the number of threads on each
//! core is as even as it can be; [`leave`] moves one to a core of a neighbour, which shares it with any thread.
//!
//! Both allow a thread fewer cores for a moment, and then those of the process again. [`avoid`] does so until it is told otherwise.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod other;

#[cfg(target_os = "linux")]
pub(super) use linux::{
    ThreadId, avoid, current_core, current_thread, leave, preemptions, processor_time_of_process, pull,
};
#[cfg(not(target_os = "linux"))]
pub(super) use other::{
    ThreadId, avoid, current_core, current_thread, leave, preemptions, processor_time_of_process, pull,
};
