//! A stream of a device with its memory: uploads, launches and downloads run in the order in which they are submitted.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};

use super::device::{Device, Function};
use super::element::Element;
use super::error::InOp;
use super::memory::{Fixed, Piece, Pool};
use super::recording::Recording;
use super::staging::{Download, Staging};
use crate::ops::{KernelError, Result};

/// Blocks that the y and z axes of a grid can have.
const MAX_BLOCKS: usize = 65_535;

/// A stream and its memory.
#[derive(Debug)]
pub(super) struct Queue {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    pool: Arc<Pool>,
    staging: Arc<Staging>,
    element: Element,
    mode: Mode,
}

/// Use of the work that is submitted.
#[derive(Debug)]
enum Mode {
    /// It runs.
    Eager,
    /// It runs, over the memory of a graph that will be captured of the same work.
    WarmUp(Arc<Recording>),
    /// It becomes nodes of a graph.
    Capture(Arc<Recording>),
}

/// Blocks, threads of a block, and bytes of dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub(super) grid: [usize; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

/// An argument of a kernel, as the kernel has it.
pub(super) trait Argument {
    /// Pointer to it.
    fn place(&self) -> *mut c_void;
}

/// Arguments that are laid out as C has them, without padding that is not named.
///
/// # Safety
/// The type is `repr(C)` or a number, and as large as the kernel's parameter.
pub(super) unsafe trait Plain: Copy {}

// SAFETY: numbers.
unsafe impl Plain for u32 {}
// SAFETY: numbers.
unsafe impl Plain for u64 {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}

