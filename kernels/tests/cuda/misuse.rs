//! Misuse that a device forbids: it ends the launch, with the kernel, the block, the thread and the line.

use cudarc::driver::sys::CUresult::{self, *};

use crate::device::{Argument, Device, Shape};

const BYTES: usize = 4;

fn shape(threads: u32) -> Shape {
    Shape { grid: [1, 1, 1], threads, shared_bytes: 0 }
}

/// Launches a kernel and gives the device's error with its cause.
#[track_caller]
fn faults(
    name: &str,
    shape: Shape,
    arguments: impl FnOnce(&Device) -> Vec<Box<dyn Argument>>,
) -> (CUresult, String) {
    let device = Device::of_standin(3);
    let arguments = arguments(&device);
    let arguments: Vec<&dyn Argument> = arguments.iter().map(AsRef::as_ref).collect();
    device.try_launch(&device.stream, name, shape, &arguments).expect("a launch");
    let error = device.stream.synchronize().expect_err("an error of the device");
    let text = device.fault();
    assert!(text.contains(name), "{text}");
    assert!(text.contains("misuse.cu:"), "no line in: {text}");
    // The error stays: nothing works on this device any more.
    assert_eq!(device.stream.synchronize().expect_err("the same error").0, error.0);
    (error.0, text)
}

/// One word for each of 64 threads.
fn words(device: &Device) -> Box<dyn Argument> {
    Box::new(device.upload(&[0_u32; 64]))
}

#[test]
fn threads_at_different_barriers_are_an_error() {
    let (code, text) = faults("misuse_barrier_in_a_branch", shape(64), |d| vec![words(d)]);
    assert_eq!(code, CUDA_ERROR_LAUNCH_FAILED);
    assert!(text.contains("another barrier"), "{text}");
}

#[test]
fn a_thread_that_ends_before_a_barrier_is_an_error() {
    let (code, text) = faults("misuse_exit_before_a_barrier", shape(64), |d| vec![words(d)]);
    assert_eq!(code, CUDA_ERROR_LAUNCH_FAILED);
    assert!(text.contains("63 of 64 threads wait at a barrier, 1 have ended"), "{text}");
}

#[test]
fn a_shuffle_without_all_lanes_is_an_error() {
    let (code, text) = faults("misuse_lane_left_out_of_a_shuffle", shape(64), |d| vec![words(d)]);
    assert_eq!(code, CUDA_ERROR_LAUNCH_FAILED);
    assert!(
        text.contains("not all come to the operation") || text.contains("is not there any more"),
        "{text}"
    );
}

