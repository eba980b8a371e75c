//! Files of `torch.save`: the same model as from safetensors, and nothing of a file that is not what it should be.

use super::{STORED, golden, open, without_weights};
use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::Value;
use std::path::{Path, PathBuf};
use triptych_core::limits::Limits;
use triptych_core::{DType, Extent, Modality, embeddings};
use triptych_kernels::reference::ReferenceBackend;
use triptych_models::preprocess::embeddings::read as rows_of;
use triptych_models::weights::torch::{TorchTensor, tensors};
use triptych_models::weights::{WeightFormat, Weights};
use triptych_models::{Model, ModelSource};

const SINGLE: &str = "pytorch_model.bin";
/// The start of what `torch.save` wrote before version 1.6: a pickle of its magic number.
const LEGACY: &[u8] = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";

fn pickled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/pickled").join(name)
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(pickled(name)).expect("a golden file")
}

/// A model directory of a case, with the weight files of another folder.
fn with_files(case: &str, files: &[PathBuf]) -> tempfile::TempDir {
    let dir = without_weights(case);
    for file in files {
        std::fs::copy(file, dir.path().join(file.file_name().expect("a file"))).expect("a copy");
    }
    dir
}

/// Every tensor: name, element type, shape, hash of its bytes.
fn contents(dir: &Path) -> Vec<(String, Dtype, Vec<usize>, blake3::Hash)> {
    let Weights::Stored(stored) = Weights::open(dir, STORED).expect("weights") else { panic!("stored") };
    let all = stored.under(&[""]).expect("tensors");
    all.iter().map(|t| (t.name.to_owned(), t.dtype, t.shape.to_vec(), t.hash())).collect()
}

#[test]
fn a_model_is_the_same_from_either_format() {
    let shards = std::fs::read_dir(pickled("shards")).expect("a folder");
    let shards: Vec<PathBuf> = shards.map(|entry| entry.expect("an entry").path()).collect();
    for (case, files) in [("t5_odd_heads", vec![pickled(SINGLE)]), ("pegasus_odd_heads", shards)] {
        let dir = with_files(case, &files);
        assert_eq!(contents(dir.path()), contents(&golden(case)), "{case}");
        let [new, old] = [dir.path(), &golden(case)].map(|dir| open(dir, STORED));
        let [new_print, old_print] =
            [&new, &old].map(|model| model.fingerprint(Modality::Text, DType::F32).expect("weights"));
        assert_eq!(new_print, old_print, "{case}: rows of one are rows of the other");
        new.check_weights().expect("weights");
        new.load_encoder(Modality::Text, &ReferenceBackend::new()).expect("an encoder");
        new.load_decoder(&ReferenceBackend::new()).expect("a decoder");
        let [new, old] = [new, old].map(|model| model.inventory().expect("an inventory"));
        assert_eq!([new.weights, old.weights], [WeightFormat::Torch, WeightFormat::Safetensors]);
        assert_eq!((new.encoder, new.decoder, new.shared), (old.encoder, old.decoder, old.shared), "{case}");
    }
}

#[test]
fn the_fingerprint_covers_the_file_of_torch() {
    let dir = with_files("t5_odd_heads", &[pickled(SINGLE)]);
    let print = || open(dir.path(), STORED).fingerprint(Modality::Text, DType::F32).expect("weights");
    let before = print();
    let mut file = read(SINGLE);
    let name = "encoder.block.0.layer.0.SelfAttention.q.weight";
    let place = tensors(&file).expect("tensors")[name].range.start;
    file[place] ^= 1;
    std::fs::write(dir.path().join(SINGLE), file).expect("a written file");
    assert_ne!(print(), before);
}

#[test]
fn safetensors_win_where_a_directory_has_both() {
    let dir = with_files("t5_odd_heads", &[golden("t5_odd_heads").join("model.safetensors")]);
    std::fs::write(dir.path().join(SINGLE), LEGACY).expect("a written file");
    std::fs::write(dir.path().join("pytorch_model.bin.index.json"), "{").expect("a written file");
    assert_eq!(contents(dir.path()), contents(&golden("t5_odd_heads")));
}

