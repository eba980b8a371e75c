//! A child must not outlive its supervisor, even one that was killed and could not say goodbye.

use std::process::exit;

/// Asks the kernel to kill this process when the supervisor ends, and ends now if it has ended already.
///
/// Linux binds the request to the thread that started this process; the supervisor starts its children on its
/// main thread, which ends only with the process.
pub fn die_with(supervisor_pid: u32) {
    #[cfg(target_os = "linux")]
    // Fails only for a signal that does not exist.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // Between the start of this process and the line above the supervisor may have ended unseen.
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent != i32::try_from(supervisor_pid).ok() {
        exit(1);
    }
}
