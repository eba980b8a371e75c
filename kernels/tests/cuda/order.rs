//! Streams, events, captures and graphs on the stand-in: what the driver orders is ordered, and nothing else is.

use cudarc::driver::sys::CUresult::*;
use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUresult};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, result};

use crate::device::{Device, Shape};
use triptych_cuda_standin::{Left, Standin};

const SHAPE: Shape = Shape { grid: [1, 1, 1], threads: 32, shared_bytes: 0 };
/// Seeds of each test of order: of so many, at least one shows what may happen.
const SEEDS: std::ops::Range<u64> = 0..24;

fn set(device: &Device, stream: &CudaStream, x: &CudaSlice<u32>, value: u32) {
    device.try_launch(stream, "order_set", SHAPE, &[x, &value]).expect("a launch");
}

fn add_one(device: &Device, stream: &CudaStream, [y, x]: [&CudaSlice<u32>; 2]) {
    device.try_launch(stream, "order_add_one", SHAPE, &[y, x]).expect("a launch");
}

fn zeros(device: &Device) -> CudaSlice<u32> {
    let x = device.upload(&[0_u32; 32]);
    device.stream.synchronize().expect("an upload");
    x
}

/// The value that a second stream reads of one that the first wrote, with or without an event between.
fn read_on_another_stream(seed: u64, with_event: bool) -> u32 {
    let device = Device::of_standin(seed);
    let other = device.context.new_stream().expect("a stream");
    let (x, y) = (zeros(&device), zeros(&device));
    set(&device, &device.stream, &x, 5);
    let event = device.context.new_event(None).expect("an event");
    event.record(&device.stream).expect("a record");
    if with_event {
        other.wait(&event).expect("a wait");
    }
    add_one(&device, &other, [&y, &x]);
    other.synchronize().expect("an end");
    let seen = device.download(&y, 1)[0];
    drop((x, y, event, other));
    device.finish();
    seen
}

#[test]
fn a_missing_event_is_a_wrong_answer() {
    assert!(SEEDS.clone().all(|seed| read_on_another_stream(seed, true) == 6));
    let seen: Vec<u32> = SEEDS.map(|seed| read_on_another_stream(seed, false)).collect();
    assert!(seen.contains(&6) && seen.contains(&1), "{seen:?}");
    // A seed has one order.
    assert_eq!(read_on_another_stream(3, false), seen[3]);
}

#[test]
fn a_pinned_buffer_that_is_written_too_early_is_a_wrong_answer() {
    let uploaded = |seed: u64, waits: bool| {
        let device = Device::of_standin(seed);
        let mut x = zeros(&device);
        // SAFETY: the buffer is written before it is read.
        let mut buffer = unsafe { device.context.alloc_pinned::<u32>(32) }.expect("a buffer");
        buffer.as_mut_slice().expect("memory").fill(1);
        device.stream.memcpy_htod(&buffer, &mut x).expect("an upload");
        if waits {
            device.stream.synchronize().expect("an end");
        }
        // SAFETY: this is the mistake that the test is about; nothing else reads the buffer.
        unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr().expect("memory").cast_mut(), 32) }.fill(2);
        device.download(&x, 1)[0]
    };
    assert!(SEEDS.clone().all(|seed| uploaded(seed, true) == 1));
    assert!(SEEDS.map(|seed| uploaded(seed, false)).any(|seen| seen == 2));
}

fn captured(device: &Device, work: impl FnOnce(&CudaStream)) -> Result<cudarc::driver::CudaGraph, CUresult> {
    device.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(|e| e.0)?;
    work(&device.stream);
    let graph = device.stream.end_capture(CUgraphInstantiate_flags(0)).map_err(|e| e.0)?;
    Ok(graph.expect("a graph"))
}

