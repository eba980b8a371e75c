//! Tensors that are sizes alone, and the memory that a forward over them would take on the CPU back end's thread.

use parking_lot::Mutex;
use std::sync::Arc;
use triptych_kernels::cpu::{Kept, Room};

/// Bytes of a value.
const VALUE: usize = size_of::<f32>();

/// Memory of a thread: of tensors that live, of those it keeps, and the most that both had. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Activations(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    kept: Kept<Size>,
    n_bytes: usize,
    // Of them those of values that left.
    n_given_away: usize,
    most: usize,
}

/// Values that there is room for.
struct Size(usize);

impl Room for Size {
    fn n_values(&self) -> usize {
        self.0
    }
}

impl Taken {
    fn add(&mut self, n_bytes: usize) {
        self.n_bytes = self.n_bytes.saturating_add(n_bytes);
        self.most = self.most.max(self.n_bytes);
    }

    fn give_back(&mut self, n_bytes: usize) {
        self.n_bytes = self.n_bytes.saturating_sub(n_bytes);
    }
}

impl Activations {
    /// Room for a result, as the back end finds it: in what is kept, or else new.
    pub fn result(&self, (n_tokens, width): (usize, usize)) -> SizedTensor {
        let n = n_tokens.saturating_mul(width);
        let mut taken = self.0.lock();
        let room = match taken.kept.take(n) {
            Some(Size(room)) => room,
            None => {
                taken.add(n.saturating_mul(VALUE));
                n
            }
        };
        drop(taken);
        self.tensor(room, (n_tokens, width))
    }

    /// New room.
    pub fn fresh(&self, (n_tokens, width): (usize, usize)) -> SizedTensor {
        let n = n_tokens.saturating_mul(width);
        self.0.lock().add(n.saturating_mul(VALUE));
        self.tensor(n, (n_tokens, width))
    }

    /// Memory that is taken and given back at once.
    pub fn scratch(&self, n_bytes: usize) {
        let mut taken = self.0.lock();
        taken.add(n_bytes);
        taken.give_back(n_bytes);
    }

    /// Memory that is given back with the guard.
    pub fn held(&self, n_bytes: usize) -> HeldBytes {
        self.0.lock().add(n_bytes);
        HeldBytes { n_bytes, of: self.clone() }
    }

    /// Gives values away: their new owner has them until [`Self::take_back`].
    pub fn give_away(&self, tensor: SizedTensor) {
        if let Some(mut values) = tensor.values.and_then(Arc::into_inner) {
            let n = std::mem::take(&mut values.n_values);
            let mut taken = self.0.lock();
            taken.n_given_away = taken.n_given_away.saturating_add(n.saturating_mul(VALUE));
        }
    }

    /// Counts what was given away as dropped.
    pub fn take_back(&self) {
        let mut taken = self.0.lock();
        let n_bytes = std::mem::take(&mut taken.n_given_away);
        taken.give_back(n_bytes);
    }

    /// Forgets the forwards so far and what was kept of them.
    pub fn restart(&self) {
        let mut taken = self.0.lock();
        let n_kept = std::mem::take(&mut taken.kept).n_values();
        taken.give_back(n_kept.saturating_mul(VALUE));
        taken.most = taken.n_bytes;
    }

    /// The most bytes so far.
    pub fn most(&self) -> usize {
        self.0.lock().most
    }

    fn tensor(&self, n_values: usize, dims: (usize, usize)) -> SizedTensor {
        SizedTensor { values: Some(Arc::new(Values { n_values, of: self.clone() })), dims }
    }
}

/// Room for values, which a later tensor can take when it is dropped.
struct Values {
    n_values: usize,
    of: Activations,
}

impl Drop for Values {
    fn drop(&mut self) {
        let mut taken = self.of.0.lock();
        for Size(gone) in taken.kept.keep(Size(self.n_values)) {
            taken.give_back(gone.saturating_mul(VALUE));
        }
    }
}

/// Bytes that are given back when this is dropped.
pub struct HeldBytes {
    n_bytes: usize,
    of: Activations,
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.of.0.lock().give_back(self.n_bytes);
    }
}

/// `[n_tokens, width]` without values. A clone shares them until one of the two is written.
#[derive(Clone)]
pub struct SizedTensor {
    values: Option<Arc<Values>>,
    /// `(n_tokens, width)`.
    dims: (usize, usize),
}

impl SizedTensor {
    /// `(n_tokens, width)`.
    pub(super) fn dims(&self) -> (usize, usize) {
        self.dims
    }

    /// The same values with other dimensions.
    pub(super) fn reshape(self, dims: (usize, usize)) -> Self {
        Self { dims, ..self }
    }

    /// Has values of its own, as one that is written.
    pub(super) fn own(&mut self) {
        if let Some(values) = &self.values
            && Arc::strong_count(values) > 1
        {
            *self = values.of.clone().fresh(self.dims);
        }
    }
}
