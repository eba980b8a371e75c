//! The paged KV cache: pages of `pages.cuh` for each layer, in the element of activations.
//!
//! Layers lie one after another, keys of all blocks of a layer before its values. A page has 32 tokens of every key head.

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::arguments::{Pages, Rotation};
use super::element::Element;
use super::memory::Fixed;
use super::queue::{Argument, Queue};
use super::rows::shared_work;
use crate::check;
use crate::ops::{KernelError, KvLayout, Result};

/// Elements that a head is padded to a multiple of.
const HEAD_PADDING: usize = 8;

/// A paged KV cache on a device.
#[derive(Debug)]
pub struct CudaKvCache {
    layout: KvLayout,
    element: Element,
    memory: Fixed,
}

/// The same pages in host memory.
#[derive(Debug)]
pub struct CudaHostKvCache {
    layout: KvLayout,
    element: Element,
    memory: Vec<u8>,
}

/// Rows of keys and of values: their addresses, and elements from one row to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct KvRows {
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) stride: usize,
}

/// Rows of queries, keys and values side by side, and the place of the queries alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct FusedRows {
    pub(super) q: u64,
    pub(super) rows: u64,
    /// Heads of queries.
    pub(super) n_heads: usize,
    pub(super) rotation: Option<Rotation>,
}

/// Slots to write to: a layer, and the address of their numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotRows {
    pub(super) layer: usize,
    pub(super) slots: u64,
    pub(super) n_slots: usize,
}

/// Bytes of the keys, or of the values, of a block in one layer.
fn page_bytes(layout: KvLayout, element: Element) -> usize {
    layout.n_kv_heads * KV_BLOCK_TOKENS * head_stride(layout) * element.size()
}

/// Elements from a head's row to the next.
fn head_stride(layout: KvLayout) -> usize {
    layout.head_dim.next_multiple_of(HEAD_PADDING)
}

/// Bytes of one block, all layers, keys and values.
pub(super) fn block_bytes(layout: KvLayout, element: Element) -> usize {
    2 * layout.n_layers * page_bytes(layout, element)
}

/// Bytes before a block's keys, or its values (`side` 1), in a layer.
fn page_start(layout: KvLayout, element: Element, (layer, side, block): (usize, usize, usize)) -> usize {
    ((layer * 2 + side) * layout.n_blocks + block) * page_bytes(layout, element)
}

/// Layers, and both sides of each.
fn sides(layout: KvLayout) -> impl Iterator<Item = (usize, usize)> {
    (0..layout.n_layers).flat_map(|layer| [(layer, 0), (layer, 1)])
}

impl CudaKvCache {
    /// Zeros.
    pub(super) fn new(queue: &Queue, layout: KvLayout) -> Result<Self> {
        let (op, element) = ("kv_cache", queue.element());
        check::kv_layout(layout)?;
        let memory = Fixed::new(op, queue.device(), block_bytes(layout, element) * layout.n_blocks)?;
        queue.fill(op, memory.address(), 0, memory.n_bytes())?;
        Ok(Self { layout, element, memory })
    }

    /// Layers, blocks, heads and width.
    pub(super) fn layout(&self) -> KvLayout {
        self.layout
    }

    /// The pages of a layer.
    pub(super) fn pages(&self, layer: usize) -> Pages {
        let [k, v] = [0, 1].map(|side| self.at((layer, side, 0)));
        let (stride, heads) = (head_stride(self.layout), self.layout.n_kv_heads);
        Pages {
            k,
            v,
            page_stride: (heads * KV_BLOCK_TOKENS * stride) as u64,
            head_stride: stride as u32,
            n_kv_heads: heads as u32,
        }
    }

    fn at(&self, place: (usize, usize, usize)) -> u64 {
        self.memory.address() + page_start(self.layout, self.element, place) as u64
    }