#[test]
fn addresses_outside_of_allocations_are_errors() {
    let (code, text) = faults("misuse_read_past_the_end", shape(64), |d| vec![words(d), words(d)]);
    assert_eq!(code, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(
        text.contains("thread (63, 0, 0)") && text.contains("byte 256 of an allocation of 256 bytes"),
        "{text}"
    );
    let (code, _) = faults("misuse_write_past_the_end", shape(64), |d| vec![words(d)]);
    assert_eq!(code, CUDA_ERROR_ILLEGAL_ADDRESS);
    let (code, _) = faults("misuse_write_past_the_end", shape(64), |d| {
        let freed = d.upload(&[0_u32; 65]);
        let address = freed.bytes(&d.stream);
        drop(freed);
        vec![Box::new(u64::from_ne_bytes(address.try_into().expect("eight bytes")))]
    });
    assert_eq!(code, CUDA_ERROR_ILLEGAL_ADDRESS);
    // Memory of the host.
    let host = Box::leak(Box::new([0_u32; 65])).as_mut_ptr() as u64;
    let (code, _) = faults("misuse_write_past_the_end", shape(64), |_| vec![Box::new(host)]);
    assert_eq!(code, CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn a_vector_at_an_odd_address_is_an_error() {
    let (code, text) = faults("misuse_vector_at_an_odd_address", shape(64), |d| {
        vec![words(d), Box::new(d.upload(&[0_f32; 300]))]
    });
    assert_eq!(code, CUDA_ERROR_MISALIGNED_ADDRESS);
    assert!(text.contains("reads 16 bytes"), "{text}");
}

#[test]
fn arrays_of_a_block_and_of_a_thread_have_ends() {
    let (code, _) = faults("misuse_past_an_array_of_the_block", shape(64), |d| vec![words(d)]);
    assert_eq!(code, CUDA_ERROR_ILLEGAL_ADDRESS);
    let (code, text) = faults("misuse_array_of_a_thread", shape(64), |d| vec![words(d), Box::new(9_u32)]);
    assert_eq!(code, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(text.contains("index 8"), "{text}");
}

#[test]
fn accesses_without_a_barrier_between_are_races() {
    for how in [0_u32, 1] {
        let (code, text) = faults("misuse_neighbour", shape(64), |d| vec![words(d), Box::new(how)]);
        assert_eq!(code, CUDA_ERROR_LAUNCH_FAILED);
        assert!(text.contains("race: "), "{text}");
    }
    let (_, text) = faults("misuse_tile_written_too_early", shape(64), |d| vec![words(d)]);
    assert!(text.contains("race: "), "{text}");
    let (_, text) =
        faults("misuse_blocks_write_one_place", Shape { grid: [2, 1, 1], ..shape(64) }, |d| vec![words(d)]);
    assert!(text.contains("a thread of another block"), "{text}");
    let (_, text) = faults("misuse_atomics_beside_a_store", shape(64), |d| vec![words(d)]);
    assert!(text.contains("race: "), "{text}");
}

#[test]
fn a_copy_is_there_when_it_was_waited_for_and_not_before() {
    for how in [0_u32, 1] {
        let (_, text) = faults("misuse_copy", shape(32), |d| {
            vec![words(d), Box::new(d.upload(&[0_f32; 128])), Box::new(how)]
        });
        assert!(text.contains("race: "), "{text}");
    }
}

#[test]
fn what_is_right_is_let_through() {
    let device = Device::of_standin(4);
    let out = device.upload(&[0_u32; 64]);
    device.launch("allowed_atomics", Shape { grid: [3, 1, 1], ..shape(64) }, &[&out]);
    assert_eq!(device.download(&out, 2), [96, 96]);
    drop(out);
    let out = device.poisoned::<f32>(64);
    device.launch("misuse_neighbour", shape(64), &[&out, &2_u32]);
    assert_eq!(device.download(&out, 64), [1.0; 64]);
    let values: Vec<f32> = (0..128).map(|i| i as f32).collect();
    device.launch("misuse_copy", shape(32), &[&out, &device.upload(&values), &2_u32]);
    assert_eq!(device.download(&out, 2), [127.0, 126.0]);
    drop(out);
    device.finish();
}

#[test]
fn memory_that_was_not_written_is_not_a_number() {
    let device = Device::of_standin(5);
    let (out, zero, unwritten) =
        (device.poisoned::<f32>(32), device.upload(&[0_f32]), device.poisoned::<f32>(1));
    device.launch("misuse_unwritten", shape(32), &[&out, &zero]);
    assert!(device.download(&out, 32).iter().all(|x| x.is_nan()), "shared memory");
    assert!(device.download(&unwritten, 1)[0].is_nan(), "memory of the device");
}

/// The host cannot read what is on the device: a process that tries ends with a signal.
#[test]
fn the_host_does_not_reach_memory_of_the_device() {
    let device = Device::of_standin(6);
    let slice = device.upload(&[1_u32; 64]);
    let address = u64::from_ne_bytes(slice.bytes(&device.stream).try_into().expect("eight bytes"));
    device.stream.synchronize().expect("an upload");
    assert!(!is_readable(address), "memory of the device is open to the host");
    let host = [7_u32; 64];
    assert!(is_readable(host.as_ptr() as u64), "memory of the host is readable");
    assert_eq!(device.download(&slice, 1), [1]);
}

/// Asks the kernel to read an address: a pipe refuses what this process cannot.
fn is_readable(address: u64) -> bool {
    let (_reader, writer) = std::io::pipe().expect("a pipe");
    // SAFETY: the slice is only handed to the kernel, which fails with EFAULT where it cannot read.
    let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, BYTES) };
    std::io::Write::write(&mut &writer, bytes).is_ok()
}

#[test]
fn fragments_lie_as_the_ptx_isa_says() {
    let device = Device::of_standin(7);
    // A fragment of a lane: rows g and g + 8, columns 2 t and 2 t + 8 onwards, by the figures of the PTX ISA.
    let (a, b): (Vec<f32>, Vec<f32>) = (
        (0..256).map(|i| (i * 7 % 13) as f32 - 6.0).collect(),
        (0..128).map(|i| (i * 5 % 11) as f32 - 5.0).collect(),
    );
    let half = |v: f32| u32::from(half::bf16::from_f32(v).to_bits());
    let (mut fa, mut fb) = (Vec::new(), Vec::new());
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for [row, column] in [[g, 2 * t], [g + 8, 2 * t], [g, 2 * t + 8], [g + 8, 2 * t + 8]] {
            fa.push(half(a[row * 16 + column]) | half(a[row * 16 + column + 1]) << 16);
        }
        for k in [2 * t, 2 * t + 8] {
            fb.push(half(b[k * 8 + g]) | half(b[(k + 1) * 8 + g]) << 16);
        }
    }
    let d = device.poisoned::<f32>(128);
    device.launch("fragments_bf16", shape(32), &[&d, &device.upload(&fa), &device.upload(&fb)]);
    let d = device.download(&d, 128);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for (i, [row, column]) in
            [[g, 2 * t], [g, 2 * t + 1], [g + 8, 2 * t], [g + 8, 2 * t + 1]].into_iter().enumerate()
        {
            let expect: f32 = (0..16).map(|k| a[row * 16 + k] * b[k * 8 + column]).sum();
            assert_eq!(d[lane * 4 + i], expect);
        }
    }
}