#[test]
fn a_graph_runs_when_it_is_launched_with_what_memory_holds_then() {
    for seed in SEEDS {
        let device = Device::of_standin(seed);
        let (x, y) = (zeros(&device), zeros(&device));
        let graph = captured(&device, |stream| add_one(&device, stream, [&y, &x])).expect("a graph");
        assert_eq!(device.download(&y, 1), [0], "nothing runs while it is captured");
        for value in [7, 70] {
            set(&device, &device.stream, &x, value);
            graph.launch().expect("a launch");
            assert_eq!(device.download(&y, 1), [value + 1]);
        }
        drop((graph, x, y));
        device.finish();
    }
}

#[test]
fn streams_fork_and_join_in_a_capture() {
    for seed in SEEDS {
        let device = Device::of_standin(seed);
        let other = device.context.new_stream().expect("a stream");
        let [x, y, z] = [(); 3].map(|()| zeros(&device));
        let [fork, join] = [(); 2].map(|()| device.context.new_event(None).expect("an event"));
        let graph = captured(&device, |stream| {
            set(&device, stream, &x, 3);
            fork.record(stream).expect("a record");
            other.wait(&fork).expect("a wait");
            add_one(&device, &other, [&y, &x]);
            join.record(&other).expect("a record");
            stream.wait(&join).expect("a wait");
            add_one(&device, stream, [&z, &y]);
        })
        .expect("a graph");
        graph.launch().expect("a launch");
        assert_eq!(device.download(&z, 1), [5]);
    }
}

