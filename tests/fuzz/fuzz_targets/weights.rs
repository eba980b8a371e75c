//! Bytes as a weight file of `torch.save`: refused, or tensors that lie in it and are as large as their shapes say.
#![no_main]

use libfuzzer_sys::fuzz_target;
use triptych_models::weights::torch::tensors;

/// A file with tensors of every type and order, so that the fuzzer starts from one: the bytes change it.
const VALID: &[u8] = include_bytes!("../../golden/pickled/odd.bin");

fn check(file: &[u8]) {
    for (name, tensor) in tensors(file).unwrap_or_default() {
        let stored = file.get(tensor.range.clone()).expect("a tensor is in its file");
        let n_bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize() / 8;
        assert_eq!(tensor.gathered(stored).map_or(stored.len(), |bytes| bytes.len()), n_bytes, "{name}");
    }
}

fuzz_target!(|data: &[u8]| {
    check(data);
    // Where to change the valid file, and to what.
    let mut file = VALID.to_vec();
    for change in data.chunks_exact(3) {
        let place = usize::from(u16::from_le_bytes([change[0], change[1]])) % file.len();
        file[place] = change[2];
    }
    check(&file);
});
