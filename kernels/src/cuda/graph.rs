//! Forwards captured as CUDA graphs.
//!
//! A forward runs once over an arena of its own, so that its memory is allocated, its kernels are loaded and its products have
//! algorithms; then it is captured on a stream that nothing else uses, with the same pieces in the same order. The graph is
//! launched on the stream of eager work. The arena, the inputs and the result belong to the graph: a graph does not keep memory
//! alive, and its launches have addresses.

use std::sync::Arc;

use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
use cudarc::driver::sys::{CUgraphExec, CUgraphInstantiate_flags};
use cudarc::driver::{CudaStream, result};

use super::device::Device;
use super::error::InOp;
use super::memory::Pool;
use super::queue::{Queue, as_bytes};
use super::recording::Recording;
use super::tensor::{CudaStep, CudaTensor};
use crate::check;
use crate::ops::{CapturedForward, DeviceForward, ForwardInputs, KernelError, Prepare, Result};

/// The op that errors of a replay name.
const REPLAY: &str = "replay";

/// A captured forward and everything at the addresses that it has.
struct CudaForward {
    // Dropped before the memory that it names.
    executable: Executable,
    queue: Arc<Queue>,
    step: CudaStep,
    features: CudaTensor,
    out: CudaTensor,
    recording: Arc<Recording>,
    arena: Arc<Pool>,
}

/// Runs a forward once on a stream and captures it. `forward` gets the queue to submit to.
pub(super) fn capture<E: From<KernelError>>(
    queue: &Arc<Queue>,
    inputs: ForwardInputs,
    forward: &mut dyn FnMut(Queue, &CudaStep, &CudaTensor) -> Result<CudaTensor, E>,
) -> Result<Box<dyn DeviceForward<CudaTensor, CudaStep>>, E> {
    let op = "capture";
    let arena = Pool::new(queue.device());
    let recording = Arc::new(Recording::new(queue.device()));
    let ForwardInputs { arrays, features: values, dims } = inputs;
    check::upload(values.len(), dims.0, dims.1)?;
    let host = arrays.finish();
    let words = arena.take(op, size_of_val(host.words()))?;
    queue.upload_to(op, words.address(), as_bytes(host.words()))?;
    let step = CudaStep::at(host, words);
    let features = CudaTensor::new(op, &queue.warm_up(&arena, &recording), dims)?;
    features.fill_rows(op, queue, 0, &values)?;
    drop(forward(queue.warm_up(&arena, &recording), &step, &features)?);
    let capturing = Capturing::begin(queue)?;
    let out = forward(queue.capture(&capturing.stream, &arena, &recording), &step, &features)?;
    let executable = capturing.end()?;
    let queue = Arc::clone(queue);
    Ok(Box::new(CudaForward { executable, queue, step, features, out, recording, arena }))
}

impl CapturedForward for CudaForward {
    fn replay(&mut self, inputs: ForwardInputs, n_rows: usize) -> Result<Vec<f32>> {
        let n_values = self.launch(inputs, n_rows, &mut |_| Ok(()))?;
        let (queue, mut values) = (&self.queue, Vec::with_capacity(n_values));
        let (element, n_bytes) = (queue.element(), n_values * queue.element().size());
        queue.download(REPLAY, self.out.address(), n_bytes, |part| element.decode(part, &mut values))?;
        Ok(values)
    }

    fn n_bytes(&self) -> usize {
        self.arena.n_bytes() + self.recording.n_bytes()
    }
}

impl DeviceForward<CudaTensor, CudaStep> for CudaForward {
    fn replay_on_device(
        &mut self,
        inputs: ForwardInputs,
        n_rows: usize,
        prepare: &mut Prepare<'_, CudaStep>,
    ) -> Result<CudaTensor> {
        let n_values = self.launch(inputs, n_rows, prepare)?;
        let queue = &self.queue;
        let rows = CudaTensor::new(REPLAY, queue, (n_rows, self.out.dims().1))?;
        queue.copy(REPLAY, self.out.address(), rows.address(), n_values * queue.element().size())?;
        Ok(rows)
    }
}

