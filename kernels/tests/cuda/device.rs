//! A device of a test: memory, launches, and an end at which nothing is left over.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::sys::{CUfunction, CUmodule, CUresult};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, result};

use triptych_kernels::cuda::IMAGES;

use triptych_cuda_standin::{Left, Standin};

/// A device that no other test uses, one stream, and the kernels.
pub struct Device {
    pub ordinal: usize,
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    modules: Vec<CUmodule>,
}

/// Blocks, threads of a block, and bytes of dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Device {
    /// A device whose orders follow from the seed.
    pub fn new(seed: u64) -> Self {
        let ordinal = Standin::get().new_device(seed);
        let context = CudaContext::new(ordinal).expect("a context");
        // SAFETY: tests order their streams themselves.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().expect("a stream");
        // The stand-in takes any image of the product for one that has all kernels.
        let images = if triptych_cuda_standin::device().is_some() { &IMAGES[..] } else { &IMAGES[..1] };
        // SAFETY: an image as the compiler wrote it.
        let load = |bytes: &[u8]| unsafe { result::module::load_data(bytes.as_ptr().cast()) };
        let modules = images.iter().map(|image| load(image.bytes).expect("a module")).collect();
        Self { ordinal, context, stream, modules }
    }

    /// A device of the stand-in, for a test of what only the stand-in does.
    pub fn of_standin(seed: u64) -> Self {
        Standin::get().needed_to("do what this is a test of");
        Self::new(seed)
    }

    pub fn upload<T: DeviceRepr>(&self, values: &[T]) -> CudaSlice<T> {
        let mut slice = self.poisoned(values.len());
        if !values.is_empty() {
            self.stream.memcpy_htod(values, &mut slice).expect("an upload");
        }
        slice
    }

    /// Memory as the device gives it: NaN, of `n` elements, or one if there are none.
    pub fn poisoned<T: DeviceRepr>(&self, n: usize) -> CudaSlice<T> {
        // SAFETY: every element is one of a kernel's results before it is read, or NaN.
        let slice: CudaSlice<T> = unsafe { self.stream.alloc(n.max(1)) }.expect("memory");
        if triptych_cuda_standin::device().is_some() {
            let (address, n_bytes) = (slice.device_ptr(&self.stream).0, slice.num_bytes());
            // SAFETY: the bytes were allocated above, on the same stream.
            unsafe { result::memset_d8_async(address, 0xff, n_bytes, self.stream.cu_stream()) }
                .expect("memory");
        }
        slice
    }

    /// The first `n` elements.
    pub fn download<T: DeviceRepr + Clone>(&self, slice: &CudaSlice<T>, n: usize) -> Vec<T> {
        let mut all = self.try_download(slice).unwrap_or_else(|error| panic!("{error:?}: {}", self.fault()));
        all.truncate(n);
        all
    }

    pub fn try_download<T: DeviceRepr + Clone>(&self, slice: &CudaSlice<T>) -> Result<Vec<T>, CUresult> {
        self.stream.clone_dtoh(slice).map_err(|error| error.0)
    }

    fn function(&self, name: &str, shared_bytes: u32) -> CUfunction {
        self.context.bind_to_thread().expect("a context");
        let c_name = CString::new(name).expect("a name");
        // SAFETY: the modules are loaded until the device is dropped.
        let find = |module: &CUmodule| unsafe { result::module::get_function(*module, c_name.clone()) }.ok();
        let function = self.modules.iter().find_map(find).unwrap_or_else(|| panic!("no kernel {name}"));
        if shared_bytes > 48 << 10 {
            let most = i32::try_from(shared_bytes).expect("fewer bytes than a block has");
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of this module.
            unsafe { result::function::set_function_attribute(function, attribute, most) }
                .expect("shared memory");
        }
        function
    }

    /// Launches a kernel on a stream; an empty grid launches nothing.
    pub fn try_launch(
        &self,
        stream: &CudaStream,
        name: &str,
        shape: Shape,
        arguments: &[&dyn Argument],
    ) -> Result<(), CUresult> {
        if shape.grid.contains(&0) {
            return Ok(());
        }
        let function = self.function(name, shape.shared_bytes);
        let mut bytes: Vec<Vec<u8>> = arguments.iter().map(|a| a.bytes(stream)).collect();
        let mut pointers: Vec<*mut c_void> = bytes.iter_mut().map(|b| b.as_mut_ptr().cast()).collect();
        let [x, y, z] = shape.grid;
        // SAFETY: the arguments are those of the kernel, in order; a wrong access is an error of the stand-in.
        unsafe {
            result::launch_kernel(
                function,
                (x, y, z),
                (shape.threads, 1, 1),
                shape.shared_bytes,
                stream.cu_stream(),
                &mut pointers,
            )
        }
        .map_err(|error| error.0)
    }

    /// The same on the device's own stream, without failure.
    pub fn launch(&self, name: &str, shape: Shape, arguments: &[&dyn Argument]) {
        let launched = self.try_launch(&self.stream, name, shape, arguments);
        launched.unwrap_or_else(|error| panic!("{name}: {error:?}: {}", self.fault()));
    }

    /// The cause of the device's error; empty if it has none.
    pub fn fault(&self) -> String {
        Standin::get().fault(self.ordinal)
    }

    /// Drops everything and checks that nothing is left.
    pub fn finish(self) {
        let ordinal = self.ordinal;
        self.stream.synchronize().unwrap_or_else(|error| panic!("{error}: {}", self.fault()));
        drop(self);
        assert_eq!(Standin::get().left(ordinal), Left::default());
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A device with an error cannot be tidied.
        if self.context.bind_to_thread().is_ok() {
            for &module in &self.modules {
                // SAFETY: nothing uses the module after the device.
                let _ = unsafe { result::module::unload(module) };
            }
        }
    }
}

/// An argument of a kernel.
pub trait Argument {
    /// Its bytes, as the kernel has them.
    fn bytes(&self, stream: &CudaStream) -> Vec<u8>;
}

impl<T> Argument for CudaSlice<T> {
    fn bytes(&self, stream: &CudaStream) -> Vec<u8> {
        self.device_ptr(stream).0.to_ne_bytes().to_vec()
    }
}

/// A structure that a kernel takes by value; its fields are those of the `.cuh` file, without gaps.
pub trait Plain: Copy + 'static {}

impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}

impl<T: Plain> Argument for T {
    fn bytes(&self, _: &CudaStream) -> Vec<u8> {
        let base: *const T = self;
        // SAFETY: a plain structure has no gaps, so all its bytes have values.
        unsafe { std::slice::from_raw_parts(base.cast::<u8>(), size_of::<T>()) }.to_vec()
    }
}

/// Launches a kernel: `launch!(device, name, grid, threads, shared bytes; arguments …)`.
#[macro_export]
macro_rules! launch {
    ($device:expr, $name:expr, $grid:expr, $threads:expr, $shared:expr; $($argument:expr),+ $(,)?) => {
        $device.launch(
            &$name,
            $crate::device::Shape { grid: $grid, threads: $threads, shared_bytes: $shared },
            &[$(&$argument as &dyn $crate::device::Argument),+],
        )
    };
}