    /// Writes rows to the slots at an address; the caller checked the arguments.
    pub(super) fn write(
        &mut self,
        op: &'static str,
        queue: &Queue,
        to: SlotRows,
        rows: KvRows,
    ) -> Result<()> {
        let SlotRows { layer, slots, n_slots } = to;
        let pages = self.pages(layer);
        let n_values = n_slots * self.layout.n_kv_heads * head_stride(self.layout);
        let function = queue.kernel(queue.device().kernels.write_kv);
        let still = Rotation::NONE;
        let [n_tokens, head_dim, stride] = [n_slots, self.layout.head_dim, rows.stride].map(|n| n as u32);
        let arguments: [&dyn Argument; 9] =
            [&pages, &rows.k, &rows.v, &slots, &still, &n_tokens, &head_dim, &stride, &stride];
        queue.launch(op, function, shared_work(n_values), arguments)
    }

    /// Writes keys, rotated, and values of rows to the slots at an address, and the queries, rotated, to their place; the
    /// caller checked the arguments.
    pub(super) fn write_fused(
        &mut self,
        op: &'static str,
        queue: &Queue,
        to: SlotRows,
        from: FusedRows,
    ) -> Result<()> {
        let SlotRows { layer, slots, n_slots } = to;
        let FusedRows { q, rows, n_heads, rotation } = from;
        let (pages, rotation) = (self.pages(layer), rotation.unwrap_or(Rotation::NONE));
        let n_values = n_slots * (n_heads + 2 * self.layout.n_kv_heads) * head_stride(self.layout);
        let function = queue.kernel(queue.device().kernels.write_qkv);
        let [n_tokens, n_heads, head_dim] = [n_slots, n_heads, self.layout.head_dim].map(|n| n as u32);
        let arguments: [&dyn Argument; 8] =
            [&q, &pages, &rows, &slots, &rotation, &n_tokens, &n_heads, &head_dim];
        queue.launch(op, function, shared_work(n_values), arguments)
    }

    /// Copies blocks, one pair after the other.
    pub(super) fn copy(&mut self, queue: &Queue, pairs: &[(u32, u32)]) -> Result<()> {
        check::copy_blocks(self.layout, pairs)?;
        let n_bytes = page_bytes(self.layout, self.element);
        for &(from, to) in pairs {
            for (layer, side) in sides(self.layout) {
                let [from, to] = [from, to].map(|block| self.at((layer, side, block as usize)));
                if from != to {
                    queue.copy("copy_blocks", from, to, n_bytes)?;
                }
            }
        }
        Ok(())
    }
}

impl CudaHostKvCache {
    /// Zeros.
    pub(super) fn new(element: Element, layout: KvLayout) -> Result<Self> {
        check::kv_layout(layout)?;
        Ok(Self { layout, element, memory: vec![0; block_bytes(layout, element) * layout.n_blocks] })
    }

    /// Copies blocks from the device, `(device block, host block)`.
    pub(super) fn take(&mut self, queue: &Queue, device: &CudaKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        let op = "swap_out";
        check::swap(op, [device.layout, self.layout], pairs)?;
        let n_bytes = page_bytes(self.layout, same_element(op, device.element, self.element)?);
        for &(from, to) in pairs {
            for (layer, side) in sides(self.layout) {
                let mut at = page_start(self.layout, self.element, (layer, side, to as usize));
                queue.download(op, device.at((layer, side, from as usize)), n_bytes, |part| {
                    self.memory[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                })?;
            }
        }
        Ok(())
    }

    /// Copies blocks to the device, `(host block, device block)`.
    pub(super) fn give(&self, queue: &Queue, device: &mut CudaKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        let op = "swap_in";
        check::swap(op, [self.layout, device.layout], pairs)?;
        let n_bytes = page_bytes(self.layout, same_element(op, self.element, device.element)?);
        for &(from, to) in pairs {
            for (layer, side) in sides(self.layout) {
                let at = page_start(self.layout, self.element, (layer, side, from as usize));
                let to = device.at((layer, side, to as usize));
                queue.upload_to(op, to, &self.memory[at..at + n_bytes])?;
            }
        }
        Ok(())
    }
}

/// An error unless both caches have one element.
fn same_element(op: &'static str, a: Element, b: Element) -> Result<Element> {
    if a == b {
        return Ok(a);
    }
    Err(KernelError::Library { op, message: "the caches are of different precisions".to_owned() })
}