impl CudaForward {
    /// Submits the graph over other inputs. Returns the number of values in the first `n_rows` rows of its result.
    fn launch(
        &mut self,
        inputs: ForwardInputs,
        n_rows: usize,
        prepare: &mut Prepare<'_, CudaStep>,
    ) -> Result<usize> {
        let op = REPLAY;
        let ForwardInputs { arrays, features, dims } = inputs;
        check::upload(features.len(), dims.0, dims.1)?;
        let of = self.features.dims();
        check::same(op, "features", &[dims.0, dims.1], &[of.0, of.1])?;
        let (out_rows, width) = self.out.dims();
        if n_rows > out_rows {
            return Err(KernelError::Index { op, what: "row", index: n_rows, len: out_rows });
        }
        let host = arrays.finish();
        self.recording.check(op, self.step.host(), &host)?;
        let queue = &self.queue;
        if cfg!(debug_assertions) {
            self.poison(op)?;
        }
        queue.upload_to(op, self.step.address(), as_bytes(host.words()))?;
        self.features.fill_rows(op, queue, 0, &features)?;
        prepare(&self.step)?;
        self.executable.launch(op, queue)?;
        Ok(n_rows * width)
    }

    /// Makes everything NaN that a replay has to write: inputs, result, and all between them.
    fn poison(&self, op: &'static str) -> Result<()> {
        let queue = &self.queue;
        let size = queue.element().size();
        let of = |x: &CudaTensor| (x.address(), x.n_values() * size);
        let words = (self.step.address(), size_of_val(self.step.host().words()));
        let mut pieces = self.arena.kept();
        pieces.extend([of(&self.features), of(&self.out), words]);
        pieces.into_iter().try_for_each(|(address, n_bytes)| queue.fill(op, address, 0xff, n_bytes))
    }
}

/// A stream while it captures.
struct Capturing {
    stream: Arc<CudaStream>,
    device: Arc<Device>,
    is_open: bool,
}

impl Capturing {
    /// A new stream that captures what this thread submits to it. Calls of other threads do not disturb it.
    fn begin(queue: &Queue) -> Result<Self> {
        let op = "capture";
        let device = Arc::clone(queue.device());
        device.bind(op)?;
        let stream = device.context().new_stream().op(op)?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(stream.cu_stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) }
            .op(op)?;
        Ok(Self { stream, device, is_open: true })
    }

    /// The graph of what was submitted, ready to be launched.
    fn end(mut self) -> Result<Executable> {
        let op = "capture";
        self.is_open = false;
        self.device.bind(op)?;
        // SAFETY: the stream captures since `begin`.
        let graph = unsafe { result::stream::end_capture(self.stream.cu_stream()) }.op(op)?;
        if graph.is_null() {
            return Err(KernelError::NotCapturable { op });
        }
        // SAFETY: a graph that the driver gave.
        let handle = unsafe { result::graph::instantiate(graph, CUgraphInstantiate_flags(0)) };
        // SAFETY: destroyed once; what is instantiated does not need it.
        let _ = unsafe { result::graph::destroy(graph) };
        Ok(Executable { handle: handle.op(op)?, device: Arc::clone(&self.device) })
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        if self.is_open && self.device.bind("free").is_ok() {
            // SAFETY: the stream captures since `begin`. It gives no graph if the capture is spoilt.
            if let Ok(graph) = unsafe { result::stream::end_capture(self.stream.cu_stream()) }
                && !graph.is_null()
            {
                // SAFETY: a graph that nobody else has.
                let _ = unsafe { result::graph::destroy(graph) };
            }
        }
    }
}

/// An instantiated graph.
struct Executable {
    handle: CUgraphExec,
    device: Arc<Device>,
}

// SAFETY: a handle of the driver, which any thread may use; whoever has it has it alone.
unsafe impl Send for Executable {}

impl Executable {
    /// Submits the graph to a stream.
    fn launch(&mut self, op: &'static str, queue: &Queue) -> Result<()> {
        self.device.bind(op)?;
        // SAFETY: instantiated and not destroyed; what its nodes address lives as long as the forward that has it.
        unsafe { result::graph::launch(self.handle, queue.stream().cu_stream()) }.op(op)
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if self.device.bind("free").is_ok() {
            // SAFETY: instantiated by `Capturing::end`, destroyed once.
            let _ = unsafe { result::graph::exec_destroy(self.handle) };
        }
    }
}