#[test]
fn rows_of_an_encoder_output_are_read_from_a_tensor_alone() {
    let item = embeddings::join(&read("rows.bin"), &read("grid.bin"));
    let given = rows_of(&item, 3, &Limits::default()).expect("rows");
    assert_eq!((given.n_tokens, given.extent), (4, Extent::Grid { t: 1, h: 2, w: 2 }));
    assert_eq!(given.rows, [0.0, 4.0, 8.0, 1.0, 5.0, 9.0, 2.0, 6.0, 10.0, 3.0, 7.0, 11.0]);
    for (file, expect) in [("odd.bin", "holds a dict, expected a tensor"), ("call.bin", "print")] {
        let refused = rows_of(&embeddings::join(&read(file), &[]), 3, &Limits::default()).expect_err(file);
        assert!(refused.to_string().contains(expect), "{refused}");
    }
    let refused = tensors(&read("rows.bin")).expect_err("no dict");
    assert!(refused.contains("holds a tensor, expected a dict of tensors"), "{refused}");
}

/// The elements of a tensor, in their order.
fn values(file: &[u8], tensor: &TorchTensor) -> Vec<f64> {
    let stored = &file[tensor.range.clone()];
    let bytes = tensor.gathered(stored).unwrap_or_else(|| stored.to_vec());
    let f32 = |bits: u32| f64::from(f32::from_bits(bits));
    match tensor.dtype {
        Dtype::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32(u32::from_le_bytes(*b))).collect(),
        Dtype::BF16 => {
            bytes.as_chunks().0.iter().map(|b| f32(u32::from(u16::from_le_bytes(*b)) << 16)).collect()
        }
        Dtype::F16 => {
            bytes.as_chunks().0.iter().map(|b| f64::from(half::f16::from_le_bytes(*b).to_f32())).collect()
        }
        Dtype::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
        Dtype::I32 => bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        Dtype::I16 => bytes.as_chunks().0.iter().map(|b| i16::from_le_bytes(*b).into()).collect(),
        Dtype::I8 => bytes.iter().map(|b| b.cast_signed().into()).collect(),
        _ => bytes.iter().map(|b| (*b).into()).collect(),
    }
}

#[test]
fn tensors_of_every_type_and_order_are_what_torch_reads() {
    let file = read("odd.bin");
    let found = tensors(&file).expect("tensors");
    let expected: Value = serde_json::from_slice(&read("odd.json")).expect("JSON");
    let expected = expected.as_object().expect("names");
    assert_eq!(found.len(), expected.len(), "{:?}", found.keys());
    for (name, tensor) in &found {
        assert!(expected.contains_key(name), "{name} is not in the file");
        let shape: Vec<usize> = serde_json::from_value(expected[name]["shape"].clone()).expect("a shape");
        let wanted: Vec<f64> = serde_json::from_value(expected[name]["values"].clone()).expect("values");
        assert_eq!(tensor.shape, shape, "{name}");
        assert_eq!(values(&file, tensor), wanted, "{name}");
    }
    let strided: Vec<&str> =
        found.iter().filter(|(_, t)| t.is_strided()).map(|(name, _)| name.as_str()).collect();
    let expected =
        ["channels_last", "columns", "every_other", "one_column", "permuted", "repeated_few", "transposed"];
    assert_eq!(strided, expected, "whatever lies in its order is not copied");
}

#[test]
fn what_is_no_plain_dict_of_tensors_is_refused_by_name() {
    for (name, message) in [
        ("call.bin", "__builtin__.print is none of the functions and classes"),
        ("fp8.bin", "torch._utils._rebuild_tensor_v3 is none of the functions and classes"),
        ("sparse.bin", "torch._utils._rebuild_sparse_tensor is none of the functions and classes"),
        ("nested.bin", "state_dict is a dict, expected a tensor"),
        ("repeated.bin", "tensor repeated: [1099511627776] "),
    ] {
        let dir = with_files("t5_odd_heads", &[]);
        std::fs::copy(pickled(name), dir.path().join(SINGLE)).expect("a copy");
        let error = Weights::open(dir.path(), STORED).expect_err(name).to_string();
        assert!(error.contains(SINGLE) && error.contains(message), "{error}");
    }
}

#[test]
fn a_bare_pickle_is_refused_before_a_worker_starts() {
    let dir = with_files("t5_odd_heads", &[]);
    std::fs::write(dir.path().join(SINGLE), LEGACY).expect("a written file");
    let source = ModelSource { dir: dir.path().to_owned(), name: None, format: STORED, packed: None };
    let error = Model::open(&source).expect("a model").check_weights().expect_err("refused").to_string();
    assert!(error.contains("since version 1.6") && error.contains("save_pretrained(NEW_DIR)"), "{error}");
}

