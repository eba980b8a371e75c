//! Pinned memory through which bytes go up to a device and come down: copies from and to other memory would wait for all
//! work of their stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{CUevent, CUevent_flags_enum};
use cudarc::driver::{CudaStream, result};
use parking_lot::Mutex;

use super::device::Device;
use super::error::InOp;
use crate::ops::Result;

/// Bytes of a buffer; longer copies go in several.
const BUFFER_BYTES: usize = 4 << 20;

/// Buffers of a stream, at most.
const MAX_BUFFERS: usize = 8;

/// Pinned buffers of one stream.
#[derive(Debug)]
pub(super) struct Staging {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    buffers: Arc<Mutex<Vec<Buffer>>>,
    /// Bytes that came down.
    n_downloaded: AtomicU64,
}

/// A pinned buffer.
#[derive(Debug)]
struct Buffer {
    memory: *mut u8,
    /// Recorded behind the last copy from it or to it.
    copied: CUevent,
    device: Arc<Device>,
}

/// Bytes on their way down.
#[derive(Debug)]
pub(super) struct Download {
    /// Buffers, each with its bytes, in order.
    parts: Vec<(Buffer, usize)>,
    home: Arc<Mutex<Vec<Buffer>>>,
}

// SAFETY: memory and a handle of the driver, which any thread may use; whoever has the buffer has it alone.
unsafe impl Send for Buffer {}

impl Staging {
    /// No buffer at first.
    pub(super) fn new(device: &Arc<Device>, stream: &Arc<CudaStream>) -> Self {
        let (device, stream) = (Arc::clone(device), Arc::clone(stream));
        Self { device, stream, buffers: Arc::default(), n_downloaded: AtomicU64::new(0) }
    }

    /// Bytes that came down so far.
    pub(super) fn n_downloaded(&self) -> u64 {
        self.n_downloaded.load(Ordering::Relaxed)
    }

    /// Copies bytes to a device address, in the order of the stream; they are taken when this returns.
    ///
    /// # Safety
    /// The device has as many bytes at the address.
    pub(super) unsafe fn upload(&self, op: &'static str, to: u64, bytes: &[u8]) -> Result<()> {
        self.device.bind(op)?;
        let stream = self.stream.cu_stream();
        for (i, part) in bytes.chunks(BUFFER_BYTES).enumerate() {
            let mut buffers = self.buffers.lock();
            let buffer = free_buffer(op, &self.device, &mut buffers)?;
            // SAFETY: the buffer is that long, and no copy from it is under way.
            let staged = unsafe { std::slice::from_raw_parts_mut(buffer.memory, part.len()) };
            staged.copy_from_slice(part);
            let to = to + (i * BUFFER_BYTES) as u64;
            // SAFETY: the caller says that the bytes are there; the buffer is not written before the event has passed.
            unsafe {
                result::memcpy_htod_async(to, staged, stream).op(op)?;
                result::event::record(buffer.copied, stream).op(op)?;
            }
        }
        Ok(())
    }

    /// Copies bytes from a device address after all work of the stream, and hands them over part by part, in order.
    ///
    /// # Safety
    /// The device has as many bytes at the address.
    pub(super) unsafe fn download(
        &self,
        op: &'static str,
        from: u64,
        n_bytes: usize,
        mut each: impl FnMut(&[u8]),
    ) -> Result<()> {
        self.device.bind(op)?;
        let stream = self.stream.cu_stream();
        for start in (0..n_bytes).step_by(BUFFER_BYTES) {
            let mut buffers = self.buffers.lock();
            let buffer = free_buffer(op, &self.device, &mut buffers)?;
            let len = BUFFER_BYTES.min(n_bytes - start);
            // SAFETY: the buffer is that long, and no copy from it is under way.
            let staged = unsafe { std::slice::from_raw_parts_mut(buffer.memory, len) };
            // SAFETY: the caller says that the bytes are there; the buffer is read after the stream has ended.
            unsafe {
                result::memcpy_dtoh_async(staged, from + start as u64, stream).op(op)?;
                result::stream::synchronize(stream).op(op)?;
            }
            self.n_downloaded.fetch_add(len as u64, Ordering::Relaxed);
            each(staged);
        }
        Ok(())
    }

