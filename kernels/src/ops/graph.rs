//! Forwards of fixed shapes that a back end captures once and replays with other inputs, as a CUDA graph.
//!
//! The host takes part in a forward once, when it is captured: it chooses launches by the shapes of the inputs. A replay
//! repeats these launches, over the values that the inputs have then. So all inputs of a replay have the shapes of the
//! captured ones, and what a batch lacks is padding that the caller stages.

use super::error::Result;
use super::stage::StageBuilder;

/// Inputs of a forward: arrays that ops index with, and rows of features.
#[derive(Debug)]
pub struct ForwardInputs {
    /// The arrays.
    pub arrays: StageBuilder,
    /// Features, `[n_rows, width]`, row-major; none for a forward that begins with a table.
    pub features: Vec<f32>,
    /// `(n_rows, width)` of the features.
    pub dims: (usize, usize),
}

/// A captured forward, with its inputs, its result and all memory between them at fixed addresses.
///
/// A replay rewrites every input, and its result is in other memory when it returns: nothing of a replay is left for the next,
/// but what the forward wrote to caches.
pub trait CapturedForward: Send {
    /// Runs the forward over other inputs. Returns the first `n_rows` rows of its result, row-major.
    ///
    /// # Errors
    /// [`KernelError::Shape`](super::KernelError::Shape) for inputs of other shapes, or an array whose values the captured
    /// launches do not allow; errors of the device.
    fn replay(&mut self, inputs: ForwardInputs, n_rows: usize) -> Result<Vec<f32>>;

    /// Bytes of device memory that it keeps.
    fn n_bytes(&self) -> usize;
}

/// Change of the arrays of a forward that a device makes before it runs over them.
pub type Prepare<'a, S> = dyn FnMut(&S) -> Result<()> + 'a;

/// A captured forward whose arrays `S` and result `T` may stay on the device of the back end that captured it.
pub trait DeviceForward<T, S>: CapturedForward {
    /// Runs the forward over other inputs. `prepare` gets their arrays where the graph reads them: the handles are those of the
    /// builder that was captured. Returns a copy of the first `n_rows` rows of the result, which later replays leave as it is.
    /// It does not wait for the device.
    ///
    /// # Errors
    /// As [`CapturedForward::replay`], and those of `prepare`.
    fn replay_on_device(
        &mut self,
        inputs: ForwardInputs,
        n_rows: usize,
        prepare: &mut Prepare<'_, S>,
    ) -> Result<T>;
}

/// A captured forward of a back end `B`.
pub type Captured<B> = dyn DeviceForward<<B as super::Backend>::Tensor, <B as super::Backend>::Step>;