/// A ZIP file with entries as they are, and 32-bit fields.
fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut directory = Vec::new();
    for (name, data) in entries {
        let at = u32::try_from(file.len()).expect("a small file").to_le_bytes();
        let n = u32::try_from(data.len()).expect("a small entry").to_le_bytes();
        let name_len = [u8::try_from(name.len()).expect("a short name"), 0];
        let common = [&[0; 12], n.as_slice(), &n, &name_len, &[0; 2]].concat();
        file.extend([b"PK\x03\x04\x14\0", &common[..], name.as_bytes(), data].concat());
        directory.extend([b"PK\x01\x02\x14\0\x14\0", &common[..], &[0; 10], &at, name.as_bytes()].concat());
    }
    let n = [u8::try_from(entries.len()).expect("few entries"), 0];
    let len = u32::try_from(directory.len()).expect("a small directory").to_le_bytes();
    let at = u32::try_from(file.len()).expect("a small file").to_le_bytes();
    let end = [b"PK\x05\x06\0\0\0\0".as_slice(), &n, &n, &len, &at, &[0; 2]].concat();
    [file, directory, end].concat()
}

/// The error of a file with this pickle and a storage `0` of eight bytes.
fn refusal(pickle: &[u8]) -> String {
    tensors(&zip(&[("m/data.pkl", pickle), ("m/data/0", &[0; 8])])).expect_err("refused")
}

/// A dict with a tensor `x` of 2 f32: offset, shape and strides by opcodes.
fn one_tensor(offset: &[u8], shape: &[u8], strides: &[u8]) -> Vec<u8> {
    let storage = b"((U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x02tQ";
    let start = b"\x80\x02}U\x01xctorch._utils\n_rebuild_tensor_v2\n";
    [start, &storage[..], offset, shape, strides, b"\x89N", b"tRs."].concat()
}

