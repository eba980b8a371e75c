//! The CUDA kernels, run without a GPU: their sources compiled by g++ over a host runtime (`host/`), launched through
//! cudarc on a stand-in for the driver (`driver/`), and compared with plain functions over odd sizes.
//!
//! `README.md` beside this file says what is checked and what only a device can show.

/// Makes two tests of each check, one for each element.
macro_rules! for_each_element {
    ($($check:ident),+ $(,)?) => {
        mod f32_activations {
            $(#[test]
            fn $check() {
                super::$check::<f32>();
            })+
        }
        mod bf16_activations {
            $(#[test]
            fn $check() {
                super::$check::<crate::element::Bf16>();
            })+
        }
    };
}

mod attention;
mod backend;
mod built;
mod cache;
mod choose;
mod conv;
mod cublaslt;
mod decode_graph;
mod device;
mod element;
mod experts;
mod graph;
mod linear;
mod misuse;
#[allow(dead_code)]
#[path = "../conformance/oracle.rs"]
mod oracle;
mod norm;
mod order;
mod recurrent;
mod rows;
mod sharing;
mod stored_rows;
