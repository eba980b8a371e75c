//! Rotary embedding, and the paged cache that keys and values are written to.

use cudarc::driver::CudaSlice;

use crate::device::{Argument, Device, Plain};
use crate::element::{Element, close, elements, values, widened};
use crate::launch;

/// Tokens of a page.
pub const PAGE: usize = 32;

/// `Pages` of `pages.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Pages {
    pub k: u64,
    pub v: u64,
    pub page_stride: u64,
    pub head_stride: u32,
    pub n_kv_heads: u32,
}

impl Plain for Pages {}

/// `Rotation` of `rope.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Rotation {
    pub cos: u64,
    pub sin: u64,
    pub rotary_dim: u32,
    pub is_interleaved: u32,
}

impl Plain for Rotation {}

/// The address of memory on the device.
pub fn address<T>(device: &Device, slice: &CudaSlice<T>) -> u64 {
    u64::from_ne_bytes(slice.bytes(&device.stream).try_into().expect("eight bytes"))
}

/// Pages of one layer, poisoned at first.
pub struct Cache<T> {
    pub k: CudaSlice<T>,
    pub v: CudaSlice<T>,
    pub pages: Pages,
    pub n_pages: usize,
    head_dim: usize,
}

impl<T: Element> Cache<T> {
    pub fn new(device: &Device, n_pages: usize, n_kv_heads: usize, head_dim: usize) -> Self {
        let head_stride = head_dim.next_multiple_of(8);
        let stride = n_kv_heads * PAGE * head_stride;
        let [k, v] = [(); 2].map(|()| device.poisoned::<T>(n_pages * stride));
        let pages = Pages {
            k: address(device, &k),
            v: address(device, &v),
            page_stride: stride as u64,
            head_stride: head_stride as u32,
            n_kv_heads: n_kv_heads as u32,
        };
        Self { k, v, pages, n_pages, head_dim }
    }

    /// Elements of all pages of keys or of values.
    fn len(&self) -> usize {
        self.n_pages * self.pages.page_stride as usize
    }

    /// Writes rows of keys and values to their slots, keys rotated.
    pub fn write(&self, device: &Device, [k, v]: [&[T]; 2], slots: &[u32], rotation: Rotation) {
        let width = self.pages.n_kv_heads as usize * self.head_dim;
        let (keys, vals, at) = (device.upload(k), device.upload(v), device.upload(slots));
        let grid = [u32::from(!slots.is_empty()) * 3, 1, 1];
        launch!(device, format!("write_kv_{}", T::NAME), grid, 256, 0;
            self.pages, keys, vals, at, rotation, slots.len() as u32, self.head_dim as u32, width as u32, width as u32);
    }
}

/// No rotation.
pub const STILL: Rotation = Rotation { cos: 0, sin: 0, rotary_dim: 0, is_interleaved: 0 };

/// A rotation of `n_tokens` by any angles, with its cosines and sines.
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    slices: [CudaSlice<f32>; 2],
    rotation: Rotation,
}

impl Angles {
    fn new(device: &Device, n_tokens: usize, rotary_dim: usize, is_interleaved: bool) -> Self {
        let angles = values(9, n_tokens * rotary_dim / 2);
        let [cos, sin] =
            [f32::cos, f32::sin].map(|f| angles.iter().map(|a| f(a * 3.0)).collect::<Vec<f32>>());
        let slices = [device.upload(&cos), device.upload(&sin)];
        let rotation = Rotation {
            cos: address(device, &slices[0]),
            sin: address(device, &slices[1]),
            rotary_dim: rotary_dim as u32,
            is_interleaved: u32::from(is_interleaved),
        };
        Self { cos, sin, slices, rotation }
    }

    /// The heads of `x` after the rotation, `x: [n_tokens, heads, head_dim]`.
    fn turned(&self, x: &[f32], n_heads: usize, head_dim: usize) -> Vec<f32> {
        let half = self.rotation.rotary_dim as usize / 2;
        let mut out = x.to_vec();
        for (i, head) in out.chunks_mut(head_dim.max(1)).enumerate() {
            for pair in 0..half {
                let at = i / n_heads * half + pair;
                let (first, second) = if self.rotation.is_interleaved == 1 {
                    (2 * pair, 2 * pair + 1)
                } else {
                    (pair, pair + half)
                };
                let (a, b) = (head[first], head[second]);
                head[first] = a * self.cos[at] - b * self.sin[at];
                head[second] = b * self.cos[at] + a * self.sin[at];
            }
        }
        out
    }
}

/// `(tokens, heads, head_dim, rotary_dim)`.
const ROTATIONS: [(usize, usize, usize, usize); 7] = [
    (0, 2, 8, 8),
    (1, 1, 2, 2),
    (3, 2, 20, 20),
    (2, 3, 33, 32),
    (5, 2, 64, 64),
    (4, 1, 80, 20),
    (2, 4, 128, 0),
];