    /// Begins to copy bytes from a device address, in the order of the stream. No bytes at all are waited for like others.
    ///
    /// # Safety
    /// The device has as many bytes at the address.
    pub(super) unsafe fn begin_download(
        &self,
        op: &'static str,
        from: u64,
        n_bytes: usize,
    ) -> Result<Download> {
        self.device.bind(op)?;
        let stream = self.stream.cu_stream();
        let mut download = Download { parts: Vec::new(), home: Arc::clone(&self.buffers) };
        for start in (0..n_bytes.max(1)).step_by(BUFFER_BYTES) {
            let len = BUFFER_BYTES.min(n_bytes - start);
            let buffer = take_buffer(op, &self.device, &mut self.buffers.lock())?;
            // SAFETY: the buffer is that long, and no copy from it or to it is under way.
            let staged = unsafe { std::slice::from_raw_parts_mut(buffer.memory, len) };
            // SAFETY: the caller says that the bytes are there; the buffer is read after its event has passed.
            unsafe {
                if len > 0 {
                    result::memcpy_dtoh_async(staged, from + start as u64, stream).op(op)?;
                }
                result::event::record(buffer.copied, stream).op(op)?;
            }
            self.n_downloaded.fetch_add(len as u64, Ordering::Relaxed);
            download.parts.push((buffer, len));
        }
        Ok(download)
    }
}

impl Download {
    /// Waits for the copies, and for no later work; hands the bytes over part by part, in order.
    pub(super) fn wait(self, op: &'static str, mut each: impl FnMut(&[u8])) -> Result<()> {
        for (buffer, len) in &self.parts {
            buffer.device.bind(op)?;
            // SAFETY: the event lives as long as its buffer.
            unsafe { result::event::synchronize(buffer.copied) }.op(op)?;
            // SAFETY: the buffer is that long, and the copy to it has ended.
            each(unsafe { std::slice::from_raw_parts(buffer.memory, *len) });
        }
        Ok(())
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        let mut home = self.home.lock();
        // A buffer whose copy has not ended is not handed out before its event has passed.
        home.extend(self.parts.drain(..).map(|(buffer, _)| buffer));
        home.truncate(MAX_BUFFERS);
    }
}

/// A buffer from which no copy is under way.
fn free_buffer<'a>(
    op: &'static str,
    device: &Arc<Device>,
    buffers: &'a mut Vec<Buffer>,
) -> Result<&'a mut Buffer> {
    let index = match buffers.iter().position(Buffer::is_free) {
        Some(index) => index,
        None if buffers.len() < MAX_BUFFERS => {
            buffers.push(Buffer::new(op, device)?);
            buffers.len() - 1
        }
        None => {
            // SAFETY: as above.
            unsafe { result::event::synchronize(buffers[0].copied) }.op(op)?;
            0
        }
    };
    Ok(&mut buffers[index])
}

/// The same for the caller alone; another where all are in use.
fn take_buffer(op: &'static str, device: &Arc<Device>, buffers: &mut Vec<Buffer>) -> Result<Buffer> {
    match buffers.iter().position(Buffer::is_free) {
        Some(index) => Ok(buffers.swap_remove(index)),
        None => Buffer::new(op, device),
    }
}

impl Buffer {
    fn is_free(&self) -> bool {
        // SAFETY: the event lives as long as its buffer.
        unsafe { result::event::query(self.copied) }.is_ok()
    }

    fn new(op: &'static str, device: &Arc<Device>) -> Result<Self> {
        let copied = result::event::create(CUevent_flags_enum::CU_EVENT_DISABLE_TIMING).op(op)?;
        // SAFETY: freed when the staging is dropped, and written before it is read.
        match unsafe { result::malloc_host(BUFFER_BYTES, 0) }.op(op) {
            Ok(memory) => Ok(Self { memory: memory.cast(), copied, device: Arc::clone(device) }),
            Err(error) => {
                // SAFETY: nobody knows of the event.
                let _ = unsafe { result::event::destroy(copied) };
                Err(error)
            }
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.device.bind("free").is_ok() {
            // SAFETY: allocated by `Buffer::new`, freed once, after the last copy.
            unsafe {
                let _ = result::event::synchronize(self.copied);
                let _ = result::event::destroy(self.copied);
                let _ = result::free_host(self.memory.cast());
            }
        }
    }
}