#[test]
fn a_tensor_out_of_its_storage_is_refused_by_name() {
    let whole = one_tensor(b"K\0", b"K\x02\x85", b"K\x01\x85");
    let file = zip(&[("m/data.pkl", &whole), ("m/data/0", &[0; 8])]);
    assert_eq!(tensors(&file).expect("a tensor")["x"].shape, [2]);
    for (pickle, message) in [
        (
            one_tensor(b"K\x01", b"K\x02\x85", b"K\x01\x85"),
            "x: [2] with strides [1] from element 1 is not in",
        ),
        (one_tensor(b"K\0", b"K\x03\x85", b"K\x01\x85"), "is not in a storage of 2"),
        (one_tensor(b"K\0", b"K\x02\x85", b"K\x02\x85"), "is not in a storage of 2"),
        (one_tensor(b"J\xff\xff\xff\xff", b"K\x02\x85", b"K\x01\x85"), "an offset below 0"),
        (one_tensor(b"K\0", b"J\xff\xff\xff\xff\x85", b"K\x01\x85"), "no integer from 0"),
        (one_tensor(b"K\0", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"), "no integer from 0"),
        (one_tensor(b"K\0", b"K\x02K\x01\x86", b"K\x01\x85"), "other numbers of dimensions"),
        (one_tensor(b"K\0", b"K\x02\x85", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85"), "is not in"),
        (
            one_tensor(b"K\0", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x04\x86", b"K\x01K\x01\x86"),
            "is not in",
        ),
        (one_tensor(b"K\0", b"K\x02K\x02\x86", b"K\0K\x01\x86"), "[2, 2] repeats the elements"),
        (one_tensor(b"K\0", b"(K\x01K\x01K\x01K\x01K\x01K\x01K\x01K\x01K\x01t", b")"), "9 dimensions"),
    ] {
        let error = refusal(&pickle);
        assert!(error.contains(message), "{error}: no {message:?}");
    }
    let short = zip(&[("m/data.pkl", &whole), ("m/data/0", &[0; 7])]);
    assert!(tensors(&short).expect_err("refused").contains("has 1 elements, the dict says 2"));
    let none = zip(&[("m/data.pkl", &whole)]);
    assert!(tensors(&none).expect_err("refused").contains("tensor x: its storage 0 is not in the file"));
}

#[test]
fn a_pickle_without_end_meets_a_limit() {
    let remembered: Vec<u8> =
        (0..=1u32 << 20).flat_map(|i| [b"r".as_slice(), &i.to_le_bytes()].concat()).collect();
    let nested = [b")".to_vec(), b"\x85".repeat(1 << 20), b".".to_vec()].concat();
    let long = [b"X".as_slice(), &5000u32.to_le_bytes(), &[b'a'; 5000]].concat();
    for (pickle, message) in [
        (b"\x80\x02".repeat(1 << 22), "more than 4194304 opcodes"),
        (b"N".repeat(20_000), "more than 16384 values on the stack"),
        (b"(".repeat(20_000), "more than 16384 marks"),
        ([b"N".as_slice(), &remembered].concat(), "more than 1048576 values are remembered"),
        (nested, "holds a tuple, expected a dict"),
        (long, "a text of 5000 bytes, at most 4096"),
        (b"X\xff\xff\xff\xffa".to_vec(), "a text of 4294967295 bytes"),
        (b"c".repeat(10_000), "cut or too long"),
        (b"\x8a\xff".to_vec(), "cut"),
        (b"]".to_vec(), "opcode 0x5d, which no dict of tensors needs (byte 0 of the pickle)"),
        (b"\x93.".to_vec(), "opcode 0x93"),
        (b"h\x05".to_vec(), "nothing was remembered as 5"),
        (b"cos\nsystem\nU\x02id\x85R.".to_vec(), "os.system is none of"),
        (b"ctorch\nFloatStorage\n)R.".to_vec(), "a call of Storage(F32) with other arguments"),
        (b"}(K\x01u.".to_vec(), "a key without a value"),
        (b"}(0.".to_vec(), "opcode 0x30"),
        (b"(.".to_vec(), "a value is missing"),
        (b"".to_vec(), "the pickle is cut"),
    ] {
        let error = refusal(&pickle);
        assert!(error.contains(message), "{error}: no {message:?}");
    }
}

#[test]
fn a_container_that_is_not_of_stored_entries_is_refused() {
    let pickle = b"\x80\x02}.".as_slice();
    let entries = [("m/data.pkl", pickle), ("m/byteorder", b"little")];
    assert!(tensors(&zip(&entries)).expect("no tensors").is_empty());
    let central = |file: &[u8]| file.windows(4).position(|w| w == b"PK\x01\x02").expect("a directory");
    let with = |at: usize, value: u8| {
        let mut file = zip(&entries);
        let central = central(&file);
        file[central + at] = value;
        tensors(&file).expect_err("refused")
    };
    for (at, value, message) in [
        (10, 8, "m/data.pkl is compressed"),
        (8, 1, "m/data.pkl is encrypted"),
        (20, 99, "is stored, and of 99 bytes and 4"),
        (42, 1, "is not where the directory says"),
        (45, 255, "is not where the directory says"),
        (46, b'n', "is not where the directory says"),
        (0, 0, "something else than an entry"),
    ] {
        let error = with(at, value);
        assert!(error.contains(message), "{error}: no {message:?}");
    }
    let twice = zip(&[entries[0], entries[0]]);
    assert!(tensors(&twice).expect_err("refused").contains("m/data.pkl is there twice"));
    let big = zip(&[entries[0], ("m/byteorder", b"big")]);
    assert!(tensors(&big).expect_err("refused").contains("not little-endian"));
    let script = zip(&[("m/code/x.py", b"")]);
    assert!(tensors(&script).expect_err("refused").contains("without data.pkl"));
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let file = read("odd.bin");
    for len in 0..file.len() {
        assert!(tensors(&file[..len]).is_err(), "{len} bytes");
    }
}

/// Whatever is read of a file lies in it, and is as large as its shape says.
fn check_sound(file: &[u8]) {
    for (name, tensor) in tensors(file).unwrap_or_default() {
        let stored = file.get(tensor.range.clone()).unwrap_or_else(|| panic!("{name} is out of the file"));
        let n_bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize() / 8;
        assert_eq!(tensor.gathered(stored).map_or(stored.len(), |bytes| bytes.len()), n_bytes, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn changed_files_are_read_or_refused(changes in prop::collection::vec((any::<u16>(), any::<u8>()), 1..6)) {
        let mut file = read("odd.bin");
        for (place, value) in changes {
            let place = usize::from(place) % file.len();
            file[place] = value;
        }
        check_sound(&file);
    }

    #[test]
    fn changed_pickles_are_read_or_refused(
        changes in prop::collection::vec((any::<u16>(), prop::sample::select(b"\x85\x86\x87().0tRQbsuqhNKXU}c\0\x01\xff".to_vec())), 1..4),
    ) {
        let mut file = read("odd.bin");
        let end = file.windows(4).position(|w| w == b"PK\x07\x08").expect("the end of the pickle");
        for (place, value) in changes {
            file[64 + usize::from(place) % (end - 64)] = value;
        }
        check_sound(&file);
    }
}