impl<T: Plain> Argument for T {
    fn place(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

impl Queue {
    /// A new stream for activations of an element.
    pub(super) fn new(device: &Arc<Device>, element: Element) -> Result<Self> {
        let stream = device.context().new_stream().op("cuda")?;
        let pool = Pool::new(device);
        let staging = Arc::new(Staging::new(device, &stream));
        Ok(Self { device: Arc::clone(device), stream, pool, staging, element, mode: Mode::Eager })
    }

    /// The same stream with the memory of a graph, for the run before its capture.
    pub(super) fn warm_up(&self, arena: &Arc<Pool>, recording: &Arc<Recording>) -> Self {
        Self { mode: Mode::WarmUp(Arc::clone(recording)), ..self.over(&self.stream, arena) }
    }

    /// A stream that captures, with the memory of the graph.
    pub(super) fn capture(
        &self,
        stream: &Arc<CudaStream>,
        arena: &Arc<Pool>,
        recording: &Arc<Recording>,
    ) -> Self {
        Self { mode: Mode::Capture(Arc::clone(recording)), ..self.over(stream, arena) }
    }

    fn over(&self, stream: &Arc<CudaStream>, arena: &Arc<Pool>) -> Self {
        Self {
            device: Arc::clone(&self.device),
            stream: Arc::clone(stream),
            pool: Arc::clone(arena),
            staging: Arc::clone(&self.staging),
            element: self.element,
            mode: Mode::Eager,
        }
    }

    /// The recording of work that is captured, or will be.
    pub(super) fn recording(&self) -> Option<&Recording> {
        match &self.mode {
            Mode::Eager => None,
            Mode::WarmUp(recording) | Mode::Capture(recording) => Some(recording),
        }
    }

    /// An error in a capture, for work that a graph cannot repeat: it reads or writes memory of the host, or its launches
    /// follow from values.
    pub(super) fn refuse_in_capture(&self, op: &'static str) -> Result<()> {
        match self.recording() {
            None => Ok(()),
            Some(_) => Err(KernelError::NotCapturable { op }),
        }
    }

    /// Element of its activations.
    pub(super) fn element(&self) -> Element {
        self.element
    }

    /// The kernel for its element, of those for f32 and for bf16.
    pub(super) fn kernel(&self, pair: [Function; 2]) -> Function {
        match self.element {
            Element::F32 => pair[0],
            Element::Bf16 => pair[1],
        }
    }

    /// Its device.
    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The stream.
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Memory of the stream's pool, undefined.
    pub(super) fn take(&self, op: &'static str, n_bytes: usize) -> Result<Piece> {
        let piece = match self.mode {
            // An allocation would spoil the capture; the run before it had as many pieces.
            Mode::Capture(_) => self.pool.take_kept(n_bytes).ok_or(KernelError::NotCapturable { op })?,
            Mode::Eager | Mode::WarmUp(_) => self.pool.take(op, n_bytes)?,
        };
        // A value that nobody wrote is NaN, so that a test which reads it fails.
        if cfg!(debug_assertions) && n_bytes > 0 {
            self.fill(op, piece.address(), 0xff, n_bytes)?;
        }
        Ok(piece)
    }

    /// Sets bytes.
    pub(super) fn fill(&self, op: &'static str, address: u64, value: u8, n_bytes: usize) -> Result<()> {
        if n_bytes == 0 {
            return Ok(());
        }
        self.device.bind(op)?;
        // SAFETY: callers have allocated the bytes.
        unsafe { result::memset_d8_async(address, value, n_bytes, self.stream.cu_stream()) }.op(op)
    }

    /// Copies bytes of the device.
    pub(super) fn copy(&self, op: &'static str, from: u64, to: u64, n_bytes: usize) -> Result<()> {
        if n_bytes == 0 {
            return Ok(());
        }
        self.device.bind(op)?;
        // SAFETY: callers have allocated both.
        unsafe { result::memcpy_dtod_async(to, from, n_bytes, self.stream.cu_stream()) }.op(op)
    }

    /// Copies bytes to an address; they are taken when this returns.
    pub(super) fn upload_to(&self, op: &'static str, to: u64, bytes: &[u8]) -> Result<()> {
        self.refuse_in_capture(op)?;
        self.stage(op, to, bytes)
    }

    fn stage(&self, op: &'static str, to: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: callers have allocated as many.
        unsafe { self.staging.upload(op, to, bytes) }
    }

    /// Memory that is allocated once, with these bytes. They are there for all that is submitted later; a copy outside of the
    /// stream could still be under way then.
    pub(super) fn fixed(&self, op: &'static str, bytes: &[u8]) -> Result<Fixed> {
        self.refuse_in_capture(op)?;
        let fixed = Fixed::new(op, &self.device, bytes.len())?;
        self.upload_to(op, fixed.address(), bytes)?;
        Ok(fixed)
    }

    /// Copies words to memory of the pool.
    pub(super) fn upload<T: Word>(&self, op: &'static str, values: &[T]) -> Result<Piece> {
        self.refuse_in_capture(op)?;
        let bytes = as_bytes(values);
        let piece = self.pool.take(op, bytes.len())?;
        self.stage(op, piece.address(), bytes)?;
        Ok(piece)
    }

    /// The same of words that follow from the shapes of a forward: a graph keeps them, and its replays read them again.
    pub(super) fn constant<T: Word>(&self, op: &'static str, values: &[T]) -> Result<Arc<Piece>> {
        let bytes = as_bytes(values);
        match &self.mode {
            Mode::Eager => Ok(Arc::new(self.upload(op, values)?)),
            Mode::WarmUp(recording) => {
                recording.constant(op, bytes, |piece| self.stage(op, piece.address(), bytes))
            }
            Mode::Capture(recording) => {
                recording.kept_constant(bytes).ok_or(KernelError::NotCapturable { op })
            }
        }
    }

    /// Waits for all work, and hands over bytes of the device, part by part, in order.
    pub(super) fn download(
        &self,
        op: &'static str,
        from: u64,
        n_bytes: usize,
        each: impl FnMut(&[u8]),
    ) -> Result<()> {
        self.refuse_in_capture(op)?;
        // SAFETY: callers have allocated as many.
        unsafe { self.staging.download(op, from, n_bytes, each) }
    }

    /// Begins to copy bytes of the device down, after the work so far.
    pub(super) fn begin_download(&self, op: &'static str, from: u64, n_bytes: usize) -> Result<Download> {
        // SAFETY: callers have allocated as many.
        unsafe { self.staging.begin_download(op, from, n_bytes) }
    }

    /// Bytes that came down so far.
    pub(super) fn n_downloaded(&self) -> u64 {
        self.staging.n_downloaded()
    }

    /// Launches a kernel; an empty grid launches nothing.
    pub(super) fn launch<const N: usize>(
        &self,
        op: &'static str,
        function: Function,
        launch: Launch,
        arguments: [&dyn Argument; N],
    ) -> Result<()> {
        let Launch { grid: [x, y, z], threads, shared_bytes } = launch;
        if [x, y, z].contains(&0) {
            return Ok(());
        }
        if y > MAX_BLOCKS || z > MAX_BLOCKS || x > i32::MAX as usize {
            let (expected, actual) = (vec![i32::MAX as usize, MAX_BLOCKS, MAX_BLOCKS], vec![x, y, z]);
            return Err(KernelError::Shape { op, what: "blocks of a launch", expected, actual });
        }
        self.device.bind(op)?;
        let mut places = arguments.map(Argument::place);
        let grid = (x as u32, y as u32, z as u32);
        // SAFETY: callers pass the kernel's parameters in order, and addresses of memory that lives until the stream has
        // passed; the driver takes the arguments before it returns.
        let launched = unsafe {
            result::launch_kernel(
                function.0,
                grid,
                (threads, 1, 1),
                shared_bytes,
                self.stream.cu_stream(),
                &mut places,
            )
        };
        launched.op(op)
    }
}

/// Values that are copied to a device as they are.
///
/// # Safety
/// The type has no padding.
pub(super) unsafe trait Word: Copy {}

// SAFETY: numbers.
unsafe impl Word for u8 {}
// SAFETY: numbers.
unsafe impl Word for u32 {}
// SAFETY: numbers.
unsafe impl Word for u64 {}
// SAFETY: numbers.
unsafe impl Word for f32 {}
// SAFETY: a number of 16 bits.
unsafe impl Word for half::bf16 {}

/// The bytes of values.
pub(super) fn as_bytes<T: Word>(values: &[T]) -> &[u8] {
    // SAFETY: the type has no padding, so all its bytes have values; the slice borrows `values`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
