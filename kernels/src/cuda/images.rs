//! Fat binaries of the kernels, as `cargo xtask cuda` wrote them: machine code for sm_80, sm_89 and sm_90, and PTX that the driver
//! compiles for later devices. A test of `xtask` says when they are older than their sources.

/// The kernels of one source, for the driver's `cuModuleLoadData`.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// Name of the source without its extension.
    pub name: &'static str,
    /// The fat binary.
    pub bytes: &'static [u8],
}

macro_rules! image {
    ($name:literal) => {
        Image { name: $name, bytes: include_bytes!(concat!("built/", $name, ".fatbin")) }
    };
}

/// One for each source.
pub static IMAGES: [Image; 15] = [
    image!("attention"),
    image!("attention_f32"),
    image!("attention_weights"),
    image!("attention_wide"),
    image!("choose"),
    image!("conv"),
    image!("decode"),
    image!("experts"),
    image!("linear"),
    image!("norm"),
    image!("recurrent"),
    image!("rope"),
    image!("rows"),
    image!("stored_rows"),
    image!("transpose"),
];