fn pairs_are_turned_and_the_rest_stays<T: Element>() {
    let device = Device::new(1);
    for (n_tokens, n_heads, head_dim, rotary_dim) in ROTATIONS {
        for is_interleaved in [false, true] {
            // Heads of queries stand in front of others in a row.
            let row = n_heads * head_dim + 5;
            let x = elements::<T>(1, n_tokens * row);
            let angles = Angles::new(&device, n_tokens, rotary_dim, is_interleaved);
            let slice = device.upload(&x);
            launch!(device, format!("rope_{}", T::NAME), [(n_tokens as u32).min(2), 1, 1], 256, 0;
                slice, angles.rotation, n_tokens as u32, n_heads as u32, head_dim as u32, row as u32);
            let heads: Vec<f32> = x.chunks(row).flat_map(|row| widened(&row[..n_heads * head_dim])).collect();
            let turned = angles.turned(&heads, n_heads, head_dim);
            let mut expect = widened(&x);
            for (row, turned) in expect.chunks_mut(row).zip(turned.chunks(n_heads * head_dim)) {
                row[..turned.len()].copy_from_slice(turned);
            }
            close("turned", &device.download(&slice, x.len()), &expect, T::STEP);
            drop(angles.slices);
        }
    }
    device.finish();
}

fn keys_and_values_reach_their_slots<T: Element>() {
    let device = Device::new(2);
    for (n_tokens, n_kv_heads, head_dim, rotary_dim) in ROTATIONS {
        let (n_pages, width) = (4, n_kv_heads * head_dim);
        let cache = Cache::<T>::new(&device, n_pages, n_kv_heads, head_dim);
        let slots: Vec<u32> = (0..n_tokens).map(|i| ((i * 37 + 31) % (n_pages * PAGE)) as u32).collect();
        let (k, v) = (elements::<T>(1, n_tokens * width), elements::<T>(2, n_tokens * width));
        let angles = Angles::new(&device, n_tokens, rotary_dim, false);
        cache.write(&device, [&k, &v], &slots, angles.rotation);
        let turned = angles.turned(&widened(&k), n_kv_heads, head_dim);
        for (what, slice, rows) in [("keys", &cache.k, turned), ("values", &cache.v, widened(&v))] {
            let stride = cache.pages.head_stride as usize;
            let mut expect = vec![f32::NAN; cache.len()];
            for (i, &slot) in slots.iter().enumerate() {
                for head in 0..n_kv_heads {
                    let (page, place) = (slot as usize / PAGE, slot as usize % PAGE);
                    let to = &mut expect[((page * n_kv_heads + head) * PAGE + place) * stride..][..stride];
                    to.fill(0.0);
                    to[..head_dim].copy_from_slice(&rows[i * width + head * head_dim..][..head_dim]);
                }
            }
            let found = device.download(slice, cache.len());
            for (i, (a, e)) in found.iter().zip(&expect).enumerate() {
                // What no slot holds is as it was.
                assert_eq!(a.to_f32().is_nan(), e.is_nan(), "{what} {i}");
            }
            let kept = |x: &[f32]| x.iter().copied().filter(|v| !v.is_nan()).collect::<Vec<f32>>();
            let found: Vec<T> = kept(&widened(&found)).into_iter().map(T::from_f32).collect();
            close(what, &found, &kept(&expect), T::STEP);
        }
        drop((cache, angles));
    }
    device.finish();
}

fn one_launch_is_those_that_it_stands_for<T: Element>() {
    let device = Device::new(3);
    for (i, (n_tokens, n_kv_heads, head_dim, rotary_dim)) in ROTATIONS.into_iter().enumerate() {
        let (n_heads, n_pages) = (n_kv_heads * (1 + i % 3), 4);
        let (q_width, width) = (n_heads * head_dim, n_kv_heads * head_dim);
        let slots: Vec<u32> = (0..n_tokens).map(|i| ((i * 37 + 31) % (n_pages * PAGE)) as u32).collect();
        let rows = elements::<T>(1, n_tokens * (q_width + 2 * width));
        let part = |first: usize, width: usize| -> Vec<T> {
            rows.chunks(q_width + 2 * n_kv_heads * head_dim)
                .flat_map(|row| row[first..][..width].to_vec())
                .collect()
        };
        let (q, k, v) = (part(0, q_width), part(q_width, width), part(q_width + width, width));
        let angles = Angles::new(&device, n_tokens, rotary_dim, i % 2 == 1);
        let [apart, fused] = [(); 2].map(|()| Cache::<T>::new(&device, n_pages, n_kv_heads, head_dim));
        apart.write(&device, [&k, &v], &slots, angles.rotation);
        let turned = device.upload(&q);
        launch!(device, format!("rope_{}", T::NAME), [(n_tokens as u32).min(2), 1, 1], 256, 0;
            turned, angles.rotation, n_tokens as u32, n_heads as u32, head_dim as u32, q_width as u32);
        let (queries, at, from) =
            (device.poisoned::<T>(q.len()), device.upload(&slots), device.upload(&rows));
        launch!(device, format!("write_qkv_{}", T::NAME), [(n_tokens as u32).min(3), 1, 1], 256, 0;
            queries, fused.pages, from, at, angles.rotation, n_tokens as u32, n_heads as u32, head_dim as u32);
        let bits = |slice: &CudaSlice<T>, len: usize| -> Vec<u32> {
            device.download(slice, len).iter().map(|value| value.to_f32().to_bits()).collect()
        };
        assert_eq!(bits(&queries, q.len()), bits(&turned, q.len()), "queries of {head_dim}");
        assert_eq!(bits(&fused.k, fused.len()), bits(&apart.k, apart.len()), "keys of {head_dim}");
        assert_eq!(bits(&fused.v, fused.len()), bits(&apart.v, apart.len()), "values of {head_dim}");
        drop((apart, fused, angles));
    }
    device.finish();
}

for_each_element! {
    pairs_are_turned_and_the_rest_stays,
    keys_and_values_reach_their_slots,
    one_launch_is_those_that_it_stands_for,
}