#[test]
fn work_that_does_not_join_spoils_a_capture() {
    let device = Device::of_standin(1);
    let other = device.context.new_stream().expect("a stream");
    let x = zeros(&device);
    let fork = device.context.new_event(None).expect("an event");
    let graph = captured(&device, |stream| {
        set(&device, stream, &x, 3);
        fork.record(stream).expect("a record");
        other.wait(&fork).expect("a wait");
        set(&device, &other, &x, 4);
    });
    assert_eq!(graph.err(), Some(CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
}

#[test]
fn what_a_capture_forbids_has_the_drivers_errors() {
    type Call = fn(&Device) -> Result<(), CUresult>;
    fn code<T>(result: Result<T, cudarc::driver::DriverError>) -> Result<(), CUresult> {
        result.map(drop).map_err(|error| error.0)
    }
    let calls: [(&str, CUresult, Call); 7] = [
        ("synchronize", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |d| code(d.stream.synchronize())),
        ("upload of pageable memory", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |d| {
            // SAFETY: one word is allocated and written.
            let mut x = unsafe { d.context.default_stream().alloc::<u32>(1) }.map_err(|e| e.0)?;
            code(d.stream.memcpy_htod(&[1_u32], &mut x))
        }),
        ("allocation on the stream", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |d| {
            // SAFETY: nothing reads the memory.
            code(unsafe { d.stream.alloc::<u32>(1) })
        }),
        ("synchronous allocation", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |_| {
            // SAFETY: nothing reads the memory.
            code(unsafe { result::malloc_sync(4) })
        }),
        ("pinned allocation", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |d| {
            // SAFETY: nothing reads the memory.
            code(unsafe { d.context.alloc_pinned::<u32>(1) })
        }),
        ("end of the context's work", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |d| {
            code(d.context.synchronize())
        }),
        ("an event from outside", CUDA_ERROR_STREAM_CAPTURE_ISOLATION, |d| {
            let other = d.context.new_stream().map_err(|e| e.0)?;
            let event = d.context.new_event(None).map_err(|e| e.0)?;
            code(event.record(&other))?;
            code(d.stream.wait(&event))
        }),
    ];
    for (what, expect, call) in calls {
        let device = Device::of_standin(2);
        device.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("a capture");
        assert_eq!(call(&device), Err(expect), "{what}");
        let end = device.stream.end_capture(CUgraphInstantiate_flags(0)).map(drop).map_err(|e| e.0);
        assert_eq!(end, Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), "{what}");
        // The stream is as it was before.
        assert_eq!(device.stream.synchronize(), Ok(()), "{what}");
    }
    let device = Device::of_standin(2);
    let refused = device.context.default_stream().begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    assert_eq!(refused.map_err(|e| e.0), Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
}

#[test]
fn a_graph_does_not_keep_its_memory() {
    let device = Device::of_standin(4);
    let x = zeros(&device);
    let graph = captured(&device, |stream| set(&device, stream, &x, 1)).expect("a graph");
    drop(x);
    graph.launch().expect("a launch");
    assert_eq!(device.stream.synchronize().map_err(|e| e.0), Err(CUDA_ERROR_ILLEGAL_ADDRESS));
    assert!(device.fault().contains("order_set"), "{}", device.fault());
}

#[test]
fn an_update_takes_new_arguments_and_no_new_nodes() {
    let device = Device::of_standin(5);
    let x = zeros(&device);
    let graph = captured(&device, |stream| set(&device, stream, &x, 1)).expect("a graph");
    let with = |work: &dyn Fn(&CudaStream)| {
        device.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("a capture");
        work(&device.stream);
        // SAFETY: the stream captures, and the graph is destroyed below.
        let fresh = unsafe { result::stream::end_capture(device.stream.cu_stream()) }.expect("a graph");
        let mut info = std::mem::MaybeUninit::uninit();
        // SAFETY: both are graphs of this device.
        let code = unsafe { sys::cuGraphExecUpdate_v2(graph.cu_graph_exec(), fresh, info.as_mut_ptr()) };
        // SAFETY: nothing uses the graph afterwards.
        unsafe { result::graph::destroy(fresh) }.expect("an end");
        code
    };
    assert_eq!(with(&|stream| set(&device, stream, &x, 9)), CUDA_SUCCESS);
    graph.launch().expect("a launch");
    assert_eq!(device.download(&x, 1), [9]);
    let two = with(&|stream| {
        set(&device, stream, &x, 1);
        set(&device, stream, &x, 2);
    });
    assert_eq!(two, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
}

#[test]
fn a_call_fails_when_a_test_asks_for_it() {
    let device = Device::of_standin(6);
    Standin::get().fail(device.ordinal, "cuMemAllocAsync", 2, 2);
    // SAFETY: nothing reads the memory.
    let got: Vec<bool> = (0..3).map(|_| unsafe { device.stream.alloc::<u32>(1) }.is_ok()).collect();
    assert_eq!(got, [true, false, true]);
    assert_eq!(Standin::get().calls(device.ordinal, "cuMemAllocAsync"), 3);
    device.finish();
}

#[test]
fn memory_ends_and_comes_back() {
    let device = Device::of_standin(7);
    let (_, total) = device.context.mem_get_info().expect("memory");
    // SAFETY: nothing reads the memory.
    let much = unsafe { device.stream.alloc::<u8>(total + 1) };
    assert_eq!(much.map(drop).map_err(|e| e.0), Err(CUDA_ERROR_OUT_OF_MEMORY));
    let some = device.poisoned::<u8>(1 << 20);
    assert_eq!(device.context.mem_get_info().expect("memory"), (total - (1 << 20), total));
    drop(some);
    device.finish();
}

#[test]
fn what_is_not_given_back_is_counted() {
    let device = Device::of_standin(8);
    let ordinal = device.ordinal;
    // The allocation holds its stream.
    std::mem::forget((device.upload(&[1_u32]), device.context.new_event(None).expect("an event")));
    device.stream.synchronize().expect("an end");
    drop(device);
    assert_eq!(
        Standin::get().left(ordinal),
        Left { allocations: 1, streams: 1, events: 1, ..Left::default() }
    );
}

#[test]
fn a_context_of_another_device_does_not_see_this_ones_memory() {
    let (one, two) = (Device::of_standin(9), Device::of_standin(9));
    let x = zeros(&one);
    two.context.bind_to_thread().expect("a context");
    set(&two, &two.stream, &x, 1);
    assert_eq!(two.stream.synchronize().map_err(|e| e.0), Err(CUDA_ERROR_ILLEGAL_ADDRESS));
    assert!(CudaContext::device_count().expect("devices") > 1);
    assert_eq!(one.download(&x, 1), [0]);
}