#[test]
fn fragments_of_bytes_lie_as_the_ptx_isa_says() {
    let device = Device::of_standin(8);
    let (a, b): (Vec<i8>, Vec<i8>) = (
        (0..512).map(|i| (i * 37 % 251) as u8 as i8).collect(),
        (0..256).map(|i| (i * 91 % 241) as u8 as i8).collect(),
    );
    let word = |bytes: [i8; 4]| u32::from_le_bytes(bytes.map(i8::cast_unsigned));
    let (mut fa, mut fb) = (Vec::new(), Vec::new());
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for [row, column] in [[g, 4 * t], [g + 8, 4 * t], [g, 4 * t + 16], [g + 8, 4 * t + 16]] {
            fa.push(word(std::array::from_fn(|i| a[row * 32 + column + i])));
        }
        for k in [4 * t, 4 * t + 16] {
            fb.push(word(std::array::from_fn(|i| b[(k + i) * 8 + g])));
        }
    }
    let d = device.poisoned::<u32>(128);
    device.launch("fragments_s8", shape(32), &[&d, &device.upload(&fa), &device.upload(&fb)]);
    let d = device.download(&d, 128);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for (i, [row, column]) in
            [[g, 2 * t], [g, 2 * t + 1], [g + 8, 2 * t], [g + 8, 2 * t + 1]].into_iter().enumerate()
        {
            let expect: i32 =
                (0..32).map(|k| i32::from(a[row * 32 + k]) * i32::from(b[k * 8 + column])).sum();
            assert_eq!(d[lane * 4 + i], expect.cast_unsigned());
        }
    }
}

#[test]
fn matrices_are_loaded_as_the_ptx_isa_says() {
    let device = Device::of_standin(9);
    let bits: Vec<u16> = (0..256).collect();
    for transposed in [0_u32, 1] {
        let out = device.poisoned::<u32>(128);
        device.launch("fragments_loaded", shape(32), &[&out, &device.upload(&bits), &transposed]);
        let out = device.download(&out, 128);
        for lane in 0..32_usize {
            for matrix in 0..4 {
                let (down, across) =
                    (if matrix & 1 == 0 { 0 } else { 8 }, if matrix & 2 == 0 { 0 } else { 8 });
                let at = |row: usize, column: usize| u32::from(bits[(down + row) * 16 + across + column]);
                let (row, column) = (lane / 4, lane % 4 * 2);
                let [low, high] =
                    [0, 1].map(|j| if transposed == 1 { at(column + j, row) } else { at(row, column + j) });
                assert_eq!(out[lane * 4 + matrix], low | high << 16);
            }
        }
    }
}

#[test]
fn more_threads_than_a_kernel_has_are_refused() {
    let device = Device::of_standin(10);
    let out = device.upload(&[0_u32; 64]);
    let refused = device.try_launch(&device.stream, "allowed_atomics", shape(65), &[&out]);
    assert_eq!(refused, Err(CUDA_ERROR_INVALID_VALUE));
    assert_eq!(device.download(&out, 2), [0, 0]);
}
