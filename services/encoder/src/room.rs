//! Room in bytes that forwards or jobs of a worker share: who takes some waits until there is enough.
//!
//! Whoever wants more than there is gets it alone, so that nobody waits for ever; what must not run at all is refused before
//! ([`crate::bound`], [`crate::pool`]).

use parking_lot::{Condvar, Mutex};
use std::pin::pin;
use std::sync::Arc;
use tokio::sync::Notify;

/// Room that is shared. Clones share it.
#[derive(Clone, Debug)]
pub struct ByteRoom(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    room: Mutex<Room>,
    // For threads that compute, and for tasks.
    freed: Condvar,
    notify: Notify,
}

#[derive(Clone, Copy, Debug)]
struct Room {
    capacity: usize,
    used: usize,
}

/// Bytes that were taken. Given back when dropped.
#[derive(Debug)]
pub struct TakenBytes {
    of: ByteRoom,
    n_bytes: usize,
}

impl ByteRoom {
    /// Room of so many bytes.
    pub fn new(capacity: usize) -> Self {
        let room = Mutex::new(Room { capacity, used: 0 });
        Self(Arc::new(Shared { room, freed: Condvar::new(), notify: Notify::new() }))
    }

    /// Bytes that it has in all.
    pub fn capacity(&self) -> usize {
        self.0.room.lock().capacity
    }

    /// Sets the bytes that it has. What is taken stays so.
    pub fn resize(&self, capacity: usize) {
        self.0.room.lock().capacity = capacity;
        self.wake();
    }

    /// Takes bytes on a thread that may block.
    pub fn take_blocking(&self, n_bytes: usize) -> TakenBytes {
        let mut room = self.0.room.lock();
        while !room.take(n_bytes) {
            self.0.freed.wait(&mut room);
        }
        drop(room);
        TakenBytes { of: self.clone(), n_bytes }
    }

    /// Takes bytes.
    pub async fn take(&self, n_bytes: usize) -> TakenBytes {
        loop {
            // Registered before the look, so that no change between the two is missed.
            let mut freed = pin!(self.0.notify.notified());
            freed.as_mut().enable();
            if self.0.room.lock().take(n_bytes) {
                return TakenBytes { of: self.clone(), n_bytes };
            }
            freed.await;
        }
    }

    fn wake(&self) {
        self.0.freed.notify_all();
        self.0.notify.notify_waiters();
    }
}

impl Room {
    fn take(&mut self, n_bytes: usize) -> bool {
        let used = self.used.saturating_add(n_bytes);
        let fits = self.used == 0 || used <= self.capacity;
        if fits {
            self.used = used;
        }
        fits
    }
}

impl TakenBytes {
    /// Holds so many from now on, whether or not there is room for more: what is there cannot be put off.
    pub fn resize(&mut self, n_bytes: usize) {
        let mut room = self.of.0.room.lock();
        room.used = room.used.saturating_sub(self.n_bytes).saturating_add(n_bytes);
        drop(room);
        self.n_bytes = n_bytes;
        self.of.wake();
    }
}

impl Drop for TakenBytes {
    fn drop(&mut self) {
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn who_takes_more_than_is_left_waits_and_who_is_alone_gets_all() {
        let room = ByteRoom::new(10);
        let mut first = room.take(6).now_or_never().expect("room");
        assert!(room.take(5).now_or_never().is_none());
        first.resize(5);
        let second = room.take(5).now_or_never().expect("room");
        drop((first, second));
        let most = room.take(99).now_or_never().expect("alone");
        assert!(room.take(1).now_or_never().is_none());
        drop(most);
        room.resize(3);
        assert_eq!(room.capacity(), 3);
        let _small = room.take(2).now_or_never().expect("room");
        assert!(room.take(2).now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_task_that_waits_goes_on_when_bytes_are_given_back() {
        let room = ByteRoom::new(1);
        let held = room.take(1).await;
        let waiting = tokio::spawn({
            let room = room.clone();
            async move { drop(room.take(1).await) }
        });
        tokio::task::yield_now().await;
        drop(held);
        waiting.await.expect("it goes on");
    }

    #[test]
    fn a_thread_that_waits_goes_on_when_bytes_are_given_back() {
        let room = ByteRoom::new(1);
        let held = room.take_blocking(1);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(room.take_blocking(1)));
            drop(held);
            waiting.join().expect("it goes on");
        });
    }
}
